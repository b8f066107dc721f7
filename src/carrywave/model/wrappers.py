"""Refuses modules that another library has wrapped to train on several devices: a trainer does that itself."""

from __future__ import annotations

from torch import nn

from carrywave.errors import UserError

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


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
