"""Trains one spec with several seeds, each a run of its own: to see how much luck there is in a result, and to predict with all of them.

FOLDER/
  init.txt       the weights that they start from (`--init`); empty: none
  seeds.yaml     the spec
  seed-1/ …      ordinary runs, with the spec's seed, the next one, …; what they print is in logs/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from carrywave.errors import RunError, option
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.run_place import free_place
from carrywave.spec.load import dump, load
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import score
from carrywave.train.start.opening import weights_file
from carrywave.tuning.children import ChildRun, Why, holding, options_of, places_for, run_children

BASE, INIT = "seeds.yaml", "init.txt"


@dataclass(frozen=True)
class SeedsResult:
    """The runs of several seeds."""

    run: Path  # the folder that they are in
    rows: list[dict[str, Any]]  # a row for each: its folder, seed, state, and best metrics on valid so far
    summary: str  # the median and spread of those that were trained to their end
    failed: str  # the first that failed, and why; empty if none did
    ending: Why | None  # why they were stopped
    later: bool = False  # what failed may succeed later: nothing in the input was wrong


def train_seeds(
    spec: Spec | None,
    seeds: int,
    *,
    run: Path | None = None,
    resume: bool = False,
    init: str | None = None,
    where: tuple[str, int | None] = ("auto", None),
    words: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> SeedsResult:
    """Train the spec with `seeds` seeds, side by side where there are several GPUs; None: the spec of the runs that go on.

    All start from the weights `init`, which runs that go on need not be told again. `where`: the kind of device, and how many of them for
    each run. `words` are further arguments of `carrywave train`, the same for all.
    """
    if resume and run is None:
        raise RunError(f"{option('resume')} needs the folder of the runs; pass {option('run')}")
    if spec is None and run is not None and resume:
        if not (run / BASE).is_file():
            raise RunError(f"{run} has nothing to resume (no {BASE}); correct {option('run')}, or remove {option('resume')}")
        spec = load(run / BASE)
    assert spec is not None
    places = places_for(None, *where)
    if spec.data.valid is None and spec.data.split is None and not spec.streams:
        say("each seed holds other rows of train out as valid, so their metrics differ by that as well; set data.valid to compare them")
    if init is not None and not resume:
        weights_file(init)  # refused before anything is trained
    folder = run or free_place(spec.task)
    with holding(folder, resume=resume, marker=BASE, before=INIT):
        if resume and load(folder / BASE) != spec:
            raise RunError(f"{folder} has runs of another spec; leave it out to go on with that one, or use another {option('run')}")
        if resume:
            init = _begun_from(folder, init)
        with atomic_files.writing(str(folder)):
            atomic_files.write_bytes(folder / INIT, f"{init or ''}\n".encode(errors="backslashreplace"))
            atomic_files.write_bytes(folder / BASE, dump(spec).encode(errors="backslashreplace"))
        more = (*options_of(*where), *words, *(() if init is None else ("--init", init)))
        numbers = range(1, seeds + 1)
        children = [ChildRun(folder / f"seed-{n}", (str(folder / BASE), f"train.seed={spec.train.seed + n - 1}", *more)) for n in numbers]
        waiting, complaints = list(children), list[tuple[str, bool]]()
        states: dict[str, str] = {}

        def ended(child: ChildRun, code: int) -> None:
            name = child.folder.name
            states[name] = "finished" if not code else "stopped" if child.can_go_on(code) else "failed"
            if code and not child.asked:
                complaints.append((f"{name} failed: {child.complaint(code)}", child.can_go_on(code) or code < 0))  # a signal: no mistake
                say(complaints[-1][0])
            elif not code:
                say(f"{name}: {_in_words(_best(child, spec), spec)}")

        why = run_children(lambda: waiting.pop(0) if waiting else None, places, lambda _: False, ended, say=say)
        rows = []
        for number, child in enumerate(children):
            row = {"run": str(child.folder), "seed": spec.train.seed + number, "state": states.get(child.folder.name, "stopped")}
            rows.append(row | (_best(child, spec) or {}))
    first = complaints[0][0] if complaints else ""
    return SeedsResult(folder, rows, _summary(rows, spec), first, why, all(later for _, later in complaints))


def _begun_from(folder: Path, init: str | None) -> str | None:
    """The weights that runs which go on were started from; others are refused."""
    before = (folder / INIT).read_text("utf-8").strip() if (folder / INIT).is_file() else ""
    if init is not None and init != before:
        how = f"from the weights of {before}" if before else "without initial weights"
        raise RunError(
            f"the runs in {folder} were started {how}; leave {option('init')} out to go on with them, or use another {option('run')}"
        )
    return before or None


def _best(child: ChildRun, spec: Spec) -> dict[str, Any] | None:
    """The evaluation whose weights a run keeps; None if there was none."""
    metric = spec.train.best
    judged = [row for row in child.evaluations() if row.get(metric) is not None]
    return min(judged, key=lambda row: score(metric, row[metric]), default=None)


def _in_words(best: dict[str, Any] | None, spec: Spec) -> str:
    return "trained, without validation" if best is None else f"best {spec.train.best} {best[spec.train.best]:.4g}, epoch {best['epoch']}"


def _summary(rows: Sequence[dict[str, Any]], spec: Spec) -> str:
    metric = spec.train.best
    finished = [row for row in rows if row["state"] == "finished"]
    values = [row[metric] for row in finished if row.get(metric) is not None]
    of = (f"{len(finished)} of " if len(finished) < len(rows) else "") + f"{len(rows)} seed{'s' * (len(rows) != 1)}"
    if not values:
        return f"{of}, without a {metric} on valid"
    if len(values) == 1:
        return f"{of}: {metric} {values[0]:.4g}"
    return f"{of}: median {metric} {median(values):.4g}, from {min(values):.4g} to {max(values):.4g}"
