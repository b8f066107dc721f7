"""Trains one spec with several seeds, each a run of its own: to see how much luck there is in a result, and to predict with all of them.

FOLDER/
  init.txt       the weights that they start from (`--init`), and their SHA-256; empty: none
  seeds.yaml     the spec
  seed-1/ …      ordinary runs, with the spec's seed, the next one, …; what they print is in logs/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from carrywave.data.files.hashes import sha256
from carrywave.data.files.remote import is_address
from carrywave.errors import RunError, UserError, option
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.snapshot import POINTER
from carrywave.runs.run_place import SNAPSHOTS, free_place
from carrywave.spec.load import dump, load
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import score
from carrywave.train.start.run_source import weights_file
from carrywave.tuning.child_runs import ChildRun, Job, Why, evaluations, holding, options_of, places_for, run_jobs

BASE, INIT = "seeds.yaml", "init.txt"


@dataclass(frozen=True)
class Weights:
    """What all runs start from."""

    name: str  # as the user gave it
    sha256: str  # empty: not known, because an older version did not write it

    @property
    def are_there(self) -> bool:
        """True if there is something under the name."""
        return is_address(self.name) or Path(self.name).exists()

    @property
    def have_changed(self) -> bool:
        """True if what is there is not what the first run started from; if it cannot be read, the run that needs it says why."""
        try:
            return bool(self.sha256) and self.are_there and sha256(weights_file(self.name)) != self.sha256
        except (UserError, OSError):
            return False


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
    device: str = "auto",
    devices: int | None = None,
    init: str | None = None,
    words: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> SeedsResult:
    """Train the spec with `seeds` seeds, side by side where there are several GPUs; None: the spec of the runs that go on.

    All start from the weights `init`, which runs that go on need not be told again. `words` are further arguments of `carrywave train`,
    the same for all.
    """
    if resume and run is None:
        raise RunError(f"{option('resume')} needs the folder of the runs; pass {option('run')}")
    if spec is None and run is not None and resume:
        if not (run / BASE).is_file():
            raise RunError(f"{run} has nothing to resume (no {BASE}); correct {option('run')}, or remove {option('resume')}")
        spec = load(run / BASE)
    assert spec is not None
    places = places_for(None, device, devices)
    folder = run or free_place(spec.task)
    if spec.data.valid is None and spec.data.split is None and not spec.streams:
        say("each seed holds other rows of train out as valid, so their metrics differ by that as well; set data.valid to compare them")
    found = None if init is None or resume else _found(init)
    with holding(folder, resume=resume, marker=BASE, before=INIT):
        if resume and load(folder / BASE) != spec:
            raise RunError(f"{folder} has runs of another spec; leave it out to go on with that one, or use another {option('run')}")
        weights = _begun_from(folder, init) if resume else found
        with atomic_files.writing(str(folder)):
            begun_from = "" if weights is None else f"{weights.name}\n{weights.sha256}\n"
            atomic_files.write_bytes(folder / INIT, begun_from.encode(errors="backslashreplace"))
            atomic_files.write_bytes(folder / BASE, dump(spec).encode(errors="backslashreplace"))
        jobs = []
        for number in range(1, seeds + 1):
            place, seed = folder / f"seed-{number}", f"train.seed={spec.train.seed + number - 1}"
            jobs.append(Job(place, (str(folder / BASE), seed, *options_of(device, devices), *words, *_init_words(weights, place))))
        waiting, complaints = list(jobs), list[tuple[str, bool]]()
        states: dict[str, str] = {}

        def next_job() -> Job | None:
            while waiting:
                job = waiting.pop(0)
                if weights is None or _has_snapshot(job.folder) or not weights.have_changed:
                    return job
                name = job.folder.name
                states[name] = "failed"
                fact = f"the weights of {weights.name} have changed since the first run started from them"
                complaints.append((f"{name} failed: {fact}; restore them, or start all runs anew in another {option('run')}", False))
                say(complaints[-1][0])
            return None

        def ended(child: ChildRun, code: int) -> None:
            name = child.job.folder.name
            states[name] = "finished" if not code else "stopped" if child.asked or child.can_go_on(code) else "failed"
            if code and not child.asked:
                complaints.append((f"{name} failed: {child.complaint(code)}", child.can_go_on(code) or code < 0))  # a signal: no mistake
                say(complaints[-1][0])
            elif not code:
                say(f"{name}: {_in_words(_best(child.job.folder, spec), spec)}")

        why = run_jobs(next_job, places, lambda _: False, ended, say=say)
        rows = []
        for number, job in enumerate(jobs):
            best = _best(job.folder, spec)
            state = states.get(job.folder.name, "stopped")
            rows.append({"run": str(job.folder), "seed": spec.train.seed + number, "state": state, **(best or {})})
    return SeedsResult(
        folder, rows, _summary(rows, spec), complaints[0][0] if complaints else "", why, all(later for _, later in complaints)
    )


def _found(init: str) -> Weights:
    return Weights(init, sha256(weights_file(init)))


def _begun_from(folder: Path, init: str | None) -> Weights | None:
    """The weights that runs which go on were started from. Others are refused, also in the place of those."""
    if not (folder / INIT).is_file():
        return None if init is None else Weights(init, "")  # an older version did not write it
    name, _, digest = (folder / INIT).read_text("utf-8").removesuffix("\n").partition("\n")
    before = Weights(name, digest) if name else None
    if init is None or (before is not None and init == before.name):
        return before
    if before is not None and (_found(init).sha256 == digest if digest else not before.are_there):
        return before if before.are_there and not before.have_changed else Weights(init, digest)
    how = "without initial weights" if before is None else f"from the weights of {before.name}"
    raise RunError(
        f"the runs in {folder} were started {how}; leave {option('init')} out to go on with them, or use another {option('run')}"
    )


def _init_words(weights: Weights | None, run: Path) -> tuple[str, ...]:
    """The option for the weights that a run starts from; one that has a snapshot does without if they are no longer there."""
    return () if weights is None or (not weights.are_there and _has_snapshot(run)) else ("--init", weights.name)


def _has_snapshot(run: Path) -> bool:
    return (run / SNAPSHOTS / POINTER).is_file()


def _best(folder: Path, spec: Spec) -> dict[str, Any] | None:
    """The evaluation whose weights a run keeps; None if there was none."""
    metric = spec.train.best
    judged = [row for row in evaluations(folder) if row.get(metric) is not None]
    return min(judged, key=lambda row: score(metric, row[metric]), default=None)


def _in_words(best: dict[str, Any] | None, spec: Spec) -> str:
    return "trained, without validation" if best is None else f"best {spec.train.best} {best[spec.train.best]:.4g}, epoch {best['epoch']}"


def _summary(rows: Sequence[dict[str, Any]], spec: Spec) -> str:
    metric = spec.train.best
    finished = [row for row in rows if row["state"] == "finished"]
    values = [row[metric] for row in finished if row.get(metric) is not None]
    of = f"{len(finished)} seeds" if len(finished) == len(rows) else f"{len(finished)} of {len(rows)} seeds"
    if not values:
        return f"{of}, without a {metric} on valid"
    return f"{of}: median {metric} {median(values):.4g}, from {min(values):.4g} to {max(values):.4g}"
