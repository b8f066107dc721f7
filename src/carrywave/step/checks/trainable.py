"""Tracks which parameters are trained: `requires_grad` is read at every step, so that layers can be frozen and unfrozen between steps."""

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


class TrainableParameters:
    """The parameters of a model by their location in its modules, including those that another worker holds."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        self.model, self.parts = model, {name: getattr(model, name) for name in ("encoder", "lstm", "head") if isinstance(model, Model)}
        self._check_hooks()
        for each in [model, model.lstm] if isinstance(model, Model) else []:
            if not type(each).forward.__module__.startswith("carrywave.") or "forward" in vars(each):
                kind = type(each).__name__
                raise UserError(
                    f"the forward of {kind} would be ignored: a trainer runs encoder, layers and head itself; move it into one of these"
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
        self.given_up = [[p, p.stands_for, p.requires_grad] for _, _, p in self.places if hasattr(p, "stands_for")]
        self.forms = [_form(p) for _, _, p in self.places]
        self.flags = self._now()

    def _check_hooks(self) -> None:
        """Refuse hooks that a trainer would not call, and that might change what is computed."""
        for name, each in {"the model": self.model, "the layers": self.parts["lstm"]}.items() if self.parts else ():
            for hook in [hook for store in HOOKS for hook in getattr(each, store).values()]:
                if isinstance(hook, SpectralNorm):
                    raise UserError(
                        "spectral_norm on the layers is a hook that is not called here; use torch.nn.utils.parametrizations.spectral_norm"
                    )
                if not isinstance(hook, CALLED_HOOKS):
                    kind = type(each).__name__
                    raise UserError(
                        f"the hook on {name} ({kind}) would not be called; register it on the encoder, the head or a module in them"
                    )

    def changed(self) -> bool:
        """True if other parameters are trained than at the last step. The change must be the same on all workers."""
        if self.parts:
            self._check_hooks()
        for name, part in self.parts.items():
            if getattr(self.model, name) is not part:
                raise UserError(f"model.{name} was replaced after the trainer was created; create a new Trainer afterwards")
        for (store, key, parameter), form in zip(self.places, self.forms, strict=True):
            if store.get(key) is not parameter:
                gone = self.names[id(parameter)]
                raise UserError(
                    f"the parameter {gone} was replaced or removed after the trainer was created; create a new Trainer afterwards"
                )
            if (parameter.dtype, parameter.shape, parameter.device) != form:
                was, now = (f"{str(dtype)[6:]} {list(shape)} on {device}" for dtype, shape, device in (form, _form(parameter)))
                what = self.names[id(parameter)]
                raise UserError(
                    f"the parameter {what} was {was} when the trainer was created, and is {now} now; create a new Trainer afterwards"
                )
        flags = self._now()
        if flags == self.flags:
            return False
        changed = {self.names[id(p)]: now for (_, _, p), was, now in zip(self.places, self.flags, flags, strict=True) if was != now}
        self._agree(changed)
        self.flags = flags
        return True

    def _now(self) -> list[bool]:
        for each in self.given_up:
            parameter, before, flag = each
            held = before()
            if held is not None and held.requires_grad != flag:
                parameter.requires_grad_(held.requires_grad)
                each[2] = held.requires_grad
        return [parameter.requires_grad for _, _, parameter in self.places]

    def _agree(self, changed: dict[str, bool]) -> None:
        # Workers that saw no change, or another one, are already entering the step or wait elsewhere, so do not wait for a message.
        if self.world.size > 1 and not all_arrive(self.world, f"requires_grad {sorted(changed.items())}", start_seconds()):
            name = next(iter(changed))
            raise WorkerError(
                f"requires_grad of {name} changed on rank {self.world.rank}, but not on all others; change it on all before a step"
            )


def _form(parameter: nn.Parameter) -> tuple[torch.dtype, torch.Size, torch.device]:
    """What `model.float()` or `model.to(...)` would change without replacing the parameter."""
    return parameter.dtype, parameter.shape, parameter.device
