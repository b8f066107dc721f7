"""Sums gradients over replicas, and over the stages that share a weight, with all-reduces that overlap the backward pass.

The gradients of each process group lie in one flat buffer, cut into buckets, each all-reduced as soon as its last gradient is final. The
layout follows from the order of the parameters alone, and the buckets of a group start in the same order on every worker, so results repeat
bit for bit from run to run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from carrywave.parallel.sums.group_sums import GroupSum, Summing, Working
from carrywave.plan.memory import BUCKET_BYTES, DEVICE_BUCKET_BYTES
from carrywave.step.gradients import FlatBuffers, Gradients, Result
from carrywave.step.norms import by_dtype, norm_of_each


@dataclass(frozen=True)
class Reduced:
    """Parameters whose gradients are summed over one group of workers."""

    group: Summing
    parameters: Sequence[nn.Parameter]
    during_backward: bool = True  # may start while backward is still running


class _Bucket:
    """Neighbouring gradients of a flat buffer, all-reduced together."""

    def __init__(self, group: Summing, parameters: list[nn.Parameter], flat: Tensor, *, during_backward: bool) -> None:
        self.group, self.parameters, self.flat, self.during_backward = group, parameters, flat, during_backward
        self.missing: set[int] = set()  # ids of the parameters whose gradients are not final yet
        self.work: Working | None = None
        self.started = False


class AllReduce(Gradients):
    """All-reduces gradients, those of `wanted`; the others stay this worker's own. `watched`: parameters whose norms go to `local`."""

    sums = True

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        held: Sequence[nn.Parameter],
        wanted: Sequence[Reduced],
        bucket_bytes: int | None = None,
        *,
        watched: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(trained, held)
        self.on_device = all(each.group.on_device for each in wanted)
        self.buckets: list[_Bucket] = []
        self._watched = {id(p) for p in watched}
        self._armed = False
        self._pending: Callable[[Tensor], bool] = _nothing
        for each in wanted:
            # Backward reaches the last layers first.
            buffers = FlatBuffers(by_dtype(each.parameters[::-1]), allocate=each.group.zeros if isinstance(each.group, GroupSum) else None)
            self._summed |= self._kept_in(buffers)
            for part, flat in zip(buffers.parts, buffers.flats, strict=True):
                start = 0
                for run in _runs(part, bucket_bytes or (BUCKET_BYTES if each.group.overlaps else DEVICE_BUCKET_BYTES)):
                    size = sum(p.numel() for p in run)
                    self.buckets.append(_Bucket(each.group, run, flat[start : start + size], during_backward=each.during_backward))
                    start += size
        self._of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        hook = _weakly(self)
        handles = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]
        # The parameters are the user's and outlive this object, so its hooks are removed with it.
        weakref.finalize(self, _remove, handles).atexit = False

    def begin_step(self) -> None:
        self._armed = False
        self.local = {}
        for bucket in self.buckets:
            bucket.work, bucket.started = None, False
            bucket.missing = {id(p) for p in bucket.parameters}

    def sum_early(self, pending: Callable[[Tensor], bool] | None = None) -> None:
        self._armed, self._pending = True, pending or _nothing

    def is_final(self, parameter: Tensor) -> None:
        bucket = self._of.get(id(parameter))
        if bucket is None:
            return
        view = self._summed[id(parameter)]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.missing.discard(id(parameter))
        for each in self.buckets:
            if each.started:
                continue
            if each.missing or not each.during_backward:
                return
            self._start(each)

    def sum_over_workers(self, meanwhile: Callable[[], Result]) -> Result:
        # What was pending belongs to the pass. Kept until the next step, it would keep the pass's autograd graph as well, which no capture
        # of that step survives.
        self._armed, self._pending = False, _nothing
        self.unreached = set()
        for parameter, given in zip(self.trained, self.given, strict=True):
            if given:
                continue
            if not self.reduces(parameter):
                parameter.grad = None
                continue
            self.unreached.add(id(parameter))
            parameter.grad = self._summed[id(parameter)]
            # With several passes the buffer was zeroed before, and its bucket may be in flight: torch calls the hook of a parameter whose
            # gradient is undefined, too.
            if not self._of[id(parameter)].started:
                parameter.grad.zero_()
        for bucket in self.buckets:
            self._start(bucket)
        result = meanwhile()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        return result

    def abandon(self) -> None:
        for bucket in self.buckets:
            bucket.work = None  # it would keep the connections open

    def reduces(self, parameter: Tensor) -> bool:
        return id(parameter) in self._of

    def _added(self, parameter: Tensor) -> None:
        """Post-accumulate hook; torch calls it even if it had nothing to add."""
        if self._armed and parameter.grad is not None and not self._pending(parameter):
            self.is_final(parameter)

    def _start(self, bucket: _Bucket) -> None:
        if not bucket.started:
            bucket.started = True
            watched = [id(p) for p in bucket.parameters if id(p) in self._watched]
            if watched:
                self.local |= zip(watched, norm_of_each([self._summed[each] for each in watched]).unbind(), strict=True)
            bucket.work = bucket.group.all_reduce(bucket.flat)


def _weakly(gradients: AllReduce) -> Callable[[Tensor], None]:
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
