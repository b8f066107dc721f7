"""Snapshots: bit-exact, whole or not there, and refused in one line when anything is wrong with them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from _whole_snapshots import Snapshot, load, save, save_weights
from carrywave.errors import Diverged, RunError
from carrywave.runs.checkpoint import atomic_files, manifest, snapshot
from carrywave.runs.checkpoint.snapshot import load_weights

DTYPES = list(atomic_files.DTYPES)


def small(value: float = 1.0, **meta: Any) -> Snapshot:
    return Snapshot(
        parameters={"w": torch.full((2, 3), float(value)), "b": torch.zeros(3, dtype=torch.float64)},
        optimizer={"exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(4.0)},
        carry={"lstm.l0.h": torch.arange(15.0).reshape(1, 5, 3).bfloat16()},
        extra={"scale": torch.tensor(1024.0)},
        meta={"cursor": [1, 2], "seed": 2**62 + 1, "loss": 0.1 + 0.2, **meta},
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(ours: Snapshot, theirs: Snapshot) -> bool:
    for group in manifest.GROUPS:
        a, b = getattr(ours, group), getattr(theirs, group)
        if a.keys() != b.keys() or any(a[n].dtype != b[n].dtype or a[n].shape != b[n].shape or bits(a[n]) != bits(b[n]) for n in a):
            return False
    return ours.meta == theirs.meta


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
    with path.open("wb") as file:
        size, _ = atomic_files.write_tensors(file, kept, said)
    assert path.stat().st_size == size
    back = atomic_files.read_tensors(path)
    assert same(Snapshot(kept), Snapshot(back))
    assert atomic_files.read_metadata(path) == said


def test_a_whole_snapshot_comes_back(tmp_path: Path) -> None:
    kept = Snapshot(
        parameters={"w": torch.randn(4, 3).t(), "half": torch.randn(5).bfloat16()},
        optimizer={"exp_avg/w": torch.tensor([math.nan, math.inf, -0.0])},  # the state may hold what weights may not
        carry={},
        extra={"count": torch.tensor(3)},
        meta={"rate": {"best": None, "scale": 0.1}, "history": [1e-300, 5.0], "text": "ä"},
    )
    folder = save(tmp_path / "snapshots", "step-7", kept, keep=2)
    assert folder == tmp_path / "snapshots" / "step-7"
    assert same(load(tmp_path / "snapshots"), kept)
    assert same(load(folder), kept)


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    said = {f"key{number}": "value" for number in range(8)}
    weights = {"b": torch.ones(3), "a": torch.ones(2, dtype=torch.float64)}
    save_weights(tmp_path / "one", weights, said)
    save_weights(tmp_path / "two", dict(reversed(weights.items())), dict(reversed(said.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    first, second = save(tmp_path / "x", "s", small(), keep=1), save(tmp_path / "y", "s", small(), keep=1)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(5):
        made = save(tmp_path, f"step-{step}", small(step), keep=2)
        os.utime(made, ns=((9 - step) * 10**9, (9 - step) * 10**9))  # the clock goes backward, and it does not matter
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step-3", "step-4"]
    assert load(tmp_path).parameters["w"][0, 0].item() == 4.0
    save(tmp_path, "step-5", small(5), keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step-5"]


def test_the_same_place_twice(tmp_path: Path) -> None:
    save(tmp_path, "step-1", small(1), keep=1)
    again = save(tmp_path, "step-1", small(2), keep=1)
    assert load(tmp_path).parameters["w"][0, 0].item() == 2.0
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [again.name]
    save(tmp_path, "step-1", small(3), keep=1)
    assert load(tmp_path).parameters["w"][0, 0].item() == 3.0


def test_what_a_killed_run_left_gives_way(tmp_path: Path) -> None:
    save(tmp_path, "step-1", small(1), keep=2)
    (tmp_path / ".tmp-step-9").mkdir()
    (tmp_path / ".tmp-step-9" / "parameters.safetensors").write_bytes(b"half")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")  # published, but the pointer was never written
    assert load(tmp_path).parameters["w"][0, 0].item() == 1.0
    assert save(tmp_path, "step-2", small(2), keep=2).name == "step-2"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step-1", "step-2"]
    assert load(tmp_path).parameters["w"][0, 0].item() == 2.0


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "Read-only file system"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("moment", range(15))
def test_a_failure_at_any_moment_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, moment: int
) -> None:
    save(tmp_path, "step-1", small(1), keep=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
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
        patch.setattr(atomic_files, "write_tensors", fragile(atomic_files.write_tensors))
        if isinstance(error, OSError):
            with pytest.raises(RunError, match=r"could not be written: .*; the previous snapshot is kept") as caught:
                save(tmp_path, "step-2", small(2), keep=1)
            assert "\n" not in str(caught.value)
        else:
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, "step-2", small(2), keep=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert same(load(tmp_path), small(1))


def test_moments_above_cover_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more)

        return call

    monkeypatch.setattr(os, "replace", counted("replace", os.replace))
    monkeypatch.setattr(os, "fsync", counted("fsync", os.fsync))
    monkeypatch.setattr(atomic_files, "write_tensors", counted("tensors", atomic_files.write_tensors))
    save(tmp_path, "step-1", small(1), keep=1)
    files = ["tensors", "fsync"] * 4
    # The last fsync, of the folder after the pointer was replaced, comes when the new snapshot already stands; so does whatever removes
    # old ones.
    assert calls == [*files, "fsync", "replace", "fsync", "replace", "fsync", "fsync", "replace", "fsync"]


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    save(tmp_path, "step-1", small(1), keep=1)
    with pytest.raises(Diverged, match="parameter w is not finite"):
        save(tmp_path, "step-2", small(math.nan), keep=1)
    assert same(load(tmp_path), small(1))
    with pytest.raises(Diverged, match="parameter w is not finite"):
        save_weights(tmp_path / "weights", {"w": torch.tensor([math.inf])}, {})
    assert not (tmp_path / "weights").exists()


def resign(folder: Path, **changes: Any) -> None:
    said = json.loads((folder / "manifest.json").read_text()) | changes
    said["sha256"] = manifest.digest(said)
    (folder / "manifest.json").write_bytes(manifest.encode(said))


def flip(path: Path, position: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def torch_saved(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def describe(folder: Path, name: str, **changes: Any) -> None:
    """A manifest that says something else of one file."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    resign(folder, files=files | {name: files[name] | changes})


def escape(folder: Path, name: str) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    resign(folder, files={**files, name: {"bytes": 1, "sha256": ""}})


def unfinished(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "not_finite", lambda tensors: None)  # it would not be written otherwise
        save(folder.parent, "step-1", small(math.nan), keep=1)


PARAMETERS = "parameters-w.safetensors"
CARRY = "carry-lstm.l0.h-0-5.safetensors"
OPTIMIZER = "optimizer-exp_avg-w.safetensors"
EXTRA = "extra-scale.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: os.truncate(f / OPTIMIZER, 40), f"{OPTIMIZER} is truncated"),
    "bit of a tensor": (lambda f: flip(f / PARAMETERS, -3), f"{PARAMETERS} is damaged: its SHA-256"),
    "bit of a header": (lambda f: flip(f / PARAMETERS, 20), f"{PARAMETERS} is damaged"),
    "missing": (lambda f: (f / EXTRA).unlink(), f"{EXTRA} is missing"),
    "other step": (lambda f: shutil.copy(save(f.parent.parent / "z", "s", small(9), 1) / PARAMETERS, f), "is damaged: its SHA-256"),
    "newer": (lambda f: resign(f, format=3), "has format 3, but this version reads format 2; use the version that wrote it"),
    "no format": (lambda f: resign(f, format=None), "not a snapshot manifest"),
    "no JSON": (lambda f: (f / "manifest.json").write_text("{"), "is damaged: it is not JSON"),
    "deep JSON": (lambda f: (f / "manifest.json").write_text("[" * 200_000), "is damaged: it is not JSON"),
    "not text": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe{}\x00"), "is not JSON"),
    "leaves upward": (lambda f: escape(f, "../x.safetensors"), "lists the file '../x.safetensors', which is outside its folder"),
    "leaves to root": (lambda f: escape(f, "/etc/passwd"), "lists the file '/etc/passwd', which is outside its folder"),
    "unknown dtype": (lambda f: describe(f, CARRY, tensors={"lstm.l0.h/0-5": ["F1", [1, 5, 3]]}), "snapshot manifest (KeyError"),
    "NaN": (unfinished, "parameter w is not finite"),
    "pointer away": (lambda f: (f.parent / "last").write_text("../../elsewhere"), "last does not name a snapshot in its folder"),
    "pointer to nothing": (lambda f: (f.parent / "last").write_text("step-77"), "last does not name a snapshot in its folder"),
    "pointer of junk": (lambda f: (f.parent / "last").write_bytes(b"\xff\x00"), "last does not name a snapshot in its folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses(tmp_path: Path, fault: str) -> None:
    folder = save(tmp_path / "snapshots", "step-1", small(), keep=1)
    harm, said = FAULTS[fault]
    harm(folder)
    with pytest.raises(RunError) as caught:
        load(tmp_path / "snapshots")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = save(tmp_path, "step-1", small(tiny=1e-30), keep=1)
    sound = (folder / "manifest.json").read_bytes()
    for position in range(0, len(sound), 3):
        flip(folder / "manifest.json", position, 1 << position % 8)
        with pytest.raises(RunError):
            load(tmp_path)
        (folder / "manifest.json").write_bytes(sound)
    assert same(load(tmp_path), small(tiny=1e-30))


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_loaded(tmp_path: Path, flips: int) -> None:
    folder = save(tmp_path, "step-1", small(), keep=1)
    sound = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    draw = random.Random(flips)
    for _ in range(flips):
        path = draw.choice(list(sound))
        flip(path, draw.randrange(len(sound[path])), 1 << draw.randrange(8))
        with pytest.raises(RunError):
            load(tmp_path)
        path.write_bytes(sound[path])
    assert same(load(tmp_path), small())


def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    """As on a full disk: the system refuses a write in the middle of a file."""
    save(tmp_path, "step-1", small(1), keep=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            RunError, match="step-2 could not be written: File too large; the previous snapshot is kept; raise the limit of file sizes"
        ):
            save(tmp_path, "step-2", Snapshot({"w": torch.ones(50_000)}), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_best_stays(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, f"step-{step}", small(step), keep=1, best=step in (0, 2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best", "last", "step-2", "step-4"]
    assert (tmp_path / "best").read_text() == "step-2\n"
    assert load(tmp_path / "step-2").parameters["w"][0, 0].item() == 2.0
    save(tmp_path, "step-2", small(7), keep=1)  # after going back
    assert load(tmp_path / "step-2").parameters["w"][0, 0].item() == 2.0
    assert load(tmp_path).parameters["w"][0, 0].item() == 7.0


def test_snapshots_of_a_future_that_was_left_go_first(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15):
        save(tmp_path, f"step-{step}", small(step), keep=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step-10", "step-15", "step-30"]
    (tmp_path / "own").mkdir()  # no snapshot: left alone
    save(tmp_path, "step-16", small(), keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "own", "step-15", "step-16"]


def test_any_name_of_a_parameter_makes_a_file(tmp_path: Path) -> None:
    for name in ("a/../../b", "ä " * 90, "x" * 300, "c:\\d", "."):
        kept = Snapshot({name: torch.ones(2)})
        folder = save(tmp_path, "step-1", kept, keep=1)
        assert len(list(folder.iterdir())) == 2
        assert same(load(tmp_path), kept)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no snapshot; remove resume=True"):
        load(tmp_path)
    with pytest.raises(RunError, match="has no snapshot"):
        load(tmp_path / "nowhere")
    for step in (15, 16):
        save(tmp_path, f"step-{step}", small(), keep=2)
    (tmp_path / "last").unlink()
    with pytest.raises(RunError, match=r"last is missing; write the name of the newest snapshot beside it, step-16, into it"):
        load(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        save(tmp_path / "file" / "snapshots", "step-1", small(), keep=1)


WEIGHTS = {"lstm.w": torch.arange(6.0).reshape(2, 3), "head.b": torch.zeros(2, dtype=torch.float64)}
EXPECTED = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in WEIGHTS.items()}


def test_weights_come_back_with_their_spec(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights.safetensors"
    save_weights(path, WEIGHTS, {"spec": "task: language\n"})
    assert same(Snapshot(load_weights(path, EXPECTED)), Snapshot(WEIGHTS))
    assert atomic_files.read_metadata(path) == {"spec": "task: language\n"}
    assert same(Snapshot(safetensors.torch.load_file(path)), Snapshot(WEIGHTS))


def test_weights_by_the_library_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "w")
    assert same(Snapshot(load_weights(tmp_path / "w", EXPECTED)), Snapshot(WEIGHTS))
    assert atomic_files.read_metadata(tmp_path / "w") == {}


def test_a_full_disk_keeps_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w"
    save_weights(path, WEIGHTS, {})
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="w could not be written: No space left on device"):
        save_weights(path, {"w": torch.zeros(2)}, {})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w"]


NOT_VALID = "is not a valid safetensors file ("
SOUND = safetensors.torch.save(WEIGHTS)
OTHERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", NOT_VALID),
    "header cut": (SOUND[:30], NOT_VALID),
    "data cut": (SOUND[:-1], NOT_VALID),
    "data over": (SOUND + b"x", NOT_VALID),
    "text": (b"{'not': 'safetensors'}", NOT_VALID),
    "bad header": ((16).to_bytes(8, "little") + b'{"a":{"dtype":1}' + b"x" * 20, NOT_VALID),
    "pickle": (pickle.dumps(["x"] * 20), "is a pickle"),
    "torch.save": (torch_saved(legacy=False), "is a pickle"),
    "lacks one": (safetensors.torch.save({"lstm.w": WEIGHTS["lstm.w"]}), "it has no head.b"),
    "one more": (safetensors.torch.save({**WEIGHTS, "z": torch.ones(1)}), "it has z, which this model does not"),
    "other shape": (safetensors.torch.save({**WEIGHTS, "lstm.w": torch.ones(3, 2)}), "lstm.w has shape [3, 2], expected [2, 3]"),
    "other dtype": (
        safetensors.torch.save({**WEIGHTS, "lstm.w": torch.ones(2, 3).half()}),
        "lstm.w is torch.float16, expected torch.float32",
    ),
    "NaN": (safetensors.torch.save({**WEIGHTS, "lstm.w": torch.full((2, 3), math.nan)}), "lstm.w is not finite"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_refuses_weights(tmp_path: Path, name: str) -> None:
    data, said = OTHERS[name]
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(RunError) as caught:
        load_weights(tmp_path / "w", EXPECTED)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_refuses_weights_that_are_not_there(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "nothing", "cannot be read"), (tmp_path, "is not a regular file")):
        with pytest.raises(RunError, match=said):
            load_weights(path, EXPECTED)
