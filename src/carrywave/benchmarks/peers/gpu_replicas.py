"""The peer of replicas on GPUs: PyTorch's DistributedDataParallel around one `nn.LSTM`, which runs in cuDNN, with sums over NCCL.

Weights and inputs have the precision that is compared, so that nothing is converted: the fastest that plain PyTorch gets.

Shapes: T time, B lane, F features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DDP = "DDP"


class DataParallelStack:
    """One replica: its lanes of a batch, and the loss of all of them, the sum of all outputs over the number of targets."""

    recorded = False
    replays = 0

    def __init__(self, weights: Mapping[str, Tensor], x_TBF: Tensor, *, layers: int, targets: int, lr: float, clip: float) -> None:
        features = x_TBF.shape[-1]
        stack = nn.LSTM(features, features, layers)
        stack.load_state_dict(dict(weights))
        on_gpu = [x_TBF.device] if x_TBF.is_cuda else None
        self.stack = DistributedDataParallel(stack.to(x_TBF.device, x_TBF.dtype), device_ids=on_gpu, gradient_as_bucket_view=True)
        self.x_TBF, self.targets, self.clip = x_TBF, targets, clip
        self.optimizer = torch.optim.Adam(self.stack.parameters(), lr=lr, fused=True)
        self.workers = torch.distributed.get_world_size()

    def update(self) -> Tensor:
        """One optimizer step; returns the mean loss over all replicas."""
        loss = self.whole_step()
        torch.distributed.all_reduce(loss)
        return loss / self.workers

    def whole_step(self) -> Tensor:
        """One optimizer step; returns this replica's part of the loss."""
        loss = self.forward_backward()
        nn.utils.clip_grad_norm_(self.stack.parameters(), self.clip)
        self.optimizer.step()
        return loss

    def forward_backward(self) -> Tensor:
        """Gradients of the mean loss, and this replica's part of the loss: DDP divides the sum of gradients by the number of replicas."""
        self.optimizer.zero_grad(set_to_none=False)
        y_TBF, _ = self.stack(self.x_TBF)
        loss: Tensor = y_TBF.sum(dtype=torch.float32) * self.workers / self.targets
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
