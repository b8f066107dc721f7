"""Gradients of gradients and torch.func on a GPU: right, or refused in one line; and batches without lanes.

Shapes: T time, B lane, U unit, N rows, V classes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from carrywave.errors import UserError
from carrywave.kernels import cross_entropy, dropout, random
from carrywave.kernels.cuda import aligned
from carrywave.kernels.dropout import Coordinates, dropped
from carrywave.model.lstm import LSTM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", dtype).requires_grad_()


def penalty(lstm: LSTM, x: Tensor) -> list[Tensor]:
    leaves = [x, *lstm.parameters()]
    first = torch.autograd.grad(lstm(x)[0].sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))  # type: ignore[arg-type]


def test_the_definition_has_second_derivatives_and_cudnn_says_that_it_has_none() -> None:
    torch.manual_seed(0)
    lstm, x = LSTM(3, 4, 2, device="cuda", dtype=torch.float64), numbers(5, 2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"(?i)double backwards? is not supported for cudnn"):
        penalty(lstm, x)
    lstm.kernel = "reference"
    on_gpu = penalty(lstm, x)
    with torch.backends.cudnn.flags(enabled=False):
        lstm.kernel = "aten"
        # Sums of some dozen terms in float64, in another order.
        torch.testing.assert_close(penalty(lstm, x), on_gpu, rtol=1e-9, atol=1e-12)
    beside = LSTM(3, 4, 2, dtype=torch.float64)
    beside.load_state_dict(lstm.state_dict())
    there = penalty(beside, x.detach().cpu().requires_grad_())
    torch.testing.assert_close([each.cpu() for each in on_gpu], there, rtol=1e-9, atol=1e-12)


def test_the_persistent_kernel_refuses() -> None:
    lstm, x = LSTM(64, 64, 2, device="cuda", dtype=torch.bfloat16), numbers(40, 8, 64, dtype=torch.bfloat16)
    if LSTM.backends.choose("auto", x, lstm.weights(0)) != "persistent":
        pytest.skip("the persistent kernel does not run here")
    y, _ = lstm(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(
        UserError, match="the persistent recurrent kernel has no second derivative; build the layers with kernel='reference'"
    ):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_torch_func_goes_through_plain_operations() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.bfloat16):
        lstm, x = LSTM(64, 64, device="cuda", dtype=dtype).eval(), numbers(5, 8, 64, dtype=dtype).detach()
        given = {name: each.detach() for name, each in lstm.named_parameters()}

        def loss(given: dict[str, Tensor], x: Tensor, lstm: LSTM = lstm) -> Tensor:
            total: Tensor = torch.func.functional_call(lstm, given, (x,))[0].float().square().sum()
            return total

        of_each = torch.func.vmap(torch.func.grad(loss), (None, 1))(given, x)
        lstm(x)[0].float().square().sum().backward()
        for name, each in lstm.named_parameters():
            assert each.grad is not None
            apart = (of_each[name].double().sum(0) - each.grad.double()).norm() / each.grad.double().norm()
            assert apart < (1e-10 if dtype == torch.float64 else 2**-4)  # bf16 has 8 bits, of which sums over steps lose some


@pytest.mark.parametrize("locked", [False, True])
def test_dropout_goes_through_its_definition(locked: bool) -> None:
    x, key, place = numbers(6, 3, 20), random.key(3).cuda(), Coordinates(7, 0.5, locked)
    dropped(x, key, None, place)
    assert not dropout._cuda_kernel.failures
    [first] = torch.autograd.grad(dropped(x, key, None, place).square().sum(), x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x)
    mask = dropout._defined(x.detach(), key, None, place).expand_as(x)
    torch.testing.assert_close(second, 2.0 * mask * mask, rtol=0, atol=0)


@pytest.mark.parametrize("classes", [50, 51])  # rows that are read in place, and rows that are copied first
def test_cross_entropy_goes_through_torchs(classes: int) -> None:
    logits, target = numbers(12, classes, dtype=torch.bfloat16), torch.arange(12, device="cuda")
    target[3] = -100
    found = []
    for total in (
        cross_entropy.summed(logits, target, -100),
        functional.cross_entropy(logits.float(), target, ignore_index=-100, reduction="sum"),
    ):
        [plain] = torch.autograd.grad(total, logits, retain_graph=True)
        [first] = torch.autograd.grad(total, logits, create_graph=True)
        [second] = torch.autograd.grad(first.float().square().sum(), logits)
        found.append((plain, first, second))
    assert not cross_entropy._cuda_kernel.failures
    torch.testing.assert_close(found[0], found[1], rtol=2**-7, atol=1e-4)  # bf16 has 8 bits


def test_a_linear_layer_under_autocast_refuses() -> None:
    x, weight = numbers(16, 20), numbers(33, 20)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert aligned.serves(x, weight)
        y = aligned.linear(x, weight, None)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(UserError, match="under autocast has no second derivative; compute without autocast"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_lanes(dtype: torch.dtype) -> None:
    lstm = LSTM(64, 64, 2, dropout=0.5, device="cuda", dtype=dtype)
    y, (h, c) = lstm(torch.zeros(5, 0, 64, device="cuda", dtype=dtype))
    assert [list(each.shape) for each in (y, h, c)] == [[5, 0, 64], [2, 0, 64], [2, 0, 64]]
    (y.sum() + h.sum() + c.sum()).backward()
    assert all(each.grad is not None and not each.grad.any() for each in lstm.parameters())
