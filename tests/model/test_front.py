"""`Front` against plain convolutions: padding changes nothing, lengths follow, and what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.initialization import initialize
from carrywave.model.over_time.front import shorter

DOUBLE = torch.float64
LAYERS = st.lists(st.tuples(st.integers(2, 5), st.sampled_from((1, 3, 5, 9)), st.integers(1, 4)), min_size=1, max_size=3)


def _front(layers: list[tuple[int, int, int]], features: Any = 3, dropout: float = 0.0, **more: Any) -> cw.Front:
    named = [dict(zip(("channels", "kernel", "stride"), layer, strict=True)) for layer in layers]
    return cw.Front(features, named, dropout, **more).double()


def _alone(front: cw.Front, x_TF: Tensor) -> Tensor:
    """A whole sequence, as one would write it in torch."""
    if front.scales:
        mean_F, deviation_F = x_TF.mean(0), (x_TF.var(0, correction=0) + 1e-6).sqrt()
        facts = torch.cat([mean_F, deviation_F - 1]).clamp(-5, 5).expand(len(x_TF), -1)
        x_TF = torch.cat([x_TF, (x_TF - mean_F) / deviation_F, facts], 1)
    y_CT = x_TF.T
    for convolution, norm in zip(front.convolutions, front.norms, strict=True):
        assert isinstance(convolution, nn.Conv1d)
        y_CT = functional.conv1d(
            y_CT[None], convolution.weight, convolution.bias, convolution.stride, [size // 2 for size in convolution.kernel_size]
        )[0]
        if isinstance(norm, nn.LayerNorm):
            y_CT = norm(y_CT.T).relu().T
        else:
            normed_CT = (y_CT - y_CT.mean()) / (y_CT.var(correction=0) + 1e-6).sqrt()
            y_CT = (normed_CT * norm.weight[:, None] + norm.bias[:, None]).relu()  # type: ignore[operator, index]
    return y_CT.T


@given(LAYERS, st.lists(st.integers(0, 17), min_size=1, max_size=4), st.integers(0, 5), st.booleans())
@settings(max_examples=40)
def test_a_padded_lane_gives_what_its_sequence_gives_alone(
    layers: list[tuple[int, int, int]], lengths: list[int], more: int, scales: bool
) -> None:
    torch.manual_seed(1)
    front, steps = _front(layers, scales=scales), max(1, max(lengths) + more)
    x = torch.randn(steps, len(lengths), 3, dtype=DOUBLE)
    dirty = torch.where((torch.arange(steps)[:, None] < torch.tensor(lengths))[..., None], x, torch.nan)
    y, after = front(dirty, torch.tensor(lengths)), shorter(torch.tensor(lengths), front.stride)
    assert y.shape == (-(-steps // front.stride), len(lengths), front.width)
    for lane, length in enumerate(lengths):
        assert int(after[lane]) == -(-length // front.stride)
        if length:
            torch.testing.assert_close(y[: after[lane], lane], _alone(front, x[:length, lane]), rtol=1e-11, atol=1e-12)


def test_weights_are_keyed_and_complete() -> None:
    models = [cw.Model(_front([(4, 5, 2)]), cw.LSTM(4, 5), PooledSoftmax(5, 3, "attention")) for _ in range(2)]
    assert [initialize(model, 3) for model in models] == [(), ()]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    encoder = models[0].encoder
    assert isinstance(encoder, cw.Front)
    bound = (3 * 5) ** -0.5
    convolution = encoder.convolutions[0]
    assert isinstance(convolution, nn.Conv1d)
    assert 0.8 * bound < convolution.weight.abs().max() <= bound


class _EverySecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[::2]


def _pooled() -> cw.Model:
    return cw.Model(_front([(4, 3, 2)]), cw.LSTM(4, 5), PooledSoftmax(5, 3)).float()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cw.Front(3, "large"), "use none, small, deep"),
        (lambda: cw.Front(3, []), "no layers"),
        (lambda: cw.Front(0), "0 features"),
        (lambda: cw.Front(nn.Linear(3, 4)), "a module with a `width`"),
        (lambda: _front([(4, 4, 2)]), "kernel is 4.*use 5"),
        (lambda: _front([(4, 3, 0)]), "stride"),
        (lambda: cw.Model(_front([(4, 3, 2)]), cw.LSTM(4, 5), Softmax(5, 3)), "stride 2 leaves fewer steps.*Softmax scores every step"),
        (
            lambda: cw.Trainer(_pooled(), plan={"chunk_steps": 3}),
            "whole sequences, but plan.chunk_steps=3.*use plan.micro_batches",
        ),
        (lambda: cw.Trainer(_pooled(), {"beta": 1.0}), "train.beta=1 penalises changes"),
        (
            lambda: cw.Trainer(cw.Model(_front([(4, 3, 1)]), cw.LSTM(4, 5), Softmax(5, 3)).float(), keep_state=True),
            "the model reads whole sequences",
        ),
        (lambda: cw.Trainer(_pooled(), keep_state=True), r"keeps the carry .* pools"),
        (lambda: _pooled()(torch.zeros(5, 2, 7)), r"3 features, but got \[5, 2, 7\]"),
        (lambda: cw.Model(_EverySecond(), cw.LSTM(3, 5), PooledSoftmax(5, 3))(torch.zeros(6, 2, 3)), "makes 3 steps of 6.*cw.Front"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises((UserError, PlanError), match=words):
        make()
