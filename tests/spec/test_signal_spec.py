"""The front and the augmentation in a spec: what is read, written again, and refused with a reason."""

from __future__ import annotations

import pytest

from carrywave.errors import SpecError
from carrywave.spec.load import dump, load, parse
from carrywave.spec.signal_spec import total_stride
from carrywave.spec.yaml_text import parse_yaml

LIST = "model.front=[{channels: 8, kernel: 5, stride: 3}, {channels: 16, kernel: 3}]"


@pytest.mark.parametrize(("given", "stride", "layers"), [("model.front=none", 1, 0), ("model.front=deep", 8, 3), (LIST, 6, 2)])
def test_a_front_is_read_and_written(given: str, stride: int, layers: int) -> None:
    spec = load(None, ["task=classification", given, "data.augment={noise: 0.1, shift: true}"])
    assert len(spec.model.front_layers) == layers
    assert total_stride(spec.model.front_layers) == stride
    again = parse(parse_yaml(dump(spec), "spec"))
    assert again == spec
    assert again.data.augment is not None
    assert (again.data.augment.shift, again.data.augment.noise) == (True, 0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["task=language", "model.front=deep"], "model.front reads whole sequences, but a stream is read in windows"),
        (["task=forecasting", "model.front=deep"], "model.front reads whole sequences"),
        (["task=tagging", "batch.lanes=4", "model.front=[{stride: 1}]"], "model.front reads whole sequences"),
        (["task=tagging", "model.front=deep"], "one step of 8, but tagging labels every step; list layers with a stride of 1"),
        (["task=classification", "model.front=deep", "plan.chunk_steps=8"], "plan.chunk_steps=8 cuts time.*use plan.micro_batches"),
        (["task=classification", "model.front=deep", "train.beta=1"], "train.beta=1 penalises changes"),
        (["task=classification", "model.front=large"], 'model.front is "large"; use one of auto, none, small, deep'),
        (["task=classification", "model.front=[{kernel: 4}]"], "kernel is 4, but as many steps are read after a place.*use 5"),
        (["task=classification", "model.front=[{stride: 0}]"], r"model.front\[0\].stride is 0"),
        (["task=classification", "model.front=[{strides: 2}]"], r"model.front\[0\].strides"),
        (["task=classification", "train.label_smoothing=1"], "train.label_smoothing is 1"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load(None, given)
