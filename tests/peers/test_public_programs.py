"""What public programs do with nn.LSTM, nn.GRU and nn.RNN, shortened, with ours in their place: with the same seed, the same losses and
weights to rounding. The programs, in float64, in which only the order of sums differs:

- the word language model of pytorch/examples: windows of streams, the state detached and passed on, weights tied, plain SGD by hand;
- char-rnn (spro/char-rnn.pytorch): one step a call, trained through all of them, and text drawn from the model;
- a captioner (yunjey/pytorch-tutorial): packed sequences that begin with a picture, then greedy search, step by step;
- the weight drop of AWD-LSTM (salesforce/awd-lstm-lm): a recurrent weight taken out of the module's parameters, and one that is dropped
  put in its place before every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pack_padded_sequence

import carrywave as cw

WORDS, LANES = 23, 4


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def detached(state: Any) -> Any:
    return state.detach() if isinstance(state, Tensor) else tuple(detached(part) for part in state)


def language_model(of: Any, kind: str, **options: Any) -> list[Tensor]:
    rnn = getattr(of, kind)(12, 12, 2, dropout=0.0, **options)
    rows, out, drop = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS), nn.Dropout(0.2)
    out.weight = rows.weight
    nn.init.uniform_(rows.weight, -0.1, 0.1)
    model = nn.ModuleList([rows, rnn, out, drop])
    stream = torch.randint(WORDS, (40, LANES))
    zeros = next(model.parameters()).new_zeros(2, LANES, 12)
    state: Any = (zeros, zeros.clone()) if kind == "LSTM" else zeros
    losses = []
    for begin in range(0, len(stream) - 1, 9):  # the last window is shorter
        tokens, targets = stream[begin : begin + 9][: len(stream) - 1 - begin], stream[begin + 1 : begin + 10]
        model.zero_grad()
        y, state = rnn(drop(rows(tokens)), detached(state))
        loss = cross_entropy(out(drop(y)).view(-1, WORDS), targets.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-5.0)
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        return [*losses, rnn(rows(stream), state)[0], *(each.detach() for each in model.parameters())]


def characters(of: Any, kind: str) -> list[Tensor]:
    rows, rnn, out = nn.Embedding(WORDS, 8), getattr(of, kind)(8, 8, 2), nn.Linear(8, WORDS)
    model = nn.ModuleList([rows, rnn, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = rnn(rows(tokens).view(1, len(tokens), -1), state)
        return out(y.view(len(tokens), -1)), state

    def start(lanes: int) -> Any:
        zeros = torch.zeros(2, lanes, 8)
        return (zeros, zeros.clone()) if kind == "LSTM" else zeros

    losses = []
    for _ in range(3):
        text, state, loss = torch.randint(WORDS, (LANES, 15)), start(LANES), torch.zeros(())
        model.zero_grad()
        for place in range(14):
            scores, state = step(text[:, place], state)
            loss = loss + cross_entropy(scores, text[:, place + 1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    drawn, state = [torch.tensor([3])], start(1)
    for _ in range(12):
        scores, state = step(drawn[-1], state)
        drawn.append(torch.multinomial(scores.detach().view(-1).div(0.8).exp(), 1))
    return [*losses, torch.cat(drawn), *(each.detach() for each in model.parameters())]


def captions(of: Any) -> list[Tensor]:
    rows, rnn, out = nn.Embedding(WORDS, 10), of.LSTM(10, 9, 2, batch_first=True), nn.Linear(9, WORDS)
    model = nn.ModuleList([rows, rnn, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pictures, words, lengths = torch.randn(LANES, 10), torch.randint(WORDS, (LANES, 7)), [7, 6, 6, 2]
    losses = []
    for _ in range(3):
        inputs = torch.cat((pictures[:, None], rows(words)), 1)
        packed, _ = rnn(pack_padded_sequence(inputs, lengths, batch_first=True))
        loss = cross_entropy(out(packed[0]), pack_padded_sequence(words, lengths, batch_first=True)[0])
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    said, inputs, state = [], pictures[:, None], None
    with torch.no_grad():
        for _ in range(5):
            y, state = rnn(inputs, state)
            said.append(out(y.squeeze(1)).max(1)[1])
            inputs = rows(said[-1])[:, None]
    return [*losses, torch.stack(said, 1), *(each.detach() for each in model.parameters())]


class Dropping(nn.Module):
    """The recurrent weight of a layer, dropped anew before every call."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        weight = layer.weight_hh_l0
        del layer._parameters["weight_hh_l0"]
        layer.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.data))

    def forward(self, *given: Any) -> Any:
        self.layer.weight_hh_l0 = dropout(self.layer.weight_hh_l0_raw, 0.5, self.training)
        return self.layer.forward(*given)


def dropped_weights(of: Any) -> list[Tensor]:
    rows, out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
    layers = [Dropping(of.LSTM(inputs, units, 1, dropout=0)) for inputs, units in ((8, 11), (11, 11), (11, 8))]
    out.weight = rows.weight
    model = nn.ModuleList([rows, *layers, out])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-6)
    stream = torch.randint(WORDS, (31, LANES))
    states: list[Any] = [None] * 3
    losses = []
    for begin in range(0, 30, 10):
        y = rows(stream[begin : begin + 10])
        for place, layer in enumerate(layers):
            y, states[place] = layer(y, None if states[place] is None else detached(states[place]))
        loss = cross_entropy(out(y).flatten(0, 1), stream[begin + 1 : begin + 11].flatten()) + (y[1:] - y[:-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach() for each in model.parameters())]


PROGRAMS: dict[str, Callable[[Any], list[Tensor]]] = {
    "word language model, LSTM": lambda of: language_model(of, "LSTM"),
    "word language model, GRU": lambda of: language_model(of, "GRU"),
    "word language model, RNN_RELU": lambda of: language_model(of, "RNN", nonlinearity="relu"),
    "char-rnn, LSTM": lambda of: characters(of, "LSTM"),
    "char-rnn, GRU": lambda of: characters(of, "GRU"),
    "captions": captions,
    "weight drop": dropped_weights,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_gives_what_it_gave(program: Callable[[Any], list[Tensor]]) -> None:
    found = []
    for of in (nn, cw):
        torch.manual_seed(1)
        with in_float64():
            found.append(program(of))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)  # sums in another order, over a few steps of training
    assert len(found[0]) > 5
    assert not torch.equal(found[0][0], found[0][1])  # it learns something
