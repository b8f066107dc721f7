"""The door of a rendezvous: processes of another job that come to the same port are turned away before they count.

Jobs meet by mistake: two of them on the same hosts get the same port unless somebody chooses another. So the first process of a job puts up
a card in its store that says which job it is: a random salt, and for each fact about the job (its spec, its run, its hosts; or the id that
its launcher or its engine gave it) a digest. Whoever comes compares them with its own, and leaves if one differs. What the processes of
a job tell each other is kept in a room of the store, whose name follows from the card or from the same facts, so that whoever looks at no
card (an older version) touches nothing either.

With CARRYWAVE_SECRET in the environment of all processes, digests and names of rooms are keyed with it: without it, no card is understood
and no room found. It never travels. Torch-free.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from carrywave.errors import WorkerError
from carrywave.parallel.startup.launcher_env import JOB, worker_file
from carrywave.spec.spec import Spec

SECRET = "CARRYWAVE_SECRET"
HOSTS, WORKERS = "carrywave/door", "carrywave/workers/door"  # the card of a launch on several hosts; of workers that others started
FILES = ("train", "valid", "test", "cache")  # keys of a spec's data that may differ from host to host
WORDS = {"hosts": "hosts", "job": "job id", "launch": "launch", "run": "--run", "size": "number of workers", "spec": "spec"}

Job = Mapping[str, str]  # what is known of a job, by the name of the fact


class Store(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> Any: ...


def job_of(spec: Spec | None, run: str | Path | None) -> dict[str, str]:
    """What a user asked for, in a form that can be compared. Without a spec: one that cannot be read, which is reported elsewhere."""
    values = {} if spec is None else spec.model_dump(mode="json")
    for name in FILES:
        values.get("data", {}).pop(name, None)
    asked = "" if run is None else str(run)
    return {"spec": json.dumps(values, sort_keys=True), "run": asked if "://" in asked or not asked else os.path.normpath(asked)}


def job_of_worker(size: int, asked: Job | None) -> dict[str, str]:
    """What is known of this worker's job: the id of its launch, if there is one; otherwise what was asked for."""
    if launch := worker_file().launch:
        return {"launch": launch}
    for name in (JOB, "TORCHELASTIC_RUN_ID"):
        if os.environ.get(name, "") not in ("", "none"):  # torchrun's usual id, of every job
            return {"job": os.environ[name]}
    return {"size": str(size), **(asked or {})}


def room(job: Job, salt: str = "") -> str:
    """The name under which the processes of a job keep what they tell each other."""
    return _digest(salt, "room", json.dumps(dict(job), sort_keys=True))[:32]


def put_up(store: Store, where: str, job: Job) -> str:
    """Put up the card of this job at its door; returns the name of its room."""
    salt = secrets.token_hex(16)
    facts = {name: _digest(salt, name, value) for name, value in {**job, "secret": ""}.items()}
    store.set(where, json.dumps({"salt": salt, "run": job.get("run", ""), "facts": facts}))
    return room(job, salt)


def enter(store: Store, where: str, job: Job, address: str, seconds: float) -> str:
    """Wait for the card at the door, and compare; returns the name of the room, or refuses if it is that of another job."""
    try:
        store.wait([where], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise WorkerError(f"the program at {address} is not the first host of this job; start it there, or choose another port") from error
    salt = compare(store, where, job, address)
    return room(job, salt)


def compare(store: Store, where: str, job: Job, address: str) -> str:
    """Refuse if the card at the door is that of another job; returns its salt, or nothing if there is no card."""
    if not store.check([where]):
        return ""
    card = json.loads(store.get(where))
    salt, theirs = str(card["salt"]), card["facts"]
    ours = {name: _digest(salt, name, value) for name, value in {**job, "secret": ""}.items()}
    if ours == theirs:
        return salt
    remedy = "choose another port, or start every host and worker with the same command"
    if ours["secret"] != theirs.get("secret"):
        raise WorkerError(f"{_named(card)} uses {address}, with another {SECRET} than is set here; choose another port, or set the same")
    other = [WORDS.get(name, name) for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    raise WorkerError(f"{_named(card)} uses {address} (it has another {' and another '.join(other)}); {remedy}")


def holder(store: Store) -> str | None:
    """Which job has a store, in words; None if it has no card."""
    key = next((where for where in (HOSTS, WORKERS) if store.check([where])), None)
    return None if key is None else _named(json.loads(store.get(key)))


def _named(card: Mapping[str, Any]) -> str:
    run = str(card["run"])
    return f"another job (run {run if len(run) <= 60 else '…' + run[-57:]})" if run else "another job"


def _digest(salt: str, name: str, value: str) -> str:
    return hmac.new(os.environ.get(SECRET, "").encode(), f"{salt} {name} {value}".encode(), hashlib.sha256).hexdigest()
