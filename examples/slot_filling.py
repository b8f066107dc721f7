"""Converts the sentences of ATIS and SNIPS, whose words are tagged with slots, to JSON lines for the recipes.

    git clone https://github.com/MiuLab/SlotGated-SLU
    python examples/slot_filling.py SlotGated-SLU/data/atis data/atis
    python examples/slot_filling.py SlotGated-SLU/data/snips data/snips

A part of the data is a folder with two files: a line of `seq.in` holds the words of a sentence, the same line of `seq.out` their tags. Each
line of train.jsonl, valid.jsonl and test.jsonl is one sentence: `tokens` are its words and `labels` their tags.

A model knows the tags of train alone, and some tags of ATIS occur only in valid or test. Each of them gets a row of weight 0 in train, of
which nothing is learned: they then are tags like any other, and count as missed where no model can find them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PARTS = {"train": ("train",), "valid": ("valid", "dev"), "test": ("test",)}  # and the names that folders have for them
DECLARED = "<tag>"  # the word of rows that only say which tags there are

Sentence = tuple[list[str], list[str]]  # words and tags


def main(source: str, folder: str) -> None:
    """Convert the three parts of a data set."""
    parts = {part: read(next(place for name in names if (place := Path(source) / name).is_dir())) for part, names in PARTS.items()}
    known, every = (dict.fromkeys(tag for part in some for _, tags in parts[part] for tag in tags) for some in (("train",), PARTS))
    declared = [declare(tag) for tag in every if tag not in known]
    for part, sentences in parts.items():
        rows: list[dict[str, object]] = [{"tokens": words, "labels": tags} for words, tags in sentences]
        if part == "train":
            rows += [{"tokens": words, "labels": tags, "weight": 0} for words, tags in declared]
        path = Path(folder) / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{part}: {len(sentences)} sentences")
    if declared:
        print(f"{len(declared)} tags that only valid or test have: {', '.join(tags[-1] for _, tags in declared)}")


def read(place: Path) -> list[Sentence]:
    """The sentences of a part."""
    files = [(place / name).read_text(encoding="utf-8").splitlines() for name in ("seq.in", "seq.out")]
    return [(words.split(), tags.split()) for words, tags in zip(*files, strict=True)]


def declare(tag: str) -> Sentence:
    """A sentence that has the tag; one inside a span comes after the beginning of that span."""
    tags = [f"B-{tag[2:]}", tag] if tag.startswith("I-") else [tag]
    return [DECLARED] * len(tags), tags


if __name__ == "__main__":
    main(*sys.argv[1:])
