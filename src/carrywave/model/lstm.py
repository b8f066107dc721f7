"""`LSTM`, `GRU`, `RNN`, and the classes of the other cells: `cw.SLSTM` is made from the cell `slstm`, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from carrywave.cells import gru, lstm, rnn, rnn_relu
from carrywave.cells.cell import by_name, names
from carrywave.errors import UserError
from carrywave.kernels.dispatch import backends_of
from carrywave.model.recurrent import Recurrent


class LSTM(Recurrent):
    """Stacked LSTM with all of nn.LSTM's options, one width or a list of widths, and several kinds of keyed dropout.

    >>> import torch
    >>> import carrywave as cw
    >>> lstm = cw.LSTM(input_size=3, hidden_size=8, num_layers=2)
    >>> y, carry = lstm(torch.zeros(5, 4, 3), lengths=[5, 5, 3, 2])  # instead of packing
    >>> y, carry = lstm(torch.zeros(5, 4, 3), carry)  # and on from there
    >>> torch.nn.LSTM(3, 8, num_layers=2).load_state_dict(lstm.state_dict())
    <All keys matched successfully>
    """

    cell = lstm.CELL


class GRU(Recurrent):
    """Stacked GRU with all of nn.GRU's options, and those of `cw.LSTM` but the projection. Its carry is one tensor, h.

    >>> import torch
    >>> import carrywave as cw
    >>> gru = cw.GRU(input_size=3, hidden_size=8, num_layers=2)
    >>> y, h = gru(torch.zeros(5, 4, 3), lengths=[5, 5, 3, 2])
    >>> tuple(y.shape), tuple(h.shape)
    ((5, 4, 8), (2, 4, 8))
    >>> torch.nn.GRU(3, 8, num_layers=2).load_state_dict(gru.state_dict())
    <All keys matched successfully>
    """

    cell = gru.CELL


class RNN(Recurrent):
    """Stacked layers of the plain cell, h' = tanh(W x + U h + b), with all of nn.RNN's options; with nonlinearity="relu", of relu instead.

    >>> import torch
    >>> import carrywave as cw
    >>> rnn = cw.RNN(input_size=3, hidden_size=8, nonlinearity="relu")
    >>> y, h = rnn(torch.zeros(5, 4, 3), lengths=[5, 5, 3, 2])
    >>> torch.nn.RNN(3, 8, nonlinearity="relu").load_state_dict(rnn.state_dict())
    <All keys matched successfully>
    """

    cell = rnn.CELL

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *options: Any,
        **named: Any,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise UserError(f"{type(self).__name__} got nonlinearity={nonlinearity!r}; use 'tanh' or 'relu'")
        if nonlinearity == "relu":
            self.cell, self.backends = rnn_relu.CELL, backends_of(rnn_relu.CELL)  # type: ignore[misc]
        super().__init__(input_size, hidden_size, num_layers, *options, **named)
        self.nonlinearity = nonlinearity


@cache
def class_of(name: str) -> type[Recurrent]:
    """The class whose layers have the cell of this name."""
    cell = by_name(name)
    for layers_class in (LSTM, GRU, RNN):
        if cell is layers_class.cell:
            return layers_class
    same = f", with the weights and answers of torch.nn.{cell.torch_module}" if cell.torch_module else ""
    return type(name.upper(), (Recurrent,), {"cell": cell, "__module__": __name__, "__doc__": f"Layers of the cell {name}{same}."})


def __getattr__(name: str) -> Any:
    """The class of a cell under its own name in capitals, where pickling looks for it."""
    if name.isupper() and name.lower() in names():
        return class_of(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
