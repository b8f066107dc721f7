"""Detects what running a module leaves behind in it, and restores the module.

A cache that is filled once, or a result kept for inspection, is not state: a second run on the same inputs leaves it unchanged. A counter,
a running mean or a growing list is state: it changes again.
"""

from __future__ import annotations

import random as python_random
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import IOBase
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.errors import PlanError
from carrywave.parallel.process_state import generators, set_generators
from carrywave.step.checks.own_modules.module_reads import REGISTERED, modules_of, reached_by, variables_read_by
from carrywave.step.checks.own_modules.object_walk import (
    PLAIN,
    TORCHS,
    Cached,
    Met,
    Path,
    attributes_of,
    class_values,
    is_foreign,
    is_users,
    own_classes,
    slots_of,
    walk,
)
from carrywave.step.checks.own_modules.stepwise import GLOBAL_HOOKS, HOOKS

_GENERATORS = (torch.Generator, python_random.Random, np.random.Generator, np.random.RandomState)


def why_not_restorable(roots: Sequence[object]) -> str | None:
    """Why modules cannot be run on trial without leaving a trace; None if they can."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(roots)):
        return "TorchScript does not run on copies of its weights"
    for path, value, _ in reached_by(roots):
        if isinstance(value, Iterator) and is_foreign(type(value).__module__) and not isinstance(value, IOBase):
            return f"what it takes from the {type(value).__name__} in its {path[0]} cannot be put back; take it outside forward"
    return None


class Kept:
    """A copy of the current state of modules, and of what their code and these functions read and may change, to be restored later."""

    def __init__(self, roots: Sequence[object]) -> None:
        self._modules = modules_of(roots)
        self._attributes = [dict(vars(module)) for module in self._modules]
        self._stores = [{name: dict(getattr(module, name)) for name in ("_parameters", "_buffers")} for module in self._modules]
        self._undo: list[Callable[[], object]] = []  # what restores everything else
        for variable in variables_read_by(roots):
            self._undo.append(partial(variable.write, variable.read()))
        for attributes in self._attributes:
            for name in REGISTERED:
                self._undo.append(partial(_refill, attributes[name], dict(attributes[name])))
        for met in reached_by(roots):
            self._keep(met.value)
        self._copies: dict[int, Tensor] = {}
        self._dtype: torch.dtype | None = None

    def _keep(self, value: Any) -> None:
        """Keep what this value itself holds, if that can change. Modules that are not registered run on their own tensors."""
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, _GENERATORS):
            self._undo.append(partial(_set_state, value, _state_of(value)))
        elif isinstance(value, bytearray | array):
            self._undo.append(partial(value.__setitem__, slice(None), value[:]))
        elif isinstance(value, ContextVar):
            with suppress(LookupError):  # it has neither a value nor a default
                self._undo.append(partial(value.set, value.get()))
        elif isinstance(value, Cached) and not value.cache_info().currsize:
            self._undo.append(value.cache_clear)  # what a trial has put into it may hold the trial's numbers
        elif isinstance(value, list | set | deque | dict):
            self._undo.append(partial(_refill, value, dict(value) if isinstance(value, dict) else [*value]))
        if isinstance(value, nn.Module):
            for module in [each for each in value.modules() if each not in self._modules]:
                self._undo.append(partial(_refill, vars(module), dict(vars(module))))
                for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    self._keep_tensor(tensor, trained=True)
        elif isinstance(value, type):
            self._undo.append(partial(_reassign, value, class_values, class_values(value)))
        elif is_users(value) or isinstance(value, FunctionType):
            self._undo.append(partial(_reassign, value, slots_of, slots_of(value)))
            if isinstance(getattr(value, "__dict__", None), dict):
                self._undo.append(partial(_refill, vars(value), dict(vars(value))))

    def _keep_tensor(self, tensor: Tensor, *, trained: bool = False) -> None:
        """`trained`: also a parameter that is trained, of which a trial has no copy."""
        if not tensor.is_meta and not tensor.is_inference() and (trained or not (tensor.requires_grad and tensor.is_leaf)):
            self._undo.append(partial(_rewrite, tensor, tensor._version, tensor.detach().clone()))

    def keep_buffers(self) -> None:
        """Keep the values of buffers too, which may be changed in place."""
        for buffer in [each for module in self._modules for each in module._buffers.values() if each is not None]:
            self._keep_tensor(buffer)

    def copy_tensors(self, dtype: torch.dtype) -> None:
        """Replace parameters and buffers by copies, floating-point ones in this dtype; tied tensors stay tied.

        Gradient hooks are not called meanwhile: those of parameters stay with the originals, and those of modules are removed.
        """
        self._dtype = dtype
        for module in self._modules:
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = self._copy(tensor)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._copies:
            data = tensor.detach().to(self._dtype_of(tensor), copy=True)
            made = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            self._copies[id(tensor)] = made
        return self._copies[id(tensor)]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def rewritten(self, paths: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
        """Parameters and buffers whose values changed, as (module path, name). One that is new or has a new shape is a cache, not state."""
        found: list[tuple[str, str]] = []
        at = {id(module): number for number, module in enumerate(self._modules)}
        for path, module in paths.items():
            for name, before in self._stores[at[id(module)]].items():
                for key, old in before.items():
                    new = getattr(module, name).get(key)
                    if old is not None and new is not None and new.shape == old.shape and not same(old.detach().to(new.dtype), new):
                        found.append((path, key))
        return found

    def put_back(self) -> None:
        """Restore the modules and generators to their original state."""
        for module, attributes in zip(self._modules, self._attributes, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for undo in self._undo:
            undo()


class Left:
    """A record of what modules hold, apart from torch's own attributes, and of the variables that their code reads, at one moment."""

    def __init__(self, paths: Mapping[str, nn.Module], beside: Mapping[str, object]) -> None:
        root = next(iter(paths))
        self._beside = {path: getattr(each, "__self__", each) for path, each in beside.items() if path not in paths}
        self._outside = [(path, variable) for path, each in {root: paths[root], **beside}.items() for variable in variables_read_by([each])]
        own = {id(module) for module in paths.values()}
        reached = [met for met in reached_by([paths[root], *beside.values()]) if isinstance(met.value, nn.Module)]
        self._hidden = {each: (root, met.path[0]) for met in reached for each in met.value.modules() if id(each) not in own}
        self._values = self._now(paths)

    def _now(self, paths: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
        found = _values(paths) | {(path, f"variable {variable.name}"): held(variable.read()) for path, variable in self._outside}
        found[next(iter(paths)), "hooks on all modules"] = held(GLOBAL_HOOKS)
        for module, (path, name) in self._hidden.items():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            found[path, f"{name} ({type(module).__name__})"] = held(tensors)
        return found | {(path, name): held(value) for path, each in self._beside.items() for name, value in attributes_of(each).items()}

    def changed(self, paths: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
        """What differs now, as (module path, attribute)."""
        now = self._now(paths)
        return [at for at in now if at not in self._values or not same(self._values[at], now[at])]


def _values(paths: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in paths.items():
        if type(module).__module__.startswith("carrywave."):
            continue  # our own modules: what they remember does not affect their results
        for name, value in vars(module).items():
            if name in ("_buffers", "_parameters"):
                found |= {(path, inner): held(tensor) for inner, tensor in value.items()}
            elif name not in TORCHS or name in HOOKS:
                found[path, name] = held(value)
        for kind in own_classes(type(module)):
            found |= {
                (path, f"class attribute {kind.__name__}.{name}"): held(value)
                for name, value in sorted(class_values(kind).items(), key=_is_code)
            }
    return found


def _is_code(attribute: tuple[str, Any]) -> bool:
    """True for a method, which may hold a value of its own, and leads to all others."""
    return isinstance(attribute[1], FunctionType | property | staticmethod | classmethod)


def held(value: Any) -> dict[Path, Any]:
    """A copy of a value and of all that it holds, for later comparison."""
    return {met.path: _copy_of(met.value) for met in walk([Met((), value)])}


def _copy_of(value: Any) -> Any:
    """A copy of a value without what it holds; None if there is nothing to compare."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, bytearray | array):
        return bytes(value)
    if isinstance(value, _GENERATORS):
        state = _state_of(value)
        return state if isinstance(state, Tensor) else str(state)
    if isinstance(value, list | tuple | set | frozenset | deque | Mapping):
        return len(value)
    return value if isinstance(value, PLAIN) else None


def same(one: Any, other: Any) -> bool:
    """True if two values as `held` makes them are alike."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_meta or other.is_meta:
            return True  # a weight that another stage holds
        return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other or one != one)


def _refill(container: Any, before: Any) -> None:
    """Give a container its content back. Some cannot be filled, and do not change."""
    now, then = ([*each, *each.values()] if isinstance(each, dict) else [*each] for each in (container, before))
    if [*map(id, now)] != [*map(id, then)]:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _reassign(holder: Any, fields: Callable[[Any], dict[str, Any]], before: dict[str, Any]) -> None:
    """Give a class or an object with slots its fields back."""
    now = fields(holder)
    for name in now.keys() - before.keys():
        delattr(holder, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(holder, name, value)


def _rewrite(tensor: Tensor, version: int, before: Tensor) -> None:
    """Give a tensor its values back, unless they are unchanged. torch's counter does not see what is written through `.data` or numpy."""
    if tensor._version != version or not same(tensor.detach(), before):
        with torch.no_grad():
            tensor.copy_(before)


def _state_of(generator: Any) -> Any:
    """The state of a random generator of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, python_random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, python_random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def same_generators(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """True if nothing was drawn between these two states."""
    same_host = torch.equal(one[0], other[0]) and (one[1] is None or torch.equal(one[1], other[1])) and one[2] == other[2]
    return same_host and bool(np.array_equal(one[3][1], other[3][1])) and one[3][2:] == other[3][2:]


@contextmanager
def untouched(roots: Sequence[object], device: torch.device, dtype: torch.dtype) -> Iterator[Kept]:
    """Run modules, and functions that are used with them, on copies of their tensors inside this context, and restore them afterwards.

    Their warnings are suppressed, because the step itself will repeat them.
    """
    if (why := why_not_restorable(roots)) is not None:
        raise PlanError(why)
    kept, states = Kept(roots), generators(device)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        # Eager: the probe's shapes and dtypes do not recur, and the compiler gives up on a module after a number of recompilations.
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            kept.copy_tensors(dtype)
            yield kept
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        kept.put_back()
        set_generators(states, device)
