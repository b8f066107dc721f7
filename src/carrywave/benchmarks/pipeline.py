"""Claim: the wavefront (time chunks moving through layers on several workers) beats every other way to split one step among them.

All variants run in the same worker processes, one thread each, with the same model, batches, optimizer, clipping and cuts, and take turns:

- serial: one worker with one thread, ours and plain PyTorch; speed-up and efficiency are relative to the faster one;
- sequential: stages one after another; round-robin: layers assigned to workers in turn, the whole batch sent at every layer;
- gpipe: micro-batches of the lanes (ours), and torch.distributed.pipelining's GPipe and 1F1B, each with the best number of micro-batches;
- DDP: data parallel with the same global batch, an equal share of the lanes on every worker;
- DDP and torch's pipelines run twice: with the fastest LSTM, which may be ours, and with nn.LSTM, which most programs use;
- replicas: ours, with the same global batch as DDP; replicas x wavefront: both;
- wavefront: with several numbers of chunks, with the head's work shared by all workers, with micro-batches as well (1F1B), and with
  recomputation.

A loop is timed only if its losses over the first steps match the serial ones. Peak memory is a worker's high-water mark above its level
before the model was built, as recorded by the operating system, in fresh processes for each loop.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from carrywave.benchmarks.harness.shapes import BATCHES, LanguageShape
from carrywave.benchmarks.harness.workers import (
    Loop,
    TimedWorkers,
    crew_sizes,
    memory_mib,
    printed,
    reset_peak,
    spread,
    start,
    time_loops,
    timed_block,
)
from carrywave.benchmarks.peers import pipeline_loops as peers
from carrywave.benchmarks.stages.variants import PIPELINES, SCHEDULERS, TORCH, Variant, bubble_of, plan_of, targets_of, variants_of
from carrywave.data.batch import Batch
from carrywave.errors import RunError
from carrywave.launch.hardware import cores
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.schedule.schedule import Schedule
from carrywave.step.trainer import Trainer

CASES = (LanguageShape(4, 512, 16, 128, 2000), LanguageShape(4, 1024, 16, 64, 2000), LanguageShape(8, 256, 32, 256, 2000))
WIDE = LanguageShape(8, 512, 16, 64, 2000)  # only with 8 workers or more
QUICK = LanguageShape(4, 32, 8, 16, 50)
# The first steps all use one batch: its loss falls fast, which shows the effect of each update.
CHECKED = (0, BATCHES, 2 * BATCHES)
# Tolerance on the loss: a fraction of the serial loss's decrease over these steps, plus a fraction of the loss itself. Float32 sums differ
# by about 1e-7 of the loss, which the second term covers. Adam amplifies that, because its first steps are as long for a gradient that is
# pure rounding error as for any other, but only by a small part of the decrease. A wrong gradient changes the decrease by tens of percent.
OF_FALL, OF_LOSS = 0.02, 1e-6


Step = Callable[[int], Tensor | None]  # runs one optimizer step; returns its loss on the workers that have it


def run(
    *, quick: bool = False, cases: Sequence[LanguageShape] | None = None, workers: Sequence[int] | None = None, speed_only: bool = False
) -> list[dict[str, object]]:
    """One row per loop. A case with fewer layers than workers has only loops with replicas; with fewer than half as many, none."""
    sizes = list(workers) if workers is not None else [2] if quick else crew_sizes()
    rows: list[dict[str, object]] = []
    for size in sizes:
        wanted = cases if cases is not None else (QUICK,) if quick else (*CASES, WIDE) if size >= 8 else CASES
        for case in wanted:
            if size <= 2 * case.layers:
                rows += printed(_compare(case, size, quick=quick, memory=not speed_only))
    return rows


def _compare(case: LanguageShape, size: int, *, quick: bool, memory: bool) -> list[dict[str, object]]:
    variants = variants_of(case, size, quick=quick)
    rounds, seconds = (2, 0.02) if quick else (3, 0.5)
    job = {"case": asdict(case), "variants": [asdict(each) for each in variants], "rounds": rounds, "seconds": seconds}
    timed = start(__name__, {**job, "what": "time"}, size)[0]
    kept = [Variant(**row["variant"]) for row in timed]
    peaks: list[list[float] | None] = [None] * len(kept)
    if memory:
        lstms = [row["lstm"] for row in timed]
        # Every loop needs fresh workers, which take seconds to start, so the quick form measures only two loops.
        measured = [each for each in range(len(kept)) if not quick or kept[each] in (Variant("serial"), Variant("wavefront", chunks=4))]
        with ThreadPoolExecutor(max(1, cores() // size)) as pool:
            jobs = [{"what": "memory", "case": asdict(case), "variant": asdict(kept[each]), "lstm": lstms[each]} for each in measured]
            for each, of_workers in zip(measured, pool.map(partial(_peaks, size=size), jobs), strict=True):
                peaks[each] = of_workers
    return _rows(case, size, kept, timed, peaks)


def _peaks(job: Row, size: int) -> list[float]:
    """Peak MiB of each participating worker."""
    return [row["peak_mib"] for rows in start(__name__, job, size, exact_memory=True) for row in rows]


# In a worker


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: time all loops in turn, or measure the memory of one."""
    crew = TimedWorkers(world)
    case = LanguageShape(**job["case"])
    if job["what"] == "memory":
        yield from _remember(crew, case, Variant(**job["variant"]), job["lstm"])
        return
    variants = [Variant(**each) for each in job["variants"]]
    # The fastest LSTM for the peers, on a worker's share of the lanes under data parallelism, which is also a typical micro-batch; and the
    # fastest of torch's own.
    lstms = peers.fastest_lstm(crew, case, max(1, case.lanes // crew.size)), peers.fastest_lstm(crew, case, case.lanes, peers.LSTMS[:2])
    loops: dict[Variant, Step | None] = {}
    losses: dict[Variant, list[float]] = {}
    first_ms: dict[Variant, float] = {}
    for variant in variants:
        loops[variant] = loop_of(variant, case, crew, _lstm_name(variant, lstms))
        first_ms[variant], losses[variant] = first_steps(crew, loops[variant])
    check_losses({variant.name: values for variant, values in losses.items()}, reference=Variant("serial").name)
    kept = _best_of_families(first_ms)
    # Free the loops that are not timed further, so that they do not take memory from the others.
    loops = {variant: loops[variant] for variant in kept}
    steps = {variant.name: counted(loop) for variant, loop in loops.items()}
    timings = time_loops(crew, steps, rounds=job["rounds"], seconds=job["seconds"], first=CHECKED[-1] + 1)
    for variant in kept:
        step_ms = timings[variant.name].step_ms
        yield {
            "variant": asdict(variant),
            "lstm": _lstm_name(variant, lstms),
            "step_ms": statistics.median(step_ms),
            "spread": spread(step_ms),
            "losses": losses[variant],
        }


def _lstm_name(variant: Variant, lstms: tuple[str, str]) -> str:
    ours = variant.family in ("serial", *SCHEDULERS)
    return peers.OURS if ours else lstms[variant.family == "serial PyTorch" or variant.family.endswith(TORCH)]


def loop_of(variant: Variant, case: LanguageShape, crew: TimedWorkers, lstm: str) -> Step | None:
    """The loop of a variant on this worker; None if this worker has no part in it."""
    match variant.family.removesuffix(TORCH):
        case "serial":
            return ours(case, Mesh.alone(peers.CPU)) if crew.rank == 0 else None
        case "serial PyTorch":
            return peers.Serial(case, lstm).step if crew.rank == 0 else None
        case "round-robin":
            return peers.RoundRobin(case, lstm, crew.rank, crew.size).step
        case "DDP":
            return peers.DataParallel(case, lstm, crew.rank, crew.size).step
        case "torch GPipe" | "torch 1F1B":
            return peers.TorchPipeline(case, lstm, crew.rank, crew.size, variant.family.split()[1], variant.micro_batches).step
        case _:
            return ours(case, Mesh(crew.world, plan_of(variant, case, crew.size)), SCHEDULERS[variant.family])


def ours(case: LanguageShape, mesh: Mesh, scheduler: Callable[..., Schedule] | None = None) -> Step:
    """Our trainer, with the plan of a mesh."""
    train = {"optimizer": "adam", "lr": peers.LR, "clip": peers.CLIP, "precision": "fp32"}
    trainer = Trainer(case.model(), train, mesh=mesh, keep_state=False)
    if scheduler is not None:
        trainer.compute.scheduler = scheduler
    batches = [Batch.of(x_TB, target_TB) for x_TB, target_TB in case.batches()]
    return lambda number: trainer.step(batches[number % len(batches)])


def _mean_loss(crew: TimedWorkers, loop: Step | None, number: int) -> float:
    """Run a step and return its loss, the same on every worker. If several workers have a loss, each covers an equal share of the lanes."""
    loss = None if loop is None else loop(number)
    return crew.sum(0.0 if loss is None else float(loss)) / crew.sum(loss is not None)


def first_steps(crew: TimedWorkers, loop: Step | None) -> tuple[float, list[float]]:
    """Run the checked steps; returns the fastest time after the first step, in milliseconds, and all losses."""
    losses: list[float] = []

    def step(number: int) -> int:
        losses.append(_mean_loss(crew, loop, number))
        return 0

    seconds = [timed_block(crew, step, 1, number)[0] for number in CHECKED]
    return 1e3 * min(seconds[1:]), losses


def counted(loop: Step | None, tokens: int = 0) -> Loop:
    """A loop whose steps return how many tokens this worker has trained on; none if it has no part in it."""

    def step(number: int) -> int:
        if loop is None:
            return 0
        loop(number)
        return tokens

    return step


def check_losses(losses: dict[str, list[float]], reference: str) -> None:
    """Raise if a loop does not compute what one worker computes."""
    serial = losses[reference]
    allowed = OF_FALL * (serial[0] - serial[-1]) + OF_LOSS * serial[0]
    for name, values in losses.items():
        for number, (value, wanted) in enumerate(zip(values, serial, strict=True)):
            if not abs(value - wanted) <= allowed:
                raise RunError(
                    f"{name} has loss {value} at step {number}, but {reference} has {wanted}: they do not compute the same; "
                    "fix that before comparing their speed"
                )


def _best_of_families(first_ms: dict[Variant, float]) -> list[Variant]:
    """All variants, but for each micro-batch pipeline only the one with the fastest number of micro-batches."""
    tuned = ("gpipe", *PIPELINES, *(f"{family}{TORCH}" for family in PIPELINES))
    best = {
        family: min((each for each in first_ms if each.family == family), key=first_ms.__getitem__)
        for family in tuned
        if any(each.family == family for each in first_ms)
    }
    return [each for each in first_ms if each.family not in tuned or best[each.family] == each]


def _remember(crew: TimedWorkers, case: LanguageShape, variant: Variant, lstm: str) -> Iterator[Row]:
    """Measure peak memory over a few steps, above the level before the model was built."""
    # Warm up with a small model, so that libraries, threads and connections created by any first step are not counted.
    small = replace(case, hidden=16, vocabulary=50, steps=max(8, variant.chunks * 2))
    warm = loop_of(variant, small, crew, lstm)
    for number in range(2):
        _mean_loss(crew, warm, number)
    del warm
    gc.collect()
    before = memory_mib()
    loop = loop_of(variant, case, crew, lstm)
    gc.collect()
    reset_peak()
    for number in range(3):
        _mean_loss(crew, loop, number)
    if loop is not None:
        yield {"peak_mib": memory_mib("VmHWM") - before}


# In the parent


def _rows(
    case: LanguageShape, size: int, variants: Sequence[Variant], timed: Sequence[Row], peaks: Sequence[list[float] | None]
) -> list[dict[str, object]]:
    by_family: dict[str, float] = {}
    for variant, row in zip(variants, timed, strict=True):
        by_family[variant.family] = min(row["step_ms"], by_family.get(variant.family, torch.inf))
    serial_ms = min(by_family["serial"], by_family["serial PyTorch"])
    pipelining_ms, nn_lstm_ms = (min(by_family.get(f"{family}{kind}", torch.inf) for family in PIPELINES) for kind in ("", TORCH))
    pipelining_ms = min(pipelining_ms, nn_lstm_ms)
    serial_mib = next((max(each) for variant, each in zip(variants, peaks, strict=True) if variant.family == "serial" and each), None)
    rows: list[dict[str, object]] = []
    for variant, row, peaks_mib in zip(variants, timed, peaks, strict=True):
        step_ms = row["step_ms"]
        alone = variant.family.startswith("serial")
        bubble = None if alone else bubble_of(variant, size)
        best = variant.family == "wavefront" and step_ms == by_family.get("wavefront")
        rows.append(
            {
                "case": case.name,
                "workers": 1 if alone else size,
                "variant": variant.name,
                "lstm": row["lstm"],
                "step_ms": round(step_ms, 2),
                "spread": round(row["spread"], 3),
                "speedup": round(serial_ms / step_ms, 3),
                "efficiency": round(serial_ms / step_ms / (1 if alone else size), 3),
                "over_pipelining": None if PIPELINES[0] not in by_family else round(pipelining_ms / step_ms, 3),
                "over_pipelining_nn_lstm": None if PIPELINES[0] not in by_family else round(nn_lstm_ms / step_ms, 3),
                "over_ddp": round(min(by_family["DDP"], by_family[f"DDP{TORCH}"]) / step_ms, 3),
                "over_ddp_nn_lstm": round(by_family[f"DDP{TORCH}"] / step_ms, 3),
                "bubble": None if bubble is None else round(bubble, 3),
                "peak_mib": None if peaks_mib is None else round(max(peaks_mib), 1),
                "peak_share": None if peaks_mib is None or serial_mib is None else round(max(peaks_mib) / serial_mib, 3),
                "peak_mib_each": None if peaks_mib is None else " ".join(f"{each:.0f}" for each in peaks_mib),
                "target": "; ".join(targets_of(case, size, variant, best=best)),
            }
        )
    return rows
