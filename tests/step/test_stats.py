"""A vector with named slots gives back what was put in; what every worker must know is added up in one."""

from __future__ import annotations

import pytest
import torch

from carrywave.parallel.mesh import Mesh
from carrywave.plan.canonical_shards import SHARDS, tree
from carrywave.step.stats import Slots, StepStats, pass_slots, step_slots, total

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("reproducible", [False, True])
def test_losses_of_shards_are_added_up_in_a_fixed_order(reproducible: bool) -> None:
    slots = step_slots(Mesh.alone(CPU), parameters=0, mark_columns=0, reproducible=reproducible)
    shards = SHARDS if reproducible else 1
    assert slots.shapes["score"] == (1, shards, 2)
    values = torch.tensor([1e8, 1.0, -1e8, 1.0, 1e8, 1.0, -1e8, 1.0], dtype=torch.float32)[:shards]
    parts = {name: torch.zeros(shape) for name, shape in slots.shapes.items()}
    parts["score"] = torch.stack([values, torch.ones(shards)], dim=-1)[None]
    loss_sum, count = StepStats(slots, slots.pack(**parts)).score
    assert float(loss_sum) == float(tree(values.unbind(), torch.add))
    assert float(count) == shards


def test_one_vector_is_its_own_total() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert total([one]) is one
    assert total([one, other]).tolist() == [11.0, 22.0]
