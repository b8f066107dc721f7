"""Checks that a user's modules give the same answer however the work is split; a module that does not is refused by name, or warned about.

A module is only harmed along an axis that the plan cuts: a convolution over time trains fine on one device. So a fault that this plan
triggers is an error, and one that only another plan would trigger is a warning, given once.

Some faults are recognised by the module's class and options (`known`). Other modules are tried at the first step on a few of its lanes and
steps (`probe`). Our own modules, and those of torch that work on one step of one lane at a time, are known to be safe and are not tried.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.model.opaque_model import Whole
from carrywave.model.stage import Stage
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import all_gather_text
from carrywave.plan.plan import Plan
from carrywave.step.checks import probe
from carrywave.step.checks.probe import Finding
from carrywave.step.checks.probe_sample import Axis, sample_of

# torch modules that treat every step of every lane independently, whatever their arguments. LayerNorm is handled separately, because it may
# normalize over more than the last axis.
STEPWISE: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU}
    | {nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid}
    | {nn.Embedding}
)

_STEP_BY_STEP = "make it work step by step, or remove plan.stages and plan.chunk_steps"
_LANE_BY_LANE = "make it work lane by lane, or train on one device without micro-batches"


def stepwise(module: nn.Module) -> bool:
    """True if this module and all its submodules are known to treat every step of every lane independently."""
    return all(_stepwise(each) for each in module.modules())


def _stepwise(module: nn.Module) -> bool:
    kind = type(module)
    ours = kind.__module__.startswith("carrywave.")
    changed = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if changed or "forward" in vars(module) or any(p._backward_hooks for p in module._parameters.values() if p is not None):
        return False
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return ours or kind in STEPWISE


def known(root: nn.Module, path: str) -> Iterator[tuple[str, bool]]:
    """Yield faults known from the module's class and options: the message, and whether it is an error even on one device."""
    for name, module in root.named_modules(prefix=path):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        what = f"{name} is an {type(module).__name__} with"
        if module.sparse:
            yield f"{what} sparse=True, but gradients are summed as dense tensors here; remove it", True
        if module.max_norm is not None:
            yield f"{what} max_norm={module.max_norm:g}, which shortens only the rows that a worker happens to read; remove it", False
        if module.scale_grad_by_freq:
            yield f"{what} scale_grad_by_freq, which counts words only in the part that a worker happens to hold; remove it", False


def check_splits(stage: Stage | Whole, plan: Plan, batch: Batch, key: Tensor, mesh: Mesh, *, shards: bool = False) -> None:
    """Refuse what this plan would break, and warn about what others would. Collective: every rank calls it at the first step, with its own
    part of the batch. `shards`: lanes are cut whatever the plan, as in reproducible runs.
    """
    cut: set[Axis] = set()
    if plan.chunk_steps is not None and not (isinstance(stage, Whole) or stage.lstm.bidirectional):
        cut.add("time")
    if plan.replicas * plan.micro_batches > 1 or shards:
        cut.add("lanes")
    # A module that draws random numbers or keeps state also breaks if it is run twice, or apart from the rest of the model.
    split = bool(cut) or plan.recompute or plan.stages > 1
    errors: list[str] = []
    warned: list[str] = []
    for path, root, run in _parts(stage):
        for sentence, always in known(root, path):
            (errors if always or split else warned).append(sentence)
        if stepwise(root) and not isinstance(stage, Whole):  # whose loss may be any function
            continue
        pooled, whole_time = stage.pooled, isinstance(stage, Whole)
        sample = sample_of(batch, key, stage.width_head, pooled=pooled, whole_time=whole_time)
        axes: tuple[Axis, ...] = ("lanes",) if whole_time else ("time", "lanes")
        for found in probe.probe(run, root, path, sample, axes):
            harmful = split if found.axis is None else found.axis in cut
            swapped = (
                found.fault == "output" and found.axis == "lanes" and any(getattr(each, "batch_first", False) for each in root.modules())
            )
            (errors if harmful else warned).append(_swapped(found) if swapped else say(found))
    told = _agreed(mesh, errors, warned)
    if told is not None:
        warnings.warn(f"{told}; this plan does not change the result, but others would", stacklevel=4)


def _parts(stage: Stage | Whole) -> Iterator[tuple[str, nn.Module, probe.Run]]:
    """The user's modules that this worker runs."""
    if isinstance(stage, Whole):
        yield "module", stage.module, probe.piecewise(stage, "module")
        return
    if stage.encoder is not None:
        yield "encoder", stage.encoder, probe.encoder(stage.encoder, "encoder")
    if stage.head is not None:
        yield "head", stage.head, probe.head(stage.head, "head", pooled=stage.pooled)


def say(found: Finding) -> str:
    """The message for a finding: the fact and the remedy."""
    what = f"{found.path} ({found.kind})"
    words: dict[str, Callable[[], str]] = {
        "draws": lambda: (
            f"{what} draws from a random generator that is not keyed, so its numbers depend on how the work is split and on where a run "
            "was stopped; use nn.Dropout, which is made keyed, instead of functional dropout or noise"
        ),
        "state": lambda: (
            f"{what} changes its {found.detail} in forward, so its result depends on how often it is called, which a plan decides; "
            "change it between steps, outside forward"
        ),
        "output": lambda: (
            f"{what} gives different results for a step depending on the other steps in its input; {_STEP_BY_STEP}"
            if found.axis == "time"
            else f"{what} gives different results for a lane depending on the other lanes in its input; {_LANE_BY_LANE}"
        ),
        "loss": lambda: (
            f"{what} returns a {found.detail} when split by {found.axis}; return the sum over targets and their number "
            "(a mean would be divided once more), and leave weight penalties to the optimizer (train.weight_decay)"
        ),
        "gradient": lambda: (
            f"{what} has a gradient of {found.detail} that differs between the whole and the sum over parts when split by {found.axis}; "
            "remove anything in it that scales or clips gradients"
        ),
    }
    return words[found.fault]()


def _swapped(found: Finding) -> str:
    return (
        f"{found.path} ({found.kind}) gives different results for a lane depending on the other lanes in its input, which is "
        "[time, lane, …], and a layer of the model has batch_first=True; build it without, or transpose what it reads"
    )


def _agreed(mesh: Mesh, errors: list[str], warned: list[str]) -> str | None:
    """Raise on every worker the first error that any of them found; otherwise return the warning that this worker is to report, if any."""
    said = [json.loads(text) for text in all_gather_text(mesh.world, json.dumps([errors[:1], warned[:1]]))]
    for rank, (error, _) in enumerate(said):
        if error:
            wrong: UserError = PlanError(error[0])
            raise on_every_rank(wrong, rank) if mesh.world.size > 1 else wrong
    teller = next((rank for rank, (_, warning) in enumerate(said) if warning), None)
    return warned[0] if teller is not None and teller == mesh.world.rank else None
