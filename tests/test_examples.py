"""The programs in examples/ and the Python in the documentation run, small, and do what they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAMS = ("classify_arrays", "drop_in_lstm", "own_loop", "own_modules")


def program(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs write to runs/ in the current folder."""
    monkeypatch.chdir(tmp_path)


def test_classify_arrays(tmp_path: Path) -> None:
    assert program("classify_arrays").main(number=150, epochs=12, hidden=16, run=tmp_path / "run") > 0.8
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_own_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    program("own_modules").main(steps=1000, epochs=3, hidden=16, run=tmp_path / "run")
    nats = [float(number) for number in re.findall(r"(-?[0-9.]+) nats a value", capsys.readouterr().out)]
    assert len(nats) == 2
    assert max(nats) < 1.4  # what a constant normal distribution reaches


def test_own_loop() -> None:
    kept, dropped = program("own_loop").main(passes=4, steps=160, lanes=24, hidden=24)
    # Without the carry, nothing that came before a window can be known.
    assert kept > dropped + 0.2


def test_drop_in_lstm() -> None:
    assert program("drop_in_lstm").main(steps=5, hidden=8) < 1e-6  # float32, summed in another order


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^- `([^`]+)`", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    there = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}
    assert sorted(listed) == sorted(there)
    assert {f"{name}.py" for name in PROGRAMS} == {name for name in there if name.endswith(".py")}


@pytest.mark.parametrize("page", ["docs/python.md", "README.md"])
def test_the_python_on_a_page_runs(page: str) -> None:
    """All blocks of a page in one program, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})
