"""A vector with named slots; what every worker must know is added up in one, exactly, even in float32."""

from __future__ import annotations

import torch

from carrywave.step.stats import Slots, joined, split, total


def test_slots_are_views_of_their_vector() -> None:
    slots = Slots(loss=(), votes=(2,), marks=(3, 2), none=(0,))
    vector = torch.arange(9.0)
    parts = slots.parts(vector)
    assert slots.size == 9
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"loss": (), "votes": (2,), "marks": (3, 2), "none": (0,)}
    parts["votes"].add_(1)
    assert vector.tolist()[:4] == [0.0, 2.0, 3.0, 3.0]


def test_whole_numbers_in_two_parts_are_exact_in_float32() -> None:
    numbers = torch.tensor([0.0, 1.0, 123456789.0, 2.0**40 - 1, 7.25], dtype=torch.float64)
    parts = split(numbers).to(torch.float32)
    assert joined(parts).tolist() == numbers.tolist()
    assert joined(parts + parts).tolist() == (2 * numbers).tolist()


def test_one_vector_is_its_own_total() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert total([one]) is one
    assert total([one, other]).tolist() == [11.0, 22.0]
