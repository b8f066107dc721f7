"""`LSTM`, `GRU`, and the classes of the other cells: `cw.RNN` is made from the cell `rnn`, and so on."""

from __future__ import annotations

from functools import cache
from typing import Any

from carrywave.cells import gru, lstm
from carrywave.cells.cell import by_name, names
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


@cache
def class_of(name: str) -> type[Recurrent]:
    """The class whose layers have the cell of this name."""
    cell = by_name(name)
    for layers_class in (LSTM, GRU):
        if cell is layers_class.cell:
            return layers_class
    same = f", with the weights and answers of torch.nn.{cell.torch_module}" if cell.torch_module else ""
    return type(name.upper(), (Recurrent,), {"cell": cell, "__module__": __name__, "__doc__": f"Layers of the cell {name}{same}."})


def __getattr__(name: str) -> Any:
    """The class of a cell under its own name in capitals, where pickling looks for it."""
    if name.isupper() and name.lower() in names():
        return class_of(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
