"""`stepper(run)`: a trained run that answers after every step, for many clients at once, each with a carry of its own.

A step costs the same however long the sequence has become. What a model carries for its clients are rows of a few tensors that grow with
their number. Shapes: N rows, of clients and for more of them; B clients of one step, F feature, W width of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.data.files.fields import numbers
from carrywave.data.tables.moments import standardise, unusable
from carrywave.data.text.tokenizers import Words
from carrywave.errors import DataError, UserError
from carrywave.kernels.reference import Rest, step
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.scoring import at_least_float32
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.model import Model
from carrywave.prediction.saved_run import open_run
from carrywave.tasks.task import Task

Client = str | int
FIRST_ROWS = 8
CLASSES = ("language", "classification", "tagging")  # tasks whose outputs are logits
# Of ours, those whose outputs are understood here.
HEADS = (Softmax, PooledSoftmax, AdaptiveSoftmax, Sigmoid, PooledSigmoid, PooledNumbers, StepNumbers)


def stepper(run: Path | str, *, device: str = "auto", model: nn.Module | None = None) -> Stepper:
    """The best weights of a run, to be fed step by step. `model` is the model of a run that was trained with the user's own modules.

    >>> import carrywave as cw
    >>> sequences = [([[float(up)]] * 4, "up" if up else "down") for up in [0, 1] * 10]
    >>> how = {"task": "classification", "batch": {"tokens": 64}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "bidirectional": False, "front": "none"}, sequences, **how)
    >>> stepper = cw.stepper(result.run)
    >>> out = stepper.step({"first": [0.0], "second": [1.0]})
    >>> out = stepper.step({"second": [1.0]})
    >>> dict(zip(stepper.labels, out["second"].tolist())).keys()
    dict_keys(['down', 'up'])
    """
    saved = open_run(run, device, model, whole=True)
    return Stepper(saved.model, saved.task)


class Stepper:
    """Takes one step of any number of clients at a time, and keeps the state of each; the first step of a client begins its sequence.

    Outputs are those of `predict` for the sequence so far: the probability of each of `labels` (the next token of a language model, the tag
    of the step, the class of the sequence until now), or the numbers of a regression, in their units. They are computed in the dtype of the
    weights, also for a model that was trained in half precision. Several threads may share a stepper.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        codec = task.codec
        if codec.task == "forecasting":
            raise UserError("a forecaster reads earlier rows of its series at every step, and forecasts from them; use predict")
        if codec.masked or codec.categorical:
            what = (
                "data.missing=mask, which counts the steps since each value" if codec.masked else "categories, which have no numbers here"
            )
            raise UserError(f"a stepper takes plain numbers, but the model reads {what}; use predict")
        if codec.own_scale:
            raise UserError("data.standardize=sequence needs the whole sequence for its scale; train with true or false, or use predict")
        self.codec = codec
        self._function = StepFunction(model.eval())
        head = self._function.head
        if type(head).__module__.startswith("carrywave.") and type(head) not in HEADS:
            raise UserError(f"a stepper cannot name the outputs of a head {type(head).__name__}; use predict")
        self._ends = task.document_ends  # after which a sequence begins anew
        recent_2 = [torch.full((1, 2), -1, device=self._function.device)] if self._ends is not None else []
        self._clients = Clients([*self._function.initial, *recent_2])
        self._lock = Lock()
        names = codec.vocabulary if codec.task == "language" else codec.labels
        self.labels: tuple[str, ...] = tuple(names)  # what each of the probabilities is for; none if tokens are bytes, pairs or numbers
        self._several = task.spec.data.multi_label  # any number of labels may hold, each by itself
        units = (codec.target_std, codec.target_mean) if codec.task == "regression" else ()
        self._units = [torch.tensor(values, dtype=torch.float64, device=self._function.device) for values in units]

    @property
    def clients(self) -> tuple[Client, ...]:
        """Those that have a state."""
        return tuple(self._clients)

    def step(self, rows: Mapping[Client, Any]) -> dict[Client, Tensor]:
        """The output for each client after one more step, whose inputs are as in the data: the numbers of the step, a token or its id."""
        if not rows:
            return {}
        return dict(zip(rows, self.step_rows(list(rows), list(rows.values())), strict=True))

    def step_rows(self, clients: Sequence[Client], rows: Any) -> Tensor:
        """The outputs [clients, …] after one more step of each of these clients; `rows` are an array [clients, features], or tokens."""
        if len(set(clients)) != len(clients) or len(clients) != len(rows) or not len(clients):
            raise UserError(f"{len(set(clients))} different clients for {len(rows)} rows; pass one row for each, and each client once")
        x = self._encoded(clients, rows)
        with self._lock, torch.inference_mode():
            rows_B = self._clients.rows(clients)
            before = self._clients.read(rows_B)
            recent = [] if self._ends is None else [self._begun_anew(x, before)]
            out, state = self._function(x, before)
            self._clients.write(rows_B, [*state, *recent])
        if self.codec.task in CLASSES:
            out = at_least_float32(out)
            return out.sigmoid() if self._several else out.softmax(dim=-1)
        std, mean = self._units
        return out.double() * std + mean

    def _begun_anew(self, x: Tensor, before: list[Tensor]) -> Tensor:
        """Give clients whose last token ended a document the initial state, in place; returns the last two tokens of each [B, 2]."""
        assert self._ends is not None
        recent_B2, tokens_B = before.pop(), x if x.dim() == 1 else x[:, 0]
        tokens_B3 = torch.cat((recent_B2, tokens_B[:, None]), dim=1)
        read = [np.array([token for token in tokens if token >= 0]) for tokens in tokens_B3.tolist()]
        fresh_B = torch.tensor([bool(self._ends.begins(each, np.array(len(each) - 1))) for each in read], device=tokens_B.device)
        for place, (part, first) in enumerate(zip(before, self._function.initial, strict=True)):
            before[place] = torch.where(fresh_B.reshape(-1, *[1] * (part.dim() - 1)), first, part)
        return tokens_B3[:, 1:]

    def reset(self, client: Client) -> None:
        """Begin a new sequence with the next step of this client."""
        with self._lock, torch.inference_mode():
            self._clients.reset(client)

    def forget(self, client: Client) -> None:
        """Drop the state of a client that will not come back."""
        with self._lock:
            self._clients.forget(client)

    def _encoded(self, clients: Sequence[Client], rows: Any) -> Tensor:
        """The rows as the model reads them."""
        function = self._function
        if self.codec.word_length:
            if not all(isinstance(row, str) for row in rows):
                raise DataError("this model reads the characters of words, which an id does not tell; pass the words themselves")
            ids_B = np.array([self._token(row, client) for row, client in zip(rows, clients, strict=True)], np.int32)
            return torch.from_numpy(self.codec.spelled(ids_B, rows)).long().to(function.device)
        if self.codec.kind is not None:
            ids = [self._token(row, client) for row, client in zip(rows, clients, strict=True)]
            return torch.tensor(ids, device=function.device)
        columns = len(self.codec.columns)
        numbers_BF = numbers(rows, "the step", "a stepper")
        numbers_BF = numbers_BF[:, None] if numbers_BF.ndim == 1 else numbers_BF
        if numbers_BF.shape != (len(clients), columns):
            raise DataError(f"steps of {len(clients)} clients have shape {list(numbers_BF.shape)}; pass {columns} numbers for each client")
        bad_BF = unusable(numbers_BF)
        if bad_BF.any():
            place, column = (int(at) for at in np.argwhere(bad_BF)[0])
            value, name = numbers_BF[place, column], self.codec.columns[column]
            raise DataError(f"client {clients[place]!r}: column {name} is {value}, not a finite number (below 1e25); fill the gap")
        x_BF = standardise(numbers_BF, self.codec.mean, self.codec.std)
        return torch.from_numpy(x_BF).to(function.device, function.dtype)

    def _token(self, row: Any, client: Client) -> int:
        codec = self.codec
        if not isinstance(row, str):
            whole = isinstance(row, int | np.integer) or (isinstance(row, Tensor) and row.numel() == 1 and not row.is_floating_point())
            number = int(row) if whole and not isinstance(row, bool) else -1
            if not 0 <= number < codec.size:
                raise DataError(f"client {client!r}: {row!r:.40} is not a token; pass its text, or an id from 0 to {codec.size - 1}")
            return number
        if codec.kind == "int":
            raise DataError(f"client {client!r}: tokens of this model are whole numbers, got {row!r:.40}; pass an id")
        if codec.field == "tokens" and isinstance(codec.tokens, Words):
            ids = codec.tokens.word_ids([row])
        else:
            ids = codec.encode(row, f"client {client!r}")
        if len(ids) != 1:
            raise DataError(f"client {client!r}: {row!r:.40} is {len(ids)} tokens; pass one at a time, or the ids of codec.encode(text)")
        return int(ids[0])


class StepFunction:
    """The state is a list of tensors [B, …]: the parts of each layer's carry, then what a pooled head has accumulated."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, Model):
            raise UserError("a module in one piece has no carry to keep between steps; train cw.Model(encoder, lstm, head) instead")
        for whole, what, remedy in (
            (model.has_front, "a front reads over time", "set model.front=none"),
            (model.lstm.bidirectional, "bidirectional layers read the end of a sequence first", "set model.bidirectional=false"),
            (model.whole_head, f"the head {type(model.head).__name__} reads whole sequences", "use one that reads single steps, or pools"),
        ):
            if whole:
                raise UserError(
                    f"a stepper gives its answer before the sequence ends, but {what}; {remedy} and train again, or use predict"
                )
        if not model.has_output:
            raise UserError(f"head {type(model.head).__name__} has no forward method, so it cannot predict; add one")
        self.encoder, self.head, self.pooled = model.encoder, model.head, model.pooled
        self.lstm = lstm = model.lstm
        with torch.no_grad():
            # Its hooks compute the weights, if they are pruned or normalised.
            lstm(torch.zeros(1, 1, lstm.input_size, dtype=lstm.dtype, device=next(lstm.parameters()).device))
            self.cell, shares = lstm.cell, lstm.zoneout if any(lstm.zoneout) else ()
            weights = [lstm.weights(layer)[0].by_heads(lstm.outputs(layer)) for layer in range(lstm.num_layers)]
            self.layers = [Rest(lstm.cell, each, shares=shares) for each in weights]
            self.norms = [getattr(lstm, f"norm_l{layer}") if lstm.layer_norm else None for layer in range(lstm.num_layers)]
            self.dtype, self.device = lstm.dtype, weights[0].w_ih.device
            acc = model.head.start(1, self.dtype, self.device) if self.pooled else ()  # type: ignore[operator]
            self.initial: list[Tensor] = [*(part[0] for carry in lstm.initial(1) for part in carry), *acc]

    def __call__(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The head's output [B, …] for inputs [B, …], and the state after them; to be called in inference mode."""
        parts, after = len(self.cell.parts), list[Tensor]()
        y_BW: Tensor = self.encoder(x[None])[0]
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            carry, y_BW = step({"gates": layer.weights.inputs(y_BW)}, layer, state[number * parts : (number + 1) * parts])
            after.extend(carry)
            y_BW = y_BW if norm is None else norm(y_BW)
        if not self.pooled:
            out: Tensor = self.head(y_BW[None])[0]
            return out, after
        one_B = torch.ones(len(y_BW), dtype=torch.int64, device=y_BW.device)
        acc = self.head.pool(y_BW[None], one_B, tuple(state[len(after) :]))  # type: ignore[operator]
        return self.head(acc), [*after, *acc]


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
