"""Claim: over slow links, replicas that seldom exchange train many times as fast as with an exchange at every step, and almost as well.

Real workers, one thread each, train the same language model on the same text, with the same number of steps and lanes: `train.sync` step,
local, diloco (fp32 and bf16 on the wire) and async. `tokens_per_second` is over all workers, without evaluations and without the first row;
`sent_MB` is what worker 0 sent in one step, as the kernel counts it; `loss` is that of the validation part in the end, in nats a token,
and `loss_to_step` its ratio to that of step. With `--link N` the same workers stand in network namespaces, joined by links of N Mbit/s
(`link_Mbit`; needs root), for as many steps as it takes to time them; their loss is not looked at, because links do not change it.

`--curve`: instead, the loss of local and diloco against `train.sync_every`, from 1 to 500. `--text FILE` and `--valid FILE` say what to
train on (by default text that ships with Python), `--set KEY=VALUE` changes the spec, as in `--set model.hidden=256`. `--shares`: on shares
of one GPU instead of CPU workers; what they send does not pass through the kernel then, and is not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import typer

from carrywave.benchmarks.sync_runs import slow_links, worker
from carrywave.errors import UserError
from carrywave.launch.shares.mps import shares as shares_of_gpu
from carrywave.parallel import worker_pool
from carrywave.parallel.startup.interfaces import GLOO

REPLICAS = 4
SPEC: dict[str, dict[str, Any]] = {
    "data": {"tokens": "char"},
    "model": {"hidden": 256, "layers": 2},
    "batch": {"lanes": 16, "steps": 32, "eval_lanes": 64},
    "train": {
        "optimizer": "adam",
        "lr": 2e-3,
        "clip": 1.0,
        "schedule": "cosine",
        "epochs": 1000,
        "max_steps": 1000,
        "precision": "fp32",
        "snapshot_every": 0,
    },
}
QUICK: dict[str, dict[str, Any]] = {"model": {"hidden": 16, "layers": 1}, "batch": {"lanes": 8, "steps": 8}, "train": {"max_steps": 20}}
MODES: tuple[dict[str, Any], ...] = (
    {"sync": "step"},
    {"sync": "local"},
    {"sync": "diloco"},
    {"sync": "diloco", "sync_dtype": "bf16"},
    {"sync": "async"},
)
EVERY, QUICK_EVERY = 50, 5
CURVE, QUICK_CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500), (1, 5)
TIMED_STEPS = 12  # of step and async on a slow link, where every step takes long; the others take three rounds of `EVERY`


def run(
    *,
    quick: bool = False,
    text: Path | None = None,
    valid: Path | None = None,
    link: int | None = None,
    curve: bool = False,
    settings: Sequence[str] | None = None,
    shares: bool = False,
) -> list[dict[str, object]]:
    """One row for each way of exchanging, or for each point of the curve."""
    if valid is not None and text is None:
        raise UserError("--valid needs --text; give both, or neither")
    if shares and link is not None:
        raise UserError("--link is for CPU workers, and --shares for a GPU's; leave out one of them")
    base = _merged(SPEC, QUICK if quick else {}, _given(text, valid), _set(settings or []))
    every = QUICK_EVERY if quick else EVERY
    if curve:
        return _curve(base, QUICK_CURVE if quick else CURVE, shares=shares)
    modes = [mode if mode["sync"] == "step" else mode | {"sync_every": every} for mode in MODES]
    rows = _rows(modes, [_merged(base, {"train": mode}) for mode in modes], None, shares=shares)
    if link is not None:
        why = slow_links.reason()
        if why is not None:
            return [*rows, {"sync": "all", "link_Mbit": link, "note": f"skipped: {why}"}]
        timed = [_merged(base, {"train": mode}, _short(mode, every, quick=quick)) for mode in modes]
        rows += _rows(modes, timed, link)
    return rows


def _short(mode: Mapping[str, Any], every: int, *, quick: bool) -> dict[str, Any]:
    """As many steps as it takes to time a mode, in rows of equal length."""
    each = mode["sync"] in ("step", "async")
    many = (4 if quick else TIMED_STEPS) if each else 3 * every
    row = many // 4 if each else every
    every_row = {"sync_every": row} if mode["sync"] == "async" else {}
    return {"train": {"max_steps": many, "log_every": row, **every_row}}


def _curve(base: dict[str, Any], points: Sequence[int], *, shares: bool) -> list[dict[str, object]]:
    modes: list[dict[str, Any]] = [{"sync": "step"}]
    modes += [{"sync": sync, "sync_every": every} for sync in ("local", "diloco") for every in points]
    return _rows(modes, [_merged(base, {"train": mode}) for mode in modes], None, shares=shares)


def _rows(
    modes: Sequence[Mapping[str, Any]], specs: Sequence[dict[str, Any]], link: int | None, *, shares: bool = False
) -> list[dict[str, object]]:
    results = _trained(specs, link, shares=shares)
    first = results[0]
    rows: list[dict[str, object]] = []
    for mode, spec, result in zip(modes, specs, results, strict=True):
        wire = ", bf16" if mode.get("sync_dtype") == "bf16" else ""
        row: dict[str, object] = {
            "sync": f"{mode['sync']}{wire}",
            "sync_every": mode.get("sync_every"),
            "replicas": REPLICAS,
            "link_Mbit": link,
            "steps": spec["train"]["max_steps"],
            "tokens_per_second": round(result["tokens_per_second"]),
            "to_step": round(result["tokens_per_second"] / first["tokens_per_second"], 2),
            "sent_MB": None if shares else round(result["sent_bytes"] / 1e6 / spec["train"]["max_steps"], 3),
            "loss": None,
            "loss_to_step": None,
            "note": result["note"],
        }
        if link is None:
            row |= {"loss": round(result["loss"], 4), "loss_to_step": round(result["loss"] / first["loss"], 4)}
        rows.append(row)
    return rows


def _trained(specs: Sequence[dict[str, Any]], link: int | None, *, shares: bool) -> list[dict[str, Any]]:
    """Train all of them in one crew of workers."""
    divided: AbstractContextManager[dict[str, str]] = shares_of_gpu(REPLICAS) if shares else nullcontext({})
    no_prefixes: list[list[str]] = [[]] * REPLICAS
    hosts: AbstractContextManager[list[list[str]]] = nullcontext(no_prefixes) if link is None else slow_links.hosts(REPLICAS, link)
    with divided as environment, hosts as prefixes, tempfile.TemporaryDirectory(prefix="carrywave-bench-") as name:
        folder = Path(name)
        job = {"specs": [spec | {"plan": {"replicas": REPLICAS}} for spec in specs], "device": "cuda" if shares else "cpu"}
        (folder / "job.json").write_text(json.dumps(job))
        interface = {} if link is None else {GLOO: slow_links.INTERFACE}
        environments = [worker_pool.environment_of(folder, rank, REPLICAS, 1) | environment | interface for rank in range(REPLICAS)]
        command = [sys.executable, "-m", worker.__name__, str(folder / "job.json")]
        worker_pool.run_together([[*each, *command] for each in prefixes], environments, folder, "bench sync", _Progress(folder))
        return [_result(folder / f"run-{number}", each) for number, each in enumerate(_ended(folder))]


def _result(folder: Path, ended: Mapping[str, Any]) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    timed = [row for row in rows if row["split"] == "train" and "tokens_per_second" in row]
    timed = timed[1:] or timed  # the first has the start of everything in it
    tokens = sum(row["tokens_per_second"] * row["seconds"] for row in timed)
    stale = [row for row in rows if "staleness" in row]
    note = f"staleness {stale[-1]['staleness']:.1f} on average, {stale[-1]['most_stale']} at most" if stale else ""
    return {
        "tokens_per_second": tokens / sum(row["seconds"] for row in timed),
        "sent_bytes": ended["sent_bytes"],
        "loss": ended["metrics"]["valid"]["loss"],
        "note": note,
    }


class _Progress:
    """Prints on stderr what came of each run when it is over: all of them can take long."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, 0

    def __call__(self) -> None:
        for ended in _ended(self.folder)[self.printed :]:
            self.printed += 1
            typer.echo(f"run {self.printed}: valid loss {ended['metrics']['valid']['loss']:.4f}", err=True)


def _ended(folder: Path) -> list[dict[str, Any]]:
    """What became of the runs that are over."""
    file = folder / worker.RESULTS
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def _given(text: Path | None, valid: Path | None) -> dict[str, Any]:
    files = {"train": text, "valid": valid}
    return {"data": {name: str(path.absolute()) for name, path in files.items() if path is not None}}


def _set(settings: Sequence[str]) -> dict[str, Any]:
    """Settings such as model.hidden=256, as sections."""
    sections: dict[str, dict[str, Any]] = {}
    for word in settings:
        key, equals, value = word.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise UserError(f"--set {word} is not a setting; write it as in model.hidden=256")
        try:
            sections.setdefault(section, {})[name] = json.loads(value)
        except ValueError:
            sections.setdefault(section, {})[name] = value
    return sections


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Specs on top of each other; later ones win."""
    merged: dict[str, Any] = {}
    for part in parts:
        for section, values in part.items():
            merged[section] = {**merged.get(section, {}), **values}
    return merged
