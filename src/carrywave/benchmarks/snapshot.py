"""Claim: a snapshot every 50 steps slows training down by at most 3.5%.

Two replicas train a language model with 2 x 650 units and 33,000 words using Adam; a snapshot is 600 MB. Blocks of 50 steps alternate: one
with a snapshot, started before the first step and awaited after the last, and one without. So the full cost is counted: copying, CPU and
disk contention while writing, and the final wait. `stall` is the extra time relative to the block without; the median over pairs of
adjacent blocks counts. `held_ms` is the time the main thread itself was blocked (`held`: as a fraction of the block), `written_s` the time
until the snapshot was on disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carrywave.benchmarks.harness.shapes import BATCHES, LanguageShape
from carrywave.benchmarks.harness.workers import TimedWorkers, spread, start
from carrywave.data.batch import Batch
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World, all_gather_text
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint.snapshot import open_stored
from carrywave.runs.checkpoint.trainer_parts import part_of
from carrywave.runs.checkpoint.writer import Writer
from carrywave.step.trainer import Trainer

WORKERS = 2
TARGET = 0.035
MB = 1e6


@dataclass(frozen=True)
class SnapshotShape(LanguageShape):
    """A language model, and the number of steps between snapshots."""

    every: int = 50
    rounds: int = 3


FULL = SnapshotShape(2, 650, 20, 35, 33_000)
QUICK = SnapshotShape(2, 32, 4, 4, 2000, every=5, rounds=2)


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """One row."""
    case = QUICK if quick else FULL
    return [row_of(case, start(__name__, asdict(case), WORKERS))]


def row_of(case: SnapshotShape, rows: list[list[Row]]) -> dict[str, object]:
    """Summarise the pairs of blocks of all workers, without the first, which allocates memory and fills caches."""
    pairs = rows[0][1:]
    stalls = [pair["with_seconds"] / pair["without_seconds"] - 1 for pair in pairs]
    without = statistics.median(pair["without_seconds"] for pair in pairs)
    held = statistics.median(max(each[number + 1]["held_seconds"] for each in rows) for number in range(len(pairs)))
    return {
        "case": case.long_name,
        "workers": len(rows),
        "snapshot_mb": round(rows[0][0]["num_bytes"] / MB),
        "every": case.every,
        "step_ms": round(1e3 * without / case.every, 1),
        "stall": round(statistics.median(stalls), 4),
        "spread": round(spread([pair["without_seconds"] for pair in pairs]), 3),
        "held_ms": round(1e3 * held, 1),
        "held": round(held / without, 4),
        "written_s": round(statistics.median(pair["written_seconds"] for pair in pairs), 2),
        "target": TARGET,
    }


# In a worker


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: alternate both kinds of block, with one extra pair to warm up."""
    crew = TimedWorkers(world)
    case = SnapshotShape(**job)
    mesh = Mesh(crew.world, Plan(replicas=crew.size))
    trainer = Trainer(case.model(), {"optimizer": "adam", "lr": 1e-4, "precision": "fp32"}, mesh=mesh)
    batches = [Batch.of(x_TB, target_TB) for x_TB, target_TB in case.batches()]
    for batch in batches:
        trainer.update(batch)
    with tempfile.TemporaryDirectory(prefix="carrywave-bench-") as name:
        folder = Path(all_gather_text(crew.world, name)[0]) / "snapshots"
        writer = Writer(crew.world, folder)
        writer.meet()

        def block(number: int) -> tuple[float, float]:
            """Seconds of a block, with a snapshot unless `number` is 0, and until that was written; each for the slowest worker."""
            crew.barrier()
            began = time.perf_counter()
            written: list[float] = []
            if number:
                meta = {"number": number} if crew.rank == 0 else None
                name = f"step-{number}"
                done = lambda: written.append(time.perf_counter() - began)  # noqa: E731
                writer.begin(name, part_of(trainer, case.lanes), meta, keep=1, before=done)
            for step in range(case.every):
                trainer.update(batches[step % BATCHES])
            if number and (failure := writer.settle()) is not None:
                raise failure
            return crew.most(time.perf_counter() - began), crew.most(written[0] if written else 0.0)

        for pair in range(case.rounds + 1):
            held = writer.held_seconds
            # Alternate which comes first, so that warm-up or interference on the machine favours neither.
            order = (pair + 1, 0) if pair % 2 else (0, pair + 1)
            blocks = {number: block(number) for number in order}
            manifest = open_stored(folder).manifest
            yield {
                "with_seconds": blocks[pair + 1][0],
                "without_seconds": blocks[0][0],
                "written_seconds": blocks[pair + 1][1],
                "held_seconds": writer.held_seconds - held,
                "num_bytes": sum(file.num_bytes for file in manifest.files.values()),
            }
        crew.barrier()
