"""The temporary folders of launches: nothing is left of one that was killed, and nothing is taken from one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from carrywave.launch.work_folder import LOCK, PREFIX, sweep, work_folder

LAUNCH = """
import subprocess, sys, time
from carrywave.launch.work_folder import held, work_folder
with work_folder() as place:
    worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0, pass_fds=held())
    print(place, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_lasts_as_long_as_its_context(temporary: Path) -> None:
    with work_folder() as place:
        (place / "attempt-0").mkdir()
        sweep(temporary)
        with work_folder() as other:
            assert {place, other} == set(temporary.iterdir())
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_launch_goes_with_its_last_worker(temporary: Path) -> None:
    launch = subprocess.Popen(
        [sys.executable, "-c", LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert launch.stdin is not None
    assert launch.stdout is not None
    place = Path(launch.stdout.readline().strip())
    launch.kill()
    launch.wait()
    sweep(temporary)
    assert place.is_dir()  # a worker is still saving
    launch.stdin.close()
    launch.stdout.read()  # until the worker is gone too
    launch.stdout.close()
    with work_folder():
        assert not place.exists()


def test_what_is_not_a_leftover_stays(temporary: Path) -> None:
    (temporary / f"{PREFIX}new").mkdir()  # of a launch that has not locked it yet
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / LOCK).touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "elsewhere")
    (temporary / f"{PREFIX}left").mkdir()
    (temporary / f"{PREFIX}left" / LOCK).touch()
    sweep(temporary)
    assert sorted(path.name for path in temporary.iterdir()) == sorted([f"{PREFIX}link", f"{PREFIX}new", "elsewhere"])
    assert (temporary / "elsewhere" / LOCK).exists()
