"""`Clients`: what a model carries for each of many clients, as rows of a few tensors that grow with their number.

Shapes: N rows, of clients and for more of them; B clients of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from carrywave.errors import UserError

Client = str | int
FIRST_ROWS = 8


class Clients:
    """`initial` is the state before the first step, [1, …] each. A client that is seen for the first time has it."""

    def __init__(self, initial: Sequence[Tensor]) -> None:
        self._initial = [part.detach().clone() for part in initial]
        self._parts = [part.new_empty((0, *part.shape[1:])) for part in self._initial]
        self._rows: dict[Client, int] = {}
        self._free: list[int] = []

    def __iter__(self) -> Iterator[Client]:
        return iter(tuple(self._rows))

    def rows(self, clients: Sequence[Client]) -> Tensor:
        """The row of each of them [B], new ones included."""
        rows = self._rows
        numbers = [rows[client] if client in rows else self._begin(client) for client in clients]
        return torch.tensor(numbers, device=self._parts[0].device)

    def read(self, rows_B: Tensor) -> list[Tensor]:
        """The state of these rows, a copy: [B, …] each."""
        return [part.index_select(0, rows_B) for part in self._parts]

    def write(self, rows_B: Tensor, state: Sequence[Tensor]) -> None:
        """Replace the state of these rows."""
        for part, new in zip(self._parts, state, strict=True):
            part.index_copy_(0, rows_B, new)

    def reset(self, client: Client) -> None:
        """Give a client the initial state again."""
        self._put(self._row_of(client), self._initial)

    def forget(self, client: Client) -> None:
        """Remove a client; its row is for another one."""
        self._free.append(self._row_of(client))
        del self._rows[client]

    def _row_of(self, client: Client) -> int:
        if client not in self._rows:
            raise UserError(f"there is no client {client!r}; a client is there from its first step until it is forgotten")
        return self._rows[client]

    def _begin(self, client: Client) -> int:
        if isinstance(client, bool) or not isinstance(client, str | int):
            raise UserError(f"a client is named by a {type(client).__name__}; use a string or a whole number")
        if not self._free:
            first = len(self._parts[0])
            more = max(FIRST_ROWS, first)  # twice as many as before
            self._parts = [torch.cat((part, part.new_empty((more, *part.shape[1:])))) for part in self._parts]
            self._free = list(reversed(range(first, first + more)))
        row = self._rows[client] = self._free.pop()
        self._put(row, self._initial)
        return row

    def _put(self, row: int, state: Sequence[Tensor]) -> None:
        for part, new in zip(self._parts, state, strict=True):
            part[row : row + 1] = new
