"""Keeps on a worker only the parameters of its own units, and of the head if stages share it, so a model may be larger than a device.

Names are those of the whole model, with a tied parameter under its first name, so that what is saved, initialised or drawn by name does
not depend on how the model is split.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import PlanError, UserError
from carrywave.model.model import Model

_LAYER = re.compile(r"_l(\d+)(_|\.|$)")  # weight_hh_l0, weight_hh_l0_reverse, weight_hh_l0_orig (pruned), norm_l0.weight


def unit_of(name: str, units: int) -> int:
    """The unit that a parameter or buffer belongs to, from its name in the model."""
    part, _, rest = name.partition(".")
    if part in ("encoder", "dropout_in"):
        return 0
    match = _LAYER.search(rest) if part == "lstm" else None
    return int(match.group(1)) + 1 if match else units - 1


def homes(model: Model) -> dict[str, frozenset[int]]:
    """The units that use each parameter and buffer, by its first name: more than one if it is tied."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    units_by_name: dict[str, set[int]] = {}
    for name, tensor in tensors:
        units_by_name.setdefault(first.setdefault(id(tensor), name), set()).add(unit_of(name, model.units))
    return {name: frozenset(units) for name, units in units_by_name.items()}


@dataclass(frozen=True)
class Shared:
    """A parameter held by several stages: its gradient is summed over them, and its norm is counted on the first."""

    name: str
    stages: tuple[int, ...]


def shared(model: Model, cuts: Sequence[int], *, share_head: bool = False) -> list[Shared]:
    """Trainable parameters held by several stages, in the model's order: tied ones and, with `share_head`, those of the head."""
    places = {
        name: list(range(len(cuts) + 1))
        if share_head and model.units - 1 in units
        else sorted({sum(unit >= cut for cut in cuts) for unit in units})
        for name, units in homes(model).items()
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [Shared(name, tuple(stages)) for name, stages in places.items() if len(stages) > 1 and name in trained]


class Released(nn.Parameter):
    """An empty parameter in the place of one that another worker holds: it says so to whoever wants its values, such as an average of the
    whole model.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
        except NotImplementedError as error:  # torch's, if a tensor on the meta device is to be copied to another
            raise UserError(
                "a parameter that another worker holds has no values here; make a copy of the model, such as torch's AveragedModel, after "
                "the Trainer, or call trainer.gathered() on every worker"
            ) from error
        return found.as_subclass(cls) if func is Tensor.detach else found


@dataclass(frozen=True)
class Holding:
    """The units [first, last) of a model that a worker holds, and the head too with `share_head`; and the device that they are on."""

    first: int
    last: int
    device: torch.device
    share_head: bool = False

    def units(self, model: Model) -> set[int]:
        """The numbers of these units."""
        return {*range(self.first, self.last), *([model.units - 1] if self.share_head else [])}


def allocate(model: Model, holding: Holding) -> None:
    """Give the parameters that a worker holds memory on its device, if they are on torch's meta device; the others stay there."""
    where, wanted = homes(model), holding.units(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, bare in list(module._parameters.items()):
            if bare is None or not bare.is_meta or not wanted & where[names[id(bare)]]:
                continue
            if id(bare) not in made:  # else it is tied, and stays so
                made[id(bare)] = nn.Parameter(torch.empty_like(bare, device=holding.device), requires_grad=bare.requires_grad)
            module._parameters[key] = made[id(bare)]


def hold(model: Model, holding: Holding, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move the tensors that a worker holds to its device, floats in this dtype, and release all others; return those held, by name.

    Released tensors stay in the model as empty tensors on torch's meta device. Buffers that are not saved are never released: nothing
    could bring them back.
    """
    where, wanted = homes(model), holding.units(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]  # kept alive to the end: the id of a freed tensor may be reused
    names = {id(tensor): name for name, tensor in tensors}
    held: dict[str, Tensor] = {}
    emptied: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for key, tensor in store.items():
                    name = names.get(id(tensor))
                    if tensor is None or name is None:
                        continue
                    kind = dtype if tensor.is_floating_point() else tensor.dtype
                    if wanted & where[name]:
                        if tensor.is_meta:
                            raise PlanError(
                                f"the model no longer has {name}: another trainer split the model over stages; build a new model"
                            )
                        moved = tensor.data.to(holding.device, kind)
                        if isinstance(tensor, nn.Parameter):
                            tensor.data = moved
                        else:
                            store[key] = tensor = moved  # type: ignore[assignment]
                        held[name] = tensor
                    elif key not in module._non_persistent_buffers_set:
                        empty = emptied.get(id(tensor))
                        if empty is None:
                            bare = torch.empty_like(tensor, device="meta", dtype=kind)
                            empty = Released(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
                            emptied[id(tensor)] = empty
                            if isinstance(tensor, nn.Parameter):
                                # Code that still refers to the original parameter may freeze or unfreeze it there.
                                empty.stands_for = weakref.ref(tensor)  # type: ignore[attr-defined]
                                tensor.data = tensor.data.new_empty(0)  # computed with here, its gradient would be lost
                        store[key] = empty  # type: ignore[assignment]
    if emptied:
        for module in model.modules():
            module.register_state_dict_post_hook(_refuse_a_part)  # type: ignore[no-untyped-call]
    order = {name: index for index, name in enumerate(where)}
    return {name: held[name] for name in sorted(held, key=order.__getitem__)}


def _refuse_a_part(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Refuse to save empty tensors in place of those that other workers hold."""
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise UserError(
                f"{name} is held by another worker, so this state_dict would save an empty tensor for it; "
                "call trainer.gathered() for the weights or trainer.state_dict() for everything, on every worker, and save what rank 0 gets"
            )


def fill(model: Model, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Restore all tensors of a model that was split, by name; what is not saved was never released."""
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in tensors}
    replaced: dict[int, Tensor] = {}
    for name, tensor in named.items():
        if tensor.is_meta:
            whole = tensors[name].to(device, tensor.dtype)
            replaced[id(tensor)] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
        else:
            tensor.data.copy_(tensors[name])
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, old in store.items():
                if old is not None and id(old) in replaced:
                    store[key] = replaced[id(old)]  # type: ignore[assignment]
