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
from pathlib import Path
from typing import Any

from carrywave.benchmarks.harness.standing_pool import StandingPool
from carrywave.benchmarks.harness.workers import spread
from carrywave.benchmarks.peers import gpu_loops as peers
from carrywave.benchmarks.stages import gpu_trace as pictures
from carrywave.benchmarks.stages.gpu_variants import (
    CHUNKS,
    FEWEST_PASSES,
    QUICK,
    SETTINGS,
    WHOLE,
    Described,
    Found,
    Measured,
    Setting,
    Variant,
    variants,
)
from carrywave.benchmarks.stages.gpu_worker import Case, asked
from carrywave.errors import RunError
from carrywave.launch.shares.mps import PERCENT, shares
from carrywave.measure.profiles import profile_of_shares
from carrywave.parallel.worker_pool import Row
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Profile
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.runs import output_file

title = "stages and replicas on shares of one GPU"
COLUMNS = (
    "case",
    "shares",
    "multiprocessors",
    "variant",
    "how",
    "ms",
    "spread",
    "ratio",
    "efficiency",
    "over_launched",
    "bubble",
    "predicted_ms",
    "error",
    "kernel",
    "target",
    "note",
)

ROUNDS, BLOCK_SECONDS = 5, 0.1
PERSISTENT = "persistent"
WORKERS = "carrywave.benchmarks.stages.gpu_worker"
# The fastest recorded wavefront: least ratio to one share, and the stretch.
TARGETS = {(8, 512, 4, 25): (3.2, 3.5), (8, 512, 2, 25): (1.8, 1.9), (8, 1024, 2, 50): (1.75, 1.9)}
OVER_LAUNCHED = {(8, 512, 4, 25): 1.3}
MOST_ERROR = 0.1  # median, of predictions
# Tolerance on a loss, as a fraction of its fall over the compared steps on one share, and of the loss: in bf16 other cuts round otherwise,
# and Adam's first steps are as long for a gradient that is pure rounding error as for any other. A wrong gradient changes the fall by tens
# of percent.
OF_FALL, OF_LOSS = 0.1, 2e-3


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
    peers.check_gpu("gpu-pipeline")
    output_file.check(trace)
    wanted = variants(QUICK if quick else SETTINGS, chunks=chunks, rows=rows)
    most = max(each.split.workers for each in wanted)
    with shares(most, wanted[0].setting.percent) as environment:
        predictions = predicted(wanted, environment) if predict else {}
        with pools(wanted, environment, {"device": "cuda", "precision": "bf16", "whole_step": whole_step}) as ready:
            described, found = measure(wanted, ready, rounds=rounds)
            for variant, prediction in predictions.items():
                found[variant].predicted_ms = 1e3 * seconds_of(prediction, whole_step=whole_step)
            if trace is not None:
                draw(trace, found, predictions, ready)
    table = [row_of(variant, found, described) for variant in wanted]
    return [*table, summary(found)] if predict else table


@contextmanager
def pools(
    wanted: Sequence[Variant], environment: Mapping[str, str], job: Mapping[str, Any]
) -> Iterator[dict[tuple[int, int], StandingPool]]:
    """A pool of workers for every size and number of shares; all start at once, and stay."""
    with ExitStack() as stack:
        ready: dict[tuple[int, int], StandingPool] = {}
        for each in wanted:
            key = each.percent, each.split.workers
            if key not in ready:
                own = {**environment, PERCENT: str(each.percent)}
                pool = StandingPool(WORKERS, each.split.workers, job=job, environment=own, name=f"bench gpu-pipeline ({each.shares})")
                ready[key] = stack.enter_context(pool)
        yield ready


def measure(
    wanted: Sequence[Variant], ready: Mapping[tuple[int, int], StandingPool], *, rounds: int
) -> tuple[dict[tuple[Case, int], Row], Found]:
    """Prepare and time all variants, one setting after another."""
    described: dict[tuple[Case, int], Row] = {}
    found: Found = {each: Measured() for each in wanted}
    for setting in dict.fromkeys(each.setting for each in wanted):
        own = [each for each in wanted if each.setting == setting]
        for each in own:
            key = setting.case, each.percent
            if key not in described:
                described[key] = _ask(ready, each, what="describe")
        if setting.only_if_fits and PERSISTENT not in described[setting.case, setting.percent].get("kernel", ""):
            for each in own:
                found[each].say(described[setting.case, setting.percent]["note"] or "a layer does not fit on a share")
            continue
        for each in own:
            _prepare(each, found[each], ready)
        base = found[own[0]]
        for each in own:
            found[each].say(differs(found[each].losses, base.losses))
        for _ in range(rounds):
            for each in own:
                if found[each].losses:
                    answer = _ask(ready, each, what="time", steps=found[each].passes)
                    found[each].say(answer["note"])
                    found[each].ms += [] if answer["note"] else [answer["ms"]]
        for each in {(each.percent, each.split.workers): each for each in own}.values():
            _ask(ready, each, what="forget")
    return described, found


def _prepare(variant: Variant, measured: Measured, ready: Mapping[tuple[int, int], StandingPool]) -> None:
    answer = _ask(ready, variant, what="prepare")
    measured.say(answer["note"])
    if not answer["note"]:
        measured.losses = answer["losses"]
        measured.passes = max(FEWEST_PASSES, round(1e3 * BLOCK_SECONDS / answer["ms"]))
        measured.say("" if answer["recorded"] == variant.split.recorded else f"it was not {variant.how}")


def _ask(ready: Mapping[tuple[int, int], StandingPool], variant: Variant, **request: Any) -> Row:
    """The answer of a variant's pool: that of rank 0, with the time of the slowest. A pool that is gone becomes a note."""
    try:
        answers = ready[variant.percent, variant.split.workers].ask(**asked(variant.setting.case, variant.split, **request))
    except RunError as error:
        return {"note": str(error)}
    slowest = {"ms": max(answer["ms"] for answer in answers)} if all("ms" in answer for answer in answers) else {}
    return {**answers[0], **slowest, "answers": answers}


def differs(losses: Sequence[float], base: Sequence[float]) -> str:
    """A note if a variant does not compute what one share computes; empty if it does, or if there is nothing to compare."""
    if not losses or not base:
        return ""
    allowed = OF_FALL * abs(base[0] - base[-1]) + OF_LOSS * abs(base[0])
    far = [number for number, (own, wanted) in enumerate(zip(losses, base, strict=True)) if not abs(own - wanted) <= allowed]
    return f"its loss at step {far[0]} is {losses[far[0]]:.4g}, but {base[far[0]]:.4g} on one share" if far else ""


# Predictions


def predicted(wanted: Sequence[Variant], environment: Mapping[str, str]) -> dict[Variant, Prediction]:
    """The planner's predictions of all variants that it can price, from profiles of the shares measured now."""
    found: dict[Variant, Prediction] = {}
    for setting in dict.fromkeys(each.setting for each in wanted):
        counts = sorted({each.split.workers for each in wanted if each.setting == setting and each.is_priced})
        profile = profile_of_shares(setting.case.units, {**environment, PERCENT: str(setting.percent)}, counts)
        found |= predictions_of(setting, wanted, profile)
    return found


def predictions_of(setting: Setting, wanted: Sequence[Variant], profile: Profile) -> dict[Variant, Prediction]:
    """The predictions of a setting's variants from the profile of its shares."""
    own = [each for each in wanted if each.setting == setting and each.is_priced]
    predictor = Predictor(setting.case.units, Cluster.uniform(profile, max(each.split.workers for each in own)))
    return {each: predictor.predict(each.split.plan(setting.case)) for each in own}


def seconds_of(prediction: Prediction, *, whole_step: bool = False) -> float:
    """The predicted seconds of what is timed: without the update unless whole steps are."""
    if whole_step:
        return prediction.seconds
    return max(span.end for row in prediction.timeline.rows for span in row if span.label != "update")


def draw(file: Path, found: Found, predictions: Mapping[Variant, Prediction], ready: Mapping[tuple[int, int], StandingPool]) -> None:
    """Write the picture of a step of the fastest recorded wavefront, measured and predicted."""
    best = max(
        (each for each in found if each.split.stages > 1 and each.split.replicas == 1 and each.is_priced and found[each].ms),
        key=lambda each: _ratio(each, found) or 0.0,
        default=None,
    )
    if best is None:
        raise RunError(f"no recorded wavefront was timed, so there is nothing to draw in {file}; choose rows with one")
    answer = _ask(ready, best, what="trace")
    if answer["note"]:
        raise RunError(f"{best.name} could not be traced ({answer['note']}); leave out --trace")
    case, laps = best.setting.case, [each["laps"] for each in answer["answers"]]
    said = f"{case.name}, {best.shares}, {best.name}, {'recorded' if answer['recorded'] else 'launched'}"
    output_file.write(file, pictures.drawn(said, best.split.plan(case), case.layers + 2, laps, predictions.get(best)))


# The table


def base_of(variant: Variant, found: Found) -> float | None:
    """Milliseconds of one share of the same size, recorded."""
    return next((each.median_ms for other, each in found.items() if other.is_base and other.setting == variant.setting), None)


def _ratio(variant: Variant, found: Found) -> float | None:
    base_ms, own_ms = base_of(variant, found), found[variant].median_ms
    return None if base_ms is None or own_ms is None else base_ms / own_ms


def _best_ms(variant: Variant, found: Found, *, recorded: bool) -> float | None:
    """Milliseconds of the fastest wavefront over the same shares."""
    alike = [
        each.median_ms
        for other, each in found.items()
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
    found = []
    if key in TARGETS:
        found.append("ratio >= {} (stretch {})".format(*TARGETS[key]))
    if key in OVER_LAUNCHED:
        found.append(f"over_launched >= {OVER_LAUNCHED[key]}")
    return found


def row_of(variant: Variant, found: Found, described: Described) -> dict[str, object]:
    """The row of a variant."""
    own, split = found[variant], variant.split
    share = described.get((variant.setting.case, variant.percent), {})
    ms, ratio, bubble = own.median_ms, _ratio(variant, found), variant.bubble
    launched_ms, best_ms = (_best_ms(variant, found, recorded=recorded) for recorded in (False, True))
    best = split.stages > 1 and split.family == "wavefront" and split.recorded and ms is not None and ms == best_ms
    return {
        "case": variant.setting.case.name,
        "shares": variant.shares,
        "multiprocessors": share.get("multiprocessors"),
        "variant": variant.name,
        "how": variant.how,
        "ms": None if ms is None else round(ms, 2),
        "spread": None if ms is None else round(spread(own.ms), 3),
        "ratio": None if ratio is None else round(ratio, 2),
        "efficiency": None if ratio is None or variant.percent == WHOLE else round(ratio / split.workers, 2),
        "over_launched": round(launched_ms / ms, 2) if best and launched_ms is not None and ms is not None else None,
        "bubble": None if bubble is None else round(bubble, 3),
        "predicted_ms": None if own.predicted_ms is None else round(own.predicted_ms, 2),
        "error": None if own.predicted_ms is None or ms is None else round(own.predicted_ms / ms - 1, 3),
        "kernel": share.get("kernel"),
        "target": "; ".join(targets_of(variant, best=best)),
        "note": "; ".join(own.notes),
    }


def summary(found: Found) -> dict[str, object]:
    """The last row: how far the predictions are off."""
    errors = [abs(each.predicted_ms / each.median_ms - 1) for each in found.values() if each.predicted_ms and each.median_ms]
    said = f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}" if errors else "nothing was predicted and timed"
    named = {"case": "all", "variant": f"{len(errors)} predicted", "target": f"median error <= {MOST_ERROR:.0%}", "note": said}
    return {**dict.fromkeys(COLUMNS), "how": "recorded", "error": round(statistics.median(errors), 3) if errors else None, **named}
