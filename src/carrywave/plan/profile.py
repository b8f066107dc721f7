"""A `Profile` says how fast a kind of device is: constants for its calls, its links, its memory. It is a small JSON file.

Made from measurements or from published figures, and says which. Everything the planner predicts is derived from one. Torch-free: a
laptop can read the profile of a cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from carrywave.errors import PlanError
from carrywave.plan.rates import CallKind, Rate

PROFILE = "CARRYWAVE_PROFILE"  # environment variable: the file or name of the profile to plan with
FORMAT = 4

Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Link:
    """The link between two devices: a message takes the latency plus its size over the bandwidth."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    latency_seconds: Number
    bytes_per_second: Positive
    source: str = "measured"  # or the publication the figures come from

    def seconds(self, num_bytes: float) -> float:
        """How long a message of this size takes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Profile:
    """One kind of device, and how it is linked to others of its kind."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    name: str
    hardware: str
    source: Literal["measured", "published"]
    memory_bytes: Count  # of one device
    rates: tuple[Rate, ...]
    within: Link  # between devices of a host
    between: Link | None = None  # between hosts; shared by the devices of a host
    sums: Link | None = None  # the link that would explain what sums over workers of a host take; None: `within`
    task_seconds: Number = 0.0  # of any forward, backward or head of a chunk, besides its calls
    step_seconds: Number = 0.0  # of any optimizer step, besides its passes and the update
    devices_per_host: Annotated[int, Strict(), Field(ge=1)] = 1
    reserved_bytes: Count = 0  # device memory that is not available to us: the context, libraries
    common_memory: Annotated[bool, Strict()] = False  # the devices of a host are its cores, and share memory_bytes
    made_for_bf16: Annotated[bool, Strict()] = False  # what train.precision=auto is on these devices: bf16 if so, otherwise fp32
    versions: Mapping[str, str] = field(default_factory=dict)  # of what was timed

    @staticmethod
    def of(values: object, where: str = "profile") -> Profile:
        """Build and validate a profile from parsed JSON; `where` names it in errors."""
        if isinstance(values, Mapping):
            if values.get("format") != FORMAT:
                raise PlanError(f"{where} has format {values.get('format')!r}, but this version reads {FORMAT}; measure it again")
            values = {key: value for key, value in values.items() if key != "format"}
        profile = validated(Profile, values, where)
        if profile.memory_bytes <= profile.reserved_bytes:
            raise PlanError(f"{where}: memory_bytes must be more than reserved_bytes={profile.reserved_bytes}; correct them")
        return profile

    def to_json(self) -> str:
        """The profile as JSON, without what is as it is by default."""
        values = {"format": FORMAT, **asdict(self), "rates": [_short(rate) for rate in self.rates]}
        return json.dumps({key: value for key, value in values.items() if value is not None}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write it to a file atomically."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def read(path: Path | str) -> Profile:
        """Read a file written by `write`."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} cannot be read as a profile ({error}); use a file that carrywave measured") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is not JSON ({error}); measure it again") from None
        return Profile.of(values, str(path))

    def rate(self, kind: CallKind, precision: str, workers: int) -> Rate:
        """The constants of a kind of call in a precision, timed with the nearest number of workers; of two, with the larger, slower one."""
        wanted = "fp64" if precision == "fp64" else "fp32" if kind == "update" else precision
        for alike in (wanted, {"fp16": "bf16", "bf16": "fp16"}.get(wanted, "")):
            rates = [rate for rate in self.rates if rate.kind == kind and rate.precision == alike]
            if rates:
                return min(rates, key=lambda rate: (max(rate.workers, workers) / min(rate.workers, workers), -rate.workers))
        raise PlanError(
            f"profile {self.name} has no figures of {kind} in {precision}; measure this machine in that precision, or use another profile"
        )

    def error(self, precision: str) -> float:
        """How far predictions may be off: nine of ten timed layers were within this fraction."""
        return max((rate.error for rate in self.rates if rate.kind == "layer" and rate.precision == precision), default=0.0)


def _short(rate: Rate) -> dict[str, Any]:
    """Rounded to four digits: constants are no more precise."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in vars(rate).items() if value != 0.0}


T = TypeVar("T")


def validated(cls: type[T], values: object, where: str) -> T:
    """Build a record from parsed JSON or YAML; a wrong one is refused in one line, with its first error."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ": ".join([where, ".".join(map(str, first["loc"]))] if first["loc"] else [where])
        said = "unknown key" if first["type"] == "unexpected_keyword_argument" else first["msg"]
        raise PlanError(f"{place}: {said[:1].lower()}{said[1:]}; correct it") from None


def _published(latency_microseconds: float, gigabytes_per_second: float, publication: str) -> Link:
    source = f"published: {publication}; latency {latency_microseconds:g} us assumed"
    return Link(latency_microseconds * 1e-6, gigabytes_per_second * 1e9, source)


# Published figures are those of the hardware, for one direction; programs achieve less. Latencies are assumptions: what a message between
# two processes usually takes, including the kernel launch. A measured link is always preferable.
LINKS: dict[str, Link] = {
    "nvlink3": _published(5, 300, "NVIDIA A100 data sheet, 600 GB/s a GPU in both directions together"),
    "nvlink4": _published(5, 450, "NVIDIA H100 and H200 data sheets, 900 GB/s a GPU in both directions together"),
    "nvlink5": _published(5, 900, "NVIDIA B200 data sheet, 1,800 GB/s a GPU in both directions together"),
    "pcie4": _published(10, 31.5, "PCI-SIG, PCI Express 4.0, 16 lanes of 16 GT/s in 128b/130b, a GPU"),
    "pcie5": _published(10, 63, "PCI-SIG, PCI Express 5.0, 16 lanes of 32 GT/s in 128b/130b, a GPU"),
    "infiniband-hdr": _published(10, 25, "NVIDIA ConnectX-6 data sheet, 200 Gb/s a port"),
    "infiniband-ndr": _published(10, 50, "NVIDIA ConnectX-7 data sheet, 400 Gb/s a port"),
    "ethernet-10g": _published(50, 1.25, "IEEE 802.3ae, 10 Gb/s a port"),
    "ethernet-25g": _published(40, 3.125, "IEEE 802.3by, 25 Gb/s a port"),
    "ethernet-100g": _published(30, 12.5, "IEEE 802.3ba, 100 Gb/s a port"),
}


def names() -> list[str]:
    """Names of the profiles shipped with carrywave."""
    return sorted(
        part.name.removesuffix(".json") for part in (files("carrywave.plan") / "profiles").iterdir() if part.name.endswith(".json")
    )


def shipped(name: str) -> Profile:
    """A profile shipped with carrywave, by name."""
    if name not in names():
        raise PlanError(f"profile {name} not found; use {', '.join(names())}, or a file that carrywave measured")
    return Profile.of(json.loads((files("carrywave.plan") / "profiles" / f"{name}.json").read_text(encoding="utf-8")), name)


def find_profile(text: str) -> Profile:
    """The shipped profile of this name, or the one in this file."""
    a_file = os.sep in text or text.endswith(".json") or Path(text).is_file()
    return Profile.read(text) if a_file and text not in names() else shipped(text)


def named_profile() -> Profile | None:
    """The profile that the environment names, if it does."""
    name = os.environ.get(PROFILE)
    return find_profile(name) if name else None
