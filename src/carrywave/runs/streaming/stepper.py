"""`stepper(run)`: a trained run that answers after every step, for many clients at once, each with a carry of its own.

A step costs the same however long the sequence has become. Shapes: B client, F feature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.data.files.fields import numbers
from carrywave.data.tables.moments import standardise, unusable
from carrywave.data.text.tokenizers import Words
from carrywave.errors import DataError, RunError, UserError
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.scoring import at_least_float32
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.runs.checkpoint.atomic_files import read_metadata, read_tensors, replacing, write_tensors, writing
from carrywave.runs.streaming.clients import Client, Clients
from carrywave.runs.streaming.step_function import StepFunction
from carrywave.runs.trained_run import open_run
from carrywave.tasks.task import Task

CLASSES = ("language", "classification", "tagging")  # tasks whose outputs are logits
HEADS = (
    Softmax,
    PooledSoftmax,
    AdaptiveSoftmax,
    Sigmoid,
    PooledSigmoid,
    PooledNumbers,
    StepNumbers,
)  # of ours, those whose outputs are understood here


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
        self._initial = dict(zip([*self._function.names(), "recent"], [*self._function.initial, *recent_2], strict=False))
        self._clients = Clients([*self._initial.values()])
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

    def save(self, path: Path | str) -> None:
        """Write the state of all clients as safetensors: a tensor [clients, …] for each part of it."""
        path = Path(path)
        with self._lock, torch.inference_mode():
            names = self.clients
            state = self._clients.read(self._clients.rows(names)) if names else [part[:0] for part in self._initial.values()]
        about = {"clients": json.dumps(names), "weights": self._weights()}
        with writing(f"the state of the clients in {path}"), replacing(path) as file:
            write_tensors(file, dict(zip(self._initial, state, strict=True)), about, sealed=True)

    def load(self, path: Path | str) -> None:
        """Continue with the clients of a file that `save` wrote, in place of the present ones."""
        path = Path(path)
        about, tensors = read_metadata(path), read_tensors(path)
        initial = self._initial
        if not {"clients", "weights"} <= about.keys():
            raise RunError(f"{path} has no clients in it; pass a file that a stepper has saved")
        if about["weights"] != self._weights() or tensors.keys() != initial.keys():
            raise RunError(f"{path} holds what other weights made of their inputs; pass the file that the stepper of this run has saved")
        clients = Clients([*initial.values()])
        with self._lock, torch.inference_mode():
            names = json.loads(about["clients"])
            if names:
                clients.write(clients.rows(names), [tensors[name].to(part) for name, part in initial.items()])
            self._clients = clients

    def _weights(self) -> str:
        """A hash of everything that the state depends on."""
        digest = hashlib.sha256()
        for module in (self._function.encoder, self._function.lstm, self._function.head):
            for name, tensor in module.state_dict().items():
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

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
