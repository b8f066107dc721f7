"""What a spec and its data become: network, head, weights of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.errors import SpecError
from carrywave.model.heads.classes import Softmax
from carrywave.model.parameter_placement import Holding, hold, homes
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.tasks.task import Task

WORDS = ("the", "cat", "sat", "mat")
LABELS = ("a", "b", "c")


def words(rows: int = 12) -> Sequences:
    return Sequences(np.arange(rows, dtype=np.uint8) % 4, np.array([0]), np.array([rows]))


def labelled() -> Sequences:
    return Sequences(np.ones((6, 2), np.float32), np.arange(6), np.ones(6, np.int64), labels=np.array([0, 0, 0, 1, 1, 2]))


def language(**sections: Any) -> Task:
    spec = parse({"task": "language", **sections})
    codec = Codec(task="language", field="text", kind="word", vocabulary=WORDS, size=4)
    return Task.of(spec, codec, codec.facts(words()), words())


def classification(**train: Any) -> Task:
    spec = parse({"task": "classification", "model": {"hidden": 5, "layers": 1}, "train": train})
    codec = Codec(task="classification", field="steps", labels=LABELS, columns=("x", "y"))
    return Task.of(spec, codec, codec.facts(labelled()), labelled())


def test_tied_models_have_one_matrix() -> None:
    model = language(model={"hidden": [8, 6], "layers": 2, "embedding": 6, "tie": True}).model()
    assert isinstance(model.head, Softmax)
    assert model.head.weight is model.encoder.weight
    assert sum("weight" in name and "lstm" not in name for name, _ in model.named_parameters()) == 1


def test_widths_and_dropouts_reach_the_network() -> None:
    keys = {"hidden": [8, 6], "layers": 2, "embedding": 5, "dropout": [0.1, 0.3, 0.3], "locked": True, "weight_drop": 0.2}
    model = language(model=keys).model()
    assert (model.lstm.input_size, model.lstm.widths, model.lstm.dropout, model.lstm.weight_drop) == (5, (8, 6), 0.3, 0.2)
    assert (model.dropout_in.p, model.dropout_out.p, model.dropout_in.locked) == (0.1, 0.3, True)  # type: ignore[union-attr]


def test_balanced_weights_are_inverse_to_the_counts() -> None:
    model = classification(class_weights="balanced").model(labelled())
    # Six examples of three classes: 6 / (3 x count).
    torch.testing.assert_close(model.head.get_buffer("weights"), torch.tensor([2 / 3, 1.0, 2.0]))


def test_a_weight_for_an_unknown_label_is_refused() -> None:
    with pytest.raises(SpecError, match=r"train.class_weights names 'd', which is not a label; use a, b, c"):
        classification(class_weights={"d": 2.0}).model(labelled())


def test_pretrained_vectors_reach_the_embedding(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt").write_text("cat 1 2 3\nother 7 7 7\nmat 4 5 6\n")
    task = language(model={"hidden": 3, "pretrained": str(tmp_path / "vectors.txt")})
    weight = task.model().encoder.weight
    assert weight[1].tolist() == [1.0, 2.0, 3.0]
    assert weight[3].tolist() == [4.0, 5.0, 6.0]
    assert 0.1 < weight[0].abs().max() <= 3**0.5  # drawn


def test_initial_weights_follow_the_spec() -> None:
    model = language(model={"hidden": 8, "layers": 1, "init": "orthogonal", "forget_bias": 1.0}).model().double()
    block = model.lstm.weight_hh_l0[:8]
    # The weights were made in float32.
    torch.testing.assert_close(block @ block.T, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-5)
    assert model.lstm.bias_ih_l0[8:16].tolist() == [1.0] * 8
    assert model.lstm.bias_hh_l0[8:16].tolist() == [0.0] * 8


MODELS: list[dict[str, Any]] = [
    {"hidden": 6, "layers": 2},
    {"hidden": 6, "layers": 2, "tie": True},
    {"hidden": [8, 5], "layers": 2, "embedding": 4, "layer_norm": True, "learned_carry": True, "forget_bias": 1.0},
    {"hidden": 6, "layers": 2, "projection": 3, "init": "orthogonal"},
    {"hidden": 16, "layers": 2, "softmax": "adaptive"},
    {"hidden": 6, "layers": 2, "cell": "slstm", "heads": 2, "cell_norm": True, "zoneout": 0.1, "learned_carry": True},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 4), (0, 1), (0, 2), (1, 3), (2, 4), (3, 4)])
def test_a_worker_has_memory_for_its_own_units_with_the_weights_of_the_whole(
    model: dict[str, Any], share_head: bool, first: int, last: int
) -> None:
    if share_head and model.get("softmax"):
        pytest.skip("an adaptive softmax is not shared")
    task = language(model=model)
    whole, part = task.model(), task.model(holding=Holding(first, last, torch.device("cpu"), share_head))
    wanted = {*range(first, last), *([3] if share_head else [])}
    where, expected = homes(whole), dict(whole.named_parameters())
    assert homes(part) == where  # tied as the whole is
    assert part.drawn
    assert not whole.drawn
    held = 0
    for name, parameter in part.named_parameters():
        assert (parameter.shape, parameter.dtype) == (expected[name].shape, expected[name].dtype)
        if wanted & where[name]:
            assert torch.equal(parameter, expected[name]), name
            held += 1
        elif not model.get("softmax") or not name.startswith("head"):
            assert parameter.is_meta, name
    assert held
    assert held <= len(hold(part, Holding(first, last, torch.device("cpu"), share_head), torch.float32))  # which needs no others


def test_what_is_to_be_loaded_is_not_drawn() -> None:
    model = language(model={"hidden": 6}).model(holding=Holding(0, 0, torch.device("cpu")), draw=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.drawn


@pytest.mark.parametrize(
    ("deviations", "names"), [((100.0,), {"mae", "rmse"}), ((100.0, 0.5), {"mae", "rmse", "mae[0]", "rmse[0]", "mae[1]", "rmse[1]"})]
)
def test_several_numbers_are_told_apart_and_averaged_only_when_standardised(deviations: tuple[float, ...], names: set[str]) -> None:
    outputs = len(deviations)
    codec = Codec("regression", "steps", columns=("0",), mean=(0.0,), std=(1.0,), target_mean=(0.0,) * outputs, target_std=deviations)
    task = Task(parse({"task": "regression"}), codec, DataFacts(features=1, outputs=outputs))
    data = Sequences(np.zeros((2, 1), np.float32), np.array([0, 1]), np.array([1, 1]), labels=np.zeros((2, outputs), np.float32))
    meter = task.meter(torch.device("cpu"), task.part("valid", data))
    assert meter is not None
    meter.update(torch.ones(2, outputs), torch.zeros(2, outputs), torch.tensor([0, 1]))
    values = meter.values()
    assert (set(values), values["mae"]) == (names, 1.0 if outputs > 1 else 100.0)
    assert [row["mae"] for row in meter.rows("column")] == list(deviations)
