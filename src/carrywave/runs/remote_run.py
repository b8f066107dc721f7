"""A `RemoteRun` keeps a run in an object store: it is trained in a folder of this host's cache, and uploaded from there.

The order of uploads is what makes a kill harmless: the files of a snapshot, then its manifest, then metrics and weights, and only then the
pointer `last`. So `last` always names a snapshot that is complete in the store, and the metrics there reach at least as far. An object
store shows an object as a whole or not at all; other remote file systems are refused.

One process at a time uploads: it leaves a token in the store, and stops once another one has left its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from carrywave.data.files import cache, remote
from carrywave.data.files.remote import Store
from carrywave.errors import RunError, TakenOver, UserError, option
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.manifest import MANIFEST, is_plain
from carrywave.runs.checkpoint.own_weights import METRICS
from carrywave.runs.checkpoint.snapshot import BEST, NONE_YET, POINTER
from carrywave.runs.run_place import BANDS, INITIAL, LINEAR

WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "memory", "file", "local")  # show objects as a whole
SNAPSHOTS, SPEC = "snapshots", "spec.yaml"
TOKEN = owner.FILE  # in the store; the file of that name in the local folder stays there
NEEDED = (SPEC, "plan.json", "codec.json", "facts.json", LINEAR, BANDS, "weights.safetensors", METRICS)  # to evaluate and to predict


class RemoteRun:
    """A run at an address, and its folder on this host."""

    def __init__(self, address: str, cache_setting: str | None = None) -> None:
        if remote.kind_of(address) not in WHOLE:
            raise RunError(
                f"{address} is not in an object store, so half-written files could be seen there; "
                f"use s3, gs or az for {option('run')}, or a folder that is mounted"
            )
        self.store = Store(address, RunError)
        self.address = self.store.address
        self.folder = cache.folder(cache_setting).absolute() / "runs" / _slug(self.address)
        self._token = ""
        self._is_new = False  # there was nothing in the store
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of files when they were last uploaded
        self._stored_names: set[str] = set()  # names in the store

    @property
    def _note(self) -> Path:
        """The file beside the folder that holds the last token of this host."""
        return self.folder.with_name(f"{self.folder.name}.json")

    # Before training

    def prepare(self, *, resume: bool, restarted: bool, hold: Callable[[str], None] | None) -> None:
        """Make the folder on this host what the store has, or check that there is nothing yet. The store is not changed.

        `hold` is called with what this waits for; with None, the run is only inspected.
        """
        self._stored_names = self.store.names()
        run = self._stored_names - {TOKEN}
        if all(name.partition("/")[0] in INITIAL or name == f"{SNAPSHOTS}/{NONE_YET}" for name in run):
            run = set()  # what a process leaves that is killed during its first upload: nothing was trained
        self._is_new = not resume and not restarted
        if self._is_new and run:
            self._refuse()
        if resume and SPEC not in run:
            raise RunError(f"{self.address} is not a run: it has no spec.yaml; remove {option('resume')} to start a new one")
        self.folder.mkdir(parents=True, exist_ok=True)
        claim = None if hold is None else owner.take(self.folder, hold)
        try:
            if self._is_new:
                _empty(self.folder)
            elif not run and launch_record.find(self.folder, "") is None:
                _empty(self.folder)  # not what an earlier attempt of this launch left before its first upload
            elif run and not self._is_ahead():
                self._pull(run)
        finally:
            if claim is not None:
                claim.release()
        with suppress(OSError):
            self.folder.rmdir()  # a new run creates it itself

    def _refuse(self) -> None:
        if f"{SNAPSHOTS}/{POINTER}" in self._stored_names:
            raise RunError(
                f"{self.address} already exists and is not empty; use {option('resume')} to continue it, or use another {option('run')}"
            )
        remedy = f"use {option('resume')} to start it over" if f"{SNAPSHOTS}/{NONE_YET}" in self._stored_names else "remove what is there"
        raise RunError(f"{self.address} has objects, but no snapshot to continue from; {remedy}, or use another {option('run')}")

    def _is_ahead(self) -> bool:
        """True if this host was the last to upload: its folder has all that the store has, and perhaps more."""
        try:
            ours = json.loads(self._note.read_bytes())["token"]
            theirs = json.loads(self.store.read(TOKEN) or b"{}").get("token")
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return bool(ours) and ours == theirs and (self.folder / SNAPSHOTS / POINTER).is_file()

    def _claim(self) -> None:
        """Become the one who uploads, before anything else is uploaded; of a new run only if nobody else has begun one meanwhile."""
        if self._is_new and self.store.names() != self._stored_names:
            raise RunError(f"{self.address} was just filled by another process; use another {option('run')}")
        self._token = secrets.token_hex(8)
        note = json.dumps({"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        self.store.put(note, TOKEN)
        with atomic_files.writing(str(self._note)):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(self._note, note)

    def _pull(self, run: set[str]) -> None:
        """Fetch the run as far as it is needed to go on: everything but old snapshots."""
        pointers = {name: self._pointed(name) for name in (POINTER, BEST) if f"{SNAPSHOTS}/{name}" in run}
        wanted = {name for name in run if not name.startswith(f"{SNAPSHOTS}/")} | ({f"{SNAPSHOTS}/{NONE_YET}"} & run)
        for named in pointers.values():
            wanted |= {name for name in run if name.startswith(f"{SNAPSHOTS}/{named}/")}
        if bad := [name for name in wanted if not all(is_plain(part) for part in name.split("/"))]:
            raise RunError(f"{self.address} has the object {bad[0]!r}, which is outside a run's folder; do not use this run")
        with atomic_files.writing(str(self.folder)):
            _empty(self.folder)
            for name in sorted(wanted):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self.store.get(name, path)
                self._sent[name] = _sign(path)
            for name, named in pointers.items():
                atomic_files.write_bytes(self.folder / SNAPSHOTS / name, f"{named}\n".encode())

    def _pointed(self, pointer: str) -> str:
        named = (self.store.read(f"{SNAPSHOTS}/{pointer}") or b"").decode(errors="replace").strip()
        if not is_plain(named):
            raise RunError(f"{self.address}/{SNAPSHOTS}/{pointer} does not name a snapshot; replace its content with the name of one")
        return named

    # While training, on one worker

    def push(self) -> None:
        """Upload what is new, so that the store has a run that can be resumed at any instant; can be called from any thread."""
        if not self._token:
            self._claim()
        folders = self._snapshots()
        for folder in folders:
            self._push_snapshot(folder)
        others = {path.relative_to(self.folder).as_posix(): path for path in _others(self.folder)}
        last = {name: path for name in (POINTER, BEST) if (path := self.folder / SNAPSHOTS / name).is_file()}
        if not last and (self.folder / SNAPSHOTS / NONE_YET).is_file():
            self._push(self.folder / SNAPSHOTS / NONE_YET, f"{SNAPSHOTS}/{NONE_YET}")
        for name in sorted(others, key=lambda name: (name == SPEC and not last, name)):  # there is a run to start over with its spec
            self._push(others[name], name)
        for name, path in last.items():
            self._push(path, f"{SNAPSHOTS}/{name}")
        kept = {folder.name for folder in folders} | {POINTER, BEST}
        old = {name for name in self._stored_names if name.startswith(f"{SNAPSHOTS}/") and name.split("/")[1] not in kept}
        if not folders:
            old -= {f"{SNAPSHOTS}/{NONE_YET}"}
        self._check()
        # Manifests first: what is left of a snapshot without one is not taken for a snapshot.
        self.store.remove(sorted(old, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)))
        self._stored_names -= old

    def withdraw(self) -> None:
        """Remove everything, because the run failed before it had anything to resume from."""
        with suppress(RunError):
            if not self._token:
                return  # nothing was uploaded
            self._check()
            self.store.remove(sorted(self.store.names()))

    def _check(self) -> None:
        """Raise if another process has claimed the run since."""
        claim = json.loads(self.store.read(TOKEN) or b"{}")
        if claim.get("token") != self._token:
            who = f"process {claim['pid']} on {claim['host']}" if "pid" in claim and "host" in claim else "another process"
            fact = f"{self.address} is being trained by {who} since then, so nothing more is uploaded"
            raise TakenOver(f"{fact}; use another {option('run')}")

    def _snapshots(self) -> list[Path]:
        where = self.folder / SNAPSHOTS
        entries = sorted(where.iterdir()) if where.is_dir() else []
        return [entry for entry in entries if not entry.name.startswith(".") and (entry / MANIFEST).is_file()]

    def _push_snapshot(self, folder: Path) -> None:
        prefix = f"{SNAPSHOTS}/{folder.name}/"
        manifest = (folder / MANIFEST).read_bytes()
        if self._sent.get(f"{prefix}{MANIFEST}") == _sign(folder / MANIFEST):
            return
        if f"{prefix}{MANIFEST}" in self._stored_names:
            if self.store.read(f"{prefix}{MANIFEST}") == manifest:
                return
            self.store.remove([f"{prefix}{MANIFEST}"])
        for path in sorted(folder.iterdir()):
            if path.name != MANIFEST:
                self._push(path, f"{prefix}{path.name}")
        self._push(folder / MANIFEST, f"{prefix}{MANIFEST}")

    def _push(self, path: Path, name: str) -> None:
        sign = _sign(path)
        if self._sent.get(name) != sign:
            self._check()  # before each, as an upload may take long
            self.store.put(path, name)
            self._sent[name] = sign
            self._stored_names.add(name)


def copy_of(address: str, cache_setting: str | None = None, also: Sequence[str] = ()) -> Path:
    """A folder on this host with what evaluation and prediction need of a run in a store, and `also` these files."""
    store = Store(address, RunError)
    names = store.names()
    wanted = [name for name in (*NEEDED, *also) if name in names]
    if SPEC not in wanted:
        raise RunError(f"{address} is not a run: it has no spec.yaml; pass the address of a run, such as s3://bucket/runs/words")
    marks = {name: store.marks(name) for name in wanted}
    key = hashlib.sha256(json.dumps([store.address, marks], sort_keys=True).encode()).hexdigest()[:16]
    place = cache.folder(cache_setting).absolute() / "runs" / f"{_slug(store.address)}-{key}"
    with atomic_files.writing(str(place)):
        for name in wanted:
            if not (place / name).is_file():
                place.mkdir(parents=True, exist_ok=True)
                draft = place / f".{name}.{secrets.token_hex(4)}"
                try:
                    store.get(name, draft)
                    draft.replace(place / name)
                finally:
                    draft.unlink(missing_ok=True)
    return place


def folder_of(run: Path | str, cache_setting: str | None = None, also: Sequence[str] = ()) -> Path:
    """The folder of a run that is only read: the folder itself, or a copy of one in a store."""
    return copy_of(run, cache_setting, also) if isinstance(run, str) and remote.is_address(run) else Path(run)


def _others(folder: Path) -> Iterator[Path]:
    """The files of a run besides its snapshots, without those that stay on this host or are being written."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        local = parts[0] == SNAPSHOTS or parts == (owner.FILE,) or any(part.startswith(".") for part in parts)
        if path.is_file() and not path.is_symlink() and not local:
            yield path


def _empty(folder: Path) -> None:
    """Remove everything in a folder but its owner file."""
    for entry in _entries(folder):
        if entry.name != owner.FILE:
            atomic_files.remove(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _sign(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _slug(address: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", address)[-60:].strip("-.")
    return f"{plain}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"
