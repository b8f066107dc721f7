"""Searches over keys of a spec: every trial is a run in a folder of its own, judged by its best `train.best` on valid.

FOLDER/
  tune.yaml      the spec that trials differ from
  tune.jsonl     the search and its trials
  trial-1/ …     ordinary runs; what they print is in logs/
  best.yaml      the spec of the best trial
  tune.html      a page about all of them
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from carrywave.data.prepare import digests_of
from carrywave.errors import ResourceError, RunError, SpecError, UserError, option
from carrywave.report.tune_page import render_search
from carrywave.runs import output_file
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.run_place import free_place
from carrywave.spec.load import dump, parse, read_values, with_overrides
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import HIGHER, score
from carrywave.spec.yaml_text import dump_yaml
from carrywave.tuning.child_runs import ChildRun, Job, Why, evaluations, holding, options_of, places_for, run_jobs
from carrywave.tuning.search_space import Space, check_space, overrides_of, space_from, spec_with
from carrywave.tuning.study import Journal, Search, Trial, library

BASE, JOURNAL, BEST, PAGE, TRIAL = "tune.yaml", "tune.jsonl", "best.yaml", "tune.html", "trial.json"
TRIALS = 20
MOST_FAILURES = 3  # in a row from the first trial on: then something is wrong with all of them


@dataclass(frozen=True)
class TuneResult:
    """The result of a search."""

    run: Path  # its folder
    best: Spec | None  # the spec of the best trial; None if the search was stopped before any trial was evaluated
    value: float | None  # the best value of `train.best` on valid
    rows: list[dict[str, Any]]  # a row for each trial: its keys, best value, epochs, seconds and state
    ending: Why | None = None  # why it was stopped; None: all trials were made

    def __repr__(self) -> str:
        return f"TuneResult(run={str(self.run)!r}, value={self.value!r}, trials={len(self.rows)}, ending={self.ending!r})"


def tune(
    spec: Spec | Mapping[str, Any] | Path | str,
    keys: Mapping[str, Any],
    *,
    trials: int = TRIALS,
    hours: float | None = None,
    at_once: int | None = None,
    seed: int = 1,
    prune: bool = True,
    run: Path | str | None = None,
    resume: bool = False,
    device: str = "auto",
    devices: int | None = None,
    say: Callable[[str], None] | None = None,
) -> TuneResult:
    """Search over keys of a spec that names its data as files: a list is choices, a tuple (low, high) a range.

    `cw.tune("words.yaml", {"model.hidden": [64, 128], "train.lr": (1e-4, 1e-2)})`. Each trial is an ordinary run in a process of its own,
    `at_once` of them side by side (by default as many as there are GPUs), on `devices` devices each. With `prune`, a trial is stopped
    once it is worse than half of the finished ones were at that evaluation. A search that was stopped, by `hours` or by Ctrl-C, goes on
    with `resume=True`. `say` gets a line for every trial that ends. What the spec refuses is refused before the first trial.

    >>> import carrywave as cw
    >>> cw.tune({"data": {"train": "words.txt"}}, {"model.hidden": [64, 128], "train.learning_rate": (1e-4, 1e-2)})
    Traceback (most recent call last):
    carrywave.errors.SpecError: unknown key train.learning_rate; did you mean train.lr?
    """
    if isinstance(spec, Path | str):
        base = read_values(Path(spec))
    else:
        base = spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, Spec) else dict(spec)
    how = How(trials, None if hours is None else 3600 * hours, at_once, device, devices, say or (lambda _: None))
    return run_search(base, space_from(keys), how, seed=seed, prune=prune, run=None if run is None else Path(run), resume=resume)


@dataclass(frozen=True)
class How:
    """What may differ from one part of a search to the next, after an interruption."""

    trials: int
    seconds: float | None
    at_once: int | None
    device: str
    devices: int | None
    say: Callable[[str], None]


def run_search(
    base: Mapping[str, Any] | None,
    space: Space,
    how: How,
    *,
    seed: int | None = 1,
    prune: bool = True,
    run: Path | None = None,
    resume: bool = False,
) -> TuneResult:
    """As `tune`, for the values of a spec file and a space. A search that goes on may leave both out, and its seed."""
    library()
    if resume and run is None:
        raise RunError(f"{option('resume')} needs the folder of a search; pass {option('run')}")
    if how.trials < 1:
        raise UserError(f"{option('trials')} is {how.trials}; use a number >= 1")
    if how.seconds is not None and not how.seconds > 0:
        raise UserError("the time limit of a search is not above 0; use a longer one")
    places = places_for(how.at_once, how.device, how.devices)
    if not resume:
        if base is None:
            raise SpecError("a search needs a spec; pass the path of a spec file")
        check_space(base, space)
        search = Search(_checked(base, space).train.best, space, 1 if seed is None else seed, prune)
    folder = run or free_place("tune")
    with holding(folder, resume=resume, marker=JOURNAL, before=BASE):
        journal = Journal(folder / JOURNAL)
        if resume:
            search, trials = journal.read()
            _check_same(folder, search, base, space, seed)
        else:
            with atomic_files.writing(str(folder)):
                atomic_files.write_bytes(folder / BASE, dump_yaml(_plain(base or {})).encode(errors="backslashreplace"))
                journal.begin(search)
            trials = []
        _check_data(folder, trials, read_values(folder / BASE))
        going = _Going(folder, search, read_values(folder / BASE), how, journal, trials)
        until = None if how.seconds is None else time.monotonic() + how.seconds
        why = run_jobs(going.next_job, places, going.look, going.ended, until=until, say=how.say)
        return going.result(why)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as YAML can hold them, validated or not."""
    return dict(json.loads(json.dumps(values, default=str)))


def _checked(base: Mapping[str, Any], space: Space) -> Spec:
    """The spec with the first values that are tried; refuses one without anything to judge trials by."""
    spec = None
    try:
        spec = parse(base)
    except SpecError:  # what the keys set may be missing in it
        spec = with_overrides(_plain(base), overrides_of({key: values.samples[0] for key, values in space.items()}), own=True)
    if spec.data.valid is None and spec.data.split is None and not spec.data.share:
        raise SpecError("trials are judged on validation data, and the spec has none; set data.valid, or data.share above 0")
    if spec.data.train is None:
        raise SpecError("trials are trained by processes of their own, which read the data from files; set data.train")
    return spec


def _check_same(folder: Path, search: Search, base: Mapping[str, Any] | None, space: Space, seed: int | None) -> None:
    """Refuse to go on with another search than the folder's."""
    for what, given, known in (
        ("spec", None if base is None else _plain(base), read_values(folder / BASE)),
        ("keys", {key: values.to_json() for key, values in space.items()} or None, search.to_json()["space"]),
        ("seed", seed, search.seed),
    ):
        if given is not None and given != known:
            raise RunError(f"{folder} is a search with another {what}; leave it out to go on with that one, or use another {option('run')}")


def _check_data(folder: Path, trials: Sequence[Trial], base: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than the trials so far were judged on: their values would be compared with those of new ones."""
    for trial in trials:
        facts = folder / f"trial-{trial.number}" / "facts.json"
        if trial.values and facts.is_file():
            before = json.loads(facts.read_bytes()).get("files", {})
            now = {key.removeprefix("data."): file for key, file in digests_of(spec_with(base, trial.keys)).items()}
            for part, (name, digest) in now.items():
                if before.get(part, digest) != digest:
                    fact = f"the data has changed since trial {trial.number} of {folder} ({name}), so that trials could not be compared"
                    raise RunError(f"{fact}; restore the old data, or start a new search")
            return


class _Going:
    """A search that goes on."""

    def __init__(self, folder: Path, search: Search, base: Mapping[str, Any], how: How, journal: Journal, trials: list[Trial]) -> None:
        self.folder, self.search, self.base, self.how, self.journal = folder, search, base, how, journal
        self.trials = {trial.number: trial for trial in trials}
        self._before = {trial.number: trial.seconds for trial in trials}  # seconds of trials that go on
        self._waiting = [trial.number for trial in trials if trial.state in ("running", "stopped")]
        self._pruned: set[int] = set()
        self._looked: dict[int, tuple[int, int]] = {}  # size and time of the metrics file at the last look

    def next_job(self) -> Job | None:
        if self._waiting:
            number = self._waiting.pop(0)
            trial = replace(self.trials[number], state="running", values=(), why="")
        else:
            most = min(self.how.trials, self.search.size or self.how.trials)
            if len(self.trials) >= most:
                return None
            number = len(self.trials) + 1
            trial = Trial(number, self.search.next_keys(list(self.trials.values())))
        self._put(trial)
        try:
            spec_with(self.base, trial.keys)
        except SpecError as error:
            self._over(replace(trial, state="failed", why=str(error)))
            return self.next_job()
        words = (str(self.folder / BASE), *overrides_of(trial.keys), *options_of(self.how.device, self.how.devices))
        return Job(self.folder / f"trial-{number}", words)

    def look(self, child: ChildRun) -> bool:
        """Take in what a trial has reached; True if it is not worth going on with."""
        number = self._number(child)
        if number in self._pruned:
            return True
        path = child.job.folder / "metrics.jsonl"
        status = path.stat() if path.is_file() else None
        seen = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        if seen == self._looked.get(number):
            return False
        self._looked[number] = seen
        rows, trial = evaluations(child.job.folder), self.trials[number]
        found = [None if (value := row.get(self.search.metric)) is None else float(value) for row in rows]
        if tuple(found[: len(trial.values)]) != trial.values:  # it went back to a snapshot, and may have come as far again since
            trial = replace(trial, values=())
        for row, value in list(zip(rows, found, strict=True))[len(trial.values) :]:
            trial = replace(trial, values=(*trial.values, value), epochs=int(row.get("epoch") or 0))
            # Judged evaluation by evaluation, so that the outcome does not depend on when we look.
            if self.search.is_hopeless(list(self.trials.values()), trial):
                self._pruned.add(number)
                break
        self.trials[number] = trial
        return number in self._pruned

    def ended(self, child: ChildRun, code: int) -> None:
        number = self._number(child)
        trial = replace(self.trials[number], seconds=round(self._before.get(number, 0) + child.seconds))
        if number in self._pruned:
            trial = replace(trial, state="pruned")
        elif child.asked and code != 0:
            self._put(replace(trial, state="stopped"))
            return
        elif child.can_go_on(code):
            trial = replace(trial, state="stopped", why=child.complaint(code))
        elif code != 0:
            trial = replace(trial, state="failed", why=child.complaint(code))
        elif trial.best(self.search.metric) is None:
            trial = replace(trial, state="failed", why=f"it has no finite {self.search.metric} on valid")
        else:
            trial = replace(trial, state="finished")
        self._over(trial)

    def _over(self, trial: Trial) -> None:
        """Keep a trial that has ended, and tell of it."""
        self._put(trial)
        place = self.folder / f"trial-{trial.number}"
        if place.is_dir():
            output_file.write(place / TRIAL, json.dumps(asdict(trial), indent=1) + "\n")
        best, keys = trial.best(self.search.metric), " ".join(overrides_of(trial.keys))
        reached = "" if best is None else f" {self.search.metric} {best:.4g}"
        self.how.say(f"trial {trial.number} {trial.state}:{reached} {keys}{f'; {trial.why}' if trial.why else ''}")
        failed = [each for each in self.trials.values() if each.why]
        if len(failed) >= MOST_FAILURES and not any(each.state in ("finished", "pruned") for each in self.trials.values()):
            kind = ResourceError if all(each.state == "stopped" for each in failed) else RunError
            raise kind(f"the first {len(failed)} trials failed, the first with: {failed[0].why}")

    def _put(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self.journal.write(trial)

    @staticmethod
    def _number(child: ChildRun) -> int:
        return int(child.job.folder.name.removeprefix("trial-"))

    def result(self, why: Why | None) -> TuneResult:
        """Write the best spec and the page."""
        metric = self.search.metric
        judged = [
            (value, trial)
            for trial in self.trials.values()
            if trial.state in ("finished", "stopped") and (value := trial.best(metric)) is not None
        ]
        rows = [_row(trial, metric) for trial in self.trials.values()]
        unfinished = [trial for trial in self.trials.values() if trial.state == "stopped" and trial.why]
        if not judged:
            if why is None and not unfinished:
                raise RunError(f"no trial of {self.folder} was evaluated; the first failed with: {next(iter(self.trials.values())).why}")
            self._demand(unfinished, why)
            return TuneResult(self.folder, None, None, rows, why)
        value, best = min(judged, key=lambda pair: score(metric, pair[0]))
        spec = spec_with(self.base, best.keys)
        output_file.write(self.folder / BEST, dump(spec))
        page = render_search(str(self.folder), metric, list(self.search.space), rows, best.number, higher=metric in HIGHER)
        output_file.write(self.folder / PAGE, page)
        self._demand(unfinished, why)
        return TuneResult(self.folder, spec, value, rows, why)

    def _demand(self, unfinished: Sequence[Trial], why: Why | None) -> None:
        """Raise if trials that can go on have ended before their end, and nobody asked the search to stop."""
        if unfinished and why is None:
            fact = f"{len(unfinished)} of {len(self.trials)} trials ended before their end, the first with: {unfinished[0].why}"
            raise ResourceError(f"{fact}; remove the cause, then go on with {option('resume')}")


def _row(trial: Trial, metric: str) -> dict[str, Any]:
    best = trial.best(metric)
    row = {"trial": trial.number, **trial.keys, metric: best, "epochs": trial.epochs, "seconds": trial.seconds, "state": trial.state}
    return row | ({"why": trial.why} if trial.why else {})
