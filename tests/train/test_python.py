"""From Python: every kind of data for every task, the user's own modules, the user's own loop, and runs opened again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import DataError, PlanError, RunError, SpecError, UserError
from carrywave.model.dropout import Dropout
from carrywave.spec.facts import DataFacts
from carrywave.step.result import StepResult
from carrywave.train.fit import Result

NARROW = {"hidden": 6, "layers": 1}
ONCE = {"epochs": 1, "lr": 1e-2}
TEXT = "the carry goes on and on\n" * 16
LANES = {"lanes": 4, "steps": 8}
BUDGET = {"tokens": 64}
draw = np.random.default_rng(0)
STEPS = draw.normal(size=(24, 5, 2)).astype(np.float32)
LABELS = (STEPS.sum(axis=(1, 2)) > 0).astype(int)
TAGS = (STEPS.sum(axis=2) > 0).astype(int)
SUMS = STEPS.sum(axis=1)
SERIES = np.sin(np.arange(120) * 2 * np.pi / 12)[:, None] + draw.normal(size=(120, 1)) * 0.1


class Pairs(torch.utils.data.Dataset[tuple[Any, Any]]):
    """A map-style Dataset, as PyTorch's users write them."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self.inputs[number], self.targets[number]


def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"load": SERIES[:, 0]}, index=pandas.date_range("2026-01-01", periods=len(SERIES), freq="h"))


def options(task: str) -> dict[str, Any]:
    streams = task in ("language", "forecasting")
    data = {"horizon": 3, "season": 12, "split": [0.6, 0.2, 0.2]} if task == "forecasting" else {}
    return {"task": task, "batch": LANES if streams else BUDGET, "data": data, "train": ONCE, "device": "cpu"}


DATA: dict[str, tuple[str, Callable[[], Any]]] = {
    "a text": ("language", lambda: TEXT),
    "texts": ("language", lambda: TEXT.splitlines()),
    "tokens in an array": ("language", lambda: np.arange(400) % 7),
    "tokens in a tensor": ("language", lambda: torch.arange(400).reshape(4, 100) % 7),
    "tokens in lists": ("language", lambda: [[0, 1, 2, 1] * 20, [2, 1, 0] * 20]),
    "a pair of arrays": ("classification", lambda: (STEPS, LABELS)),
    "a pair of tensors": ("classification", lambda: (torch.tensor(STEPS), torch.tensor(LABELS))),
    "unequal lists": ("classification", lambda: ([steps[: 2 + i % 4].tolist() for i, steps in enumerate(STEPS)], LABELS.tolist())),
    "a Dataset": ("classification", lambda: Pairs(STEPS, LABELS)),
    "parts": ("classification", lambda: {"train": (STEPS, LABELS), "validation": (STEPS[:8], LABELS[:8]), "test": (STEPS[8:], LABELS[8:])}),
    "tags": ("tagging", lambda: (torch.tensor(STEPS), torch.tensor(TAGS))),
    "words and tags": ("tagging", lambda: [(["a", "b", "a"], ["N", "V", "N"])] * 12),
    "numbers": ("regression", lambda: (STEPS, SUMS)),
    "a Dataset of numbers": ("regression", lambda: Pairs(torch.tensor(STEPS), torch.tensor(SUMS[:, 0]))),
    "a frame": ("forecasting", frame),
    "a series": ("forecasting", lambda: SERIES),
    "lists of series": ("forecasting", lambda: [SERIES[:60].tolist(), torch.tensor(SERIES[60:])]),
}
METRIC = {
    "language": "perplexity",
    "classification": "accuracy",
    "tagging": "macro_f1",
    "regression": "mae",
    "forecasting": "mase",
}


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_trains(kind: str, tmp_path: Path) -> None:
    task, make = DATA[kind]
    result = cw.fit(NARROW, make(), run=tmp_path / "run", **options(task))
    assert result.ending == "done"
    assert result.run == tmp_path / "run"
    assert METRIC[task] in result.metrics["valid"]
    assert not result.model.training
    # The run does not claim to have read the default file, and what it cannot find again it asks for.
    assert cw.load_spec(result.run / "spec.yaml").data.train is None
    with pytest.raises(DataError, match="trained on data from Python, which is not stored in the run; pass data"):
        cw.evaluate(result.run, device="cpu")


def test_equal_calls_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(len(name) * os.getpid())  # what torch's generator has been doing does not matter
        cw.fit({**NARROW, "dropout": 0.3}, (STEPS, LABELS), run=tmp_path / name, **options("classification"))
    for name in ("metrics.jsonl", "weights.safetensors", "spec.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_is_opened_with_data_from_python(tmp_path: Path) -> None:
    parts = {"train": (STEPS, LABELS), "valid": (STEPS[:8], LABELS[:8]), "test": (STEPS[8:], LABELS[8:])}
    result = cw.fit(NARROW, parts, run=tmp_path / "run", **options("classification"))
    again = cw.evaluate(str(result.run), (STEPS[8:], LABELS[8:]), device="cpu")
    assert {name: again[name] for name in ("loss", "accuracy")} == {n: result.metrics["test"][n] for n in ("loss", "accuracy")}
    # Labels are not needed to predict, and not looked at.
    alone, labelled = (cw.predict(result.run, data, device="cpu") for data in (STEPS[8:], Pairs(STEPS[8:], LABELS[8:])))
    assert alone == labelled
    right = [row["label"] == label for row, label in zip(alone, LABELS[8:], strict=True)]
    assert np.mean(right) == pytest.approx(result.metrics["test"]["accuracy"])


@pytest.mark.parametrize("make", [Path, str])
def test_files_are_paths_or_their_names(make: Callable[[Path], Any], tmp_path: Path) -> None:
    names = {part: tmp_path / f"{part}.txt" for part in ("train", "valid")}
    for path in names.values():
        path.write_text(TEXT)
    one = cw.fit(NARROW, make(names["train"]), run=tmp_path / "one", **options("language"))
    two = cw.fit(NARROW, {part: make(path) for part, path in names.items()}, run=tmp_path / "two", **options("language"))
    spec = cw.load_spec(two.run / "spec.yaml").data
    assert (spec.train, spec.valid) == (str(names["train"]), str(names["valid"]))
    # What was read from files can be read again without being told.
    assert cw.evaluate(two.run, device="cpu")["loss"] == pytest.approx(two.metrics["valid"]["loss"], rel=1e-12)
    assert cw.evaluate(one.run, make(names["valid"]), device="cpu")["split"] == str(names["valid"])


class Encoder(nn.Module):
    """Two numbers a step to four, with torch's own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class TagLoss(nn.Module):
    """The least that a head is: a loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        total = nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="sum")  # ignores -100
        return total, (target != -100).sum()


class TagHead(TagLoss):
    """With a forward there are metrics and predictions too."""

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y)
        return out


class Largest(nn.Module):
    """A pooled head that no task comes with: the largest output of all real steps."""

    pooled = True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def start(self, lanes: int, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Tensor, ...]:
        return (torch.full((lanes, 6), -1.0, dtype=dtype or self.out.weight.dtype, device=device),)

    def pool(self, y: Tensor, lengths: Tensor, acc: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        real = torch.arange(y.shape[0], device=y.device)[:, None, None] < lengths[:, None]
        return (torch.maximum(acc[0], torch.where(real, y, -1.0).amax(0)),)

    def forward(self, acc: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.out(acc[0])
        return out

    def loss(self, acc: tuple[Tensor, ...], label: Tensor) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(self(acc), label, reduction="sum"), label.numel()


def own(head: type[nn.Module] = TagHead) -> cw.Model:
    torch.manual_seed(3)
    return cw.Model(Encoder(), cw.LSTM(4, 6), head())


def test_own_modules(tmp_path: Path) -> None:
    model = own()
    assert isinstance(model.encoder.layers[2], Dropout)  # type: ignore[union-attr, index]
    results = [cw.fit(each, (STEPS, TAGS), run=tmp_path / str(i), **options("tagging")) for i, each in enumerate((model, own()))]
    assert results[0].model is model
    assert (results[0].run / "weights.safetensors").read_bytes() == (results[1].run / "weights.safetensors").read_bytes()
    found = results[0].metrics["valid"]
    assert 0 <= found["accuracy"] <= 1
    # What no file describes has to be given again.
    with pytest.raises(
        RunError, match=r"your own modules, which are not stored in the run; rebuild the model in Python and pass it as model="
    ):
        cw.evaluate(results[0].run, (STEPS, TAGS), device="cpu")
    rebuilt = cw.evaluate(results[0].run, (STEPS, TAGS), model=own(), device="cpu")
    assert rebuilt == cw.evaluate(results[1].run, (STEPS, TAGS), model=model, device="cpu")
    assert len(cw.predict(results[0].run, STEPS[:3], model=own(), device="cpu")[2]["labels"]) == 5


def test_a_head_with_a_loss_alone_is_evaluated_by_it(tmp_path: Path) -> None:
    whole = cw.fit(own(), (STEPS, TAGS), run=tmp_path / "whole", **options("tagging"))
    alone = cw.fit(own(TagLoss), (STEPS, TAGS), run=tmp_path / "alone", **options("tagging"))
    assert alone.metrics["valid"] == {"loss": whole.metrics["valid"]["loss"]}
    with pytest.raises(RunError, match="head TagLoss has no forward method, so it cannot predict"):
        cw.predict(alone.run, STEPS, model=alone.model, device="cpu")


def test_a_head_that_puts_out_something_else_has_no_metrics(tmp_path: Path) -> None:
    class Odd(TagLoss):
        def forward(self, y: Tensor) -> Tensor:
            return y.sum(-1)

    assert set(cw.fit(own(Odd), (STEPS, TAGS), run=tmp_path / "run", **options("tagging")).metrics["valid"]) == {"loss"}


@pytest.mark.parametrize("plan", [{"chunk_steps": 2, "micro_batches": 2}, cw.Plan(chunk_steps=2, micro_batches=2)])
def test_a_pooled_head_of_ones_own_on_any_plan(plan: Any, tmp_path: Path) -> None:
    exact = options("classification") | {"train": {**ONCE, "precision": "fp64"}}
    whole, cut = (
        cw.fit(own(Largest), (STEPS, LABELS), run=tmp_path / name, plan=each, **exact) for name, each in (("whole", "auto"), ("cut", plan))
    )
    assert whole.metrics["valid"]["accuracy"] == cut.metrics["valid"]["accuracy"]
    # Rounding of float64, through a few steps.
    assert whole.metrics["valid"]["loss"] == pytest.approx(cut.metrics["valid"]["loss"], rel=1e-10)


def test_a_function_makes_the_model_from_the_facts(tmp_path: Path) -> None:
    def make(facts: DataFacts) -> cw.Model:
        class Next(TagHead):
            def __init__(self) -> None:
                super().__init__()
                self.out = nn.Linear(6, facts.vocabulary)

        return cw.Model(nn.Embedding(facts.vocabulary, 4), cw.LSTM(4, 6), Next())

    runs = [cw.fit(make, TEXT, run=tmp_path / name, **options("language")) for name in ("a", "b")]
    assert runs[0].model.head.out.out_features == len({*TEXT, "<unk>"})  # type: ignore[union-attr]
    assert (runs[0].run / "weights.safetensors").read_bytes() == (runs[1].run / "weights.safetensors").read_bytes()
    assert cw.predict(runs[0].run, prompt="the", tokens=3, model=runs[0].model, device="cpu")[0]["text"].startswith("the")


def test_resume_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(name: str, resume: bool = False) -> Result:
        how = options("tagging") | {"train": {**ONCE, "epochs": 3}}
        return cw.fit(own(), (STEPS, TAGS), run=tmp_path / name, resume=resume, **how)

    fit("whole")
    with monkeypatch.context() as patch:
        plain, done = cw.Trainer.update, [0]

        def update(self: cw.Trainer, *batches: cw.Batch) -> StepResult:
            done[0] += 1
            if done[0] == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return plain(self, *batches)

        patch.setattr(cw.Trainer, "update", update)
        assert fit("stopped").ending == "interrupted"
    assert fit("stopped", resume=True).ending == "done"
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    from carrywave.train.fit import train

    with pytest.raises(RunError, match=r"trained from Python, .*; resume it from Python: cw\.fit\(model, data, run="):
        train(cw.load_spec(tmp_path / "stopped" / "spec.yaml"), run=tmp_path / "stopped", resume=True, device="cpu")
    how = options("tagging") | {"train": {**ONCE, "epochs": 3}}
    with pytest.raises(RunError, match="the data has changed since the snapshot"):
        cw.fit(own(), (STEPS + 1, TAGS), run=tmp_path / "stopped", resume=True, **how)


def test_init_from_a_run_reads_as_that_run_read(tmp_path: Path) -> None:
    first = cw.fit(NARROW, TEXT, run=tmp_path / "first", **options("language"))
    second = cw.fit(NARROW, "carry on\n" * 16, init=str(first.run), run=tmp_path / "second", **options("language"))
    assert second.model.head.classes == len({*TEXT, "<unk>"}) > len({*"carry on\n", "<unk>"})


class Mean(TagLoss):
    def loss(self, y: Tensor, target: Tensor) -> Any:
        return super().loss(y, target)[0]


class Single(Largest):
    def start(self, lanes: int, dtype: torch.dtype | None = None, device: Any = None) -> Any:
        return super().start(lanes, dtype, device)[0]


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (NARROW, {"devices": 0}, PlanError, "devices must be a whole number of workers, got 0; use 1 or more"),
        (
            NARROW,
            {"devices": 3, "plan": {"stages": 2}},
            PlanError,
            r"devices=3 does not match plan.replicas x plan.stages \(any number x 2\)",
        ),
        (NARROW, {"plan": {"replicas": 2}}, PlanError, "needs 2 workers, got 1"),
        (NARROW, {"plan": "fast"}, SpecError, "plan is"),
        (NARROW, {"plan": 2}, SpecError, "plan is 2; use auto, or a section with replicas"),
        (NARROW, {"epochs": 3}, SpecError, r"unknown key epochs; did you mean train\.epochs\?"),
        (NARROW, {"resume": True}, RunError, "resume needs to know which run"),
        (nn.LSTM(2, 6), {}, UserError, "the module LSTM has no loss; pass loss="),
        (nn.DataParallel(nn.LSTM(2, 6)), {}, UserError, "LSTM is wrapped in DataParallel, .* pass it without the wrapper"),
        ("small", {}, UserError, "model is a str; pass a cw.Model"),
        (lambda facts: nn.Linear(2, 2), {}, UserError, "the module Linear has no loss"),
        (lambda facts: None, {}, UserError, "returned a NoneType; return a cw.Model"),
        (Mean, {}, UserError, r"the loss of Mean must return \(sum over the targets, number of targets\), two scalars"),
        (Single, {"task": "classification"}, UserError, "start of the head Single returned a tensor .* return a tuple of tensors"),
    ],
)
def test_mistakes_are_one_line(model: Any, how: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = own(model) if isinstance(model, type) else model
    targets = LABELS if "task" in how else TAGS
    with pytest.raises(error, match=message) as caught:
        cw.fit(model, (STEPS, targets), **options("tagging") | {"run": None if "resume" in how else tmp_path / "run"} | how)
    assert "\n" not in str(caught.value)


# ---- the user's own loop


# ---- cw.LSTM in a plain PyTorch program


def test_a_run_begins_with_the_weights_in_the_folder_of_another(tmp_path: Path) -> None:
    how: dict[str, Any] = {"task": "language", "batch": LANES, "train": {"max_steps": 1, "lr": 1e-9}, "device": "cpu"}
    first = cw.fit(NARROW, TEXT, run=tmp_path / "first", **how)
    second = cw.fit(NARROW, TEXT, run=tmp_path / "second", init=first.run, **how)
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=1e-6)  # a step of 1e-9
