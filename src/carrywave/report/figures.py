"""The figures of a report, derived from a `RunRecord`: what was trained, how well beside its baselines, and how fast. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrywave.report.chart import number
from carrywave.report.record import LogRow, RunRecord, is_number
from carrywave.tasks.baselines import BASELINES

SHARES = (  # metrics that are parts of one
    *("accuracy", "micro_f1", "macro_f1", "exact_match", "precision", "recall", "f1", "span_"),
    *("coverage", "within_", "top", "label_error", "sequence_error"),
)
NAMES = {"micro_f1": "micro F1", "macro_f1": "macro F1", "span_f1": "span F1", "bits": "bits per token"}
NAMES |= {name: name.upper() for name in ("mae", "rmse", "mase", "crps", "nse", "kge", "f1")}


@dataclass(frozen=True)
class Tile:
    """One figure that is shown large, with its name and a remark."""

    name: str
    value: str
    note: str = ""


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2 batches`."""
    return f"{count:,} {noun}{('es' if noun.endswith('batch') else 's') * (count != 1)}"


def duration(seconds: float) -> str:
    """A span of time in words."""
    if seconds < 60:
        return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def metric_name(name: str) -> str:
    """A metric as it is shown; `mae[sales]` is that of one column."""
    kind, bracket, column = name.partition("[")
    if bracket:
        return f"{NAMES.get(kind, kind)} of {column.removesuffix(']')}"
    return NAMES.get(name, name.replace("coverage_", "coverage at ").replace("_", " "))


def loss_name(record: RunRecord) -> str:
    """The loss, with what it is measured in as far as the spec tells."""
    data = record.section("data")
    if data.get("multi_label"):
        return "loss (nats, summed over labels)"
    if record.task == "transcription":
        return "loss (nats per label)"
    if data.get("distribution", "none") != "none":
        return "loss (nats per value)"
    if record.task in ("language", "classification", "tagging"):
        return "loss (nats per target)"
    return f"loss{_scaled(record)}" if record.task in ("forecasting", "regression") else "loss"


def unit(record: RunRecord, name: str) -> str:
    """What an error is measured in, to follow its name: forecasts are scored as they are trained, single columns as in the file."""
    if name.startswith(("mae[", "rmse[")):
        return " (units of the file)"
    if name not in ("mae", "rmse", "pinball", "crps"):
        return ""
    several = record.task == "regression" and record.facts.get("outputs", 1) > 1  # whose units may differ
    return _scaled(record) if record.task == "forecasting" or several else " (units of the file)"


def _scaled(record: RunRecord) -> str:
    return " (standardized)" if record.section("data").get("standardize", True) is not False else " (units of the file)"


def metric_text(name: str, value: object) -> str:
    """The value of a metric; a part of one as a percentage."""
    if not isinstance(value, int | float) or not is_number(value):
        return "not finite"
    return f"{100 * value:.2f}%" if name.startswith(SHARES) else number(value)


def results(record: RunRecord, row: LogRow) -> tuple[list[str], list[list[str]]]:
    """The metrics of an evaluation beside those of the baselines that there are: names of the columns, and a row for each metric."""
    names = [name for name in ("loss", *record.metric_names) if is_number(row.get(name)) and not name.startswith("coverage_")]
    kinds = [kind for kind in BASELINES if any(is_number(row.get(f"{kind}_{name}")) for name in names)]
    rows = []
    for name in names:
        title = loss_name(record) if name == "loss" else metric_name(name) + unit(record, name)
        others = [row.get(f"{kind}_{name}") for kind in kinds]
        shown = [metric_text(name, value) if is_number(value) else "" for value in (row[name], *others)]
        rows.append([title, *shown])
    return ["", "this model", *(baseline_name(record, kind) for kind in kinds)], rows


def baseline_name(record: RunRecord, kind: str) -> str:
    """What a baseline is called; without a forecast, the naive one is how often each label occurs."""
    return "label frequencies" if kind == "naive" and record.task != "forecasting" else BASELINES[kind]


def train_points(rows: Sequence[LogRow], name: str, weight: str) -> list[tuple[float, float]]:
    """The means of a value in training, at the last step of each row. A run logs a row at each evaluation, too: a row over two steps would
    stand out among rows over fifty, so short ones are drawn together with the next.
    """
    usual = max((row.get("steps") or 1 for row in rows), default=1)
    points, pending = list[tuple[float, float]](), list[LogRow]()
    for row in rows:
        pending.append(row)
        if 2 * sum(each.get("steps") or 1 for each in pending) < usual and row is not rows[-1]:
            continue
        pairs = [(each[name], each.get(weight) or 1) for each in pending if is_number(each.get(name))]
        if pairs and is_number(row.get("step")):
            points.append((float(row["step"]), sum(value * many for value, many in pairs) / sum(many for _, many in pairs)))
        pending = []
    return points


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
    timed = [row for row in record.timing if "tokens_per_second" in row and is_number(row.get("seconds")) and row.get("step") in steps]
    total = sum(steps[row["step"]] for row in timed)
    return sum(row["seconds"] for row in timed) / total if total else None


def running_seconds(record: RunRecord) -> float:
    """The time of training and evaluation that was logged."""
    return float(sum(row["seconds"] for row in record.timing if is_number(row.get("seconds"))))


def restarts(record: RunRecord) -> list[list[str]]:
    """Every start after the first, and every return to a snapshot: when, what, and from which step."""
    rows = []
    events = [row for row in record.history if row.get("event") in ("start", "back")]
    for row in events[1:]:
        step = row.get("step")
        what = "went back after a non-finite step" if row["event"] == "back" else "restarted" if row.get("attempt") else "resumed"
        rows.append([_moment(row.get("time")), what, f"{step:,}" if is_number(step) else "not known"])
    return rows


def tiles(record: RunRecord) -> Iterator[Tile]:
    """The figures that sum up a run."""
    best, last = record.best, (record.rows("train") or [{}])[-1]
    shown = (record.metric_names or ["loss"])[0]
    for row in record.rows("test")[-1:]:
        if is_number(row.get(shown)):
            yield Tile(f"test {metric_name(shown)}", metric_text(shown, row[shown]), _beside(record, row, shown))
    if best is not None:
        at = f"at step {best['step']:,}, epoch {best.get('epoch', '?')}"
        by_loss = record.best_metric == "loss" or record.keeps_last
        name = "last validation loss" if record.keeps_last else "best validation loss" if by_loss else "validation loss"
        yield Tile(name, number(best["loss"]), at if by_loss else f"{at}, which has the best {metric_name(record.best_metric)}")
        for name in record.metric_names[:2]:
            if is_number(best.get(name)):
                yield Tile(f"validation {metric_name(name)}", metric_text(name, best[name]), _beside(record, best, name))
    elif is_number(last.get("loss")):
        yield Tile("train loss", number(last["loss"]), f"at step {last.get('step')}; no validation so far")
    if (rate := speed(record)) is not None:
        each = step_seconds(record)
        yield Tile(f"{speed_unit(record)} per second", number(rate), "" if each is None else f"{duration(each)} per optimizer step")
    if took := running_seconds(record):
        yield Tile("time", duration(took))


def _beside(record: RunRecord, row: LogRow, name: str) -> str:
    """The unit of a metric, and what the baselines have, in a line."""
    others = {kind: row.get(f"{kind}_{name}") for kind in BASELINES}
    parts = [f"{baseline_name(record, kind)} {metric_text(name, value)}" for kind, value in others.items() if is_number(value)]
    return "; ".join([*([unit(record, name).strip(" ()")] if unit(record, name) else []), *([", ".join(parts)] if parts else [])])


def state(record: RunRecord) -> str:
    """What became of the run, in a few words."""
    events = [row for row in record.history if row.get("event") in ("start", "end")]
    if not events:
        return "nothing was recorded yet"
    if events[-1].get("event") == "start":
        return "in training, or killed: it has recorded no end"
    ending = str(events[-1].get("ending"))
    endings = {"done": "complete", "early": "stopped early, as asked", "callback": "stopped by a callback"}
    return endings.get(ending, f"{ending}; it can be resumed")


def about(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What was trained and on what: pairs of a name and a sentence."""
    facts, plan, data = record.facts, record.plan, record.section("data")
    yield "task", record.task
    if facts:
        yield "data", _data(facts)
    files = [f"{name} ({part})" for part in ("train", "valid", "test") if (name := data.get(part))]
    yield "files", ", ".join(files) or "objects in Python, not files"
    yield "model", "the user's own modules" if facts.get("own_model") else _model(record.section("model"))
    train, batch = record.section("train"), record.section("batch")
    size = f"{batch.get('lanes')} lanes × {batch.get('steps')} steps" if batch.get("lanes") else f"{batch.get('tokens')} steps a batch"
    yield (
        "training",
        f"{train.get('optimizer')}, learning rate {train.get('lr')}, {size}, {train.get('precision')}, seed {train.get('seed')}",
    )
    if plan:
        yield "plan", plan_sentence(plan)
    starts = [row for row in record.history if row.get("event") == "start"]
    if starts:
        row = starts[-1]
        hosts = list(dict.fromkeys(str(seat.get("host")) for seat in plan.get("workers") or () if isinstance(seat, dict)))
        on = f" on {', '.join(hosts[:8])}{' and more' * (len(hosts) > 8)}" if len(hosts) > 1 else ""
        yield "devices", f"{counted(int(row.get('workers') or 1), 'worker')}, {row.get('device')} ({row.get('machine')}){on}"
        yield "versions", f"carrywave {row.get('carrywave')}, torch {row.get('torch')}, Python {row.get('python')}"
        yield "started", _moment(starts[0].get("time"))


def plan_sentence(plan: Mapping[str, Any]) -> str:
    """A plan in a sentence."""
    replicas, stages = int(plan.get("replicas") or 1), int(plan.get("stages") or 1)
    where = "one device" if replicas * stages == 1 else f"{counted(replicas, 'replica')} × {counted(stages, 'stage')}"
    chunks = f"chunks of {counted(int(plan['chunk_steps']), 'step')}" if plan.get("chunk_steps") else "one chunk"
    micro = int(plan.get("micro_batches") or 1)
    parts = [f"cut before units {', '.join(map(str, plan['cuts']))}"] if plan.get("cuts") else []
    parts += [chunks, *([counted(micro, "micro-batch")] if micro > 1 else [])]
    return ", ".join([where, *parts, *(["recomputation"] if plan.get("recompute") else [])])


def _data(facts: Mapping[str, Any]) -> str:
    parts = [f"{counted(int(facts.get('steps') or 0), 'step')} in {counted(int(facts.get('sequences') or 0), 'sequence')} to train on"]
    if facts.get("vocabulary"):
        parts.append(f"a vocabulary of {counted(int(facts['vocabulary']), 'token')}")
    elif facts.get("features"):
        parts.append(counted(int(facts["features"]), "feature"))
    return ", ".join([*parts, *([counted(len(facts["labels"]), "label")] if facts.get("labels") else [])])


def _model(model: Mapping[str, Any]) -> str:
    hidden, layers = model.get("hidden"), model.get("layers")
    widths = " → ".join(map(str, hidden)) if isinstance(hidden, list) else f"{layers} × {hidden}"
    extras = [name for name in ("bidirectional", "tie", "layer_norm", "crf") if model.get(name) is True]
    return ", ".join([f"{str(model.get('cell', 'lstm')).upper()} {widths}", *extras])


def _moment(when: object) -> str:
    """A UNIX time as a date, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when)) if isinstance(when, int | float) else "at an unknown time"
