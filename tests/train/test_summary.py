"""What a run says of itself before the first step: here, the backends of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from carrywave.data.order import StreamOrder
from carrywave.kernels import dispatch
from carrywave.kernels.hopper import persistent
from carrywave.kernels.lstm import aten
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.plan.plan import Plan
from carrywave.runs.watcher import Silent
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.train.fit import train
from carrywave.train.start.summary import backends, summarize

ORDER = StreamOrder(np.array([5000]), lanes=8, steps=64)


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYWAVE_KERNEL", raising=False)
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", True)


def model(**options: Any) -> Model:
    lstm = LSTM(8, [16, 16, 24], **options)
    return Model(Embedding(10, 8), lstm, Softmax(lstm.output_size, 10))


def spec(**train: Any) -> Spec:
    return parse({"batch": {"lanes": 8, "steps": 64}, "train": train})


def test_each_layer_is_asked_with_the_shape_and_dtype_of_a_chunk() -> None:
    assert backends(spec(), model(), Plan(), ORDER, "cpu") == ("aten (oneDNN)",) * 3
    assert backends(spec(), model(), Plan(chunk_steps=2), ORDER, "cpu") == ("manual",) * 3  # too short for oneDNN
    assert backends(spec(precision="fp64"), model(), Plan(), ORDER, "cpu") == ("manual",) * 3
    assert backends(spec(precision="bf16"), model(), Plan(), ORDER, "cpu") == ("manual",) * 3
    assert backends(spec(), model(proj_size=4), Plan(), ORDER, "cpu") == ("aten (native)",) * 3
    for options in ({"zoneout": 0.1}, {"recurrent_dropout": 0.1}, {"cell_norm": True}, {"num_heads": 2}):
        assert backends(spec(), model(**options), Plan(), ORDER, "cpu") == ("reference",) * 3


def test_what_was_asked_for_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends(spec(), model(), Plan(kernel="reference"), ORDER, "cpu") == ("reference",) * 3
    assert backends(spec(), model(kernel="manual"), Plan(), ORDER, "cpu") == ("manual",) * 3
    monkeypatch.setenv("CARRYWAVE_KERNEL", "reference")
    assert backends(spec(), model(), Plan(kernel="manual"), ORDER, "cpu") == ("reference",) * 3


def test_lanes_are_those_of_one_worker_and_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def refusal(x: torch.Tensor, *rest: object) -> str:
        seen.append(tuple(x.shape))
        return ""

    monkeypatch.setattr(persistent, "refusal", refusal)
    plan = Plan(replicas=3, micro_batches=2, chunk_steps=48, kernel="persistent")
    assert backends(spec(precision="bf16"), model(), plan, ORDER, "cpu") == ("persistent",) * 3
    assert seen == [(48, 2, 8), (48, 2, 16), (48, 2, 16)]


def told(network: Model | OpaqueModel, plan: Plan | None = None) -> list[str]:
    facts = DataFacts(sequences=1, steps=5000, longest=5000, vocabulary=10)
    lines = summarize(spec(), facts, network, plan or Plan(), ORDER, "cpu")
    return [line for line in lines if line.startswith("kernels")]


def test_the_summary_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(model()) == ["kernels   aten (oneDNN)"]
    assert told(OpaqueModel(nn.Linear(1, 1), loss=lambda out, target: (out.sum(), out.sum()))) == []  # not ours to name
    monkeypatch.setattr(persistent, "refusal", lambda x, layer, *rest: "too wide" if layer[0].w_hh.shape[1] > 16 else "")
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(UserWarning, match="too wide"):
        assert told(model(), Plan(kernel="persistent")) == ["kernels   persistent (layers 1-2), aten (oneDNN) (layer 3)"]


def test_a_run_keeps_them_with_its_plan(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc def ghi\n" * 100)
    said: list[str] = []

    class Watch(Silent):
        def begin(self, summary: str) -> None:
            said.append(summary)

    asked = {"data": {"train": str(text)}, "model": {"hidden": 4, "layers": 2}, "batch": {"lanes": 4, "steps": 40}}
    train(parse({**asked, "train": {"max_steps": 1}}), run=tmp_path / "run", device="cpu", watch=Watch())
    assert "kernels   aten (oneDNN)" in said[0].splitlines()
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["backends"] == ["aten (oneDNN)"] * 2


def test_layers_that_read_the_whole_window_have_no_chunks() -> None:
    facts = DataFacts(sequences=1, steps=5000, longest=5000, vocabulary=10)
    lines = summarize(spec(), facts, model(bidirectional=True), Plan(2, chunk_steps=8), ORDER, "cpu")
    assert "plan      2 replicas; cpu, auto" in lines


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(), "batch     8 lanes x 64 steps, carry kept between windows"),
        (Plan(stages=2, cuts=(2,)), "batch     8 lanes x 64 steps, carry kept between windows"),
        (Plan(2), "batch     8 lanes x 64 steps, carry kept between windows; 4 lanes on each replica"),
        (Plan(3), "batch     8 lanes x 64 steps, carry kept between windows; 2 or 3 lanes on each replica"),
    ],
)
def test_a_batch_is_said_to_be_divided_where_it_is(plan: Plan, said: str) -> None:
    facts = DataFacts(sequences=1, steps=5000, longest=5000, vocabulary=10)
    assert said in summarize(spec(), facts, model(), plan, ORDER, "cpu")
