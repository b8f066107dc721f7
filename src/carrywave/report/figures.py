"""The numbers of a report, derived from a `RunRecord`: what was trained, how well and how fast, and what restarts cost. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from carrywave.plan.show.text import seconds_text
from carrywave.report.chart import number
from carrywave.report.record import RunRecord, is_number

SHARES = (
    "accuracy",
    "micro_f1",
    "macro_f1",
    "exact_match",
    "span_",
    "coverage",
    "within_",
    "top",
    "label_error",
    "sequence_error",
)  # metrics that are parts of one
NAMES = {
    "micro_f1": "micro F1",
    "macro_f1": "macro F1",
    "span_f1": "span F1",
    "mae": "MAE",
    "rmse": "RMSE",
    "mase": "MASE",
    "bits": "bits per token",
}
PARTS = ("compute", "messages", "wait", "rest")  # of a worker's step


@dataclass(frozen=True)
class Tile:
    """One figure that is shown large, with its name and a remark."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Restart:
    """A start of a run after the first, or a return to a snapshot, and what it cost as far as that is known."""

    when: str
    what: str
    step: int
    reached: int | None  # the step that had been logged before
    repeated: int | None  # steps computed twice
    repeated_seconds: float | None
    away_seconds: float | None  # from the last line of the process before to the start of training

    @property
    def cost(self) -> str:
        """The cost in words."""
        parts = []
        if self.away_seconds is not None:
            parts.append(f"{duration(self.away_seconds)} away")
        if self.repeated:
            took = "" if self.repeated_seconds is None else f" (about {duration(self.repeated_seconds)})"
            parts.append(f"{counted(self.repeated, 'step')} computed again{took}")
        elif self.repeated == 0:
            parts.append("no logged step lost")
        return ", ".join(parts) or "not known"


@dataclass(frozen=True)
class WorkerTime:
    """One worker's seconds in the step that was timed."""

    rank: int
    where: str
    host: str
    seconds: float
    compute: float
    messages: float
    wait: float
    rest: float

    def share(self, part: str) -> float:
        """The fraction of the step that a part took."""
        return float(getattr(self, part)) / self.seconds if self.seconds else 0.0


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2 batches`."""
    return f"{count:,} {noun}{('es' if noun.endswith('batch') else 's') * (count != 1)}"


def duration(seconds: float) -> str:
    """A span of time in words."""
    if seconds < 60:
        return seconds_text(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def moment(when: object) -> str:
    """A UNIX time as a date, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when)) if isinstance(when, int | float) else "at an unknown time"


def metric_name(name: str) -> str:
    """A metric as it is shown; `mae[sales]` is that of one column."""
    kind, bracket, column = name.partition("[")
    if bracket:
        return f"{NAMES.get(kind, kind)} of {column.removesuffix(']')}"
    return NAMES.get(name, name.replace("coverage_", "coverage at ").replace("_", " "))


def loss_name(record: RunRecord) -> str:
    """The loss, with what it is measured in as far as the spec tells."""
    if _section(record, "data").get("multi_label"):
        return "loss (nats, summed over labels)"
    if record.task == "transcription":
        return "loss (nats per label)"
    if _section(record, "data").get("distribution", "none") != "none":
        return "loss (nats per value)"
    if record.task in ("language", "classification", "tagging"):
        return "loss (nats per target)"
    return f"loss{_scaled(record)}" if record.task in ("forecasting", "regression") else "loss"


def unit(record: RunRecord, name: str) -> str:
    """What an error is measured in, to follow its name: forecasts are scored as they are trained, single columns as in the file."""
    if name.startswith(("mae[", "rmse[")):
        return " (units of the file)"
    if name == "crps":
        return _scaled(record)
    if name in ("mae", "rmse", "pinball"):
        several = record.task == "regression" and record.facts.get("outputs", 1) > 1  # whose units may differ
        return _scaled(record) if record.task == "forecasting" or several else " (units of the file)"
    return ""


def _scaled(record: RunRecord) -> str:
    return " (standardized)" if _section(record, "data").get("standardize", True) is not False else " (units of the file)"


def metric_text(name: str, value: object) -> str:
    """The value of a metric; a part of one as a percentage."""
    if not isinstance(value, int | float) or not is_number(value):
        return "not finite"
    return f"{100 * value:.2f}%" if name.startswith(SHARES) else number(value)


def speed(record: RunRecord) -> float | None:
    """Real tokens or steps a second in training, over the whole run."""
    rows = [row for row in record.timing if is_number(row.get("tokens_per_second")) and is_number(row.get("seconds"))]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["tokens_per_second"] * row["seconds"] for row in rows) / seconds if seconds else None


def speed_unit(record: RunRecord) -> str:
    """What is counted in a second."""
    return "tokens" if record.facts.get("vocabulary") else "steps of data"


def step_seconds(record: RunRecord) -> float | None:
    """The mean of an optimizer step over the whole run, evaluations and snapshots left out as far as the log does."""
    steps = {row.get("step"): row["steps"] for row in record.rows("train") if is_number(row.get("steps"))}
    pairs = [
        (row["seconds"], steps[row.get("step")])
        for row in record.timing
        if "tokens_per_second" in row and is_number(row.get("seconds")) and row.get("step") in steps
    ]
    total = sum(many for _, many in pairs)
    return sum(seconds for seconds, _ in pairs) / total if total else None


def waste(record: RunRecord) -> float | None:
    """The mean share of padding."""
    rows = [row for row in record.rows("train") if is_number(row.get("waste")) and is_number(row.get("steps"))]
    steps = sum(row["steps"] for row in rows)
    return sum(row["waste"] * row["steps"] for row in rows) / steps if steps else None


def evaluating_seconds(record: RunRecord) -> float:
    """Time spent in evaluations."""
    return float(sum(row["seconds"] for row in record.timing if row.get("split") != "train" and is_number(row.get("seconds"))))


def running_seconds(record: RunRecord) -> float | None:
    """Time from each start to its end, or to the last sign of life; None if the history is not known."""
    starts = [at for at, row in enumerate(record.history) if row.get("event") == "start" and is_number(row.get("time"))]
    if not starts:
        return None
    total = 0.0
    for place, at in enumerate(starts):
        begun = record.history[at]["time"]
        after = record.history[starts[place + 1]] if place + 1 < len(starts) else None
        ends = [row["time"] for row in record.history[at + 1 : starts[place + 1] if after else None] if is_number(row.get("time"))]
        seen = after.get("last_seen") if after else max((row["time"] for row in record.timing if is_number(row.get("time"))), default=None)
        total += max([begun, *ends, *([seen] if is_number(seen) else [])]) - begun
    return total


def restarts(record: RunRecord) -> list[Restart]:
    """Every start after the first, and every return to a snapshot, in order."""
    each = step_seconds(record)
    rows: list[Restart] = []
    before: Mapping[str, Any] | None = None
    for row in record.history:
        event = row.get("event")
        if event == "back" or (event == "start" and before is not None):
            step, reached, seen = (row.get(name) for name in ("step", "reached", "last_seen"))
            repeated = max(0, int(reached) - int(step)) if is_number(reached) and is_number(step) else None
            away = row["time"] - seen if event == "start" and is_number(seen) and is_number(row.get("time")) else None
            rows.append(
                Restart(
                    moment(row.get("time")),
                    _what(row, before or {}),
                    int(step) if is_number(step) else 0,
                    int(reached) if is_number(reached) else None,
                    repeated,
                    None if repeated is None or each is None else repeated * each,
                    None if away is None else max(0.0, away),
                )
            )
        before = row
    return rows


def _what(row: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    if row.get("event") == "back":
        return "went back to its last snapshot after a non-finite step"
    by = "restarted by its launcher" if row.get("attempt") else "resumed by hand"
    ending = before.get("ending") if before.get("event") == "end" else None
    endings = {"done": "after it was complete", "early": "after it had stopped early", "callback": "after a callback had stopped it"}
    after = endings.get(str(ending), f"after it was {ending}")
    return f"{by} {after if ending else 'after it was killed or failed'}"


def workers(record: RunRecord) -> list[WorkerTime]:
    """The workers of the step that was timed task by task; empty if none was."""
    times = []
    for each in record.timeline.get("workers") or ():
        if not isinstance(each, dict) or not all(is_number(each.get(name)) for name in ("rank", "seconds", *PARTS)):
            continue
        where = f"replica {each.get('replica')}, stage {each.get('stage')}"
        times.append(
            WorkerTime(int(each["rank"]), where, str(each.get("host") or ""), each["seconds"], *(float(each[part]) for part in PARTS))
        )
    return sorted(times, key=lambda worker: worker.rank)


def tiles(record: RunRecord) -> list[Tile]:
    """The figures that sum up a run."""
    summary = []
    best, last = record.best, (record.rows("train") or [{}])[-1]
    if best is not None:
        at = f"at step {best['step']:,}, epoch {best.get('epoch', '?')}"
        by_loss = record.best_metric == "loss" or record.keeps_last
        name = "last validation loss" if record.keeps_last else "best validation loss" if by_loss else "validation loss"
        summary.append(Tile(name, number(best["loss"]), at if by_loss else f"{at}, which has the best {metric_name(record.best_metric)}"))
        for name in record.metric_names[:2]:
            if name in best:
                simple = {what: best.get(f"{kind}_{name}") for kind, what in (("naive", "naive forecast"), ("ridge", "ridge"))}
                others = ", ".join(f"{what} {metric_text(name, value)}" for what, value in simple.items() if is_number(value))
                units = "" if unit(record, name) == "" else unit(record, name).strip(" ()") + "; "
                note = f"{units}{others}" if others else f"validation, at the {'last' if record.keeps_last else 'best'} step"
                summary.append(Tile(metric_name(name), metric_text(name, best[name]), note))
        in_units = [name for name in record.metric_names if name.startswith("mae[") and is_number(best.get(name))]
        if len(in_units) == 1:  # there is no room for many
            summary.append(Tile(metric_name(in_units[0]), metric_text(in_units[0], best[in_units[0]]), "in the units of the file"))
    elif is_number(last.get("loss")):
        summary.append(Tile("train loss", number(last["loss"]), f"at step {last.get('step'):,}; no validation so far"))
    for row in record.rows("test")[-1:]:
        shown = (record.metric_names or ["loss"])[0]
        if is_number(row.get(shown)):
            summary.append(Tile(f"test {metric_name(shown)}", metric_text(shown, row[shown]), "with the best weights"))
    if (rate := speed(record)) is not None:
        each = step_seconds(record)
        note = "" if each is None else f"{seconds_text(each)} per optimizer step"
        summary.append(Tile(f"{speed_unit(record)} per second", number(rate), note))
    if (padding := waste(record)) is not None:
        summary.append(Tile("padding", f"{100 * padding:.1f}%", "of what was computed in training"))
    if (took := running_seconds(record)) is not None:
        spent = evaluating_seconds(record)
        summary.append(Tile("time", duration(took), f"{duration(spent)} of it in evaluations" if spent else ""))
    if record.history:
        again = restarts(record)
        lost = sum(each.repeated or 0 for each in again)
        summary.append(Tile("restarts", str(len(again)), f"{counted(lost, 'step')} computed again" if again else "it was started once"))
    return summary


def state(record: RunRecord) -> str:
    """What became of the run, in a few words."""
    if record.trained_now:
        return "in training"
    events = [row for row in record.history if row.get("event") in ("start", "end")]
    if not events:
        return "not known to be finished: written by a version that kept no history" if record.metrics else "nothing was logged yet"
    if events[-1].get("event") == "start":
        return "killed or failed: it has recorded no end"
    ending = str(events[-1].get("ending"))
    return {"done": "complete", "early": "stopped early, as asked", "callback": "stopped by a callback"}.get(
        ending, f"{ending}; it can be resumed"
    )


def about(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What was trained and on what: pairs of a name and a sentence."""
    facts, plan = record.facts, record.plan
    yield "task", record.task
    if facts:
        yield "data", _data(facts)
    files = [f"{name} ({part})" for part in ("train", "valid", "test") if (name := _section(record, "data").get(part))]
    yield "files", ", ".join(files) or "objects in Python, not files"
    if not facts.get("own_model"):
        yield "model", _model(_section(record, "model"))
    else:
        yield "model", "the user's own modules"
    yield "training", _training(record)
    if plan:
        yield "plan", plan_sentence(plan)
    hosts = list(dict.fromkeys(str(seat.get("host")) for seat in plan.get("workers") or () if isinstance(seat, dict)))
    start = next((row for row in reversed(record.history) if row.get("event") == "start"), None)
    if start is not None:
        on = f" on {', '.join(hosts[:8])}{' and more' * (len(hosts) > 8)}" if len(hosts) > 1 or hosts not in ([], ["this host"]) else ""
        yield "devices", f"{counted(int(start.get('workers') or 1), 'worker')}, {start.get('device')} ({start.get('machine')}){on}"
        yield "versions", f"carrywave {start.get('carrywave')}, torch {start.get('torch')}, Python {start.get('python')}"
        first = next(row for row in record.history if row.get("event") == "start")
        yield "started", moment(first.get("time"))
    else:
        yield "devices", "not recorded: the run has no history.jsonl"
    kernels = list(dict.fromkeys(map(str, plan.get("backends") or ())))
    if kernels:
        yield "layer kernels", ", ".join(kernels)
    if plan.get("transport"):
        yield "transport", str(plan["transport"])
    yield "state", state(record)


def plan_sentence(plan: Mapping[str, Any]) -> str:
    """A plan in a sentence."""
    replicas, stages = int(plan.get("replicas") or 1), int(plan.get("stages") or 1)
    chunks = f"chunks of {counted(int(plan['chunk_steps']), 'step')}" if plan.get("chunk_steps") else "one chunk"
    micro = int(plan.get("micro_batches") or 1)
    parts = [chunks, *([counted(micro, "micro-batch")] if micro > 1 else [])]
    parts += ["recomputation" if plan["recompute"] is True else "recomputation at two levels"] if plan.get("recompute") else []
    parts += [words for name, words in (("share_head", "head shared"),) if plan.get(name)]
    if replicas * stages == 1:
        return ", ".join(["one device", *parts])
    return ", ".join([f"{counted(replicas, 'replica')} × {counted(stages, 'stage')}", *parts])


def _section(record: RunRecord, name: str) -> Mapping[str, Any]:
    section = record.spec.get(name)
    return section if isinstance(section, Mapping) else {}


def _data(facts: Mapping[str, Any]) -> str:
    parts = [f"{counted(int(facts.get('steps') or 0), 'step')} in {counted(int(facts.get('sequences') or 0), 'sequence')} to train on"]
    if facts.get("vocabulary"):
        parts.append(f"a vocabulary of {counted(int(facts['vocabulary']), 'token')}")
    elif facts.get("features"):
        parts.append(counted(int(facts["features"]), "feature"))
    labels = facts.get("labels")
    if labels:
        parts.append(counted(len(labels), "label"))
    return ", ".join(parts)


def _model(model: Mapping[str, Any]) -> str:
    hidden, layers = model.get("hidden"), model.get("layers")
    widths = " → ".join(map(str, hidden)) if isinstance(hidden, list) else f"{layers} × {hidden}"
    extras = [name.replace("_", " ") for name in ("bidirectional", "tie", "layer_norm", "cell_norm", "locked") if model.get(name)]
    front = model.get("front", "none")
    extras += [f"front {front}" if isinstance(front, str) else f"front of {counted(len(front), 'convolution')}"] if front != "none" else []
    dropped = [f"dropout {model['dropout']:g}"] if is_number(model.get("dropout")) and model.get("dropout") else []
    return ", ".join([f"{str(model.get('cell', 'lstm')).upper()} {widths}", *extras, *dropped])


def _training(record: RunRecord) -> str:
    train, batch = _section(record, "train"), _section(record, "batch")
    lanes, steps = (counted(int(batch.get(f"{name}s") or 0), name) for name in ("lane", "step"))
    size = f"{lanes} × {steps}" if batch.get("lanes") else f"{batch.get('tokens')} steps a batch"
    parts = [f"{train.get('optimizer')}, learning rate {train.get('lr')}", size, f"{train.get('precision')}", f"seed {train.get('seed')}"]
    return ", ".join(parts)
