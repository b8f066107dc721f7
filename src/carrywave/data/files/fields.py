"""Validate and convert the fields of one row: its content (`steps`, `text`, `tokens`) and its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.frames import is_column, is_frame, plain_column, plain_frame
from carrywave.data.files.rows import NO_WEIGHT, WEIGHT, Row
from carrywave.data.tables.moments import TOO_WHOLE, WHOLE, too_whole, unusable
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
        if field in row:
            raise DataError(f"{where}: the field {field} is empty; fill it in, or remove the row")
        remedy = "add it, or name the field that has the target in data.label" if field in TARGETS else "add it"
        raise DataError(f"{where}: the field {field} is missing (the row has {_names(row)}); {remedy}")
    return value


def text_of(row: Row, where: str) -> str:
    """Return the text of a row."""
    text = take(row, "text", where)
    if not isinstance(text, str):
        raise DataError(f"{where}: text is {kind_of(text)}, not a string; write it in quotes")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: text is not valid Unicode at character {error.start}; remove the lone surrogate there") from error
    return text


def tokens_of(row: Row, where: str) -> list[str] | NDArray[np.int64]:
    """Return the tokens of a row: words as a list, integers as an array."""
    value = as_plain(take(row, "tokens", where))
    if isinstance(value, np.ndarray):
        return _whole(value, where)
    if not isinstance(value, list):
        raise DataError(f'{where}: tokens is {kind_of(value)}, not a list; write ["a", "b"] or [1, 2]')
    if all(isinstance(token, str) for token in value):
        return value
    for place, token in enumerate(value):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise DataError(f"{where}: token {place} is {kind_of(token)} ({token!r}); write all tokens as strings, or all as whole numbers")
    return _whole(np.array(value), where)


def _whole(value: NDArray[Any], where: str) -> NDArray[np.int64]:
    if value.ndim != 1 or (value.size and value.dtype.kind not in "iu"):
        raise DataError(
            f"{where}: tokens must be a flat list of whole numbers, got {value.dtype} of shape {list(value.shape)}; use one per step"
        )
    if value.size and int(value.min()) < 0:
        raise DataError(f"{where}: token {int(value.min())} at step {int(value.argmin())} is negative; tokens must be 0 or greater")
    if value.size and int(value.max()) >= 2**31 - 1:
        raise DataError(f"{where}: token {int(value.max())} at step {int(value.argmax())} is too large; tokens must be below 2147483647")
    return value.astype(np.int64)


def steps_of(row: Row, where: str, columns: int | None) -> Matrix:
    """Return the numbers of a row, [steps, features]; a flat list is one feature per step."""
    matrix = numbers(take(row, "steps", where), "steps", where)
    if matrix.size == 0 and len(matrix) == 0:
        raise DataError(f"{where}: steps is a zero-length sequence; remove the row, or give it at least one step")
    if matrix.ndim == 1:
        matrix = matrix[:, None]
    if matrix.ndim != 2 or matrix.shape[1] == 0:
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
    """Convert a list of numbers, or of lists of numbers, to float64; JSON null becomes NaN."""
    value = as_plain(value)
    if isinstance(value, list):
        value = [as_plain(item) for item in value]
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        array = None
    if array is not None and array.dtype.kind in "iufb":
        if (beyond := too_whole(array)) is not None:
            raise DataError(f"{where}: {field} contains {beyond}, {TOO_WHOLE}")
        if array.dtype.kind != "f" or not isinstance(value, list) or not (np.abs(array) >= WHOLE).any():  # beside a fraction it is rounded
            return array.astype(np.float64)
    items = value if isinstance(value, (list, np.ndarray)) else [value]
    for step, item in enumerate(items):
        for column, number in enumerate(item if isinstance(item, (list, tuple, np.ndarray)) else [item]):
            if isinstance(number, (list, tuple, np.ndarray)):
                raise DataError(
                    f"{where}: step {step}, column {column} of {field} is a list; write a list of steps, each a list of numbers"
                )
            if number is not None and (not isinstance(number, (int, float, np.number)) or isinstance(number, np.complexfloating)):
                raise DataError(
                    f"{where}: step {step}, column {column} of {field} is {kind_of(number)} ({number!r:.40}), not a number; write a number"
                )
            if isinstance(number, int) and abs(number) > WHOLE:
                raise DataError(f"{where}: {field} contains {number}, {TOO_WHOLE}")
    widths = {len(item) if isinstance(item, (list, tuple, np.ndarray)) else -1 for item in items}
    if len(widths) > 1:
        raise DataError(f"{where}: {field} is ragged, with steps of {_widths(widths)}; use the same number of features in every step")
    try:
        return np.array(value, np.float64)  # None becomes NaN
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"{where}: {field} cannot be read as numbers ({str(error)[:80]}); write a list of steps, each a list of numbers"
        ) from error


def class_of(value: Any, field: str, where: str) -> tuple[str, str]:
    """Return a class label as (kind, name); the kind is string, whole number or boolean."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        return "boolean", "true" if value else "false"
    if isinstance(value, int) and value == IGNORED:
        raise DataError(f"{where}: {field} is {IGNORED}, which means no label; remove the row")
    if isinstance(value, int):
        return "whole number", str(value)
    if isinstance(value, str) and not value.strip() and field == "label":
        raise DataError(f"{where}: the field label is empty; fill it in, or remove the row")  # as an empty cell of a CSV file is
    if isinstance(value, str):
        return "string", value
    if field == "label" and hasattr(value, "__len__"):
        fact = f"label is {kind_of(value)} of length {len(value)}, but classification has one label for each sequence"
        first = "of an array with one column pass labels[:, 0]" if len(value) == 1 else "for one-hot rows pass labels.argmax(axis=1)"
        raise DataError(
            f"{where}: {fact}; {first}, for a label at each step use task=tagging, for any number of labels set data.multi_label=true"
        )
    if isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{where}: {field} is {kind_of(value)} ({value!r:.40}); for several at a step set data.multi_label=true")
    raise DataError(
        f"{where}: {field} is {kind_of(value)} ({value!r:.40}); use a string, a whole number or a boolean, or task=regression for numbers"
    )


def tags_of(row: Row, steps: int, where: str) -> list[tuple[str, str] | None]:
    """Return one label per step, None where it is ignored (null or -100)."""
    value = as_plain(take(row, "labels", where))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: labels is {kind_of(value)}, not a list; use one label per step")
    if len(value) != steps:
        many = f"{len(value)} label{'s' * (len(value) != 1)} for {steps} step{'s' * (steps != 1)}"
        raise DataError(f"{where}: {many}; use one label per step (null for none)")
    return [None if _ignored(label) else class_of(label, "a label", where) for label in value]


def transcript_of(row: Row, where: str) -> tuple[list[tuple[str, str]], bool]:
    """Return the labels of a transcription, any number in a row, and whether they are the characters of a text."""
    value = as_plain(take(row, "labels", where))
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: labels is not valid Unicode at character {error.start}; remove the lone surrogate there") from error
        return [("string", letter) for letter in value], True
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
    shown = "empty" if value is None else f"{value!r:.40}"
    weights = np.asarray(np.nan if value is None else numbers(value, WEIGHT, where), np.float64)
    if weights.shape not in ((), (steps,)):
        many = f"one number, or a list of one for each of the {steps} steps"
        raise DataError(
            f"{where}: {WEIGHT} has shape {list(weights.shape)}; write {many}, or set data.weight={NO_WEIGHT}, and it is not read"
        )
    if not (np.isfinite(weights) & (weights >= 0) & (weights <= np.finfo(np.float32).max)).all():
        raise DataError(
            f"{where}: {WEIGHT} is {shown}; write a finite number from 0 on, or set data.weight={NO_WEIGHT}, and it is not read"
        )
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
    if target.ndim != 1 or not target.size:
        raise DataError(f"{where}: label has shape {list(target.shape)}; write a number or a flat list of numbers")
    if outputs is not None and len(target) != outputs:
        raise DataError(f"{where}: label has {len(target)} numbers, expected {outputs}; use {outputs} in every row")
    bad = unusable(target)
    if bad.any():
        place = int(np.argmax(bad))
        raise DataError(
            f"{where}: number {place} of label is {target[place]}, not a finite number (below 1e25); remove the row or fill the gap"
        )
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


def _widths(widths: Sequence[int] | set[int]) -> str:
    return " and ".join("a bare number" if width < 0 else str(width) for width in sorted(widths)[:3]) + " features"
