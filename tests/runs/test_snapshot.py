"""Snapshots and weights: bit-exact, whole or not there, and refused in one line when anything is wrong with them."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from _whole_snapshots import GROUPS, Snapshot, load, save
from carrywave.errors import Diverged, RunError
from carrywave.runs.checkpoint import atomic_files, snapshot
from carrywave.runs.checkpoint.weights import read_weights, write_weights

KILLED = Path(__file__).with_name("_killed.py")
DTYPES = list(atomic_files.DTYPES)


def small(value: float = 1.0, **meta: Any) -> Snapshot:
    return Snapshot(
        parameters={"w": torch.full((2, 3), float(value)), "b": torch.zeros(3, dtype=torch.float64)},
        optimizer={"exp_avg/w": torch.tensor([math.nan, -0.0]), "step/w": torch.tensor(4.0)},  # a state may hold what weights may not
        carry={"lstm.l0.h": torch.arange(15.0).reshape(1, 5, 3).bfloat16()},
        meta={"seed": 2**62 + 1, "loss": 0.1 + 0.2, "text": "ä", "best": None, **meta},
    )


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return ours.keys() == theirs.keys() and all(bits(ours[name]) == bits(theirs[name]) for name in ours)


def alike(ours: Snapshot, theirs: Snapshot) -> bool:
    return ours.meta == theirs.meta and all(same(getattr(ours, group), getattr(theirs, group)) for group in GROUPS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    made = torch.frombuffer(raw, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return made.transpose(0, -1) if made.ndim > 1 and draw(st.booleans()) else made


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, tensors(), max_size=5), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_tensors_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Tensor], said: dict[str, str]) -> None:
    path = tmp_path_factory.getbasetemp() / "tensors.safetensors"
    for order in (1, -1):
        with path.open("wb") as file:
            atomic_files.write_tensors(file, dict(list(kept.items())[::order]), dict(list(said.items())[::order]))
        if order == 1:
            first = path.read_bytes()
    assert path.read_bytes() == first  # equal content, equal bytes
    assert same(atomic_files.read_tensors(path), kept)
    assert atomic_files.read_metadata(path) == said


def test_a_snapshot_comes_back_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15):  # it went back after 30
        path = save(tmp_path, step, small(step), keep=3)
        assert alike(load(tmp_path), small(step))
        os.utime(path, ns=(10**18 - step, 10**18 - step))  # clocks do not matter
    assert sorted(contents(tmp_path)) == ["last", *(f"step-{step:08d}.safetensors" for step in (10, 15, 30))]
    (tmp_path / "own").write_text("")
    save(tmp_path, 15, small(7), keep=2)  # the same step again
    assert alike(load(tmp_path), small(7))
    assert sorted(contents(tmp_path)) == ["last", "own", *(f"step-{step:08d}.safetensors" for step in (10, 15))]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", range(6))
def test_a_failure_at_any_moment_keeps_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, moment: int) -> None:
    save(tmp_path, 1, small(1))
    left = [moment]

    def fragile(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise error
            return real(*args, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fragile(os.replace))
        patch.setattr(os, "fsync", fragile(os.fsync))
        expected = (RunError, KeyboardInterrupt)[isinstance(error, KeyboardInterrupt)]
        with pytest.raises(expected) as caught:
            save(tmp_path, 2, small(2))
    assert left[0] == -1
    if expected is RunError:
        assert "could not be written: No space left on device; the previous snapshot is kept; free" in str(caught.value)
    # Only the folder's own entry was not on the disk yet in the last case, after `last` had been replaced.
    assert alike(load(tmp_path), small(2 if moment == 5 else 1))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kills", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_a_kill_at_any_byte_leaves_a_whole_snapshot(tmp_path: Path, kills: int) -> None:
    ended = subprocess.run([sys.executable, str(KILLED), str(tmp_path / "snapshots"), str(kills)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    """As on a full disk: the system refuses a write in the middle of a file."""
    save(tmp_path, 1, small(1))
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"step-00000002.safetensors could not be written: File too large; .*; raise the limit"):
            save(tmp_path, 2, Snapshot({"w": torch.ones(50_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    save(tmp_path, 1, small(1))
    for write in (
        lambda: save(tmp_path, 2, small(math.nan)),
        lambda: write_weights(tmp_path / "weights", {"w": torch.tensor([math.inf])}, {}),
    ):
        with pytest.raises(Diverged, match="parameter w is not finite"):
            write()
    assert alike(load(tmp_path), small(1))
    assert not (tmp_path / "weights").exists()


def flip(path: Path, position: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def unfinished(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "not_finite", lambda tensors: None)  # it would not be written otherwise
        save(path.parent, 1, small(math.nan))


def other_format(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "FORMAT", 99)
        save(path.parent, 1, small())


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 4), "is not a valid safetensors file"),
    "a bit of a tensor": (lambda path: flip(path, -3), "is damaged: its SHA-256 does not match; resume from another"),
    "another program's": (lambda path: safetensors.torch.save_file({"w": torch.ones(2)}, path), "is damaged: its SHA-256"),
    "another format": (other_format, "has format 99, but this version reads format 3; use the version that wrote it"),
    "no numbers": (unfinished, "parameter w is not finite"),
    "gone": (lambda path: path.unlink(), "last does not name a snapshot in its folder"),
    "a pointer away": (lambda path: (path.parent / "last").write_text("../../elsewhere"), "last does not name a snapshot"),
    "a pointer of junk": (lambda path: (path.parent / "last").write_bytes(b"\xff\x00"), "last does not name a snapshot"),
    "no pointer": (
        lambda path: (path.parent / "last").unlink(),
        "last is missing; write the name of the newest snapshot .*, step-00000001",
    ),
    "nothing": (lambda path: [each.unlink() for each in path.parent.iterdir()], "has no snapshot; remove resume=True"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_refused(tmp_path: Path, fault: str) -> None:
    harm, said = FAULTS[fault]
    harm(save(tmp_path, 1, small()))
    with pytest.raises(RunError, match=said) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_loaded(tmp_path: Path, flips: int) -> None:
    path = save(tmp_path, 1, small(tiny=1e-30))
    sound, draw = path.read_bytes(), random.Random(flips)
    for _ in range(flips):
        flip(path, draw.randrange(len(sound)), 1 << draw.randrange(8))
        with pytest.raises(RunError):
            load(tmp_path)
        path.write_bytes(sound)
    assert alike(load(tmp_path), small(tiny=1e-30))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.arange(6.0).reshape(2, 3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))


WEIGHTS = {name: parameter.detach() for name, parameter in Net().named_parameters()}
SOUND = safetensors.torch.save(WEIGHTS)


def torch_saved(*, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


OTHERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a valid safetensors file ("),
    "header cut": (SOUND[:30], "is not a valid safetensors file ("),
    "data cut": (SOUND[:-1], "is not a valid safetensors file ("),
    "text": (b"{'not': 'safetensors'}", "is not a valid safetensors file ("),
    "pickle": (pickle.dumps(["x"] * 20), "is a pickle"),
    "torch.save": (torch_saved(legacy=False), "is a pickle"),
    "torch.save, as it was": (torch_saved(legacy=True), "is a pickle"),
    "lacks one": (safetensors.torch.save({"w": WEIGHTS["w"]}), "it has no b"),
    "one more": (safetensors.torch.save({**WEIGHTS, "z": torch.ones(1)}), "it has z, which this model does not"),
    "other shape": (safetensors.torch.save({**WEIGHTS, "w": torch.ones(3, 2)}), "w has shape [3, 2], expected [2, 3]"),
    "other dtype": (safetensors.torch.save({**WEIGHTS, "w": torch.ones(2, 3).half()}), "w is torch.float16, expected torch.float32"),
    "NaN": (safetensors.torch.save({**WEIGHTS, "w": torch.full((2, 3), math.nan)}), "w is not finite"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_that_are_refused(tmp_path: Path, name: str) -> None:
    data, said = OTHERS[name]
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(RunError) as caught:
        read_weights(Net(), tmp_path / "w")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_weights_come_back_and_are_the_librarys_format(tmp_path: Path) -> None:
    write_weights(tmp_path / "ours", WEIGHTS, {"spec": "task: language\n"})
    safetensors.torch.save_file(WEIGHTS, tmp_path / "theirs")
    assert same(read_weights(Net(), tmp_path / "ours"), WEIGHTS)
    assert same(read_weights(Net(), tmp_path / "theirs"), WEIGHTS)
    assert same(safetensors.torch.load_file(tmp_path / "ours"), WEIGHTS)
    assert atomic_files.read_metadata(tmp_path / "ours") == {"spec": "task: language\n"}
    flip(tmp_path / "ours", -1)
    with pytest.raises(RunError, match="is damaged: its SHA-256 does not match"):
        read_weights(Net(), tmp_path / "ours")
    for path, said in ((tmp_path / "nothing", "cannot be read"), (tmp_path, "is not a regular file")):
        with pytest.raises(RunError, match=said):
            read_weights(Net(), path)
