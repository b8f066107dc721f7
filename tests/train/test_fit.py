"""OpaqueModel runs, small: what is written, that equal runs are equal, that a stopped run goes on as if it had not been stopped."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carrywave.data.batch import Batch
from carrywave.errors import Diverged, RunError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.result import StepResult
from carrywave.step.trainer import Trainer
from carrywave.train.fit import Result, train

TEXT = "".join(f"line {i % 7} says {i * i % 11} and then {'abcdefg'[i % 7] * (i % 5)}\n" for i in range(160))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    return path


def language(text: Path, **train_keys: Any) -> Spec:
    keys = {"epochs": 2, "lr": 5e-3, "clip": 1.0, "log_every": 3, "schedule": "constant", **train_keys}
    return parse(
        {
            "data": {"train": str(text), "test": str(text)},
            "model": {"hidden": 12, "layers": 2, "dropout": 0.2, "forget_bias": None, "init_bias": "zero"},
            "batch": {"lanes": 8, "steps": 16},
            "train": keys,
        }
    )


def examples(path: Path, number: int = 60) -> Path:
    """Sequences whose label is the sign of their sum: a task that is learned in a few steps."""
    draw = np.random.default_rng(1)
    lines = []
    for _ in range(number):
        steps = draw.normal(size=(int(draw.integers(2, 12)), 2)) + draw.choice([-0.7, 0.7])
        lines.append(json.dumps({"steps": steps.round(4).tolist(), "label": "up" if steps.sum() > 0 else "down"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int, number: int = signal.SIGINT) -> None:
    plain, done = Trainer.update, [0]

    def update(self: Trainer, *batches: Batch) -> StepResult:
        done[0] += 1
        if done[0] == steps:
            os.kill(os.getpid(), number)
        return plain(self, *batches)

    monkeypatch.setattr(Trainer, "update", update)


def test_a_run_leaves_what_it_should(text: Path, tmp_path: Path) -> None:
    result = train(language(text), run=tmp_path / "run", device="cpu")
    assert result.ending == "done"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"spec.yaml", "plan.json", "codec.json", "metrics.jsonl", "timing.jsonl", "tb", "snapshots", "weights.safetensors"}
    found = rows(tmp_path / "run")
    assert {"split", "epoch", "step", "loss"} <= set(found[0])
    valid = [row for row in found if row["split"] == "valid"]
    assert [row["epoch"] for row in valid] == [1, 2]
    assert valid[1]["loss"] < valid[0]["loss"] < math.log(40)
    assert valid[1]["perplexity"] == pytest.approx(math.exp(valid[1]["loss"]))
    test = [row for row in found if row["split"] == "test"]
    assert len(test) == 1
    assert result.metrics["test"]["loss"] == test[0]["loss"]
    # The clock has no place in metrics.jsonl.
    assert not any("second" in key for row in found for key in row)


def test_every_token_but_the_first_is_a_target_once_an_epoch(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    plain = Trainer.update

    def update(self: Trainer, *batches: Batch) -> StepResult:
        result = plain(self, *batches)
        counted.append(float(result.count))
        return result

    monkeypatch.setattr(Trainer, "update", update)
    train(language(text, epochs=1, accumulate=4), run=tmp_path / "run", device="cpu")
    held_out = round(len(TEXT) * 0.1)
    assert sum(counted) == len(TEXT) - held_out - 1


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(text: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run, seed in zip(runs, (1, 1, 2), strict=True):
        train(language(text, seed=seed), run=run, device="cpu")
    for name in ("metrics.jsonl", "weights.safetensors"):
        same, again, other = ((run / name).read_bytes() for run in runs)
        assert same == again
        assert same != other


def test_a_run_that_stopped_early_goes_on_if_asked(text: Path, tmp_path: Path) -> None:
    options = {"epochs": 3, "lr": 2.0, "optimizer": "sgd", "evaluate_every": 2, "clip": 100.0}
    assert train(language(text, early_stop=1, **options), run=tmp_path / "run", device="cpu").ending == "early"
    assert train(language(text, early_stop=500, **options), run=tmp_path / "run", resume=True, device="cpu").ending == "done"


@pytest.mark.parametrize("steps", [1, 24, 25])
def test_sequences_resume_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    spec = parse(
        {
            "task": "classification",
            "data": {"train": str(examples(tmp_path / "train.jsonl"))},
            "model": {"hidden": 8, "layers": 1, "dropout": 0.3},
            "batch": {"tokens": 64},
            "train": {"epochs": 4, "lr": 1e-2, "log_every": 2, "schedule": "constant"},
        }
    )
    train(spec, run=tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps)
        train(spec, run=tmp_path / "stopped", device="cpu")
    train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    """Half the steps of half the size, accumulated in pairs with the carry kept, are the same sums divided by the same count."""
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)
        from carrywave import LSTM, Model
        from carrywave.model.encoders import Embedding
        from carrywave.model.heads.classes import Softmax

        model = Model(Embedding(9, 6), LSTM(6, 6, 2), Softmax(6, 9)).double()
        trainers.append(Trainer(model, parse({"train": {"precision": "fp64", "optimizer": "sgd", "lr": 0.5}}, defaults=False).train))
    tokens = torch.randint(9, (9, 4), generator=torch.Generator().manual_seed(3))

    def batch(first: int, last: int, lanes: slice) -> Batch:
        count = tokens[:, lanes].shape[1]
        return Batch(
            tokens[first:last, lanes],
            tokens[first + 1 : last + 1, lanes],
            torch.full((count,), last - first),
            torch.ones(count, dtype=torch.bool),
            torch.arange(4)[lanes],
            torch.arange(4)[lanes],
            torch.zeros(count, dtype=torch.int64),
            real=count * (last - first),
        )

    whole = trainers[0].step(batch(0, 8, slice(None)))
    parts = trainers[1].step(batch(0, 8, slice(0, 1)), batch(0, 8, slice(1, 4)))
    torch.testing.assert_close(parts, whole)
    for (name, a), (_, b) in zip(trainers[0].named, trainers[1].named, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15, msg=lambda text, name=name: f"{name}: {text}")


def test_a_run_that_diverges_stops_and_keeps_what_was_good(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, done = Trainer.update, [0]

    def update(self: Trainer, *batches: Batch) -> StepResult:
        done[0] += 1
        if done[0] == 40:
            with torch.no_grad():
                self.model.head.bias.fill_(math.inf)  # type: ignore[union-attr, operator]
        return plain(self, *batches)

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(Diverged, match=r"is no longer finite at step 40 \(epoch 2\); lower train.lr"):
        train(language(text), run=tmp_path / "run", device="cpu")
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run"))
    monkeypatch.undo()
    assert train(language(text), run=tmp_path / "run", resume=True, device="cpu").ending == "done"


def test_fp16_scales_and_still_learns(text: Path, tmp_path: Path) -> None:
    result = train(language(text, precision="fp16"), run=tmp_path / "run", device="cpu")
    full = train(language(text), run=tmp_path / "full", device="cpu")
    # Half precision has 11 bits: a few hundred steps of it stay near the float32 run.
    assert result.metrics["valid"]["loss"] == pytest.approx(full.metrics["valid"]["loss"], rel=0.02)


def test_early_stopping_and_its_end(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(
        language(text, epochs=50, lr=2.0, optimizer="sgd", early_stop=1, evaluate_every=2, clip=100.0), run=tmp_path / "run", device="cpu"
    )
    assert result.ending == "early"
    valid = [row["loss"] for row in rows(tmp_path / "run") if row["split"] == "valid"]
    assert valid[-1] >= min(valid[:-1])


def test_a_run_without_an_evaluation_on_the_way_has_one_at_its_end(text: Path, tmp_path: Path) -> None:
    result = train(language(text, epochs=2, evaluate_every=10_000), run=tmp_path / "run", device="cpu")
    assert [row["epoch"] for row in rows(tmp_path / "run") if row["split"] == "valid"] == [2]
    assert result.metrics["valid"]["perplexity"] > 1


def test_another_spec_cannot_resume(text: Path, tmp_path: Path) -> None:
    train(language(text, epochs=1), run=tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"started with train.lr=0.005, not 0.1; keep the old value"):
        train(language(text, epochs=1, lr=0.1), run=tmp_path / "run", resume=True, device="cpu")


def test_data_that_was_moved_can_resume_and_other_data_cannot(text: Path, tmp_path: Path) -> None:
    train(language(text, epochs=1), run=tmp_path / "run", device="cpu")
    train(language(text, epochs=2), run=tmp_path / "whole", device="cpu")
    moved, other = text.rename(tmp_path / "moved.txt"), tmp_path / "other.txt"
    other.write_text(TEXT.replace("line", "lane"))
    with pytest.raises(RunError, match=r"the data has changed since the snapshot .*other\.txt"):
        train(language(other, epochs=2), run=tmp_path / "run", resume=True, device="cpu")
    assert train(language(moved, epochs=2), run=tmp_path / "run", resume=True, device="cpu").ending == "done"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_fine_tuning_reads_new_text_with_the_old_vocabulary(text: Path, tmp_path: Path) -> None:
    first = train(language(text, epochs=1), run=tmp_path / "first", device="cpu")
    fewer = tmp_path / "fewer.txt"
    fewer.write_text(TEXT.replace("says", "line")[:4000])
    second: Result = train(language(fewer, epochs=1, lr=1e-9), run=tmp_path / "second", init=str(tmp_path / "first"), device="cpu")
    # With next to no learning rate it still is the first model, with as many tokens.
    for (name, a), b in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_fine_tuning_takes_the_class_weights_of_its_own_spec(tmp_path: Path) -> None:
    data = str(examples(tmp_path / "train.jsonl"))

    def spec(weights: dict[str, float] | None) -> Spec:
        keys = {"epochs": 1, "lr": 1e-3, "class_weights": weights}
        return parse({"task": "classification", "data": {"train": data}, "model": {"hidden": 4, "layers": 1}, "train": keys})

    train(spec({"up": 7.0}), run=tmp_path / "first", device="cpu")
    second = train(spec({"up": 0.5}), run=tmp_path / "second", init=str(tmp_path / "first"), device="cpu")
    assert second.model.head.get_buffer("weights").tolist() == [1.0, 0.5]
    assert train(spec(None), run=tmp_path / "third", init=str(tmp_path / "first"), device="cpu").ending == "done"


def test_weights_of_another_model_are_refused(text: Path, tmp_path: Path) -> None:
    train(language(text, epochs=1), run=tmp_path / "first", device="cpu")
    wider = language(text, epochs=1).model_copy(update={"model": parse({"model": {"hidden": 16, "layers": 2}}).model})
    with pytest.raises(RunError, match="is from another model"):
        train(wider, run=tmp_path / "second", init=str(tmp_path / "first" / "weights.safetensors"), device="cpu")
    assert not (tmp_path / "second").exists()


def test_a_dry_run_writes_nothing(text: Path, tmp_path: Path) -> None:
    train(language(text), run=tmp_path / "run", device="cpu", dry_run=True)
    assert not (tmp_path / "run").exists()
