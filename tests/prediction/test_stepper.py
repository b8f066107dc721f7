"""Streaming: a step at a time, with clients coming and going, gives what the model gives for the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from _zoo import Zoo
from carrywave.errors import DataError, UserError
from carrywave.train.result import Result

STEPS = np.random.default_rng(3).normal(size=(24, 9, 3)) * 4 + 2
ONE_WAY: dict[str, Any] = {"hidden": 6, "layers": 2, "bidirectional": False}
EXACT = {"rtol": 0, "atol": 1e-10}  # float64, summed in another order


def learn(task: str, given: Any, tmp_path: Path, model: Any = None, **more: Any) -> Result:
    how: dict[str, Any] = {"batch": {"tokens": 64}, "train": {"epochs": 1, "precision": "fp64"}, **more}
    front = {} if task in ("language", "tagging") else {"front": "none"}
    return cw.fit(model or ONE_WAY | front, given, task=task, run=tmp_path / "run", device="cpu", **how)


def whole(result: Result, data: Any, *, steps: int | None = None) -> Tensor:
    """The model's output over whole sequences, or their first steps."""
    batch = result.batch(data)
    with torch.no_grad():
        y, state = result.model(batch.inputs[:steps])
        out: Tensor = result.model.output(y, state)
    return out


def tags(result: Result, count: int) -> Tensor:
    return whole(result, STEPS[:count]).softmax(-1)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"learned_carry": True, "layer_norm": True, "dropout": 0.5},
        {"projection": 4},
        {"cell": "gru", "cell_norm": True, "recurrent_dropout": 0.2},
        {"zoneout": 0.3, "weight_drop": 0.2},
        {"cell": "slstm", "heads": 2},
        {"cell": "rnn"},
    ],
)
def test_tags_are_those_of_whole_sequences(more: dict[str, Any], tmp_path: Path) -> None:
    result = learn("tagging", (STEPS, (STEPS.sum(2) > 6).astype(int)), tmp_path, {**ONE_WAY, **more})
    stepper, wanted_TBV = result.stepper(), tags(result, 3)
    # Each comes and goes at times of its own.
    turns = {0: range(9), 1: range(2, 11), 2: range(5, 14)}
    for time in range(14):
        here = {client: STEPS[client, time - turn.start] for client, turn in turns.items() if time in turn}
        for client, out in stepper.step(here).items():
            torch.testing.assert_close(out, wanted_TBV[time - turns[client].start, client], **EXACT)
    named = [stepper.labels[place] for place in wanted_TBV[:, 0].argmax(-1)]
    assert named == [str(label) for label in cw.predict(result.run, STEPS[:1])[0]["labels"]]


@pytest.mark.parametrize("pool", ["last", "mean", "max", "mean_max", "attention"])
def test_classes_are_those_of_the_sequence_so_far(pool: str, tmp_path: Path) -> None:
    labels = np.where(STEPS.sum((1, 2)) > 54, "up", "down")
    result = learn("classification", (STEPS, labels), tmp_path, {**ONE_WAY, "front": "none", "pool": pool})
    stepper = cw.stepper(result.run, device="cpu")
    for time in range(9):
        out_BV = stepper.step_rows(["a", "b"], STEPS[:2, time])
        torch.testing.assert_close(out_BV, whole(result, STEPS[:2], steps=time + 1).softmax(-1), **EXACT)
    rows = cw.predict(result.run, STEPS[:2])
    assert stepper.labels == ("down", "up")
    for row, out_V in zip(rows, out_BV, strict=True):
        assert list(row["probabilities"].values()) == pytest.approx(out_V.tolist(), abs=1e-6)  # as many digits as predict writes


def test_each_of_several_labels_has_its_own_probability(tmp_path: Path) -> None:
    held = [[name for name, here in zip("abc", row, strict=True) if here] for row in (STEPS.sum(1) > 18).tolist()]
    result = learn("classification", (list(STEPS), held), tmp_path, data={"multi_label": True})
    stepper = result.stepper()
    for time in range(9):
        out_BV = stepper.step_rows(["a", "b"], STEPS[:2, time])
        torch.testing.assert_close(out_BV, whole(result, STEPS[:2], steps=time + 1).sigmoid(), **EXACT)
    for row, out_V in zip(cw.predict(result.run, STEPS[:2]), out_BV, strict=True):
        assert list(row["probabilities"].values()) == pytest.approx(out_V.tolist(), abs=1e-6)  # as many digits as predict writes


def test_numbers_are_in_the_units_of_the_data(tmp_path: Path) -> None:
    result = learn("regression", (STEPS, 50 + 9 * STEPS.sum((1, 2))), tmp_path)
    stepper = result.stepper()
    for time in range(9):
        out = stepper.step({"only": STEPS[4, time].tolist()})["only"]
    wanted = cw.predict(result.run, STEPS[4:5])[0]["label"]
    assert out.tolist() == pytest.approx([wanted], rel=1e-6)  # predict goes through float32


@pytest.mark.parametrize("softmax", ["full", "adaptive"])
def test_the_next_token_is_as_likely_as_in_the_whole_text(softmax: str, tmp_path: Path) -> None:
    text = "the carry goes on and on, and so does the wave\n" * 8
    more = {"softmax": "adaptive"} if softmax == "adaptive" else {"tie": True}
    result = learn("language", text, tmp_path, {"hidden": 16, "layers": 1, **more}, batch={"lanes": 2, "steps": 16})
    stepper, wanted_T1V = result.stepper(), whole(result, text[:20]).softmax(-1)
    ids = result.task.codec.encode(text[:20])
    for place, letter in enumerate(text[:20]):
        out = stepper.step({"text": letter, 7: int(ids[place])})
        assert torch.equal(out["text"], out[7])
        torch.testing.assert_close(out["text"], wanted_T1V[place, 0], **EXACT)
    assert len(stepper.labels) == len(out["text"])
    with pytest.raises(DataError, match=r"client 'text': 'th' is 2 tokens; pass one at a time"):
        stepper.step({"text": "th"})
    with pytest.raises(DataError, match=rf"client 7: {len(stepper.labels)} is not a token; pass its text, or an id from 0 to"):
        stepper.step({7: len(stepper.labels)})
    for bad in (torch.tensor(3.7), torch.tensor([1, 2]), 1.0, True):
        with pytest.raises(DataError, match="is not a token"):
            stepper.step({7: bad})


@pytest.mark.parametrize("reset", ["|", "blank line"])
def test_what_ends_a_document_ends_it_for_a_client_too(reset: str, tmp_path: Path) -> None:
    text = ("the carry goes on" + ("|" if reset == "|" else "\n\n")) * 12
    result = learn("language", text, tmp_path, {"hidden": 8, "layers": 1}, batch={"lanes": 2, "steps": 16}, data={"reset": reset})
    stepper, document = result.stepper(), text[: 18 + (reset != "|")]
    first, second = ([stepper.step({"text": letter})["text"] for letter in document] for _ in range(2))
    torch.testing.assert_close(first, second, **EXACT)
    stepper.step({"other": "|" if reset == "|" else "\n"})
    for letter, wanted in zip(document, first, strict=True):
        torch.testing.assert_close(stepper.step({"text": letter, "third": letter})["third"], wanted, **EXACT)
    likeliest = "".join(stepper.labels[int(out.argmax())] for out in first[-1:])
    assert cw.predict(result.run, prompt=document * 2, tokens=1, temperature=0)[0]["continuation"] == likeliest


def test_clients_are_reset_and_forgotten(tmp_path: Path) -> None:
    result = learn("tagging", (STEPS, (STEPS.sum(2) > 6).astype(int)), tmp_path)
    stepper, wanted_TBV = result.stepper(), tags(result, 20)
    many = list(range(20))  # more than there are rows for at first
    for time in range(4):
        out_BV = stepper.step_rows(many, STEPS[many, time])
    torch.testing.assert_close(out_BV, wanted_TBV[3], **EXACT)
    stepper.reset(3)
    stepper.forget(5)
    assert sorted(stepper.clients) == [client for client in many if client != 5]
    out = stepper.step({3: STEPS[3, 0], 5: STEPS[5, 0], 9: STEPS[9, 4]})
    for client, time in ((3, 0), (5, 0), (9, 4)):
        torch.testing.assert_close(out[client], wanted_TBV[time, client], **EXACT)
    with pytest.raises(UserError, match="there is no client 'nobody'"):
        stepper.forget("nobody")


def test_a_step_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    result = learn("tagging", (STEPS, (STEPS.sum(2) > 6).astype(int)), tmp_path)
    stepper, wanted_TBV = result.stepper(), tags(result, 1)
    stepper.step({"a": STEPS[0, 0]})
    with pytest.raises(DataError, match=r"client 'b': column .* is nan, not a finite number"):
        stepper.step({"a": STEPS[0, 1], "b": [1.0, float("nan"), 0.0]})
    with pytest.raises(DataError, match=r"steps of 1 clients have shape \[1, 2\]; pass 3 numbers for each client"):
        stepper.step({"a": [1.0, 2.0]})
    with pytest.raises(UserError, match="1 different clients for 2 rows"):
        stepper.step_rows(["a", "a"], STEPS[:2, 0])
    with pytest.raises(UserError, match="a client is named by a tuple"):
        stepper.step({("a", 1): STEPS[0, 0]})  # type: ignore[dict-item]
    assert stepper.clients == ("a",)
    assert stepper.step({}) == {}
    torch.testing.assert_close(stepper.step({"a": STEPS[0, 1]})["a"], wanted_TBV[1, 0], **EXACT)


class Whole(nn.Module):
    reads_whole = True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.out(y)
        return out

    def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        out = self(y, lengths).flatten(0, 1)
        return nn.functional.cross_entropy(out, target.flatten(), ignore_index=-100, reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tags", r"bidirectional layers read the end of a sequence first; set model\.bidirectional=false"),
        ("spans", "bidirectional layers|reads whole sequences"),
        ("series", "a forecaster reads earlier rows of its series at every step"),
    ],
)
def test_what_needs_the_whole_sequence_is_refused(zoo: Zoo, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cw.stepper(zoo(kind), device="cpu")


def test_a_head_or_a_scale_of_the_whole_sequence_is_refused(tmp_path: Path) -> None:
    marks = (STEPS.sum(2) > 6).astype(int)
    with pytest.raises(UserError, match="the head Whole reads whole sequences"):
        learn("tagging", (STEPS, marks), tmp_path / "whole", cw.Model(nn.Identity(), cw.LSTM(3, 6), Whole())).stepper()
    with pytest.raises(UserError, match=r"data\.standardize=sequence needs the whole sequence"):
        learn("tagging", (STEPS, marks), tmp_path / "scale", data={"standardize": "sequence"}).stepper()


class Best(nn.Module):
    """A user's own head, which keeps what it needs in a form of its own."""

    pooled = True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def start(self, lanes: int, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Tensor, Tensor]:
        return torch.full((lanes, 2, 3), -1.0, dtype=dtype, device=device), torch.zeros(lanes, dtype=torch.int64, device=device)

    def pool(self, y: Tensor, lengths: Tensor, acc: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        real = torch.arange(len(y))[:, None, None] < lengths[:, None]
        best = torch.where(real, y, -1.0).amax(0).unflatten(-1, (2, 3))
        return torch.maximum(acc[0], best), acc[1] + lengths

    def forward(self, acc: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(acc[0].flatten(1)) / acc[1][:, None]

    def loss(self, acc: tuple[Tensor, Tensor], label: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self(acc), label, reduction="sum"), (label != -100).sum()


def test_modules_of_the_users_own_are_stepped_through(tmp_path: Path) -> None:
    def build() -> cw.Model:
        return cw.Model(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Dropout(0.5)), cw.LSTM(5, 6, num_layers=2, dropout=0.5), Best())

    labels = (STEPS.sum((1, 2)) > 54).astype(int)
    result = learn("classification", (STEPS, labels), tmp_path, build())
    stepper = cw.stepper(result.run, device="cpu", model=build())
    for time in range(9):
        out_BV = stepper.step_rows(["a", "b"], STEPS[:2, time])
        torch.testing.assert_close(out_BV, whole(result, STEPS[:2], steps=time + 1).softmax(-1), **EXACT)
    opaque = learn("tagging", (STEPS, (STEPS.sum(2) > 6).astype(int)), tmp_path / "opaque", nn.Linear(3, 2), loss=summed)
    with pytest.raises(UserError, match="a module in one piece has no carry"):
        opaque.stepper()


def summed(out: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return out.sum(), target.numel()
