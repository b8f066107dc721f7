"""Serves a report on this machine alone, and keeps it up to date while the runs go on.

The server listens on the loopback address. A page of another origin cannot read it: requests whose Host is not the server's own are
refused (a name that is made to resolve to 127.0.0.1 would otherwise pass for it), and nothing can be changed through it.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from carrywave.errors import UserError
from carrywave.report.page import render
from carrywave.report.record import WEIGHTS, read_run, stamp
from carrywave.report.sample_kinds import Samples

ADDRESS = "127.0.0.1"
Sampler = Callable[[Path], Samples]


class LiveReport:
    """The page of some runs as their files are now. Samples are computed in the background, again only when the weights have changed."""

    def __init__(self, runs: Sequence[tuple[Path, str]], sampler: Sampler | None) -> None:
        self.runs, self.sampler = runs, sampler
        self._samples: dict[Path, tuple[object, Samples]] = {}
        self._busy: set[Path] = set()  # whose samples are being computed
        self._lock = threading.Lock()  # over both

    def stamp(self) -> str:
        """A text that changes when a run's files do."""
        with self._lock:
            sampled = [self._samples.get(folder, ("",))[0] for folder, _ in self.runs]
        state = [(str(folder), stamp(folder), read_run(folder).trained_now, sampled) for folder, _ in self.runs]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def page(self, nonce: str) -> str:
        """The page as the files are now."""
        records = [read_run(folder, name) for folder, name in self.runs]
        return render(records, [self._of(folder) for folder, _ in self.runs], live=nonce)

    def _of(self, folder: Path) -> Samples | None:
        if self.sampler is None:
            return None
        weights = [each for each in stamp(folder) if each[0] == WEIGHTS]
        with self._lock:
            computed = self._samples.get(folder)
            if (computed is None or computed[0] != weights) and folder not in self._busy:
                self._busy.add(folder)
                threading.Thread(target=self._compute, args=(self.sampler, folder, weights), daemon=True).start()
        return Samples("Samples are being computed.") if computed is None else computed[1]

    def _compute(self, sampler: Sampler, folder: Path, weights: object) -> None:
        try:
            samples = sampler(folder)
        except Exception as error:  # shown where a person looks; the rest of the page is still true
            samples = Samples(f"No samples: {type(error).__name__}: {error}")
        with self._lock:
            self._samples[folder] = weights, samples
            self._busy.discard(folder)


def server_of(report: LiveReport, port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address that is not yet serving; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # a reader that leaves early is no fault
                try:
                    self._serve()
                except UserError as error:  # the folder is gone
                    self._answer(404, "text/plain", str(error))

        def _serve(self) -> None:
            port_here = server.server_port
            if self.headers.get("Host") not in (f"{ADDRESS}:{port_here}", f"localhost:{port_here}"):
                self._answer(403, "text/plain", "this report is served to this machine only")
            elif self.path == "/":
                self._answer(200, "text/html", report.page(secrets.token_urlsafe(12)))
            elif self.path == "/stamp":
                self._answer(200, "text/plain", report.stamp())
            else:
                self._answer(404, "text/plain", "there is only the report, at /")

        def _answer(self, code: int, kind: str, text: str) -> None:
            data = text.encode(errors="backslashreplace")
            self.send_response(code)
            for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            for name, value in (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *words: object) -> None:
            """Say nothing: a person looks at the page, not at the log."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used: {error.strerror or error}; use another --port, or none") from error
    return server
