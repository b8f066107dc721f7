"""Initial weights keyed by (seed, parameter name) and by row and column: the same on every worker and in any order of initialisation.

Generated in float64, then cast, so that the dtype affects only rounding. Uniform numbers are exact on every device, so a parameter draws
them where it is, a block at a time; others are drawn on the CPU. The last bits of orthogonal matrices depend on the CPU and its threads.
Parameters on torch's meta device, which other workers hold, are passed over.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from carrywave.data.text.spelling import OTHER
from carrywave.errors import SpecError
from carrywave.kernels import random
from carrywave.model.encoders import Embedding, Tables
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.forecast import Forecast, PastLine
from carrywave.model.heads.pooled import Pooled, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.recurrent import Recurrent
from carrywave.model.vocabulary.spelled_words import SpelledWords

INITS = ("torch", "orthogonal", "xavier")
UNIT_VARIANCE = math.sqrt(3.0)  # the bound of uniform numbers with this variance
SHARED_SCALE = 0.1  # the bound of a matrix that is embedding and softmax, and of the tables of categories
BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # drawn at once: all of a matrix in float64 would take several times its own memory


class Uniform(NamedTuple):
    """Numbers between -bound and bound."""

    bound: float


class _Scales(NamedTuple):
    """Within which bounds embeddings and softmaxes are drawn."""

    asked: float | None
    softmaxes: set[int]  # the identities of their matrices

    def of(self, module: Embedding | Softmax) -> float:
        if self.asked is not None:
            return self.asked
        if isinstance(module, Softmax):
            return 1.0 / math.sqrt(module.width)
        return SHARED_SCALE if id(module.weight) in self.softmaxes else UNIT_VARIANCE


def initialize(
    model: nn.Module, seed: int, *, init: str = "torch", forget_bias: float | None = None, init_scale: float | None = None
) -> tuple[str, ...]:
    """Set every parameter of the modules it knows; return the names of the others, from user modules, which are left unchanged.

    `init_scale`: embeddings and softmaxes lie within ± this; by default embeddings have variance 1 and softmaxes lie within ±1/√width, as
    torch's do, and a matrix that is both within ±`SHARED_SCALE`.
    """
    if init not in INITS:
        raise SpecError(f"model.init={init} is unknown; use one of {', '.join(INITS)}")
    left: list[str] = []
    done: set[int] = set()
    scales = _Scales(init_scale, {id(module.weight) for module in model.modules() if isinstance(module, Softmax)})
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue  # tied: already set under its first name
            done.add(id(parameter))
            if parameter.is_meta:
                continue
            full_name = f"{path}.{name}" if path else name
            key = random.key(seed, random.site(full_name))
            value = _value(module, name, tuple(parameter.shape), key, init, forget_bias, scales)
            if value is None:
                left.append(full_name)
                continue
            with torch.no_grad():
                if isinstance(value, Uniform):
                    _fill(parameter, key, value)
                else:
                    parameter.copy_(value)
    return tuple(left)


def rounded_by_host(model: nn.Module, init: str) -> frozenset[str]:
    """The names of parameters whose last bits depend on the host that draws them: orthogonal ones, after a QR decomposition."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if init == "orthogonal" and isinstance(module, Recurrent)
        for name, _ in module.named_parameters(recurse=False)
        if name.startswith("weight_hh")
    )


def _value(
    module: nn.Module, name: str, shape: tuple[int, ...], key: Tensor, init: str, forget_bias: float | None, scales: _Scales
) -> Tensor | Uniform | None:
    if isinstance(module, Recurrent):
        return _layer(module, name, shape, key, init, forget_bias)
    if isinstance(module, Embedding) or (isinstance(module, Softmax) and name == "weight"):
        return Uniform(scales.of(module))
    if isinstance(module, (PooledSoftmax, Ctc, CRF)) and name == "weight" and scales.asked is not None:
        return Uniform(scales.asked)
    if isinstance(module, Tables):
        value = _uniform(key, shape, SHARED_SCALE if scales.asked is None else scales.asked)
        value[0] = 0.0  # of values that train does not contain
        return value
    if isinstance(module, SpelledWords):
        value = _uniform(key, shape, UNIT_VARIANCE)
        value[OTHER] = 0.0  # no training text has such a character
        return value
    if isinstance(module, nn.Embedding):
        value = _grid(random.normal, key, shape)
        if module.padding_idx is not None:
            value[module.padding_idx] = 0.0
        return value
    if isinstance(module, PastLine | WordScores) or (isinstance(module, Forecast) and module.line is not None):
        value = torch.zeros(shape)  # the layers add nothing yet to the line
        if isinstance(module, Forecast) and name == "bias" and module.quantiles is not None:
            steps = len(module.quantiles) - 1  # above the first quantile, each a rise of softplus(-log(steps))
            value.view(-1, steps + 1)[:, 0] = -0.5 * steps * math.log1p(1.0 / max(1, steps))
        return value
    if isinstance(module, (Softmax, Ctc, CRF, Forecast, Pooled, StepNumbers)):
        zeros = ("bias", "query", "start", "transitions", "end")
        return torch.zeros(shape) if name in zeros else Uniform(1.0 / math.sqrt(shape[-1]))
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return torch.ones(shape) if name == "weight" else torch.zeros(shape)
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return Uniform(1.0 / math.sqrt(module.weight[0].numel()))
    return None


def _layer(module: Recurrent, name: str, shape: tuple[int, ...], key: Tensor, init: str, forget_bias: float | None) -> Tensor | Uniform:
    if name.startswith("carry"):
        return torch.zeros(shape)
    cell, (stem, _, layer) = module.cell, name.removesuffix("_reverse").rpartition("_l")
    hidden = module.widths[int(layer)]
    if (extra := module.further(int(layer)).get(stem)) is not None:
        return torch.full(shape, extra.value)
    if name.startswith("bias"):
        value = _uniform(key, shape, 1.0 / math.sqrt(hidden)) if init == "torch" else torch.zeros(shape, dtype=torch.float64)
        if forget_bias is not None and cell.forget_gate is not None:
            value[cell.forget_gate * hidden :][:hidden] = forget_bias if name.startswith("bias_ih") else 0.0
        return value
    if init == "torch":
        return Uniform(1.0 / math.sqrt(hidden))
    blocks = 1 if name.startswith("weight_hr") else cell.gates * (module.num_heads if name.startswith("weight_hh") else 1)
    if init == "orthogonal" and name.startswith("weight_hh"):
        return torch.cat([_orthogonal(block) for block in _grid(random.normal, key, shape).chunk(blocks)])
    # The matrices of the gates are stacked: the fan-out of each is its share of the rows.
    return Uniform(math.sqrt(6.0 / (shape[0] // blocks + shape[1])))


def _orthogonal(block: Tensor) -> Tensor:
    q, r = torch.linalg.qr(block)
    # The signs of R's diagonal are up to the library; fixing them makes Q a function of the block alone, and uniformly distributed.
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return signed


def _fill(parameter: Tensor, key: Tensor, numbers: Uniform) -> None:
    """Draw a parameter's numbers in place, on its device."""
    device = parameter.device
    rows = parameter.shape[0]
    size = max(1, BLOCK_ELEMENTS["cuda" if device.type == "cuda" else "cpu"] * rows // max(1, parameter.numel()))
    for low in range(0, rows, size):
        block = parameter[low : low + size]
        block.copy_(_uniform(key.to(device), tuple(block.shape), numbers.bound, low))


def _uniform(key: Tensor, shape: tuple[int, ...], bound: float, first: int = 0) -> Tensor:
    return _grid(random.uniform, key, shape, first).mul_(2.0 * bound).sub_(bound)


def _grid(draw: random.Draw, key: Tensor, shape: tuple[int, ...], first: int = 0) -> Tensor:
    """Float64 numbers keyed by (row, column), in rows from `first` on; further dimensions are flattened into columns."""
    rows = torch.arange(first, first + shape[0], device=key.device)
    if len(shape) == 1:
        return draw(key, rows, dtype=torch.float64)
    columns = torch.arange(math.prod(shape[1:]), device=key.device)
    return draw(key, rows[:, None], columns, dtype=torch.float64).view(shape)
