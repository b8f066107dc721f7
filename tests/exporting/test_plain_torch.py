"""Weights under their names outside, in plain torch modules: nn.Embedding, nn.LSTM, nn.LayerNorm, as docs/export.md says."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _export_models import MODELS, made

from carrywave.cells.cell import Cell
from carrywave.exporting.portable import Portable
from carrywave.model.encoders import Features
from carrywave.model.heads.forecast import Forecast
from carrywave.model.over_time.front import Front
from carrywave.model.portable_names import arguments, outside
from carrywave.step.worker_setup import tensors_of

# ONNX and C show what these heads make of the layers.
BUILT_DIFFERENTLY = ("adaptive", "transcription", "normal", "student_t", "poisson", "binomial")


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def stack(weights: dict[str, Tensor], cell: Cell, listed: list[dict[str, int]], x: Tensor) -> Tensor:
    """The layers as a user of plain torch would build them."""
    for number, each in enumerate(listed):
        lstm = getattr(nn, str(cell.torch_module))(**each, dtype=torch.float64)
        lstm.load_state_dict(below(weights, "lstm." if len(listed) == 1 else f"lstm.{number}."))
        first, depth = (0, each["num_layers"]) if len(listed) == 1 else (number, 1)
        carry = None
        if "carry.h.0" in weights:
            rows = ([weights[f"carry.{part}.{layer}"] for layer in range(first, first + depth)] for part in cell.parts)
            carry = tuple(torch.cat(row)[:, None].expand(-1, x.shape[1], -1).contiguous() for row in rows)
        x, _ = lstm(x, carry if carry is None or len(carry) > 1 else carry[0])
        norm = below(weights, f"norms.{number}.")
        if norm:
            x = nn.functional.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"])
    return x


@pytest.mark.parametrize("name", [name for name in MODELS if not any(word in name for word in BUILT_DIFFERENTLY)])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_plain_modules_compute_what_the_model_computes(name: str) -> None:
    model = made(name).double()
    tensors = tensors_of(model)
    weights = {theirs: tensors[ours] for ours, theirs in outside(tensors, model.lstm).items()}
    portable = Portable(model)
    given = portable.sample(3, 5, seed=1)
    if portable.takes_lengths:
        given[-1] = torch.full((3,), 5)
    with torch.no_grad():
        [expected] = portable(*given)
        x = given[0].transpose(0, 1)
        x = x if "embedding.weight" not in weights else nn.functional.embedding(x, weights["embedding.weight"])
        if isinstance(model.encoder, Features):
            codes = given[1].transpose(0, 1)
            looked_up = [weights[f"categories.{place}.weight"][codes[..., at]] for at, place in enumerate(model.encoder.inputs.places)]
            x = torch.cat([x, *looked_up], dim=-1)
        for number, layer in enumerate(model.encoder.layers if isinstance(model.encoder, Front) else ()):
            kernel, bias = weights[f"front.{number}.weight"], weights[f"front.{number}.bias"]
            x = nn.functional.conv1d(x.permute(1, 2, 0), kernel, bias, layer.stride, layer.kernel // 2).permute(2, 0, 1)
            norm = below(weights, f"front_norms.{number}.")
            x = nn.functional.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"]).relu()
        y = stack(weights, model.lstm.cell, arguments(model.lstm), x)
        if model.pooled:
            half = y.shape[-1] // 2
            last = torch.cat([y[-1, :, :half], y[0, :, half:]], dim=-1) if "both ways" in name else y[-1]
            pooled = {
                "last": lambda: last,
                "mean": lambda: y.mean(0),
                "max": lambda: y.amax(0),
                "mean_max": lambda: torch.cat([y.mean(0), y.amax(0)], dim=-1),
                "attention": lambda: ((y @ weights["head.query"]).softmax(0)[..., None] * y).sum(0),
            }
            out = nn.functional.linear(pooled[str(model.head.pooling)](), weights["head.weight"], weights["head.bias"])
        else:
            out = nn.functional.linear(y, weights.get("head.weight", weights.get("embedding.weight")), weights["head.bias"])
        if isinstance(model.head, Forecast):
            out = out.view(5, 3, model.head.horizon, model.head.outputs, -1)
            rises = nn.functional.softplus(out[..., 1:] - math.log(2))
            out = torch.cat([out[..., :1], out[..., :1] + rises.cumsum(-1)], -1) if "quantiles" in name else out
            if model.head.past_steps:
                past = dict(zip((port.name for port in portable.inputs), given, strict=True))["past"].transpose(0, 1)
                unit = past.var(-1, correction=0).clamp(min=0.01).sqrt()[:, :, None, :, None] if model.head.scaled else 1.0
                line = torch.einsum("tbcn,cnk->tbkc", past - past[..., -1:], weights["head.line.weight"]) + weights["head.line.bias"].T
                out = unit * out + line[..., None]
            out = out if "quantiles" in name else out[..., 0]
    out = out if model.pooled else out.transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)  # float64
