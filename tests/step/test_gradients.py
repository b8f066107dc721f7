"""Wherever gradients are collected, parameters end up with what plain autograd adds up, and with none where nothing came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.parallel.sums.group_sums import GroupSum
from carrywave.step.all_reduce import AllReduce, Reduced
from carrywave.step.gradients import FlatBuffers, Gradients
from carrywave.step.reproducible.fixed_tree import Branch, FixedTree

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


def step(gradients: Gradients, own: Sequence[nn.Parameter], passes: Passes, *, static: bool) -> None:
    gradients.begin_step()
    gradients.begin_shard(len(passes), static=static)
    reached = []
    for number, factors in enumerate(passes):
        gradients.begin_pass()
        if number == len(passes) - 1:
            gradients.sum_early()
        loss_of(own, factors).backward()  # type: ignore[no-untyped-call]
        reached.append(gradients.end_pass())
    gradients.end_shard(reached)
    assert gradients.sum_over_workers(meanwhile=lambda: 7) == 7


def some_passes() -> st.SearchStrategy[Passes]:
    factors = st.lists(st.none() | st.sampled_from([-1.0, 0.5, 3.0]), min_size=len(SHAPES), max_size=len(SHAPES))
    return st.lists(factors.filter(lambda row: any(each is not None for each in row)), min_size=1, max_size=3)


def kinds(group: dist.ProcessGroup) -> dict[str, Kind]:
    return {
        "own": lambda own: Gradients(own, own),
        "all-reduced": lambda own: AllReduce(own, own, [Reduced(GroupSum(group), own)], bucket_bytes=64),
        "some all-reduced": lambda own: AllReduce(own, own, [Reduced(GroupSum(group), own[1:3], during_backward=False)]),
        "tree": lambda own: FixedTree(own, own, [Branch(own[:2], ()), Branch(own[2:], ())]),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["own", "all-reduced", "some all-reduced", "tree"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=some_passes(), second=some_passes(), static=st.booleans())
def test_every_way_ends_with_what_autograd_adds_up(
    kind: str, alone: dist.ProcessGroup, first: Passes, second: Passes, static: bool
) -> None:
    own = parameters()
    gradients = kinds(alone)[kind](own)
    for passes in (first, second):  # nothing of one step is left in the next
        step(gradients, own, passes, static=static)
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
    gradients = AllReduce(own, own, [Reduced(GroupSum(alone), own)], bucket_bytes=24)
    assert [[p.numel() for p in bucket.parameters] for bucket in gradients.buckets] == [[2], [5], [3]]  # the last layers come first
    for passes in (1, 2):
        step(gradients, own, [[1.0, 1.0, 1.0]] * passes, static=False)
        addresses = [p.grad.data_ptr() for p in own if p.grad is not None]
        base = gradients.buckets[0].flat.data_ptr()
        assert addresses == [base + 4 * (2 + 5), base + 4 * 2, base]


def test_a_gradient_that_leaves_its_place_is_noticed() -> None:
    own = [nn.Parameter(torch.ones(2))]
    gradients = Gradients(own, own)
    gradients.begin_step()
    gradients.begin_shard(2)
    own[0].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="a gradient was replaced during backward"):
        gradients.end_pass()


def test_what_the_optimizer_does_not_hold_is_cleared_too() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen.grad = torch.ones(2)
    Gradients([trained], [trained, frozen]).begin_shard(1)
    assert frozen.grad is None


def test_buffers_are_aligned_and_their_views_have_versions_of_their_own(tmp_path: Path) -> None:
    own = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    buffers = FlatBuffers([own], aligned=8)
    assert [view.data_ptr() - buffers.flats[0].data_ptr() for view in buffers.views] == [0, 4 * 8]
    before = [view._version for view in buffers.views]
    buffers.views[1].add_(1.0)
    assert [view._version - old for view, old in zip(buffers.views, before, strict=True)] == [0, 1]
    assert buffers.flats[0].tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


class _Gives(torch.autograd.Function):
    """The identity, whose gradient is undefined: torch calls the parameter's hook with nothing to add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def test_what_other_workers_add_is_kept_where_this_one_has_nothing(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    gradients = AllReduce(own, own, [Reduced(GroupSum(alone), own)], bucket_bytes=8)
    plain = dist.all_reduce

    def with_another(tensor: Tensor, **options: Any) -> Any:
        tensor.add_(5.0)
        return plain(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", with_another)
    for passes in (1, 2, 1):
        gradients.begin_step()
        gradients.begin_shard(passes)
        reached = []
        for number in range(passes):
            gradients.begin_pass()
            if number == passes - 1:
                gradients.sum_early()
            (own[0].sum() + _Gives.apply(own[1]).sum()).backward()  # type: ignore[no-untyped-call]
            reached.append(gradients.end_pass())
        gradients.end_shard(reached)
        gradients.sum_over_workers(meanwhile=lambda: None)
        assert [p.grad.tolist() for p in own if p.grad is not None] == [[5.0 + passes] * 2, [5.0] * 2]
        assert gradients.unreached == {id(own[1])}


@pytest.mark.parametrize("kind", ["own", "tree"])
def test_where_nothing_is_trained_there_is_nothing_to_do(kind: str) -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    gradients = Gradients([], [frozen]) if kind == "own" else FixedTree([], [frozen], [Branch([], ())])
    for passes in (2, 1):
        gradients.begin_step()
        for _ in range(2):  # shards
            gradients.begin_shard(passes)
            reached = []
            for _ in range(passes):
                gradients.begin_pass()
                reached.append(gradients.end_pass())
            gradients.end_shard(reached)
        gradients.sum_over_workers(meanwhile=lambda: None)
    assert frozen.grad is None


def test_nothing_that_a_failed_capture_left_behind_is_added_to() -> None:
    own = parameters()
    gradients = Gradients(own, own)
    for passes in (1, 2):
        gradients.begin_step()
        gradients.begin_shard(passes, static=True)
        reached = []
        for _ in range(passes):
            gradients.begin_pass()
            if passes == 1:  # with several, a capture records the additions and carries none of them out
                loss_of(own, [1.0] * 4).backward()  # type: ignore[no-untyped-call]  # and then it fails
            gradients.begin_pass()
            loss_of(own, [1.0] * 4).backward()  # type: ignore[no-untyped-call]
            reached.append(gradients.end_pass())
        gradients.end_shard(reached)
        gradients.sum_over_workers(meanwhile=lambda: None)
        for parameter, wanted in zip(own, plain([[1.0] * 4] * passes), strict=True):
            assert wanted is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, wanted)
