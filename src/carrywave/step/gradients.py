"""Processes gradients between backward and update: all-reduce, one division, global norm, clipping.

Nothing here reads a value on the host, so a step can run ahead of the device or be captured. Gradients are reduced as sums. The norm is
computed as a sum of squares and a root, so that stages can add up their squares. Division by the global count and clipping are combined
into one factor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

BUCKET_BYTES = 8 << 20


@torch.no_grad()
def norms(grads: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient, ordered by dtype as in `by_dtype`; in float64, so that squares do not overflow."""
    found = [
        torch.stack(list(torch._foreach_norm(part, 2, torch.promote_types(part[0].dtype, torch.float32)))).to(torch.float64)
        for part in by_dtype(grads)
    ]
    return found[0] if len(found) == 1 else torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def norm_squared(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, as a float64 scalar that is additive over stages."""
    return norms(grads).square().sum()


def norm_of_mean(squared: Tensor, count: Tensor) -> Tensor:
    """The gradient norm of the mean loss, from the squared gradient norm of the summed loss; zero if there are no targets."""
    return squared.sqrt() / torch.where(count > 0, count, torch.inf)


def factor(norm: Tensor, count: Tensor, limit: float | None) -> Tensor:
    """The factor for a summed gradient: one over the count, reduced further if the norm of the mean exceeds the limit."""
    # Dividing by infinity turns a finite gradient into zero and a non-finite one into NaN, so that it still shows.
    mean = 1.0 / torch.where(count > 0, count, torch.inf)
    # The epsilon is that of torch.nn.utils.clip_grad_norm_, so that both clip by the same factor.
    return mean if limit is None else mean * (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], by: Tensor) -> None:
    """Multiply all gradients by one factor."""
    for part in by_dtype(grads):
        torch._foreach_mul_(part, by.to(part[0].device, part[0].dtype))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, as foreach operations need it to fuse them; keeps the order within a group."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


@dataclass(frozen=True)
class Reduced:
    """Parameters whose gradients are all-reduced over one process group."""

    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]
    early: bool = True  # may start while backward is still running


class _Bucket:
    """A gradient bucket: consecutive gradients in one buffer, all-reduced together."""

    def __init__(
        self, group: dist.ProcessGroup, parameters: list[nn.Parameter], early: bool, local: dict[int, Tensor | None], unreached: set[int]
    ) -> None:
        self.group, self.parameters, self.early, self.local, self.unreached = group, parameters, early, local, unreached
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = torch.split(self.flat, [p.numel() for p in parameters])
        self.views = [piece.view_as(p) for p, piece in zip(parameters, pieces, strict=True)]
        self.missing: dict[int, tuple[nn.Parameter, Tensor]] = {}  # not yet copied into the buffer, with their views into it
        self.work: dist.Work | None = None
        self.started = False

    def take(self, parameter: Tensor) -> None:
        """Copy a final gradient into the buffer, or zeros if the parameter was not used on this worker."""
        found = self.missing.pop(id(parameter), None)
        if found is None:
            return
        parameter, view = found
        if id(parameter) in self.local:
            self.local[id(parameter)] = parameter.grad
        if parameter.grad is None:
            self.unreached.add(id(parameter))
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view


class Reducer:
    """All-reduces gradients while backward is still running: bucket by bucket, each as soon as its last gradient is final.

    The layout follows from the order of the parameters alone, and the buckets of a group start in the same order on every worker, so
    results repeat bit for bit from run to run. Gradients are copied into the buckets when they are final and stay there as views: one copy
    is cheaper than accumulating into a zeroed buffer.

    `watched` are small parameters whose local gradients, from before the all-reduce, are kept in `local`, by the parameter's id.
    `unreached` are the ids of parameters that backward did not reach on this worker; it may have reached them on others.
    """

    def __init__(self, wanted: Sequence[Reduced], bucket_bytes: int = BUCKET_BYTES, *, watched: Sequence[nn.Parameter] = ()) -> None:
        self.buckets: list[_Bucket] = []
        self.local: dict[int, Tensor | None] = {id(p): None for p in watched}
        self.unreached: set[int] = set()
        self._armed = False
        self._owed: Callable[[Tensor], bool] = _nothing
        for each in wanted:
            # Backward reaches the last layers first.
            for run in _runs(list(reversed(each.parameters)), bucket_bytes):
                self.buckets.append(_Bucket(each.group, run, each.early, self.local, self.unreached))
        self._of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        hook = _weakly(self)
        handles = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]
        # The parameters are the user's and outlive this object, so its hooks are removed with it.
        weakref.finalize(self, _remove, handles).atexit = False

    def begin(self) -> None:
        """Call before the first backward of an optimizer step, when there are no gradients."""
        self._armed = False
        self.unreached.clear()
        for bucket in self.buckets:
            bucket.work, bucket.started = None, False
            bucket.missing = {id(p): (p, view) for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        self.local.update(dict.fromkeys(self.local))

    def reduces(self, parameter: Tensor) -> bool:
        """True if this gradient is all-reduced."""
        return id(parameter) in self._of

    def arm(self, owed: Callable[[Tensor], bool] | None = None) -> None:
        """Call before the last backward: from then on a gradient is final when it arrives, unless part of it is still pending (`owed`)."""
        self._armed, self._owed = True, owed or _nothing

    def finish(self) -> None:
        """Call after the last backward: start the remaining buckets, and wait for all of them."""
        self._armed = False
        for bucket in self.buckets:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _added(self, parameter: Tensor) -> None:
        """Post-accumulate hook; torch calls it even if it had nothing to add."""
        if self._armed and not self._owed(parameter):
            self.ready(parameter)

    def ready(self, parameter: Tensor) -> None:
        """Mark a gradient as final, and start every bucket that is now complete, in order."""
        if id(parameter) not in self._of:
            return
        self._of[id(parameter)].take(parameter)
        for bucket in self.buckets:
            if bucket.started:
                continue
            if bucket.missing or not bucket.early:
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        if not bucket.started:
            bucket.started = True
            for parameter, _ in list(bucket.missing.values()):
                bucket.take(parameter)
            bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def _weakly(reducer: Reducer) -> Callable[[Tensor], None]:
    """A hook that does not keep the reducer alive."""
    found = weakref.ref(reducer)

    def added(parameter: Tensor) -> None:
        reducer = found()
        if reducer is not None:
            reducer._added(parameter)

    added.is_ours = True  # type: ignore[attr-defined]  # tells it apart from a user's hooks on the parameter
    return added


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _nothing(parameter: Tensor) -> bool:
    return False


def _runs(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group neighbouring parameters of the same dtype up to `bucket_bytes`; a larger parameter gets its own group."""
    runs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        wide = parameter.numel() * parameter.element_size()
        if runs and runs[-1][0].dtype == parameter.dtype and size + wide <= bucket_bytes:
            runs[-1].append(parameter)
            size += wide
        else:
            runs.append([parameter])
            size = wide
    return runs
