"""The trials of a search: what the next one tries, which are not worth going on with, and the file that keeps them.

The file is a line of JSON for the search and one for every change of a trial, of which the last counts. Optuna is asked anew each time, as
a function of these trials, the seed and the number of the next one, so a search that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from carrywave.errors import RunError, UserError
from carrywave.runs.checkpoint import atomic_files
from carrywave.spec.train_spec import score
from carrywave.tuning.search_space import Choices, Space, combinations, read_space

State = Literal["running", "stopped", "finished", "pruned", "failed"]
STARTUP = 5  # trials that are drawn at random, and that must have finished before others are judged by them
LEAST = 2  # evaluations of a trial before it is judged
MOST_COMBINATIONS = 10_000  # of choices, up to which none is tried twice


@dataclass(frozen=True)
class Trial:
    """One trial: the values of its keys, and how far it got."""

    number: int  # from 1
    keys: Mapping[str, Any]
    state: State = "running"
    values: tuple[float | None, ...] = ()  # the metric at each evaluation; None if it was not finite
    epochs: int = 0
    seconds: int = 0
    why: str = ""  # it failed

    def best(self, metric: str) -> float | None:
        """The best value so far; None if there is none."""
        found = [value for value in self.values if value is not None]
        return min(found, key=lambda value: score(metric, value), default=None)


@dataclass(frozen=True)
class Search:
    """What is searched for, and where."""

    metric: str
    space: Space
    seed: int
    prune: bool

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "space": {key: values.to_json() for key, values in self.space.items()}}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Search:
        """The search from what `to_json` wrote."""
        return Search(str(values["metric"]), read_space(values["space"]), int(values["seed"]), bool(values["prune"]))

    @property
    def size(self) -> int | None:
        """The number of trials that differ; None if it is not limited by choices."""
        if not all(isinstance(values, Choices) for values in self.space.values()):
            return None
        return math.prod(len(values.samples) for values in self.space.values())

    def next_keys(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """The values that the next trial tries."""
        optuna = library()
        number = len(trials) + 1
        seed = random.Random(f"{self.seed} {number}").getrandbits(32)
        study = self._study(trials, optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP))
        drawn = study.ask(self._distributions(optuna)).params
        keys: dict[str, Any] = {}
        for key, values in self.space.items():
            keys[key] = json.loads(drawn[key]) if isinstance(values, Choices) else values.rounded(drawn[key])
        tried = [trial.keys for trial in trials]
        every = combinations(self.space) if (self.size or math.inf) <= MOST_COMBINATIONS else None
        if keys in tried and every is not None:
            unused = [each for each in every if each not in tried]
            return random.Random(seed).choice(unused) if unused else keys
        return keys

    def is_hopeless(self, trials: Sequence[Trial], trial: Trial) -> bool:
        """True if a running trial, at its last evaluation, is worse than half of the finished ones were at that evaluation."""
        if not self.prune or not trial.values:
            return False
        optuna = library()
        study = self._study([each for each in trials if each.number != trial.number], None)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=LEAST)
        return bool(pruner.prune(study, self._frozen(trial, optuna)))

    def _study(self, trials: Sequence[Trial], sampler: Any) -> Any:
        optuna = library()
        study = optuna.create_study(direction="minimize", sampler=sampler or optuna.samplers.RandomSampler(0))
        study.add_trials([self._frozen(trial, optuna) for trial in trials])
        return study

    def _frozen(self, trial: Trial, optuna: ModuleType) -> Any:
        """The trial as Optuna knows it: lower values are better."""
        states = optuna.trial.TrialState
        best = trial.best(self.metric)
        state = {"finished": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}.get(trial.state, states.RUNNING)
        told = {number: math.inf if value is None else score(self.metric, value) for number, value in enumerate(trial.values, start=1)}
        return optuna.trial.create_trial(
            state=state,
            value=score(self.metric, best) if best is not None and state in (states.COMPLETE, states.PRUNED) else None,
            params={
                key: json.dumps(trial.keys[key]) if isinstance(values, Choices) else trial.keys[key] for key, values in self.space.items()
            },
            distributions=self._distributions(optuna),
            intermediate_values=told,
        )

    def _distributions(self, optuna: ModuleType) -> dict[str, Any]:
        kinds = optuna.distributions
        found: dict[str, Any] = {}
        for key, values in self.space.items():
            if isinstance(values, Choices):
                found[key] = kinds.CategoricalDistribution([json.dumps(value) for value in values.values])
            else:
                kind = kinds.IntDistribution if values.whole else kinds.FloatDistribution
                found[key] = kind(values.low, values.high, log=values.log)
        return found


def library() -> ModuleType:
    """Optuna, silent."""
    try:
        import optuna
    except ImportError as error:
        raise UserError("a search needs the package optuna, which is not installed; pip install 'carrywave[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Journal:
    """The file of a search."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, search: Search) -> None:
        """Begin the file with the line of the search, completely or not at all."""
        atomic_files.write_bytes(self.path, _line({"search": search.to_json()}))

    def write(self, trial: Trial) -> None:
        """Write a line of a trial."""
        self._append({"trial": asdict(trial)})

    def read(self) -> tuple[Search, list[Trial]]:
        """The search and its trials by number; a line that was cut off is as if it had not been written."""
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # a process was killed while it wrote: what follows must not be joined to it
            with self.path.open("r+b") as file:
                file.truncate(self.path.stat().st_size - len(lines[-1]))
        try:
            rows = [json.loads(line) for line in lines[:-1]]
            search = Search.of(rows[0]["search"])
            trials = {row["trial"]["number"]: Trial(**{**row["trial"], "values": tuple(row["trial"]["values"])}) for row in rows[1:]}
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise RunError(f"{self.path} is damaged ({error}); start a new search in another folder") from error
        return search, [trials[number] for number in sorted(trials)]

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
