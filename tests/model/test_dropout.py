"""Keyed dropout inside modules that see only x, and what a user's own module may not contain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.dropout import Dropout, keyed
from carrywave.model.lstm import LSTM

KEY = random.key(3)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize("locked", [False, True])
def test_mask_belongs_to_time_lane_and_unit(locked: bool) -> None:
    dropout = Dropout(0.5, locked, name="here")
    lanes = torch.tensor([7, 2, 9, 4])
    with random.Scope(KEY, lanes, 10):
        whole = dropout(ones(6, 4, 2, 5))
    with random.Scope(KEY, lanes[1:3], 12):
        part = dropout(ones(3, 2, 2, 5))
    assert torch.equal(part, whole[2:5, 1:3])
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert locked == bool((whole == whole[:1]).all())
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_pooled_scope_has_no_time() -> None:
    dropout = Dropout(0.5, name="head")
    with random.Scope(KEY, torch.tensor([3, 5]), 0, pooled=True):
        pooled = dropout(ones(2, 9))
    with random.Scope(KEY, torch.tensor([5]), 0, pooled=True):
        assert torch.equal(dropout(ones(1, 9))[0], pooled[1])


def test_dropout_of_everything_is_refused() -> None:
    with pytest.raises(UserError, match=r"p=1\.0"):
        Dropout(1.0)
    with pytest.raises(UserError, match=r"p=1\.0"):
        keyed(nn.Sequential(nn.Dropout(1.0)), "head")
    dropout = Dropout(0.5)
    dropout.p = 1.0
    with pytest.raises(UserError, match=r"p=1\.0"):
        dropout(ones(2, 3, 4))


def test_a_keyed_dropout_is_the_users_own_object_and_one_of_torch() -> None:
    drop = nn.Dropout(0.5, inplace=True)
    calls: list[Tensor] = []
    drop.register_forward_hook(lambda module, given, out: calls.append(out))
    net = keyed(nn.Sequential(drop), "encoder")
    assert [module for module in net.modules() if isinstance(module, nn.Dropout)] == [drop]
    x = ones(3, 4, 9)
    with random.Scope(KEY, torch.arange(4)):
        y = net(x)
        assert torch.equal(x, y)
        assert len(calls) == 1
        drop.inplace, drop.p = False, 0.9
        more = net(ones(3, 4, 9))
    assert (more == 0).sum() > (y == 0).sum()
    assert more.unique().tolist() == pytest.approx([0.0, 10.0])
    assert "p=0.9, inplace=False, locked=False, name='encoder.0'" in repr(net)
    drop.eval()
    assert torch.equal(net(ones(3, 4, 9)), ones(3, 4, 9))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Sequential(nn.ReLU(), nn.Dropout(0.4)))
        self.shared = self.again = nn.Dropout(0.2)
        self.inner = LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.shared(self.net(x)))
        return out


def test_torch_dropout_becomes_keyed_by_its_path() -> None:
    encoder = keyed(Encoder(), "encoder")
    found = {path: module for path, module in encoder.named_modules(remove_duplicate=False) if isinstance(module, Dropout)}
    assert {path: (module.p, module.name) for path, module in found.items()} == {
        "net.1": (0.3, "encoder.net.1"),
        "net.2.1": (0.4, "encoder.net.2.1"),
        "shared": (0.2, "encoder.shared"),
        "again": (0.2, "encoder.shared"),  # the same module; within a scope its second use draws another mask
    }
    assert not [module for module in encoder.modules() if type(module) is nn.Dropout]
    assert encoder.get_submodule("inner").path == "encoder.inner"
    x = torch.randn(4, 3, 3)
    with random.Scope(KEY, torch.arange(3), 0):
        whole = encoder(x)
    with random.Scope(KEY, torch.arange(1, 3), 2):
        assert torch.equal(encoder(x[2:, 1:]), whole[2:, 1:])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(4), "encoder.1 is a BatchNorm1d in training mode, .*use cw.GlobalNorm"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.Dropout1d(0.1), "encoder.1 is a Dropout1d, .*locked=True"),
        (nn.Dropout2d(0.1), "Dropout2d"),
        (nn.AlphaDropout(0.1), "AlphaDropout"),
        (nn.RReLU(), "RReLU.*LeakyReLU"),
        (nn.GRU(4, 4, 2, dropout=0.1), "GRU with dropout=0.1"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention with dropout=0.1"),
    ],
)
def test_what_cannot_be_keyed_is_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        keyed(nn.Sequential(nn.Linear(3, 4), module), "encoder")


def test_a_module_used_twice_draws_two_masks_and_repeats_both() -> None:
    drop = Dropout(0.5, name="encoder.drop").train()
    x = torch.ones(4, 3, 8)
    pairs = []
    for _ in range(2):
        with random.Scope(random.key(1), torch.arange(3)):
            pairs.append((drop(x), drop(x)))
    assert not torch.equal(pairs[0][0], pairs[0][1])
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][1], pairs[1][1])
