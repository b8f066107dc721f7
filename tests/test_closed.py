"""The closed door: nothing in the sources unpickles, evaluates text, or reads YAML that makes objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from carrywave.spec import yaml_text

SOURCES = sorted((Path(__file__).parents[1] / "src" / "carrywave").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing", "torch.multiprocessing"}
NAMES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "unsafe_load",
    "full_load",
}
CALLS = {"torch.load", "torch.save", "dcp.load", "dcp.save"}
SAFE = {"yaml.load": "Loader=_Loader", "np.load": "allow_pickle=False", "numpy.load": "allow_pickle=False"}  # only with these words
BUILT_IN = {"eval", "exec"}


def forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in MODULES or alias.name == "torch.distributed.checkpoint")
            case ast.ImportFrom(module=str(module), names=names):
                found = {module, *(f"{module}.{alias.name}" for alias in names)}
                yield from found & (MODULES | {"torch.distributed.checkpoint", "torch.load", "torch.save", "yaml.load"})
                yield from {alias.name for alias in names} & NAMES
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if f"{owner}.{name}" in CALLS or name in NAMES:
                yield f"{owner}.{name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), keywords=words) if f"{owner}.{name}" in SAFE:
                if SAFE[f"{owner}.{name}"] not in [ast.unparse(word) for word in words]:
                    yield f"{owner}.{name}"
            case ast.Call(func=ast.Name(id=name)) if name in BUILT_IN | NAMES:
                yield name


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list(x)",
        "torch.load(path)",
        "from torch import load",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path)",
        "import torch.distributed.checkpoint as dcp",
        "eval(text)",
    ],
)
def test_the_search_finds_it(text: str) -> None:
    assert list(forbidden(ast.parse(text)))


def test_nothing_unpickles() -> None:
    assert len(SOURCES) > 100
    assert issubclass(yaml_text._Loader, yaml.SafeLoader)
    found = {path.name: list(forbidden(ast.parse(path.read_text(encoding="utf-8")))) for path in SOURCES}
    assert {name: names for name, names in found.items() if names} == {}
