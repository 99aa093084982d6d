"""The order in which rows are visited: a seeded permutation per epoch that needs no memory.

A Feistel network over just enough bits to count the rows, walked until it lands inside them, is a permutation of them
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Any entry is computed on its own, so resuming at any
step costs nothing, and the order depends on no library's random generator.
"""

from __future__ import annotations

import hashlib

import numpy as np

_SHIFT = np.uint64(33)
_MULTIPLY_1 = np.uint64(0xFF51AFD7ED558CCD)  # the finaliser of MurmurHash3
_MULTIPLY_2 = np.uint64(0xC4CEB9FE1A85EC53)


def row_at(index: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Rows at places `index` (int64 [n]) of the endless order: epoch after epoch, each a new shuffle of 0 .. rows -
    1.
    """
    epoch, place = np.divmod(np.asarray(index, dtype=np.int64), rows)
    result = np.empty_like(place)
    for number in np.unique(epoch):
        chosen = epoch == number
        result[chosen] = permute(place[chosen], rows, seed, int(number))
    return result


def permute(place: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Where places 0 .. rows - 1 (int64 [n]) go in the shuffle of (seed, epoch)."""
    key = hashlib.blake2b(f"{seed} {epoch} {rows}".encode(), digest_size=64).digest()
    keys = np.frombuffer(key, dtype="<u8")  # one for each round
    bits = max(2, (rows - 1).bit_length())
    value = _feistel(place.astype(np.uint64), keys, bits)
    outside = value >= rows
    while outside.any():  # fewer than half of the values, so about two turns
        value[outside] = _feistel(value[outside], keys, bits)
        outside = value >= rows
    return value.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """A bijection of `bits`-bit numbers: each round changes one half by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    masks = (np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1))
    high, low = value >> low_bits, value & masks[1]
    for i in range(0, len(keys), 2):
        high = high ^ (_hash(low ^ keys[i]) & masks[0])
        low = low ^ (_hash(high ^ keys[i + 1]) & masks[1])
    return high << low_bits | low


def _hash(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> _SHIFT)) * _MULTIPLY_1
    x = (x ^ (x >> _SHIFT)) * _MULTIPLY_2
    return x ^ (x >> _SHIFT)
