"""The help: every command has examples that are accepted as they stand, every option is described, and shells can complete them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import carrywave
from carrywave.cli.examples import EXAMPLES
from carrywave.cli.main import app
from carrywave.cli.options import spec_and_overrides
from carrywave.spec.load import with_overrides

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands


def test_every_command_has_two_to_four_examples() -> None:
    assert sorted(EXAMPLES) == sorted(COMMANDS)
    assert all(2 <= len(examples) <= 4 for examples in EXAMPLES.values())


@pytest.mark.parametrize("line", [words for examples in EXAMPLES.values() for words, _ in examples])
def test_an_example_is_accepted(line: str) -> None:
    program, name, *words = shlex.split(line)
    assert program == "carrywave"
    assert (name, line) in [(command, words) for command, examples in EXAMPLES.items() for words, _ in examples]
    context = COMMANDS[name].make_context(name, words)  # raises for unknown options, bad values and what is missing
    _, overrides = spec_and_overrides(context.params.get("spec") or [])
    with_overrides({}, overrides)  # keys and values that the spec has


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_describes_every_option_and_shows_the_examples(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name} has no help"
        assert parameter.help.endswith("."), f"the help of {name} {parameter.name} is no sentence"
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    for words, purpose in EXAMPLES[name]:
        assert lines[lines.index(words) + 1] == purpose


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with the command on its path, a home of its own, and shells named instead of detected."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "carrywave"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m carrywave "$@"\n')
    program.chmod(0o755)
    sources = os.pathsep.join([str(Path(carrywave.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return {**os.environ, "PATH": path, "PYTHONPATH": sources, "HOME": str(tmp_path), **named}


def run(shell: dict[str, str], *command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, env=shell, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_bash_completes_commands_options_and_choices(shell: dict[str, str]) -> None:
    def completed(*words: str) -> list[str]:
        """What bash offers for the last of these words, once completion is installed."""
        given = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}"
        program = f'source ~/.bashrc; {given}; _carrywave_completion carrywave; printf "%s\\n" "${{COMPREPLY[@]}}"'
        return run(shell, "bash", "-c", program).split()

    run(shell, "carrywave", "--install-completion", "bash")
    assert completed("carrywave", "tr") == ["train"]
    assert sorted(completed("carrywave", "train", "--re")) == ["--restarts", "--resume"]
    assert completed("carrywave", "train", "--device", "c") == ["cpu", "cuda"]
