"""`Portable`: a trained model as other runtimes see it, with named tensors in and out and lanes first.

It defines what every export must compute. `stateful`: one call reads one part of each sequence; the carry goes in and comes out, `fresh`
lanes start a new sequence, and lanes that are not `ready` keep their state. `step`: one call reads one step, by the definition of the cell,
so that a trace of it has no recurrent operator.

Shapes: T time, B lane ("batch" to other runtimes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.data.text.spelling import EDGE, FIRST
from carrywave.errors import UserError
from carrywave.kernels import reference
from carrywave.kernels.reference import Rest
from carrywave.model.encoders import Embedding, Features, Numbers
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import Pooled, PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.model.state import State
from carrywave.model.vocabulary.spelled_words import SpelledWords, token_embedding
from carrywave.spec.data_spec import PARAMETERS

BATCH, TIME, ANSWERS = "batch", "time", "answers"  # the sizes that are free; answers: of a transcription, for all steps together
NEXT = "_next"  # what the name of a state has at its end when it comes out
OUTPUTS = {
    Softmax: "logits",
    Sigmoid: "logits",
    PooledSoftmax: "logits",
    PooledSigmoid: "logits",
    AdaptiveSoftmax: "log_probabilities",
    CRF: "tags",
    Forecast: "forecast",
    DistributionForecast: "parameters",
    PooledNumbers: "values",
    StepNumbers: "values",
    Ctc: "log_probabilities",
}

Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from the inputs in order to the outputs in order


@dataclass(frozen=True)
class Port:
    """A tensor that goes in or comes out; a size that is a name is free."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def to_json(self) -> dict[str, Any]:
        """As the description of an export has it."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}


def step_encoder(model: Model) -> nn.Module | None:
    """What encodes single steps: the encoder, or what a front has before it; None: numbers go into the front as they are."""
    return model.encoder.step_encoder if isinstance(model.encoder, Front) else model.encoder


class Portable(nn.Module):
    """A model behind ports: x [B, T, …], characters [B, T, L] of words or codes [B, T, K] of categories if it reads any, past values
    [B, T, C, N] if its head does and, where they matter, lengths [B]; if stateful, fresh and ready [B, 1] and the state; of one step, no T
    and the state.
    """

    def __init__(self, model: Model, *, stateful: bool = False, step: bool = False) -> None:
        super().__init__()
        if (stateful or step) and model.reads_whole:
            reader = "a front reads" if model.has_front else "the head reads" if model.whole_head else "bidirectional layers read"
            raise UserError(
                f"{reader} whole sequences, so there is no carry to pass on; export whole sequences, with --to onnx or --to torch alone"
            )
        if type(model.head) not in OUTPUTS or not isinstance(step_encoder(model), Embedding | SpelledWords | Numbers | Features | None):
            parts = f"{type(model.encoder).__name__} and {type(model.head).__name__}"
            raise UserError(f"{parts} are not carrywave's own encoder and head, which alone can be exported; export your module yourself")
        self.model = model
        self.stateful, self.step = stateful, step
        dtype = model.lstm.dtype
        # Elsewhere padding at the end of a lane changes none of its real outputs.
        self.takes_lengths = not step and (stateful or model.pooled or model.reads_whole)
        lengths = (Port("lengths", torch.int64, (BATCH,)),) if self.takes_lengths else ()
        flags = tuple(Port(name, torch.bool, (BATCH, 1)) for name in ("fresh", "ready")) if stateful else ()
        self.state: tuple[Port, ...] = self._state(dtype) if stateful or step else ()
        head = model.head if isinstance(model.head, Forecast) and model.head.past_steps else None
        past = () if head is None else (Port("past", dtype, (BATCH, TIME, head.past_columns, head.past_steps)),)
        self.read = tuple(self._timed(port) for port in (*self._encoded(dtype), *past))  # what is read of each step
        self.inputs: tuple[Port, ...] = (*self.read, *lengths, *flags, *self.state)
        kind = torch.int64 if isinstance(model.head, CRF) else dtype
        result = self._timed(Port(OUTPUTS[type(model.head)], kind, self._result()))
        self.outputs: tuple[Port, ...] = (result, *(Port(port.name + NEXT, port.dtype, port.shape) for port in self.state))

    @property
    def encoder(self) -> nn.Module | None:
        """What encodes single steps."""
        return step_encoder(self.model)

    def _timed(self, port: Port) -> Port:
        """A port of many steps as it is of this model: a single step has no time."""
        return replace(port, shape=tuple(size for size in port.shape if size != TIME)) if self.step else port

    def _encoded(self, dtype: torch.dtype) -> tuple[Port, ...]:
        encoder = self.encoder
        if isinstance(encoder, Embedding):
            return (Port("x", torch.int64, (BATCH, TIME)),)
        if isinstance(encoder, SpelledWords):
            return Port("x", torch.int64, (BATCH, TIME)), Port("characters", torch.int64, (BATCH, TIME, encoder.length))
        if isinstance(encoder, Features):
            codes = Port("codes", torch.int64, (BATCH, TIME, len(encoder.inputs.places)))
            return Port("x", dtype, (BATCH, TIME, encoder.inputs.numbers)), codes
        width = self.model.encoder.features if isinstance(self.model.encoder, Front) else self.model.lstm.input_size
        return (Port("x", dtype, (BATCH, TIME, width)),)

    def _state(self, dtype: torch.dtype) -> tuple[Port, ...]:
        lstm, ports = self.model.lstm, []
        for layer in range(lstm.num_layers):
            ports += [Port(f"{part}_l{layer}", dtype, (BATCH, width)) for part, width in lstm.carry_widths(layer).items()]
        if isinstance(self.model.head, Pooled):
            ports += [Port("pooled", dtype, (BATCH, self.model.head.row_width)), Port("count", torch.int64, (BATCH, 1))]
        return tuple(ports)

    def _result(self) -> tuple[int | str, ...]:
        head = self.model.head
        if isinstance(head, DistributionForecast):
            return BATCH, TIME, head.horizon, head.outputs, len(PARAMETERS[head.distribution])
        if isinstance(head, Forecast):
            last = () if head.quantiles is None else (len(head.quantiles),)
            return BATCH, TIME, head.horizon, head.outputs, *last
        if isinstance(head, Ctc):
            return BATCH, ANSWERS, head.classes
        if isinstance(head, PooledNumbers):
            return BATCH, head.outputs
        if isinstance(head, StepNumbers):
            return BATCH, TIME, head.outputs
        if isinstance(head, CRF):
            return BATCH, TIME
        classes = int(head.classes)  # type: ignore[arg-type]
        return (BATCH, classes) if self.model.pooled else (BATCH, TIME, classes)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The outputs for these inputs, both in the order of the ports."""
        named = dict(zip((port.name for port in self.inputs), given, strict=True))
        if self.step:
            named |= {port.name: named[port.name][:, None] for port in self.read}
        x = named["x"]
        if "codes" in named:
            x = torch.cat([x, named["codes"].to(x.dtype)], dim=-1)  # as data is stored: float32 holds every code below 2**24
        if "characters" in named:
            x = torch.cat([x[..., None], named["characters"]], dim=-1)
        x = x.transpose(0, 1)
        if self.model.stride > 1:
            # Two steps are left of any sequence then: torch.export takes a size that may be 1 for another case. Padding changes nothing.
            x = torch.cat([x, x.new_zeros(self.model.stride, *x.shape[1:])])
        lengths_B, fresh_B, state = named.get("lengths"), None, None
        if self.state:
            cell, layers = self.model.lstm.cell, range(self.model.lstm.num_layers)
            carries = tuple(cell.carry(*(named[f"{part}_l{layer}"][None] for part in cell.parts)) for layer in layers)
            state = State(carries, (named["pooled"], named["count"][:, 0]) if self.model.pooled else None)
        if self.stateful:
            assert lengths_B is not None
            lengths_B = torch.where(named["ready"][:, 0], lengths_B, 0)
            fresh_B = named["fresh"][:, 0]
        y, state = self._one_step(x, state) if self.step else self.model(x, state, lengths_B, fresh=fresh_B)
        lengths = lengths_B if self.model.whole_head else None
        past = named.get("past")
        if isinstance(self.model.head, CRF) and self.model.head.past_steps:
            past = named["characters"][..., None]
        out = self.model.output(y, state, lengths, past=None if past is None else past.transpose(0, 1))
        out = out if self.model.pooled and not self.model.whole_head else out[0] if self.step else out.transpose(0, 1)
        if not self.state:
            return (out,)
        carried = [part[0] for carry in state.carries for part in carry]
        return out, *carried, *((state.acc[0], state.acc[1][:, None]) if self.model.pooled else ())

    def _one_step(self, x_1B: Tensor, state: State | None) -> tuple[Tensor, State]:
        """What the head reads at one step, [1, B, W], and the state after it."""
        assert state is not None
        lstm, y_BO, ends = self.model.lstm, self.model.encoder(x_1B)[0], []
        for index, carry in enumerate(state.carries):
            [weights] = lstm.weights(index)
            rest = Rest(lstm.cell, weights.by_heads(carry[0].shape[-1]), shares=lstm.zoneout)
            after, y_BO = reference.step({"gates": weights.inputs(y_BO)}, rest, [part[0] for part in carry])
            ends.append(lstm.cell.carry(*(part[None] for part in after)))
            y_BO = getattr(lstm, f"norm_l{index}")(y_BO) if lstm.layer_norm else y_BO
        head, acc = self.model.head, state.acc
        if isinstance(head, Pooled):
            assert acc is not None
            acc = head.pool(y_BO[None], torch.ones_like(acc[1]), (acc[0], acc[1]))
        return y_BO[None], State(tuple(ends), acc)

    def start(self, lanes: int) -> list[Tensor]:
        """The state before the first step."""
        carries = [part[0].detach() for carry in self.model.lstm.initial(lanes) for part in carry]
        return [*carries, *(torch.zeros(lanes, *map(int, port.shape[1:]), dtype=port.dtype) for port in self.state[len(carries) :])]

    def sample(self, lanes: int, steps: int, seed: int) -> list[Tensor]:
        """Inputs of this size: random, with lanes of different lengths, of which the first is full and one, if there are several, empty."""
        draw, sizes = torch.Generator().manual_seed(seed), {BATCH: lanes, TIME: steps}
        cell = self.model.lstm.cell
        bound = [part for part in cell.parts if part not in cell.free_parts]  # whose values are possible only together with others
        first = {port.name: part for port, part in zip(self.state, self.start(lanes), strict=False)}
        tensors = []
        for port in self.inputs:
            shape = [sizes[size] if isinstance(size, str) else size for size in port.shape]
            if port.name.partition("_l")[0] in bound:
                tensors.append(first[port.name])
            elif port.name == "x" and (words := token_embedding(self.encoder)) is not None:
                tensors.append(torch.randint(words.vocabulary, shape, generator=draw))
            elif port.name == "characters" and isinstance(self.encoder, SpelledWords):
                tensors.append(torch.randint(FIRST, self.encoder.codes, shape, generator=draw))
                tensors[-1][..., 1 + seed % shape[-1] :] = EDGE
            elif port.name == "codes" and isinstance(self.encoder, Features):
                tables, places = self.encoder.inputs.tables, self.encoder.inputs.places
                tensors.append(torch.stack([torch.randint(tables[place][0], shape[:-1], generator=draw) for place in places], dim=-1))
            elif port.name == "lengths":
                lengths = torch.randint(1, steps + 1, shape, generator=draw)
                lengths[0] = steps
                lengths[-1] = steps if lanes == 1 else 0
                tensors.append(lengths)
            elif port.name == "count":
                tensors.append(torch.randint(1, 9, shape, generator=draw))
            elif port.dtype == torch.bool:
                flags = torch.rand(shape, generator=draw) < 0.5
                flags[0] = port.name == "ready"  # the full lane takes part and goes on
                tensors.append(flags)
            else:
                tensors.append(torch.randn(shape, generator=draw, dtype=torch.float32).to(port.dtype))
                if port.name == "pooled" and getattr(self.model.head, "pooling", "") == "attention":
                    tensors[-1][:, -2] = 1.0 + tensors[-1][:, -2].abs()  # a sum of weights, of which one is 1
        return tensors
