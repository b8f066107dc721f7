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
from torch import nn

from carrywave.data.batch import Batch
from carrywave.errors import Diverged, PlanError, RunError, SpecError, UserError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.result import StepResult
from carrywave.step.trainer import Trainer
from carrywave.train.fit import Result, train

NTASGD = {"optimizer": "ntasgd", "lr": 3.0, "nonmono": 1, "evaluate_every": 4, "early_stop": 9}
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


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "sgd", "lr": 1.0, "schedule": "plateau"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(NTASGD, marks=pytest.mark.slow),
        {"ema": 0.8, "evaluate_every": 4},
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    spec = language(text, **options)
    whole = train(spec, run=tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps=11)
        stopped = train(spec, run=tmp_path / "stopped", device="cpu")
    assert stopped.ending == "interrupted"
    resumed = train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
    assert (whole.ending, resumed.ending) == ("done", "done")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 10}, 10),
        ({"max_steps": 10}, 4),
        ({"early_stop": 1, "evaluate_every": 2, "lr": 2.0, "optimizer": "sgd", "clip": 99.0}, 6),
    ],
)
def test_a_finished_run_keeps_its_test(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], steps: int
) -> None:
    """Stopped at its last step or before it, or resumed when it is over: the row of the test is there, and all bytes are equal."""
    spec = language(text, **options)
    train(spec, run=tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps)
        train(spec, run=tmp_path / "stopped", device="cpu")
    for _ in range(2):
        result = train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
        assert "test" in result.metrics
        for name in ("metrics.jsonl", "weights.safetensors"):
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


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


def test_signals_resume_too_and_plans_do_not_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front, augmentation and label smoothing: interrupted, and in micro-batches."""
    sections: dict[str, Any] = {
        "task": "classification",
        "data": {
            "train": str(examples(tmp_path / "train.jsonl")),
            "standardize": "sequence",
            "augment": {"noise": 0.1, "scale": 0.1, "shift": True},
        },
        "model": {"hidden": 8, "layers": 1, "front": [{"channels": 6, "kernel": 3, "stride": 2}], "front_dropout": 0.2, "pool": "mean_max"},
        "batch": {"tokens": 64},
        "train": {"epochs": 2, "lr": 1e-2, "label_smoothing": 0.1, "precision": "fp64"},
    }
    spec = parse(sections)
    train(spec, run=tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        train(spec, run=tmp_path / "stopped", device="cpu")
    train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
    train(parse({**sections, "plan": {"micro_batches": 3}}), run=tmp_path / "cut", device="cpu")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("whole", "cut")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-11)  # rounding of float64, through a few steps


def test_sigterm_ends_with_a_snapshot(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 3, signal.SIGTERM)
    assert train(language(text), run=tmp_path / "run", device="cpu").ending == "terminated"
    assert (tmp_path / "run" / "snapshots" / "last").read_text().strip() == "step-00000003"


def test_evaluating_the_run_repeats_its_own_figures(text: Path, tmp_path: Path) -> None:
    result = train(language(text), run=tmp_path / "run", device="cpu")
    again = evaluate_run(tmp_path / "run", device="cpu")
    assert again["split"] == "test"
    assert again["loss"] == result.metrics["test"]["loss"]
    given = evaluate_run(tmp_path / "run", text, device="cpu")
    assert given["loss"] == result.metrics["test"]["loss"]


def test_plans_do_not_change_the_answer(text: Path, tmp_path: Path) -> None:
    losses = []
    for number, plan in enumerate([{}, {"chunk_steps": 5}, {"micro_batches": 3, "chunk_steps": 7}, {"recompute": True, "chunk_steps": 4}]):
        spec = language(text, precision="fp64", max_steps=8).model_copy(update={"plan": parse({"plan": plan}).plan})
        losses.append(train(spec, run=tmp_path / str(number), device="cpu").metrics["test"]["loss"])
    # Rounding of float64, through eight steps.
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-9)] * 3


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


def test_averaging_starts_and_is_what_is_judged(text: Path, tmp_path: Path) -> None:
    said: list[str] = []

    class Listening(Silent):
        def say(self, line: str) -> None:
            said.append(line)

    train(language(text, epochs=3, **{**NTASGD, "early_stop": None}), run=tmp_path / "run", device="cpu", watch=Listening())
    assert any("weight averaging starts" in line for line in said)


def test_more_epochs_can_be_asked_for_on_resume(text: Path, tmp_path: Path) -> None:
    train(language(text, epochs=1), run=tmp_path / "run", device="cpu")
    assert train(language(text, epochs=2), run=tmp_path / "run", resume=True, device="cpu").ending == "done"
    train(language(text, epochs=2), run=tmp_path / "whole", device="cpu")
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == (tmp_path / "whole" / "weights.safetensors").read_bytes()


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


def test_changed_data_cannot_resume(text: Path, tmp_path: Path) -> None:
    train(language(text, epochs=1), run=tmp_path / "run", device="cpu")
    text.write_text(TEXT.replace("line", "lane"))
    with pytest.raises(RunError, match="the data has changed since the snapshot"):
        train(language(text, epochs=2), run=tmp_path / "run", resume=True, device="cpu")


def test_fine_tuning_reads_new_text_with_the_old_vocabulary(text: Path, tmp_path: Path) -> None:
    first = train(language(text, epochs=1), run=tmp_path / "first", device="cpu")
    fewer = tmp_path / "fewer.txt"
    fewer.write_text(TEXT.replace("says", "line")[:4000])
    second: Result = train(language(fewer, epochs=1, lr=1e-9), run=tmp_path / "second", init=str(tmp_path / "first"), device="cpu")
    # With next to no learning rate it still is the first model, with as many tokens.
    for (name, a), b in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_fine_tuning_resumes_with_the_old_vocabulary(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(language(text, epochs=1), run=tmp_path / "first", device="cpu")
    fewer = tmp_path / "fewer.txt"
    fewer.write_text(TEXT.replace("says", "line")[:4000])
    spec = language(fewer, epochs=1)
    train(spec, run=tmp_path / "whole", init=str(tmp_path / "first"), device="cpu")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        train(spec, run=tmp_path / "stopped", init=str(tmp_path / "first"), device="cpu")
    train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "stopped" / "metrics.jsonl").read_bytes()
    assert evaluate_run(tmp_path / "stopped", device="cpu")["loss"] == rows(tmp_path / "whole")[-1]["loss"]


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


def test_more_workers_than_there_are_is_refused(text: Path, tmp_path: Path) -> None:
    spec = language(text).model_copy(update={"plan": parse({"plan": {"replicas": 2}}).plan})
    with pytest.raises(PlanError, match="needs 2 workers, got 1"):
        train(spec, run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_trainer_refuses_what_it_cannot_do() -> None:
    from carrywave import LSTM, Model, Plan
    from carrywave.model.encoders import Embedding
    from carrywave.model.heads.classes import Softmax

    def model(**options: Any) -> Model:
        return Model(Embedding(9, 6), LSTM(6, 6, **options), Softmax(12 if options else 6, 9))

    with pytest.raises(PlanError, match="the plan needs 4 workers, but only one is running"):
        Trainer(model(), plan=Plan(replicas=2, stages=2, cuts=(1,)))
    with pytest.raises(PlanError, match="kernel=nonsense is not a backend"):
        Trainer(model(), plan=Plan(kernel="nonsense"))
    with pytest.raises(PlanError, match=r"the module Sequential cannot be run in chunks of time; wrap its modules as cw.Model"):
        Trainer(nn.Sequential(nn.Embedding(9, 6)), plan=Plan(chunk_steps=3), loss=lambda out, target: (out.sum(), target.sum()))
    trainer = Trainer(model(), {"optimizer": "sgd", "lr": 0.1})
    tokens = torch.arange(24).reshape(6, 4) % 9
    trainer.step(Batch.of(tokens[:5], tokens[1:]), Batch.of(tokens[:5, :2], tokens[1:, :2]))  # all fresh: lanes may differ
    with pytest.raises(UserError, match="the carry is of 2 lanes, but the batch has 3"):
        trainer.step(Batch.of(tokens[:5, :3], tokens[1:, :3], fresh=torch.tensor([True, False, True])))
    with pytest.raises(UserError, match="a step takes one or more batches as arguments, got a list"):
        trainer.step([Batch.of(tokens[:5], tokens[1:])])  # type: ignore[arg-type]


def test_an_unknown_device_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="unknown device 'mps'; use auto, cpu, cuda or cuda:INDEX"):
        train(language(text), run=tmp_path / "run", device="mps")
