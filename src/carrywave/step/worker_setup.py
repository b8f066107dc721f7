"""Sets up one worker for a plan: the mesh, the part of the model it holds, and how gradients are summed over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.parameter_placement import Holding, Shared, hold, shared
from carrywave.model.stage import Stage
from carrywave.parallel.gather import broadcast
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import World, check_agreement, join, raise_on_all
from carrywave.plan.plan import Plan, check_head, resolve
from carrywave.spec.load import parse
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.hooks import Hooks
from carrywave.step.engine import Compute, Engine
from carrywave.step.gradients import Gradients, Summed
from carrywave.step.nonfinite import NonfiniteRecord
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.precision import parameter_dtype
from carrywave.step.stats import SharedNumbers

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class HeldStage:
    """The part of a model that one worker holds, trained or not; fixed for the lifetime of a trainer."""

    stage: Stage | OpaqueModel
    parameters: dict[str, nn.Parameter]  # by name


def mesh_of(plan: Plan | PlanSpec | Mapping[str, Any] | None, model: Model | OpaqueModel, device: torch.device | str | None) -> Mesh:
    """This process's place among those that a launcher started; a mesh of one if there was no launcher."""
    many = launched()
    if many:
        world = join(_asked(next(model.parameters()).device if device is None else torch.device(device), given=device is not None))
    elif isinstance(plan, Plan) and plan.workers > 1:
        raise PlanError(
            f"the plan needs {plan.workers} workers, but only one is running; "
            f"start the program with torchrun --nproc-per-node {plan.workers}"
        )
    asked = plan if isinstance(plan, PlanSpec | Plan) else _plan_spec(plan)
    check_uncut(model, asked.chunk_steps)
    if not isinstance(asked, Plan):
        layers = model.lstm.num_layers if isinstance(model, Model) else 0
        whole = isinstance(model, Model) and (model.whole_head or model.has_norms)
        asked = resolve(asked, layers=layers, workers=world.size if many else 1, lanes=None, pooled=model.pooled, whole=whole)
    if many:
        return Mesh(world, asked)
    return Mesh.alone(next(model.parameters()).device if device is None else torch.device(device), asked)


def check_uncut(model: Model | OpaqueModel, chunk_steps: int | None) -> None:
    """Refuse chunks of time that were asked for if there is a front; a default is passed over, as it is for bidirectional layers."""
    if model.has_front and chunk_steps is not None:
        raise PlanError(
            f"the front reads whole sequences, but plan.chunk_steps={chunk_steps} cuts time; use plan.micro_batches, which divides lanes "
            "instead, or remove plan.chunk_steps"
        )
    if model.has_norms and chunk_steps is not None:
        raise PlanError(f"a GlobalNorm reads whole batches, but plan.chunk_steps={chunk_steps} cuts time; remove plan.chunk_steps")


def _asked(device: torch.device, *, given: bool) -> str:
    """The device that a worker requests: the one given, or the GPU that the model is on. A model on the CPU leaves the choice open."""
    if device.type == "cuda":
        return str(device)
    return device.type if given else "auto"


def _plan_spec(given: Mapping[str, Any] | None) -> PlanSpec:
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(f'a Trainer needs a plan in numbers, got {given!r}; pass keys such as {{"stages": 2}}, or use cw.fit')
    return parse({"plan": dict(given)}).plan_spec if given else PlanSpec()


def place_model(model: Model | OpaqueModel, mesh: Mesh, spec: TrainSpec) -> HeldStage:
    """Load rank 0's weights, unless every worker has drawn its own, and keep those of this worker's stage.

    Drawn weights have the same bits everywhere, but for those that hosts round differently: replicas take these from the first one.
    """
    drawn = isinstance(model, Model) and model.drawn
    if not drawn:
        _check_whole(model, mesh.world)
    _check_plan(model, mesh.plan, spec)
    dtype = parameter_dtype(spec.precision)
    if mesh.world.size > 1:
        # Buffers that are not saved as well: what draws them may not be seeded alike.
        tensors = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        forms = enumerate((f"{name}: {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()), start=1)
        remedy = "build its modules alike and in the same order on all workers, from a list and not from a set"
        check_agreement(mesh.world, {f"as parameter or buffer {number} of the model": form for number, form in forms}, remedy)
        if not drawn:
            for name, tensor in broadcast(mesh.world, tensors).items():
                tensors[name].copy_(tensor)
    if isinstance(model, OpaqueModel):
        model.to(mesh.device, dtype)
        return HeldStage(model, dict(model.named_parameters()))
    holding = holding_of(mesh, model.units)
    held = hold(model, holding, dtype)
    if drawn and mesh.plan.replicas > 1 and model.rounded_by_host:
        mesh.take_from_first_replica({name: held[name] for name in held if name in model.rounded_by_host})
    model.drawn = False  # for another trainer it has to be whole
    stage = Stage(model, holding.first, holding.last, share_head=holding.share_head)
    return HeldStage(stage, {name: p for name, p in held.items() if isinstance(p, nn.Parameter)})


def holding_of(mesh: Mesh, units: int) -> Holding:
    """What a worker holds of a model with this many units."""
    return Holding(*mesh.unit_range(units), mesh.device, mesh.plan.shares_head)


def trained(held: HeldStage) -> list[tuple[str, nn.Parameter]]:
    """The parameters that this worker trains, as `requires_grad` says now."""
    return [(name, p) for name, p in held.parameters.items() if p.requires_grad]


def tied_of(model: Model | OpaqueModel, mesh: Mesh) -> list[Shared]:
    """The trained parameters that several stages hold."""
    if not isinstance(model, Model):
        return []
    return shared(model, mesh.plan.edges(model.units)[1:-1], share_head=mesh.plan.shares_head)


def engine_of(
    model: Model | OpaqueModel,
    held: HeldStage,
    named: Named,
    compute: Compute,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler | None,
    checks: tuple[Agreement, Hooks],
    *,
    guards_weights: bool,
) -> Engine:
    """The engine that trains these parameters. Collective: every rank must call it."""
    mesh, (agreement, hooks) = compute.mesh, checks
    tied = tied_of(model, mesh)
    elsewhere = {each.name for each in tied if mesh.stage in each.stages and each.stages[0] != mesh.stage}
    nonfinite = NonfiniteRecord(model, held.stage, named, mesh.world)
    names = [name for name, _ in model.named_parameters()]
    shared = SharedNumbers(mesh, len(names), agreement.columns) if mesh.world.size > 1 else None
    # If all workers are replicas, what they tell each other travels with the gradients.
    travels = shared is not None and mesh.plan.stages == 1
    numbers = shared.slots.size if shared is not None and travels else 0
    gradients = Gradients(
        [p for _, p in named],
        list(held.parameters.values()),
        _sums(mesh, named, tied, alone=travels),
        device=mesh.device,
        numbers=numbers,
        watched=nonfinite.watched,
    )
    if shared is not None and gradients.numbers is not None:
        shared.place(gradients.numbers)
        shared.travels = True
    # Replicas hold the same reduced gradients, and stages share tied ones: the norm must count each once.
    first = mesh.replica == 0 or travels
    counted = [p for name, p in named if first and name not in elsewhere]
    return Engine(
        compute,
        gradients,
        names,
        held.parameters,
        counted,
        optimizer,
        scaler,
        nonfinite,
        agreement,
        hooks,
        shared,
        guards_weights,
    )


def _sums(mesh: Mesh, named: Named, tied: Sequence[Shared], *, alone: bool) -> list[Summed]:
    """Which gradients are summed over which workers. `alone`: there are only replicas, which have something to tell each other even if
    nothing is trained. Collective: every rank must call it.
    """
    names = {each.name for each in tied}
    wanted: list[Summed] = []
    group = mesh.replicas_of([mesh.stage])
    if group is not None:
        # Over some links nothing else may run while messages are in flight, so all-reduces wait for the last message. A sum on the
        # stream itself would hold up the rest of backward.
        during_backward = group.overlaps and (mesh.links is None or not mesh.links.exclusive)
        wanted.append(Summed(group, [p for name, p in named if name not in names], during_backward=during_backward))
    by_name = dict(named)
    for stages in dict.fromkeys(each.stages for each in tied):
        group = mesh.replicas_of(stages)  # collective: also created by workers outside it
        if mesh.stage in stages and group is not None:
            # Not early, to avoid a deadlock: the other stages reach it only after messages that this one has yet to send.
            wanted.append(Summed(group, [by_name[each.name] for each in tied if each.stages == stages], during_backward=False))
    return [each for each in wanted if each.parameters or alone]


def _check_whole(model: nn.Module, world: World) -> None:
    with raise_on_all(world):
        lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
        if lazy is not None:
            raise UserError(f"the model's {lazy} has no shape yet; run its module on a batch once before you create the trainer")
        gone = next((name for name, tensor in tensors_of(model).items() if tensor.is_meta), None)
        if gone is not None:
            raise UserError(
                f"the model's {gone} has no values here: another trainer has split the model into stages, or it was created on the meta "
                "device; create it again on every worker, and load what trainer.state_dict() returned into the new trainer"
            )


def _check_plan(model: Model | OpaqueModel, plan: Plan, spec: TrainSpec) -> None:
    if model.has_norms and (plan.micro_batches > 1 or plan.recompute):
        key = "micro_batches" if plan.micro_batches > 1 else "recompute"
        raise PlanError(f"a GlobalNorm reads every batch whole and once, but plan.{key} does not let it; remove plan.{key}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"{name} is an {type(module).__name__} with sparse=True, but gradients are summed as dense tensors; remove it")
    if isinstance(model, OpaqueModel):
        if plan.stages > 1:
            raise PlanError(
                f"the module {type(model.module).__name__} cannot be split into {plan.stages} stages; "
                "wrap its modules as cw.Model(encoder, lstm, head), or use only replicas"
            )
        if plan.chunk_steps is not None:
            raise PlanError(
                f"the module {type(model.module).__name__} cannot be run in chunks of time; "
                "wrap its modules as cw.Model(encoder, lstm, head), or remove plan.chunk_steps"
            )
        return
    check_head(plan, pooled=model.pooled or model.whole_head)
    if model.has_front:
        # Otherwise the weight gradients of convolutions may be summed in another order from one run to the next.
        torch.backends.cudnn.deterministic = True
    if model.stride > 1 and spec.beta:
        raise UserError(f"train.beta={spec.beta:g} penalises changes from step to step, which a front has merged; remove it")
    if model.whole_head and plan.chunk_steps is not None:
        alone = plan.stages > 1 and plan.micro_batches == 1
        raise PlanError(
            f"the head {type(model.head).__name__} reads whole sequences, but the plan cuts time into chunks of {plan.chunk_steps} steps; "
            f"remove plan.chunk_steps{', and use plan.micro_batches=2 or more, which divide lanes instead' if alone else ''}"
        )
    if plan.stages > 1:
        scripted = next((name for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)), None)
        if scripted is not None:
            raise PlanError(
                f"{scripted} is TorchScript, whose weights cannot be left to other stages; use plain modules, or remove plan.stages"
            )
        _check_tied(model)
    if plan.kernel != "auto":
        model.lstm.backends.check(plan.kernel)
        model.lstm.kernel = plan.kernel


def _check_tied(model: nn.Module) -> None:
    """Refuse two parameters in the same memory: on one device each learns what the other does, on two stages it would not."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        other = owners.setdefault(parameter.data_ptr(), name) if parameter.numel() and not parameter.is_meta else name
        stays = name.partition(".")[0] == other.partition(".")[0] != "lstm"  # within an encoder or a head, which no stage divides
        if other != name and not stays:
            raise PlanError(
                f"{other} and {name} are two tensors in the same memory; make them one parameter (head.weight = encoder.weight)"
            )


def user_optimizer(optimizer: torch.optim.Optimizer, held: HeldStage) -> torch.optim.Optimizer:
    """The user's optimizer, without the parameters that other workers hold, and with its state where the parameters are now."""
    kept = {id(p) for p in held.parameters.values()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    # Some classes (Adagrad) give every parameter its state when they are made.
    for parameter in [each for each in optimizer.state if isinstance(each, Tensor) and id(each) not in kept]:
        del optimizer.state[parameter]
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and isinstance(parameter, Tensor) and value.dim() and value.device != parameter.device:
                state[name] = value.to(parameter.device)
    return optimizer


def check_saved_whole(model: nn.Module) -> None:
    """Refuse to save a model with state that is neither in a parameter nor in a buffer."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"{name} ({type(module).__name__}) has a state of its own (get_extra_state), but only parameters and buffers are saved; "
                "keep it in a buffer (register_buffer)"
            )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name, each once (a tied one under its first name); detached, not copied."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    passing = {id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set}
    return parameters | {name: buffer.detach() for name, buffer in model.named_buffers() if id(buffer) not in passing}


def local_part(mesh: Mesh, stage: Stage | OpaqueModel, batch: Batch, *, scores: bool, pooled: bool) -> Batch:
    """A worker's lanes of a batch, reduced to what its stage reads, on its device. `scores`: it reads the targets."""
    if batch.part_of is None and mesh.plan.replicas > 1:
        batch = batch.take(*mesh.share().bounds(batch.lanes.shape[0]), pooled=pooled)
    if mesh.plan.stages > 1:
        batch = batch.without(inputs=not stage.has_encoder, targets=not scores)
    return batch if batch.lengths.device == mesh.device else batch.to(mesh.device)
