"""The quick start is run exactly as it stands on the page, section by section, in an empty folder."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import carrywave
from carrywave.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs/index.md").read_text("utf-8")
SECTIONS = ("A CSV file: forecasts", "A text file: a language model", "A JSONL file: a classifier")
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
BLOCK = re.compile(r"(?:^|(?<=\n))(?:[^\n]*Save this as `(?P<file>[^`]+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


def section(title: str) -> str:
    [found] = [each for each in re.split(r"^## ", PAGE, flags=re.MULTILINE) if each.startswith(f"{title}\n")]
    return found


def program(title: str) -> str:
    """The section as a shell script: files that it says to save are written, and commands that do not exist yet are left out."""
    lines = ["set -eu"]
    for block in BLOCK.finditer(section(title)):
        if block["language"] == "yaml":
            assert block["file"], "a file on the page has a name"
            lines.append(f"cat > {block['file']} <<'END OF FILE'\n{block['text']}END OF FILE")
        else:
            assert block["language"] == "bash"
            kept = [line for line in block["text"].splitlines() if (name := called(line)) is None or name in COMMANDS]
            lines += kept
    return "\n".join(lines) + "\n"


def called(line: str) -> str | None:
    """The command of carrywave that a line calls."""
    return line.split()[1] if line.startswith("carrywave ") else None


def run(title: str, folder: Path) -> str:
    """What the section prints."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "carrywave").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m carrywave "$@"\n')
    (tools / "carrywave").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(carrywave.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(["bash", "-c", program(title)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("title", SECTIONS)
def test_each_way_is_three_commands_that_exist(title: str) -> None:
    commands = [name for block in BLOCK.finditer(section(title)) for line in block["text"].splitlines() if (name := called(line))]
    assert commands == ["train", "predict", "report"]
    assert set(commands) <= COMMANDS


def test_every_command_on_the_page_exists() -> None:
    named = set(re.findall(r"(?:^|`)carrywave ([a-z]+)", PAGE, re.MULTILINE))
    assert {"train", "predict", "plan", "evaluate"} <= named
    assert named <= COMMANDS


@pytest.mark.slow
def test_a_forecast(tmp_path: Path) -> None:
    printed = run(SECTIONS[0], tmp_path)
    found = {name: float(value) for name, value in re.findall(r"(\w+) ([0-9.]+)", printed[printed.index("test epoch") :].splitlines()[0])}
    assert found["mase"] < found["naive_mase"]
    rows = list(csv.DictReader((tmp_path / "forecast.csv").read_text().splitlines()))
    assert [row["date"] for row in rows][:1] == ["2025-12-31"]
    assert len(rows) == 14
    assert all(150 < float(row["sales"]) < 400 for row in rows)


@pytest.mark.slow
def test_a_language_model(tmp_path: Path) -> None:
    printed = run(SECTIONS[1], tmp_path)
    assert float(re.findall(r"perplexity ([0-9.]+)", printed)[-1].rstrip(".")) < 6.0  # as the page says: about 5
    assert "The carry" in printed


@pytest.mark.slow
def test_a_classifier(tmp_path: Path) -> None:
    run(SECTIONS[2], tmp_path)
    labels = [json.loads(line)["label"] for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert labels == ["bad", "good"]
