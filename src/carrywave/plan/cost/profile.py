"""A `Profile` records how fast a machine is: timed calls, links between devices, and the overheads of the runtime.

It is a small JSON file, made from measurements or from published figures, and says which. Everything the planner predicts is derived
from one; it holds the times of single calls and knows nothing of plans. Torch-free: a laptop can read the profile of a cluster.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from carrywave.cells.cell import names
from carrywave.errors import PlanError

FORMAT = 3
LARGEST = 1 << 62  # of whole numbers
FORBID_OTHERS = ConfigDict(extra="forbid")
OLD_NAMES = {"crowds": "contention", "deferred_seconds": "deferred_seconds"}  # in files of earlier versions: what they are called now

# What a file may hold in a field. OpaqueModel numbers are not accepted as text or as 1.5, nor truth as 0 or 1.
Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Size = Annotated[int, Strict(), Field(ge=1, le=LARGEST)]
Number = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Truth = Annotated[bool, Strict()]

KINDS = (*names(), "embedding", "softmax", "linear", "dropout", "norm", "optimizer")
if TYPE_CHECKING:
    CallKind = str
else:
    CallKind = Literal[KINDS]
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

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    kind: CallKind
    precision: Precision
    inputs: Count
    outputs: Size
    lanes: Size
    steps: Size
    forward_seconds: Positive
    backward_seconds: Number = 0.0  # the whole backward, including deferred_seconds
    deferred_seconds: Number = 0.0  # the weight gradients, which are deferred to the end of the window when time is cut into chunks
    projection: Count = 0  # cells only
    layers: Size = 1  # cells only
    name: str = ""  # optimizer only
    # On a GPU, how it was timed if not alone: `recorded`, as one of several chunks of a window in a CUDA graph; `launched`, by the host and
    # without kernels that cannot run beside NCCL. Otherwise in a CUDA graph, the window as one chunk.
    piped: Piped = ""
    workers: Size = 1  # workers on the host that ran the same call at the same time, sharing its cores and memory


@dataclass(frozen=True)
class Link:
    """The link between two devices: a message takes the latency plus its size over the bandwidth.

    In device memory the sender copies the message itself, and its device does nothing else meanwhile.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    latency_seconds: Number
    bytes_per_second: Positive
    source: str = "measured"  # or the publication the figures come from
    transport: Transport = ""  # what carries messages and sums over it; "": what the runtime would choose


@dataclass(frozen=True)
class Reduction:
    """One timed all-reduce over `workers` workers, on one host or, if `apart`, each on its own host."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    workers: Annotated[int, Strict(), Field(ge=2, le=LARGEST)]
    num_bytes: Size
    seconds: Positive
    apart: Truth = False


@dataclass(frozen=True)
class Contention:
    """The slowdown when `workers` workers of a host run at once."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    workers: Size
    factor: Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)] = (
        1.0  # slowdown relative to one worker, used if no samples were timed with this many
    )
    lag: Number = 0.0  # how far the slowest worker is behind the mean at a synchronization point, as a fraction of the work before it


@dataclass(frozen=True)
class Overheads:
    """What the runtime adds to the work itself."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    task_seconds: Number = 0.0  # per forward, backward or head of a chunk
    message_seconds: Number = 0.0  # of the worker's own time, per message sent or received
    step_seconds: Number = 0.0  # per optimizer step, besides the passes and the update
    overlap: Fraction = 1.0  # fraction of an all-reduce hidden behind backward: 1 on a GPU, 0 if both compete for the same core
    recorded_seconds: Number | None = None  # per task where work is captured in CUDA graphs, as on a GPU; None: it is not
    least_step_seconds: Number = 0.0  # of any recorded step: what the host needs to prepare the next one meanwhile,
    least_tensor_seconds: Number = 0.0  # and for each tensor of the model's parameters, as a longer graph is launched
    recorded_message_seconds: Number = 0.0  # of the device's own time, per message sent or received in device memory, besides the copy


@dataclass(frozen=True)
class Profile:
    """One kind of device, and how it is linked to others of its kind."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_OTHERS

    name: str
    hardware: str
    source: Source
    memory_bytes: Count  # of one device
    samples: tuple[Sample, ...]
    within: Link  # between devices of a host
    between: Link | None = None  # between hosts; shared by the devices of a host
    devices_per_host: Size = 1
    reserved_bytes: Count = 0  # device memory that is not available to us: the context, libraries
    common_memory: Truth = False  # the devices of a host are its cores, and share memory_bytes
    reductions: tuple[Reduction, ...] = ()
    contention: tuple[Contention, ...] = ()
    overheads: Overheads = Overheads()
    versions: Mapping[str, str] = field(default_factory=dict)  # timed with: carrywave, torch, the thread count if the user set it
    made_for_bf16: Truth = False  # what train.precision=auto is on these devices: bf16 if so, otherwise fp32

    @staticmethod
    def of(values: object, where: str = "profile") -> Profile:
        """Build and validate a profile from parsed JSON or YAML; `where` names it in errors."""
        if isinstance(values, Mapping):
            if values.get("format") != FORMAT:
                raise PlanError(f"{where} has format {values.get('format')!r}, but this version reads {FORMAT}; measure it again")
            values = _with_new_names({key: value for key, value in values.items() if key != "format"})
        return check(validated(Profile, values, where), where)

    def to_json(self) -> str:
        """The profile as JSON; default values in samples, reductions and contention are omitted to keep it small."""
        lists = {name: [_short(each) for each in getattr(self, name)] for name in ("samples", "reductions", "contention")}
        values = {"format": FORMAT, **asdict(replace(self, samples=())), **lists}
        lines = ",\n".join(
            f" {json.dumps(key)}: "
            + ("[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if isinstance(value, list) and value else json.dumps(value))
            for key, value in values.items()
            if value is not None
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
            values = json.loads(text)
        except RecursionError:
            raise PlanError(f"{path} is nested too deeply to be a profile; measure it again") from None
        except ValueError as error:
            raise PlanError(f"{path} is not JSON ({error}); measure it again") from None
        return Profile.of(values, str(path))

    def check_fresh(self, hardware: str, versions: Mapping[str, str]) -> None:
        """Reject a profile made on other hardware or with other versions."""
        if self.hardware != hardware:
            raise PlanError(f"profile {self.name} was measured on {self.hardware}, but this machine is {hardware}; measure it again")
        for name, version in versions.items():
            if self.versions.get(name) != version:
                before = self.versions.get(name, "none")
                raise PlanError(f"profile {self.name} was measured with {name} {before}, but this is {version}; measure it again")


def check(profile: Profile, where: str = "profile") -> Profile:
    """Reject figures that cannot be true together."""
    if profile.memory_bytes <= profile.reserved_bytes:
        raise PlanError(
            f"{where}: memory_bytes={profile.memory_bytes} must be more than reserved_bytes={profile.reserved_bytes}; correct them"
        )
    for number, sample in enumerate(profile.samples):
        if sample.deferred_seconds > sample.backward_seconds:
            raise PlanError(
                f"{where}: samples[{number}]: deferred_seconds={sample.deferred_seconds:g} exceeds "
                f"backward_seconds={sample.backward_seconds:g}; measure it again"
            )
    return profile


def _short(part: Sample | Reduction | Contention) -> dict[str, Any]:
    """The fields that differ from their defaults, floats rounded to six digits: no clock is more precise."""
    values = {each.name: (getattr(part, each.name), each.default) for each in fields(part)}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, (value, default) in values.items() if value != default
    }


T = TypeVar("T")

_EXPLAINED = {  # errors of pydantic's
    "missing": "{here} is missing; add it",
    "dataclass_type": "{here} must be a mapping, got {value}; correct it",
    "tuple_type": "{here} must be a list, got {value}; correct it",
    "dict_type": "{here} must map names to versions, got {value}; correct it",
    "literal_error": "{here}={value} is not known; use {expected}",
    "string_type": "{here}={value} is not a str; correct it",
    "bool_type": "{here}={value} is not a bool; correct it",
    "float_type": "{here}={value} is not a float; correct it",
    **dict.fromkeys(("int_type", "int_from_float"), "{here}={value} is not an int; correct it"),
    "finite_number": "{here}={value} must be finite; correct it",
    "less_than_equal": "{here}={value} must be at most {le:g}; correct it",
    "greater_than_equal": "{here}={value} must be at least {ge:g}; correct it",
    "greater_than": "{here}={value} must be above {gt:g}; correct it, or measure it again",
}


def validated(cls: type[T], values: object, where: str) -> T:
    """Build a record from parsed JSON or YAML; a wrong one is refused in one line, with its first error."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise PlanError(_explained(error.errors(include_url=False)[0], where, cls)) from None


def _explained(error: ErrorDetails, where: str, cls: type[Any]) -> str:
    """The fact and the remedy of an error of pydantic's."""
    path, here = error["loc"], where
    for part in path:
        where, here = here, here + (f"[{part}]" if isinstance(part, int) else f": {part}")
    if error["type"] == "unexpected_keyword_argument":
        return unknown_key(str(path[-1]), _names(cls, path[:-1]), where)
    text = _EXPLAINED.get(error["type"], "{here}={value} is not what is expected there; correct it")
    return text.format(here=here, value=_shown(error["input"]), **error.get("ctx", {}))


def _names(cls: type[Any], path: Sequence[object]) -> list[str]:
    """The keys of the record at a path within one of a class."""
    kinds = {"samples": Sample, "reductions": Reduction, "contention": Contention, "overheads": Overheads, "within": Link, "between": Link}
    return [each.name for each in fields(kinds[str(path[0])] if path else cls)]


def unknown_key(key: str, names: Sequence[str], where: str) -> str:
    """The error text for a key that does not exist."""
    near = difflib.get_close_matches(key, names, n=1)
    return f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}")


def _with_new_names(values: Any) -> Any:
    """Parsed JSON of an earlier version with what was renamed since under its new name."""
    if isinstance(values, Mapping):
        return {OLD_NAMES.get(key, key): _with_new_names(value) for key, value in values.items()}
    return [_with_new_names(each) for each in values] if isinstance(values, list) else values


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
