"""What happens to gradients between backward and update: summed over workers, one division, the global norm, clipping.

Nothing here reads a value on the host, so a step can run ahead of the device or be captured. Sums of gradients are reduced;
their norm is split into its square and the root, so that stages can add up their squares; division by the global count and
clipping are one factor in the end.
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
    """The norm of each gradient, those of one dtype after the other as `by_dtype` groups them. In float64: squares do not overflow."""
    found = [
        torch.stack(list(torch._foreach_norm(part, 2, torch.promote_types(part[0].dtype, torch.float32)))).to(torch.float64)
        for part in by_dtype(grads)
    ]
    return found[0] if len(found) == 1 else torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def norm_squared(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar: additive over stages."""
    return norms(grads).square().sum()


def norm_of_mean(squared: Tensor, count: Tensor) -> Tensor:
    """The norm of the gradient of the mean loss, from the square of that of the sum; no target at all gives zero."""
    return squared.sqrt() / torch.where(count > 0, count, torch.inf)


def factor(norm: Tensor, count: Tensor, limit: float | None) -> Tensor:
    """What a summed gradient is multiplied by: one over the count, and less where the norm of the mean is over the limit."""
    # A finite gradient over infinity is zero, and one that is not finite still shows as NaN.
    mean = 1.0 / torch.where(count > 0, count, torch.inf)
    # The small term is torch.nn.utils.clip_grad_norm_'s, so that both clip by the same factor.
    return mean if limit is None else mean * (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], by: Tensor) -> None:
    """Multiply all gradients by one number."""
    for part in by_dtype(grads):
        torch._foreach_mul_(part, by.to(part[0].device, part[0].dtype))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups of one dtype, which the foreach operations fuse; the order within a group is kept."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


@dataclass(frozen=True)
class Reduced:
    """Parameters whose gradients are summed over one group of workers."""

    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]
    early: bool = True  # may start while backward still runs


class _Bucket:
    """Neighbouring gradients in one buffer, which is reduced at once."""

    def __init__(
        self, group: dist.ProcessGroup, parameters: list[nn.Parameter], early: bool, local: dict[int, Tensor | None], unreached: set[int]
    ) -> None:
        self.group, self.parameters, self.early, self.local, self.unreached = group, parameters, early, local, unreached
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = torch.split(self.flat, [p.numel() for p in parameters])
        self.views = [piece.view_as(p) for p, piece in zip(parameters, pieces, strict=True)]
        self.missing: dict[int, tuple[nn.Parameter, Tensor]] = {}  # not in the buffer yet, with their places
        self.work: dist.Work | None = None
        self.started = False

    def take(self, parameter: Tensor) -> None:
        """Move a gradient that is final into the buffer. Where a parameter was not used here it is zero."""
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
    """Sums gradients over workers while backward still runs: bucket by bucket, each as soon as its last gradient is final.

    The layout follows from the order of the parameters alone, and buckets of a group start in one order on every worker: so bits
    repeat from run to run. Gradients are moved into the buckets when they are final, and stay there as views: a copy is less work than
    a buffer of zeros to add to.

    `watched` are parameters, small ones, whose gradients stay to be seen as they were before the sum: in `local`, by the parameter's id.
    `unreached` are the ids of those that backward did not come to on this worker; others may have.
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
        # The parameters are the user's and outlive this: what hangs on them goes with it.
        weakref.finalize(self, _remove, handles).atexit = False

    def begin(self) -> None:
        """Before the first backward of an optimizer step, when there are no gradients."""
        self._armed = False
        self.unreached.clear()
        for bucket in self.buckets:
            bucket.work, bucket.started = None, False
            bucket.missing = {id(p): (p, view) for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        self.local.update(dict.fromkeys(self.local))

    def reduces(self, parameter: Tensor) -> bool:
        """Whether this gradient is summed over workers."""
        return id(parameter) in self._of

    def arm(self, owed: Callable[[Tensor], bool] | None = None) -> None:
        """Before the last backward: from here on a gradient that comes is final, unless more is `owed` to it."""
        self._armed, self._owed = True, owed or _nothing

    def finish(self) -> None:
        """After the last backward: start what has not started, and wait for all of it."""
        self._armed = False
        for bucket in self.buckets:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _added(self, parameter: Tensor) -> None:
        """Torch has been to this gradient; it calls also where it had nothing to add."""
        if self._armed and not self._owed(parameter):
            self.ready(parameter)

    def ready(self, parameter: Tensor) -> None:
        """A gradient is final."""
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
    """A hook that does not keep the reducer."""
    found = weakref.ref(reducer)

    def added(parameter: Tensor) -> None:
        reducer = found()
        if reducer is not None:
            reducer._added(parameter)

    added.is_ours = True  # type: ignore[attr-defined]  # among the hooks of a parameter, which may be the user's
    return added


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _nothing(parameter: Tensor) -> bool:
    return False


def _runs(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype, together up to so many bytes; a larger one stands alone."""
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
