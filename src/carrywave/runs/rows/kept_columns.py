"""Fields of the input that are carried through to its predictions, such as an id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from carrywave.data.files.rows import Row
from carrywave.data.formats.recognised import NamedRow
from carrywave.errors import DataError, UserError, option

PREDICTED: Mapping[str, tuple[str, ...]] = {
    "classification": ("label", "probability", "probabilities"),
    "regression": ("label",),
    "tagging": ("labels",),
    "transcription": ("labels", "probability"),
    "language": ("prompt", "continuation", "text"),
}


@dataclass(frozen=True)
class KeptColumns:
    """Columns of the input, each with its name in the predictions."""

    columns: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(words: Iterable[str], task: str, *, multi_label: bool = False) -> KeptColumns:
        """Read names such as `id`, or `label=truth` for a column that is to have another name."""
        reserved = (*PREDICTED.get(task, ()), *(("probabilities",) if multi_label else ()))
        pairs = [(word, word) if "=" not in word else (word.partition("=")[0], word.partition("=")[2]) for word in words]
        if pairs and task == "forecasting":
            raise UserError(f"{option('keep')} is for rows, but predictions for series have their names and times anyway; remove it")
        for column, name in pairs:
            if not column or not name:
                raise UserError(f"{option('keep')} has an empty name; write a column, or COLUMN=NAME for another name")
            if name in reserved:
                raise UserError(
                    f"{option('keep')} {column}: predictions have a field {name} of their own; "
                    f"choose another name, as in {column}=given_{name}"
                )
        twice = [name for number, (_, name) in enumerate(pairs) if name in [other for _, other in pairs[:number]]]
        if twice:
            raise UserError(f"{option('keep')} names {twice[0]} twice; name each field once")
        return KeptColumns(tuple(pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read from the input."""
        return tuple(column for column, _ in self.columns)

    def take(self, row: Mapping[str, Any], where: str) -> Row:
        """The carried fields of a row, under the names it has in the input."""
        fields = row.original if isinstance(row, NamedRow) else row
        carried: Row = {}
        for column, name in self.columns:
            if column not in fields:
                shown = ", ".join(str(each) for each in list(fields)[:8])
                raise DataError(f"{where} has no field {column} (fields: {shown}); name one that every row has with {option('keep')}")
            carried[name] = fields[column]
        return carried
