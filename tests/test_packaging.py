"""What is built installs and works where nothing else is: the wheel has every file that the package reads, and says what it needs."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "carrywave"


def data_files() -> list[str]:
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return sorted(path.as_posix() for path in found)


def test_every_file_of_the_package_is_package_data() -> None:
    """A file of a new kind is in a clone and in an editable install, and missing in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["carrywave"]
    found = data_files()
    assert "py.typed" in found
    left_out = [name for name in found if not any(fnmatch.fnmatch(name, each.replace("**/", "*")) for each in patterns)]
    assert left_out == []


def test_the_metadata_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"name", "description", "readme", "requires-python", "license", "authors", "keywords", "classifiers"} <= project.keys()
    assert all((ROOT / name).is_file() for name in (project["readme"], *project["license-files"]))
    pages = (ROOT / "docs" / "commands.md").read_text()
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in pages, f"docs/commands.md does not say what the extra {extra} is for"


def succeeded(*command: str, folder: Path, **variables: str) -> str:
    # Nothing of the tests' own environment may help: neither its packages nor its settings.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CARRYWAVE", "VIRTUAL_ENV"))}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=kept | variables, timeout=1200)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel, built from a source distribution, built from a copy of the tree."""
    pytest.importorskip("build", reason="needs the package build, which is in the extra dev")
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("docs", "examples", "scripts", "src", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.glob("[!.]*"):
        if path.is_file():
            shutil.copy(path, tree)
    # Without isolation nothing is fetched: setuptools is among the pinned packages.
    succeeded(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree), folder=folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_has_all_files_and_says_what_it_needs(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    [source] = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = message_from_string(archive.read(metadata).decode())
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {f"carrywave/{name}" for name in (*data_files(), *modules)} <= names
    assert not [name for name in names if not name.startswith(("carrywave/", "carrywave-"))]  # no tests, no scripts
    assert any(name.endswith("licenses/LICENSE") for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert told["License-Expression"] == project["license"]
    assert set(told.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    listing = subprocess.run(["tar", "tzf", str(source)], capture_output=True, text=True, check=True).stdout
    for wanted in ("docs/spec.md", "examples/README.md", "tests/conftest.py", "CHANGELOG.md", "constraints.txt"):
        assert f"/{wanted}\n" in listing


TRY = """
from importlib.resources import files
import carrywave
package = files("carrywave")
assert (package / "py.typed").is_file()
assert not carrywave.__file__.startswith({tree!r}), carrywave.__file__
assert "__global__" in (package / "kernels" / "source" / "persistent" / "persistent.cu").read_text()
from carrywave.plan.profile import names
assert "h200" in names()
print(carrywave.__version__)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    succeeded(sys.executable, "-m", "venv", str(tmp_path / "venv"), folder=tmp_path)
    programs = tmp_path / "venv" / "bin"
    probe = [str(programs / "pip"), "download", "-q", "--no-deps", "-d", str(tmp_path / "probe"), "safetensors"]
    if subprocess.run(probe, capture_output=True, timeout=300).returncode:
        pytest.skip("no package index can be reached")
    succeeded(str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel), folder=tmp_path)
    version = succeeded(str(programs / "python"), "-c", TRY.format(tree=str(ROOT)), folder=tmp_path).strip()
    command = str(programs / "carrywave")
    assert succeeded(command, "--version", folder=tmp_path).strip() == f"carrywave {version}"
    small = ["model.hidden=8", "model.layers=1", "batch.lanes=4", "batch.steps=16", "train.max_steps=3", "train.snapshot_every=0"]
    cache = {"CARRYWAVE_CACHE": str(tmp_path / "cache")}
    assert "3 steps" in succeeded(command, "train", *small, "--run", "run", "--device", "cpu", folder=tmp_path, **cache)
    assert succeeded(command, "predict", "run", "--prompt", "The", "--tokens", "3", "--device", "cpu", folder=tmp_path, **cache).startswith(
        "The"
    )
    planned = succeeded(command, "plan", "--profile", "h200", "--facts", "vocabulary=500", "--devices", "2", folder=tmp_path, **cache)
    assert "bf16" in planned
