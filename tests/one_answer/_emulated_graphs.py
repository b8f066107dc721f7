"""CUDA graphs on the CPU, for tests: what is recorded does not run, and a replay runs the same operations on the same tensors.

Operations are seen below autograd, as a GPU sees them. Whatever a recording wrote to tensors that were there before is taken back
when it ends. Reading a value on the host is an error while something is recorded, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from carrywave.kernels.torch_kernels import without_onednn


class Graph:
    """A list of operations."""

    replays = 0  # of all graphs

    def __init__(self) -> None:
        # Operation, arguments, where results are put, whether oneDNN could be used, which rounds otherwise, and whether gradients were on,
        # for which it keeps more.
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]], bool, bool]] = []
        self.replayed = 0

    def replay(self) -> None:
        """Run them again, each with its results in the place where it put them when it was recorded."""
        self.replayed += 1
        Graph.replays += 1
        with torch.no_grad():
            for call, args, kwargs, results, onednn, gradients in self.calls:
                with contextlib.nullcontext() if onednn else without_onednn(), torch.set_grad_enabled(gradients):
                    found = tree_leaves(call(*args, **kwargs))
                for place, tensor in results:
                    tensor.copy_(found[place])


class Recording(TorchDispatchMode):
    """Writes down what is run within it."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what was overwritten, by its storage
        self.made: set[int] = set()  # storages that belong to the recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for name, value in [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]:
            argument = next(a for a in func._schema.arguments if a.name == name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        storages = {_storage(tensor) for tensor in given}
        new = [
            (place, tensor)
            for place, tensor in enumerate(tree_leaves(result))
            if isinstance(tensor, Tensor) and _storage(tensor) not in storages
        ]
        self.made |= {_storage(tensor) for _, tensor in new}
        if new or func._schema.is_mutable:
            flags = torch.backends.mkldnn.enabled, torch.is_grad_enabled()
            self.graph.calls.append((func, *tree_map(_bare, (tuple(args), kwargs, new)), *flags))
        return result

    def _keep(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and _storage(tensor) not in self.made and _storage(tensor) not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[_storage(tensor)] = whole, whole.clone()

    def take_back(self) -> None:
        """Undo what ran."""
        for whole, old in self.before.values():
            whole.copy_(old)


def _bare(leaf: Any) -> Any:
    """A tensor without its history, which a replay knows nothing of."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def _recorded(graph: Graph, **options: object) -> Iterator[None]:
    assert options["capture_error_mode"] == "thread_local"
    recording = Recording(graph)
    try:
        with recording:
            yield
    except BaseException:
        raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  # as the end of a capture does
    finally:
        recording.take_back()


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this in the place of torch's graphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", _recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
