"""How good the keyed numbers are: how often words come again, whether masks are related, and the program that feeds batteries.

docs/architecture.md#randomness holds what large batteries found. Keys are fixed here, so a test that has passed once passes again.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.kernels.cuda import fused_random

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    "shape",
    [(65536, 1, 64), (64, 1, 65536), (1, 64, 65536), (1, 65536, 64), (2048, 2048, 1), (2048, 1, 2048), (1, 2048, 2048)],
    ids=["times", "units-of-times", "units-of-lanes", "lanes", "times-and-lanes", "times-and-units", "lanes-and-units"],
)
def test_words_come_again_as_often_as_chance_has_it(shape: tuple[int, int, int]) -> None:
    """In a plane, or among those that differ by the longest side alone: a permutation would show none, a symmetry too many."""
    together = max(shape) if max(shape) == 65536 else math.prod(shape)
    again, expected = 0, 0.0
    for seed in range(4 if together == 65536 else 1):
        key = random.fold(random.key(seed), random.site("lstm.l0.dropout"))
        time, lane, unit = (torch.arange(size) for size in shape)
        words = random.bits(key, time[:, None, None], lane[:, None], unit).numpy()
        words = np.sort(np.moveaxis(words, shape.index(max(shape)), -1).reshape(-1, together), axis=-1)
        again += int((words[:, 1:] == words[:, :-1]).sum())
        expected += len(words) * together * (together - 1) / 2 / 2**32
    assert abs(again - expected) < 5 * math.sqrt(expected)  # a count of rare events: its deviation is its root


@pytest.fixture(scope="module")
def stream() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_stream", SCRIPTS / "random_stream.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program(stream: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler")
    built: Path = stream.build(tmp_path_factory.mktemp("program"))
    return built


HOST = """
#include <cstdio>
{code}
int main() {{ unsigned int w[5]; while (fread(w, 4, 5, stdin) == 5) {{ int x = {call}; fwrite(&x, 4, 1, stdout); }} }}
"""


def test_the_text_of_the_cuda_function_draws_our_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is compiled for CUDA, compiled for this machine: the bits are equal where there is no GPU to ask."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    words = torch.randint(-(2**31), 2**31 - 1, (200, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(1))

    def host(code: str, call: str) -> Tensor:
        (tmp_path / "host.cpp").write_text(HOST.format(code=code, call=call))
        subprocess.run(["c++", "-O1", "-o", tmp_path / "host", tmp_path / "host.cpp"], check=True)
        run = subprocess.run([tmp_path / "host"], input=words.numpy().tobytes(), stdout=subprocess.PIPE, check=True)
        return torch.frombuffer(bytearray(run.stdout), dtype=torch.int32)

    compiled: list[str] = []
    monkeypatch.setattr(torch.cuda.jiterator, "_create_jit_fn", compiled.append)
    fused_random._compile(3)
    found = host(compiled[0], "carrywave_bits_3<int>(w[0], w[1], w[2], w[3], w[4])")
    assert torch.equal(found, torch.stack([random.bits(row[:2], *row[2:]) for row in words]))
    found = host(fused_random._FOLD, "carrywave_fold<int>(w[0], w[1], w[2], w[3] & 1)")
    assert torch.equal(found, torch.stack([random.fold(row[:2], int(row[2]))[int(row[3]) & 1] for row in words]))
