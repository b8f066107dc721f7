"""What a user's modules reach: what they hold beside their tensors, and what their code reads from outside of them, which is globals of
files and variables of the functions around it.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from operator import attrgetter, methodcaller
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from carrywave.step.checks.own_modules.object_walk import Cached, Met, is_foreign, is_users, own_classes, walk
from carrywave.step.checks.own_modules.stepwise import GLOBAL_HOOKS, HOOKS, METHODS

REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of modules
# What code uses that reads more than it names.
_BY_ANY_NAME = frozenset({"getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "__getstate__", "eval", "exec"})
_BY_ANY_NAME |= {"attrgetter", "methodcaller", "getmembers", "getmembers_static", "getattr_static", "asdict", "astuple"}
_READERS = (getattr, hasattr, vars, dir, eval, exec, attrgetter, methodcaller)  # under any name
_MOST_FUNCTIONS = 500  # to look into
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Variable(NamedTuple):
    """A variable that code reads: a name in the globals of a file, or a cell of a closure."""

    name: str
    holder: dict[str, Any] | CellType

    def read(self) -> Any:
        """The value now; None if there is none."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name)
        try:
            return self.holder.cell_contents
        except ValueError:
            return None  # not assigned yet

    def write(self, value: Any) -> None:
        """Assign the value."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


def variables_read_by(roots: Sequence[object]) -> list[Variable]:
    """Those that the code of these modules and functions reads, and the functions of the user's that it calls.

    Files, and functions and classes of others, are not values.
    """
    found: dict[tuple[int, str], Variable] = {}
    seen: set[int] = set()
    waiting = [function for root in [*roots, *GLOBAL_HOOKS] for function in _functions(root)]
    while waiting:
        function = waiting.pop()
        if id(function.__code__) in seen or _is_installed(function.__globals__):
            continue
        seen.add(id(function.__code__))
        names = _names(function.__code__)
        read = [Variable(name, function.__globals__) for name in _global_names(function.__code__) if name in function.__globals__]
        read += [Variable(name, cell) for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)]
        files = [each for variable in read if isinstance(each := variable.read(), ModuleType) and not _is_installed(vars(each))]
        read += [Variable(name, vars(each)) for each in files for name in names if name in vars(each)]
        for variable in read:
            value = variable.read()
            if isinstance(value, FunctionType | MethodType | Cached | nn.Module):
                waiting += _functions(value)
            if not isinstance(value, ModuleType | BuiltinFunctionType) and not _is_others(value):
                found[id(variable.holder), variable.name] = variable
    return list(found.values())


def reached_by(roots: Sequence[object]) -> Iterator[Met]:
    """What modules and functions reach other than by registered parameters, buffers and modules."""
    modules = modules_of(roots)
    held = [Met((name,), value) for module in modules for name, value in vars(module).items() if name not in REGISTERED]
    held += [Met((kind.__name__,), kind) for module in modules for kind in own_classes(type(module))]
    held += [Met(("loss",), each) for each in roots if not isinstance(each, nn.Module)]
    held += [Met(("hooks",), hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()]
    held += [Met((variable.name,), variable.read()) for variable in variables_read_by(roots)]
    return walk(held, foreign=False)


def attributes_read_by(roots: Sequence[object]) -> set[str] | None:
    """The names that code which a step may run reads, of attributes of these modules among them; None if that cannot be told.

    A method, and what an attribute holds, count if their name is read in turn: what only a user's loop calls does not.
    """
    modules = modules_of(roots)
    members: dict[str, list[Any]] = defaultdict(list)
    names = {*METHODS, *HOOKS}
    for kind in {kind for module in modules for kind in type(module).__mro__} - {*nn.Module.__mro__}:
        for name, value in vars(kind).items():
            if is_foreign(kind.__module__):
                names |= _names(value.__code__) if isinstance(value, FunctionType) else set()
            elif name != "__init__":
                members[name].append(value.func if isinstance(value, cached_property) else value)
                names |= {name} if name.startswith("__") and isinstance(value, FunctionType) else set()
    for module in modules:
        for name, value in vars(module).items():
            members[name].append(value)
    hooks = [getattr(p, store, None) for module in modules for p in module.parameters(recurse=False) for store in _HOOKS_OF_TENSORS]
    waiting = [*roots, *GLOBAL_HOOKS, *hooks, *(value for name in names for value in members.get(name, ()))]
    seen: set[int] = set()
    while waiting:
        for met in walk([Met((), waiting.pop())], foreign=False):
            reads_any = any(met.value is each for each in _READERS) or isinstance(met.value, attrgetter | methodcaller)
            if len(seen) > _MOST_FUNCTIONS or is_library(met.value) or reads_any:
                return None  # it may be given a module
            code = getattr(met.value, "__code__", None)
            if code is None or id(code) in seen or is_foreign(met.value.__module__):
                continue
            seen.add(id(code))
            read = _read_in(code)
            if read & _BY_ANY_NAME:
                return None
            waiting += [value for name in read - names for value in members.get(name, ())]
            files = [met.value.__globals__]
            files += [vars(each) for name in read if isinstance(each := files[0].get(name), ModuleType) and not is_foreign(each.__name__)]
            waiting += [file[name] for file in files for name in read if name in file]
            names |= read
    return names


def is_unread(owner: object, name: str, read: set[str] | None) -> bool:
    """True for an attribute of a module of the user's that no code of a step reads, such as a history; `read` is what that code reads."""
    return read is not None and name not in read and is_users(owner)


def is_library(value: object) -> bool:
    """True for a file or an object of a library that knows nothing of us; modules, functions and classes are looked into."""
    if isinstance(value, nn.Module | FunctionType | MethodType | type):
        return False
    name = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
    return not is_foreign(name) and "site-packages" in str(getattr(sys.modules.get(name), "__file__", ""))


@cache
def _read_in(code: CodeType) -> frozenset[str]:
    """The names that code and the functions inside it read, and all words in it, since one may be the name of an attribute."""
    read = {each.argval for each in dis.get_instructions(code) if each.opcode in dis.hasname and not each.opname.startswith("STORE")}
    for each in code.co_consts:
        read |= {word for word in (each if isinstance(each, tuple) else (each,)) if isinstance(word, str)}
        read |= _read_in(each) if isinstance(each, CodeType) else set()
    return frozenset(read)


def modules_of(roots: Sequence[object]) -> list[nn.Module]:
    """The modules among these, and those in them."""
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _is_installed(file: dict[str, Any]) -> bool:
    """True for the globals of a library's file: what it keeps there is its own affair."""
    return is_foreign(file.get("__name__")) or "site-packages" in str(file.get("__file__"))


def _is_others(value: object) -> bool:
    """True for a class or a function that is not the user's."""
    if isinstance(value, FunctionType):
        return _is_installed(value.__globals__)
    return isinstance(value, type) and is_foreign(value.__module__)


def _names(code: CodeType) -> set[str]:
    """The names that code and the functions inside it read, those of attributes among them."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _global_names(code: CodeType) -> set[str]:
    """The names of globals that code and the functions inside it read."""
    own = {each.argval for each in dis.get_instructions(code) if "_GLOBAL" in each.opname or each.opname.endswith("_NAME")}
    return own.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _functions(root: object) -> Iterator[FunctionType]:
    """The code of a function, or of a module and its submodules: methods, and all functions that they hold, such as hooks."""
    roots = [root, *(vars(type(root)).values() if is_users(root) else ())]
    if isinstance(root, nn.Module):
        modules = list(root.modules())
        roots = [value for module in modules for kind in (module, *own_classes(type(module))) for value in vars(kind).values()]
    return (met.value for met in walk(Met((), value) for value in roots) if isinstance(met.value, FunctionType))
