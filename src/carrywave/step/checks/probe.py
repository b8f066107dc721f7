"""Runs a user's module on a few lanes and steps, once whole and once in parts, and reports where the results differ.

The parts are cut along time (like chunks) or lanes (like replicas and micro-batches). Outputs, loss, count and gradients must concatenate
or add up to the whole. One call must leave nothing behind for the next: no changed buffers or attributes, no draws from a generator that
is not keyed.

The probe leaves no trace. While it runs, parameters and buffers are copies, in float64 where the module's code allows it, so that rounding
is not mistaken for a difference; attributes and generators are restored afterwards.

Shapes: T time, B lane, W width of the head's input.
"""

from __future__ import annotations

import random as python_random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from carrywave.data.batch import IGNORED
from carrywave.kernels import random
from carrywave.model.stage import checked_score
from carrywave.model.state import Chunk, State
from carrywave.step.checks.module_traces import Kept, Left
from carrywave.step.checks.probe_sample import Axis, Piece, ProbeSample

DOUBLE_UP_TO = 1 << 26  # most parameters to copy as float64; larger models keep their dtype
# Tolerances: of results, relative to their largest element, and of a loss. Even in a float64 run a module may compute in float32
# internally, where a sum of some hundred terms in a different order is off by at most 1e-6.
IN_DOUBLE, AS_IT_IS = (1e-5, 2e-6), (1e-3, 1e-4)

Fault = Literal["draws", "state", "output", "loss", "gradient"]


class Finding(NamedTuple):
    """A way in which a module's result depends on how the work is split."""

    fault: Fault
    path: str  # the module's name in the model
    kind: str  # its class
    detail: str = ""
    axis: Axis | None = None  # axis along which the parts differ from the whole


@dataclass
class Ran:
    """The results of a run: outputs of each piece, loss and count of each, and gradients of the parameters by name and of the input."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


Run = Callable[[ProbeSample, Sequence[Piece]], Ran]


def encoder(module: nn.Module, path: str) -> Run:
    """Make a runner for an encoder. Its output is differentiated with weights that differ by step and lane."""

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        for first, end, low, high in pieces:
            with random.scope(sample.key, sample.lanes[low:high], first):
                out = module(sample.x[first:end, low:high])
            ran.outputs.append([out])
            if out.requires_grad:
                weights = torch.cos(torch.arange(first, end, device=out.device))[:, None] + torch.arange(low, high, device=out.device)
                weights = weights.reshape(*weights.shape, *[1] * (out.dim() - 2)).to(out.dtype)
                _add(ran, _gradients((out * weights).sum(), module, path))
        return ran

    return run


def head(module: Any, path: str, *, pooled: bool) -> Run:
    """Make a runner for a head: its loss, its output if it has one, and the gradients of its parameters and its input."""
    shows = type(module).forward is not nn.Module.forward

    def score(sample: ProbeSample, read: Any, at: Piece, ran: Ran) -> None:
        with random.scope(sample.key, sample.lanes[at.low : at.high], 0 if pooled else at.first, pooled=pooled):
            if shows:
                ran.outputs.append([leaf.detach() for leaf in tree_leaves(module(read)) if isinstance(leaf, Tensor)])
            if sample.targets is None:
                return
            own = sample.targets[at.low : at.high] if pooled else sample.targets[at.first : at.end, at.low : at.high]
            ran.sums.append(checked_score(module.loss(read, own), f"loss of the head {type(module).__name__}"))

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        y = sample.y.detach().requires_grad_()
        if not pooled:
            for at in pieces:
                score(sample, y[at.first : at.end, at.low : at.high], at, ran)
        else:
            for low, high in dict.fromkeys((at.low, at.high) for at in pieces):
                acc = module.start(high - low, y.dtype, y.device)
                for at in [each for each in pieces if (each.low, each.high) == (low, high)]:
                    lengths = (sample.lengths[low:high] - at.first).clamp(0, at.end - at.first)
                    acc = module.pool(y[at.first : at.end, low:high], lengths, acc)
                score(sample, acc, Piece(0, y.shape[0], low, high), ran)
        if ran.sums and torch.is_grad_enabled():
            _add(ran, _gradients(torch.stack([total for total, _ in ran.sums]).sum(), module, path, y))
        return ran

    return run


def piecewise(module: Any, path: str) -> Run:
    """Make a runner for a one-piece model, whose loss reads its output. It is cut along lanes only, and its outputs are not compared."""

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        for at in pieces:
            own = slice(at.low, at.high)
            chunk = Chunk(sample.lengths[own], None, sample.lanes[own], 0, sample.key)
            out, _, state = module(sample.x[:, own], State(()), chunk)
            if sample.targets is not None:
                ran.sums.append(module.loss(out, state, sample.targets[own] if module.pooled else sample.targets[:, own], chunk))
        if ran.sums and torch.is_grad_enabled():
            _add(ran, _gradients(torch.stack([total for total, _ in ran.sums]).sum(), module.module, path))
        return ran

    return run


def probe(run: Run, root: nn.Module, path: str, sample: ProbeSample, axes: Sequence[Axis]) -> list[Finding]:
    """The faults found, plainest first; none if the module cannot be run this way, since the step itself will then report why."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        return []  # compiled for its own dtypes
    with suppress(Exception):  # a lazy module has no parameters yet
        few = sum(parameter.numel() for parameter in root.parameters()) <= DOUBLE_UP_TO
        own = next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.float32)
        for dtype in dict.fromkeys([torch.float64, own] if few else [own]):
            tolerances = IN_DOUBLE if dtype == torch.float64 else AS_IT_IS
            with suppress(Exception), untouched(root, sample.x.device, dtype) as kept:
                return _Probe(run, root, path, sample.to(dtype), kept, tolerances).findings(axes)
    return []


class _Probe:
    def __init__(self, run: Run, root: nn.Module, path: str, sample: ProbeSample, kept: Kept, tolerances: tuple[float, float]) -> None:
        self.run, self.root, self.path, self.sample, self.kept = run, root, path, sample, kept
        self.tolerance, self.of_loss = tolerances
        self.modules = {f"{path}.{name}" if name else path: module for name, module in root.named_modules()}
        self.names = {id(module): name for name, module in self.modules.items()}
        self.random = _generators(sample.x.device)

    def findings(self, axes: Sequence[Axis]) -> list[Finding]:
        found: list[Finding] = []
        for training in (True, False):
            self.root.train(training)
            with torch.set_grad_enabled(training):
                whole = self._run([self.sample.all])
                if training and (found := self._draws() + self._leaves()):
                    return found  # this alone makes two runs differ, so comparing them would be pointless
                for axis in axes:
                    pieces = self.sample.pieces(axis)
                    if len(pieces) > 1 and all(each.axis != axis for each in found):
                        found += (training and self._of_nothing(pieces, axis)) or self._differences(whole, pieces, axis)
        return found

    def _run(self, pieces: Sequence[Piece]) -> Ran:
        """Run from the same random state each time."""
        _set_generators(self.random, self.sample.x.device)
        return self.run(self.sample, pieces)

    def _finding(self, fault: Fault, path: str, detail: str = "", axis: Axis | None = None) -> Finding:
        return Finding(fault, path, type(self.modules.get(path, self.root)).__name__, detail, axis)

    def _draws(self) -> list[Finding]:
        """Report a module that draws from a generator that is not keyed: the innermost one."""
        device = self.sample.x.device
        if _same_generators(self.random, _generators(device)):
            return []
        drawing: list[str] = []
        before: list[tuple[Any, int]] = []

        def enter(module: nn.Module, given: Any) -> None:
            before.append((_generators(device), len(drawing)))

        def leave(module: nn.Module, given: Any, out: Any) -> None:
            state, seen = before.pop()
            if len(drawing) == seen and id(module) in self.names and not _same_generators(state, _generators(device)):
                drawing.append(self.names[id(module)])

        with _hooked(enter, leave):
            self._run([self.sample.all])
        return [self._finding("draws", drawing[0] if drawing else self.path)]

    def _leaves(self) -> list[Finding]:
        """Report state that a run leaves behind for the next: whatever a second run on the same inputs changes again."""
        found = self.kept.rewritten(self.modules)
        if not found:
            left = Left(self.modules)
            self._run([self.sample.all])
            found = left.changed(self.modules)
        return [self._finding("state", path, attribute) for path, attribute in found[:1]]

    def _of_nothing(self, pieces: Sequence[Piece], axis: Axis) -> list[Finding]:
        """Compare the loss with all targets masked: only added terms such as penalties remain, which rounding of a full loss might hide."""
        targets = self.sample.targets
        if targets is None:
            return []
        absent = torch.isnan(targets) if targets.is_floating_point() else targets == IGNORED
        if targets.is_cuda and not bool(absent.any()):
            return []  # a head that does not handle masked targets may trigger a device-side assertion, which kills the process
        kept = self.sample
        self.sample = replace(kept, targets=torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORED))
        try:
            one, several = (_total(self._run(each).sums, 0) for each in ([kept.all], pieces))
        except Exception:
            return []  # it does not handle masked targets
        finally:
            self.sample = kept
        return self._of_sums("loss without targets", one, several, axis) if one.isfinite() and several.isfinite() else []

    def _of_sums(self, what: str, one: Tensor, several: Tensor, axis: Axis) -> list[Finding]:
        if not self._differ(one, several, float(one.abs()) * self.of_loss / self.tolerance):
            return []
        return [self._finding("loss", self.path, f"{what} of {float(one):.6g} as a whole but {float(several):.6g} in parts", axis)]

    def _differences(self, whole: Ran, pieces: Sequence[Piece], axis: Axis) -> list[Finding]:
        parts, other = self._run(pieces), self.sample.x.shape[1 if axis == "time" else 0]
        for number, output in enumerate(whole.outputs[0] if whole.outputs else []):
            own = [each[number] for each in parts.outputs]
            joined = own if len(own) == 1 else _joined(output, own, other)  # a head that pools over time gives a single output
            if all(self._differ(output, each) for each in joined) and (joined or not whole.sums):
                return [self._finding("output", self._culprit(pieces, axis), "", axis)]
        for number, what in enumerate(("loss", "target count")) if whole.sums else ():
            found = self._of_sums(what, _total(whole.sums, number), _total(parts.sums, number), axis)
            if found:
                inner = self._culprit(pieces, axis)
                return found if inner == self.path else [self._finding("output", inner, "", axis)]
        scale = max((float(each.abs().max()) for each in whole.gradients.values() if each is not None and each.numel()), default=0.0)
        for name, gradient in whole.gradients.items():
            summed = parts.gradients.get(name)
            if gradient is not None and summed is not None and self._differ(gradient, summed, scale):
                return [self._finding("gradient", name.rpartition(".")[0] or self.path, name, axis)]
        return []

    def _differ(self, one: Tensor, other: Tensor, scale: float | None = None) -> bool:
        if one.shape != other.shape:
            return True
        if not one.is_floating_point():
            return not torch.equal(one, other)
        a, b = (tensor.detach().double().nan_to_num(0.0, 0.0, 0.0) for tensor in (one, other))
        if not a.numel():
            return False
        return bool((a - b).abs().max() > self.tolerance * (float(a.abs().max()) if scale is None else scale) + 1e-300)

    def _culprit(self, pieces: Sequence[Piece], axis: Axis) -> str:
        """The innermost module whose outputs differ: the first to finish among those whose partial outputs can be joined again."""
        ran: list[dict[str, list[list[Tensor]]]] = []
        for several in ([self.sample.all], list(pieces)):
            calls: dict[str, list[list[Tensor]]] = {}

            def leave(module: nn.Module, given: Any, out: Any, calls: dict[str, list[list[Tensor]]] = calls) -> None:
                if id(module) in self.names:
                    leaves = [leaf.detach() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                    calls.setdefault(self.names[id(module)], []).append(leaves)

            with _hooked(None, leave):
                self._run(several)
            ran.append(calls)
        whole, parts = ran
        count, (steps, lanes) = len(pieces), self.sample.x.shape[:2]
        for name, own in whole.items():
            others = parts.get(name, [])
            if len(others) != count * len(own):
                continue
            for number, leaves in enumerate(own):
                for leaf, *cut in zip(leaves, *(others[at * len(own) + number] for at in range(count)), strict=False):
                    joined = _joined(leaf, cut, lanes if axis == "time" else steps)
                    if joined and all(self._differ(leaf, each) for each in joined):
                        return name
        return self.path


def _joined(whole: Tensor, parts: Sequence[Tensor], other: int) -> list[Tensor]:
    """The ways in which the parts can be concatenated to the whole.

    `other` is the size of the uncut axis, which may have been flattened together with the cut one.
    """
    found: list[Tensor] = []
    for dim in range(whole.dim()):
        rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts if part.dim() == whole.dim()]
        sizes = [part.shape[dim] for part in parts if part.dim() == whole.dim()]
        if len(sizes) < len(parts) or any(each != (*whole.shape[:dim], *whole.shape[dim + 1 :]) for each in rest):
            continue
        if sum(sizes) == whole.shape[dim]:
            found.append(torch.cat(list(parts), dim=dim))
            if all(size % other == 0 for size in sizes):
                found.append(torch.cat([torch.unflatten(part, dim, (other, -1)) for part in parts], dim=dim + 1).flatten(dim, dim + 1))
    return found


def _total(sums: Sequence[tuple[Tensor, Tensor]], number: int) -> Tensor:
    """The sum of the losses (0) or counts (1)."""
    return torch.stack([each[number].detach().double() for each in sums]).sum()


def _gradients(total: Tensor, root: nn.Module, path: str, y: Tensor | None = None) -> dict[str, Tensor | None]:
    if not total.requires_grad:
        return {}
    trained = {f"{path}.{name}": p for name, p in root.named_parameters() if p.requires_grad}
    wanted = [*trained.values(), *([] if y is None else [y])]
    if not wanted:
        return {}
    return dict(zip([*trained, "its input"], torch.autograd.grad(total, wanted, allow_unused=True), strict=False))


def _add(ran: Ran, gradients: dict[str, Tensor | None]) -> None:
    for name, gradient in gradients.items():
        before = ran.gradients.get(name)
        dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        ran.gradients[name] = dense if before is None else before if dense is None else before + dense


@contextmanager
def _hooked(enter: Callable[..., None] | None, leave: Callable[..., None]) -> Iterator[None]:
    hooks = nn.modules.module
    handles = [hooks.register_module_forward_hook(leave)]
    if enter is not None:
        handles.append(hooks.register_module_forward_pre_hook(enter))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators(device: torch.device) -> tuple[Any, ...]:
    """The state of every global random generator."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, python_random.getstate(), np.random.get_state(legacy=True)


def _set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    host, cuda, plain, numpy = states
    torch.set_rng_state(host)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    python_random.setstate(plain)
    np.random.set_state(numpy)


def _same_generators(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    same_host = torch.equal(one[0], other[0]) and (one[1] is None or torch.equal(one[1], other[1])) and one[2] == other[2]
    return same_host and bool(np.array_equal(one[3][1], other[3][1])) and one[3][2:] == other[3][2:]


@contextmanager
def untouched(root: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Kept]:
    """Run the module on copies of its tensors inside this context, and restore it afterwards.

    Its warnings are suppressed, because the step itself will repeat them.
    """
    kept, states = Kept(root), _generators(device)
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
        _set_generators(states, device)
