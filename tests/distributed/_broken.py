"""Mistakes that programs for many devices make, put into the library for the time of one case: the comparison must see each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.kernels import random
from carrywave.model.heads.scoring import IGNORED
from carrywave.model.lstm import LSTM
from carrywave.model.over_time import pooling
from carrywave.model.state import Chunk
from carrywave.step import trainer, worker_setup
from carrywave.step.passes import executor
from carrywave.step.passes.chunks import Chunks
from carrywave.step.passes.job import BatchOutcome, Job
from carrywave.step.trainer import Trainer


@contextmanager
def broken(name: str | None, rank: int) -> Iterator[None]:
    """Within it, the library makes this mistake."""
    if name is None:
        yield
        return
    with MISTAKES[name](rank):
        yield


def _mean_of_means(rank: int) -> Any:
    """Every worker divides the loss of each batch by the number of targets that it has itself, and the means are averaged."""
    run = executor.run

    def local(job: Job) -> float:
        targets = job.batch.targets
        assert targets is not None
        real = targets.isfinite().sum() if targets.is_floating_point() else (targets != IGNORED).sum()
        return max(1.0, float(real))

    def wrong(stage: Any, plan: Any, program: Any, jobs: Any, *others: Any, **named: Any) -> list[BatchOutcome]:
        jobs = [replace(job, scale=torch.tensor(1.0 / local(job), dtype=torch.float64)) for job in jobs]
        outcomes = run(stage, plan, program, jobs, *others, **named)
        one = torch.ones((), dtype=torch.float64)
        return [replace(each, loss_sum=each.loss_sum / local(job), count=one) for each, job in zip(outcomes, jobs, strict=True)]

    return mock.patch.object(executor, "run", wrong)


def _last_padded_step(rank: int) -> Any:
    """What a sequence is judged by is read at the end of the batch, not at its own."""

    def wrong(y_TBP: Tensor, lengths_B: Tensor, otherwise_BP: Tensor) -> Tensor:
        return y_TBP[-1]

    return mock.patch.object(pooling, "last_real", wrong)


def _update(change: Callable[[tuple[Batch, ...]], tuple[Batch, ...]]) -> Any:
    update = Trainer.update

    def wrong(self: Trainer, *batches: Batch) -> Any:
        return update(self, *change(batches))

    return mock.patch.object(Trainer, "update", wrong)


def _tail_dropped(rank: int) -> Any:
    """A window that is not full is left out."""

    def change(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        return tuple(batch for batch in batches if bool((batch.lengths == batches[0].steps).all()))

    return _update(change)


def _tail_counted_twice(rank: int) -> Any:
    """The last window is run once more to fill up the group."""
    return _update(lambda batches: (*batches, batches[-1]))


def _carry_not_reset(rank: int) -> Any:
    """A lane that starts anew goes on from where the sequence before it ended."""
    return mock.patch.object(LSTM, "reset", lambda self, carries, fresh_B, layers=None: carries)


def _resets_of_the_first_chunk(rank: int) -> Any:
    """Of every chunk, the lanes are reset where those of the first are."""
    at = Chunks.at

    def wrong(self: Chunks, micro_batch: int, chunk: int, *others: Any, **named: Any) -> Chunk:
        found, first = at(self, micro_batch, chunk, *others, **named), at(self, micro_batch, 0, *others, **named)
        resets = None if found.resets is None or first.resets is None else first.resets[: len(found.resets)]
        return replace(found, resets=resets)

    return mock.patch.object(Chunks, "at", wrong)


def _changes_across_resets(rank: int) -> Any:
    """The mean of changes from step to step is over all steps, as if no lane started again."""
    return mock.patch.object(Batch, "changes", property(lambda batch: batch.cells[0] - batch.cells[1] // batch.steps))


def _rank_keyed_dropout(rank: int) -> Any:
    """Every worker draws masks of its own."""
    key = random.key
    return mock.patch.object(trainer.random, "key", lambda seed, *path: key(seed + rank, *path))


def _local_lanes(rank: int) -> Any:
    """Masks are drawn by the number of a lane on its worker, not among all lanes."""
    take = Batch.take

    def wrong(self: Batch, low: int, high: int, *, pooled: bool) -> Batch:
        part = take(self, low, high, pooled=pooled)
        return replace(part, lanes=torch.arange(part.lanes.shape[0], device=part.lanes.device))

    return mock.patch.object(Batch, "take", wrong)


def _carry_gradient_dropped(rank: int) -> Any:
    """Back-propagation through time ends at every chunk."""
    backward = executor._Run._backward

    def wrong(self: Any, task: Any) -> None:
        self.carry_gradients.clear()
        backward(self, task)

    return mock.patch.object(executor._Run, "_backward", wrong)


def _tied_not_summed(rank: int) -> Any:
    """Each of the two stages that hold a tied matrix follows its own half of the gradient."""
    return mock.patch.object(worker_setup, "shared", return_value=[])


def _head_not_summed(rank: int) -> Any:
    """Each of the stages that share the head follows the gradient of the chunks that it scored itself."""
    found = worker_setup.shared
    return mock.patch.object(worker_setup, "shared", lambda model, cuts, share_head: found(model, cuts))


def _score_not_returned(rank: int) -> Any:
    """What another stage found out about a chunk is not told to the last one."""
    score = executor._Run._score

    def wrong(self: Any, task: Any) -> None:
        score(self, task)
        if task in self.leaving:
            self.leaving[task].zero_()

    return mock.patch.object(executor._Run, "_score", wrong)


def _summed_twice(rank: int) -> Any:
    """Gradients that were reduced already are reduced once more."""
    sum_over_workers = worker_setup.AllReduce.sum_over_workers

    def wrong(self: Any, meanwhile: Any) -> Any:
        result = sum_over_workers(self, meanwhile)
        for bucket in self.buckets:
            work = bucket.group.all_reduce(bucket.flat)
            if work is not None:
                work.wait()
        return result

    return mock.patch.object(worker_setup.AllReduce, "sum_over_workers", wrong)


MISTAKES: dict[str, Callable[[int], Any]] = {
    "mean of means": _mean_of_means,
    "last padded step": _last_padded_step,
    "tail dropped": _tail_dropped,
    "tail counted twice": _tail_counted_twice,
    "carry not reset": _carry_not_reset,
    "resets of the first chunk": _resets_of_the_first_chunk,
    "changes across resets": _changes_across_resets,
    "rank-keyed dropout": _rank_keyed_dropout,
    "local lanes": _local_lanes,
    "carry gradient dropped": _carry_gradient_dropped,
    "tied not summed": _tied_not_summed,
    "head not summed": _head_not_summed,
    "score not returned": _score_not_returned,
    "summed twice": _summed_twice,
}
