"""Where workers of a launch meet before they can communicate: each reports in the rendezvous store, rank 0 collects and gives orders.

Every wait has a limit, and whoever stays away is known by rank. Only text is exchanged. A `Guard` ends a process whose work takes too
long, after having said what it waited for: no hang of a network or a disk keeps the doctor from its report.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pydantic_core import to_json
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from carrywave.doctor.worker import Place
from carrywave.parallel.startup import native_logs

POLL_SECONDS = 0.05
ASK_SECONDS = 3.0  # for the store to answer a guard


class Meeting:
    """One worker's place at the meeting."""

    def __init__(self, store: Store, place: Place) -> None:
        self.place = place
        name = f"carrywave/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = PrefixStore(name, store)
        self._aside = PrefixStore(name, store.clone())  # type: ignore[attr-defined]  # for a thread, while the other one waits

    def tell(self, name: str, value: Any) -> None:
        """Tell something about this worker: what JSON can represent, or dataclasses."""
        self._store.set(f"{name}/{self.place.rank}", to_json(value).decode())

    def collect(self, name: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What these ranks reported, by rank, of those that did so in time."""
        deadline = time.monotonic() + seconds
        messages: dict[int, Any] = {}
        awaited = list(ranks)
        with suppress(RuntimeError):  # the store is gone
            while awaited:
                here = [rank for rank in awaited if self._store.check([f"{name}/{rank}"])]
                messages |= {rank: json.loads(self._store.get(f"{name}/{rank}")) for rank in here}
                awaited = [rank for rank in awaited if rank not in messages]
                if not awaited or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        return dict(sorted(messages.items()))

    def order(self, name: str, value: Any) -> None:
        """Tell all others what comes next; for rank 0."""
        self._store.set(f"order/{name}", json.dumps(value))

    def hear(self, name: str, seconds: float) -> Any:
        """What rank 0 said comes next; None if it did not say so in time."""
        try:
            with native_logs.silent():
                self._store.wait([f"order/{name}"], timedelta(seconds=seconds))
                return json.loads(self._store.get(f"order/{name}"))
        except RuntimeError:
            return None

    def where(self) -> dict[int, str]:
        """What each rank was about to do, as it last reported under `at`; may be called while another thread waits."""
        places: dict[int, str] = {}

        def ask() -> None:
            with suppress(RuntimeError):
                for rank in range(self.place.size):
                    if self._aside.check([f"at/{rank}"]):
                        places[rank] = json.loads(self._aside.get(f"at/{rank}"))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ASK_SECONDS)
        return dict(places)


class Guard:
    """Ends this process if its work takes longer than it may, after a last word."""

    def __init__(self, last_word: Callable[[str, float], None], *, end: Callable[[int], None] = os._exit) -> None:
        self._last_word, self._end = last_word, end
        self._what, self._seconds, self._deadline = "", 0.0, float("inf")
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="carrywave-guard", daemon=True).start()

    def allow(self, what: str, seconds: float) -> None:
        """From now on `what` may take so long."""
        with self._lock:
            self._what, self._seconds, self._deadline = what, seconds, time.monotonic() + seconds

    def done(self) -> None:
        """Nothing is left that could take long."""
        with self._lock:
            self._deadline = float("inf")

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                late = time.monotonic() > self._deadline
                what, seconds = self._what, self._seconds
            if late:
                try:
                    self._last_word(what, seconds)
                finally:
                    self._end(1)
                return


def behind(at: Mapping[int, str], order: Iterable[str]) -> tuple[list[int], str]:
    """The ranks that are furthest behind, and what they were about to do; `order` is that of the work. Pure."""
    places = {name: number for number, name in enumerate(order)}
    if not at:
        return [], ""
    least = min(at.values(), key=lambda name: places.get(name, -1))
    return sorted(rank for rank, name in at.items() if name == least), least
