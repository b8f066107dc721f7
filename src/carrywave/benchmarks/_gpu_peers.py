"""Shared by `bench kernels` and `bench step`: GPU timing, LSTM stacks runnable by every implementation, and plain training loops.

Calls are timed with CUDA events, in blocks of back-to-back calls that each start with an idle GPU, so time spent waiting for the host
counts. A CUDA graph is captured after a warm-up on a side stream, as torch requires.

Nothing here reads a spec, so the kernels can be timed where only torch is installed.

Shapes: T time, B lane, I input, H hidden, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from carrywave.benchmarks._peers import PlainLanguageModel
from carrywave.benchmarks._stack_shape import StackShape
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries, Carry
from carrywave.kernels.layers import run_layers
from carrywave.kernels.weights import Layer, LayerWeights

Call = Callable[[], object]
Windows = Sequence[tuple[Tensor, Tensor]]  # inputs and targets, both [T, B]
Clock = Callable[[Call, int], float]  # (call, repeats) -> milliseconds per call

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_UP = 2  # calls, in which libraries initialise and select algorithms
# Large enough that gradients which shrink through eight layers stay normal (not subnormal) in fp16, and small enough that sums stay finite.
GRADIENT_SCALE = 8.0


def check_gpu(bench: str) -> None:
    """A user error if there is no GPU. Leaves it alone: only other processes may be going to use it."""
    if not torch.cuda.is_available():
        raise UserError(f"bench {bench} needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU")


def cuda_device(bench: str) -> torch.device:
    """The GPU to benchmark on; a user error if there is none."""
    check_gpu(bench)
    return torch.device("cuda", torch.cuda.current_device())


def elapsed_ms(call: Call, repeats: int) -> float:
    """Milliseconds per call, averaged over `repeats` back-to-back calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def take_turns(
    calls: Mapping[str, Call], *, block_ms: float, budget_ms: float, rounds: tuple[int, int], clock: Clock = elapsed_ms
) -> dict[str, list[float]]:
    """Milliseconds of each call in every round. A round gives each call a block of about `block_ms`; all rounds take about `budget_ms`."""
    first_ms = {name: clock(call, 1) for name, call in calls.items()}
    repeats = {name: max(1, round(block_ms / max(ms, 1e-3))) for name, ms in first_ms.items()}
    round_ms = sum(ms * repeats[name] for name, ms in first_ms.items())
    least, most = rounds
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(least, min(most, int(budget_ms / max(round_ms, 1e-3))))):
        for name, call in calls.items():
            found[name].append(clock(call, repeats[name]))
    return found


def on_a_side_stream(call: Call, times: int) -> None:
    """Run a call on a side stream, the warm-up that CUDA graph capture requires."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(side)


def warmed_up(call: Call) -> Call:
    """The call itself, after warming it up."""
    for _ in range(WARM_UP):
        call()
    return call


def graphed(call: Call) -> Call:
    """The call captured as a CUDA graph; its return value is dropped."""
    on_a_side_stream(call, WARM_UP)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def one_line(error: BaseException) -> str:
    """An error, shortened to a note in a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


# Stacks of layers


@dataclass(frozen=True)
class Case(StackShape):
    """A stack and its batch, in one precision."""

    dtype: str = "bf16"
    lengths: bool = False
    dropout: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, units, lanes, steps."""
        return self.layers, self.hidden, self.lanes, self.steps

    @property
    def words(self) -> frozenset[str]:
        """The words that select this case."""
        return frozenset((*self.name.split(), self.dtype, "lengths" if self.lengths else "padded", f"dropout{self.dropout:g}"))

    @property
    def lane_steps(self) -> list[int]:
        """Real steps of each lane: all T, or spread evenly from T down to T/4, longest first, the order that suits packing best."""
        if not self.lengths:
            return [self.steps] * self.lanes
        return [max(1, round(self.steps * (1 - 0.75 * lane / max(1, self.lanes - 1)))) for lane in range(self.lanes)]


class Stack:
    """Weights, inputs and output gradient for one case. Each method returns the outputs and the gradients of inputs and weights.

    Ours keeps the weights in float32 and casts them in every call, as training does; `nn.LSTM` holds them in the short dtype. The values
    are exactly representable in both, so any error comes from the arithmetic.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.dtype = case, DTYPES[case.dtype]
        draw = torch.Generator(device).manual_seed(1)
        shape = (case.steps, case.lanes, case.hidden)
        bound = case.hidden**-0.5

        def normal() -> Tensor:
            return torch.randn(shape, generator=draw, device=device).to(self.dtype)

        def weight(*size: int) -> Tensor:
            drawn = torch.empty(size, device=device).uniform_(-bound, bound, generator=draw)
            return drawn.to(self.dtype).to(torch.float32).requires_grad_()

        wide = 4 * case.hidden
        self.x_TBI = normal().requires_grad_()
        self.layers: list[Layer] = [
            (LayerWeights(weight(wide, case.hidden), weight(wide, case.hidden), weight(wide), weight(wide)),) for _ in range(case.layers)
        ]
        start = torch.zeros(1, case.lanes, case.hidden, device=device)
        self.carries = (Carry(start, start),) * case.layers
        self.lengths_B = torch.tensor(case.lane_steps, device=device) if case.lengths else None
        self.grad_TBH = normal() * GRADIENT_SCALE
        if self.lengths_B is not None:
            # No loss depends on outputs beyond a lane's length.
            beyond_TB = torch.arange(case.steps, device=device)[:, None] >= self.lengths_B
            self.grad_TBH.masked_fill_(beyond_TB[..., None], 0.0)
        self.key = random.key(1).to(device)

    def ours(self, backend: str) -> list[Tensor]:
        """Our LSTM on a given backend."""
        device = self.x_TBI.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            y_TBH, _ = self._lstm(self.x_TBI, self.carries, self.layers, backend)
        return _with_gradients(y_TBH, [self.x_TBI, *self._weights(self.layers)], self.grad_TBH)

    def exact(self) -> list[Tensor]:
        """The reference implementation in float64."""
        x_TBI = self.x_TBI.detach().double().requires_grad_()
        layers = [tuple(each.to(torch.float64) for each in layer) for layer in self.layers]
        carries = tuple(Carry(carry.h.double(), carry.c.double()) for carry in self.carries)
        y_TBH, _ = self._lstm(x_TBI, carries, layers, "reference")
        return _with_gradients(y_TBH, [x_TBI, *self._weights(layers)], self.grad_TBH.double())

    def nn_lstm(self) -> list[Tensor]:
        """`nn.LSTM` on the whole stack, which is cuDNN on a GPU. With lengths it packs and unpacks."""
        start_LBH = self._start_LBH
        if self.lengths_B is None:
            y_TBH = self._module(self.x_TBI, (start_LBH, start_LBH))[0]
        else:
            packed = pack_padded_sequence(self.x_TBI, self._lengths_on_host)
            y_TBH, _ = pad_packed_sequence(self._module(packed, (start_LBH, start_LBH))[0], total_length=self.case.steps)
        return _with_gradients(y_TBH, [self.x_TBI, *self._module.parameters()], self.grad_TBH)

    def _lstm(self, x_TBI: Tensor, carries: tuple[Carry, ...], layers: Sequence[Layer], backend: str) -> tuple[Tensor, AnyCarries]:
        sites = range(self.case.layers - 1)
        return run_layers(x_TBI, carries, layers, self.lengths_B, dropout=self.case.dropout, key=self.key, sites=sites, backend=backend)

    @staticmethod
    def _weights(layers: Sequence[Layer]) -> list[Tensor]:
        return [tensor for layer in layers for each in layer for tensor in each if tensor is not None]

    @cached_property
    def _module(self) -> nn.LSTM:
        case = self.case
        module = nn.LSTM(case.hidden, case.hidden, case.layers, dropout=case.dropout, device=self.x_TBI.device, dtype=self.dtype)
        with torch.no_grad():
            for own, tensor in zip(module.parameters(), self._weights(self.layers), strict=True):
                own.copy_(tensor)
            if self.x_TBI.is_cuda and self.dtype == torch.bfloat16:
                # nn.LSTM flattens its weights itself, except in bf16, where cuDNN would copy them into one buffer on every call.
                _gather_weights(module)
        return module

    @cached_property
    def _start_LBH(self) -> Tensor:
        return self.x_TBI.new_zeros(self.case.layers, *self.x_TBI.shape[1:])

    @cached_property
    def _lengths_on_host(self) -> Tensor:
        return torch.tensor(self.case.lane_steps)


def _gather_weights(module: nn.LSTM) -> None:
    weights: list[Tensor] = list(module.parameters())
    mode: int = get_cudnn_mode("LSTM")  # type: ignore[no-untyped-call]
    torch._cudnn_rnn_flatten_weight(weights, 4, module.input_size, mode, module.hidden_size, 0, module.num_layers, False, False)


def _with_gradients(y_TBH: Tensor, inputs: Sequence[Tensor], grad_TBH: Tensor) -> list[Tensor]:
    return [y_TBH.detach(), *torch.autograd.grad([y_TBH], inputs, [grad_TBH])]


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest |found - exact| / |exact| over all tensors, in the Euclidean norm; NaN if any of them is NaN."""
    errors = [(ours.double() - true).norm() / true.norm().clamp(min=1e-300) for ours, true in zip(found, exact, strict=True)]
    return float(torch.stack(errors).max())


# Training loops


@dataclass(frozen=True)
class Recipe:
    """A language model and its training settings."""

    layers: int
    hidden: int
    lanes: int
    steps: int
    vocabulary: int
    optimizer: str
    lr: float
    clip: float
    dropout: float = 0.0
    tied: bool = False
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """The name shown in the table."""
        return f"{self.layers}x{self.hidden} B{self.lanes} T{self.steps} V{self.vocabulary} {self.optimizer}"

    def windows(self, count: int, device: torch.device) -> Windows:
        """Consecutive windows of random tokens. As in text, some tokens are far more frequent than others."""
        draw = torch.Generator().manual_seed(2)
        share = torch.rand(count * self.steps + 1, self.lanes, generator=draw, dtype=torch.float64)
        tokens = (share**4 * self.vocabulary).long().to(device)
        edges = [(number * self.steps, (number + 1) * self.steps) for number in range(count)]
        return [(tokens[first:end].clone(), tokens[first + 1 : end + 1].clone()) for first, end in edges]


class PlainLoop:
    """Truncated back-propagation in plain PyTorch: nn.Embedding, nn.LSTM and nn.Linear under autocast, the fused optimizer.

    `weights` is the state dict of our model, under its names; all loops start from the same weights.
    """

    capturable = False

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        self.recipe, self.windows, self.number = recipe, windows, 0
        self.device = windows[0][0].device
        self.model = _plain_model(recipe, weights).to(self.device)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, recipe.lr, fused=True)
        else:
            self.optimizer = torch.optim.Adam(parameters, recipe.lr, fused=True, capturable=self.capturable)
        start_LBH = torch.zeros(recipe.layers, recipe.lanes, recipe.hidden, dtype=DTYPES[recipe.precision], device=self.device)
        self.carry = (start_LBH, start_LBH.clone())

    def step(self) -> Tensor:
        """One optimizer step on the next window; returns its loss."""
        x_TB, target_TB = self.windows[self.number % len(self.windows)]
        self.number += 1
        return self._train_on(x_TB, target_TB)

    def _train_on(self, x_TB: Tensor, target_TB: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss, h_LBH, c_LBH = self._score(x_TB, target_TB, *self.carry)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self._keep(h_LBH.detach(), c_LBH.detach())
        return loss.detach()

    def _score(self, x_TB: Tensor, target_TB: Tensor, h_LBH: Tensor, c_LBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = DTYPES[self.recipe.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits_TBV, (h_LBH, c_LBH) = self.model(x_TB, (h_LBH, c_LBH))
            return cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten()), h_LBH, c_LBH

    def _keep(self, h_LBH: Tensor, c_LBH: Tensor) -> None:
        self.carry = (h_LBH, c_LBH)


class CompiledLoop(PlainLoop):
    """The same loop, with forward and loss under torch.compile."""

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        super().__init__(recipe, weights, windows)
        self._compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compile(super()._score, dynamic=False)

    def _score(self, x_TB: Tensor, target_TB: Tensor, h_LBH: Tensor, c_LBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._compiled(x_TB, target_TB, h_LBH, c_LBH)


class GraphedLoop(PlainLoop):
    """The same loop as a CUDA graph: the whole step is captured, on static tensors."""

    capturable = True

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        super().__init__(recipe, weights, windows)
        self._x_TB, self._target_TB = (tensor.clone() for tensor in windows[0])
        on_a_side_stream(self._again, WARM_UP)
        self.optimizer.zero_grad(set_to_none=True)  # so that gradients are allocated from the graph's memory pool
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._loss = self._again()

    def _again(self) -> Tensor:
        return super()._train_on(self._x_TB, self._target_TB)

    def _train_on(self, x_TB: Tensor, target_TB: Tensor) -> Tensor:
        self._x_TB.copy_(x_TB)
        self._target_TB.copy_(target_TB)
        self._graph.replay()
        return self._loss.clone()

    def _keep(self, h_LBH: Tensor, c_LBH: Tensor) -> None:
        for own, new in zip(self.carry, (h_LBH, c_LBH), strict=True):
            own.copy_(new)


def _plain_model(recipe: Recipe, weights: Mapping[str, Tensor]) -> PlainLanguageModel:
    model = PlainLanguageModel(recipe.vocabulary, recipe.hidden, recipe.layers, recipe.dropout)
    if recipe.tied:
        model.linear.weight = model.embedding.weight
    theirs = {"embedding": "encoder", "linear": "head"}
    names = {name: ".".join(theirs.get(part, part) for part in name.split(".")) for name in model.state_dict()}
    model.load_state_dict({name: weights[ours] for name, ours in names.items()})
    return model


def check_falls(losses: Sequence[float], cycle: int) -> str:
    """Describe what is wrong with the losses of a loop that cycles over the same windows; empty if nothing is."""
    if not all(abs(loss) < float("inf") for loss in losses):  # False for NaN too
        return "its loss is not finite"
    first, last = statistics.median(losses[:cycle]), statistics.median(losses[-cycle:])
    return "" if last < first else f"its loss does not fall: {first:.4f}, then {last:.4f}"
