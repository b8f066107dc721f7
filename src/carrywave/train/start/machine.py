"""The profile of this machine: its hardware, and constants fitted to calls that its workers time at the same moment, as in training.

Torch-free: a command that only plans has worker processes do the timing, and a run has its own workers do it (`timing`).
`python -m carrywave.train.start.machine FILE` writes a profile that serves all models, for `carrywave plan --profile FILE` elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from carrywave import __version__
from carrywave.cells.cell import names
from carrywave.errors import PlanError, RunError
from carrywave.launch.hardware import cores, gpus, made_for_bf16, nvidia_smi
from carrywave.parallel import worker_pool
from carrywave.parallel.startup.launcher_env import threads_dealt
from carrywave.parallel.worker_pool import Row
from carrywave.plan.profile import LINKS, Link, Profile
from carrywave.plan.rates import CallKind, CallSize, TimedCall, fit
from carrywave.plan.unit import Unit
from carrywave.plan.units import Units

CROWDED = 4  # the most workers per core that are timed together
BETWEEN = "ethernet-10g"  # the link between hosts, which is not measured: published figures
SHARES = (1, 4)  # parts of the window that are timed, and with several workers of the lanes
LARGEST = {"cpu": 3e8, "cuda": 3e11}  # multiplications in a timed call: larger ones are timed on fewer steps
UPDATED = {"cpu": (100_000, 2_000_000), "cuda": (100_000, 10_000_000)}  # parameters of updates that are timed
PRECISIONS = {"cpu": ("fp32",), "cuda": ("bf16", "fp32", "tf32")}  # of a profile for all models
_UNITS: tuple[tuple[CallKind, str, int, int], ...] = (
    ("layer", "lstm", 128, 128),
    ("layer", "lstm", 512, 512),
    ("head", "softmax", 256, 10_000),
    ("embedding", "embedding", 10_000, 256),
)
_LANES, _STEPS = (16, 64), (8, 64)


@dataclass(frozen=True)
class CallToTime:
    """One call of a unit of a model."""

    kind: CallKind
    unit: str  # a cell, embedding, softmax, linear, dropout; of an update, the optimizer
    inputs: int
    outputs: int
    lanes: int
    steps: int
    projection: int = 0

    @property
    def size(self) -> CallSize:
        """What its time depends on."""
        unit = Unit("", self.unit, self.inputs, self.outputs, 0, 0, 0, 0, projection=self.projection)
        return unit.call(self.lanes, self.steps)

    def lighter(self, largest: float) -> CallToTime:
        """The same on fewer steps if it would take long."""
        work = 3.0 * self.size.terms[-1] if self.kind in ("layer", "head") else 1.0 * self.lanes * self.steps * self.outputs
        return self if work <= largest else replace(self, steps=max(2, round(self.steps * largest / work)))


def calls_of(units: Units, workers: int) -> list[CallToTime]:
    """The calls to time for a model: its own units on all and a share of its lanes, for windows and parts of them."""
    shape = max(units.shapes, key=lambda each: each.lanes * each.steps)
    lanes = sorted({shape.lanes, -(-shape.lanes // max(2, workers))})
    steps = sorted({max(2, -(-shape.steps // share)) for share in SHARES})
    calls: list[CallToTime] = []
    for B in lanes:
        for T in steps:
            for unit in units.units:
                if unit.kind != "numbers":
                    kind: CallKind = "layer" if unit.kind in names() else "embedding" if unit.kind == "embedding" else "head"
                    calls.append(CallToTime(kind, unit.kind, unit.inputs, unit.outputs, B, T, unit.projection))
                calls += [CallToTime("head", "linear", layer.inputs, layer.channels, B, T) for layer in unit.front]
                if unit.dropout or unit.norm or unit.front:
                    calls.append(CallToTime("plain", "dropout", 0, unit.width_out, B, T))
    return [*dict.fromkeys(calls), *(CallToTime("update", units.optimizer, 0, many, 1, 1) for many in (100_000, 2_000_000))]


def usual_calls(kind: str) -> list[CallToTime]:
    """The calls to time for a profile that serves all models."""
    calls = [CallToTime(*unit, lanes, steps) for unit in _UNITS for lanes in _LANES for steps in _STEPS]
    plain = [CallToTime("plain", "dropout", 0, 512, lanes, steps) for lanes in _LANES for steps in _STEPS]
    return [*calls, *plain, *(CallToTime("update", "adam", 0, many, 1, 1) for many in UPDATED[kind])]


def job_of(calls: Iterable[CallToTime], precision: str, kind: str) -> Row:
    """What workers are told to time."""
    return {"precision": precision, "calls": [asdict(call.lighter(LARGEST[kind])) for call in calls]}


def profile_for(units: Units, *, device: str, devices: int, note: Callable[[str], None] = lambda text: None) -> Profile:
    """The profile of this machine for this model on this many of its devices, measured now by processes of their own."""
    kind = device if device != "auto" else "cuda" if gpus() else "cpu"
    if kind == "cuda" and not gpus():
        raise PlanError(
            "device cuda was requested, but nvidia-smi shows no GPU; use --device cpu, or pass the --profile of another machine"
        )
    most = max(1, min(devices, len(gpus()) if kind == "cuda" else CROWDED * cores()))
    profile = empty(kind)
    for workers in sorted({1, most}):
        note(f"measuring this machine with {workers} worker{'s' * (workers > 1)}")
        profile = _measured(profile, calls_of(units, workers), units.precision, kind, workers)
    return profile


def _measured(profile: Profile, calls: Iterable[CallToTime], precision: str, kind: str, workers: int) -> Profile:
    job = {**job_of(calls, precision, kind), "device": kind}
    try:
        rows = worker_pool.start("carrywave.train.start.timing", job, workers, threads=threads(workers), name="the measurement")
    except RunError as error:
        raise PlanError(f"{error}; set plan.replicas and plan.stages, or CARRYWAVE_PROFILE") from None
    return extended(profile, rows, precision)


def write_profile(path: Path) -> None:
    """Measure this machine for all models, with one worker and with one for each device, and write its profile."""
    kind = "cuda" if gpus() else "cpu"
    profile = replace(empty(kind), name=path.stem)
    for precision in PRECISIONS[kind]:
        for workers in sorted({1, profile.devices_per_host}):
            profile = _measured(profile, usual_calls(kind), precision, kind, workers)
    profile.write(path)


def extended(profile: Profile, rows: Sequence[Sequence[Row]], precision: str) -> Profile:
    """The profile with what workers timed at the same moment, each its own rows."""
    of_all = [row for of_one in rows for row in of_one]
    timed: dict[CallKind, list[TimedCall]] = {}
    for row in of_all:
        if "call" in row:
            call = CallToTime(**row["call"])
            timed.setdefault(call.kind, []).append(TimedCall(call.size, row["forward_seconds"], row["seconds"]))
    in_full = "fp64" if precision == "fp64" else "fp32"
    new = [fit(kind, in_full if kind == "update" else precision, calls, len(rows)) for kind, calls in timed.items()]  # type: ignore[arg-type]
    known = {(rate.kind, rate.precision, rate.workers) for rate in new}
    kept = [rate for rate in profile.rates if (rate.kind, rate.precision, rate.workers) not in known]
    found: dict[str, Any] = {name: Link(**row[name]) for row in of_all for name in ("within", "sums") if name in row}
    tasks = [row["task_seconds"] for row in of_all if "task_seconds" in row]
    return replace(profile, rates=(*kept, *new), task_seconds=max(tasks, default=profile.task_seconds), **found)


def empty(kind: str) -> Profile:
    """A profile of this machine without any timings."""
    on_gpu = kind == "cuda"
    return Profile(
        f"this machine ({kind})",
        _hardware(kind),
        "measured",
        _memory(kind),
        (),
        LINKS["pcie4"] if on_gpu else Link(1e-4, 1e9, "assumed: nothing has been measured yet"),
        LINKS[BETWEEN],
        task_seconds=1e-6 if on_gpu else 1e-4,
        devices_per_host=len(gpus()) if on_gpu else cores(),
        common_memory=not on_gpu,
        made_for_bf16=made_for_bf16(kind),
        versions={"carrywave": __version__, "torch": metadata.version("torch")},
    )


def threads(workers: int) -> int:
    """Threads per worker, as a launcher assigns them; as many as the user set, if so."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    own = int(text) if text.isdecimal() and not threads_dealt() else 0
    return own or max(1, cores() // workers)


def _hardware(kind: str) -> str:
    if kind == "cuda":
        return ", ".join(f"{gpus().count(name)} x {name}" for name in sorted(set(gpus())))
    return f"{_processor()} {platform.machine()}, {cores()} cores"


def _memory(kind: str) -> int:
    """Bytes of memory of one GPU, or of the machine."""
    if kind == "cuda":
        known = [int(line) for line in nvidia_smi("memory.total") if line.isdecimal()]
        return min(known) << 20 if known else 16 << 30  # a modest default if it is not reported
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """The processor's name, as far as the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    write_profile(Path(sys.argv[1]))
