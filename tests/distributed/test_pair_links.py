"""Links over a group for each pair of stages: three real processes over gloo, one message after the other as NCCL gets them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("scene", "heard"),
    [
        ("the_other_pair", [[], [21.0, 10.0], [12.0]]),
        ("the_next_message", [[], [1.0, 2.0], []]),
        ("hanging_up", [[1], [], [1]]),
    ],
)
def test_a_scene(scene: str, heard: list[list[float]], python: Run, tmp_path: Path) -> None:
    ended = python(str(Path(__file__).parent / "_scene.py"), str(tmp_path), scene, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert ended.returncode == 0, ended.stderr
    assert [json.loads((tmp_path / f"{stage}.json").read_text()) for stage in range(3)] == heard
