"""The file of a run's best weights: finite, with a checksum, its spec, its codec and the evaluation that they come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from carrywave.errors import Diverged, RunError
from carrywave.model.model import Model
from carrywave.model.portable_names import EXPORTED, outside
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.snapshot import not_finite
from carrywave.step.worker_setup import tensors_of


def write_weights(path: Path, parameters: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace a file of weights; those that are not finite are never written."""
    if (bad := not_finite(parameters)) is not None:
        raise Diverged(f"parameter {bad} is not finite, so {path} is not written; lower train.lr or set train.clip")
    with atomic_files.replacing(path) as file:
        atomic_files.write_tensors(file, parameters, metadata)


def weights_metadata(path: Path) -> dict[str, str]:
    """The metadata of a weights file; empty if the file is missing or unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def take_weights(model: nn.Module, path: Path, *, ignored: str | None = None) -> None:
    """Load a weights file into a model, or those of its units that this worker holds; the tensor `ignored` keeps its value."""
    held = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored and not tensor.is_meta}
    load_parameters(held, read_weights(model, path, ignored=ignored, wanted=held.keys()))


def load_parameters(held: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, whose forms were checked before."""
    for name, tensor in held.items():
        tensor.copy_(stored[name])


def read_weights(model: nn.Module, path: Path, *, ignored: str | None = None, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file, or those `wanted`, checked against the whole model, including what other workers hold."""
    expected = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    weights = atomic_files.read_tensors(path)
    if isinstance(model, Model) and EXPORTED in weights_metadata(path):
        names = {theirs: ours for ours, theirs in outside(expected, model.lstm).items()}
        weights = {names.get(name, name): tensor for name, tensor in weights.items()}
    remedy = "use the weights of a model with the same spec"
    for name, tensor in expected.items():
        if name not in weights:
            raise RunError(f"{path} is from another model: it has no {name}; {remedy}")
        theirs = weights[name]
        if theirs.shape != tensor.shape:
            raise RunError(f"{path} is from another model: {name} has shape {list(theirs.shape)}, expected {list(tensor.shape)}; {remedy}")
        if theirs.dtype != tensor.dtype:
            fact = f"{path}: {name} is {theirs.dtype}, expected {tensor.dtype}"
            raise RunError(f"{fact}; use the train.precision it was trained with, or convert it")
    if extra := sorted(weights.keys() - expected.keys() - {ignored}):
        raise RunError(f"{path} is from another model: it has {extra[0]}, which this model does not; {remedy}")
    weights = {name: weights[name] for name in (expected if wanted is None else wanted)}
    if (bad := not_finite(weights)) is not None:
        raise RunError(f"{path}: {bad} is not finite; use other weights")
    return weights
