"""The facts about the data that shape the model and the plan: torch-free, printable, and enough to plan without the data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from carrywave.errors import SpecError

OF_A_RUN = ("scale", "own_model", "given_codec", "files")  # further entries of a run's facts.json, not facts about the data


@dataclass(frozen=True)
class DataFacts:
    """Sizes, names and lengths of the data, as far as the model and the plan depend on them."""

    vocabulary: int = 0  # number of tokens; 0 for numeric inputs
    features: int = 0  # numbers per step; 0 for token inputs
    labels: tuple[str, ...] = ()  # classes or tags, by index
    outputs: int = 0  # numbers per regression target, or forecast columns
    sequences: int = 0  # separate sequences, or series, in the training data
    steps: int = 0  # real steps in the training data
    longest: int = 0  # steps of the longest sequence
    histogram: tuple[tuple[int, int], ...] = ()  # (maximum length of the bin, sequences in it), at most 64 bins
    most_labels: int = 0  # transcription: labels of the longest target
    known: int = 0  # forecasting: features that are read for the whole horizon, too
    fixed: int = 0  # forecasting: features whose change since the last season is not read: the calendar, static ones
    categories: tuple[int, ...] = ()  # forecasting: values of each categorical column, with the unknown one; known ones first
    known_categories: int = 0  # how many of these columns are read for the whole horizon, too
    characters: int = 0  # different codes of characters that are read beside words; 0: none are read
    word_length: int = 0  # how many of them belong to each word
    spans: int = 0  # 1: labels of words write spans, as B-X and I-X do

    @staticmethod
    def of(known: Mapping[str, Any]) -> DataFacts:
        """Rebuild the facts from parsed JSON, where tuples have become lists."""
        lists = {"labels": tuple(known["labels"]), "histogram": tuple((a, b) for a, b in known["histogram"])}
        return DataFacts(**{**known, **lists, "categories": tuple(known.get("categories", ()))})


def read_facts(text: str) -> DataFacts:
    """Read facts from a run's facts.json, a run folder, or text such as `vocabulary=33278,steps=2000000`; `labels=9` means nine labels."""
    path = Path(text)
    if "=" in text and not path.exists():
        return _checked(dict(_pair(part, text) for part in text.split(",")), text)
    path = path / "facts.json" if path.is_dir() else path
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}); pass a run's facts.json, or key=value as in vocabulary=33278") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON ({error}); pass a run's facts.json, or key=value as in vocabulary=33278") from None
    if not isinstance(known, dict):
        raise SpecError(f"{path} contains no facts; pass a run's facts.json, or key=value as in vocabulary=33278")
    return _checked({name: value for name, value in known.items() if name not in OF_A_RUN}, str(path))


def _pair(part: str, text: str) -> tuple[str, object]:
    name, equals, value = part.strip().partition("=")
    if not equals or not value.isdecimal():
        raise SpecError(f"facts {text}: {part.strip()!r} is not key=number; write them as in vocabulary=33278,steps=2000000")
    if len(value) > 15 or (name == "labels" and len(value) > 6):
        raise SpecError(f"facts {text}: {part.strip()!r} is larger than any data; use a smaller number")
    if name == "categories":
        return name, [int(value)]  # one column with so many values
    return name, [str(number) for number in range(int(value))] if name == "labels" else int(value)


def _checked(known: Mapping[str, object], where: str) -> DataFacts:
    names = [each.name for each in fields(DataFacts)]
    found: dict[str, Any] = {"labels": (), "histogram": ()}
    for name, value in known.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise SpecError(f"facts {where}: unknown fact {name!r}; " + (f"use {near[0]}" if near else f"use {', '.join(names)}"))
        if not _takes(name, value):
            raise SpecError(f"facts {where}: {name}={str(value)[:40]} is not valid; correct it")
        found[name] = value
    return DataFacts.of(found)


def _takes(name: str, value: object) -> bool:
    if name == "labels":
        return isinstance(value, list) and all(isinstance(label, str) for label in value)
    if name == "categories":
        return isinstance(value, list) and all(map(_whole, value))
    if name == "histogram":
        return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 and all(map(_whole, pair)) for pair in value)
    return _whole(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
