"""Validates what a user passes to a trainer: the spec, the model's dtype, an optimizer, the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.data.batch import Batch
from carrywave.errors import SpecError, UserError
from carrywave.model.arguments import check_shapes
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.model.over_time.front import Front
from carrywave.model.sample_weights import check_weights
from carrywave.model.stage import Stage, State, check_resets
from carrywave.parallel.world import World, check_agreement
from carrywave.spec.defaults import AUTO
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.spec.sync_keys import READ_BY
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.targets import check_targets, form_of, no_targets
from carrywave.step.precision import parameter_dtype

# The keys of a spec's train section that affect a single step. The others are for the training loop.
OPTIMIZER_KEYS = ("optimizer", "lr", "momentum", "weight_decay", "betas", "ema")
Lanes = tuple[int, ...]  # the numbers of all lanes of a batch, in its order
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


def check_optimizer(optimizer: Optimizer | None, model: nn.Module) -> None:
    """Refuse what is not an optimizer, and one over parameters that are not the model's. None: the spec's, which has real ones alone."""
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


def check_surroundings(spec: TrainSpec, device: torch.device) -> None:
    """Refuse a step inside torch.autocast, because the spec determines the precision, or inside torch.inference_mode."""
    if torch.is_inference_mode_enabled():
        raise UserError("a step was called inside torch.inference_mode, where nothing can be differentiated; call it outside")
    if torch.is_autocast_enabled(device.type):
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device.type), "bf16")
        raise UserError(
            f"a step was called inside torch.autocast, but train.precision={spec.precision}; call it outside and set train.precision={name}"
        )


def uncounted() -> UserError:
    """The error for a non-zero loss whose target count is not positive."""
    return UserError("the loss returned a sum over targets with a count that is not positive; return (sum, number of targets)")


def check_batches(batches: Sequence[Batch], model: Model | OpaqueModel, *, keep_state: bool, gradients: bool = True) -> None:
    """Refuse batches that cannot be intended. Only tensors on the host are inspected, because reading from a GPU would block.

    `gradients`: whether the loss will be differentiated.
    """
    if not batches:
        raise UserError("a step needs a batch; make one with Batch.of(inputs, targets)")
    for batch in batches:
        if not isinstance(batch, Batch):
            several = isinstance(batch, list | tuple) and all(isinstance(each, Batch) for each in batch)
            remedy = "pass them one by one: trainer.step(*batches)" if several else "make them with Batch.of(inputs, targets)"
            raise UserError(f"a step takes one or more batches as arguments, got a {type(batch).__name__}; {remedy}")
        if isinstance(model, OpaqueModel):
            model.expect(batch.pooled)
        if batch.goes_on and not keep_state:
            raise UserError(f"fresh=False continues the carry of the previous step, but {why_no_carry(model)}remove fresh")
        if batch.part_of is None:  # a user's: our own loader makes no others
            _check_own(batch, model, gradients=gradients)


def _check_own(batch: Batch, model: Model | OpaqueModel, *, gradients: bool) -> None:
    """A whole batch of a user's."""
    for name in ("inputs", "targets", "weights") if gradients else ():
        tensor = getattr(batch, name)
        if tensor is not None and tensor.requires_grad:
            raise UserError(
                f"the {name} require grad, but a step trains the model's parameters alone; put what makes them into the model, or detach"
            )
    if batch.pooled is not None and batch.pooled != model.pooled:
        name = type(model.head).__name__
        if model.pooled:
            raise UserError(f"the targets are one per step, but {name} has pooled = True; pass one per lane, [lane, …]")
        raise UserError(
            f"the targets are one per lane, but {name} reads one per step; pass [time, lane, …], or set pooled = True in {name}"
        )
    if batch.unsure and model.pooled:
        shape = list(batch.inputs.shape[:2])
        raise UserError(f"targets of shape {shape} could be one per step or several per lane; say which: Batch.of(..., pooled=True)")
    if batch.resets is not None:
        if isinstance(model, OpaqueModel):
            name = type(model.module).__name__
            raise UserError(f"the batch has resets, which a module such as {name} does not know; use cw.Model(encoder, lstm, head)")
        check_resets(model)
    if batch.weights is not None:
        _check_weights(batch, batch.weights, model)
    if isinstance(model, Model):
        _check_inputs(batch.inputs, _first(model.encoder))
        check_targets(batch, model)
    elif batch.targets is None:
        raise no_targets()


def check_alike(world: World, spec: TrainSpec, optimizer: Optimizer | None, *, keep_state: bool | None) -> None:
    """Refuse workers that were given other settings than rank 0. Collective: every rank must call it."""
    settings = {f"train.{key}": repr(value) for key, value in spec.model_dump(mode="json").items()}
    settings["keep_state"] = repr(keep_state)
    if optimizer is not None:
        settings["as optimizer"] = f"{type(optimizer).__name__} with a state for {len(optimizer.state)} parameters"
    check_agreement(world, settings, "pass the same to every worker's Trainer; a seed too, for masks differ by lane and not by rank")


def check_lanes(batches: Sequence[Batch], before: Lanes | None) -> Lanes | None:
    """Refuse lanes that cannot continue their carry. `before` are the lanes of the previous step; returns those of the last batch."""
    for batch in batches:
        before = check_continued(batch, before)
    return before


def check_state(state: State, stage: Stage | OpaqueModel, lanes: int) -> None:
    """Refuse a state that a user has set for other lanes or layers than those of this worker."""
    if isinstance(stage, Stage):
        check_shapes(stage.lstm, state.carries, lanes, stage.layers)


def check_continued(batch: Batch, before: Lanes | None) -> Lanes:
    """Refuse another number of lanes than in the previous batch unless all are fresh, and a lane that continues at another place.

    The carry is kept by place, and each replica keeps that of its own lanes. Returns the batch's lanes.
    """
    lanes = batch.all_lanes
    if before is None or lanes == before:
        return lanes
    fresh = batch.fresh.tolist()
    if all(fresh):
        return lanes
    if len(lanes) != len(before):
        raise UserError(
            f"the carry is of {len(before)} lanes, but the batch has {len(lanes)}; keep the number of lanes, or make all of them fresh"
        )
    for place, starts in enumerate(fresh if batch.part_of is None else ()):
        if lanes[place] != before[place] and not starts:
            fact = f"lane {lanes[place]} continues its carry in column {place}, where the previous batch had lane {before[place]}"
            raise UserError(f"{fact}; keep the lanes in one order, or make those that move fresh")
    return lanes


def _check_weights(batch: Batch, weights: Tensor, model: Model | OpaqueModel) -> None:
    """Refuse weights that the model's loss does not take, or not in this form."""
    if isinstance(model, OpaqueModel):
        check_weights(weights, model.given_loss, f"the module {type(model.module).__name__}", by_lane=model.pooled)
        return
    by_lane = model.whole_head or (model.pooled and batch.resets is None)
    check_weights(weights, model.head.loss, f"the head {type(model.head).__name__}", by_lane=by_lane)
    if model.pooled and batch.resets is not None and weights.dim() == 1:
        raise UserError(
            "the weights are one for each lane, but lanes hold several sequences; pass [time, lane], at the last step of each sequence"
        )


def why_no_carry(model: Model | OpaqueModel) -> str:
    """Why lanes cannot go on from the previous batch, and what to do instead of giving that up."""
    if isinstance(model, OpaqueModel):
        return f"a trainer does not know the carry of a {type(model.module).__name__}; wrap its parts as cw.Model(encoder, lstm, head), or "
    name = type(model.head).__name__
    if model.pooled and not model.whole_head:
        return f"the head {name} pools (pooled = True), which ends with the batch; pass whole sequences, and "
    if model.reads_whole:
        return f"the {'head ' + name if model.whole_head else 'model'} reads whole sequences; "
    return "this trainer was created with keep_state=False; "


def _first(module: nn.Module) -> nn.Module:
    """The innermost module that reads the inputs."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return module if not isinstance(module, Front) or module.step_encoder is None else _first(module.step_encoder)


def _check_inputs(inputs: Tensor, reader: nn.Module) -> None:
    numbers = reader.width if isinstance(reader, Numbers) else reader.in_features if isinstance(reader, nn.Linear) else None
    numbers = reader.features if isinstance(reader, Front) else numbers
    rows = reader.vocabulary if isinstance(reader, Embedding) else reader.num_embeddings if isinstance(reader, nn.Embedding) else None
    if numbers is not None and (not inputs.is_floating_point() or inputs.dim() < 3 or inputs.shape[-1] != numbers):
        raise UserError(
            f"the inputs are {form_of(inputs)}, but the encoder's {type(reader).__name__} reads {numbers} numbers per step; "
            f"pass floats of shape [time, lane, {numbers}]"
        )
    if rows is None:
        return
    if inputs.is_floating_point():
        raise UserError(f"the inputs are {form_of(inputs)}, but the encoder's {type(reader).__name__} reads tokens; pass whole numbers")
    _check_codes(inputs, rows, "token")


def _check_codes(codes: Tensor, known: int, what: str) -> None:
    if codes.device.type == "cpu" and codes.numel():
        low, high = (int(each) for each in codes.aminmax())
        if low < 0 or high >= known:
            raise UserError(
                f"the inputs contain {what} {low if low < 0 else high}, but the encoder knows 0 to {known - 1}; "
                f"use {what}s in that range, or a larger embedding"
            )
