"""Optimizers, and their state as flat tensors named after parameters.

All state is allocated up front on the parameters' device, so a snapshot has the same names before and after the first step. Every optimizer
built here honours `found_inf`, so a step can be skipped without a read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from carrywave.errors import RunError
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import weight_average

Named = Iterable[tuple[str, nn.Parameter]]


def build(spec: TrainSpec, named: Named, device: torch.device) -> Optimizer:
    """Build the optimizer that the spec asks for, over parameters that are already on their device."""
    # A stage may have nothing to train (a numeric input encoder has no parameters), but torch's optimizers need at least one parameter,
    # even an empty one.
    parameters = [parameter for _, parameter in named] or [nn.Parameter(torch.zeros(0, device=device))]
    # On CUDA the learning rate is a tensor, so that a captured step can be replayed with another rate. Fused kernels read it as float32,
    # which is not precise enough for fp64.
    in_graph = device.type == "cuda" and spec.precision != "fp64"
    lr = torch.tensor(spec.lr, dtype=torch.float32, device=device) if in_graph else spec.lr
    # Fused on CPU too: these kernels can skip a step by a flag on the device, and are bit-for-bit deterministic.
    optimizer: Optimizer
    match spec.optimizer:
        case "sgd":
            optimizer = SGD(parameters, lr, momentum=spec.momentum, weight_decay=spec.weight_decay, fused=True)
        case "adam" | "adamw":
            kind = Adam if spec.optimizer == "adam" else AdamW
            optimizer = kind(parameters, lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True, capturable=in_graph)
        case "ntasgd":
            optimizer = NTASGD(parameters, lr, weight_decay=spec.weight_decay)
    _begin(optimizer, parameters)
    if spec.ema is not None:
        weight_average.begin(optimizer, parameters, 0)
    return optimizer


def enlarge(optimizer: Optimizer, named: Named) -> None:
    """Add parameters that were frozen when `build` made the optimizer, with fresh state."""
    [group] = optimizer.param_groups
    present = {id(parameter) for parameter in group["params"]}
    new = [parameter for _, parameter in named if id(parameter) not in present]
    averaged = weight_average.averaged(optimizer)
    group["params"] += new
    _begin(optimizer, new)
    if averaged:
        weight_average.begin(optimizer, new, optimizer.state[averaged[0]][weight_average.COUNT])


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups; where it is a tensor, in place, since a captured graph reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _begin(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Initialize the state of parameters that have not taken a step yet."""
    [group] = optimizer.param_groups
    for parameter in parameters:
        if isinstance(optimizer, Adam):  # AdamW is a subclass
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        elif isinstance(optimizer, SGD) and group["momentum"]:
            # Zeros instead of torch's lazily created buffer: the first step gives the same result, and skipping it leaves no uninitialised
            # memory behind.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def nonmonotone(history: Sequence[float], nonmono: int) -> bool:
    """True if averaging should start: the last loss is worse than the best of all losses but itself and the `nonmono` before it."""
    older = history[: max(0, len(history) - 1 - nonmono)]
    return bool(older) and history[-1] > min(older)


class NTASGD(Optimizer):
    """Non-monotonically triggered averaged SGD (Merity, Keskar, Socher 2018).

    Plain SGD until `trigger`. From then on it also maintains the mean of the weights at the trigger and after each later step
    (`weight_average`). Training continues on the raw weights.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float | Tensor, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.restarts = 0  # number of times averaging was started or abandoned; each invalidates captured steps
        # The attribute by which torch's gradient scaler and ours recognise an optimizer that honours `found_inf`.
        self._step_supports_amp_scaling = True

    @property
    def average_active(self) -> bool:
        """True once averaging has started."""
        return bool(weight_average.averaged(self))

    @torch.no_grad()
    def trigger(self) -> None:
        """Start averaging from the current weights; does nothing if already averaging."""
        if self.average_active:
            return
        self.restarts += 1
        weight_average.begin(self, self._parameters(), 1)

    def give_up(self) -> None:
        """Abandon the average and return to plain SGD, as before the trigger."""
        self.restarts += 1
        self.state.clear()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one SGD step and update the average if it is active; changes nothing if `found_inf` is 1."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu":
            # A flag in host memory costs nothing to read.
            if bool(found_inf):
                return loss
            found_inf = None
        changing = [*self._parameters(), *(t for p in self._parameters() for t in self.state.get(p, {}).values())]
        before = [tensor.clone() for tensor in changing] if found_inf is not None else []
        for group in self.param_groups:
            self._descend(group)
        weight_average.move(self)
        if found_inf is not None:
            skip = found_inf > 0
            for tensor, old in zip(changing, before, strict=True):
                tensor.copy_(torch.where(skip, old, tensor))
        return loss

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _descend(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not moved:
            return
        grads: list[Tensor] = [parameter.grad for parameter in moved]
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, moved, alpha=group["weight_decay"]))
        if isinstance(group["lr"], Tensor):
            # A captured step must read the current rate from its tensor; passed as `alpha`, the rate at capture time would be baked in.
            torch._foreach_sub_(moved, torch._foreach_mul(grads, group["lr"]))
        else:
            torch._foreach_add_(moved, grads, alpha=-group["lr"])


def state_tensors(optimizer: Optimizer, named: Named) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors: `exp_avg/lstm.weight_ih_l0`."""
    return {
        f"{key}/{name}": value
        for name, parameter in named
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def load_state(optimizer: Optimizer, named: Named, tensors: Mapping[str, Tensor], *, averages: bool | None = None) -> None:
    """Load state produced by `state_tensors`, matched by parameter name. `averages`: whether NT-ASGD had started to average, for a worker
    that may keep no state of its own; by default, if there is any state.
    """
    named = list(named)
    if isinstance(optimizer, NTASGD):
        if tensors if averages is None else averages:
            optimizer.trigger()
        else:
            optimizer.give_up()
    slots = state_tensors(optimizer, named)
    remedy = "resume with the train.optimizer, train.precision and model it was made with"
    if missing := sorted(slots.keys() - tensors.keys()):
        raise RunError(f"the snapshot has no optimizer state {missing[0]}; {remedy}")
    if extra := sorted(tensors.keys() - slots.keys()):
        raise RunError(f"the snapshot has an optimizer state {extra[0]}, which this run does not have; {remedy}")
    for name, slot in slots.items():
        given = tensors[name]
        if given.shape != slot.shape or given.dtype != slot.dtype:
            in_snapshot, in_run = f"{given.dtype} {list(given.shape)}", f"{slot.dtype} {list(slot.shape)}"
            raise RunError(f"the snapshot's optimizer state {name} is {in_snapshot}, but this run needs {in_run}; {remedy}")
    for name, slot in slots.items():
        slot.copy_(tensors[name])
