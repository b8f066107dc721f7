"""Recipes of examples/ (recipes.yaml) with data made up for them: random numbers in the sizes of the real data, which is all that the time
of a step depends on. Nothing is read but that file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.spec.defaults import fitted, suited, with_precision
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import parse_yaml
from carrywave.tasks.task import Task

SEED = 1
SMALL_BATCH = {"lanes": 4, "steps": 6, "tokens": 48}  # where sizes do not matter
SMALL_SIZES = {"vocabulary": 50, "labels": 8, "sequences": 40, "characters": 8, "word_length": 4}
LONGEST_SMALL = 400

Made = Callable[[np.random.Generator, Ints], dict[str, Any]]  # the targets of sequences of these lengths, as arguments of `Sequences`


@dataclass(frozen=True)
class Sizes:
    """What the data of a recipe decides."""

    lengths: tuple[int, ...]  # quantiles of the lengths of sequences, from the shortest to the longest; of a text, enough for some windows
    sequences: int = 1
    vocabulary: int = 0
    features: int = 0
    labels: int = 0
    characters: int = 0  # different ones, if they are read beside words
    word_length: int = 0
    spoken: float = 0.0  # labels of a transcription for each step


@dataclass(frozen=True)
class Recipe:
    """A spec without files, and the sizes of its data."""

    name: str  # of its file in examples/
    spec: Spec
    sizes: Sizes

    def suited(self, *, made_for_bf16: bool) -> Recipe:
        """In the precision that such devices would train it in, unless it names one."""
        return replace(self, spec=with_precision(self.spec, suited(made_for_bf16=made_for_bf16)))

    @property
    def small(self) -> Recipe:
        """The same with few units, words and steps, to see that it works."""
        model, batch, data = self.spec.model, self.spec.batch, self.spec.data
        narrow: dict[str, Any] = {key: 8 for key in ("embedding", "character_width", "linear") if getattr(model, key)}
        narrow["hidden"] = (16, 16, 8) if isinstance(model.hidden, tuple) else 16
        sections = {
            "model": model.model_copy(update=narrow),
            "batch": batch.model_copy(update={key: few for key, few in SMALL_BATCH.items() if getattr(batch, key)}),
            "data": data.model_copy(update={"warmup": min(data.warmup, 4)}),
        }
        few = {key: min(getattr(self.sizes, key), most) for key, most in SMALL_SIZES.items()}
        lengths = tuple(min(length, LONGEST_SMALL) for length in self.sizes.lengths)
        return Recipe(self.name, self.spec.model_copy(update=sections), replace(self.sizes, lengths=lengths, **few))

    def task(self) -> tuple[Task, Sequences]:
        """The task with its data, which is the same whenever it is made up."""
        data, codec = self._data(), self._codec
        facts = codec.facts(data)
        return Task.of(fitted(self.spec, facts), codec, facts, data), data

    @property
    def _codec(self) -> Codec:
        """How the data would have been read."""
        task, data, sizes = self.spec.task, self.spec.data, self.sizes
        labels = tuple(f"B-{number}" for number in range(sizes.labels))  # spans of one word each: any may follow any
        columns = tuple(str(number) for number in range(sizes.features))
        zeros, ones = ((value,) * sizes.features for value in (0.0, 1.0))
        if task == "forecasting":  # every column is a series of its own
            zero, one, many = zeros[:1], ones[:1], len(columns)
            scale: dict[str, Any] = {"mean": zero, "std": one, "target_mean": zero, "target_std": one}
            of_series: dict[str, Any] = {"names": columns, "means": (zero,) * many, "stds": (one,) * many}
            return Codec(task, "columns", columns=("value",), targets=(0,), channels=columns, **scale, **of_series)
        if data.each_step:
            static = data.static or ()
            read = (*columns[len(static) :], *static)
            each: dict[str, Any] = {"static": static, "step_targets": data.targets, "target_mean": zeros[:1], "target_std": ones[:1]}
            return Codec(task, "columns", columns=read, mean=zeros, std=ones, **each)
        if columns:
            sets = "vectors" if data.multi_label else "none"
            return Codec(task, "steps", columns=columns, mean=zeros, std=ones, labels=labels, label_sets=sets)
        if not sizes.characters:
            return Codec(task, "tokens", kind="int", size=sizes.vocabulary, labels=labels)
        words = (*(str(number) for number in range(sizes.vocabulary - 1)), UNKNOWN)
        letters = tuple(chr(ord("a") + number) for number in range(sizes.characters))
        spelled: dict[str, Any] = {"vocabulary": words, "characters": letters, "word_length": sizes.word_length}
        return Codec(task, "tokens", kind="word", size=sizes.vocabulary, labels=labels, **spelled)

    def _data(self) -> Sequences:
        draw, known = np.random.default_rng(SEED), self.sizes
        drawn = np.interp(draw.random(known.sequences), np.linspace(0, 1, len(known.lengths)), known.lengths)
        lengths = drawn.round().astype(np.int64)
        lengths[0] = known.lengths[-1]
        targets: Mapping[str, Made] = {
            "classification": self._classes,
            "tagging": self._tags,
            "transcription": self._transcripts,
            "regression": self._numbers,
            "forecasting": self._units,
        }
        made = targets[self.spec.task](draw, lengths) if self.spec.task in targets else {}
        return Sequences(self._inputs(draw, int(lengths.sum())), np.cumsum(lengths) - lengths, lengths, **made)

    def _inputs(self, draw: np.random.Generator, rows: int) -> NDArray[Any]:
        codec = self._codec
        if codec.columns:
            return draw.standard_normal((rows, len(codec.columns))).astype(np.float32)
        tokens = draw.integers(codec.size, size=rows).astype(np.int32)
        if not codec.characters:
            return tokens
        letters = draw.integers(codec.character_codes, size=(rows, codec.word_length)).astype(np.int32)
        return np.concatenate([tokens[:, None], letters], axis=1)

    def _classes(self, draw: np.random.Generator, lengths: Ints) -> dict[str, Any]:
        return {"labels": draw.integers(self.sizes.labels, size=len(lengths))}

    def _tags(self, draw: np.random.Generator, lengths: Ints) -> dict[str, Any]:
        rows, labels = int(lengths.sum()), self.sizes.labels
        several = self.spec.data.multi_label
        return {"tags": draw.integers(2, size=(rows, labels)).astype(np.float32) if several else draw.integers(labels, size=rows)}

    def _transcripts(self, draw: np.random.Generator, lengths: Ints) -> dict[str, Any]:
        counts = np.maximum(1, np.round(lengths * self.sizes.spoken)).astype(np.int64)
        ends = np.cumsum(counts)
        return {"labels": draw.integers(self.sizes.labels, size=int(counts.sum())), "spans": np.stack([ends - counts, ends], axis=1)}

    def _numbers(self, draw: np.random.Generator, lengths: Ints) -> dict[str, Any]:
        values = draw.standard_normal((int(lengths.sum()), 1)).astype(np.float32)
        return {"tags": values, "spreads": np.ones((len(lengths), 1)), "warm": np.full(len(lengths), self.spec.data.warmup)}

    def _units(self, draw: np.random.Generator, lengths: Ints) -> dict[str, Any]:
        return {"units": np.ones((len(lengths), 1)), "names": tuple(str(number) for number in range(len(lengths)))}


def recipes() -> list[Recipe]:
    """All recipes, in the order of their file."""
    found = parse_yaml((files(__package__) / "recipes.yaml").read_text(encoding="utf-8"), "recipes.yaml")
    assert isinstance(found, Mapping)
    return [Recipe(name, parse(known["spec"]), _sizes(known["sizes"])) for name, known in found.items()]


def _sizes(known: Mapping[str, Any]) -> Sizes:
    return Sizes(**{**known, "lengths": tuple(known["lengths"])})
