"""A `Profile` records how fast a machine is: timed calls, links between devices, and the overheads of the runtime.

It is a small JSON file, made from measurements or from published figures, and says which. Everything the planner predicts is derived
from one; it holds the times of single calls and knows nothing of plans. Torch-free: a laptop can read the profile of a cluster.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from carrywave.cells.cell import names
from carrywave.errors import PlanError

FORMAT = 3

Kind = str  # one of KINDS
Precision = Literal["fp32", "tf32", "fp64", "bf16", "fp16"]
Source = Literal["measured", "published"]
Piped = Literal["", "launched", "recorded"]
Transport = Literal["", "device memory", "NCCL", "gloo"]
KINDS = (*names(), "embedding", "softmax", "linear", "dropout", "norm", "optimizer")


@dataclass(frozen=True)
class Sample:
    """One timed call: `lanes` × `steps` through one unit of the model, forward and backward.

    | kind | inputs | outputs |
    |---|---|---|
    | a cell, such as lstm | input width | hidden units; `layers` layers in one call, of which all but the first have this input width |
    | embedding | vocabulary | width |
    | softmax | input width | classes; the time includes matrix product and cross entropy |
    | linear | input width | outputs; the time includes matrix product and loss |
    | dropout, norm | width | the same width |
    | optimizer | parameter tensors; 0 on a GPU, which updates all at once | parameters |

    For the optimizer, lanes and steps are 1, `name` is the optimizer, and forward is the whole update with norm and clipping. A
    bidirectional layer counts as two calls.
    """

    kind: Kind
    precision: Precision
    inputs: int
    outputs: int
    lanes: int
    steps: int
    forward_seconds: float
    backward_seconds: float = 0.0  # the whole backward, including put_off_seconds
    put_off_seconds: float = 0.0  # the weight gradients, which are deferred to the end of the window when time is cut into chunks
    projection: int = 0  # cells only
    layers: int = 1  # cells only
    name: str = ""  # optimizer only
    # On a GPU, how it was timed if not alone: `recorded`, as one of several chunks of a window in a CUDA graph; `launched`, by the host and
    # without kernels that cannot run beside NCCL. Otherwise in a CUDA graph, the window as one chunk.
    piped: Piped = ""
    workers: int = 1  # workers on the host that ran the same call at the same time, sharing its cores and memory


@dataclass(frozen=True)
class Link:
    """The link between two devices: a message takes the latency plus its size over the bandwidth.

    In device memory the sender copies the message itself, and its device does nothing else meanwhile.
    """

    latency_seconds: float
    bytes_per_second: float
    source: str = "measured"  # or the publication the figures come from
    transport: Transport = ""  # what carries messages and sums over it; "": what the runtime would choose


@dataclass(frozen=True)
class Reduction:
    """One timed all-reduce over `workers` workers, on one host or, if `apart`, each on its own host."""

    workers: int
    num_bytes: int
    seconds: float
    apart: bool = False


@dataclass(frozen=True)
class Crowd:
    """The slowdown when `workers` workers of a host run at once."""

    workers: int
    factor: float = 1.0  # slowdown relative to one worker, used if no samples were timed with this many
    lag: float = 0.0  # how far the slowest worker is behind the mean at a synchronization point, as a fraction of the work before it


@dataclass(frozen=True)
class Overheads:
    """What the runtime adds to the work itself."""

    task_seconds: float = 0.0  # per forward, backward or head of a chunk
    message_seconds: float = 0.0  # of the worker's own time, per message sent or received
    step_seconds: float = 0.0  # per optimizer step
    overlap: float = 1.0  # fraction of an all-reduce hidden behind backward: 1 on a GPU, 0 if both compete for the same core
    recorded_seconds: float | None = None  # per task where work is captured in CUDA graphs, as on a GPU; None: it is not
    recorded_message_seconds: float = 0.0  # of the device's own time, per message sent or received in device memory, besides the copy


@dataclass(frozen=True)
class Profile:
    """One kind of device, and how it is linked to others of its kind."""

    name: str
    hardware: str
    source: Source
    memory_bytes: int  # of one device
    samples: tuple[Sample, ...]
    within: Link  # between devices of a host
    between: Link | None = None  # between hosts; shared by the devices of a host
    devices_per_host: int = 1
    reserved_bytes: int = 0  # device memory that is not available to us: the context, libraries
    common_memory: bool = False  # the devices of a host are its cores, and share memory_bytes
    reductions: tuple[Reduction, ...] = ()
    crowds: tuple[Crowd, ...] = ()
    overheads: Overheads = Overheads()
    versions: Mapping[str, str] = field(default_factory=dict)  # timed with: carrywave, torch, the thread count if the user set it
    made_for_bf16: bool = False  # what train.precision=auto is on these devices: bf16 if so, otherwise fp32

    @staticmethod
    def of(known: object, where: str = "profile") -> Profile:
        """Build and validate a profile from parsed JSON or YAML; `where` names it in errors."""
        if isinstance(known, Mapping) and known.get("format") != FORMAT:
            raise PlanError(f"{where} has format {known.get('format')!r}, but this version reads {FORMAT}; measure it again")
        given = _keys(
            Profile, {key: value for key, value in known.items() if key != "format"} if isinstance(known, Mapping) else known, where
        )
        parts: dict[str, Any] = {
            "samples": tuple(_record(Sample, each, f"{where}: samples[{i}]") for i, each in enumerate(_list(given, "samples", where))),
            "reductions": tuple(
                _record(Reduction, each, f"{where}: reductions[{i}]") for i, each in enumerate(_list(given, "reductions", where))
            ),
            "crowds": tuple(_record(Crowd, each, f"{where}: crowds[{i}]") for i, each in enumerate(_list(given, "crowds", where))),
            "within": link_of(given["within"], f"{where}: within"),
            "between": None if given.get("between") is None else link_of(given["between"], f"{where}: between"),
            "overheads": _record(Overheads, given.get("overheads", {}), f"{where}: overheads"),
            "versions": _texts(given.get("versions", {}), f"{where}: versions"),
        }
        simple = {key: value for key, value in given.items() if key not in parts}
        _check(Profile, simple, where)
        return check(Profile(**simple, **parts), where)

    def to_json(self) -> str:
        """The profile as JSON; default values in samples, reductions and crowds are omitted to keep it small."""
        known: dict[str, Any] = {"format": FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("samples", "reductions", "crowds"):
                known[each.name] = [_short(one) for one in value]
            elif each.name == "versions":
                known[each.name] = dict(value)
            elif isinstance(value, Link | Overheads):
                known[each.name] = asdict(value)
            elif value is not None:
                known[each.name] = value
        lines = ",\n".join(
            f" {json.dumps(key)}: "
            + ("[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if isinstance(value, list) and value else json.dumps(value))
            for key, value in known.items()
        )
        return "{\n" + lines + "\n}\n"

    def write(self, path: Path) -> None:
        """Write it to a file atomically."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def read(path: Path | str) -> Profile:
        """Read a file written by `write`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} cannot be read as a profile ({error}); use a file that carrywave measured") from None
        try:
            known = json.loads(text)
        except RecursionError:
            raise PlanError(f"{path} is nested too deeply to be a profile; measure it again") from None
        except ValueError as error:
            raise PlanError(f"{path} is not JSON ({error}); measure it again") from None
        return Profile.of(known, str(path))

    def check_fresh(self, hardware: str, versions: Mapping[str, str]) -> None:
        """Reject a profile made on other hardware or with other versions."""
        if self.hardware != hardware:
            raise PlanError(f"profile {self.name} was measured on {self.hardware}, but this machine is {hardware}; measure it again")
        for name, version in versions.items():
            if self.versions.get(name) != version:
                there = self.versions.get(name, "none")
                raise PlanError(f"profile {self.name} was measured with {name} {there}, but this is {version}; measure it again")


def check(profile: Profile, where: str = "profile") -> Profile:
    """Reject impossible figures, such as times or sizes that are not positive."""
    if profile.memory_bytes <= profile.reserved_bytes:
        raise PlanError(
            f"{where}: memory_bytes={profile.memory_bytes} must be more than reserved_bytes={profile.reserved_bytes}; correct them"
        )
    if profile.devices_per_host < 1:
        raise PlanError(f"{where}: devices_per_host={profile.devices_per_host} is not a number of devices; use 1 or more")
    for number, sample in enumerate(profile.samples):
        here = f"{where}: samples[{number}]"
        for name in ("outputs", "lanes", "steps", "layers", "workers"):
            if getattr(sample, name) < 1:
                raise PlanError(f"{here}: {name}={getattr(sample, name)} is not a size; use 1 or more")
        if sample.forward_seconds <= 0 or sample.backward_seconds < 0:
            raise PlanError(
                f"{here}: {sample.kind} cannot take {sample.forward_seconds:g} s forward and {sample.backward_seconds:g} s backward; "
                "measure it again"
            )
        if sample.put_off_seconds > sample.backward_seconds:
            raise PlanError(
                f"{here}: put_off_seconds={sample.put_off_seconds:g} exceeds backward_seconds={sample.backward_seconds:g}; measure it again"
            )
    for number, reduction in enumerate(profile.reductions):
        if reduction.workers < 2 or reduction.num_bytes < 1 or reduction.seconds <= 0:
            raise PlanError(f"{where}: reductions[{number}] must have at least 2 workers, and bytes and seconds above 0; measure it again")
    for number, crowd in enumerate(profile.crowds):
        if crowd.workers < 1 or crowd.factor < 1:
            raise PlanError(
                f"{where}: crowds[{number}] must have workers and a factor of at least 1, got {crowd.workers} and {crowd.factor:g}; "
                "correct it"
            )
    if not 0 <= profile.overheads.overlap <= 1:
        raise PlanError(f"{where}: overheads.overlap={profile.overheads.overlap:g} must be a fraction; use 0 to 1")
    return profile


def link_of(known: object, where: str) -> Link:
    """Build and validate a link from parsed JSON or YAML."""
    link = _record(Link, known, where)
    if link.bytes_per_second <= 0:
        raise PlanError(f"{where}: bytes_per_second={link.bytes_per_second:g} must be above 0; set the link's rate")
    return link


def _short(part: Sample | Reduction | Crowd) -> dict[str, Any]:
    """The fields that differ from their defaults, floats rounded to six digits: no clock is more precise."""
    values = {each.name: (getattr(part, each.name), each.default) for each in fields(part)}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, (value, default) in values.items() if value != default
    }


_T = TypeVar("_T", Sample, Link, Reduction, Crowd, Overheads)
_LARGEST = 1 << 62
_NUMBERS = {"int": int, "float": float, "str": str, "bool": bool}
_CHOICES: dict[str, tuple[str, ...]] = {
    "Kind": KINDS,
    "Precision": get_args(Precision),
    "Source": get_args(Source),
    "Piped": get_args(Piped),
    "Transport": get_args(Transport),
}


def _record(cls: type[_T], known: object, where: str) -> _T:
    given = _keys(cls, known, where)
    return cls(**_check(cls, given, where))


def check_keys(known: Mapping[Any, Any], names: Sequence[str], where: str) -> None:
    """Reject unknown keys."""
    for key in known:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise PlanError(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}")
            )


def _keys(cls: type[Any], known: object, where: str) -> dict[str, Any]:
    """The record as a dict, after checking that it has no unknown keys and no required key is missing."""
    if not isinstance(known, Mapping):
        raise PlanError(f"{where} must be a mapping, got {_shown(known)}; correct it")
    names = [each.name for each in fields(cls)]
    check_keys(known, names, where)
    for each in fields(cls):
        if each.name not in known and each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{where}: {each.name} is missing; add it")
    return dict(known)


def _check(cls: type[Any], given: dict[str, Any], where: str) -> dict[str, Any]:
    """Check that simple fields have their declared types and that numbers are finite and non-negative."""
    for each in fields(cls):
        if each.name not in given:
            continue
        value, kind = given[each.name], str(each.type)
        if kind in _CHOICES:
            if value not in _CHOICES[kind]:
                raise PlanError(f"{where}: {each.name}={value!r} is not known; use one of {', '.join(filter(None, _CHOICES[kind]))}")
            continue
        if kind == "float | None" and value is None:
            continue
        kind = kind.removesuffix(" | None")
        if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = given[each.name] = float(value)
        if kind in _NUMBERS and (not isinstance(value, _NUMBERS[kind]) or (kind == "int" and isinstance(value, bool))):
            raise PlanError(f"{where}: {each.name}={_shown(value)} is not a{'n' if kind == 'int' else ''} {kind}; correct it")
        if isinstance(value, int) and value > _LARGEST:
            raise PlanError(f"{where}: {each.name} is larger than any machine could have; correct it")
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise PlanError(f"{where}: {each.name}={value} must be finite and at least 0; correct it")
    return given


def _list(given: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value = given.get(key, [])
    if not isinstance(value, list | tuple):
        raise PlanError(f"{where}: {key} must be a list, got {_shown(value)}; correct it")
    return value


def _texts(known: object, where: str) -> Mapping[str, str]:
    if not isinstance(known, Mapping) or not all(isinstance(part, str) for item in known.items() for part in item):
        raise PlanError(f"{where} must map names to versions, got {_shown(known)}; correct it")
    return dict(known)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
