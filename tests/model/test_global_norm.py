"""A norm over the global batch: as torch's on one device; `tests/one_answer` shows that it is the same on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.model.over_time.global_norm import real_lanes


def test_it_is_torchs_batch_norm_of_all_real_steps() -> None:
    ours, torchs = cw.GlobalNorm(3).double(), nn.BatchNorm1d(3).double()
    lengths_B = torch.tensor([7, 0, 4])
    for seed in range(3):
        y_TBC = 40.0 + torch.randn(7, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        real_TB = torch.arange(7)[:, None] < lengths_B
        with real_lanes(lengths_B):
            found = ours(torch.where(real_TB[..., None], y_TBC, torch.nan))[real_TB]
        torch.testing.assert_close(found, torchs(y_TBC[real_TB]), rtol=1e-9, atol=1e-9)
    for name, buffer in torchs.named_buffers():
        if name in dict(ours.named_buffers()):
            torch.testing.assert_close(ours.get_buffer(name), buffer)
    y_BC = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(y_BC), torchs.eval()(y_BC))


def test_a_batch_that_is_not_finite_leaves_the_running_values() -> None:
    norm = cw.GlobalNorm(1)
    norm(torch.tensor([[torch.inf], [1.0]]))
    assert (float(norm.running_mean), float(norm.running_var)) == (0.0, 1.0)


class Scaled(nn.Module):
    """A module of a user, of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.norm = nn.Linear(3, 4), cw.GlobalNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.read(x))
        return y


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 1)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self.out(y) - target).square().sum(), torch.tensor(target.numel())


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        ({"micro_batches": 2}, "remove plan.micro_batches"),
        ({"chunk_steps": 2}, "remove plan.chunk_steps"),
        ({"recompute": True}, "remove plan.recompute"),
    ],
)
def test_a_plan_that_cuts_the_batch_is_refused(plan: dict[str, Any], remedy: str) -> None:
    with pytest.raises(PlanError, match=f"GlobalNorm.*{remedy}"):
        cw.Trainer(cw.Model(Scaled(), cw.LSTM(4, 5), Head()), plan=plan)


def test_a_head_is_no_place_for_it() -> None:
    head = Head()
    head.out = nn.Sequential(cw.GlobalNorm(5), nn.Linear(5, 1))  # type: ignore[assignment]
    with pytest.raises(UserError, match="put it into the encoder"):
        cw.Model(nn.Linear(3, 4), cw.LSTM(4, 5), head)
