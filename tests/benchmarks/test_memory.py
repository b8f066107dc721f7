"""`bench memory` measures what it says, reports a training that failed, and leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from carrywave.benchmarks.harness.workers import memory_bytes
from carrywave.benchmarks.memory_use import memory
from carrywave.errors import RunError

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

COLUMNS = ("file_mb", "peak_rss_anon_mb", "more_mb", "bound_mb", "seconds")
# Stands in for `python -m carrywave`: holds as much memory as its training file has bytes, or fails when asked to.
STAND_IN = """#!{python}
import sys, pathlib, time
settings = dict(word.split("=", 1) for word in sys.argv if "=" in word)
size = pathlib.Path(settings["data.train"]).stat().st_size
assert pathlib.Path(settings["data.valid"]).stat().st_size > 0
if {fail}:
    print("first line")
    sys.exit("data.train is not to its taste; give another")
held = b"x" * size
time.sleep(0.3)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(memory, "SMALL_MB", 1)
    monkeypatch.setattr(memory, "QUICK_MB", 61)
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def install(program: Path, *, fail: bool) -> None:
    program.write_text(STAND_IN.format(python=os.path.realpath("/proc/self/exe"), fail=fail))
    program.chmod(0o755)


def test_the_difference_is_what_the_larger_file_costs(stand_in: Path, tmp_path: Path) -> None:
    install(stand_in, fail=False)
    small, large = memory.run(quick=True)
    assert tuple(small) == tuple(large) == COLUMNS
    assert small["more_mb"] == 0.0
    assert large["more_mb"] == pytest.approx(60, abs=3)  # the interpreter itself moves by less
    assert list(tmp_path.iterdir()) == [stand_in]


def test_a_training_that_fails_is_reported_by_its_last_line(stand_in: Path, tmp_path: Path) -> None:
    install(stand_in, fail=True)
    with pytest.raises(RunError, match=r"exited with code 1: data\.train is not to its taste"):
        memory.run(quick=True)
    assert list(tmp_path.iterdir()) == [stand_in]


def test_own_memory_is_seen() -> None:
    before = memory_bytes("RssAnon", os.getpid())
    # Not from the allocator, which may have it already.
    held = np.frombuffer(mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    held[:] = 1
    assert memory_bytes("RssAnon", os.getpid()) - before == pytest.approx(held.nbytes, rel=0.1)  # pages, and whatever else moves meanwhile


def test_text_is_the_same_every_time_and_of_the_size_asked_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        memory._write_text(tmp_path / name, 3_000_001)
    text = (tmp_path / "a").read_bytes()
    assert len(text) == 3_000_001
    assert text == (tmp_path / "b").read_bytes()
    assert 20 <= len(set(text)) <= 28
