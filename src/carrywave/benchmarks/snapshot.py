"""Claim: a snapshot every 50 steps holds training up by at most 3.5% of its time.

Two workers train a language model of 2 x 650 units and 33,000 words with Adam, as replicas; a snapshot is 600 MB. Blocks of so many
steps take turns: with a snapshot that is begun before the first step and waited for after the last, and without one. So all that it
costs is counted: copying, what the writing takes from the processor and the disk, and the wait. The stall is the difference over the
block without; the median over pairs of neighbouring blocks counts. `held` is the time for which the main thread itself stood still,
`written` the time after which the snapshot was on the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from carrywave.benchmarks._workers import TimedWorkers, spread, start
from carrywave.data.batch import Batch
from carrywave.model.encoders import Embedding
from carrywave.model.heads import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World, all_gather_text
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint.snapshot import open_stored
from carrywave.runs.checkpoint.trainer_parts import part_of
from carrywave.runs.checkpoint.writer import Writer
from carrywave.step.trainer import Trainer

title = "what a snapshot costs"
COLUMNS = ("case", "workers", "snapshot_mb", "every", "step_ms", "stall", "spread", "held_ms", "held", "written_s", "target")

WORKERS = 2
TARGET = 0.035
BATCHES = 4  # that are trained on in turn
MB = 1e6


@dataclass(frozen=True)
class Case:
    """A language model, its batch, and after how many steps there is a snapshot."""

    layers: int = 2
    hidden: int = 650
    words: int = 33_000
    lanes: int = 20
    steps: int = 35
    every: int = 50
    rounds: int = 3

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.layers}x{self.hidden} vocabulary {self.words} adam, {self.lanes} lanes x {self.steps} steps"


QUICK = Case(hidden=32, words=2000, lanes=4, steps=4, every=5, rounds=2)


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """One row."""
    case = QUICK if quick else Case()
    return [row_of(case, start("snapshot", asdict(case), WORKERS))]


def row_of(case: Case, told: list[list[Row]]) -> dict[str, object]:
    """From what all workers told of each pair of blocks; the first is left out, which takes the memory and fills the caches."""
    pairs = told[0][1:]
    stalls = [pair["with_seconds"] / pair["without_seconds"] - 1 for pair in pairs]
    without = statistics.median(pair["without_seconds"] for pair in pairs)
    held = statistics.median(max(each[number + 1]["held_seconds"] for each in told) for number in range(len(pairs)))
    return {
        "case": case.name,
        "workers": len(told),
        "snapshot_mb": round(told[0][0]["num_bytes"] / MB),
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
    """Both kinds of block in turn, one pair more than counts."""
    crew = TimedWorkers(world)
    case = Case(**job)
    plan = Plan(replicas=crew.size)
    model = Model(Embedding(case.words, case.hidden), LSTM(case.hidden, case.hidden, case.layers), Softmax(case.hidden, case.words))
    trainer = Trainer(model, {"optimizer": "adam", "lr": 1e-4}, mesh=Mesh(crew.world, plan))
    generator = torch.Generator().manual_seed(0)
    shape = (BATCHES, case.steps + 1, case.lanes)
    tokens_KTB = torch.randint(case.words, shape, generator=generator)
    batches = [Batch.of(tokens_TB[:-1], tokens_TB[1:]) for tokens_TB in tokens_KTB]
    for batch in batches:
        trainer.update(batch)
    with tempfile.TemporaryDirectory(prefix="carrywave-bench-") as name:
        folder = Path(all_gather_text(crew.world, name)[0]) / "snapshots"
        writer = Writer(crew.world, folder)
        writer.meet()

        def block(number: int) -> tuple[float, float]:
            """Seconds of a block by the slowest worker; with a snapshot where it has a number, and after how long that was written."""
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
            # In turn first and second: a machine that warms up or is disturbed favours neither.
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
