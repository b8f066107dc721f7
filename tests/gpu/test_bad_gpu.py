"""Bad numbers on a GPU, where steps are recorded and nothing is read on the host: they are skipped there, counted, and named later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.data.batch import Batch
from carrywave.errors import Diverged
from carrywave.model.encoders import Numbers
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.train.fit import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS, LANES, FEATURES, HIDDEN = 12, 8, 16, 128
BAD = 7  # the step whose input has a NaN in lane 0: recordings are replayed by then


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 1)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(y).squeeze(-1).float() - target).square().sum(), torch.full((), target.numel(), device=y.device)


def batch(number: int, *, bad: bool) -> Batch:
    x_TBF = torch.randn(STEPS, LANES, FEATURES, generator=torch.Generator().manual_seed(number))
    if bad:
        x_TBF[3, 0, 5] = math.nan
    return Batch.of(x_TBF, torch.ones(STEPS, LANES), fresh=torch.full((LANES,), number == 0), step=number)


@pytest.fixture(autouse=True)
def recorded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is a class of the user's own, whose steps are recorded only then."""
    monkeypatch.setenv("CARRYWAVE_CAPTURE", "1")


def trainer(**keys: Any) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cw.Model(Numbers(FEATURES), cw.LSTM(FEATURES, HIDDEN, 2), Head())
    return Trainer(model, {"lr": 0.01, "clip": 1.0, "on_nan": "skip", "precision": "fp32", **keys}, device="cuda", keep_state=True)


def weights(one: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.parameters().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "ntasgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_recorded_step_is_skipped_on_the_device(precision: str, optimizer: str, accumulate: int) -> None:
    both = [trainer(precision=precision, optimizer=optimizer) for _ in range(2)]
    both[1].capture = None
    finite: list[list[bool]] = [[], []]
    for number in range(12):
        for one, seen in zip(both, finite, strict=True):
            before = weights(one)
            result = one.update(*(batch(accumulate * number + each, bad=number == BAD and each == 0) for each in range(accumulate)))
            seen.append(bool(result.finite))
            kept = all(torch.equal(tensor, before[name]) for name, tensor in one.parameters().items())
            assert kept or number != BAD
    assert both[0].capture is not None
    assert sum(both[0].capture.replays.values()) >= 12 - 2
    for one, seen in zip(both, finite, strict=True):
        assert seen == [number != BAD for number in range(12)]
        found = one.nonfinite.look()
        assert (found.ago, found.bad, found.longest, found.in_a_row) == (11 - BAD, 1, 1, 0)
        assert one.nonfinite.cause(found, weights=True) == "the output that lstm.l0 computes on rank 0"
        assert one.state is not None
        assert all(bool(part.isfinite().all()) for carry in one.state.carries for part in carry)
    # The same work in the same order, from a recording or not.
    for name, tensor in both[0].parameters().items():
        torch.testing.assert_close(tensor, both[1].parameters()[name], rtol=0, atol=0)


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run in which a weight goes bad before the step BAD, once."""
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 60)
    update, done = Trainer.update, [0]

    def poisoned(self: Trainer, *batches: Batch) -> Any:
        done[0] += 1
        if done[0] == BAD:
            with torch.no_grad():
                dict(self.named)["lstm.weight_hh_l1"][0, 0] = math.inf
        return update(self, *batches)

    monkeypatch.setattr(Trainer, "update", poisoned)
    return {
        "data": {"train": str(tmp_path / "text.txt")},
        "model": {"hidden": 64, "layers": 2},
        "batch": {"lanes": 4, "steps": 8},
        "train": {"epochs": 2, "log_every": 5, "lr": 0.01, "schedule": "constant", "precision": "fp32"},
    }


def run(spec: dict[str, Any], folder: Path, on_nan: str, watch: Silent) -> str | None:
    spec = spec | {"train": spec["train"] | {"on_nan": on_nan}}
    return train(parse(spec), run=folder, device="cuda", watch=watch).ending


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_the_first_bad_step_is_named_also_where_it_is_looked_at_later(spec: dict[str, Any], tmp_path: Path, on_nan: str) -> None:
    with pytest.raises(Diverged, match=rf"the weight lstm.weight_hh_l1 of lstm.l1 on rank 0 is no longer finite at step {BAD} ") as caught:
        run(spec, tmp_path / "run", on_nan, Silent())
    assert ("steps in a row were skipped" in str(caught.value)) == (on_nan == "skip")
    assert not list(tmp_path.glob("run/snapshots/step-*"))


def test_a_run_with_recordings_goes_back(spec: dict[str, Any], tmp_path: Path) -> None:
    watch = Listening()
    assert run(spec, tmp_path / "run", "back", watch) == "done"
    assert [line for line in watch.lines if "going back to step 0, with the learning rate multiplied by 0.5" in line]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["split"] == "train"]
    assert {row["lr"] for row in found} == {0.005}
    assert [row["step"] for row in found] == sorted({row["step"] for row in found})
    assert found[-1]["loss"] < found[0]["loss"]
