"""Where the gradients of a step lie, and how they are summed over workers.

Gradients that are summed over the same workers lie in one flat buffer for each dtype, at fixed addresses. The parameters' `.grad` are views
of it, to which backward adds in place, so a sum is one message. Where all workers are replicas, the numbers that they tell each other in a
step (`SharedNumbers`) lie at the end of the first buffer and travel with it. A large buffer is cut into buckets, each summed as soon as its
last gradient is final, while backward is still running. The layout follows from the order of the parameters alone, and buckets start in
the same order on every worker, so results repeat bit for bit. The calls of one step, in order:

    begin
        begin_pass … end_pass   for each pass; in the last one, `sum_early` and `is_final` say which gradients are complete
    end_passes
    sum

`end_pass` returns which parameters the pass has reached. A replay of a recorded pass runs no Python, so `end_passes` is given what was
returned when the pass was recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from carrywave.parallel.sums.group_sums import GroupSum, Summing, Working
from carrywave.step.stats import by_dtype, norms

Flags = tuple[bool, ...]  # one for each trained parameter
# Gradients that are summed together; a larger parameter is summed alone. A collective costs its workers the same messages whatever it sums,
# so that few large ones cost least; in device memory, where a sum costs hardly more than its bytes, the buffer is as large as a bucket.
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 25 << 20, 8 << 20


@dataclass(frozen=True)
class Summed:
    """Parameters whose gradients are summed over one group of workers."""

    group: Summing
    parameters: Sequence[nn.Parameter]
    during_backward: bool = True  # may start while backward is still running


@dataclass
class _Place:
    """Where the gradient of a parameter lies: a piece of a buffer, and `.grad` as a view of it. `.data` gives the view a version counter of
    its own, which tells whether backward has added to it.
    """

    parameter: nn.Parameter
    piece: Tensor
    view: Tensor
    version: int = 0  # before a pass


class _Bucket:
    """Neighbouring gradients of a buffer, summed together."""

    def __init__(self, group: Summing, parameters: list[nn.Parameter], flat: Tensor, *, early: bool) -> None:
        self.group, self.parameters, self.flat, self.early = group, parameters, flat, early
        self.missing: set[int] = set()  # ids of the parameters whose gradients are not final yet
        self.work: Working | None = None
        self.started = False


class Gradients:
    """The gradients of one worker. `held` are all parameters on it, trained or not. `numbers`: how many further numbers are summed with the
    first of `sums`. `watched`: parameters whose norms before a sum go to `local`.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        held: Sequence[nn.Parameter],
        sums: Sequence[Summed] = (),
        *,
        device: torch.device | None = None,
        numbers: int = 0,
        watched: Sequence[nn.Parameter] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self.trained = list(trained)
        self.on_device = all(each.group.on_device for each in sums)  # the host takes no part in sums
        self.given = [False] * len(self.trained)  # which parameters the passes of the step have reached
        self.unreached: set[int] = set()  # ids of summed ones that no pass of the step reached here; on other workers one may have
        self.local: dict[int, Tensor] = {}  # norms of watched gradients before they were summed, by the parameter's id
        self.numbers: Tensor | None = None
        self.buckets: list[_Bucket] = []
        self._device = device
        own = {id(p) for p in self.trained}
        self._frozen = [p for p in held if id(p) not in own]
        self._watched = {id(p) for p in watched}
        self._buffers: list[Tensor] = []
        self._gradients: list[Tensor] = []  # the buffers without what lies behind the gradients
        self._places: dict[int, _Place] = {}  # by the parameter's id
        self._armed = False
        self._pending: Callable[[Tensor], bool] = _nothing
        for each in sums:
            # Backward reaches the last layers first. The numbers are real, so complex parameters come last.
            parts = sorted(by_dtype(each.parameters[::-1]), key=lambda part: part[0].is_complex())
            for part in parts or ([[]] if numbers and self.numbers is None else []):
                self._add_summed(each, part, numbers if self.numbers is None else 0, bucket_bytes)
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        for part in by_dtype([p for p in self.trained if id(p) not in self._bucket_of]):
            self._add_flat(part, torch.zeros(sum(p.numel() for p in part), dtype=part[0].dtype, device=part[0].device))
        if any(bucket.early for bucket in self.buckets):
            hook = _weakly(self)
            handles = [
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                for bucket in self.buckets
                for parameter in bucket.parameters
            ]
            # The parameters are the user's and outlive this object, so its hooks are removed with it.
            weakref.finalize(self, _remove, handles).atexit = False

    def _add_summed(self, summed: Summed, part: list[nn.Parameter], numbers: int, bucket_bytes: int | None) -> None:
        """One buffer, cut into buckets; `numbers` more lie at its end, in the last bucket."""
        dtype, device = (part[0].dtype, part[0].device) if part else (torch.float64, self._device)
        size = sum(p.numel() for p in part)
        if isinstance(summed.group, GroupSum):
            buffer = summed.group.zeros(size + numbers, dtype=dtype, device=device or torch.device("cpu"))
        else:
            buffer = torch.zeros(size + numbers, dtype=dtype, device=device)
        self._add_flat(part, buffer)
        if numbers:
            self.numbers = buffer[size:]
        most = bucket_bytes or (BUCKET_BYTES if summed.group.overlaps else DEVICE_BUCKET_BYTES)
        runs, start = _runs(part, most) or [[]], 0
        for number, run in enumerate(runs, start=1):
            last = number == len(runs)
            end = size + numbers if last else start + sum(p.numel() for p in run)
            # A single bucket has nothing to overlap with, and the numbers are complete only in the end.
            early = summed.during_backward and len(runs) > 1 and not (last and numbers)
            self.buckets.append(_Bucket(summed.group, run, buffer[start:end], early=early))
            start = end

    def _add_flat(self, part: Sequence[nn.Parameter], buffer: Tensor) -> None:
        sizes = [p.numel() for p in part]
        gradients = buffer[: sum(sizes)]
        self._buffers.append(buffer)
        self._gradients.append(gradients)
        for parameter, flat in zip(part, torch.split(gradients, sizes) if sizes else (), strict=True):
            piece = flat.view_as(parameter)
            self._places[id(parameter)] = _Place(parameter, piece, piece.data)

    def begin(self) -> None:
        """Start an optimizer step."""
        self._armed = False
        self.local = {}
        for bucket in self.buckets:
            bucket.work, bucket.started = None, False
            bucket.missing = {id(p) for p in bucket.parameters}
        if self._buffers:
            torch._foreach_zero_(self._buffers)

    def begin_pass(self) -> None:
        """Before each pass, and inside what is recorded of it: nothing that a failed recording left behind may be added to."""
        for parameter in self._frozen:  # including those that the user's optimizer does not hold
            parameter.grad = None
        for place in self._places.values():
            if place.view.data_ptr() != place.piece.data_ptr():  # `model.half()` and back move a `.grad` away
                place.view = place.piece.data
            if place.parameter.grad is not place.view:
                place.parameter.grad = place.view
            place.version = place.view._version

    def end_pass(self) -> Flags:
        """After a pass; returns which parameters it has reached."""
        places = [self._places[id(p)] for p in self.trained]
        if any(place.parameter.grad is not place.view for place in places):
            raise RuntimeError("a gradient was replaced during backward, instead of being added to")
        return tuple([place.view._version > place.version for place in places])

    def end_passes(self, reached: Sequence[Flags]) -> None:
        """The gradients of all passes are complete. `reached`: what `end_pass` returned for each pass."""
        self.given = list(reached[0]) if len(reached) == 1 else [any(flags) for flags in zip(*reached, strict=True)]
        self.unreached = set()
        for parameter, given in zip(self.trained, self.given, strict=True):
            if given or id(parameter) in self._bucket_of:
                parameter.grad = self._places[id(parameter)].view
                if not given:
                    self.unreached.add(id(parameter))
            else:
                parameter.grad = None  # as torch leaves it

    def sum(self) -> None:
        """The gradients of the step are complete: sum them over workers."""
        # What was pending belongs to the pass. Kept until the next step, it would keep the pass's autograd graph as well, which no
        # recording of that step survives.
        self._armed, self._pending = False, _nothing
        for bucket in self.buckets:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of parameters as they lie in their buffers: zeros if no pass has reached one."""
        return [self._places[id(p)].piece for p in parameters]

    @torch.no_grad()
    def scale(self, by: Tensor) -> None:
        """Multiply all gradients by one factor."""
        for gradients in self._gradients:
            gradients.mul_(by.to(gradients.device, gradients.dtype))

    def sum_early(self, pending: Callable[[Tensor], bool] | None = None) -> None:
        """Before the last backward of a step: its gradients are final, except where part of one is still `pending`."""
        self._armed, self._pending = True, pending or _nothing

    def is_final(self, parameter: Tensor) -> None:
        """A gradient is final: start the sums of all buckets that are complete now, in their order."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        bucket.missing.discard(id(parameter))
        for each in self.buckets:
            if each.started:
                continue
            if each.missing or not each.early:
                return
            self._start(each)

    def watch(self) -> None:
        """Take the norms of watched gradients that have not been summed yet."""
        for bucket in self.buckets:
            self._watch(bucket)

    def abandon(self) -> None:
        """The step has failed: let go of sums that have begun."""
        for bucket in self.buckets:
            bucket.work = None  # it would keep the connections open

    def reduces(self, parameter: Tensor) -> bool:
        """True if this gradient is summed over workers."""
        return id(parameter) in self._bucket_of

    def _added(self, parameter: Tensor) -> None:
        """Post-accumulate hook; torch calls it even if it had nothing to add."""
        if self._armed and parameter.grad is not None and not self._pending(parameter):
            self.is_final(parameter)

    def _start(self, bucket: _Bucket) -> None:
        if not bucket.started:
            self._watch(bucket)
            bucket.started = True
            bucket.work = bucket.group.all_reduce(bucket.flat)

    def _watch(self, bucket: _Bucket) -> None:
        watched = [] if bucket.started else [id(p) for p in bucket.parameters if id(p) in self._watched and id(p) not in self.local]
        if watched:
            self.local |= zip(watched, norms([self._places[each].piece for each in watched]).unbind(), strict=True)


def _weakly(gradients: Gradients) -> Callable[[Tensor], None]:
    """A hook that does not keep the object alive."""
    reference = weakref.ref(gradients)

    def added(parameter: Tensor) -> None:
        gradients = reference()
        if gradients is not None:
            gradients._added(parameter)

    added.is_ours = True  # type: ignore[attr-defined]  # tells it apart from a user's hooks on the parameter
    return added


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _nothing(parameter: Tensor) -> bool:
    return False


def _runs(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group neighbouring parameters up to `bucket_bytes`; a larger parameter gets its own group."""
    runs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        wide = parameter.numel() * parameter.element_size()
        if runs and size + wide <= bucket_bytes:
            runs[-1].append(parameter)
            size += wide
        else:
            runs.append([parameter])
            size = wide
    return runs
