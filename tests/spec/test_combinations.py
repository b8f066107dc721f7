"""What cannot be together in a spec is refused, with the keys that it is about."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.errors import SpecError
from carrywave.spec.load import parse


@pytest.mark.parametrize(
    ("task", "sections", "words"),
    [
        ("classification", {"model": {"tie": True}}, "model.tie is for language models"),
        ("language", {"model": {"tie": True, "embedding": 3}}, "set model.embedding=128"),
        ("language", {"model": {"bidirectional": True}}, "model.bidirectional cannot read a stream backwards"),
        ("classification", {"model": {"crf": True}}, "model.crf chooses the labels of a sequence together, for tagging"),
        ("tagging", {"model": {"crf": True}, "data": {"multi_label": True}}, "data.multi_label allows any number"),
        ("tagging", {"model": {"crf": True}, "train": {"label_smoothing": 0.1}}, "train.label_smoothing is for single labels"),
        ("tagging", {"model": {"crf": True}, "plan": {"stages": 2, "share_head": True}}, "plan.share_head is for single labels"),
        ("tagging", {"model": {"crf": True}, "batch": {"lanes": 4}}, "model.crf reads whole sequences, but a stream"),
        ("tagging", {"model": {"crf": True}, "plan": {"chunk_steps": 4}}, "plan.chunk_steps=4 cuts time, but model.crf reads whole"),
        ("transcription", {"plan": {"chunk_steps": 8}}, "plan.chunk_steps=8 cuts time, but transcription reads whole"),
        ("transcription", {"batch": {"lanes": 2, "steps": 8}}, "transcription reads whole sequences, but a stream"),
        ("transcription", {"data": {"augment": {"shift": True}}}, "data.augment.shift moves steps"),
        ("classification", {"batch": {"lanes": 2}}, "classification reads separate sequences; set batch.tokens"),
        ("forecasting", {"batch": {"tokens": 64}}, "forecasting reads streams"),
        ("language", {"data": {"standardize": "window"}}, "data.standardize=window is for forecasting"),
        ("language", {"train": {"loss": "nse"}}, "train.loss=nse is for regression"),
        ("language", {"train": {"optimizer": "ntasgd", "schedule": "plateau"}}, "use train.schedule=constant"),
    ],
)
def test_it_is_refused(task: str, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse({"task": task, **sections})
