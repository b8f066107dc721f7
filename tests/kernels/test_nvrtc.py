"""What is compiled is kept on disk, whole or not at all, and never mistaken for something else. The compiler here is a false one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.hopper import recurrence

SOURCE = recurrence.SOURCE
CONSTANTS = (("LANES", 8), ("PASSES", 1))


class Status(IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


class Compiler:
    """The calls of cuda.bindings.nvrtc: each gives its status first, and fills buffers in place."""

    def __init__(self, version: int = 1) -> None:
        self.version, self.compiled, self.fails = version, 0, False

    def nvrtcVersion(self) -> tuple[Status, int, int]:
        return Status.NVRTC_SUCCESS, 13, self.version

    def nvrtcCreateProgram(self, text: bytes, name: bytes, *_: object) -> tuple[Status, bytes]:
        assert text
        return Status.NVRTC_SUCCESS, name

    def nvrtcCompileProgram(self, program: bytes, count: int, options: list[bytes]) -> tuple[Status]:
        assert count == len(options)
        self.compiled += 1
        self.code = b"\x7fELF" + b" ".join(options)
        return (Status.NVRTC_ERROR_COMPILATION if self.fails else Status.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, program: bytes) -> tuple[Status, int]:
        return Status.NVRTC_SUCCESS, len(self.code)

    def nvrtcGetCUBIN(self, program: bytes, buffer: bytes) -> tuple[Status]:
        ctypes.memmove(buffer, self.code, len(self.code))
        return (Status.NVRTC_SUCCESS,)

    def nvrtcGetProgramLogSize(self, program: bytes) -> tuple[Status, int]:
        return Status.NVRTC_SUCCESS, 40

    def nvrtcGetProgramLog(self, program: bytes, buffer: bytes) -> tuple[Status]:
        ctypes.memmove(buffer, b"line 3: error: expected a ;".ljust(40), 40)
        return (Status.NVRTC_SUCCESS,)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    nvrtc.available.cache_clear()
    yield
    nvrtc.available.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: made)
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path / "cache"))
    return made


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]


def test_the_second_use_does_not_compile(compiler: Compiler, tmp_path: Path) -> None:
    first = nvrtc.binary(SOURCE, CONSTANTS, "sm_90a")
    assert b"-DLANES=8" in first
    assert b"sm_90a" in first
    assert nvrtc.binary(SOURCE, CONSTANTS, "sm_90a") == first
    assert compiler.compiled == 1
    [path] = kept(tmp_path)  # nothing half-written beside it
    assert path.read_bytes() == first


@pytest.mark.parametrize("damage", [b"", b"rubbish"])
def test_a_damaged_file_is_compiled_anew(damage: bytes, compiler: Compiler, tmp_path: Path) -> None:
    first = nvrtc.binary(SOURCE, CONSTANTS, "sm_90a")
    [path] = kept(tmp_path)
    path.write_bytes(damage)
    assert nvrtc.binary(SOURCE, CONSTANTS, "sm_90a") == first
    assert compiler.compiled == 2
    assert path.read_bytes() == first


def test_what_does_not_compile_says_so_and_leaves_nothing(compiler: Compiler, tmp_path: Path) -> None:
    compiler.fails = True
    with pytest.raises(nvrtc.KernelError, match=rf"{SOURCE} does not compile: line 3: error: expected a ;"):
        nvrtc.binary(SOURCE, CONSTANTS, "sm_90a")
    assert kept(tmp_path) == []


def test_a_machine_without_a_compiler_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "_driver", lambda: None)
    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    assert nvrtc.available() == "No module named 'cuda'"
    assert nvrtc.available() == "No module named 'cuda'"  # asked once
    nvrtc.available.cache_clear()
    monkeypatch.setattr(nvrtc, "_nvrtc", Compiler)
    assert nvrtc.available() == ""
