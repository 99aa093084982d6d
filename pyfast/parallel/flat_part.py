"""A stretch of a tensor's elements in row-major order: what a rank has of a tensor that lies in a shared-out buffer.

Such a stretch is no rectangle of the tensor, but a few: a part of the first row, whole rows, a part of the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pyfast.nn.layout import Layout

Slices = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class FlatPart:
    """Elements start .. start + tensor.numel() of a tensor of `shape`, row-major; none when this rank holds none of it.

    Attributes:
        tensor: [n], a view into the flat buffer, which it writes through to.
        start: number of elements before it.
        shape: of the whole tensor as one tensor-parallel rank has it.
        layout: how the tensor of `shape` is cut out of the unsharded one.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    layout: Layout

    @property
    def dtype(self):
        return self.tensor.dtype

    def boxes(self) -> list[tuple[Slices, Tensor]]:
        """The rectangles of the tensor that the stretch consists of, each with its elements shaped like it (views)."""
        return [
            (box, self.tensor[begin - self.start : end - self.start].view([s.stop - s.start for s in box]))
            for box, begin, end in flat_boxes(self.shape, self.start, self.start + self.tensor.numel())
        ]

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of another contiguous tensor of `shape`, [n]: a view."""
        return whole.view(-1)[self.start : self.start + self.tensor.numel()]


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Slices, int, int]]:
    """(box, first element, end) of the rectangles that elements start .. stop of a tensor of `shape` fill, in order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [(tuple(slice(start, stop) for _ in shape), start, stop)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    inside = tuple(slice(0, length) for length in shape[1:])
    if first > last:  # begins and ends within one row
        return _in_row(shape, last, start, stop)
    boxes = _in_row(shape, first - 1, start, first * row)
    if last > first:
        boxes.append(((slice(first, last), *inside), first * row, last * row))
    return boxes + _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[tuple[Slices, int, int]]:
    begin = index * math.prod(shape[1:])
    return [
        ((slice(index, index + 1), *box), begin + low, begin + high)
        for box, low, high in flat_boxes(shape[1:], start - begin, stop - begin)
    ]
