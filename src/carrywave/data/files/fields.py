"""Validate and convert the fields of one row: its content (`steps`, `text`, `tokens`) and its labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.frames import is_column, is_frame, plain_column, plain_frame
from carrywave.data.files.rows import WEIGHT, Row
from carrywave.data.tables.moments import unusable
from carrywave.errors import DataError

FIELDS = ("steps", "tokens", "text")
TARGETS = ("label", "labels")
IGNORED = -100
LEAST_WEIGHT, MOST_WEIGHT = 1e-9, 1e9  # of the largest weight: times some millions of targets, float32 holds it well
Matrix = NDArray[np.float64]


def content_field(row: Row, where: str) -> str:
    """Return the name of the field that holds the row's sequence."""
    for field in FIELDS:
        if row.get(field) is not None:
            return field
    raise DataError(f"{where}: the row has none of the fields steps, text and tokens (it has {_names(row)}); add one, or set data.text")


def take(row: Row, field: str, where: str) -> Any:
    """Return a required field."""
    value = row.get(field)
    if value is None:
        others = [name for name in FIELDS if row.get(name) is not None]
        if field in FIELDS and others:
            raise DataError(f"{where}: the row has {others[0]}, expected {field}; use the same field in all rows")
        key = "data.label" if field in TARGETS else "data.text"
        raise DataError(f"{where}: the field {field} is missing or empty (the row has {_names(row)}); fill it in, or name it in {key}")
    return value


def text_of(row: Row, where: str) -> str:
    """Return the text of a row."""
    text = take(row, "text", where)
    if not isinstance(text, str):
        raise DataError(f"{where}: text is {kind_of(text)}, not a string; write it in quotes")
    return checked_text(text, f"{where}: text")


def checked_text(text: str, what: str) -> str:
    """Return a text that has a place in UTF-8, as one with half of a pair of surrogates has not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode at character {error.start}; remove the lone surrogate there") from error
    return text


def tokens_of(row: Row, where: str) -> list[str] | NDArray[np.int64]:
    """Return the tokens of a row: words as a list, integers as an array."""
    value = as_plain(take(row, "tokens", where))
    if isinstance(value, list) and all(isinstance(token, str) for token in value):
        return value
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or not 0 <= array.min() <= array.max() < 2**31 - 2)):
        raise DataError(f'{where}: tokens is {value!r:.60}; write a list of words ["a", "b"], or of whole numbers from 0 on')
    return array.astype(np.int64)


def steps_of(row: Row, where: str, columns: int | None) -> Matrix:
    """Return the numbers of a row, [steps, features]; a flat list is one feature per step."""
    matrix = numbers(take(row, "steps", where), "steps", where)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{where}: steps has shape {list(matrix.shape)}; write a list of steps, each a list of numbers")
    if columns is not None and matrix.shape[1] != columns:
        raise DataError(f"{where}: a step has {matrix.shape[1]} features, but the training data has {columns}; use {columns} in every step")
    bad = unusable(matrix)
    if bad.any():
        step, column = (int(place) for place in np.argwhere(bad)[0])
        value = matrix[step, column]
        raise DataError(f"{where}: step {step}, column {column} of steps is {value}, not a finite number (below 1e25); fill the gap")
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
        raise DataError(
            f"{where}: {field} cannot be read as numbers ({str(error)[:80]}); write a number, or a list of steps, each with as many numbers"
        ) from error
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
    if hasattr(value, "__len__"):
        fact = f"{field} is {kind_of(value)} of length {len(value)}, not one label ({value!r:.40})"
        raise DataError(
            f"{where}: {fact}; for a label at each step use task=tagging, for any number of labels set data.multi_label=true, and of "
            "one-hot rows pass labels.argmax(axis=1)"
        )
    raise DataError(
        f"{where}: {field} is {kind_of(value)} ({value!r:.40}); use a string, a whole number or a boolean, or task=regression for numbers"
    )


def tags_of(row: Row, steps: int, where: str) -> list[tuple[str, str] | None]:
    """Return one label per step, None where it is ignored (null or -100)."""
    value = as_plain(take(row, "labels", where))
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or len(value) != steps:
        many = f"{len(value)} label{'s' * (len(value) != 1)}" if isinstance(value, list) else f"labels that are {kind_of(value)}"
        raise DataError(f"{where}: {many} for {steps} step{'s' * (steps != 1)}; use a list with one label per step (null for none)")
    return [None if _ignored(label) else class_of(label, "a label", where) for label in value]


def transcript_of(row: Row, where: str) -> tuple[list[tuple[str, str]], bool]:
    """Return the labels of a transcription, any number in a row, and whether they are the characters of a text."""
    value = as_plain(take(row, "labels", where))
    if isinstance(value, str):
        return [("string", letter) for letter in checked_text(value, f"{where}: labels")], True
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list):
        raise DataError(f'{where}: labels is {kind_of(value)}, not a list of labels or a text; write ["a", "b"] or "ab"')
    return [class_of(label, "a label", where) for label in value], False


def resets_of(row: Row, steps: int, where: str) -> NDArray[np.bool_] | None:
    """Return true or false for each step, True if a new sequence starts with it; None if the row does not say."""
    if row.get("resets") is None:
        return None
    value = as_plain(row["resets"])
    array = np.asarray(value if isinstance(value, (list, np.ndarray)) else [])
    if array.shape != (steps,) or array.dtype != np.bool_:
        raise DataError(f"{where}: resets must be a list of true and false, one for each of the {steps} steps; got {value!r:.60}")
    return array


def refuse_resets(row: Row, where: str) -> None:
    """Refuse a row of several sequences where each row is one."""
    if row.get("resets") is not None:
        raise DataError(f"{where}: resets begin new sequences, but here a row is one sequence; write a row for each")


def weight_of(row: Row, steps: int, where: str) -> float | Matrix | None:
    """Return the weight of a row, or those of its steps; None if the row does not say."""
    if WEIGHT not in row:
        return None
    value = as_plain(row[WEIGHT])
    weights = np.asarray(np.nan if value is None else numbers(value, "the weight", where), np.float64)
    if weights.shape not in ((), (steps,)) or not (np.isfinite(weights) & (weights >= 0) & (weights <= np.finfo(np.float32).max)).all():
        shown = "empty" if value is None else f"{value!r:.40}"
        raise DataError(f"{where}: the weight is {shown}; write a finite number from 0 on, or a list of one for each of the {steps} steps")
    return weights if weights.ndim else float(weights)


def check_largest_weight(largest: float, every: str, otherwise: str) -> None:
    """Refuse weights that are all 0, and those of which the sums of float32 would overflow or vanish. `every`: what they are called."""
    if not largest:
        raise DataError(f"{every} is 0, so nothing could be learned or measured; change them, or {otherwise}")
    if not LEAST_WEIGHT <= largest <= MOST_WEIGHT:
        fact = f"{every} is at most {largest:g}" if largest < LEAST_WEIGHT else f"{every.replace('every', 'the largest')} is {largest:g}"
        remedy = "multiply or divide all of them by the same number, which changes nothing else"
        raise DataError(f"{fact}, and float32 cannot hold sums of such weights; {remedy}, or {otherwise}")


def _ignored(label: Any) -> bool:
    return label is None or (not isinstance(label, (str, bool)) and label == IGNORED)


def target_of(row: Row, where: str, outputs: int | None) -> Matrix:
    """Return the regression target of a row, [outputs]."""
    target = numbers(take(row, "label", where), "label", where)
    target = target[None] if target.ndim == 0 else target
    if target.ndim != 1 or len(target) != (outputs or max(len(target), 1)) or unusable(target).any():
        expected = "a finite number (below 1e25), or a flat list of them" + ("" if outputs is None else f", {outputs} in every row")
        raise DataError(f"{where}: label is {row['label']!r:.60}; write {expected}")
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


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    return {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }.get(type(value), f"of type {type(value).__name__}")


def _names(row: Row) -> str:
    return ", ".join(list(row)[:8]) or "no fields"
