"""Claim: stages on GPUs pay. The wavefront with its steps recorded as CUDA graphs is faster than every other way to run stages.

One GPU stands in for several: a *share* is a worker process under NVIDIA's MPS with a part of the multiprocessors, and reaches the memory
of the others as GPUs of one host do. The whole GPU as one device is in the table too, so that nobody mistakes shares for a gain.

- one share: the whole stack on one of the shares; ratios are relative to it (recorded), in the same run;
- sequential: stages one after another; gpipe: micro-batches of the lanes, all forward, then all backward;
- wavefront: chunks of time, with several numbers of them; recorded (the work of a stage is one CUDA graph) and launched by the host;
- replicas, of single shares and of pipelines of two.

`stages.gpu_worker` says what is timed: forward and backward in bf16, all weight gradients, messages, and sums over replicas. Variants take
turns, a block of passes each, for several rounds; the median counts, and the slowest worker of a block. Pools whose turn it is not sleep.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from carrywave.benchmarks.harness import gpu_timing
from carrywave.benchmarks.harness.standing_pool import StandingPool
from carrywave.benchmarks.harness.workers import spread
from carrywave.benchmarks.stages.gpu_variants import (
    CHUNKS,
    FEWEST_PASSES,
    QUICK,
    SETTINGS,
    TRANSPORTS,
    WHOLE,
    Described,
    Measured,
    Measurements,
    Setting,
    Variant,
    variants,
)
from carrywave.benchmarks.stages.gpu_worker import SummedStack, request_of
from carrywave.errors import RunError
from carrywave.launch.shares.mps import PERCENT, shares
from carrywave.measure.profiles import profile_of_shares
from carrywave.parallel.startup.environment import TRANSPORT
from carrywave.parallel.worker_pool import Row
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction, Predictor
from carrywave.plan.profile import Profile
from carrywave.plan.schedule.schedule import StageTask
from carrywave.plan.show import svg
from carrywave.plan.show.svg import Panel
from carrywave.plan.show.text import unit_names
from carrywave.plan.simulation import TaskSpan, Timeline
from carrywave.runs import output_file

ROUNDS, BLOCK_SECONDS = 5, 0.1
PERSISTENT = "persistent"
TASKS = ("F", "B", "H", "W")  # laps of other labels are waits and sends, in which a stage does nothing
WORKERS = "carrywave.benchmarks.stages.gpu_worker"
# The fastest recorded wavefront: least ratio to one share, and the stretch.
TARGETS = {(8, 512, 4, 25): (3.2, 3.5), (8, 512, 2, 25): (1.8, 1.9), (8, 1024, 2, 50): (1.75, 1.9)}
OVER_LAUNCHED = {(8, 512, 4, 25): 1.3}  # in device memory; over NCCL it is the target of every pipeline
OVER_LAUNCHED_NCCL = 1.3
MOST_ERROR = 0.1  # median, of predictions
# Tolerance on a loss, as a fraction of its fall over the compared steps on one share, and of the loss: in bf16 other cuts round otherwise,
# and Adam's first steps are as long for a gradient that is pure rounding error as for any other. A wrong gradient changes the fall by tens
# of percent.
OF_FALL, OF_LOSS = 0.1, 2e-3


Pools = dict[tuple[int, int, str], StandingPool]  # by percent of a GPU, number of workers, and transport
Lapped = Sequence[Sequence[Any]]  # of one worker: label, task, start and end in seconds on the device's clock


def run(
    *,
    quick: bool = False,
    rows: Sequence[str] = (),
    chunks: Sequence[int] = CHUNKS,
    rounds: int = ROUNDS,
    predict: bool = False,
    trace: Path | None = None,
    whole_step: bool = False,
) -> list[dict[str, object]]:
    """One row per variant. `rows` selects those that match all words of any entry, such as "8x512 4shares wavefront"; one share is always
    among them. `predict`: the planner's figures too, from a profile of the shares. `trace`: a picture of one step of the fastest wavefront.
    `whole_step`: time whole optimizer steps.
    """
    gpu_timing.check_gpu("gpu-pipeline")
    output_file.check(trace)
    wanted = variants(QUICK if quick else SETTINGS, chunks=chunks, rows=rows)
    most = max(each.split.workers for each in wanted)
    with shares(most, wanted[0].setting.percent) as environment:
        predictions = predicted(wanted, environment) if predict else {}
        with pools(wanted, environment, {"device": "cuda", "precision": "bf16", "whole_step": whole_step}) as ready:
            described, measured = measure(wanted, ready, rounds=rounds)
            for variant, prediction in predictions.items():
                measured[variant].predicted_ms = 1e3 * seconds_of(prediction, whole_step=whole_step)
            if trace is not None:
                draw(trace, measured, predictions, ready)
    table = [row_of(variant, measured, described) for variant in wanted]
    return [*table, dict.fromkeys(table[0]) | summary(measured)] if predict else table


@contextmanager
def pools(wanted: Sequence[Variant], environment: Mapping[str, str], job: Mapping[str, Any]) -> Iterator[Pools]:
    """A pool of workers for every size and number of shares and every transport; all start at once, and stay."""
    with ExitStack() as stack:
        ready: Pools = {}
        for each in wanted:
            key = _pool_of(each)
            if key not in ready:
                share = {**environment, PERCENT: str(each.percent), **_asking_for(each.split.transport)}
                pool = StandingPool(WORKERS, each.split.workers, job=job, environment=share, name=f"bench gpu-pipeline ({each.shares})")
                ready[key] = stack.enter_context(pool)
        yield ready


def measure(wanted: Sequence[Variant], ready: Pools, *, rounds: int) -> tuple[dict[tuple[SummedStack, int], Row], Measurements]:
    """Prepare and time all variants, one setting after another."""
    described: dict[tuple[SummedStack, int], Row] = {}
    measured: Measurements = {each: Measured() for each in wanted}
    for setting in dict.fromkeys(each.setting for each in wanted):
        same = [each for each in wanted if each.setting == setting]
        for each in same:
            key = setting.case, each.percent
            if key not in described:
                described[key] = _ask(ready, each, what="describe")
        if setting.only_if_fits and PERSISTENT not in described[setting.case, setting.percent].get("kernel", ""):
            for each in same:
                measured[each].add_note(described[setting.case, setting.percent]["note"] or "a layer does not fit on a share")
            continue
        for each in same:
            _prepare(each, measured[each], ready)
        base = measured[same[0]]
        for each in same:
            measured[each].add_note(differs(measured[each].losses, base.losses))
        for _ in range(rounds):
            for each in same:
                if measured[each].losses:
                    answer = _ask(ready, each, what="time", steps=measured[each].passes)
                    measured[each].add_note(answer["note"])
                    measured[each].ms += [] if answer["note"] else [answer["ms"]]
        for each in {_pool_of(each): each for each in same}.values():
            _ask(ready, each, what="forget")
    return described, measured


def _prepare(variant: Variant, result: Measured, ready: Pools) -> None:
    answer = _ask(ready, variant, what="prepare")
    result.add_note(answer["note"])
    if not answer["note"]:
        result.losses = answer["losses"]
        result.passes = max(FEWEST_PASSES, round(1e3 * BLOCK_SECONDS / answer["ms"]))
        result.add_note("" if answer["recorded"] == variant.split.recorded else f"it was not {variant.how}")


def _ask(ready: Pools, variant: Variant, **request: Any) -> Row:
    """The answer of a variant's pool: that of rank 0, with the time of the slowest. A pool that is gone becomes a note."""
    try:
        answers = ready[_pool_of(variant)].ask(**request_of(variant.setting.case, variant.split, **request))
    except RunError as error:
        return {"note": str(error)}
    slowest = {"ms": max(answer["ms"] for answer in answers)} if all("ms" in answer for answer in answers) else {}
    return {**answers[0], **slowest, "answers": answers}


def _pool_of(variant: Variant) -> tuple[int, int, str]:
    """The pool that runs a variant: percent of a GPU, number of workers, transport. One worker needs none."""
    return variant.percent, variant.split.workers, variant.split.transport if variant.split.workers > 1 else ""


def _asking_for(transport: str) -> dict[str, str]:
    """The environment of workers with a transport; shares use device memory unless asked."""
    return {} if transport == "device" else {TRANSPORT: transport}


def differs(losses: Sequence[float], base: Sequence[float]) -> str:
    """A note if a variant does not compute what one share computes; empty if it does, or if there is nothing to compare."""
    if not losses or not base:
        return ""
    allowed = OF_FALL * abs(base[0] - base[-1]) + OF_LOSS * abs(base[0])
    far = [number for number, (a, b) in enumerate(zip(losses, base, strict=True)) if not abs(a - b) <= allowed]
    return f"its loss at step {far[0]} is {losses[far[0]]:.4g}, but {base[far[0]]:.4g} on one share" if far else ""


# Predictions


def predicted(wanted: Sequence[Variant], environment: Mapping[str, str]) -> dict[Variant, Prediction]:
    """The planner's predictions of all variants that it can price, from profiles of the shares measured now."""
    predictions: dict[Variant, Prediction] = {}
    for setting in dict.fromkeys(each.setting for each in wanted):
        for transport in TRANSPORTS:
            priced = [each for each in wanted if each.setting == setting and each.is_priced and each.split.transport == transport]
            if priced:
                counts = sorted({each.split.workers for each in priced})
                share = {**environment, PERCENT: str(setting.percent), **_asking_for(transport)}
                predictions |= predictions_of(setting, priced, profile_of_shares(setting.case.units, share, counts))
    return predictions


def predictions_of(setting: Setting, wanted: Sequence[Variant], profile: Profile) -> dict[Variant, Prediction]:
    """The predictions of a setting's variants from the profile of its shares."""
    priced = [each for each in wanted if each.setting == setting and each.is_priced]
    predictor = Predictor(setting.case.units, Cluster.uniform(profile, max(each.split.workers for each in priced)))
    return {each: predictor.predict(each.split.plan(setting.case)) for each in priced}


def seconds_of(prediction: Prediction, *, whole_step: bool = False) -> float:
    """The predicted seconds of what is timed: without the update unless whole steps are."""
    if whole_step:
        return prediction.seconds
    return max(span.end for row in prediction.timeline.rows for span in row if span.label != "update")


def draw(file: Path, measured: Measurements, predictions: Mapping[Variant, Prediction], ready: Pools) -> None:
    """Write the picture of a step of the fastest recorded wavefront, measured and predicted."""
    best = max(
        (each for each in measured if each.split.stages > 1 and each.split.replicas == 1 and each.is_priced and measured[each].ms),
        key=lambda each: _ratio(each, measured) or 0.0,
        default=None,
    )
    if best is None:
        raise RunError(f"no recorded wavefront was timed, so there is nothing to draw in {file}; choose rows with one")
    answer = _ask(ready, best, what="trace")
    if answer["note"]:
        raise RunError(f"{best.name} could not be traced ({answer['note']}); leave out --trace")
    case, laps = best.setting.case, [each["laps"] for each in answer["answers"]]
    title = f"{case.name}, {best.shares}, {best.name}, {'recorded' if answer['recorded'] else 'launched'}"
    output_file.write(file, drawn(title, best.split.plan(case), case.layers + 2, laps, predictions.get(best)))


def drawn(title: str, plan: Plan, units: int, laps: Sequence[Lapped], prediction: Prediction | None) -> str:
    """One step as the device timed it, above what the planner predicted, as SVG. `laps` are those of all workers, by rank; the stages
    of the first replica are shown.
    """
    names = [unit_names(units, first, last) for first, last in pairwise(plan.edges(units))]
    shown = [("measured", timeline_of(laps[: plan.stages]))]
    if prediction is not None:
        rows = tuple(tuple(span for span in row if span.label in TASKS) for row in prediction.timeline.rows)
        shown.append(("predicted", replace(prediction.timeline, rows=rows)))
    panels = [Panel(f"{what}: {1e3 * line.seconds:.2f} ms, stages {line.bubble:.0%} idle", line, names) for what, line in shown]
    return svg.draw(panels, title)


def timeline_of(laps: Sequence[Lapped]) -> Timeline:
    """The tasks of each worker; time begins with the first of them."""
    rows = [[TaskSpan(label, start, end, StageTask(*task)) for label, task, start, end in lapped if label in TASKS] for lapped in laps]
    first = min(span.start for row in rows for span in row)
    moved = [[span._replace(start=span.start - first, end=span.end - first) for span in row] for row in rows]
    return Timeline(tuple(tuple(sorted(row, key=lambda span: span.start)) for row in moved), (0,) * len(moved))


# The table


def base_of(variant: Variant, measured: Measurements) -> float | None:
    """Milliseconds of one share of the same size, recorded."""
    return next((each.median_ms for other, each in measured.items() if other.is_base and other.setting == variant.setting), None)


def _ratio(variant: Variant, measured: Measurements) -> float | None:
    base_ms, ms = base_of(variant, measured), measured[variant].median_ms
    return None if base_ms is None or ms is None else base_ms / ms


def _best_ms(variant: Variant, measured: Measurements, *, recorded: bool) -> float | None:
    """Milliseconds of the fastest wavefront over the same shares."""
    alike = [
        each.median_ms
        for other, each in measured.items()
        if (other.setting, other.percent) == (variant.setting, variant.percent)
        and replace(other.split, chunks=1, recorded=True) == replace(variant.split, chunks=1, recorded=True)
        and other.split.recorded == recorded
        and each.median_ms is not None
    ]
    return min(alike, default=None)


def targets_of(variant: Variant, *, best: bool) -> list[str]:
    """The targets of the fastest recorded wavefront over some shares."""
    case, split = variant.setting.case, variant.split
    key = case.layers, case.hidden, split.stages, variant.percent
    if not best or split.replicas > 1:
        return []
    if split.transport == "nccl":
        return [f"over_launched >= {OVER_LAUNCHED_NCCL}"]
    targets = []
    if key in TARGETS:
        targets.append("ratio >= {} (stretch {})".format(*TARGETS[key]))
    if key in OVER_LAUNCHED:
        targets.append(f"over_launched >= {OVER_LAUNCHED[key]}")
    return targets


def row_of(variant: Variant, measured: Measurements, described: Described) -> dict[str, object]:
    """The row of a variant."""
    result, split = measured[variant], variant.split
    share = described.get((variant.setting.case, variant.percent), {})
    ms, ratio, bubble = result.median_ms, _ratio(variant, measured), variant.bubble
    launched_ms, best_ms = (_best_ms(variant, measured, recorded=recorded) for recorded in (False, True))
    best = split.stages > 1 and split.family == "wavefront" and split.recorded and ms is not None and ms == best_ms
    return {
        "case": variant.setting.case.name,
        "shares": variant.shares,
        "multiprocessors": share.get("multiprocessors"),
        "variant": variant.name,
        "transport": variant.transport,
        "how": variant.how,
        "ms": None if ms is None else round(ms, 2),
        "spread": None if ms is None else round(spread(result.ms), 3),
        "ratio": None if ratio is None else round(ratio, 2),
        "efficiency": None if ratio is None or variant.percent == WHOLE else round(ratio / split.workers, 2),
        "over_launched": round(launched_ms / ms, 2) if best and launched_ms is not None and ms is not None else None,
        "bubble": None if bubble is None else round(bubble, 3),
        "predicted_ms": None if result.predicted_ms is None else round(result.predicted_ms, 2),
        "error": None if result.predicted_ms is None or ms is None else round(result.predicted_ms / ms - 1, 3),
        "kernel": share.get("kernel"),
        "target": "; ".join(targets_of(variant, best=best)),
        "note": "; ".join(result.notes),
    }


def summary(measured: Measurements) -> dict[str, object]:
    """The last row: how far the predictions are off."""
    errors = [abs(each.predicted_ms / each.median_ms - 1) for each in measured.values() if each.predicted_ms and each.median_ms]
    text = f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}" if errors else "nothing was predicted and timed"
    named = {"case": "all", "variant": f"{len(errors)} predicted", "target": f"median error <= {MOST_ERROR:.0%}", "note": text}
    return {"how": "recorded", "error": round(statistics.median(errors), 3) if errors else None, **named}
