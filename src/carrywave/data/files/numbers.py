"""Numbers as people write them: with marks for missing values, thousands, decimal commas, currencies and per cent."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

# Marks of missing values, in lower case as all are compared; databases write \\N.
MARKS = r"? - -- --- – — . .. ... : \n * # n/a na nan none null nil nat missing #n/a #na -nan <na> n.a. #value! #div/0! unknown"
MISSING = frozenset(["", "not available", *MARKS.split()])
MOSTLY = 0.9  # a column of numbers may hold some words, which are then missing values
SAMPLE = 200
SIZES = {"K": 1e3, "M": 1e6, "B": 1e9}  # as in 25.3K
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
CODE = re.compile(r"0\d+")  # 007 is no number
WHOLE = re.compile(r"\s*[-+]?\d{1,18}\s*")
DATE = re.compile(r"\s*(\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4})?|\d{4}[-/ ]?[QMW]\d{1,2})([ T]\d.*)?\s*")
AROUND = r"[$€£¥\s'’%]|[*#]+$|^(?:USD|EUR|GBP|CHF|R\$|kr)"


def as_numbers(column: pd.Series, *, decimal: str = ".") -> tuple[pd.Series | None, list[str]]:
    """Return a column of text as numbers, NaN where there is none, and the words that count as missing; None if it is not one of numbers.

    Each distinct text is read once.
    """
    some = column.iloc[:: max(1, len(column) // SAMPLE)].dropna()
    sample = pd.Series((some if len(some) else column.dropna().iloc[:SAMPLE]).astype(str).to_list(), dtype=object)
    if not _numbers(sample[~_is_missing(sample)], decimal).notna().mean() > 0.5:
        nothing = bool(_is_missing(sample).all() and _is_missing(column.dropna()).all())
        return (pd.Series(np.nan, column.index), []) if nothing else (None, [])
    codes, texts = pd.factorize(column)
    written = pd.Series(texts, dtype=object).astype(str)
    values = _numbers(written, decimal)
    words = written[values.isna() & ~_is_missing(written)]
    counts = np.bincount(codes[codes >= 0], minlength=len(written))
    wrong = int(counts[words.index].sum())
    if wrong > (1 - MOSTLY) * max(int(counts[values.notna()].sum()), 1):
        return None, []
    if (codes >= 0).all() and written.str.fullmatch(WHOLE.pattern).all():
        return pd.Series(written.astype("int64").to_numpy()[codes], column.index), []  # which may name series, as pandas' own do
    found = np.append(values.to_numpy(float), np.nan)[codes]  # a missing cell has the code -1
    return pd.Series(found, column.index), words.tolist()


def is_code(column: pd.Series) -> bool:
    """True if some cells begin with a zero that a number would lose."""
    sample = column.dropna().iloc[:: max(1, len(column) // 1000)].astype(str).str.strip()
    return bool(sample.str.fullmatch(CODE.pattern).any())


def _is_missing(texts: pd.Series) -> pd.Series:
    return texts.astype(str).str.strip().str.lower().isin(MISSING)


def _numbers(texts: pd.Series, decimal: str) -> pd.Series:
    """The numbers, NaN for anything else."""
    plain = pd.to_numeric(texts.where(texts.str.fullmatch(NUMBER.pattern)), errors="coerce") if decimal == "." else None
    if plain is not None and plain.notna().all():
        return plain.astype(float)
    clean = texts.str.strip().str.replace("−", "-", regex=False).str.replace(AROUND, "", regex=True)
    clean = clean.str.replace(r"^\((.+)\)$", r"-\1", regex=True)  # accountants' losses
    size = clean.str[-1:].map(SIZES).where(clean.str.fullmatch(r"[-+]?[\d.,]+[KMB]"))
    clean = clean.where(size.isna(), clean.str[:-1])
    point, group = (",", ".") if decimal == "," else (".", ",")
    grouped = clean.str.fullmatch(rf"[-+]?\d{{1,3}}(\{group}\d{{3}})+(\{point}\d+)?")
    whole = clean.where(~grouped, clean.str.replace(group, "", regex=False)).str.replace(point, ".", regex=False)
    whole = whole.where(grouped | ~clean.str.contains(group, regex=False))
    if decimal == ",":  # a point beside decimal commas stands between thousands, unless it cannot
        whole = whole.fillna(clean.where(clean.str.fullmatch(NUMBER.pattern)))
    values = pd.to_numeric(whole.where(whole.str.fullmatch(NUMBER.pattern)), errors="coerce").astype(float)
    return values * size.fillna(1.0).astype(float)
