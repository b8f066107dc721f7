"""Between a running loop and its snapshots: what goes into one, and how a loop goes on from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from carrywave.errors import RunError
from carrywave.kernels.carry import Carry
from carrywave.model.model import Model
from carrywave.model.state import State
from carrywave.spec.spec import Spec
from carrywave.train import optimizer as optimizers
from carrywave.train.loop import Loop
from carrywave.train.snapshot import Snapshot, load_weights, save
from carrywave.train.trainer import tensors_of

MAY_CHANGE = ("epochs", "max_steps", "early_stop", "evaluate_every", "log_every", "keep")  # of train, when a run is resumed


def keep(loop: Loop, fingerprint: str) -> None:
    """Write a snapshot of the loop as it stands between two steps."""
    metrics_bytes, timing_bytes = loop.folder.sync()
    meta = {
        "progress": loop.numbers(),
        "spec": loop.spec.model_dump(mode="json"),
        "fingerprint": fingerprint,
        "metrics_bytes": metrics_bytes,
        "timing_bytes": timing_bytes,
    }
    trainer = loop.trainer
    extra = {f"loop/{name}": tensor for name, tensor in loop.tensors().items()}
    if trainer.scaler is not None:
        extra |= {f"scaler/{name}": tensor for name, tensor in trainer.scaler.tensors().items()}
    snapshot = Snapshot(
        parameters=trainer.parameters(),
        optimizer=optimizers.state_tensors(trainer.optimizer, trainer.named),
        carry=carry_tensors(trainer.state) if trainer.keep_state else {},
        extra=extra,
        meta=meta,
    )
    save(loop.folder.snapshots, f"step-{loop.progress.step:08d}", snapshot, loop.spec.train.keep)


def go_on(loop: Loop, snapshot: Snapshot, fingerprint: str) -> None:
    """Put a loop where a snapshot left off, and cut its logs back to it."""
    meta, trainer = snapshot.meta, loop.trainer
    with _sound():
        if meta["fingerprint"] != fingerprint:
            files = ", ".join(name for name in (getattr(loop.spec.data, part) for part in ("train", "valid", "test")) if name)
            of = f" ({files})" if files else ""
            raise RunError(
                f"the data has changed since the snapshot was written{of}; put the old data back, or start a new run from its weights"
            )
        load_parameters(trainer.parameters(), snapshot.parameters, "the snapshot")
        optimizers.load_state(trainer.optimizer, trainer.named, snapshot.optimizer)
        if trainer.scaler is not None:
            trainer.scaler.load(_under("scaler/", snapshot.extra))
        trainer.state = carry_state(snapshot.carry, trainer.device)
        loop.restore(meta["progress"], _under("loop/", snapshot.extra))
        loop.folder.cut_back(meta["metrics_bytes"], meta["timing_bytes"], loop.progress.step)


def check_same(asked: Spec, snapshot: Snapshot) -> None:
    """Refuse to resume with a spec that asks for another answer; how the work is split, and when it ends, may change."""
    with _sound():
        before = Spec.model_validate(snapshot.meta["spec"]).model_dump(mode="json")
    now = asked.model_dump(mode="json")
    for section in ("task", "data", "model", "batch", "train"):
        if section == "task" or not isinstance(now[section], dict):
            pairs = [(section, before[section], now[section])]
        else:
            pairs = [(f"{section}.{name}", before[section].get(name), value) for name, value in now[section].items()]
        for name, old, new in pairs:
            if old != new and name.removeprefix("train.") not in MAY_CHANGE and name != "data.cache":
                raise RunError(f"the run was started with {name}={old}, not {new}; leave it as it was, or start a new run with --init")


@contextmanager
def _sound() -> Iterator[None]:
    """Every byte of a snapshot was checked when it was read; what does not fit now was never written by this version."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:80]
        raise RunError(
            f"the snapshot is not one that this version wrote ({what}); resume from another snapshot or start a new run"
        ) from error


def load_parameters(own: dict[str, Tensor], given: dict[str, Tensor], where: str) -> None:
    """Copy tensors by name; names and shapes must agree."""
    for name, tensor in own.items():
        if name not in given:
            raise RunError(f"{where} has no {name}; it is from another model: use the spec it was made with")
        if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
            there, here = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (given[name], tensor))
            raise RunError(f"{where} holds {name} as {there}, the model has {here}; use the spec it was made with")
    if extra := sorted(given.keys() - own.keys()):
        raise RunError(f"{where} holds {extra[0]}, which the model does not have; use the spec it was made with")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def take_weights(model: Model, path: Path, where: str, *, ignored: str | None = None) -> None:
    """Load a weights file into a model; one tensor may be left out, as the model has it."""
    own = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
    load_parameters(own, load_weights(path, expected, ignored), where)


def carry_tensors(state: State | None) -> dict[str, Tensor]:
    """The carry by layer name; lanes are its second dimension, in global order."""
    if state is None:
        return {}
    return {f"lstm.l{layer}.{part}": getattr(carry, part) for layer, carry in enumerate(state.carries) for part in ("h", "c")}


def carry_state(tensors: dict[str, Tensor], device: object) -> State | None:
    """The state of the lanes from a snapshot."""
    if not tensors:
        return None
    layers = len(tensors) // 2
    carries = tuple(Carry(*(tensors[f"lstm.l{layer}.{part}"].to(device) for part in ("h", "c"))) for layer in range(layers))  # type: ignore[call-overload]
    return State(carries, None)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
