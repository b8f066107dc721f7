"""Follows the parameters of a model from step to step: `requires_grad` may change, so that layers can be frozen and unfrozen between steps;
a parameter or a part that is replaced, and a hook that would not be called, are refused.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from carrywave.errors import UserError, WorkerError
from carrywave.model.model import Model
from carrywave.model.recurrent import CALLED_HOOKS
from carrywave.parallel.startup.rendezvous import start_seconds
from carrywave.parallel.world import World, all_arrive
from carrywave.step.checks.stepwise import HOOKS

LATER = "after the trainer was created; create a new Trainer afterwards"


class TrainableParameters:
    """The parameters of a model by their location in its modules, including those that another worker holds."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world, self.model = world, model
        self.parts = {name: getattr(model, name) for name in ("encoder", "lstm", "head")} if isinstance(model, Model) else {}
        uncalled = {"model": model, "layers": model.lstm} if isinstance(model, Model) else {}
        self._hooks = {f"the {name} ({type(each).__name__})": [getattr(each, store) for store in HOOKS] for name, each in uncalled.items()}
        self._check_hooks()
        for each in uncalled.values():
            if not type(each).forward.__module__.startswith("carrywave.") or "forward" in vars(each):
                raise UserError(
                    f"the forward of {type(each).__name__} would be ignored: a trainer runs encoder, layers and head itself; move it into "
                    "one of these"
                )
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.places = [
            # TorchScript's parameters are made anew on every access.
            (module._parameters if isinstance(module._parameters, dict) else {key: p}, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]
        # The user may still hold the original of a parameter that this worker gave up; freezing it there must have an effect here.
        self.given_up = [(p, p.stands_for) for _, _, p in self.places if hasattr(p, "stands_for")]
        self.flags, self.forms = self._flags(), self._forms()

    def _check_hooks(self) -> None:
        """Refuse hooks that a trainer would not call, and that might change what is computed."""
        for where, stores in self._hooks.items():
            for hook in [hook for store in stores for hook in store.values()]:
                if isinstance(hook, SpectralNorm):
                    raise UserError(
                        "spectral_norm on the layers is a hook that is not called here; use torch.nn.utils.parametrizations.spectral_norm"
                    )
                if not isinstance(hook, CALLED_HOOKS):
                    raise UserError(f"the hook on {where} would not be called; register it on the encoder, the head or a module in them")

    def changed(self) -> bool:
        """True if other parameters are trained than at the last step. The change must be the same on all workers."""
        if any(map(any, self._hooks.values())):
            self._check_hooks()
        for name, part in self.parts.items():
            if getattr(self.model, name) is not part:
                raise UserError(f"model.{name} was replaced {LATER}")
        for parameter, original in self.given_up:
            held = original()
            if held is not None and held.requires_grad != parameter.requires_grad:
                parameter.requires_grad_(held.requires_grad)
        for store, key, parameter in self.places:
            if store.get(key) is not parameter:
                raise UserError(f"the parameter {self.names[id(parameter)]} was replaced or removed {LATER}")
        if (forms := self._forms()) != self.forms:
            name, was, now = next(each for each in zip(map(self._name, self.places), self.forms, forms, strict=True) if each[1] != each[2])
            shown = (f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in (was, now))
            raise UserError(f"the parameter {name} was {' and is '.join(shown)}; it was converted {LATER}")
        flags = self._flags()
        if flags == self.flags:
            return False
        changed = {self._name(place): now for place, was, now in zip(self.places, self.flags, flags, strict=True) if was != now}
        # Workers that saw no change, or another one, are already entering the step or wait elsewhere, so do not wait for a message.
        if self.world.size > 1 and not all_arrive(self.world, f"requires_grad {sorted(changed.items())}", start_seconds()):
            name = next(iter(changed))
            raise WorkerError(
                f"requires_grad of {name} changed on rank {self.world.rank}, but not on all others; change it on all before a step"
            )
        self.flags = flags
        return True

    def _name(self, place: tuple[object, str, nn.Parameter]) -> str:
        return self.names[id(place[2])]

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for _, _, parameter in self.places]

    def _forms(self) -> list[tuple[torch.dtype, torch.device]]:
        """What `model.float()` or `model.to(...)` would change without replacing a parameter."""
        return [(parameter.dtype, parameter.device) for _, _, parameter in self.places]
