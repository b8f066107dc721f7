"""Numbers that are none, on one worker: where the first one arose, what a skipped step leaves behind, and each way to go on from it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _whole_snapshots import load
from carrywave import LSTM, Model
from carrywave.data.batch import Batch
from carrywave.errors import Diverged
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.nonfinite import MOST_BACKS, MOST_IN_A_ROW
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.trainer import Trainer
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _poison import poisoned

LAYERS, LANES, STEPS, TOKENS = 3, 4, 6, 9
TEXT = "".join(f"line {i % 7} says {i * i % 11} and {'abcdefg'[i % 7] * (i % 5)}\n" for i in range(60))


def a_model(encoder: nn.Module | None = None) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(encoder or Embedding(TOKENS, 5), LSTM(5, 6, LAYERS), Softmax(6, TOKENS))


def batch(number: int) -> Batch:
    """One window of streams that go on."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(TOKENS, (STEPS + 1, LANES), generator=draw)
    fresh = torch.full((LANES,), number == 0)
    return Batch.of(tokens[:-1], tokens[1:], fresh=fresh, step=number)


def bits(trainer: Trainer) -> dict[str, Tensor]:
    state = optimizers.state_tensors(trainer.optimizer, trainer.named)
    return {name: tensor.clone() for name, tensor in (trainer.parameters() | state).items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("chunk_steps", [None, 4])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        *((f"carry {layer}", f"the output that lstm.l{layer} computes on rank 0") for layer in range(LAYERS)),
        ("loss", "the loss that head computes on rank 0"),
        ("gradient", f"the gradient of lstm.l{LAYERS - 1} on rank 0"),
        ("encoder.weight", "the weight encoder.weight of encoder on rank 0"),
        ("lstm.weight_hh_l1", "the weight lstm.weight_hh_l1 of lstm.l1 on rank 0"),
        ("head.bias", "the weight head.bias of head on rank 0"),
    ],
)
def test_the_first_bad_layer_is_named_and_nothing_is_changed(how: str, words: str, chunk_steps: int | None) -> None:
    trainer = Trainer(a_model(), {"lr": 0.1}, plan={"chunk_steps": chunk_steps}, keep_state=True)
    with poisoned(how, [2]):
        results = [trainer.update(batch(0)), trainer.update(batch(1))]
        before = bits(trainer)
        results += [trainer.update(batch(2))]
    assert [bool(result.finite) for result in results] == [True, True, False]
    seen = trainer.nonfinite.look()
    assert (seen.ago, seen.bad, seen.longest, seen.in_a_row) == (0, 1, 1, 1)
    assert trainer.nonfinite.cause(seen, weights=True) == words
    if not how.startswith(("encoder", "lstm", "head")):
        assert_same(bits(trainer), before)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "ntasgd": {"optimizer": "ntasgd"},
    "averaging": {"optimizer": "ntasgd", "weight_decay": 0.1},
    "own": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace_in_any_optimizer(name: str) -> None:
    """As if its batches had not been there."""

    def run(numbers: Sequence[int]) -> dict[str, Tensor]:
        model = a_model()
        own = torch.optim.Adagrad(model.parameters(), lr=0.1) if name == "own" else None
        rate = {} if own is not None else {"lr": 0.1}
        trainer = Trainer(model, {"clip": 1.0, "on_nan": "skip", **rate, **OPTIMIZERS[name]}, optimizer=own, keep_state=False)
        for number in numbers:
            if number == 1 and name == "averaging":
                assert isinstance(trainer.optimizer, optimizers.NTASGD)
                trainer.optimizer.trigger()
            trainer.update(replace(batch(number), goes_on=False))
        return bits(trainer)

    with poisoned("loss", [2, 5]):
        skipping = run(range(7))
    assert_same(skipping, run([0, 1, 3, 4, 6]))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_bad_lanes_begin_anew_and_the_others_go_on(layer: int) -> None:
    def run() -> Trainer:
        trainer = Trainer(a_model(), {"lr": 0.1, "on_nan": "skip"}, keep_state=True)
        for number in range(3):
            trainer.update(batch(number))
        return trainer

    plain = run()
    with poisoned(f"carry {layer}", [2]):
        trainer = run()
    assert trainer.state is not None
    assert plain.state is not None
    for number, (ours, theirs) in enumerate(zip(trainer.state.carries, plain.state.carries, strict=True)):
        for part, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(part[:, 1:], wanted[:, 1:])
            assert torch.equal(part[:, 0], wanted[:, 0] if number < layer else torch.zeros_like(wanted[:, 0]))
    assert bool(trainer.update(batch(3)).finite)


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    return path


def language(text: Path, **keys: Any) -> Spec:
    return parse(
        {
            "data": {"train": str(text)},
            "model": {"hidden": 6, "layers": 1, "dropout": 0.1},
            "batch": {"lanes": 4, "steps": 16},
            "train": {"epochs": 2, "lr": 0.01, "log_every": 4, "schedule": "constant", **keys},
        }
    )


def rows(run: Path, split: str = "train") -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in every if row["split"] == split]


def test_a_run_stops_at_the_first_bad_step_with_one_line(text: Path, tmp_path: Path) -> None:
    with poisoned("loss", [9]), pytest.raises(Diverged) as caught:
        train(language(text), run=tmp_path / "run", device="cpu")
    assert str(caught.value) == (
        "the loss that head computes on rank 0 is no longer finite at step 10 (epoch 1); "
        "lower train.lr=0.01 or set train.clip; nothing from that step was saved"
    )
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 8]
    assert not (tmp_path / "run" / "snapshots").exists()


@pytest.mark.parametrize("precision", ["fp32", "fp64", "fp16", "bf16"])
def test_skipped_steps_are_counted_in_rows_and_said(text: Path, tmp_path: Path, precision: str) -> None:
    watch = Listening()
    with poisoned("loss", [4, 9, 10]) as begun:
        result = train(language(text, on_nan="skip", precision=precision), run=tmp_path / "run", device="cpu", watch=watch)
    assert result.ending == "done"
    found = rows(tmp_path / "run")
    assert [row["skipped"] for row in found[:4]] == [0, 1, 2, 0]
    assert sum(row["skipped"] for row in found) == 3
    assert all(math.isfinite(row["loss"]) for row in found)
    assert [line for line in watch.lines if line.endswith("was skipped")] == [
        f"the loss that head computes on rank 0 is no longer finite at step {step} (epoch 1); that step was skipped" for step in (5, 10, 11)
    ]
    assert begun == [*range(max(begun) + 1)] * 2  # every batch is seen once an epoch
    assert load(tmp_path / "run" / "snapshots").meta["progress"]["skipped"] == 3


def test_an_overflow_that_the_scaler_skips_is_no_bad_step(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []
    update = Trainer.update

    def enlarged(self: Trainer, *batches: Batch) -> Any:
        assert self.scaler is not None
        if not scales:
            self.scaler.scale.fill_(2.0**127)
        result = update(self, *batches)
        scales.append(float(self.scaler.scale))
        return result

    monkeypatch.setattr(Trainer, "update", enlarged)
    watch = Listening()
    spec = language(text, on_nan="skip", precision="fp16", epochs=1, max_steps=8, log_every=1)
    train(spec, run=tmp_path / "run", device="cpu", watch=watch)
    assert scales[0] == 2.0**126
    assert {row["skipped"] for row in rows(tmp_path / "run")} == {0}
    assert not any("skipped" in line for line in watch.lines)


def test_too_many_skipped_steps_in_a_row_stop_the_run(text: Path, tmp_path: Path) -> None:
    many = range(3, 3 + MOST_IN_A_ROW)
    with poisoned("loss", many[:-1]):
        assert train(language(text, on_nan="skip"), run=tmp_path / "few", device="cpu").ending == "done"
    with poisoned("loss", many), pytest.raises(Diverged, match=rf"at step 4 .*; {MOST_IN_A_ROW} steps in a row were skipped; lower"):
        train(language(text, on_nan="skip"), run=tmp_path / "many", device="cpu")


def test_a_run_goes_back_to_its_last_snapshot_with_half_the_rate(text: Path, tmp_path: Path) -> None:
    watch = Listening()
    spec = language(text, on_nan="back", lr=0.01)
    with poisoned("loss", [9], epoch=1, above=0.003) as begun:
        assert train(spec, run=tmp_path / "run", device="cpu", watch=watch).ending == "done"
    batches = begun.index(0, 1)  # in an epoch
    assert begun == [*range(batches), *range(10), *range(10), *range(batches)]
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == sorted({row["step"] for row in found})  # what went wrong is cut off
    assert [row["lr"] for row in found] == [0.01 if row["epoch"] == 1 else 0.0025 for row in found]
    assert [line.partition("; ")[2] for line in watch.lines if "going back" in line] == [
        f"going back to step {batches}, with the learning rate multiplied by {factor} from there on" for factor in (0.5, 0.25)
    ]
    assert load(tmp_path / "run" / "snapshots").meta["progress"]["backs"] == 2


def test_a_run_that_goes_back_too_often_stops(text: Path, tmp_path: Path) -> None:
    with (
        poisoned("loss", [9]) as begun,
        pytest.raises(Diverged, match=rf"\(after going back {MOST_BACKS} times, down to a learning rate of 0.00125\)$"),
    ):
        train(language(text, on_nan="back", lr=0.01), run=tmp_path / "run", device="cpu")
    assert begun == [*range(10)] * (MOST_BACKS + 1)
