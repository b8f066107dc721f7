"""The facts about the data that shape the model and the plan: torch-free, printable, and enough to plan without the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from carrywave.errors import SpecError

OF_A_RUN = ("scale", "own_model", "given_codec", "files")  # further entries of a run's facts.json, not facts about the data
MOST_LABELS = 10**6

Number = Annotated[int, Field(ge=0, lt=10**15, strict=True)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DataFacts:
    """Sizes, names and lengths of the data, as far as the model and the plan depend on them."""

    vocabulary: Number = 0  # number of tokens; 0 for numeric inputs
    features: Number = 0  # numbers per step; 0 for token inputs
    labels: tuple[str, ...] = ()  # classes or tags, by index
    outputs: Number = 0  # numbers per regression target, or forecast columns
    sequences: Number = 0  # separate sequences, or series, in the training data
    steps: Number = 0  # real steps in the training data
    longest: Number = 0  # steps of the longest sequence
    histogram: tuple[tuple[Number, Number], ...] = ()  # (maximum length of the bin, sequences in it), at most 64 bins
    most_labels: Number = 0  # transcription: labels of the longest target
    known: Number = 0  # forecasting: features that are read for the whole horizon, too
    fixed: Number = 0  # forecasting: features whose change since the last season is not read: the calendar, static ones
    categories: tuple[Number, ...] = ()  # forecasting: values of each categorical column, with the unknown one; known ones first
    known_categories: Number = 0  # how many of these columns are read for the whole horizon, too
    characters: Number = 0  # different codes of characters that are read beside words; 0: none are read
    word_length: Number = 0  # how many of them belong to each word
    spans: Number = 0  # 1: labels of words write spans, as B-X and I-X do

    @staticmethod
    def of(known: Mapping[str, Any]) -> DataFacts:
        """Rebuild the facts from parsed JSON, where tuples have become lists."""
        return DataFacts(**known)


def read_facts(text: str) -> DataFacts:
    """Read facts from a run's facts.json, a run folder, or text such as `vocabulary=33278,steps=2000000`; `labels=9` means nine labels."""
    path, remedy = Path(text), "pass a run's facts.json, or key=value as in vocabulary=33278,steps=2000000"
    try:
        if "=" in text and not path.exists():
            known: Any = {
                name.strip(): _number(name.strip(), value) for name, _, value in (part.partition("=") for part in text.split(","))
            }
        else:
            known = json.loads((path / "facts.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        return DataFacts(**{name: value for name, value in known.items() if name not in OF_A_RUN})
    except ValidationError as error:
        [first, *_] = error.errors()
        raise SpecError(f"facts {text[:80]}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {remedy}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(f"facts {text[:80]} cannot be read ({str(error).splitlines()[0]}); {remedy}") from None


def _number(name: str, value: str) -> Any:
    """The number in `key=number`, as what the fact is: so many labels, or one column with so many values."""
    number = int(value)
    if name == "labels":
        return [str(label) for label in range(min(number, MOST_LABELS))]
    return [number] if name == "categories" else number
