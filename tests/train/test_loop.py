"""The training loop step by step: which batches, rates and weights a run works with, seen from outside while it runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carrywave import Model
from carrywave.data.batch import Batch
from carrywave.data.shuffle import varied_steps
from carrywave.prediction.evaluation import evaluate
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.passes.executor import Pass
from carrywave.step.passes.jobs import BatchOutcome
from carrywave.step.result import StepResult
from carrywave.step.trainer import Trainer
from carrywave.train import loop as loops
from carrywave.train.fit import train

TEXT = "".join(f"line {i % 7} says {i * i % 11} and {'abcdefg'[i % 7] * (i % 5)}\n" for i in range(60))
LANES, STEPS = 4, 16
TARGETS = len(TEXT) - round(len(TEXT) * 0.1) - 1  # a tenth is held out, and nothing comes before the first character
BATCHES = math.ceil(TARGETS / LANES / STEPS)  # in an epoch

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """One optimizer step, as the trainer was asked for it."""

    batches: tuple[Batch, ...]
    lr: float  # which the optimizer steps with
    result: StepResult
    before: Tensors
    after: Tensors

    @property
    def windows(self) -> list[int]:
        return [batch.steps for batch in self.batches]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every optimizer step of the runs that follow."""
    steps: list[Seen] = []
    plain = Trainer.update

    def update(self: Trainer, *batches: Batch) -> StepResult:
        before, lr = weights_of(self.model), float(self.optimizer.param_groups[0]["lr"])
        result = plain(self, *batches)
        steps.append(Seen(batches, lr, result, before, weights_of(self.model)))
        return result

    monkeypatch.setattr(Trainer, "update", update)
    return steps


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    return path


def language(text: Path, batch: dict[str, Any] | None = None, **train_keys: Any) -> Spec:
    return parse(
        {
            "data": {"train": str(text)},
            "model": {"hidden": 6, "layers": 1, "dropout": 0.1, "forget_bias": None, "init_bias": "zero"},
            "batch": {"lanes": LANES, "steps": STEPS, **(batch or {})},
            "train": {"epochs": 2, "lr": 5e-3, "log_every": 3, "schedule": "constant", **train_keys},
        }
    )


def rows(run: Path, split: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in every if row["split"] == split]


def weights_of(model: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_epoch(steps: list[Seen]) -> list[list[Seen]]:
    return [list(group) for _, group in groupby(steps, key=lambda step: step.batches[0].epoch)]


def test_once_averaging_began_the_average_is_judged_and_kept_and_the_raw_weights_train_on(
    text: Path, tmp_path: Path, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    judged: list[dict[str, Any]] = []

    def watched(model: Model, task: Any, part: Any, **options: Any) -> dict[str, float]:
        judged.append({"task": task, "part": part, **options, "tick": None})
        return evaluate(model, task, part, **options)

    class Listening(Silent):
        def say(self, line: str) -> None:
            if "weight averaging starts" in line:
                begun.append(len(seen))

    monkeypatch.setattr(loops, "evaluate_part", watched)
    keys: dict[str, Any] = {"optimizer": "ntasgd", "lr": 8.0, "nonmono": 1, "evaluate_every": 3, "epochs": 2, "precision": "fp64"}
    result = train(language(text, **keys), run=tmp_path / "run", device="cpu", watch=Listening())
    best = weights_of(result.model)
    found = rows(tmp_path / "run", "valid")
    assert len(begun) == 1
    assert begun[0] < found[-1]["step"]

    def loss_of(weights: Tensors, number: int) -> float:
        result.model.load_state_dict(weights, strict=False)
        options = dict(judged[number])
        return evaluate(result.model, options.pop("task"), options.pop("part"), **options)["loss"]

    averages = {}
    for number, row in enumerate(found):
        step = row["step"]
        raw = seen[step - 1].after
        since = [one.after for one in seen[min(begun[0], step) - 1 : step]]
        mean = {name: torch.stack([weights[name] for weights in since]).mean(0) for name in raw}
        averages[step] = mean
        # Rounding of float64 in a running mean, and in the pass over the part.
        assert row["loss"] == pytest.approx(loss_of(mean, number), rel=1e-9)
        if step > begun[0]:
            assert row["loss"] != pytest.approx(loss_of(raw, number), rel=1e-4)
    lowest = min(found, key=lambda row: row["loss"])
    assert lowest["step"] > begun[0]  # or what follows would say nothing about the average
    torch.testing.assert_close(best, averages[lowest["step"]], rtol=0, atol=1e-12)
    for earlier, later in pairwise(seen):
        torch.testing.assert_close(later.before, earlier.after, rtol=0, atol=0)
        assert not torch.equal(later.before["head.weight"], later.after["head.weight"])


@pytest.mark.parametrize(("asked", "expected"), [(None, LANES), (1, 1), (9, 9)])
def test_evaluation_has_lanes_of_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, expected: int
) -> None:
    lanes: dict[str, set[int]] = {"train": set(), "valid": set()}
    targets = {"train": 0, "valid": 0}
    plain = Pass.run

    def run(self: Pass) -> list[BatchOutcome]:
        phase = "train" if self.schedule.backward else "valid"
        lanes[phase] |= {job.batch.lanes.shape[0] for job in self.jobs}
        outcomes = plain(self)
        targets[phase] += sum(int(outcome.count) for outcome in outcomes)
        return outcomes

    monkeypatch.setattr(Pass, "run", run)
    train(language(text, {"eval_lanes": asked}, epochs=1), run=tmp_path / "run", device="cpu")
    assert lanes == {"train": {LANES}, "valid": {expected}}
    # However it is cut, all of it is judged.
    assert targets == {"train": TARGETS, "valid": len(TEXT) - TARGETS - 2}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_windows_vary_by_the_seed_and_the_rate_follows_their_length(text: Path, tmp_path: Path, seen: list[Seen], accumulate: int) -> None:
    drawn = []
    for seed in (1, 2):
        spec = language(text, {"vary": True}, seed=seed, lr=0.25, optimizer="sgd", accumulate=accumulate)
        train(spec, run=tmp_path / str(seed), device="cpu")
        for epoch, steps in enumerate(by_epoch(seen)):
            windows = [length for step in steps for length in step.windows]
            planned = varied_steps(STEPS, seed=seed, epoch=epoch, first=0, count=len(windows))
            assert windows[:-1] == planned[:-1].tolist()
            assert windows[-1] <= planned[-1]
            assert len(set(windows)) > 3
            drawn.append(tuple(windows[:5]))
        assert [step.lr for step in seen] == [pytest.approx(0.25 * sum(step.windows) / len(step.windows) / STEPS) for step in seen]
        seen.clear()
    assert len(set(drawn)) == 4  # two seeds, two epochs


@pytest.mark.parametrize(
    ("max_steps", "accumulate"),
    [(1, 1), (4, 1), (BATCHES, 1), (BATCHES + 3, 1), (2, 4), (-(-BATCHES // 4) + 1, 4)],
)
def test_max_steps_ends_a_run_at_exactly_that_step(text: Path, tmp_path: Path, seen: list[Seen], max_steps: int, accumulate: int) -> None:
    spec = language(text, max_steps=max_steps, accumulate=accumulate, epochs=3)
    assert train(spec, run=tmp_path / "run", device="cpu").ending == "done"
    assert len(seen) == max_steps
    assert rows(tmp_path / "run", "train")[-1]["step"] == max_steps
    assert rows(tmp_path / "run", "valid")[-1]["step"] == max_steps
    # A run that has ended has nothing to go on with.
    assert train(spec, run=tmp_path / "run", resume=True, device="cpu").ending == "done"
    assert len(seen) == max_steps


@pytest.mark.parametrize(
    ("schedule", "max_steps", "accumulate", "total"),
    [
        ("cosine", 5, 1, 5),
        ("linear", 5, 3, 5),
        ("linear", BATCHES + 2, 1, BATCHES + 2),
        ("cosine", None, 5, 2 * -(-BATCHES // 5)),
        ("linear", 10_000, 5, 2 * -(-BATCHES // 5)),
    ],
)
def test_schedules_end_where_the_run_does(
    text: Path, tmp_path: Path, seen: list[Seen], schedule: str, max_steps: int | None, accumulate: int, total: int
) -> None:
    keys: dict[str, Any] = {"schedule": schedule, "lr": 0.5, "max_steps": max_steps, "accumulate": accumulate}
    train(language(text, optimizer="sgd", **keys), run=tmp_path / "run", device="cpu")
    shares = [step / total for step in range(total)]
    falls = [1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2 for share in shares]
    assert [step.lr for step in seen] == [pytest.approx(0.5 * fall) for fall in falls]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 100])
def test_the_last_group_of_an_epoch_may_be_smaller_and_drops_nothing(text: Path, tmp_path: Path, seen: list[Seen], accumulate: int) -> None:
    train(language(text, accumulate=accumulate), run=tmp_path / "run", device="cpu")
    epochs = by_epoch(seen)
    assert len(epochs) == 2
    for steps in epochs:
        assert len(steps) == -(-BATCHES // accumulate)
        assert {len(step.batches) for step in steps[:-1]} <= {accumulate}
        assert len(steps[-1].batches) == (BATCHES - 1) % accumulate + 1
        assert [batch.step for step in steps for batch in step.batches] == list(range(BATCHES))
        assert sum(int(step.result.count) for step in steps) == TARGETS
        places = torch.cat([places_of(batch) for step in steps for batch in step.batches])
        assert places.sort().values.tolist() == list(range(TARGETS))


def places_of(batch: Batch) -> Tensor:
    """Where in the text each target of a batch stands."""
    assert batch.targets is not None
    places_TB = torch.arange(batch.steps)[:, None] + batch.offset
    return places_TB[batch.targets >= 0]


# The rate is cut at step 12, and the best evaluation is that at step 15: what is forgotten of either shows.
