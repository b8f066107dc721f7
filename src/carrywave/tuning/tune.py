"""Searches over keys of a spec: every trial is a run in a folder of its own, judged by its best `train.best` on valid.

What is tried next and which trials are not worth going on with is Optuna's: its study, its storage, sampler and pruner.

FOLDER/
  tune.yaml      the spec that trials differ from
  tune.journal   Optuna's study (JournalStorage), with the search and its trials
  trial-1/ …     ordinary runs; what they print is in logs/
  best.yaml      the spec of the best trial
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carrywave.errors import ResourceError, RunError, SpecError, UserError, option
from carrywave.runs import output_file
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.run_place import free_place
from carrywave.spec.load import dump, read_values
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import HIGHER
from carrywave.spec.yaml_text import dump_yaml
from carrywave.tuning.children import ChildRun, Why, holding, options_of, places_for, run_children
from carrywave.tuning.search_space import (
    Space,
    check_space,
    combinations,
    library,
    overrides_of,
    space_from,
    spec_with,
    value_of,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

BASE, JOURNAL, BEST = "tune.yaml", "tune.journal", "best.yaml"
TRIALS = 20
STARTUP = 5  # trials that are drawn at random, and that must have finished before others are judged by them
LEAST = 2  # evaluations of a trial before it is judged
MOST_FAILURES = 3  # in a row from the first trial on: then something is wrong with all of them
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}  # else a trial is stopped, to go on later


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


@dataclass(frozen=True)
class SearchOptions:
    """What may differ from one part of a search to the next, after an interruption."""

    trials: int = TRIALS
    seconds: float | None = None
    at_once: int | None = None
    device: str = "auto"
    devices: int | None = None
    prune: bool = True
    say: Callable[[str], None] = lambda _: None


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
    seconds = None if hours is None else 3600 * hours
    options = SearchOptions(trials, seconds, at_once, device, devices, prune, say or (lambda _: None))
    return run_search(base, space_from(keys), options, seed=seed, run=None if run is None else Path(run), resume=resume)


def run_search(
    base: Mapping[str, Any] | None, space: Space, options: SearchOptions, *, seed: int | None, run: Path | None, resume: bool
) -> TuneResult:
    """As `tune`, for the values of a spec file and a space. A search that goes on may leave both out, and its seed."""
    library()
    if resume and run is None:
        raise RunError(f"{option('resume')} needs the folder of a search; pass {option('run')}")
    if options.trials < 1:
        raise UserError(f"{option('trials')} is {options.trials}; use a number >= 1")
    if options.seconds is not None and not options.seconds > 0:
        raise UserError("the time limit of a search is not above 0; use a longer one")
    places = places_for(options.at_once, options.device, options.devices)
    if base is None and not resume:
        raise SpecError("a search needs a spec; pass the path of a spec file")
    spec = None if resume else check_space(base or {}, space)
    folder = run or free_place("tune")
    with holding(folder, resume=resume, marker=JOURNAL, before=BASE):
        if spec is not None:
            with atomic_files.writing(str(folder)):
                atomic_files.write_bytes(folder / BASE, dump_yaml(_plain(base or {})).encode(errors="backslashreplace"))
                study = begin_study(folder, spec, space, 1 if seed is None else seed)
        else:
            study = open_study(folder)
            _check_same(folder, study, None if base is None else _plain(base), space, seed)
        search = _Search(folder, study, options)
        until = None if options.seconds is None else time.monotonic() + options.seconds
        why = run_children(search.next_child, places, search.look, search.ended, until=until, say=options.say)
        return search.result(why)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as YAML can hold them, validated or not."""
    return dict(json.loads(json.dumps(values, default=str)))


def begin_study(folder: Path, spec: Spec, space: Space, seed: int) -> Study:
    """A new study in a folder."""
    optuna, metric = library(), spec.train.best
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL)))
    direction = "maximize" if metric in HIGHER else "minimize"
    study: Study = optuna.create_study(study_name="tune", storage=storage, direction=direction)
    written = {key: optuna.distributions.distribution_to_json(values) for key, values in space.items()}
    study.set_user_attr("search", {"metric": metric, "seed": seed, "space": written})
    return study


def open_study(folder: Path) -> Study:
    """The study of a folder; a line that a killed process was writing is as if it had not been written."""
    optuna, path = library(), folder / JOURNAL
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        study: Study = optuna.load_study(study_name="tune", storage=storage)
        study.user_attrs["search"]
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); start a new search in another folder") from error
    return study


def _check_same(folder: Path, study: Study, base: Mapping[str, Any] | None, space: Space, seed: int | None) -> None:
    """Refuse to go on with another search than the folder's."""
    before, of_json = study.user_attrs["search"], library().distributions.json_to_distribution
    known = {key: of_json(text) for key, text in before["space"].items()}
    given = (("spec", base, read_values(folder / BASE)), ("keys", space or None, known), ("seed", seed, before["seed"]))
    for what, ours, theirs in given:
        if ours is not None and ours != theirs:
            raise RunError(f"{folder} is a search with another {what}; leave it out to go on with that one, or use another {option('run')}")


class _Search:
    """A search that goes on. Trials are numbered from 1."""

    def __init__(self, folder: Path, study: Study, options: SearchOptions) -> None:
        self.folder, self.study, self.options = folder, study, options
        self.base, search, optuna = read_values(folder / BASE), study.user_attrs["search"], library()
        self.metric, self.seed = str(search["metric"]), int(search["seed"])
        self.space = {key: optuna.distributions.json_to_distribution(text) for key, text in search["space"].items()}
        study.pruner = optuna.pruners.MedianPruner(STARTUP, LEAST) if options.prune else optuna.pruners.NopPruner()
        self._trials: dict[Path, Trial] = {}  # that are being trained, by folder
        self._waiting = [trial.number for trial in study.trials if not trial.state.is_finished()]
        self._pruned: set[Path] = set()

    def next_child(self) -> ChildRun | None:
        optuna, every = library(), combinations(self.space)
        if self._waiting:
            number = self._waiting.pop(0)
            trial = optuna.trial.Trial(self.study, self.study.trials[number]._trial_id)
        else:
            number = len(self.study.trials)
            if number >= min(self.options.trials, self.options.trials if every is None else len(every)):
                return None
            if every is not None and len(every) <= self.options.trials:  # each once
                self.study.enqueue_trial(random.Random(self.seed).sample(every, len(every))[number])
            # A sampler of its own for each trial, so that a search that was interrupted goes on as if it had not been.
            own_seed = random.Random(f"{self.seed} {number}").getrandbits(32)
            self.study.sampler = optuna.samplers.TPESampler(seed=own_seed, n_startup_trials=STARTUP)
            trial = self.study.ask(self.space)
            trial.set_user_attr("keys", {key: value_of(values, trial.params[key]) for key, values in self.space.items()})
        keys = trial.user_attrs["keys"]
        try:
            spec_with(self.base, keys)
        except SpecError as error:
            self._tell(trial, "FAIL", why=str(error))
            return self.next_child()
        words = (str(self.folder / BASE), *overrides_of(keys), *options_of(self.options.device, self.options.devices))
        child = ChildRun(self.folder / f"trial-{number + 1}", words)
        self._trials[child.folder] = trial
        return child

    def look(self, child: ChildRun) -> bool:
        """Take in what a trial has reached; True if it is not worth going on with."""
        trial, rows = self._trials[child.folder], child.evaluations()
        known = self.study.trials[trial.number].intermediate_values
        # Judged evaluation by evaluation, so that the outcome does not depend on when we look.
        for step, row in enumerate(rows, start=1):
            if child.folder in self._pruned:
                return True
            if step not in known:
                worst = -math.inf if self.metric in HIGHER else math.inf
                trial.report(worst if row.get(self.metric) is None else float(row[self.metric]), step)
                trial.set_user_attr("epochs", int(row.get("epoch") or 0))
                if trial.should_prune():
                    self._pruned.add(child.folder)
        return child.folder in self._pruned

    def ended(self, child: ChildRun, code: int) -> None:
        trial = self._trials.pop(child.folder)
        trial.set_user_attr("seconds", round(trial.user_attrs.get("seconds", 0) + time.monotonic() - child.started))
        if child.folder in self._pruned:
            self._tell(trial, "PRUNED")
        elif child.can_go_on(code):
            trial.set_user_attr("why", "" if child.asked else child.complaint(code))
            if not child.asked:
                self._say(trial)
        elif code != 0:
            self._tell(trial, "FAIL", why=child.complaint(code))
        elif self._best(self.study.trials[trial.number]) is None:
            self._tell(trial, "FAIL", why=f"it has no finite {self.metric} on valid")
        else:
            self._tell(trial, "COMPLETE")

    def _best(self, trial: FrozenTrial) -> float | None:
        """The best value of a trial so far; None if there is none."""
        values = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
        return (max if self.metric in HIGHER else min)(values, default=None)

    def _tell(self, trial: Trial, state: str, why: str = "") -> None:
        """Record that a trial has ended, and say so."""
        trial.set_user_attr("why", why)
        value = self._best(self.study.trials[trial.number]) if state == "COMPLETE" else None
        self.study.tell(trial, value, library().trial.TrialState[state])
        self._say(trial)

    def _say(self, trial: Trial) -> None:
        frozen = self.study.trials[trial.number]
        best, keys, why = self._best(frozen), " ".join(overrides_of(frozen.user_attrs["keys"])), frozen.user_attrs["why"]
        reached = "" if best is None else f" {self.metric} {best:.4g}"
        self.options.say(f"trial {frozen.number + 1} {_state(frozen)}:{reached} {keys}{f'; {why}' if why else ''}")
        trials = self.study.trials
        failed = [each for each in trials if each.user_attrs.get("why")]
        if len(failed) >= MOST_FAILURES and not any(_state(each) in ("finished", "pruned") for each in trials):
            kind = ResourceError if all(_state(each) == "stopped" for each in failed) else RunError
            raise kind(f"the first {len(failed)} trials failed, the first with: {failed[0].user_attrs['why']}")

    def result(self, why: Why | None) -> TuneResult:
        """Write the best spec."""
        trials = self.study.trials
        rows = [self._row(trial) for trial in trials]
        found = [(self._best(trial), trial) for trial in trials if _state(trial) in ("finished", "stopped")]
        judged = [(value, trial) for value, trial in found if value is not None]
        unfinished = [trial.user_attrs["why"] for trial in trials if _state(trial) == "stopped" and trial.user_attrs.get("why")]
        value: float | None = None
        spec: Spec | None = None
        if judged:
            value, best = (max if self.metric in HIGHER else min)(judged, key=lambda pair: pair[0])
            spec = spec_with(self.base, best.user_attrs["keys"])
            output_file.write(self.folder / BEST, dump(spec))
        if unfinished and why is None:
            fact = f"{len(unfinished)} of {len(trials)} trials ended before their end, the first with: {unfinished[0]}"
            raise ResourceError(f"{fact}; remove the cause, then go on with {option('resume')}")
        if not judged and why is None:
            raise RunError(f"no trial of {self.folder} was evaluated; the first failed with: {trials[0].user_attrs['why']}")
        return TuneResult(self.folder, spec, value, rows, why)

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        known = trial.user_attrs
        row = {"trial": trial.number + 1, **known["keys"], self.metric: self._best(trial), "epochs": known.get("epochs", 0)}
        why = {"why": known["why"]} if known.get("why") else {}
        return row | {"seconds": known.get("seconds", 0), "state": _state(trial)} | why


def _state(trial: FrozenTrial) -> str:
    return STATES.get(trial.state.name, "stopped")
