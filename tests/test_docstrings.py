"""Every public name shows in its docstring how it is used, and the example does what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import carrywave

NAMES = [name for name in carrywave.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(exclude_empty=True).find(getattr(carrywave, name), name)
    assert any(test.examples for test in found if test.name == name), f"{name} has no example"
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test, out=told.append)
    assert not runner.failures, "".join(told)
