"""Batches: what stands in them, what padding looks like, and a background thread that neither hides errors nor stays."""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.batch import Batch
from carrywave.data.loader import Loader, Share, build
from carrywave.data.order import Cursor, Order, SequenceOrder, StreamOrder, Window
from carrywave.data.sequences import View

CPU = torch.device("cpu")


def view_of(lengths: list[int], *, features: int = 0, **others: object) -> View:
    """Sequences end to end, row r holding token r (or r plus a tenth of the column)."""
    rows = np.arange(sum(lengths))
    inputs = rows.astype(np.uint16) if features == 0 else (rows[:, None] + np.arange(features) / 10).astype(np.float32)
    starts = np.cumsum(lengths) - np.array(lengths)
    return View(inputs, starts, np.array(lengths), **others)  # type: ignore[arg-type]


def window_of(steps: int, *lanes: tuple[int, int, int]) -> Window:
    """Lanes of (sequence, offset, length)."""
    sequence, offset, length = (np.array(values, dtype=np.int64) for values in zip(*lanes, strict=True))
    return Window(steps, sequence, offset, length, (offset == 0) & (length > 0))


def equal(a: Batch, b: Batch) -> bool:
    values = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(Batch)]
    return all(torch.equal(x.nan_to_num(-7), y.nan_to_num(-7)) if isinstance(x, torch.Tensor) else x == y for x, y in values)


def test_tokens_and_their_padding() -> None:
    view = view_of([3, 4], targets_at=lambda rows: rows + 100)
    batch = build(view, window_of(3, (1, 1, 3), (0, 2, 1), (-1, 0, 0)), Cursor(2, 9))
    assert batch.inputs.tolist() == [[4, 2, 0], [5, 0, 0], [6, 0, 0]]
    assert batch.inputs.dtype == torch.int64
    assert batch.targets is not None
    assert batch.targets.tolist() == [[104, 102, -100], [105, -100, -100], [106, -100, -100]]
    assert batch.targets.dtype == torch.int64
    assert batch.lengths.tolist() == [3, 1, 0]
    assert batch.fresh.tolist() == [False, False, False]
    assert batch.lanes.tolist() == [0, 1, 2]
    assert batch.sequence.tolist() == [1, 0, -1]
    assert batch.offset.tolist() == [1, 2, 0]
    assert (batch.epoch, batch.step, batch.real, batch.steps) == (2, 9, 4, 3)
    assert batch.cells == (4, 9)


def test_numbers_and_their_padding() -> None:
    view = view_of([3, 4], features=2, targets_at=lambda rows: np.stack([rows, -rows], axis=-1).astype(np.float64))
    batch = build(view, window_of(2, (1, 0, 2), (0, 2, 1)), Cursor(0, 0))
    assert batch.inputs.dtype == torch.float32
    assert torch.equal(batch.inputs, torch.tensor([[[3, 3.1], [2, 2.1]], [[4, 4.1], [0, 0]]]))
    assert batch.targets is not None
    assert batch.targets.dtype == torch.float32
    assert torch.equal(batch.targets[0], torch.tensor([[3.0, -3.0], [2.0, -2.0]]))
    assert torch.equal(batch.targets[1, 0], torch.tensor([4.0, -4.0]))
    assert batch.targets[1, 1].isnan().all()


def test_warm_steps_have_no_target() -> None:
    view = view_of([6, 6], targets_at=lambda rows: rows, warm=np.array([3, 0]))
    first = build(view, window_of(2, (0, 0, 2), (1, 0, 2)), Cursor(0, 0))
    second = build(view, window_of(2, (0, 2, 2), (1, 2, 2)), Cursor(0, 1))
    assert first.targets is not None
    assert second.targets is not None
    assert first.targets.tolist() == [[-100, 6], [-100, 7]]
    assert second.targets.tolist() == [[-100, 8], [3, 9]]
    assert first.inputs.tolist() == [[0, 6], [1, 7]]  # the carry still reads them


@pytest.mark.parametrize(
    ("labels", "expected"), [(np.array([7, 8]), [8, -100, 7]), (np.array([[0.5], [1.5]], dtype=np.float32), [[1.5], [None], [0.5]])]
)
def test_labels_follow_their_sequences(labels: np.ndarray, expected: list[object]) -> None:
    batch = build(view_of([2, 3], labels=labels), window_of(3, (1, 0, 3), (-1, 0, 0), (0, 0, 2)), Cursor(0, 0))
    assert batch.targets is not None
    wanted = torch.tensor(np.array(expected, dtype=labels.dtype))
    assert torch.equal(batch.targets.nan_to_num(-7), wanted.nan_to_num(-7))
    assert labels.max() in (8, 1.5)  # the data itself is not written to


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_shards_make_up_the_whole_batch(lengths: list[int], lanes: int, streams: bool, replicas: int) -> None:
    view = view_of(lengths, targets_at=lambda rows: rows * 2, warm=np.array(lengths) // 4)
    order: Order = SequenceOrder(view.lengths, tokens=60)
    if streams:
        order = StreamOrder(view.lengths, lanes=min(lanes, sum(lengths)), steps=7)
    for step in range(order.num_steps(0)):
        cursor = Cursor(0, step)
        window = order.window(cursor)
        whole = build(view, window, cursor)
        shards = [build(view, window, cursor, share=Share(rank, replicas)) for rank in range(replicas)]
        assert all(shard.cells == whole.cells for shard in shards)
        held = [shard for rank, shard in enumerate(shards) if len(range(*Share(rank, replicas).bounds(len(window.length))))]
        idle = [shard for shard in shards if not any(shard is each for each in held)]
        for shard in idle:  # zero-weight rows: nothing in them counts
            assert (shard.lengths.tolist(), shard.sequence.tolist(), shard.real) == ([0], [-1], 0)
            assert shard.targets is not None
            assert bool((shard.targets == -100).all())
        names = [field.name for field in fields(Batch) if isinstance(getattr(whole, field.name), torch.Tensor)]
        joined = {name: torch.cat([getattr(shard, name) for shard in held], dim=int(name in ("inputs", "targets"))) for name in names}
        assert equal(replace(whole, **joined, real=sum(shard.real for shard in held)), whole)
        for rank, shard in enumerate(shards):  # a batch that is there is shared in the same way
            taken = whole.take(*Share(rank, replicas).bounds(len(window.length)), pooled=False)
            assert equal(replace(taken, real=shard.real, part_of=shard.part_of, lanes=shard.lanes), shard)


def test_the_loader_gives_what_build_gives_from_any_cursor() -> None:
    view = view_of([31, 17], targets_at=lambda rows: rows)
    order = StreamOrder(view.lengths, lanes=3, steps=4, vary=True)
    for epoch, start in ((0, 0), (1, 2), (1, order.num_steps(1))):
        cursors = [Cursor(epoch, step) for step in range(start, order.num_steps(epoch))]
        wanted = [build(view, order.window(cursor), cursor) for cursor in cursors]
        given = list(Loader(view, order, device=CPU, ahead=1).batches(Cursor(epoch, start)))
        assert len(given) == len(wanted)
        assert all(equal(a, b) for a, b in zip(given, wanted, strict=True))


class Counting:
    """An order of a hundred windows that notes which were asked for, and fails at one of them."""

    def __init__(self, fault: BaseException | None = None, at: int = 3) -> None:
        self.asked: list[int] = []
        self.fault, self.at = fault, at
        self.reached = [threading.Event() for _ in range(100)]

    def num_steps(self, epoch: int) -> int:
        return 100

    def window(self, cursor: Cursor) -> Window:
        self.asked.append(cursor.step)
        self.reached[cursor.step].set()
        if cursor.step == self.at and self.fault is not None:
            raise self.fault
        return window_of(1, (0, 0, 1))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("carrywave-loader")]


def test_an_error_in_the_thread_comes_out_as_it_is_after_the_batches_before_it() -> None:
    fault = ZeroDivisionError("in the background")
    batches = Loader(view_of([1]), Counting(fault), device=CPU).batches(Cursor(0, 0))
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    assert caught.value is fault
    assert loader_threads() == []


def test_closing_stops_the_thread() -> None:
    order = Counting()
    batches = Loader(view_of([1]), order, device=CPU).batches(Cursor(0, 0))
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()  # type: ignore[attr-defined]
    assert loader_threads() == []
    assert max(order.asked) < 10


def test_no_thread_before_the_first_batch_and_none_after_the_last() -> None:
    batches = Loader(view_of([1]), Counting(), device=CPU).batches(Cursor(0, 0))
    assert loader_threads() == []
    assert len(list(batches)) == 100
    assert loader_threads() == []


@pytest.mark.gpu
def test_on_cuda_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    device = torch.device("cuda")
    view = view_of([60_000], targets_at=lambda rows: rows)
    order = StreamOrder(view.lengths, lanes=50, steps=40)
    weights = torch.randn(2048, 2048, device=device)
    given = []
    for batch in Loader(view, order, device=device).batches(Cursor(0, 0)):
        weights = (weights @ weights).clamp(-1, 1)  # keeps the stream behind the host, so that early reuse of memory would show
        given.append(replace(batch, inputs=batch.inputs + 1))
    for step, batch in enumerate(given):
        wanted = build(view, order.window(Cursor(0, step)), Cursor(0, step))
        assert equal(replace(batch, inputs=batch.inputs - 1).to(CPU), wanted)


@pytest.mark.gpu
def test_copies_are_never_captured_however_many_passes_there_were() -> None:
    """torch hands out its 32 streams in turns: a new one for each pass would be, sooner or later, the one that a graph is captured on."""
    device = torch.device("cuda")
    view = view_of([200], targets_at=lambda rows: rows)
    order = StreamOrder(view.lengths, lanes=2, steps=10)
    numbers = torch.zeros(3, device=device)
    for _ in range(40):
        batches = Loader(view, order, device=device, ahead=2).batches(Cursor(0, 0))
        found = [next(batches)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            numbers.add_(1)
            time.sleep(0.005)  # meanwhile batches are copied ahead
        found += list(batches)
        for step, batch in enumerate(found):
            assert equal(batch.to(CPU), build(view, order.window(Cursor(0, step)), Cursor(0, step)))
