"""A worker's GPU: driver, memory that others hold, errors, throttling, and whether our kernels can run on it.

`nvidia-smi` reports what torch does not; where it is missing, less is known and nothing fails.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from carrywave.doctor.finding import Finding, size
from carrywave.errors import UserError
from carrywave.kernels.hopper import persistent
from carrywave.launch.hardware import nvidia_smi, visible
from carrywave.launch.shares.mps import PIPES, TOOL
from carrywave.parallel.devices import pick_device
from carrywave.parallel.startup.environment import SHARE_GPU
from carrywave.parallel.startup.rendezvous import reason

HELD_BYTES = 1 << 30  # of memory that others may hold before it is worth a word: about what a context takes
HOT_CELSIUS = 85
# Bits of nvidia-smi's reasons for a lower clock that mean that something is amiss; idle and application clocks do not.
THROTTLES = {0x4: "power cap", 0x8: "slowdown by hardware", 0x20: "heat, by software", 0x40: "heat, by hardware", 0x80: "power brake"}
AMISS = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Gpu:
    """What is known of one GPU; fields that nvidia-smi does not report are None."""

    name: str
    uuid: str
    memory_bytes: int
    driver: str | None = None
    held_bytes: int | None = None  # before this worker used it
    celsius: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the last reset
    throttle: int | None = None  # bits, see THROTTLES
    refusal: str = ""  # why our persistent kernels cannot run on it; empty: they can


def choose(setting: str, local_rank: int | None = None) -> tuple[torch.device, str]:
    """The device that a worker would use, and why it is not the GPU that it should be, as fact and remedy; empty if it is."""
    cpu = torch.device("cpu")
    try:
        device = pick_device(setting, local_rank)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
            return device, ""
        if setting == "cpu" or not (num_gpus := len(visible())):
            return device, ""
        if torch.version.cuda is None:
            return cpu, f"nvidia-smi shows {num_gpus} GPU{'s' * (num_gpus > 1)}, but this torch is built for CPUs; install one for CUDA"
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises with the reason
        why = "it does not see them"
    except UserError as error:
        return cpu, str(error)
    except RuntimeError as error:
        why = reason(error)
    return cpu, f"torch cannot use the GPU ({why}); see whether the driver fits (nvidia-smi), and whether this user may use it"


def look(device: torch.device, rows: Mapping[str, Mapping[str, str]]) -> Gpu:
    """Look at a worker's GPU; `rows` is what `ask_smi` returned before it was used."""
    properties = torch.cuda.get_device_properties(device)
    uuid = _bare(str(properties.uuid))
    row = rows.get(uuid, {})
    held = _number(row.get("memory.used"))
    return Gpu(
        properties.name,
        uuid,
        properties.total_memory,
        row.get("driver_version"),
        None if held is None else held << 20,
        _number(row.get("temperature.gpu")),
        _number(row.get("ecc.errors.uncorrected.volatile.total")),
        _number(row.get("throttle")),
        persistent.device_refusal(device.index or 0),
    )


def ask_smi() -> dict[str, dict[str, str]]:
    """What nvidia-smi reports of each GPU, by UUID; empty without it."""
    names = [_bare(name) for name in nvidia_smi("uuid")]
    rows: dict[str, dict[str, str]] = {name: {} for name in names}
    fields = ("driver_version", "memory.used", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")
    # One by one: a field that a driver does not know fails the whole question. The last one has two names, by the driver's age.
    answers_by_field = [(field, nvidia_smi(field)) for field in fields]
    answers_by_field.append(("throttle", nvidia_smi("clocks_event_reasons.active") or nvidia_smi("clocks_throttle_reasons.active")))
    for field, answers in answers_by_field:
        for name, answer in zip(names, answers, strict=False):
            rows[name][field] = answer
    return rows


def _bare(uuid: str) -> str:
    """A UUID without the prefix that nvidia-smi gives it."""
    return uuid.removeprefix("GPU-")


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None  # [N/A], [Not Supported]


def check_usable(why: str, where: str) -> list[Finding]:
    """What `choose` said of a worker that does not get its GPU."""
    fact, _, remedy = why.partition("; ")
    return [Finding("wrong", "devices", fact, remedy, where)] if why else []


def check_memory(gpu: Gpu, where: str, *, workers: int = 1) -> Finding:
    """Whether others hold memory of it."""
    fact = f"{gpu.name}, {size(gpu.memory_bytes)}" + (f", driver {gpu.driver}" if gpu.driver else "")
    if gpu.held_bytes is not None and gpu.held_bytes > HELD_BYTES * workers:
        held = f"{fact}: others hold {size(gpu.held_bytes)} of its memory"
        return Finding("warning", "GPU", held, "end the other programs on it (nvidia-smi lists them), or use another GPU", where)
    return Finding("fine", "GPU", fact, where=where)


def check_health(gpu: Gpu, where: str) -> Finding:
    """Whether it reports errors or a lowered clock."""
    what = "GPU health"
    if gpu.ecc_errors:
        fact = f"{gpu.name} reports {gpu.ecc_errors} uncorrected memory errors: results may be wrong"
        return Finding("wrong", what, fact, "reset it (nvidia-smi --gpu-reset) or take it out of service", where)
    reasons = [name for bit, name in THROTTLES.items() if (gpu.throttle or 0) & bit]
    if (gpu.throttle or 0) & AMISS:
        fact = f"{gpu.name} runs at a lowered clock ({', '.join(reasons)})"
        return Finding("warning", what, fact, "check its cooling and power", where)
    if gpu.celsius is not None and gpu.celsius >= HOT_CELSIUS:
        return Finding("warning", what, f"{gpu.name} is at {gpu.celsius} degrees Celsius", "check its cooling", where)
    if gpu.ecc_errors is None and gpu.throttle is None:
        return Finding("fine", what, "nvidia-smi does not tell", where=where)
    warm = "" if gpu.celsius is None else f", {gpu.celsius} degrees Celsius"
    return Finding("fine", what, f"no memory errors, full clock{' within the power cap' * bool(reasons)}{warm}", where=where)


def check_kernels(gpu: Gpu, where: str) -> Finding:
    """Whether the persistent kernels run on it; without them cuDNN does the work."""
    if not gpu.refusal:
        return Finding("fine", "kernels", "the persistent LSTM kernels can run", where=where)
    broken = "needs a Hopper GPU" not in gpu.refusal
    fact = f"the persistent LSTM kernels do not run, cuDNN does: {gpu.refusal}"
    remedy = "install what is missing (docs/kernels.md), or go on with cuDNN" if broken else ""
    return Finding("warning" if broken else "fine", "kernels", fact, remedy, where)


def check_shares(host: str, environment: Mapping[str, str] | None = None) -> Finding | None:
    """Whether GPUs can be divided, if the environment asks for it; None if it does not."""
    variables = os.environ if environment is None else environment
    setting = variables.get(SHARE_GPU, "")
    if setting in ("", "0", "1"):
        return None
    what, tool = "shares of a GPU", shutil.which(TOOL)
    if tool is None:
        remedy = f"install it with the driver's tools, unset {SHARE_GPU}, or set it to 1"
        return Finding("wrong", what, f"{SHARE_GPU}={setting} needs NVIDIA's MPS, but {TOOL} is not installed", remedy, host)
    served = f", whose daemon listens in {variables[PIPES]}" if variables.get(PIPES) else ""
    return Finding("fine", what, f"{setting} for each GPU, by {tool}{served}", where=host)
