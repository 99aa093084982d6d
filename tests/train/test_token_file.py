"""Token files: what is written is read, the name appears only with the whole content, damage is named."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyfast
from pyfast.train.token_file import HEADER_BYTES, MAGIC, TokenWriter, open_token_file, verify_token_file
from pyfast.train.tokenizer import ByteTokenizer


def tokenizer(vocab):
    return SimpleNamespace(name="toy", vocab_size=vocab, end_token=0, fingerprint="f" * 64)


def write_small(path, **options):
    with TokenWriter(path, ByteTokenizer(), **options) as writer:
        writer.add(np.array([1, 2, 256, 3, 256]), np.array([3, 5]))
    return path


@settings(max_examples=50, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([5, 65536, 65537, 2**32]), masked=st.booleans())
def test_blocks_come_back_as_one_stream(tmp_path_factory, data, vocab, masked):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    total = sum(lengths)
    ids = np.array(data.draw(st.lists(st.integers(0, vocab - 1), min_size=total, max_size=total)))
    mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)), dtype=np.uint8)
    ends = np.cumsum(lengths)
    cuts = sorted(data.draw(st.sets(st.integers(0, total), max_size=4)) | {0, total})
    path = tmp_path_factory.mktemp("tokens") / "t"
    with TokenWriter(path, tokenizer(vocab), mask=masked) as writer:
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            inside = ends[(ends > low) & (ends <= high)] - low
            writer.add(ids[low:high], inside, mask[low:high] if masked else None)
    tokens = open_token_file(path).tokens
    assert tokens.ids.dtype == (np.uint16 if vocab <= 65536 else np.uint32)
    assert tokens.ids.tolist() == ids.tolist()
    assert tokens.offsets.tolist() == [0, *ends.tolist()]
    assert (tokens.mask is None) != masked and (not masked or tokens.mask.tolist() == mask.tolist())
    firsts = {0, *ends.tolist()}
    assert tokens.labels == sum(i not in firsts and (not masked or mask[i] == 1) for i in range(total))
    assert tokens.largest == ids.max()
    verify_token_file(path)


@pytest.mark.parametrize(("vocab", "dtype", "largest"), [(65536, "uint16", 65535), (65537, "uint32", 65536)])
def test_the_largest_id_fits(tmp_path, vocab, dtype, largest):
    with TokenWriter(tmp_path / "t", tokenizer(vocab)) as writer:
        writer.add(np.array([largest, 0]), np.array([2]))
    file = open_token_file(tmp_path / "t")
    assert file.header["dtype"] == dtype and file.tokens.ids.tolist() == [largest, 0]


def test_the_format_is_the_documented_one(tmp_path):
    """Read with the standard library alone, after docs/data.md."""
    raw = write_small(tmp_path / "t").read_bytes()
    assert raw[:8] == MAGIC == b"PYFTOKEN"
    header = json.loads(raw[16 : 16 + int.from_bytes(raw[8:16], "little")])
    assert (header["version"], header["dtype"], header["tokens"], header["documents"]) == (1, "uint16", 5, 2)
    assert (header["vocab"], header["end_token"], header["largest_token"], header["labels"]) == (257, 256, 256, 3)
    assert (header["tokenizer"], header["fingerprint"], header["mask"]) == ("byte", ByteTokenizer.fingerprint, False)
    assert np.frombuffer(raw, "<u2", 5, 4096).tolist() == [1, 2, 256, 3, 256]
    assert np.frombuffer(raw, "<u8", 3, 4096 + 64).tolist() == [0, 3, 5]
    assert len(raw) == 4096 + 64 + 24


def test_an_existing_file_is_kept_unless_told(tmp_path):
    path = tmp_path / "t"
    path.write_text("precious")
    with pytest.raises(ValueError, match="exists"):
        TokenWriter(path, ByteTokenizer())
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["t"]
    write_small(path, overwrite=True)
    assert open_token_file(path).tokens.ids.size == 5


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(ValueError, match="exists"), TokenWriter(path, ByteTokenizer()) as writer:
        writer.add(np.array([1]), np.array([1]))
        path.write_text("precious")
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["t"]


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "t", ByteTokenizer()) as writer:
        writer.add(np.array([1]), np.array([1]))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_no_half_file_under_the_name(tmp_path):
    write_small(tmp_path / "t")
    before = (tmp_path / "t").read_bytes()
    script = (
        "import sys, time, numpy as np\n"
        "from pyfast.train.token_file import TokenWriter\n"
        "from pyfast.train.tokenizer import ByteTokenizer\n"
        "writer = TokenWriter(sys.argv[1], ByteTokenizer(), overwrite=True)\n"
        "writer.add(np.zeros(1 << 20, int), np.array([1 << 20]))\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "t")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(pyfast.__file__).parents[1])},
    )
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert (tmp_path / "t").read_bytes() == before
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["t"]


@pytest.mark.parametrize(
    ("ids", "ends", "message"),
    [
        ([1, 257], [2], "vocabulary is 0 .. 256"),
        ([-1], [1], "vocabulary"),
        ([1, 2], [0, 2], "ends must increase"),
        ([1, 2], [2, 2], "ends must increase"),
        ([1, 2], [3], "ends must increase"),
        ([1, 2], [1], "last document has no end"),
        ([], [], "no tokens"),
    ],
)
def test_bad_blocks_are_refused(tmp_path, ids, ends, message):
    with pytest.raises(ValueError, match=message), TokenWriter(tmp_path / "t", ByteTokenizer()) as writer:
        writer.add(np.array(ids, dtype=np.int64), np.array(ends))
    assert os.listdir(tmp_path) == []


def test_bad_masks_are_refused(tmp_path):
    one = np.array([1])
    for masked, mask in ((True, None), (False, one), (True, np.array([2])), (True, np.array([1, 1]))):
        with (
            pytest.raises(ValueError, match="mask"),
            TokenWriter(tmp_path / "t", ByteTokenizer(), mask=masked) as writer,
        ):
            writer.add(one, one, mask)


def test_bad_outputs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="directory does not exist"):
        TokenWriter(tmp_path / "no" / "t", ByteTokenizer())
    with pytest.raises(ValueError, match="is a directory"):
        TokenWriter(tmp_path, ByteTokenizer(), overwrite=True)


def patch_header(raw, **changes):
    header = json.loads(raw[16 : 16 + int.from_bytes(raw[8:16], "little")]) | changes
    text = json.dumps(header).encode()
    return raw[:8] + len(text).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 16) + raw[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"x" + raw[1:], "not a token file"),
        (lambda raw: b"", "not a token file"),
        (lambda raw: raw[:100], "truncated within its header"),
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw + b"x", "longer"),
        (lambda raw: raw[:20] + b"\xff" + raw[21:], "damaged header"),
        (lambda raw: patch_header(raw, version=2), "version 2"),
        (lambda raw: patch_header(raw, dtype="int8"), "dtype"),
        (lambda raw: patch_header(raw, tokens="5"), "tokens is '5'"),
        (lambda raw: patch_header(raw, tokens=0), "nothing in it"),
        (lambda raw: patch_header(raw, documents=-1), "documents is -1"),
        (lambda raw: raw[:-8] + (4).to_bytes(8, "little"), "offsets"),
        (lambda raw: raw[:-16] + (9).to_bytes(8, "little") + raw[-8:], "offsets"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    path = write_small(tmp_path / "t")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        open_token_file(path)


def test_verify_sees_one_changed_token(tmp_path):
    path = write_small(tmp_path / "t")
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES] ^= 1
    path.write_bytes(raw)
    assert open_token_file(path).tokens.ids[0] == 0
    with pytest.raises(ValueError, match="does not match its header"):
        verify_token_file(path)


def test_a_file_larger_than_memory_opens(tmp_path):
    """A sparse file of 8 GiB: opening maps it, and reads the header and the offsets only."""
    path = write_small(tmp_path / "t")
    count = 1 << 32
    raw = patch_header(path.read_bytes(), tokens=count, documents=1)
    with open(path, "wb") as file:
        file.write(raw[:HEADER_BYTES])
        file.seek(HEADER_BYTES + 2 * count)
        file.write(np.array([0, count], "<u8").tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert open_token_file(path).tokens.ids[-1] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
