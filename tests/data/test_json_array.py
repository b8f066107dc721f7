"""A JSON array of objects is read as the same objects, one per line, would be; and what is no such array is refused with its place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.files.rows import open_rows
from carrywave.data.files.source import find
from carrywave.data.prepare import prepare
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

values = st.recursive(st.none() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=8)


def rows_of(path: Path, block_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    return [row for _, row in open_rows(find(str(path), field="data", block_bytes=block_bytes), numeric_label=False)]


@given(st.lists(st.dictionaries(st.text(), values), max_size=5), st.integers(1, 40), st.sampled_from((None, 1)), st.booleans())
def test_any_objects_come_back_whatever_the_blocks(rows: list[dict[str, Any]], block_bytes: int, indent: int | None, plain: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=plain), encoding="utf-8", errors="surrogatepass")
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an unpaired surrogate cannot be written
            return
        assert rows_of(path, block_bytes) == rows


@pytest.mark.parametrize("task", ["classification", "forecasting"])
def test_a_run_reads_an_array_as_it_reads_lines(task: str, tmp_path: Path) -> None:
    rows = [{"steps": [[float(row + step), 1.0] for step in range(6)], "label": "ab"[row % 2], "note": "ä"} for row in range(12)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")

    def prepared(name: str) -> Any:
        data = {"train": str(tmp_path / name), "cache": str(tmp_path / "cache"), **({"horizon": 1} if task == "forecasting" else {})}
        return prepare(Spec.model_validate({"task": task, "data": data})).train

    lines, array = prepared("lines.jsonl"), prepared("array.json")
    assert array.inputs.tolist() == lines.inputs.tolist()
    assert array.starts.tolist() == lines.starts.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", r"rows\.json: row 1 begins with '1'; write an array of objects: \[\{"),
        ('[{"a": 1}, [2]]', r"rows\.json: row 2 begins with '\['"),
        ('[{"a": 1}, {"b": ]', r"rows\.json: row 2 is not JSON \(Expecting value\)"),
        ('[{"a": 1}, {"b": 1, "c": 2, "b": 3}]', r"rows\.json: row 2: field 'b' is given twice; remove one of them"),
        ('[{"a": 1}, {"b": "c', r"rows\.json: row 2 is not JSON \(Unterminated string"),
        ('[{"a": 1} {"b": 2}]', r"rows\.json: row 2: there is no comma before it"),
        ('[{"a": 1}', r"rows\.json: row 2: there is no comma before it"),
        ('[{"a": 1},', r"rows\.json: row 2 is missing, and so is the end of the array"),
        ('[{"a": 1}]\n[{"a": 2}]', r"rows\.json goes on after the end of its array; write one array"),
        (b'[{"a": "\xff"}]', r"rows\.json: about byte 8 is not valid utf-8"),
    ],
)
@pytest.mark.parametrize("block_bytes", [3, 1 << 20])
def test_what_is_no_array_of_objects_is_refused(text: str | bytes, message: str, block_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "rows.json", block_bytes)


def test_a_mistake_at_the_beginning_is_found_without_reading_on(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"a": x}, ' + '{"a": 1}, ' * 1000)
    source = find(str(tmp_path / "rows.json"), field="data", block_bytes=64)
    blocks = source.blocks()
    read: list[bytes] = []
    object.__setattr__(source, "blocks", lambda: (read.append(block) or block for block in blocks))
    with pytest.raises(DataError, match="row 1 is not JSON"):
        next(iter(open_rows(source, numeric_label=False)))
    assert len(read) == 1
