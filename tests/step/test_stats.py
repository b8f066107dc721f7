"""A vector with named slots gives back what was put in; what every worker must know is added up in one."""

from __future__ import annotations

import pytest
import torch

from carrywave.step.stats import Slots, pass_slots, total


def test_slots_give_back_what_was_put_in() -> None:
    slots = Slots(loss=(), votes=(2,), marks=(3, 2), none=(0,))
    parts = {
        "loss": torch.tensor(1.5),
        "votes": torch.tensor([2.0, 3.0]),
        "marks": torch.arange(6.0).view(3, 2),
        "none": torch.zeros(0),
    }
    vector = slots.pack(**parts)
    assert vector.shape == (slots.size,) == (9,)
    for name, part in parts.items():
        assert torch.equal(slots.read(vector, name), part)
        assert torch.equal(slots.parts(vector)[name], part)
    slots.parts(vector)["votes"].add_(1)  # they are views
    assert torch.equal(slots.read(vector, "votes"), torch.tensor([3.0, 4.0]))


def test_a_slot_that_is_missing_or_of_another_size_is_an_error() -> None:
    slots = Slots(loss=(), votes=(2,))
    with pytest.raises(KeyError):
        slots.pack(loss=torch.zeros(()))
    with pytest.raises(RuntimeError, match="shape"):
        slots.pack(loss=torch.zeros(()), votes=torch.zeros(3))


def test_the_size_of_a_pass_does_not_depend_on_its_batches() -> None:
    assert pass_slots(6).size == 4 + 6


def test_one_vector_is_its_own_total() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert total([one]) is one
    assert total([one, other]).tolist() == [11.0, 22.0]
