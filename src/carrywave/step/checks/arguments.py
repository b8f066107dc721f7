"""Validates what a user makes a trainer of: model and loss, the spec, an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from carrywave.errors import PlanError, SpecError, UserError
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.parallel.world import World, check_agreement
from carrywave.plan.plan import Plan
from carrywave.spec.defaults import AUTO
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.spec.sync_keys import READ_BY
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.stepwise import SPLITTABLE
from carrywave.step.precision import parameter_dtype

# The keys of a spec's train section that affect a single step. The others are for the training loop.
OPTIMIZER_KEYS = ("optimizer", "lr", "momentum", "weight_decay", "betas", "ema")
STEP_KEYS = {*OPTIMIZER_KEYS, *READ_BY, "precision", "clip", "seed", "alpha", "beta", "on_nan", "sync"}


def as_model(given: Any, loss: Loss | None) -> Model | OpaqueModel:
    """The model to train: a `Model`, whose head has the loss, or any other module in one piece, with the loss given or its own."""
    check_loss(loss, given)
    return given if isinstance(given, Model | OpaqueModel) else OpaqueModel(given, loss)


def check_loss(loss: Loss | None, model: object) -> None:
    """Refuse a loss beside a model that would never call it."""
    if loss is None:
        return
    if not callable(loss):
        raise UserError(f"loss is a {type(loss).__name__}; pass a function (out, target) -> (sum, count)")
    if isinstance(model, Model):
        head = type(model.head).__name__
        raise UserError(
            f"loss=... does not apply to a cw.Model: define loss(y, target) -> (sum, count) in its head {head}, and remove loss=..."
        )
    if model is None or isinstance(model, Mapping):
        raise UserError(
            "loss=... does not apply to a model section, whose loss follows from the task; remove it, or pass a module of your own"
        )


def train_spec(given: TrainSpec | Spec | Mapping[str, Any] | None) -> TrainSpec:
    """The train section of a spec, in whichever form it was given."""
    if isinstance(given, TrainSpec):
        return given
    if given is not None and not isinstance(given, Spec | Mapping):
        remedy = "pass it as optimizer=..." if isinstance(given, Optimizer) else 'pass its keys, such as {"lr": 1e-3}'
        raise UserError(f"a Trainer takes the train section of a spec after the model, got {type(given).__name__}; {remedy}")
    return given.train if isinstance(given, Spec) else parse({"train": dict(given or {})}, defaults=False).train


def check_spec(spec: TrainSpec, *, user_optimizer: bool) -> None:
    """Refuse settings that have no effect on a step in a user's own loop."""
    usual = TrainSpec()
    for key in sorted(spec.model_fields_set):
        if user_optimizer and key in OPTIMIZER_KEYS:
            remedy = "average with torch.optim.swa_utils.AveragedModel" if key == "ema" else f"remove train.{key}"
            raise SpecError(f"train.{key} does not apply to your own optimizer, which has its own settings; {remedy}")
        if key not in STEP_KEYS and getattr(spec, key) != getattr(usual, key):
            raise SpecError(f"train.{key} does not apply to a Trainer, which takes single steps; do it in your own loop, or use cw.fit")
    if spec.sync == "async":
        raise SpecError("train.sync=async needs the training loop, which ends its meetings; use local or diloco, or use cw.fit")
    if spec.on_nan == "back":
        raise SpecError("train.on_nan=back needs snapshots, which a Trainer does not write; use stop or skip, or use cw.fit")


def in_model_dtype(spec: TrainSpec, model: nn.Module) -> TrainSpec:
    """The spec, with fp64 if the model is float64 and no precision was given; a model is never cast without its owner asking."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if spec.precision == AUTO and found == {torch.float64}:
        return spec.model_copy(update={"precision": "fp64"})
    check_dtype(spec, model)
    return spec


def check_dtype(spec: TrainSpec, model: nn.Module) -> None:
    """Refuse a model that would lose precision or whose parameters are in half precision. With fp64, float32 is widened as requested."""
    wanted = parameter_dtype(spec.precision)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype in (wanted, torch.float32):
            continue
        has, keeps = (str(dtype).removeprefix("torch.") for dtype in (parameter.dtype, wanted))
        short = {torch.bfloat16: " and train.precision=bf16", torch.float16: " and train.precision=fp16"}.get(parameter.dtype, "")
        other = ", or set train.precision=fp64" if parameter.dtype == torch.float64 else ""
        raise UserError(
            f"the model's {name} is {has}, but train.precision={spec.precision} keeps weights in {keeps}; use model.float(){short}{other}"
        )


def check_optimizer(optimizer: Optimizer | None, model: nn.Module, plan: Plan) -> None:
    """Refuse what is not an optimizer, one over parameters that are not the model's, and one that cannot take the steps of this plan. None:
    the spec's, which has real parameters alone.
    """
    if optimizer is None:
        name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
        if name is not None:
            raise UserError(
                f"{name} is complex, but the optimizers of a spec update real parameters alone; pass a Trainer an optimizer of your own"
            )
        return
    if not isinstance(optimizer, Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise UserError(f"optimizer must be a torch.optim.Optimizer over model.parameters(), got {got}; create one and pass that")
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in own]
    if given and len(foreign) == len(given):
        raise UserError("the optimizer has none of the model's parameters; create it from model.parameters() of the model being trained")
    if foreign:
        shape = list(foreign[0].shape)
        raise UserError(
            f"the optimizer has a parameter of shape {shape} that is not in the model; make it a parameter of its head, for example"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UserError(f"{kind} evaluates the loss several times per step, but a step here evaluates it once; use for example SGD or Adam")
    if isinstance(optimizer, SparseAdam):
        raise UserError(f"{kind} takes only sparse gradients, but gradients are dense here; use Adam")
    # torch's own treat each parameter by itself; no norm over those of different stages can be known to one of them.
    known = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"] or getattr(optimizer, SPLITTABLE, False) is True
    if plan.stages > 1 and not known:
        raise PlanError(
            f"{kind} may update parameters together, but a stage has only some; if it treats each alone, set optimizer.{SPLITTABLE} = True"
        )


def check_alike(world: World, spec: TrainSpec, optimizer: Optimizer | None, *, keep_state: bool | None) -> None:
    """Refuse workers that were given other settings than rank 0. Collective: every rank must call it."""
    settings = {f"train.{key}": repr(value) for key, value in spec.model_dump(mode="json").items()}
    settings["keep_state"] = repr(keep_state)
    if optimizer is not None:
        settings["as optimizer"] = f"{type(optimizer).__name__} with a state for {len(optimizer.state)} parameters"
    check_agreement(world, settings, "pass the same to every worker's Trainer; a seed too, for masks differ by lane and not by rank")
