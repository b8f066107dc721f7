"""Every command and every spec that a page shows is one that carrywave takes: options, keys and values exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from carrywave.cli.main import app
from carrywave.cli.options import spec_and_overrides
from carrywave.spec.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
GROUP = typer.main.get_command(app)
PLACEHOLDER = re.compile(r"\bNAME --quick|\bCOMMAND\b|…|\bSPEC\.yaml\b|\bFILE\b")


def shown(page: Path) -> list[str]:
    """The commands in the shell blocks of a page, and those that are indented or quoted with their prompt, without comments."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (?:\$ )?(carrywave [a-z]+ .*)$", text, re.MULTILINE)
    found = [re.split(r"\s#|&&| {3,}| [<>|;] ", line)[0].strip() for line in lines]  # without comments, other commands, files of the shell
    return [line for line in found if line.startswith("carrywave ") and not PLACEHOLDER.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_exist_with_their_options(page: Path) -> None:
    for line in shown(page):
        name, *words = shlex.split(line)[1:]
        if name.startswith("-"):
            assert any(name in option.opts for option in GROUP.params), line
            continue
        assert name in GROUP.commands, line  # type: ignore[attr-defined]
        context = GROUP.commands[name].make_context(name, words)  # type: ignore[attr-defined]
        if name in ("train", "plan") and "model.hiden" not in line:
            load(None, spec_and_overrides(context.params["spec"] or [])[1])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_specs_load(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if re.search(r"^task:", block, re.MULTILINE):
            (tmp_path / "spec.yaml").write_text(block)
            load(tmp_path / "spec.yaml", [])


def test_there_is_something_to_check() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 80
