"""Claim: our replicas train at least as fast as DDP on batches of one length, and faster if lengths vary.

All loops run in the same worker processes, one thread each, with the same model, optimizer and clipping, and take turns:

- fixed: a language model, the same global batch divided evenly among the workers; DDP with default and with small gradient buckets;
- lengths: classification of sequences of log-normal length. DDP draws batches in random order through a DistributedSampler, padded or
  packed, with as many sequences per batch as give the same number of real steps on average. Ours buckets by length, and every worker gets
  a share of the same bucket.

Speed is in real tokens per second over all workers, timed by the slowest; padding does not count. The ratio is to the best peer. Serial is
our trainer on one worker while the others wait.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.benchmarks.harness.progress import told
from carrywave.benchmarks.harness.workers import TimedWorkers, crew_sizes, spread, start, take_turns
from carrywave.benchmarks.peers import pipeline_loops as peers
from carrywave.benchmarks.peers.pipeline_loops import Case
from carrywave.benchmarks.peers.replica_loops import DataParallelSequences, classifier, collate
from carrywave.benchmarks.pipeline import CHECKED, Ours, check_losses, first_steps
from carrywave.data.batch import Batch
from carrywave.data.codec import Codec
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.data.sequences import Sequences
from carrywave.model.encoders import Numbers
from carrywave.model.heads import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.runs.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task

title = "replicas against DDP"
COLUMNS = ("case", "workers", "loop", "lstm", "tokens_per_second", "spread", "speedup", "ratio", "target")

FIXED = (Case(2, 256, 32, 64, 1000), Case(2, 650, 32, 35, 1000))
QUICK = Case(2, 16, 8, 8, 50)
FEATURES, CLASSES = 16, 10
SMALL_BUCKET_MB = 2
TRAIN = {"optimizer": "adam", "lr": peers.LR, "clip": peers.CLIP, "precision": "fp32"}
LOOPS = ("serial", "carrywave")  # ours; the rest are peers


@dataclass(frozen=True)
class Lengths:
    """Sequences of log-normal length, from 5 to `longest` steps; `tokens` is the number of steps per batch."""

    hidden: int
    longest: int
    tokens: int
    sequences: int

    @property
    def name(self) -> str:
        """The name shown in the table."""
        return f"lengths 1x{self.hidden} log-normal 5..{self.longest} batch {self.tokens}"

    def data(self) -> Sequences:
        """The data, identical on every worker."""
        draw = np.random.default_rng(0)
        lengths = np.clip(np.exp(draw.normal(math.log(80), 1.0, self.sequences)), 5, self.longest).astype(np.int64)
        inputs = draw.standard_normal((int(lengths.sum()), FEATURES)).astype(np.float32)
        return Sequences(inputs, np.cumsum(lengths) - lengths, lengths, labels=draw.integers(CLASSES, size=len(lengths)))


def run(*, quick: bool = False, workers: Sequence[int] | None = None) -> list[dict[str, object]]:
    """One row per loop. `workers`: how many, instead of up to one for two cores."""
    rounds, seconds = (2, 0.02) if quick else (5, 0.3)
    lengths = Lengths(8, 100, 256, 200) if quick else Lengths(128, 1000, 8192, 4000)
    cases: list[Case | Lengths] = [*((QUICK,) if quick else FIXED), lengths]
    rows: list[dict[str, object]] = []
    for size in workers or ([2] if quick else crew_sizes()):
        job = {"cases": [asdict(case) for case in cases], "rounds": rounds, "seconds": seconds}
        timed = start("replicas", job, size)[0]
        for number, case in enumerate(cases):
            name, target = (f"fixed {case.name}", 1.0) if isinstance(case, Case) else (case.name, 1.5)
            rows += told(rows_of(name, size, [row for row in timed if row["case"] == number], target))
    return rows


def rows_of(case: str, size: int, timed: list[Row], target: float) -> list[dict[str, object]]:
    """Rows with each rate relative to one worker and to the best peer."""
    rates = {row["loop"]: row["tokens_per_second"] for row in timed}
    best = max(rate for loop, rate in rates.items() if loop not in LOOPS)
    return [
        {
            "case": case,
            "workers": 1 if row["loop"] == "serial" else size,
            "loop": row["loop"],
            "lstm": row["lstm"],
            "tokens_per_second": round(row["tokens_per_second"]),
            "spread": round(row["spread"], 3),
            "speedup": round(row["tokens_per_second"] / rates["serial"], 3),
            "ratio": round(row["tokens_per_second"] / best, 3),
            "target": target if row["loop"] == "carrywave" else None,
        }
        for row in timed
    ]


# In a worker

Loop = Callable[[int], int]


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: time one case after another."""
    crew = TimedWorkers(world)
    for number, given in enumerate(job["cases"]):
        loops, lstm, first = _lengths(crew, Lengths(**given)) if "longest" in given else _fixed(crew, Case(**given))
        for name, timing in take_turns(crew, loops, rounds=job["rounds"], seconds=job["seconds"], first=first).items():
            yield {
                "case": number,
                "loop": name,
                "lstm": peers.OURS if name in LOOPS else peers.NATIVE if "packed" in name else lstm,
                "tokens_per_second": statistics.median(timing.tokens_per_second),
                "spread": spread(timing.tokens_per_second),
                "tokens": sum(timing.tokens),
            }


def _fixed(crew: TimedWorkers, case: Case) -> tuple[dict[str, Loop], str, int]:
    lstm = _fastest(crew, case, case.lanes // crew.size)
    plan = Plan(replicas=crew.size)
    made = {
        "serial": Ours(case, Plan.serial()) if crew.rank == 0 else None,
        "carrywave": Ours(case, plan, Mesh(crew.world, plan)),
        "DDP": peers.DataParallel(case, lstm, crew.rank, crew.size),
        "DDP, small buckets": peers.DataParallel(case, lstm, crew.rank, crew.size, SMALL_BUCKET_MB),
    }
    check_losses({name: first_steps(crew, loop)[1] for name, loop in made.items()}, reference="serial")

    def counted(name: str) -> Loop:
        loop = made[name]
        # Every worker counts its own share of the lanes; all shares are equal.
        tokens = case.lanes * case.steps // (1 if name == "serial" else crew.size)

        def step(number: int) -> int:
            if loop is None:
                return 0
            loop.step(number)
            return tokens

        return step

    return {name: counted(name) for name in made}, lstm, CHECKED[-1] + 1


def _lengths(crew: TimedWorkers, case: Lengths) -> tuple[dict[str, Loop], str, int]:
    data = case.data()
    mean_length = float(data.lengths.mean())
    batch = max(1, round(case.tokens / mean_length / crew.size))
    lstm = _fastest(crew, Case(1, case.hidden, batch, round(mean_length), 1), batch)
    assert data.labels is not None
    sequences = torch.split(torch.from_numpy(np.asarray(data.inputs)), data.lengths.tolist())
    labels = np.asarray(data.labels).tolist()

    def plain(packed: bool) -> Loop:
        loop = _plain(crew, case, sequences, labels, batch, lstm, packed)
        return lambda number: loop.step()[1]

    _check(crew, case, sequences[: 2 * crew.size], labels[: 2 * crew.size], lstm)
    plan = Plan(replicas=crew.size)
    return (
        {
            "serial": _ours(case, data, Plan.serial(), None) if crew.rank == 0 else lambda number: 0,
            "carrywave": _ours(case, data, plan, Mesh(crew.world, plan)),
            "DDP, padded": plain(False),
            "DDP, packed": plain(True),
        },
        lstm,
        0,
    )


def _plain(
    crew: TimedWorkers, case: Lengths, sequences: Sequence[Tensor], labels: Sequence[int], batch: int, lstm: str, packed: bool
) -> DataParallelSequences:
    return DataParallelSequences(
        sequences,
        labels,
        hidden=case.hidden,
        classes=CLASSES,
        batch=batch,
        # Only nn.LSTM accepts packed sequences, which always run in its native loop.
        lstm=peers.NATIVE if packed else lstm,
        packed=packed,
        rank=crew.rank,
        size=crew.size,
    )


def _check(crew: TimedWorkers, case: Lengths, sequences: Sequence[Tensor], labels: Sequence[int], lstm: str) -> None:
    """Check every loop on a few sequences that form one batch, so that order does not matter: losses must match those of one worker."""
    each = len(sequences) // crew.size
    x_TBF, lengths_B, labels_B = collate(list(zip(sequences, labels, strict=True)))
    batch = Batch.of(x_TBF, labels_B, lengths_B, pooled=True)
    plain = classifier(FEATURES, case.hidden, CLASSES)

    def ours(mesh: Mesh) -> Callable[[], Tensor]:
        model = Model(Numbers(FEATURES), LSTM(FEATURES, case.hidden), PooledSoftmax(case.hidden, CLASSES))
        model.lstm.load_state_dict(plain.lstm.state_dict())
        model.head.load_state_dict(plain.linear.state_dict())
        trainer = Trainer(model, TRAIN, mesh=mesh)
        return lambda: trainer.step(batch)

    def theirs(packed: bool) -> Callable[[], Tensor]:
        loop = _plain(crew, case, sequences, labels, each, lstm, packed)
        return lambda: loop.step()[0]

    loops = {
        "serial": ours(Mesh.alone(peers.CPU)) if crew.rank == 0 else None,
        "carrywave": ours(Mesh(crew.world, Plan(replicas=crew.size))),
        "DDP, padded": theirs(False),
        "DDP, packed": theirs(True),
    }
    losses: dict[str, list[float]] = {}
    for name, step in loops.items():
        found = [None if step is None else float(step()) for _ in CHECKED]
        losses[name] = [crew.sum(loss or 0.0) / crew.sum(loss is not None) for loss in found]
    check_losses(losses, reference="serial")


def _ours(case: Lengths, data: Sequences, plan: Plan, mesh: Mesh | None) -> Loop:
    """A loop over our trainer and loader, epoch after epoch; each step returns the real tokens of this worker's share."""
    spec = parse(
        {
            "task": "classification",
            "model": {"hidden": case.hidden, "layers": 1},
            "batch": {"tokens": case.tokens},
            "train": TRAIN,
        }
    )
    codec = Codec(
        task="classification",
        field="steps",
        labels=tuple(str(label) for label in range(CLASSES)),
        columns=tuple(f"x{i}" for i in range(FEATURES)),
    )
    task = Task.of(spec, codec, codec.facts(data), data)
    view = task.part("train", data).view
    order = order_for(spec, view, training=True)
    trainer = Trainer(task.model(data), spec.train, plan=plan, mesh=mesh or Mesh.alone(peers.CPU, plan), keep_state=False)
    loader = Loader(view, order, device=peers.CPU, share=None if mesh is None else mesh.share())
    batches = _forever(loader)

    def step(number: int) -> int:
        batch = next(batches)
        trainer.update(batch)
        return batch.real

    return step


def _forever(loader: Loader) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from loader.batches(Cursor(epoch, 0))
        epoch += 1


def _fastest(crew: TimedWorkers, case: Case, lanes: int) -> str:
    """The fastest LSTM for the peers, measured by worker 0 while the others wait. Collective."""
    kinds = (peers.NATIVE, peers.ONEDNN, peers.OURS)
    found = kinds.index(peers.fastest_lstm(case, lanes, kinds)) if crew.rank == 0 else 0
    return kinds[int(crew.sum(found))]
