"""A flat stretch of a tensor as rectangles of it: every stretch of small shapes."""

from __future__ import annotations

import pytest
import torch

from pyfast.nn.layout import Layout
from pyfast.parallel.flat_part import FlatPart, flat_boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_tile_the_stretch_exactly_and_are_few(shape):
    count = torch.Size(shape).numel()
    numbers = torch.arange(count).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            part = FlatPart(numbers.view(-1)[start:stop].clone(), start, shape, Layout(shape))
            boxes = part.boxes()
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            seen = torch.zeros(shape, dtype=torch.int64)
            for box, values in boxes:
                assert torch.equal(values, numbers[box]), (start, stop, box)
                seen[box] += 1
            assert torch.equal(seen, ((numbers >= start) & (numbers < stop)).long())
            assert torch.equal(part.of(numbers), part.tensor)


def test_a_box_writes_through_to_the_buffer():
    buffer = torch.zeros(20)
    part = FlatPart(buffer[4:11], 2, (3, 4), Layout((3, 4)))
    for _, values in part.boxes():
        values.fill_(1.0)
    assert torch.equal(buffer, torch.tensor([0.0] * 4 + [1.0] * 7 + [0.0] * 9))


def test_nothing_is_no_box():
    assert flat_boxes((3, 4), 5, 5) == [] and flat_boxes((0, 4), 0, 0) == []
