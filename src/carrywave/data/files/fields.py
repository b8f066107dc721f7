"""Validate and convert the fields of one row: its content (`steps`, `text`, `tokens`), its targets, resets and weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.frames import is_column, is_frame, plain_column, plain_frame
from carrywave.data.files.rows import SHOWN, WEIGHT, Row
from carrywave.data.tables.moments import unusable
from carrywave.errors import DataError

FIELDS = ("steps", "tokens", "text")
IGNORED = -100
ONE_LABEL = (
    "a string, a whole number or a boolean; for a label at each step use task=tagging, for any number of labels set "
    "data.multi_label=true, of one-hot rows pass labels.argmax(axis=1), and for numbers use task=regression"
)
Matrix = NDArray[np.float64]


def wrong(value: Any, field: str, where: str, remedy: str) -> DataError:
    """The error about a value that is not what its field holds."""
    return DataError(f"{where}: {field} is {' '.join(repr(value).split()):.60}; write {remedy}")


def content_field(row: Row, where: str) -> str:
    """Return the name of the field that holds the row's sequence."""
    found = next((field for field in FIELDS if row.get(field) is not None), "text")
    take(row, found, where)
    return found


def take(row: Row, field: str, where: str) -> Any:
    """Return a required field."""
    value = row.get(field)
    if value is None:
        others = [name for name in FIELDS if row.get(name) is not None]
        if field in FIELDS and others:
            raise DataError(f"{where}: the row has {others[0]}, expected {field}; use the same field in all rows")
        key = "data.text" if field in FIELDS else "data.label"
        raise DataError(f"{where}: the field {field} is missing or empty (the row has {_names(row)}); fill it in, or name it in {key}")
    return value


def text_of(row: Row, where: str, field: str = "text") -> str:
    """Return the text of a row, which has a place in UTF-8, as one with half of a pair of surrogates has not."""
    text = take(row, field, where)
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise wrong(text, field, where, "a string of valid Unicode") from error
    return str(text)


def tokens_of(row: Row, where: str, *, words: bool | None = None) -> Any:
    """Return the tokens of a row: words as a list, integers as an array; `words` says which the training data has."""
    value = as_plain(take(row, "tokens", where))
    found = isinstance(value, list) and all(isinstance(token, str) for token in value)
    array = np.zeros(0, np.int64) if found else np.asarray(value)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or not 0 <= array.min() <= array.max() < 2**31 - 2)):
        raise wrong(value, "tokens", where, 'a list of words ["a", "b"], or of whole numbers from 0 on')
    if words not in (None, found) and len(value):
        kinds = ("words", "numbers") if found else ("numbers", "words")
        raise DataError(f"{where}: tokens contains {kinds[0]}, but the training data contains {kinds[1]}; use one kind of token")
    return value if found and words is not False else array.astype(np.int64)


def steps_of(row: Row, where: str, columns: int | None) -> Matrix:
    """Return the numbers of a row, [steps, features]; a flat list is one feature per step."""
    return matrix_of(take(row, "steps", where), "steps", where, columns)


def matrix_of(value: Any, field: str, where: str, columns: int | None, *, gaps: bool = False) -> Matrix:
    """Return the numbers of each step, `columns` of them if that is known; with `gaps`, NaN for those that are missing."""
    matrix = numbers(value, field, where)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{where}: {field} has shape {list(matrix.shape)}; write a list of steps, each a number or a list of numbers")
    if columns is not None and matrix.shape[1] != columns:
        fact = f"a step has {matrix.shape[1]} numbers in {field}, but others have {columns}"
        raise DataError(f"{where}: {fact}; use {columns} in every step")
    bad = unusable(matrix) & ~np.isnan(matrix) if gaps else unusable(matrix)
    if bad.any():
        step, column = np.argwhere(bad)[0]
        fact = f"step {step}, column {column} of {field} is {matrix[step, column]}, not a finite number (below 1e25)"
        raise DataError(f"{where}: {fact}; {'correct it' if gaps else 'fill the gap'}")
    return matrix


def numbers(value: Any, field: str, where: str) -> Matrix:
    """Convert a number, a list of them, or of lists of them, to float64; JSON null becomes NaN."""
    value = as_plain(value)
    value = [as_plain(item) for item in value] if isinstance(value, list) else value
    try:
        array = np.array(value)
        array = np.array(value, np.float64) if array.dtype.kind in "OUS" else array
        if array.dtype.kind not in "iufb":
            raise TypeError(f"they are {array.dtype}")
    except (ValueError, TypeError, OverflowError) as error:
        fact = f"{where}: {field} cannot be read as numbers ({str(error)[:80]})"
        raise DataError(f"{fact}; write a number, or a list of steps, each with as many numbers") from error
    return array.astype(np.float64)


def class_of(value: Any, field: str, where: str) -> tuple[str, str]:
    """Return a class label as (kind, name); the kind is string, whole number or boolean."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        return "boolean", "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value == int(value)):
        return "whole number", str(int(value))
    if isinstance(value, str):
        return "string", value
    raise wrong(value, field, where, ONE_LABEL)


def labels_of(row: Row, task: str, where: str, steps: int | None = None) -> list[tuple[str, str] | None]:
    """Return the labels of a row: one for classification; for tagging one for each of its steps, None where it is ignored (null or -100);
    for transcription any number, which may be the characters of a text.
    """
    if task == "classification":
        return [class_of(take(row, "label", where), "label", where)]
    if task == "transcription" and isinstance(row.get("labels"), str):
        return [("string", letter) for letter in text_of(row, where, "labels")]
    value = listed(row, where, steps if task == "tagging" else None)
    return [None if task == "tagging" and _ignored(label) else class_of(label, "a label", where) for label in value]


def listed(row: Row, where: str, steps: int | None) -> list[Any]:
    """Return the list of labels of a row, with one for each of its steps if there must be so many."""
    value = as_plain(take(row, "labels", where))
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list):
        raise wrong(value, "labels", where, "a list of labels")
    if steps not in (None, len(value)):
        raise DataError(f"{where}: {len(value)} labels for {steps} steps; write one for each step (null for none)")
    return value


def resets_of(row: Row, steps: int, where: str) -> NDArray[np.bool_] | None:
    """Return true or false for each step, True if a new sequence starts with it; None if the row does not say."""
    if row.get("resets") is None:
        return None
    value = as_plain(row["resets"])
    array = np.asarray(value if isinstance(value, (list, np.ndarray)) else [])
    if array.shape != (steps,) or array.dtype != np.bool_:
        raise wrong(value, "resets", where, f"a list of true and false, one for each of the {steps} steps")
    return array


def refuse_resets(row: Row, where: str) -> None:
    """Refuse a row of several sequences where each row is one."""
    if row.get("resets") is not None:
        raise DataError(f"{where}: resets begin new sequences, but here a row is one sequence; write a row for each")


def weight_of(row: Row, steps: int, where: str, *, per_step: bool = True) -> float | Matrix | None:
    """Return the weight of a row, or those of its steps if these have targets; None if the row does not say."""
    if WEIGHT not in row:
        return None
    value = as_plain(row[WEIGHT])
    weights = np.asarray(np.nan if value is None else numbers(value, "the weight", where), np.float64)
    largest = float(np.finfo(np.float32).max)
    if weights.shape not in ((), (steps,) if per_step else ()) or not ((weights >= 0) & (weights <= largest)).all():
        listed = f", or a list of one for each of the {steps} steps" if per_step else ""
        raise wrong(value, "the weight", where, f"a finite number from 0 on{listed}")
    return weights if weights.ndim else float(weights)


def _ignored(label: Any) -> bool:
    return label is None or (not isinstance(label, (str, bool)) and label == IGNORED)


def target_of(row: Row, where: str, outputs: int | None) -> Matrix:
    """Return the regression target of a row, [outputs]."""
    target = numbers(take(row, "label", where), "label", where)
    target = target[None] if target.ndim == 0 else target
    if target.ndim != 1 or len(target) != (outputs or max(len(target), 1)) or unusable(target).any():
        many = "" if outputs is None else f", {outputs} in every row"
        raise wrong(row["label"], "label", where, f"a finite number (below 1e25), or a flat list of them{many}")
    return target


def as_plain(value: Any) -> Any:
    """Convert tensors, columns and frames to arrays, tuples and object arrays to lists; return anything else unchanged.

    Always positional: a column's index does not determine the position of a value. Duck-typed, so that torch is not required.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.float() if value.dtype.is_floating_point and value.dtype.itemsize < 4 else value).numpy()
    if is_frame(value):
        return plain_frame(value)
    if is_column(value):
        return plain_column(value)
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        return value.tolist()  # None where a value is masked
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUT":
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _names(row: Row) -> str:
    return ", ".join(list(row)[:SHOWN]) or "no fields"
