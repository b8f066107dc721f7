"""Keyed dropout for modules that see only x: the mask depends on the batch's key and the global coordinates of x, never on the worker.

`keyed` makes a user's module safe to split across workers: it makes torch's dropout keyed, and rejects by name modules whose result
depends on which lanes share a worker (batch norm in training mode) or on an unkeyed generator. `check_unwrapped` refuses
modules that another library has wrapped to train on several devices: a trainer does that itself.
"""

from __future__ import annotations

from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.dropout import Coordinates, dropped
from carrywave.model.recurrent import Recurrent

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Dropout(nn.Dropout):
    """Dropout on x [time, lane, …], keyed by (start + time, lane, unit), or by (lane, unit) when locked.

    Inside a pooled scope x is [lane, …]. A tensor of another form is dropped by the places of its elements, if it holds a whole batch:
    masks of a part would not be those of the whole. Outside any scope the key is drawn from torch's default generator.
    """

    locked = False
    name = ""

    def __init__(self, p: float, locked: bool = False, name: str = "") -> None:
        _check_share(p)
        super().__init__(p)
        self.locked = locked
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        _check_share(self.p)
        scope = random.current_scope()
        key = scope.key if scope is not None else None
        key = random.draw().to(x.device) if key is None else key
        lanes, start, pooled, whole = (None, 0, False, True) if scope is None else (scope.lanes, scope.start, scope.pooled, scope.whole)
        lead = 1 if pooled else 2
        expected = None if lanes is None else lanes.shape[0]
        if x.dim() < lead or (expected is not None and x.shape[lead - 1] != expected):
            if not whole and expected is not None:
                form = "[lane, …]" if pooled else "[time, lane, …]"
                raise UserError(
                    f"dropout {self.name} got x of shape {list(x.shape)} for {expected} lanes, a part of the batch; keep x as {form} where "
                    "dropout applies"
                )
            x_TBU, lanes = x.reshape(1, 1, -1), None
        else:
            x_TBU = x.reshape(1 if pooled else x.shape[0], x.shape[lead - 1], -1)
        site = random.site(self.name) if scope is None else scope.site(self.name)
        y = dropped(x_TBU, key, lanes, Coordinates(site, self.p, self.locked or pooled, start)).reshape(x.shape)
        return x.copy_(y) if self.inplace else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, locked={self.locked}, name={self.name!r}"


def _check_share(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise UserError(f"dropout p={p} must be at least 0 and below 1; 0 switches it off")


def keyed(module: nn.Module, prefix: str) -> nn.Module:
    """Make every nn.Dropout in the module a keyed one whose site is its path; raise on modules that cannot be keyed.

    It stays the same object, with its hooks, for whoever else holds it and may change its `p`.
    """
    _refuse(module, prefix)
    if type(module) is nn.Dropout:
        _check_share(module.p)
        module.__class__ = Dropout
    if isinstance(module, Dropout) and not module.name:
        module.name = prefix
    if isinstance(module, Recurrent):
        module.path = prefix
    for name, child in module.named_children():
        keyed(child, f"{prefix}.{name}")
    return module


def refuse_batch_norm(module: nn.Module, path: str) -> None:
    """Raise on a batch norm in training mode. In evaluation mode, where its owner may keep it, its statistics are fixed numbers."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
        raise UserError(
            f"{path} is a {type(module).__name__} in training mode, whose result depends on which lanes share a worker; use cw.GlobalNorm, "
            "or keep its statistics as they are with its eval()"
        )


def _refuse(module: nn.Module, path: str) -> None:
    kind = type(module).__name__
    refuse_batch_norm(module, path)
    others = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    if isinstance(module, others) or (
        isinstance(module, nn.Dropout) and type(module) is not nn.Dropout and not isinstance(module, Dropout)
    ):
        raise UserError(f"{path} is a {kind}, whose mask cannot be keyed; use nn.Dropout or carrywave's Dropout(p, locked=True)")
    if isinstance(module, nn.RReLU):
        raise UserError(f"{path} is an RReLU, whose slopes cannot be keyed; use nn.LeakyReLU")
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout:
        raise UserError(
            f"{path} is a {kind} with dropout={module.dropout} inside, which cannot be keyed; set it to 0 and add a separate nn.Dropout"
        )


def check_unwrapped(module: nn.Module) -> None:
    """Refuse a module with `DataParallel` or `DistributedDataParallel` around it or inside it.

    The first would cut inputs along time, which comes first here; the second would average gradients that are sums, a second time.
    """
    for each in module.modules():
        if isinstance(each, WRAPPERS):
            wrapped, wrapper = type(each.module).__name__, type(each).__name__
            raise UserError(
                f"the module {wrapped} is wrapped in {wrapper}, but a trainer divides the work itself; pass it without the wrapper"
            )
