"""Where the gradients of a step are collected, and how they are summed over workers. `Gradients` itself sums nothing: there is one worker.

The calls of one step, in order:

    begin_step
        begin_passes
            begin_pass … end_pass   for each pass; in the last one, `sum_early` and `is_final` say which gradients are complete
        end_passes
    sum_over_workers

`end_pass` moves the gradients of a pass to where they are kept, and returns which parameters it has reached. A replay of a captured pass
runs no Python, so `end_passes` is given what was returned when the pass was captured.

Gradients that are summed over workers, and those that outlive a captured graph, lie in flat buffers at fixed addresses, and the parameters'
`.grad` are views of them. A step with a single pass has its fresh gradients copied there, which moves half the memory; with several, the
buffer is zeroed first and autograd adds to it in place. Without either, a single pass that nothing separates from its update leaves its
gradients where autograd put them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from carrywave.step.norms import by_dtype

Flags = tuple[bool, ...]  # one for each trained parameter
Result = TypeVar("Result")


class Allocate(Protocol):
    """The signature of `torch.zeros`, as far as it is used here."""

    def __call__(self, count: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class FlatBuffers:
    """One contiguous buffer for each part, parameters of one dtype, and a view for each of them. `allocate`: returns a zeroed
    buffer of this many numbers, by default in memory of this process.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]], *, allocate: Allocate | None = None) -> None:
        self.parts = parts
        self.flats: list[Tensor] = []
        self.views: list[Tensor] = []  # in the order of `parts`
        for part in self.parts:
            sizes = [p.numel() for p in part]
            flat = (allocate or torch.zeros)(sum(sizes), dtype=part[0].dtype, device=part[0].device)
            self.flats.append(flat)
            # `.data`: views with version counters of their own, which tell whether a backward pass has added to a gradient.
            self.views += [piece.view_as(p).data for p, piece in zip(part, torch.split(flat, sizes), strict=True)]

    @property
    def by_id(self) -> dict[int, Tensor]:
        """The views by the ids of their parameters."""
        return {id(p): view for p, view in zip((p for part in self.parts for p in part), self.views, strict=True)}


class Gradients:
    """The gradients of one worker. `held` are all parameters on it, trained or not."""

    sums = False  # True if gradients are summed over workers
    on_device = True  # True if the host takes no part in that

    def __init__(self, trained: Sequence[nn.Parameter], held: Sequence[nn.Parameter]) -> None:
        self.trained, self.held = list(trained), list(held)
        self.given = [False] * len(self.trained)  # which parameters the passes of the step have reached
        self.unreached: set[int] = set()  # ids of summed ones that no pass of the step reached on this worker; on others one may have
        self.local: dict[int, Tensor] = {}  # norms of some gradients before they were summed, by the parameter's id
        self._summed: dict[int, Tensor] = {}  # views of the buffers of summed gradients, by the parameter's id
        self._spare: dict[int, Tensor] = {}  # the same for the others, where they need one; allocated on first use
        self._flats: list[Tensor] = []
        self._homes: list[tuple[Tensor, Tensor]] = []  # each view with another one of the same place, which no one else has
        self._views: dict[int, Tensor] = {}  # those in use in this step
        self._versions: list[int] | None = None  # of the gradients after the last pass, if passes add to them in place

    @property
    def adds(self) -> bool:
        """True if backward passes add to gradients in place; otherwise there is one pass, whose gradients are fresh."""
        return self._versions is not None

    def begin_step(self) -> None:
        """Start an optimizer step."""

    def begin_passes(self, passes: int, *, static: bool = False) -> None:
        """Start the passes of a step, this many. `static`: its gradients must have fixed addresses, because passes are captured."""
        self.given = [False] * len(self.trained)
        for view, home in self._homes:
            if view.data_ptr() != home.data_ptr():
                view.data = home  # `model.half()` and back, or `model.cpu()` and back, move a `.grad` away without replacing it
        self._views, self._versions = self._summed, None
        if static or passes > 1:
            self._views = self._summed | self._allocated()
        if passes > 1:
            if self._flats:
                torch._foreach_zero_(self._flats)
            self._versions = []
        self.begin_pass()

    def begin_pass(self) -> None:
        """Before each pass, and inside what is captured of it: nothing that a failed capture left behind may be added to."""
        for parameter in self.held:  # including those that the user's optimizer does not hold
            parameter.grad = None
        if self.adds:
            for parameter in self.trained:
                parameter.grad = self._views[id(parameter)]
            self._versions = self._now()

    def sum_early(self, pending: Callable[[Tensor], bool] | None = None) -> None:
        """Before the last backward of a step: its gradients are final, except where part of one is still `pending`."""

    def is_final(self, parameter: Tensor) -> None:
        """A gradient that was pending is final."""

    def end_pass(self) -> Flags:
        """After a pass, move new gradients to their place; returns which parameters the pass has reached."""
        if self._versions is not None:
            if any(p.grad is not self._views[id(p)] for p in self.trained):
                raise RuntimeError("a gradient was replaced during backward, instead of being added to")
            return tuple(new != old for new, old in zip(self._now(), self._versions, strict=True))
        reached = tuple(p.grad is not None for p in self.trained)
        fresh = [p for p in self.trained if p.grad is not None and id(p) in self._views and p.grad is not self._views[id(p)]]
        for part in by_dtype(fresh):
            torch._foreach_copy_([self._views[id(p)] for p in part], [p.grad for p in part])  # type: ignore[misc]
        for parameter in fresh:
            parameter.grad = self._views[id(parameter)]
        return reached

    def end_passes(self, reached: Sequence[Flags]) -> None:
        """The gradients of all passes are complete. `reached`: what `end_pass` returned for each pass."""
        self.given = [any(flags) for flags in zip(*reached, strict=True)]
        for parameter, given in zip(self.trained, self.given, strict=True):
            if given and id(parameter) in self._views:
                parameter.grad = self._views[id(parameter)]

    def sum_over_workers(self, meanwhile: Callable[[], Result]) -> Result:
        """The gradients of the step are complete: sum them over workers, and do something else meanwhile. One that no pass has reached is
        removed, as torch would.
        """
        for parameter, given in zip(self.trained, self.given, strict=True):
            if not given:
                parameter.grad = None
        return meanwhile()

    def abandon(self) -> None:
        """The step has failed: let go of sums that have begun."""

    def reduces(self, parameter: Tensor) -> bool:
        """True if this gradient is summed over workers."""
        return False

    def _allocated(self) -> dict[int, Tensor]:
        missing = [p for p in self.trained if id(p) not in self._summed and id(p) not in self._spare]
        if missing:
            self._spare |= self._kept_in(FlatBuffers(by_dtype(missing)))
        return self._spare

    def _kept_in(self, buffers: FlatBuffers) -> dict[int, Tensor]:
        """Use these buffers; returns their views by the ids of their parameters."""
        self._flats += buffers.flats
        self._homes += [(view, view.detach()) for view in buffers.views]
        return buffers.by_id

    def _now(self) -> list[int]:
        return [self._views[id(p)]._version for p in self.trained]
