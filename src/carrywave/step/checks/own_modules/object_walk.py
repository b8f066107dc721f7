"""Walks through what a user's modules hold: the one set of rules for what is entered, what is a leaf, and how far the walk goes."""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cache, partial, partialmethod, singledispatchmethod
from itertools import islice
from threading import local
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

_FOREIGN = frozenset({"torch", "carrywave", "numpy", "builtins"}) | sys.stdlib_module_names
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
TORCHS = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights"}  # attributes of modules that are torch's own affair
Cached = _lru_cache_wrapper  # a function with functools.cache or lru_cache
_LEAVES = (*PLAIN, Tensor, np.ndarray, nn.Module, ModuleType, BuiltinFunctionType)
_SEQUENCES = (list, tuple, set, frozenset, deque)
GROUPS = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, local)  # Python's classes that only group values of the user's
_DEPTH, _MOST = 6, 256  # how deep to descend, and how many members of each to visit
_MOST_HOLDING = 1 << 14  # members of each that are visited if they are tensors, containers or objects, which may change

Path = tuple[Any, ...]  # names of attributes, keys and numbers, from a root


class Met(NamedTuple):
    """A value that was met on the way."""

    path: Path
    value: Any
    within: Path | None = None  # the outermost list, set or deque that it is or lies in: what is in those comes and goes


def walk(roots: Iterable[Met], *, foreign: bool = True, seen: dict[int, Any] | None = None) -> Iterator[Met]:
    """Yield these values and what they hold in turn, nearest first, every object once. Modules are not entered.

    `foreign`: also enter objects of torch, numpy and Python, unless they are callable. `seen`: what was met before, and is now.
    """
    seen = {} if seen is None else seen  # it keeps values alive, so that no identity is used again
    waiting = deque((met, _DEPTH) for met in roots)
    while waiting:
        met, depth = waiting.popleft()
        path, value, within = met
        if not isinstance(value, PLAIN):
            if id(value) in seen:
                continue
            seen[id(value)] = value
        if within is None and isinstance(value, list | set | frozenset | deque):
            within = path
        yield Met(path, value, within)
        if depth and not isinstance(value, _LEAVES):
            waiting += [(Met((*path, name), each, within), depth - 1) for name, each in _members(value, foreign=foreign)]


def is_foreign(name: str | None) -> bool:
    """True for what is neither the user's nor from a library that knows nothing of us, by the name of its file's module."""
    return str(name).partition(".")[0] in _FOREIGN


def _own_classes(kind: type) -> list[type]:
    """The user's classes that a class is made of."""
    return [each for each in kind.__mro__ if not is_foreign(each.__module__)]


own_classes: Callable[[type], list[type]] = cache(_own_classes)  # asked for every module at every step


def is_users(value: object) -> bool:
    """True for a class of the user's, an object of one, or one that only groups values of the user's."""
    return not is_foreign((value if isinstance(value, type) else type(value)).__module__) or isinstance(value, GROUPS)


def class_values(kind: type) -> dict[str, Any]:
    """The attributes of a class of the user's, without what Python adds to its methods and values."""
    own = {} if is_foreign(kind.__module__) else vars(kind)
    return {name: value for name, value in own.items() if not name.startswith("__") or isinstance(value, FunctionType)}


def slots_of(value: Any) -> dict[str, Any]:
    """What is in the slots of an object."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)}


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in slots and attributes."""
    return {**slots_of(value), **getattr(value, "__dict__", {})}


def _members(value: Any, *, foreign: bool) -> Iterable[tuple[Any, Any]]:
    """What a function, a class, a container or an object holds: of a sequence the last, of all else the first."""
    inside: Mapping[Any, Any] = {}
    if isinstance(value, FunctionType):
        inside = dict(enumerate((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *(value.__closure__ or ()))))
        inside |= vars(value)
    elif isinstance(value, CellType):
        inside = {} if value == CellType() else {"value": value.cell_contents}  # empty: not assigned yet
    elif isinstance(value, MethodType | staticmethod | classmethod):
        inside = {"function": value.__func__, "self": getattr(value, "__self__", None)}
    elif isinstance(value, ContextVar):
        inside = {"value": value.get(None)}
    elif isinstance(value, property):
        inside = {"get": value.fget, "set": value.fset}
    elif isinstance(value, singledispatchmethod):
        inside = {"function": value.func, "dispatcher": value.dispatcher}
    elif isinstance(value, partial | partialmethod):
        inside = {"function": value.func, "arguments": value.args, **value.keywords}
    elif isinstance(value, Cached):
        inside = {"function": value.__wrapped__, **dict(enumerate(_results_of(value)))}
    elif isinstance(value, type):
        inside = {**class_values(value), "__bases__": value.__bases__} if is_users(value) else {}
    elif isinstance(value, Mapping):
        inside = value
    elif isinstance(value, _SEQUENCES):
        last = [*value][-_MOST_HOLDING:]
        return _most(reversed([*enumerate(last, start=len(value) - len(last))]))
    if (is_users(value) and not isinstance(value, type)) or (foreign and not inside and not callable(value)):
        inside = {**inside, **attributes_of(value), "__class__": type(value)}
    return _most(islice(inside.items(), _MOST_HOLDING))


def _results_of(function: Cached[Any]) -> list[Any]:
    """What a function with a cache may return again, and, if the cache has a limit, what it was called with.

    Python hands out neither, but the garbage collector is told. The dict in which they are kept is left out: nobody else may change it.
    """
    aside = (vars(function), function.__wrapped__)
    known = [each for each in gc.get_referents(function) if not isinstance(each, type) and not any(each is other for other in aside)]
    if function.cache_parameters()["maxsize"] is None:
        return [result for each in known if isinstance(each, dict) for result in each.values()]
    return [
        each for each in known if not (isinstance(each, dict) and any(type(link).__name__ == "_lru_list_elem" for link in each.values()))
    ]


def _most(members: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The first of these members, and of the others those that may hold something."""
    return (each for number, each in enumerate(members) if number < _MOST or not isinstance(each[1], PLAIN))
