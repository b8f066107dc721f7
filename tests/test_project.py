"""The project's files agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import carrywave

ROOT = Path(__file__).parents[1]


def test_ci_runs_exactly_the_test_command_of_the_readme() -> None:
    ci = (ROOT / ".ci/run").read_text().splitlines()[-1]
    blocks = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert ci.endswith("scripts/test")
    assert ci in blocks


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    pins = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower() for pin in pins}
    assert {re.split(r"[<>=!~]", name)[0].lower() for name in wanted} <= pinned


def test_dev_has_what_the_tests_of_these_extras_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("bpe", "datasets", "docs", "onnx", "tune"):
        assert set(extras[name]) <= set(extras["dev"]), name


def test_the_changelog_speaks_of_this_version() -> None:
    assert f"## {carrywave.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_has_a_home() -> None:
    for name in carrywave.__all__:
        assert getattr(carrywave, name) is not None
    assert {"LSTM", "RNN", "Cell", "Recurrent"} <= set(dir(carrywave))
