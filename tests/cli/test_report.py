"""`carrywave report` from the outside: the file it writes, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from _folders import write
from typer.testing import CliRunner

from carrywave.cli.main import app

runner = CliRunner()


def said(*words: str, code: int = 0) -> str:
    found = runner.invoke(app, ["report", *words])
    assert found.exit_code == code, found.output
    return found.stderr


def test_the_page_is_written_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert said(str(one), "--no-samples") == f"carrywave: wrote {one / 'report.html'}\n"
    assert "best: 3 at step 60" in (one / "report.html").read_text()
    said(str(one), "-o", "elsewhere.html", "--no-samples")
    assert "Samples were left out" in (tmp_path / "elsewhere.html").read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    run = str(write(tmp_path / "run"))
    for words, message in (
        ([str(tmp_path / "gone")], "gone is not a run: folder not found; pass a run folder"),
        ([str(tmp_path)], "is not a run: it has no spec.yaml; pass a run folder"),
        ([run, "-o", str(tmp_path)], "is a folder; pass a file name"),
    ):
        text = said(*words, code=2)
        assert message in text
        assert text.count("\n") == 1
    assert not (tmp_path / "run" / "report.html").exists()
