"""Runs a user's module once whole and once in pieces, and reports where the results differ.

The pieces are cut along time (like chunks), along lanes (like replicas and micro-batches), or both. Outputs, loss, count and gradients must
concatenate or add up to the whole. One call must leave nothing behind for the next: no changed buffers or attributes, no draws from a
generator that is not keyed.

The probe leaves no trace. While it runs, parameters and buffers are copies, in float64 where the module's code allows it, so that rounding
is not mistaken for a difference; attributes and generators are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from traceback import clear_frames
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from carrywave.data.batch import IGNORED
from carrywave.parallel.process_state import generators, set_generators
from carrywave.step.checks.own_modules.cuts import Axis, Cut, joined
from carrywave.step.checks.own_modules.module_reads import modules_of
from carrywave.step.checks.own_modules.module_runs import Ran, Run
from carrywave.step.checks.own_modules.module_traces import Kept, Left, same, same_generators, untouched
from carrywave.step.checks.own_modules.probe_sample import ProbeSample, is_absent
from carrywave.step.checks.own_modules.stepwise import stepwise
from carrywave.step.precision import HALVES, autocast

DOUBLE_UP_TO = 1 << 26  # most parameters to copy as float64; larger models keep their dtype
# Tolerances: of results, relative to their largest element, and of a loss. Even in a float64 run a module may compute in float32
# internally, where sums in a different order are off by some 1e-6. Half precision has 8 or 11 bits.
IN_DOUBLE, AS_IT_IS, IN_HALVES = (1e-5, 5e-6), (1e-3, 1e-4), (2**-5, 2**-7)

LARGE = 1e3  # a gradient is also compared as large as this times the usual, because some modules clip it
LEAST_SHARE = 1e-2  # of the largest element of an output; smaller features are compared as if they were as large as this

Fault = Literal["draws", "state", "in place", "output", "loss", "gradient", "raises", "fails", "unknown", "recompute", "shared"]


class Finding(NamedTuple):
    """A way in which a module's result depends on how the work is split, or why that is not known."""

    fault: Fault
    path: str  # the module's name in the model
    kind: str  # its class
    detail: str = ""
    axis: Axis | None = None  # what is cut where the pieces differ from the whole
    cause: Exception | None = None  # what the module raised


def probe(run: Run, root: nn.Module, path: str, sample: ProbeSample, cuts: Sequence[Cut], how: Trial) -> list[Finding]:
    """The faults found, plainest first. Of a module that raises on the whole sample, in every dtype, nothing is known."""
    if any(getattr(module, "rows", None) is not None for module in root.modules()):
        return [Finding("unknown", path, type(root).__name__, "it shares the rows of a vocabulary with other replicas")]
    own = next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.float32)
    roots = [root, *how.beside.values()]
    few = sum(parameter.numel() for module in modules_of(roots) for parameter in module.parameters(recurse=False)) <= DOUBLE_UP_TO
    ways = {torch.float64: IN_DOUBLE} if few else {}
    ways.setdefault(own, AS_IT_IS)
    fault: Fault = "unknown"
    cause: Exception | None = None
    for dtype, tolerances in [*ways.items(), *([(own, IN_HALVES)] if how.precision in HALVES else [])]:
        half = tolerances is IN_HALVES  # as the step runs it; the last resort, because it is blunt
        context: AbstractContextManager[object] = autocast(how.precision, sample.x.device) if half else nullcontext()
        try:
            with untouched(roots, sample.x.device, dtype) as kept, context:
                return _Probe(run, root, path, sample.to(dtype), kept, tolerances, how).findings(cuts)
        except Exception as error:
            fault, cause = ("fails", error.cause) if isinstance(error, _Fails) else ("unknown", error)
            clear_frames(cause.__traceback__)  # they hold tensors
    return [Finding(fault, path, type(root).__name__, _words(cause), None, cause)]


class Trial(NamedTuple):
    """What is tried of a module."""

    modes: tuple[bool, ...] = (True, False)  # in training, in evaluation
    thorough: bool = True  # also whether it draws random numbers, keeps state or adds terms without targets; otherwise it is only cut
    precision: str = "fp32"  # of the step
    recompute: bool = False  # True if the step runs it without gradients first
    beside: Mapping[str, object] = {}  # what runs with it, by name: an encoder before a head, a user's loss


class _Fails(Exception):
    """A module raises however its input is cut, as it would in a step."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class _Probe:
    def __init__(
        self, run: Run, root: nn.Module, path: str, sample: ProbeSample, kept: Kept, tolerances: tuple[float, float], how: Trial
    ) -> None:
        self.run, self.root, self.path, self.sample, self.kept, self.how = run, root, path, sample, kept, how
        self.beside = how.beside
        self.scorer = "loss" if "loss" in how.beside else path  # what reads the targets
        self.given = sample  # what the last run was given
        self.tolerance, self.of_loss = tolerances
        roots = [(name, each) for name, each in {path: root, **how.beside}.items() if isinstance(each, nn.Module)]
        self.modules = {name: module for prefix, each in roots for name, module in each.named_modules(prefix=prefix)}
        self.names = {id(module): name for name, module in self.modules.items()}
        self.random = generators(sample.x.device)
        self.fresh = self._fresh()

    def _fresh(self) -> Kept:
        """The state from which every run starts."""
        fresh = Kept([self.root, *self.beside.values()])
        fresh.keep_buffers()
        return fresh

    def findings(self, cuts: Sequence[Cut]) -> list[Finding]:
        found: list[Finding] = []
        how = self.how
        for training in how.modes:
            if not training:  # a step leaves modules in the mode that their owner chose
                self.fresh.put_back()
                self.root.eval()
                self.fresh = self._fresh()
            with torch.set_grad_enabled(training):
                try:
                    whole = self._run_whole()
                except Exception as error:
                    if not training and True in how.modes:
                        continue  # it may take no gradients to evaluate, and may never be evaluated; if it is, that is checked then
                    raise (_Fails(error) if self._raises(cuts) else error) from None
                if how.thorough:
                    left = self._changes_in_place() + self._leaves()
                    if alone := self._draws() + left:
                        return alone  # this alone makes two runs differ, so comparing them would be pointless
                if training and how.recompute:
                    found += self._without_gradients(whole)
                for cut in cuts:
                    if cut.axis is not None and all(each.axis != cut.axis for each in found):
                        found += self._compared(whole, cut, thorough=training and how.thorough)
        return found

    def _raises(self, cuts: Sequence[Cut]) -> bool:
        """True if the module raises in pieces as well."""
        try:
            for cut in cuts:
                self._run(cut)
        except Exception:
            return True
        return False

    def _run_whole(self) -> Ran:
        """Run it in one piece; if it raises, without a head's forward, which a step does not call and which may take further arguments."""
        self.sample = replace(self.sample, shows=True)
        try:
            return self._run(self.sample.whole)
        except Exception:
            self.sample = replace(self.sample, shows=False)
            return self._run(self.sample.whole)

    def _compared(self, whole: Ran, cut: Cut, *, thorough: bool) -> list[Finding]:
        """What differs between the whole and its pieces; if both time and lanes are cut, along which of them alone it does."""
        try:
            found = (thorough and self._of_nothing(cut)) or self._differences(whole, cut) or (self._of_large(cut) if thorough else [])
        except torch.OutOfMemoryError:
            raise  # in another dtype it may fit
        except Exception as error:
            found = [self._finding("raises", self.path, _words(error), cut.axis)._replace(cause=error)]
            clear_frames(error.__traceback__)  # they hold tensors
        for alone in cut.alone if found else ():
            if inner := self._compared(whole, alone, thorough=thorough):
                return inner
        return found

    def _run(self, cut: Cut, *, again: bool = False) -> Ran:
        """Run from the same random state each time, and, unless it is `again`, from the same state of the module. It is given copies, which
        it may change in place.
        """
        set_generators(self.random, self.sample.x.device)
        if not again:
            self.fresh.put_back()
        x, lengths = self.sample.x.clone(), self.sample.lengths.clone()
        targets, weights = (None if each is None else each.clone() for each in (self.sample.targets, self.sample.weights))
        self.given = replace(self.sample, x=x, lengths=lengths, targets=targets, weights=weights)
        return self.run(self.given, cut.pieces)

    def _changes_in_place(self) -> list[Finding]:
        """Report a module that has changed what it was given, which a step may give it again."""
        names = {"x": "input", "targets": "targets", "lengths": "lengths", "weights": "weights"}
        changed = [name for key, name in names.items() if not same(getattr(self.sample, key), getattr(self.given, key))]
        return [self._finding("in place", self.scorer if name in ("targets", "weights") else self.path, name) for name in changed[:1]]

    def _without_gradients(self, whole: Ran) -> list[Finding]:
        with torch.no_grad():
            plain = self._run(self.sample.whole)
        pairs = [*zip(tree_leaves(whole.outputs), tree_leaves(plain.outputs), strict=False)]
        pairs += [(a, b) for one, other in zip(whole.sums, plain.sums, strict=False) for a, b in zip(one, other, strict=True)]
        return [self._finding("recompute", self.path)] if any(self._differ(a, b) for a, b in pairs) else []

    def _finding(self, fault: Fault, path: str, detail: str = "", axis: Axis | None = None) -> Finding:
        blamed = self.modules.get(path) or self.beside.get(path, self.root)
        return Finding(fault, path, getattr(blamed, "__name__", type(blamed).__name__), detail, axis)

    def _draws(self) -> list[Finding]:
        """Report a module that draws from a generator that is not keyed: the innermost one."""
        device = self.sample.x.device
        if same_generators(self.random, generators(device)):
            return []
        drawing: list[str] = []
        before: list[tuple[Any, int]] = []

        def enter(module: nn.Module, given: Any) -> None:
            before.append((generators(device), len(drawing)))

        def leave(module: nn.Module, given: Any, out: Any) -> None:
            state, seen = before.pop()
            if len(drawing) == seen and id(module) in self.names and not same_generators(state, generators(device)):
                drawing.append(self.names[id(module)])

        with _hooked(enter, leave):
            self._run(self.sample.whole)
        return [self._finding("draws", drawing[0] if drawing else self.path)]

    def _leaves(self) -> list[Finding]:
        """Report state that a run leaves behind for the next: whatever a second run on the same inputs changes again."""
        found = self.kept.rewritten(self.modules)
        if not found:
            left = Left(self.modules, self.beside)
            self._run(self.sample.whole, again=True)
            found = left.changed(self.modules)
        return [self._finding("state", path, attribute) for path, attribute in found[:1]]

    def _of_nothing(self, cut: Cut) -> list[Finding]:
        """Compare loss and count with all targets masked: only added terms such as penalties remain, which rounding of a full loss might
        hide, and counts that are never below one.
        """
        targets = self.sample.targets
        if targets is None:
            return []
        if (targets.is_cuda or not self.sample.maskable) and not bool(is_absent(targets).any()):
            return []  # what does not handle masked targets may kill the process, on a GPU by a device-side assertion
        kept = self.sample
        self.sample = replace(kept, targets=torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORED))
        try:
            whole, parts = self._run(kept.whole).sums, self._run(cut).sums
        except Exception:
            return []  # it does not handle masked targets
        finally:
            self.sample = kept
        for number, what in enumerate(("loss without targets", "target count without targets") if whole else ()):
            one, several = _total(whole, number), _total(parts, number)
            if one.isfinite() and several.isfinite() and (found := self._of_sums(what, one, several, cut)):
                return found
        return []

    def _of_large(self, cut: Cut) -> list[Finding]:
        """Compare gradients as large as real ones may be."""
        if not torch.is_grad_enabled() or self.tolerance == IN_HALVES[0]:
            return []
        kept = self.sample
        self.sample = replace(kept, scale=LARGE)
        try:
            return self._of_gradients(self._run(kept.whole), self._run(cut), cut)
        finally:
            self.sample = kept

    def _of_sums(self, what: str, one: Tensor, several: Tensor, cut: Cut, scale: float = 0.0) -> list[Finding]:
        """`scale`: how large the numbers are that may cancel in the sum."""
        if not self._differ(one, several, max(float(one.abs()), scale) * self.of_loss / self.tolerance):
            return []
        detail = f"{what} of {float(one):.6g} as a whole but {float(several):.6g} in parts"
        return [self._finding("loss", self.scorer, detail, cut.axis)]

    def _differences(self, whole: Ran, cut: Cut) -> list[Finding]:
        parts = self._run(cut)
        for number, output in enumerate(whole.outputs[0] if whole.outputs else []):
            ways = joined(output, [each[number] for each in parts.outputs], cut)
            if all(self._differ(output, each, by_feature=True) for each in ways) and (ways or not whole.sums):
                return [self._finding("output", self._culprit(cut), "", cut.axis)]
        for number, what in enumerate(("loss", "target count")) if whole.sums else ():
            size = float(sum(each[number].detach().double().abs() for each in parts.sums))
            found = self._of_sums(what, _total(whole.sums, number), _total(parts.sums, number), cut, size)
            if found:
                inner = self._culprit(cut)
                return found if inner == self.path else [self._finding("output", inner, "", cut.axis)]
        return self._of_gradients(whole, parts, cut)

    def _of_gradients(self, whole: Ran, parts: Ran, cut: Cut) -> list[Finding]:
        scale = max((float(each.abs().max()) for each in whole.gradients.values() if each is not None and each.numel()), default=0.0)
        for name, gradient in whole.gradients.items():
            summed = parts.gradients.get(name)
            given = next((each for each in (gradient, summed) if each is not None), None)
            if given is None:
                continue
            one, several = (torch.zeros_like(given) if each is None else each for each in (gradient, summed))
            if self._differ(one, several, scale):
                blamed = name.rpartition(".")[0]
                while blamed in self.modules and stepwise(self.modules[blamed]):  # it is what holds it that changes the gradient
                    blamed = blamed.rpartition(".")[0]
                return [self._finding("gradient", blamed or self.path, name, cut.axis)]
        return []

    def _differ(self, one: Tensor, other: Tensor, scale: float | None = None, *, by_feature: bool = False) -> bool:
        """`scale`: what the difference is relative to, by default the largest element; `by_feature`: that of each on the last axis."""
        if one.shape != other.shape:
            return True
        if one.is_complex() and other.is_complex():
            one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
        if not one.is_floating_point():
            return not torch.equal(one, other)
        a, b = (tensor.detach().double().nan_to_num(0.0, 0.0, 0.0) for tensor in (one, other))
        if not a.numel():
            return False
        largest = a.abs().max()
        if by_feature and a.dim() > 2:
            features = a.abs().flatten(0, -2).amax(0).clamp(min=LEAST_SHARE * float(largest))
            return bool(((a - b).abs() > self.tolerance * features + 1e-300).any())
        return bool((a - b).abs().max() > self.tolerance * (float(largest) if scale is None else scale) + 1e-300)

    def _culprit(self, cut: Cut) -> str:
        """The innermost module whose outputs differ: the first to finish among those whose partial outputs can be joined again."""
        ran: list[dict[str, list[list[Tensor]]]] = []
        for several in (self.sample.whole, cut):
            calls: dict[str, list[list[Tensor]]] = {}

            def leave(module: nn.Module, given: Any, out: Any, calls: dict[str, list[list[Tensor]]] = calls) -> None:
                if id(module) in self.names:
                    leaves = [leaf.detach() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                    calls.setdefault(self.names[id(module)], []).append(leaves)

            with _hooked(None, leave):
                self._run(several)
            ran.append(calls)
        whole, parts = ran
        count = len(cut.pieces)
        for name, own in whole.items():
            others = parts.get(name, [])
            if len(others) != count * len(own) or stepwise(self.modules[name]):  # whose input differs already
                continue
            for number, leaves in enumerate(own):
                for leaf, *each in zip(leaves, *(others[at * len(own) + number] for at in range(count)), strict=False):
                    ways = joined(leaf, each, cut)
                    if ways and all(self._differ(leaf, one) for one in ways):
                        return name
        return self.path


def _total(sums: Sequence[tuple[Tensor, Tensor]], number: int) -> Tensor:
    """The sum of the losses (0) or counts (1)."""
    return torch.stack([each[number].detach().double() for each in sums]).sum()


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


def _words(error: BaseException | None) -> str:
    """What an error says, on one line."""
    said = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}{said and ': '}{said if len(said) <= 160 else said[:157] + '…'}"
