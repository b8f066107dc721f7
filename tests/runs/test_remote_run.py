"""Runs in a store: after every single upload there is something to resume from, and only one process uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from _whole_snapshots import Snapshot, load, save
from carrywave.data.files.remote import Store
from carrywave.errors import ResourceError, RunError
from carrywave.runs.checkpoint.snapshot import BEST, NONE_YET, POINTER, pointed
from carrywave.runs.remote_run import RemoteRun, copy_of, folder_of
from carrywave.spec.load import parse
from carrywave.train.fit import train

ADDRESS = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """An empty memory file system."""
    yield
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def opened(cache: Path, *, resume: bool = False, restarted: bool = False) -> RemoteRun:
    run = RemoteRun(ADDRESS, str(cache))
    run.prepare(resume=resume, restarted=restarted, hold=lambda _: None)
    return run


def write(run: RemoteRun, name: str, data: bytes, mode: str = "wb") -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / name).open(mode) as file:
        file.write(data)


def began(run: RemoteRun) -> None:
    write(run, "spec.yaml", b"task: language\n")
    (run.folder / "snapshots").mkdir()
    write(run, f"snapshots/{NONE_YET}", b'{"init": null}')


def advance(run: RemoteRun, step: int, *, best: bool = False) -> None:
    """Rows of metrics, a snapshot that counts on them, and weights, as a run writes them."""
    write(run, "metrics.jsonl", f"row {step}\n".encode(), "ab")
    if best:
        write(run, "weights.safetensors", f"weights of step {step}".encode())
    state = Snapshot({"w": torch.full((3,), float(step))}, {"w/moment": torch.zeros(2)}, meta={"bytes": step * len("row 1\n")})
    save(run.folder / "snapshots", f"step-{step}", state, keep=2, best=best)


class Killed(Exception):
    pass


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The process dies after so many changes of the store."""
    left = [after]

    def harmed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Store, *args: Any) -> Any:
            names = args[0] if plain.__name__ == "remove" else [None]
            for name in names:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                plain(self, *([[name]] if name is not None else args))

        return change

    for name in ("put", "remove"):
        monkeypatch.setattr(Store, name, harmed(getattr(Store, name)))


def test_a_kill_after_any_upload_leaves_a_run_to_resume(tmp_path: Path) -> None:
    """What another host then fetches is a whole snapshot, the newest or the one before, with all its metrics and its weights."""
    reached: set[float] = set()
    for after in range(100):
        fsspec.filesystem("memory").store.clear()
        run = opened(tmp_path / f"a{after}")
        began(run)
        run.push()
        advance(run, 1, best=True)
        run.push()
        advance(run, 2)
        run.push()
        advance(run, 3, best=True)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, after)
            try:
                run.push()
                whole = True
            except Killed:
                whole = False
        other = opened(tmp_path / f"b{after}", resume=True)
        found = load(other.folder / "snapshots")
        step = found.parameters["w"][0].item()
        reached.add(step)
        metrics = (other.folder / "metrics.jsonl").read_bytes()
        assert metrics[: found.meta["bytes"]] == b"".join(f"row {row}\n".encode() for row in range(1, int(step) + 1))
        weights = (other.folder / "weights.safetensors").read_bytes()
        assert weights == b"weights of step 3" or step < 3
        named = pointed(other.folder / "snapshots", BEST)
        assert named is not None
        assert load(other.folder / "snapshots" / named).parameters["w"][0].item() in (1.0, 3.0)
        if whole:
            break
    assert whole
    assert after > 8  # there were as many moments to die at
    assert reached == {2.0, 3.0}
    names = Store(ADDRESS).names()
    assert {name.split("/")[1] for name in names if name.startswith("snapshots/")} == {"step-2", "step-3", POINTER, BEST}


def test_a_kill_during_the_first_upload_leaves_a_place_to_start_in_or_a_run_to_start_over(tmp_path: Path) -> None:
    seen = set()
    for after in range(20):
        fsspec.filesystem("memory").store.clear()
        run = opened(tmp_path / f"a{after}")
        began(run)
        for name in ("codec.json", "facts.json", "plan.json", "history.jsonl", "launch.json"):
            write(run, name, b"{}")
        whole = True
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, after)
            try:
                run.push()
            except Killed:
                whole = False
        resumable = "spec.yaml" in Store(ADDRESS).names()
        seen.add(resumable)
        other = opened(tmp_path / f"b{after}", resume=resumable)
        assert (other.folder / "snapshots" / NONE_YET).is_file() == resumable
        began(other) if not resumable else None
        other.push()
        assert {"spec.yaml", f"snapshots/{NONE_YET}"} <= Store(ADDRESS).names()
        if whole:
            break
    assert whole
    assert seen == {True, False}


def test_the_host_that_uploaded_last_goes_on_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(tmp_path / "a")
    began(run)
    advance(run, 1)
    run.push()
    advance(run, 2)  # and is killed before it is uploaded
    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", lambda *_: pytest.fail("nothing is to be fetched"))
        again = opened(tmp_path / "a", resume=True)
    assert load(again.folder / "snapshots").parameters["w"][0].item() == 2
    elsewhere = opened(tmp_path / "b", resume=True)
    assert load(elsewhere.folder / "snapshots").parameters["w"][0].item() == 1
    advance(elsewhere, 3)
    elsewhere.push()
    back = opened(tmp_path / "a", resume=True)  # not its own step 2 any more
    assert load(back.folder / "snapshots").parameters["w"][0].item() == 3


def test_only_the_last_to_claim_a_run_uploads(tmp_path: Path) -> None:
    run = opened(tmp_path / "a")
    began(run)
    advance(run, 1)
    run.push()
    opened(tmp_path / "b", resume=True).push()
    advance(run, 2)
    before = Store(ADDRESS).names()
    with pytest.raises(RunError, match=r"is being trained by process \d+ on .* since then, so nothing more is uploaded"):
        run.push()
    run.withdraw()
    assert Store(ADDRESS).names() == before


def test_a_process_that_lost_the_run_during_an_upload_changes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later weights or pointer would stand among the files of the other."""
    run = opened(tmp_path / "a")
    began(run)
    advance(run, 1, best=True)
    run.push()
    advance(run, 2, best=True)
    put = Store.put
    before: dict[str, Any] = {}

    def slow(self: Store, path: Path, name: str) -> None:
        put(self, path, name)
        if not before:
            before["tokens"] = True
            other = opened(tmp_path / "b", resume=True)
            advance(other, 3, best=True)
            other.push()
            before.update({name: self.read(name) for name in self.names()})

    monkeypatch.setattr(Store, "put", slow)
    with pytest.raises(RunError, match="is being trained by process"):
        run.push()
    store = Store(ADDRESS)
    assert {"tokens": True, **{name: store.read(name) for name in store.names()}} == before


def test_of_two_new_runs_at_one_address_the_second_to_upload_is_refused(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    for run in (first, second):
        began(run)
        advance(run, 1)
    first.push()
    before = {name: first.store.read(name) for name in first.store.names()}
    with pytest.raises(RunError, match="memory://bucket/run was just filled by another process; use another run"):
        second.push()
    second.withdraw()
    assert {name: first.store.read(name) for name in first.store.names()} == before
    first.push()


def test_a_restart_finds_what_this_launch_left(tmp_path: Path) -> None:
    """Before anything was uploaded, the folder is left as it is; a folder of another launch is emptied."""
    run = opened(tmp_path / "a", restarted=True)
    write(run, "stale", b"")
    again = opened(tmp_path / "a", restarted=True)
    assert not again.folder.exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("sftp://host/run", "is not in an object store, so half-written files could be seen there; use s3, gs or az for run=..."),
        ("nothing://x", "is not in an object store"),
    ],
)
def test_other_file_systems_are_refused(address: str, message: str) -> None:
    with pytest.raises(RunError, match=message.replace(".", r"\.")):
        RemoteRun(address)


def test_an_object_outside_the_run_is_refused(tmp_path: Path) -> None:
    Store(ADDRESS).put(b"task: language", "spec.yaml")
    fsspec.filesystem("memory").store["/bucket/run/../evil"] = fsspec.filesystem("memory").store["/bucket/run/spec.yaml"]
    with pytest.raises(RunError, match="which is outside a run's folder; do not use this run"):
        opened(tmp_path, resume=True)
    assert not (tmp_path / "evil").exists()


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"memory://bucket/run is not a run: it has no spec.yaml; remove resume=True"):
        opened(tmp_path, resume=True)
    with pytest.raises(RunError, match=r"memory://bucket/run is not a run: it has no spec.yaml; pass the address of a run"):
        copy_of(ADDRESS, str(tmp_path))
    run = opened(tmp_path)
    began(run)
    advance(run, 1)
    run.push()
    with pytest.raises(RunError, match="memory://bucket/run already exists and is not empty; use resume=True to continue it"):
        opened(tmp_path)


def test_a_copy_to_read_follows_the_run(tmp_path: Path) -> None:
    assert folder_of("runs/x") == Path("runs/x")
    run = opened(tmp_path / "a")
    began(run)
    advance(run, 1, best=True)
    run.push()
    first = folder_of(ADDRESS, str(tmp_path / "b"))
    assert sorted(path.name for path in first.iterdir()) == ["metrics.jsonl", "spec.yaml", "weights.safetensors"]
    assert folder_of(ADDRESS, str(tmp_path / "b")) == first
    advance(run, 2, best=True)
    run.push()
    assert (folder_of(ADDRESS, str(tmp_path / "b")) / "weights.safetensors").read_bytes() == b"weights of step 2"


def test_a_store_that_fails_after_it_had_answered_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 74, after which the same command may succeed; one that lets nobody write is a mistake."""
    store = Store(ADDRESS, RunError)

    def fails(error: Exception) -> None:
        monkeypatch.setattr(store._files, "pipe_file", lambda *_: (_ for _ in ()).throw(error), raising=False)

    fails(OSError("503 Slow Down"))
    with pytest.raises(RunError, match="could not be written \\(503 Slow Down\\)") as found:
        store.put(b"", "x")
    assert not isinstance(found.value, ResourceError)
    store.names()
    with pytest.raises(ResourceError, match="could not be written \\(503 Slow Down\\)"):
        store.put(b"", "x")
    fails(PermissionError("Access Denied"))
    with pytest.raises(RunError, match="Access Denied") as found:
        store.put(b"", "x")
    assert not isinstance(found.value, ResourceError)


def test_a_run_that_another_process_took_over_stops_at_its_next_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_text("the carry is passed along. " * 40)
    given = parse(
        {
            "data": {"train": str(tmp_path / "train.txt"), "cache": str(tmp_path / "cache")},
            "model": {"hidden": 4, "layers": 1},
            "batch": {"lanes": 4, "steps": 8},
            "train": {"epochs": 50, "snapshot_every": 5},
        }
    )
    push, steps = RemoteRun.push, list[int]()

    def taken(self: RemoteRun) -> None:
        push(self)
        if (self.folder / "snapshots" / POINTER).is_file():
            self.store.put(b'{"token": "other", "pid": 7, "host": "there"}', "owner.json")
            steps.append(1)

    monkeypatch.setattr(RemoteRun, "push", taken)
    with pytest.raises(RunError, match="is being trained by process 7 on there since then"):
        train(given, run=ADDRESS, device="cpu")
    assert steps == [1]
    assert Store(ADDRESS).read(f"snapshots/{POINTER}") == b"step-00000005\n"
    local = RemoteRun(ADDRESS, str(tmp_path / "cache")).folder
    assert {path.name for path in (local / "snapshots").glob("step-*")} <= {"step-00000005", "step-00000010", "step-00000015"}
