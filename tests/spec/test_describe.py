"""The keys in words, and the reference made from them."""

from __future__ import annotations

from pathlib import Path

from carrywave.spec.describe import keys, reference, schema
from carrywave.spec.spec import Spec

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs/spec.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m carrywave.spec.describe > docs/spec.md"


def test_keys_are_the_fields() -> None:
    sections = {name: field.annotation for name, field in Spec.model_fields.items()}
    names = set(keys())
    assert set(sections) <= names
    assert {f"model.{field}" for field in Spec().model.model_dump()} <= names
    assert keys()["plan.stages"].default == "1"
    assert keys()["train.class_weights"].free
    assert keys()["plan"].section
    assert not keys()["train.lr"].free


def test_the_schema_is_closed_and_has_the_defaults() -> None:
    whole = schema()
    assert whole["$schema"].startswith("https://json-schema.org/")
    assert whole["additionalProperties"] is False
    assert whole["$defs"]["ModelSpec"]["additionalProperties"] is False
    assert whole["$defs"]["TrainSpec"]["properties"]["lr"] == {
        "default": 0.002,
        "description": "learning rate",
        "exclusiveMinimum": 0.0,
        "title": "Lr",
        "type": "number",
    }
