"""Wherever gradients are collected, parameters end up with what plain autograd adds up, and with none where nothing came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.parallel.sums.group_sums import GroupSum
from carrywave.step.gradients import Gradients, Summed

SHAPES = [((3, 5), torch.float64), ((4,), torch.float32), ((7,), torch.float64), ((), torch.float32)]
Kind = Callable[[list[nn.Parameter]], Gradients]
# For each backward pass, the factor of each parameter in its loss; None: the loss does not depend on it.
Passes = list[list[float | None]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A group of one worker: its sums are what went in."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("meeting") / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 2.0, dtype=dtype)) for shape, dtype in SHAPES]


def loss_of(own: Sequence[nn.Parameter], factors: Sequence[float | None]) -> Tensor:
    parts = [factor * p.double().square().sum() for p, factor in zip(own, factors, strict=True) if factor is not None]
    return torch.stack(parts).sum()


def plain(passes: Passes) -> list[Tensor | None]:
    own = parameters()
    for factors in passes:
        loss_of(own, factors).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in own]


def step(gradients: Gradients, own: Sequence[nn.Parameter], passes: Passes) -> None:
    gradients.begin()
    reached = []
    for number, factors in enumerate(passes):
        gradients.begin_pass()
        if number == len(passes) - 1:
            gradients.sum_early()
        loss_of(own, factors).backward()  # type: ignore[no-untyped-call]
        reached.append(gradients.end_pass())
    gradients.end_passes(reached)
    gradients.sum()


def some_passes() -> st.SearchStrategy[Passes]:
    factors = st.lists(st.none() | st.sampled_from([-1.0, 0.5, 3.0]), min_size=len(SHAPES), max_size=len(SHAPES))
    return st.lists(factors.filter(lambda row: any(each is not None for each in row)), min_size=1, max_size=3)


def kinds(group: dist.ProcessGroup) -> dict[str, Kind]:
    return {
        "own": lambda own: Gradients(own, own),
        "all-reduced": lambda own: Gradients(own, own, [Summed(GroupSum(group), own)], bucket_bytes=64),
        "some all-reduced": lambda own: Gradients(own, own, [Summed(GroupSum(group), own[1:3], during_backward=False)]),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["own", "all-reduced", "some all-reduced"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=some_passes(), second=some_passes())
def test_every_way_ends_with_what_autograd_adds_up(kind: str, alone: dist.ProcessGroup, first: Passes, second: Passes) -> None:
    own = parameters()
    gradients = kinds(alone)[kind](own)
    for passes in (first, second):  # nothing of one step is left in the next
        step(gradients, own, passes)
        for parameter, wanted in zip(own, plain(passes), strict=True):
            if wanted is not None:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, wanted)  # factors that make every sum exact
            elif gradients.reduces(parameter):
                # Zeros, because another worker may have one; which of them no worker has is found out later.
                assert parameter.grad is not None
                assert not parameter.grad.any()
                assert id(parameter) in gradients.unreached
            else:
                assert parameter.grad is None


def test_gradients_that_are_summed_are_views_of_one_buffer(alone: dist.ProcessGroup) -> None:
    own = [nn.Parameter(torch.ones(size)) for size in (3, 5, 2)]
    gradients = Gradients(own, own, [Summed(GroupSum(alone), own)], bucket_bytes=24)
    assert [[p.numel() for p in bucket.parameters] for bucket in gradients.buckets] == [[2], [5], [3]]  # the last layers come first
    for passes in (1, 2):
        step(gradients, own, [[1.0, 1.0, 1.0]] * passes)
        addresses = [p.grad.data_ptr() for p in own if p.grad is not None]
        base = gradients.buckets[0].flat.data_ptr()
        assert addresses == [base + 4 * (2 + 5), base + 4 * 2, base]


def test_a_gradient_that_leaves_its_place_is_noticed() -> None:
    own = [nn.Parameter(torch.ones(2))]
    gradients = Gradients(own, own)
    gradients.begin()
    gradients.begin_pass()
    own[0].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="a gradient was replaced during backward"):
        gradients.end_pass()


def test_what_the_optimizer_does_not_hold_is_cleared_too() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen.grad = torch.ones(2)
    Gradients([trained], [trained, frozen]).begin_pass()
    assert frozen.grad is None


def test_numbers_travel_behind_the_gradients_in_one_message(alone: dist.ProcessGroup) -> None:
    own = [nn.Parameter(torch.ones(size)) for size in (3, 5)]
    gradients = Gradients(own, own, [Summed(GroupSum(alone), own)], numbers=4)
    assert gradients.numbers is not None
    assert len(gradients.buckets) == 1
    assert gradients.buckets[0].flat.numel() == 3 + 5 + 4
    step(gradients, own, [[1.0, 1.0]])
    assert gradients.numbers.tolist() == [0.0] * 4
    assert len(Gradients([], [], [Summed(GroupSum(alone), [])], numbers=4).buckets) == 1  # also if nothing is trained
