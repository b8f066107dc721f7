"""A CRF in ONNX gives the best paths; what has no place for them is refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import carrywave as cw
from carrywave.errors import UserError
from carrywave.exporting import onnx_file, onnx_graph, torch_program
from carrywave.exporting.comparison import largest_difference
from carrywave.exporting.description import _network
from carrywave.exporting.portable import Portable
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.model import Model
from carrywave.model.vocabulary.spelled_words import SpelledWords

LABELS = ("O", "B-x", "I-x", "B-y", "I-y")
MODELS: dict[str, Callable[[], Model]] = {
    "one way": lambda: Model(Embedding(23, 6), cw.LSTM(6, 8), CRF(8, LABELS)),
    "both ways": lambda: Model(Numbers(4), cw.LSTM(4, 8, bidirectional=True), CRF(16, LABELS)),
    "words": lambda: Model(
        SpelledWords(Embedding(23, 6), 9, 6, 3, 4), cw.LSTM(10, 8), CRF(8, LABELS, words=WordScores(64, 5, "aB1Ab.2", 9, 6))
    ),
    "short words": lambda: Model(
        SpelledWords(Embedding(23, 6), 4, 2, 3, 4), cw.LSTM(10, 8), CRF(8, LABELS, words=WordScores(64, 5, "aA", 4, 2))
    ),
    "all transitions": lambda: Model(Numbers(4), cw.GRU(4, 8), CRF(8, 3)),
}


def made(name: str) -> Portable:
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return Portable(model.eval())


@pytest.fixture
def runtime() -> Callable[[Portable], Any]:
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    return lambda portable: onnx_file.runner(onnx_graph.graph(portable).SerializeToString(), portable)


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_finds_the_best_paths(name: str, runtime: Callable[[Portable], Any]) -> None:
    portable = made(name)
    run = runtime(portable)
    assert largest_difference(portable, run, what="it") == 0.0
    for lanes, steps in ((4, 1), (3, 17)):
        given = portable.sample(lanes, steps, seed=lanes)
        [ours], [theirs] = portable(*given), run(given)
        assert torch.equal(ours, theirs)  # -100 after the end of a lane
        assert theirs.dtype == torch.int64


def test_other_transitions_are_noticed(runtime: Callable[[Portable], Any]) -> None:
    portable = made("both ways")
    run = runtime(portable)
    with torch.no_grad():
        portable.model.head.transitions.neg_()  # type: ignore[operator, union-attr]
    with pytest.raises(UserError, match=r"it differs from the model by .* in tags, more than 0.02"):
        largest_difference(portable, run, what="it")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"a CRF looks back from step to step, .*; use --to onnx"):
        torch_program.archive(made("one way"))
    with pytest.raises(UserError, match="the head reads whole sequences, so there is no carry to pass on; export whole sequences"):
        Portable(made("one way").model, stateful=True)
    assert _network(made("one way").model)["head"] == {"inputs": 8, "kind": "crf", "outputs": 5, "scheme": "bio"}


def test_a_run_is_exported(tmp_path: Path, runtime: Callable[[Portable], Any]) -> None:
    rows = [(["the", "old", "town", "of", "york"], ["O", "B-x", "I-x", "O", "B-y"]), (["york", "is", "old"], ["B-y", "O", "O"])] * 10
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 64}, "train": {"epochs": 1}}
    result = cw.fit({"hidden": 4, "layers": 1, "crf": True}, rows, run=tmp_path / "run", **how)
    assert result.run is not None
    assert cw.export(result.run, "onnx", tmp_path / "onnx").difference == 0.0
    assert cw.export(result.run, "safetensors", tmp_path / "safetensors").files == ("model.safetensors", "model.json")
