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

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from carrywave.benchmarks.harness.loaded_loops import CLASSES, FEATURES, TRAIN, LabelledLengths, examples
from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.harness.workers import Loop, TimedWorkers, crew_sizes, printed, spread, start, time_loops
from carrywave.benchmarks.peers import pipeline_loops as peers
from carrywave.benchmarks.peers.pipeline_loops import DataParallelSequences, classifier
from carrywave.benchmarks.peers.plain_loops import collate
from carrywave.benchmarks.pipeline import CHECKED, Step, check_losses, counted, first_steps, ours
from carrywave.data.batch import Batch
from carrywave.model.encoders import Numbers
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.step.trainer import Trainer

FIXED = (LanguageShape(2, 256, 32, 64, 1000), LanguageShape(2, 650, 32, 35, 1000))
QUICK = LanguageShape(2, 16, 8, 8, 50)
SMALL_BUCKET_MB = 2
LOOPS = ("serial", "carrywave")  # ours; the rest are peers


def run(*, quick: bool = False, workers: Sequence[int] | None = None) -> list[dict[str, object]]:
    """One row per loop. `workers`: how many, instead of up to one for two cores."""
    rounds, seconds = (2, 0.02) if quick else (5, 0.3)
    lengths = LabelledLengths(8, 100, 256, 200) if quick else LabelledLengths(128, 1000, 8192)
    cases: list[LanguageShape | LabelledLengths] = [*((QUICK,) if quick else FIXED), lengths]
    rows: list[dict[str, object]] = []
    for size in workers or ([2] if quick else crew_sizes()):
        job = {"cases": [asdict(case) for case in cases], "rounds": rounds, "seconds": seconds}
        timed = start(__name__, job, size)[0]
        for number, case in enumerate(cases):
            name, target = (f"fixed {case.name}", 1.0) if isinstance(case, LanguageShape) else (case.name, 1.5)
            rows += printed(rows_of(name, size, [row for row in timed if row["case"] == number], target))
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


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: time one case after another."""
    crew = TimedWorkers(world)
    for number, given in enumerate(job["cases"]):
        loops, lstm, first = _lengths(crew, LabelledLengths(**given)) if "longest" in given else _fixed(crew, LanguageShape(**given))
        for name, timing in time_loops(crew, loops, rounds=job["rounds"], seconds=job["seconds"], first=first).items():
            yield {
                "case": number,
                "loop": name,
                "lstm": peers.OURS if name in LOOPS else peers.NATIVE if "packed" in name else lstm,
                "tokens_per_second": statistics.median(timing.tokens_per_second),
                "spread": spread(timing.tokens_per_second),
                "tokens": sum(timing.tokens),
            }


def _fixed(crew: TimedWorkers, case: LanguageShape) -> tuple[dict[str, Loop], str, int]:
    lstm = peers.fastest_lstm(crew, case, case.lanes // crew.size)
    loops: dict[str, Step | None] = {
        "serial": ours(case, _alone()) if crew.rank == 0 else None,
        "carrywave": ours(case, _together(crew)),
        "DDP": peers.DataParallel(case, lstm, crew.rank, crew.size).step,
        "DDP, small buckets": peers.DataParallel(case, lstm, crew.rank, crew.size, SMALL_BUCKET_MB).step,
    }
    check_losses({name: first_steps(crew, loop)[1] for name, loop in loops.items()}, reference="serial")
    # Every worker counts its own share of the lanes; all shares are equal.
    tokens = {name: case.lanes * case.steps // (1 if name == "serial" else crew.size) for name in loops}
    return {name: counted(loop, tokens[name]) for name, loop in loops.items()}, lstm, CHECKED[-1] + 1


def _lengths(crew: TimedWorkers, case: LabelledLengths) -> tuple[dict[str, Loop], str, int]:
    data = case.data()
    mean_length = float(data.lengths.mean())
    batch = max(1, round(case.tokens / mean_length / crew.size))
    lstm = peers.fastest_lstm(crew, LanguageShape(1, case.hidden, batch, round(mean_length), 1), batch)
    sequences, labels = examples(data)

    def plain(packed: bool) -> Loop:
        loop = _plain(crew, case, sequences, labels, batch, lstm, packed)
        return lambda number: loop.step()[1]

    def loaded(mesh: Mesh) -> Loop:
        step = case.loop(data, mesh)
        return lambda number: step()

    _check(crew, case, sequences[: 2 * crew.size], labels[: 2 * crew.size], lstm)
    loops = {
        "serial": loaded(_alone()) if crew.rank == 0 else lambda number: 0,
        "carrywave": loaded(_together(crew)),
        "DDP, padded": plain(False),
        "DDP, packed": plain(True),
    }
    return loops, lstm, 0


def _alone() -> Mesh:
    return Mesh.alone(peers.CPU)


def _together(crew: TimedWorkers) -> Mesh:
    return Mesh(crew.world, Plan(replicas=crew.size))


def _plain(
    crew: TimedWorkers, case: LabelledLengths, sequences: Sequence[Tensor], labels: Sequence[int], batch: int, lstm: str, packed: bool
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


def _check(crew: TimedWorkers, case: LabelledLengths, sequences: Sequence[Tensor], labels: Sequence[int], lstm: str) -> None:
    """Check every loop on a few sequences that form one batch, so that order does not matter: losses must match those of one worker."""
    each = len(sequences) // crew.size
    x_TBF, lengths_B, labels_B = collate(list(zip(sequences, labels, strict=True)))
    batch = Batch.of(x_TBF, labels_B, lengths_B, pooled=True)
    weights = classifier(FEATURES, case.hidden, CLASSES)

    def trained(mesh: Mesh) -> Step:
        model = Model(Numbers(FEATURES), LSTM(FEATURES, case.hidden), PooledSoftmax(case.hidden, CLASSES))
        model.lstm.load_state_dict(weights.lstm.state_dict())
        model.head.load_state_dict(weights.linear.state_dict())
        trainer = Trainer(model, TRAIN, mesh=mesh)
        return lambda number: trainer.step(batch)

    def plain(packed: bool) -> Step:
        loop = _plain(crew, case, sequences, labels, each, lstm, packed)
        return lambda number: loop.step()[0]

    loops: dict[str, Step | None] = {
        "serial": trained(_alone()) if crew.rank == 0 else None,
        "carrywave": trained(_together(crew)),
        "DDP, padded": plain(False),
        "DDP, packed": plain(True),
    }
    check_losses({name: first_steps(crew, loop)[1] for name, loop in loops.items()}, reference="serial")
