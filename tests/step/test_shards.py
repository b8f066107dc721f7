"""Cutting a worker's part of a batch into shards, the tree of their gradients, and what is fixed for equal bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.data.loader import Share, build
from carrywave.data.order import Cursor, Window
from carrywave.data.sequences import View
from carrywave.parallel.startup.launcher_env import WORKER, WorkerFile
from carrywave.plan.canonical_shards import SHARDS, shards_of, tree
from carrywave.plan.plan import Plan
from carrywave.step.reproducible.fixed_tree import Branch, FixedTree
from carrywave.step.reproducible.shards import Cut, local_shards, settle

CPU = torch.device("cpu")


def mesh(replica: int, replicas: int) -> Any:
    """As much of a mesh as is asked for here."""
    return SimpleNamespace(replica=replica, plan=Plan(replicas=replicas), share=lambda: Share(replica, replicas))


def parts(lengths: list[int], replicas: int, *, read: bool) -> dict[int, Batch]:
    """All shards of a batch, each from the replica that has it; each replica reads its part alone, or takes it of the whole."""
    lanes, steps = len(lengths), 3
    rows = np.arange(2 * steps * lanes, dtype=np.float32).reshape(-1, 2)
    view = View(rows, np.arange(lanes) * steps, np.full(lanes, steps), targets_at=lambda at: at % 5)
    length = np.array(lengths)
    sequence = np.where(length > 0, np.arange(lanes), -1)
    window = Window(steps, sequence, np.zeros_like(sequence), length, length > 1)
    whole = build(view, window, Cursor(0, 0))
    found: dict[int, Batch] = {}
    for replica in range(replicas):
        where = mesh(replica, replicas)
        if read:
            own = build(view, window, Cursor(0, 0), share=where.share())
        else:
            own = whole if replicas == 1 else whole.take(*where.share().bounds(lanes), pooled=False)
        cut = Cut(where, own, pooled=False)
        shards = local_shards(where)
        assert shards is not None
        found |= {shard: part for shard in shards if (part := cut.part(shard)) is not None}
    return found


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=19) | st.integers(1, 19).map(lambda lanes: [3] * lanes),
    replicas=st.sampled_from([2, 4, 8]),
    read=st.booleans(),
)
@example(lengths=[3, 3, 3, 1], replicas=2, read=True)  # all that the first replica has is real
def test_a_shard_is_the_same_whoever_has_it(lengths: list[int], replicas: int, read: bool) -> None:
    lanes = len(lengths)
    alone, shared = parts(lengths, 1, read=False), parts(lengths, replicas, read=read)
    assert alone.keys() == shared.keys()
    assert len(alone) == min(lanes, SHARDS)
    for shard, part in alone.items():
        other = shared[shard]
        for name in ("inputs", "targets", "lengths", "fresh", "lanes", "sequence", "offset"):
            assert torch.equal(getattr(part, name), getattr(other, name)), name
            assert getattr(part, name).stride() == getattr(other, name).stride(), name
        # Also where this shard is full and others are not: another path of the code may round otherwise.
        assert part.real == other.real
        assert (part.real == part.steps * part.lanes.shape[0]) == (sum(lengths) == 3 * lanes)
    assert torch.cat([part.lanes for part in alone.values()]).tolist() == list(range(lanes))


def test_a_shard_has_memory_of_its_own() -> None:
    batch = Batch.of(torch.randn(3, 8, 2), torch.zeros(3, 8, dtype=torch.int64), step=0)
    cut = Cut(mesh(7, 8), batch.take(7, 8, pooled=False), pooled=False)
    part = cut.part(7)
    assert part is not None
    assert part.inputs.data_ptr() % 64 == 0
    assert part.inputs.is_contiguous()
    [own] = cut.state(7, [torch.ones(1, 1, 4)])
    assert own.shape == (1, 1, 4)


def test_replicas_that_cannot_share_them_have_none() -> None:
    assert local_shards(mesh(1, 3)) is None


def given_to_a_tree(parameters: list[nn.Parameter], grads: list[list[Tensor | None] | None]) -> list[Tensor]:
    """The sums of a tree of one worker. Twice: the second time buffers are used again."""
    summed = FixedTree(parameters, parameters, [Branch(parameters[:1], ()), Branch(parameters[1:], ())])
    for _ in range(2):
        summed.begin_step()
        for shard in grads:
            if shard is None:
                summed.skip()
                continue
            summed.begin_shard(1)
            for parameter, grad in zip(parameters, shard, strict=True):
                parameter.grad = None if grad is None else grad.clone()
            summed.end_shard([summed.end_pass()])
        summed.sum_over_workers(meanwhile=lambda: None)
        # One that no shard reached has none; what other workers would have to add to is zero.
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    return found


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int64).flatten().tolist()


def plus(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(left, right, strict=True)]


@given(
    replicas=st.sampled_from([1, 2, 4, 8]),
    empty=st.sets(st.integers(0, SHARDS - 1)),
    missing=st.sets(st.tuples(st.integers(0, SHARDS - 1), st.integers(0, 2))),
    seed=st.integers(0, 1000),
)
def test_gradients_are_summed_as_the_tree_says(replicas: int, empty: set[int], missing: set[tuple[int, int]], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shapes = [((3, 5), torch.float32), ((70,), torch.float64), ((7,), torch.float32)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
    # Zeros of both signs among them.
    drawn = [[torch.randn(p.shape, generator=draw, dtype=p.dtype).relu().neg() for p in parameters] for _ in range(SHARDS)]
    grads = [
        None if shard in empty else [None if (shard, place) in missing else grad for place, grad in enumerate(each)]
        for shard, each in enumerate(drawn)
    ]
    roots = [given_to_a_tree(parameters, [grads[shard] for shard in shards_of(replica, replicas)]) for replica in range(replicas)]
    zeros = [torch.zeros_like(p) for p in parameters]
    full = [[z + (0.0 if g is None else g) for z, g in zip(zeros, each or [None] * 3, strict=True)] for each in grads]
    for found, wanted in zip(tree(roots, plus), tree(full, plus), strict=True):
        assert bits(found) == bits(wanted)


def test_the_order_shows() -> None:
    """What is left of a sum that cancels tells in which order it was made."""
    parameter = nn.Parameter(torch.zeros(1))
    values = [1e8, 1.0, -1e8, 1.0, 1e8, 1.0, -1e8, 1.0]
    [found] = given_to_a_tree([parameter], [[torch.tensor([value])] for value in values])
    assert found.item() == tree(values, lambda a, b: torch.tensor(a + b, dtype=torch.float32).item()) != sum(values)


def test_no_more_than_three_sums_are_held() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    summed = FixedTree([parameter], [parameter], [Branch([parameter], ())])
    for _ in range(3):
        summed.begin_step()
        for _ in range(SHARDS):
            summed.begin_shard(1)
            parameter.grad = torch.ones(4)
            summed.end_shard([summed.end_pass()])
        summed.sum_over_workers(meanwhile=lambda: None)
    assert len(summed._free) + 1 == 3
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [8.0] * 4


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "2", WORKER: "dealt"}, 1)],
    ids=["nobody's", "the user's", "the launcher's"],
)
def test_threads_are_one_unless_the_user_chose(
    variables: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", WORKER):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if WORKER in variables:
        monkeypatch.setenv(WORKER, WorkerFile(threads_dealt=True).write(tmp_path / "worker.json")[WORKER])
    torch.set_num_threads(2)
    settle(CPU)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("asked", [None, ":16:8"])
def test_cublas_works_in_memory_of_a_fixed_size(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked or "")
    if asked is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    settle(torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (asked or ":4096:2")
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
