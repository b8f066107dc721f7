"""Finds or measures the profile of this machine, cached in a file by hardware and versions and extended when a model needs more samples.

Torch-free: timing happens in separate processes, under the conditions of real workers (their number, their threads). Only one process
measures at a time, because two would distort each other's timings.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from carrywave import __version__
from carrywave.data.files import cache
from carrywave.errors import PlanError, RunError, UserError
from carrywave.launch.hardware import cores, gpus, made_for_bf16, nvidia_smi, shares_on
from carrywave.launch.shares.mps import PIPES, divided
from carrywave.parallel import worker_pool
from carrywave.parallel.startup.environment import TRANSPORT
from carrywave.parallel.startup.launcher_env import threads_dealt
from carrywave.parallel.worker_pool import Row
from carrywave.plan.cost.profile import Contention, Link, Overheads, Profile, Reduction, Sample
from carrywave.plan.cost.sample_requests import Ask, asks_of, called
from carrywave.plan.cost.shipped_profiles import LINKS
from carrywave.plan.cost.units import Units

Note = Callable[[str], None]

MEASURED_BY = "carrywave.measure.work"
CROWDED = 4  # the most workers per core that are timed together; larger counts are extrapolated
BETWEEN = "ethernet-10g"  # the link between hosts, which is not measured: published figures


def profile_for(units: Units, *, device: str = "auto", devices: int = 1, note: Note = lambda text: None) -> Profile:
    """The profile of this machine, with all samples needed to plan this model on this many of its devices; measures what is missing."""
    kind = device if device != "auto" else "cuda" if gpus() else "cpu"
    if kind == "cuda" and not gpus():
        raise PlanError(
            "device cuda was requested, but nvidia-smi shows no GPU; use --device cpu, or pass the --profile of another machine"
        )
    path = _path(kind)
    with _alone(path, note):
        profile = read(path, kind)
        for workers in worker_counts(kind, devices):
            missing = _missing(profile, units, workers, kind)
            if missing.something:
                note(f"measuring this machine with {workers} worker{'s' * (workers > 1)} ({len(missing.asks)} calls)")
                profile = _measured(profile, kind, units.precision, workers, missing)
                profile.write(path)
    return profile


def profile_of_shares(units: Units, environment: Mapping[str, str], counts: Sequence[int]) -> Profile:
    """The profile of shares of a GPU, each as a device of its own: measured now, by workers with this environment, and not kept.

    `counts` are the numbers of shares that work at once.
    """
    profile = replace(empty("cuda"), name="shares of a GPU", devices_per_host=max(counts))
    for workers in counts:
        missing = _missing(profile, units, workers, "cuda")
        profile = _measured(profile, "cuda", units.precision, workers, missing, environment)
    return profile


def known_profile(units: Units, *, device: str, workers: int) -> Profile | None:
    """The profile of this machine as measured so far; None if it lacks anything this model needs with this many workers."""
    path = _path(device)
    if not path.is_file():
        return None
    profile = read(path, device)
    return None if _missing(profile, units, workers, device).something else profile


def worker_counts(kind: str, devices: int) -> list[int]:
    """The numbers of concurrent workers to time."""
    most = max(1, min(devices, len(gpus()) if kind == "cuda" else CROWDED * cores()))
    return sorted({1, min(2, most), most})  # links are timed with two; counts in between use the nearest


def hardware(kind: str) -> str:
    """A description of this machine: machines with the same one share a profile."""
    if kind == "cuda":
        return ", ".join(f"{gpus().count(name)} x {name}" for name in sorted(set(gpus())))
    return f"{_processor()} {platform.machine()}, {cores()} cores"


def versions() -> dict[str, str]:
    """The versions that were timed, and the number of threads and the transport if the user set them."""
    found = {"carrywave": __version__, "torch": metadata.version("torch")}
    if (own := _own_threads()) is not None:
        found["threads"] = str(own)
    if (asked := os.environ.get(TRANSPORT, "")) not in ("", "auto"):
        found["transport"] = asked
    return found


def threads(workers: int) -> int:
    """Threads per worker, as a launcher assigns them."""
    return _own_threads() or max(1, cores() // workers)


def _own_threads() -> int | None:
    """Threads per worker if the user set them; None if not, or if the launcher assigned them."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) and not threads_dealt() else None


def empty(kind: str) -> Profile:
    """A profile of this machine without any timings."""
    return Profile(
        f"this machine ({kind})",
        hardware(kind),
        "measured",
        _memory(kind),
        (),
        Link(50e-6, 1e9, "assumed: nothing has been measured yet"),
        LINKS[BETWEEN],
        devices_per_host=len(gpus()) if kind == "cuda" else cores(),
        common_memory=kind == "cpu",
        overheads=Overheads(overlap=1.0 if kind == "cuda" else 0.0),
        versions=versions(),
        made_for_bf16=made_for_bf16(kind),
    )


def read(path: Path, kind: str) -> Profile:
    """The profile in a file; an empty one if there is none, or none for this machine and these versions."""
    if not path.is_file():
        return empty(kind)
    try:
        found = Profile.read(path)
        found.check_fresh(hardware(kind), versions())
    except PlanError:
        return empty(kind)
    return found


class Wanted(NamedTuple):
    """What is to be measured: calls, optimizers by name, and links if `links`."""

    asks: Sequence[Ask]
    optimizers: Sequence[str]
    links: bool

    @property
    def something(self) -> bool:
        """True if there is anything."""
        return bool(self.asks or self.optimizers or self.links)


def _missing(profile: Profile, units: Units, workers: int, kind: str) -> Wanted:
    """What a profile lacks for a model."""
    there = {called(sample) for sample in profile.samples if sample.workers == workers}
    width = "fp64" if units.precision == "fp64" else "fp32"
    updated = {s.name for s in profile.samples if s.kind == "optimizer" and s.workers == workers and s.precision == width}
    return Wanted(
        [ask for ask in asks_of(units, workers, kind) if ask.size not in there],
        [] if units.optimizer in updated else [units.optimizer],
        workers > 1 and all(reduction.workers != workers for reduction in profile.reductions),
    )


def _measured(
    profile: Profile, kind: str, precision: str, workers: int, missing: Wanted, environment: Mapping[str, str] | None = None
) -> Profile:
    """The profile extended by what it lacked for a model."""
    # Shares are of one host, where all that stages do is recorded.
    launched = environment is None and shares_on(kind) == 1
    try:
        # In a worker that has a share, its own environment serves those who measure too.
        own = divided(1 if PIPES in os.environ else shares_on(kind)) if environment is None else contextlib.nullcontext(environment)
        with own as given:
            name = "the measurement of this machine"
            return extended(profile, kind, precision, missing, workers, launched=launched, environment=given, name=name)
    except RunError as error:
        raise PlanError(f"{error}; set plan.replicas and plan.stages, or set CARRYWAVE_PROFILE to a profile of such a machine") from None


def extended(
    profile: Profile,
    kind: str,
    precision: str,
    wanted: Wanted,
    workers: int,
    *,
    launched: bool,
    environment: Mapping[str, str],
    name: str = "the measurement",
) -> Profile:
    """The profile with what this many workers measure now. `launched`: also as stages run whose messages need the host."""
    job = {
        "device": kind,
        "precision": precision,
        "asks": [asdict(ask) for ask in wanted.asks],
        "optimizers": list(wanted.optimizers),
        "links": wanted.links,
        "launched": launched,
    }
    rows = worker_pool.start(MEASURED_BY, job, workers, threads=threads(workers), environment=environment, name=name)
    return merged(profile, rows, workers)


def merged(profile: Profile, rows: Sequence[Sequence[Row]], workers: int) -> Profile:
    """The profile with rows from workers that timed the same calls concurrently; their times are averaged."""
    samples: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    reductions: dict[int, list[float]] = defaultdict(list)
    overheads: dict[str, list[float]] = defaultdict(list)
    link = profile.within
    contention = {each.workers: each for each in profile.contention}
    for row in (row for of_one in rows for row in of_one):
        if "sample" in row:
            sample = replace(Sample(**row["sample"]), workers=workers)
            samples[_same(sample)].append(sample)
        if "lag" in row:
            contention[workers] = replace(contention.get(workers, Contention(workers)), lag=row["lag"])
        if "reduction" in row:
            reductions[row["reduction"]["num_bytes"]].append(row["reduction"]["seconds"])
        if "link" in row:
            link = Link(**row["link"])
        for name, seconds in row.get("overheads", {}).items():
            overheads[name].append(seconds)
    new = [_mean(several) for several in samples.values()]
    known = {_same(sample) for sample in new}
    kept = tuple(sample for sample in profile.samples if _same(sample) not in known)
    found = tuple(Reduction(workers, num_bytes, statistics.fmean(seconds)) for num_bytes, seconds in sorted(reductions.items()))
    sizes = {(each.workers, each.num_bytes) for each in found}
    before = tuple(each for each in profile.reductions if (each.workers, each.num_bytes) not in sizes)
    # The first measurement is kept, so that predictions do not depend on what was measured later.
    times: dict[str, Any] = {name: statistics.fmean(each) for name, each in overheads.items() if not getattr(profile.overheads, name)}
    return replace(
        profile,
        samples=kept + tuple(new),
        reductions=before + found,
        contention=tuple(contention.values()),
        within=link,
        overheads=replace(profile.overheads, **times),
    )


def _same(sample: Sample) -> tuple[object, ...]:
    return tuple(value for name, value in vars(sample).items() if not name.endswith("_seconds"))


def _mean(several: Sequence[Sample]) -> Sample:
    return replace(
        several[0],
        forward_seconds=statistics.fmean(sample.forward_seconds for sample in several),
        backward_seconds=statistics.fmean(sample.backward_seconds for sample in several),
        deferred_seconds=statistics.fmean(sample.deferred_seconds for sample in several),
    )


def _path(kind: str) -> Path:
    known = "; ".join([hardware(kind), *(f"{name} {version}" for name, version in versions().items())])
    return cache.folder(None) / "profiles" / f"{kind}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


@contextlib.contextmanager
def _alone(path: Path, note: Note) -> Iterator[None]:
    """Hold an exclusive lock: one process measures at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise UserError(
            f"the profile of this machine cannot be saved in {path.parent} ({error.strerror or error}); "
            "set CARRYWAVE_CACHE to a writable folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            note("another process is measuring this machine; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _memory(kind: str) -> int:
    """Bytes of memory of one GPU or share of one, or of the machine."""
    if kind == "cuda":
        known = [int(line) for line in nvidia_smi("memory.total") if line.isdecimal()]
        # A modest default if it is not reported.
        return (min(known) << 20 if known else 16 << 30) // shares_on(kind)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """The processor's name, as far as the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor()
