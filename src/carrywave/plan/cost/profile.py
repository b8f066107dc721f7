"""A `Profile` is what a machine does in how many seconds: samples of work, links between devices, and what the runtime adds.

A small JSON file, made by measuring or from published figures, and marked as which. Everything the planner predicts comes from one;
it holds times of single calls and no opinion about plans. Torch-free: a laptop can read the profile of a cluster.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from carrywave.errors import PlanError

FORMAT = 2

Kind = Literal["lstm", "embedding", "softmax", "linear", "dropout", "norm", "optimizer"]
Precision = Literal["fp32", "tf32", "fp64", "bf16", "fp16"]
Source = Literal["measured", "published"]


@dataclass(frozen=True)
class Sample:
    """One call, timed: so many steps of so many lanes through one unit of the model, forward and backward.

    | kind | inputs | outputs |
    |---|---|---|
    | lstm | width of what it reads | hidden units; `layers` of them in one call, all but the first reading this width |
    | embedding | vocabulary | width |
    | softmax | width of what it reads | classes; product, cross entropy |
    | linear | width of what it reads | numbers; product, loss |
    | dropout, norm | width | the same width |
    | optimizer | 0 | parameters; lanes and steps are 1; `name` is the optimizer; forward is the whole update with norm and clipping |

    Bidirectional layers are two directions of it.
    """

    kind: Kind
    precision: Precision
    inputs: int
    outputs: int
    lanes: int
    steps: int
    forward_seconds: float
    backward_seconds: float = 0.0  # all of it
    put_off_seconds: float = 0.0  # of backward, the weights' gradients, where they are put off to the end when time comes in chunks
    projection: int = 0  # lstm
    layers: int = 1  # lstm
    name: str = ""  # optimizer
    piped: bool = False  # as it runs in a pipeline, where that differs: nothing is recorded as a graph, and some kernels stand aside
    workers: int = 1  # of the host that did the same at the same time, and shared its cores and memory


@dataclass(frozen=True)
class Link:
    """Between two devices: a message takes the latency, and its bytes at this rate."""

    latency_seconds: float
    bytes_per_second: float
    source: str = "measured"  # or where the figures were published


@dataclass(frozen=True)
class Reduction:
    """An all-reduce, timed: over so many workers, of one host or (apart) each on a host of its own."""

    workers: int
    num_bytes: int
    seconds: float
    apart: bool = False


@dataclass(frozen=True)
class Crowd:
    """What comes of it when so many workers of a host work at once."""

    workers: int
    factor: float = 1.0  # how much longer work takes than alone, where no sample was timed with so many
    lag: float = 0.0  # of the work up to a point where all meet, by which the slowest is behind the others


@dataclass(frozen=True)
class Overheads:
    """What the runtime adds, beside the work itself."""

    task_seconds: float = 0.0  # of each forward, backward or head of a chunk
    message_seconds: float = 0.0  # of the worker's own time, for each message that it sends or receives
    step_seconds: float = 0.0  # of each optimizer step
    overlap: float = 1.0  # how much of a reduction that runs beside backward is hidden: 1 on a GPU, 0 where both want the same core
    recorded_seconds: float | None = None  # of each task where there is one stage, which is then recorded as a graph; None: it is not


@dataclass(frozen=True)
class Profile:
    """One kind of device, and how it is linked to others of its kind."""

    name: str
    hardware: str
    source: Source
    memory_bytes: int  # of one device
    samples: tuple[Sample, ...]
    within: Link  # of one host
    between: Link | None = None  # hosts; a host's devices share it
    devices_per_host: int = 1
    reserved_bytes: int = 0  # of a device, that is never ours: the context, libraries
    common_memory: bool = False  # the devices of a host share memory_bytes: they are its cores
    reductions: tuple[Reduction, ...] = ()
    crowds: tuple[Crowd, ...] = ()
    overheads: Overheads = Overheads()
    versions: Mapping[str, str] = field(default_factory=dict)  # of what was timed: carrywave, torch, the driver

    @staticmethod
    def of(known: object, where: str = "profile") -> Profile:
        """A profile from what JSON or YAML made of it, checked; `where` names it in errors."""
        if isinstance(known, Mapping) and known.get("format") != FORMAT:
            raise PlanError(f"{where} has format {known.get('format')!r}, this version reads {FORMAT}; measure it anew")
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
        """The profile as text; what has its default is left out, so that it stays small."""
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
        """Write it to a file, whole or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def read(path: Path | str) -> Profile:
        """Read a file that `write` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} cannot be read as a profile ({error}); give a file that carrywave measured") from None
        try:
            known = json.loads(text)
        except RecursionError:
            raise PlanError(f"{path} is nested too deeply to be a profile; measure it anew") from None
        except ValueError as error:
            raise PlanError(f"{path} is not JSON ({error}); measure it anew") from None
        return Profile.of(known, str(path))

    def check_fresh(self, hardware: str, versions: Mapping[str, str]) -> None:
        """Refuse a profile of another machine or of other versions than these."""
        if self.hardware != hardware:
            raise PlanError(f"the profile {self.name} is of {self.hardware}, and this is {hardware}; measure it anew")
        for name, version in versions.items():
            if self.versions.get(name) != version:
                there = self.versions.get(name, "none")
                raise PlanError(f"the profile {self.name} was made with {name} {there}, and this is {version}; measure it anew")


def check(profile: Profile, where: str = "profile") -> Profile:
    """Refuse what no machine does: times, sizes and rates that are not positive."""
    if profile.memory_bytes <= profile.reserved_bytes:
        raise PlanError(
            f"{where}: memory_bytes={profile.memory_bytes} leaves nothing beside reserved_bytes={profile.reserved_bytes}; correct them"
        )
    if profile.devices_per_host < 1:
        raise PlanError(f"{where}: devices_per_host={profile.devices_per_host} is not a number of devices; use 1 or more")
    for number, sample in enumerate(profile.samples):
        here = f"{where}: samples[{number}]"
        for name in ("outputs", "lanes", "steps", "layers", "workers"):
            if getattr(sample, name) < 1:
                raise PlanError(f"{here}: {name}={getattr(sample, name)} is no size; use 1 or more")
        if sample.forward_seconds <= 0 or sample.backward_seconds < 0:
            raise PlanError(
                f"{here}: {sample.kind} took {sample.forward_seconds:g} and {sample.backward_seconds:g} seconds; measure it anew"
            )
        if sample.put_off_seconds > sample.backward_seconds:
            raise PlanError(
                f"{here}: put_off_seconds={sample.put_off_seconds:g} is more than backward, {sample.backward_seconds:g}; measure it anew"
            )
    for number, reduction in enumerate(profile.reductions):
        if reduction.workers < 2 or reduction.num_bytes < 1 or reduction.seconds <= 0:
            raise PlanError(f"{where}: reductions[{number}] needs 2 workers, bytes and seconds above 0; measure it anew")
    for number, crowd in enumerate(profile.crowds):
        if crowd.workers < 1 or crowd.factor < 1:
            raise PlanError(
                f"{where}: crowds[{number}] needs workers and a factor of at least 1, got {crowd.workers} and {crowd.factor:g}; correct it"
            )
    if not 0 <= profile.overheads.overlap <= 1:
        raise PlanError(f"{where}: overheads.overlap={profile.overheads.overlap:g} is a share; use 0 to 1")
    return profile


def link_of(known: object, where: str) -> Link:
    """A link from what JSON or YAML made of it, checked."""
    link = _record(Link, known, where)
    if link.bytes_per_second <= 0:
        raise PlanError(f"{where}: bytes_per_second={link.bytes_per_second:g} sends nothing; give the link's rate, above 0")
    return link


def _short(part: Sample | Reduction | Crowd) -> dict[str, Any]:
    """Without the fields that have their default, and times to six digits: no clock has more."""
    values = {each.name: (getattr(part, each.name), each.default) for each in fields(part)}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, (value, default) in values.items() if value != default
    }


_T = TypeVar("_T", Sample, Link, Reduction, Crowd, Overheads)
_LARGEST = 1 << 62
_NUMBERS = {"int": int, "float": float, "str": str, "bool": bool}
_CHOICES: dict[str, tuple[str, ...]] = {"Kind": get_args(Kind), "Precision": get_args(Precision), "Source": get_args(Source)}


def _record(cls: type[_T], known: object, where: str) -> _T:
    given = _keys(cls, known, where)
    return cls(**_check(cls, given, where))


def check_keys(known: Mapping[Any, Any], names: Sequence[str], where: str) -> None:
    """Refuse a key that is none of these."""
    for key in known:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise PlanError(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}")
            )


def _keys(cls: type[Any], known: object, where: str) -> dict[str, Any]:
    """The keys of a record: all are known, and none that is needed is missing."""
    if not isinstance(known, Mapping):
        raise PlanError(f"{where} is {_shown(known)}, not a mapping of keys; correct it")
    names = [each.name for each in fields(cls)]
    check_keys(known, names, where)
    for each in fields(cls):
        if each.name not in known and each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{where}: {each.name} is missing; add it")
    return dict(known)


def _check(cls: type[Any], given: dict[str, Any], where: str) -> dict[str, Any]:
    """Simple fields have the type they are declared with, and numbers are finite and not below zero."""
    for each in fields(cls):
        if each.name not in given:
            continue
        value, kind = given[each.name], str(each.type)
        if kind in _CHOICES:
            if value not in _CHOICES[kind]:
                raise PlanError(f"{where}: {each.name}={value!r} is not known; use one of {', '.join(_CHOICES[kind])}")
            continue
        if kind == "float | None" and value is None:
            continue
        kind = kind.removesuffix(" | None")
        if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = given[each.name] = float(value)
        if kind in _NUMBERS and (not isinstance(value, _NUMBERS[kind]) or (kind == "int" and isinstance(value, bool))):
            raise PlanError(f"{where}: {each.name}={_shown(value)} is not a{'n' if kind == 'int' else ''} {kind}; correct it")
        if isinstance(value, int) and value > _LARGEST:
            raise PlanError(f"{where}: {each.name} is larger than any machine; correct it")
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise PlanError(f"{where}: {each.name}={value} must be finite and not below 0; correct it")
    return given


def _list(given: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value = given.get(key, [])
    if not isinstance(value, list | tuple):
        raise PlanError(f"{where}: {key} is {_shown(value)}, not a list; correct it")
    return value


def _texts(known: object, where: str) -> Mapping[str, str]:
    if not isinstance(known, Mapping) or not all(isinstance(part, str) for item in known.items() for part in item):
        raise PlanError(f"{where} is {_shown(known)}, not names with versions; correct it")
    return dict(known)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
