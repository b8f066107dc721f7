"""Texts with labels as their field writes them: CoNLL columns, CoNLL-U, a label before each text, trees, a file of labels beside the text.

Each reader is a pure function from a text to rows and a line that says how they were read, or None if the text is not written so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from carrywave.data.files.rows import Row
from carrywave.errors import DataError

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
FASTTEXT = "__label__"
LEAF = re.compile(r"\(\d+ ([^()]+)\)")
MOST_LABELS = 200  # different first words of lines that are still labels
# What stands in the name of a file of texts, and what stands there in the name of the file with their labels.
COMPANIONS = (("seq.in", "seq.out"), ("seq.in", "label"), ("text", "labels"), ("sentences", "labels"), ("in", "out"))


class Read(NamedTuple):
    """Rows, and how they were read."""

    rows: list[Row]
    how: str


class Asked(NamedTuple):
    """What a reader may know: the column that `data.label` names, and the labels of the training data."""

    label: str | None = None
    labels: tuple[str, ...] = ()
    several: bool = False  # a row may have any number of labels


def conllu(text: str, asked: Asked) -> Read | None:
    """Treebanks of Universal Dependencies: ten columns with fixed names; ranges (3-4) and empty words (5.1) are no words."""
    if re.search(r"^\d+(-\d+|\.\d+)?(\t[^\t\n]+){9}$", text[:100_000].replace("\r", ""), re.MULTILINE) is None:
        return None
    label = asked.label or "upos"
    if label not in CONLLU:
        raise DataError(f"data.label={label} is not a column of CoNLL-U; use one of {', '.join(CONLLU[1:])}")
    rows = []
    for block in _blocks(text):
        words = [line.split("\t") for line in block if not line.startswith("#")]
        words = [word for word in words if word[0].isdecimal() and len(word) == len(CONLLU)]
        tags = [word[CONLLU.index(label)] for word in words]
        rows.append({"tokens": [word[1] for word in words], "labels": [None if tag == "_" else tag for tag in tags]})
    return Read([row for row in rows if row["tokens"]], f"CoNLL-U; tags are {label} (data.label chooses another column)")


def conll(text: str, asked: Asked) -> Read | None:
    """A word on each line, with its tags in further columns, and an empty line after each sentence."""
    tabs = 2 * sum("\t" in line for line in _lines(text)) > len(_lines(text))
    blocks = [[line for line in block if not line.startswith("-DOCSTART-")] for block in _blocks(text)]
    cells = [[line.split("\t") if tabs else line.split() for line in block] for block in blocks if block]
    every = [each for block in cells for each in block]
    plain = [each for each in every if not each[0].startswith("#")] or every  # the others may be comments
    if not plain or (not tabs and len(blocks) < 2):
        return None
    width, many = Counter(map(len, plain)).most_common(1)[0]
    if many < 0.9 * len(plain) or width > 30 or (width == 1 and not asked.labels):
        return None
    numbered = width > 2 and sum(block[-1][0].isdecimal() for block in cells) > 0.9 * len(cells)
    word, label = (1 if numbered else 0), width - 1
    if asked.label is not None:
        if asked.label not in map(str, range(width)):
            raise DataError(f"data.label={asked.label} is not a column of the file; use one of 0 to {width - 1}")
        label = int(asked.label)
    rows: list[Row] = []
    for block in cells:
        kept = [each for each in block if not each[0].startswith("#") or (len(each) == width and not numbered)]
        tags = [each[label].strip() if width > 1 and len(each) > label else None for each in kept]
        words = [each[word].strip() if len(each) > word else "" for each in kept]
        rows.append({"tokens": [each or "_" for each in words], "labels": [tag or None for tag in tags]})
    rows = [row for row in rows if row["tokens"]]
    changed = sum(_as_bio(row["labels"]) for row in rows)
    how = f"a word on each line: of its {width} columns, from 0, words are column {word} and tags column {label} (data.label)"
    return Read(rows, how + (f"; I- begins {changed:,} span{'s' * (changed > 1)}, and is read as B- there" if changed else ""))


def _as_bio(tags: list[str | None]) -> int:
    """Let every span begin with B-, also those of IOB1, in which only a span right after another of its type does; return how many."""
    if not all(tag is None or tag == "O" or tag[:2] in ("B-", "I-") for tag in tags):
        return 0
    before, changed = "O", 0
    for place, tag in enumerate(tags):
        if tag is not None and tag.startswith("I-") and before[2:] != tag[2:]:
            tags[place], changed = f"B-{tag[2:]}", changed + 1
        before = tag or "O"
    return changed


def fasttext(text: str, asked: Asked) -> Read | None:
    """`__label__X text`, with one label or several before each text."""
    lines = _lines(text)
    if not lines or not all(line.startswith(FASTTEXT) for line in lines):
        return None
    rows: list[Row] = []
    for line in lines:
        words = line.split()
        labels = [word.removeprefix(FASTTEXT) for word in words if word.startswith(FASTTEXT)]
        content = " ".join(word for word in words if not word.startswith(FASTTEXT))
        rows.append({"label": labels if asked.several else labels[0], "text": content})
    return Read(rows, f"labels are what follows {FASTTEXT}" + ("" if asked.several else ", the first of each line"))


def trees(text: str, asked: Asked) -> Read | None:
    """Labelled trees on a line each, as those of the Stanford Sentiment Treebank: the label of the root and the words."""
    lines = _lines(text)
    if not lines or not all(re.match(r"\(\d+ \(", line) or LEAF.fullmatch(line) for line in lines):
        return None
    rows: list[Row] = [{"label": line[1 : line.index(" ")], "text": " ".join(LEAF.findall(line))} for line in lines]
    return Read(rows, "a tree on each line: labels are those of the roots")


def label_first(text: str, asked: Asked) -> Read | None:
    """`LABEL text`: the first word of a line is its label if few first words come again and again, or if training had them."""
    pairs = [line.split(maxsplit=1) for line in _lines(text)]
    several = [pair for pair in pairs if len(pair) == 2]
    if not pairs or len(several) < 0.99 * len(pairs):  # hardly a label stands alone
        return None
    pairs = several
    first = Counter(pair[0] for pair in pairs)
    if asked.labels:
        if sum(count for label, count in first.items() if label in asked.labels) < 0.9 * len(pairs):
            return None
    elif len(first) > min(MOST_LABELS, max(2, len(pairs) // 4)):
        return None
    shown = ", ".join(sorted(first)[:5]) + (", …" if len(first) > 5 else "")
    return Read([{"label": label, "text": rest} for label, rest in pairs], f"labels are the first words of the lines ({shown})")


TAGGED: tuple[Callable[[str, Asked], Read | None], ...] = (conllu, conll)
LABELLED: tuple[Callable[[str, Asked], Read | None], ...] = (fasttext, trees, label_first)


def companions(path: Path) -> list[Path]:
    """The files beside one of texts that may have its labels, by their names: seq.out beside seq.in, train_labels.txt by train_text.txt."""
    found = []
    for text, label in COMPANIONS:
        name = re.sub(rf"(?<![a-zA-Z]){re.escape(text)}(?![a-zA-Z])", label, path.name)
        place = path.with_name(name)
        if name != path.name and place.is_file() and place not in found:
            found.append(place)
    return found


def paired(text: str, labels: str, *, tagging: bool) -> list[Row] | None:
    """Each line of a text with the line of another file that has its label, or a label for each of its words; None if they do not fit."""
    one, other = (each.replace("\r", "").rstrip("\n").split("\n") for each in (text, labels))
    if len(one) != len(other):
        return None
    if tagging:
        words, tags = [line.split() for line in one], [line.split() for line in other]
        fits = all(len(word) == len(tag) for word, tag in zip(words, tags, strict=True))
        return [{"tokens": word, "labels": tag} for word, tag in zip(words, tags, strict=True)] if fits else None
    if len(set(other)) > max(2, len(other) // 2):
        return None
    return [{"text": line, "label": label.strip()} for line, label in zip(one, other, strict=True)]


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\r", "").split("\n") if line.strip()]


def _blocks(text: str) -> list[list[str]]:
    """The lines between empty ones."""
    parts = re.split(r"\n(?:[ \t]*\n)+", text.replace("\r", ""))
    return [block for part in parts if (block := _lines(part))]
