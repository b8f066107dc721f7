"""Standard input as data: lines are read as they arrive; what must be read twice is kept in a temporary file for the time."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrywave.data.files.source import FORMATS, HEAD_BYTES, STANDARD_FOLDER, STANDARD_INPUT, Format, Source
from carrywave.errors import DataError
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import World, from_rank_0, join
from carrywave.runs.run import Run
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec

DASH = "-"
SUFFIXES: dict[Format, str] = {"text": ".txt", "jsonl": ".jsonl", "csv": ".csv", "parquet": ".parquet"}


def is_standard(data: Any) -> bool:
    """True if data is to be read from standard input."""
    return isinstance(data, str | Path) and str(data) == DASH


@dataclass(frozen=True)
class Stream(Source):
    """A source that is read once, as it arrives."""

    stream: Any = None

    def head(self) -> bytes:
        """Return the first bytes, which are still to be read."""
        return bytes(self.stream.peek(HEAD_BYTES)[:HEAD_BYTES])

    def blocks(self) -> Iterator[bytes]:
        """Yield what has arrived, in blocks."""
        while block := self.stream.read1(self.block_bytes):
            yield block


def open_stream(spec: Spec) -> Stream:
    """Standard input, in the format that the spec says, or that its first bytes and the run's training file suggest."""
    stream = None if sys.stdin is None else getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise DataError("standard input is closed; open it, or pass a file instead of -")
    if launched() and sys.stdin.isatty():
        raise DataError("workers cannot read from a terminal; pipe the data into the command, or pass a file instead of -")
    head = stream.peek(64)
    kind = _format(head, spec)
    return Stream(STANDARD_INPUT, None, kind, stream=stream)


def _format(head: bytes, spec: Spec) -> Format:
    format = spec.data.format
    if format != "auto":
        return format
    if head.startswith(b"PAR1"):
        return "parquet"
    if spec.task == "language":
        return "text"  # a prompt for each line, whatever its first character
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[")):
        return "jsonl"
    suffixes = [] if spec.data.train is None else [FORMATS.get(suffix.lower()) for suffix in Path(spec.data.train).suffixes]
    of_train = next((kind for kind in reversed(suffixes) if kind is not None), None)
    return of_train if of_train in ("text", "csv") else "csv" if spec.reads_series else "jsonl"


@contextmanager
def data_on_all(data: str | None, run: Path | str, device: str) -> Iterator[Path | None]:
    """Standard input, if that is the data, as a file that the workers of this host can read. Collective."""
    if data != DASH:
        yield None
        return
    world = join(device)
    with ExitStack() as stack:
        yield kept_on_all(world, stack, lambda: load_own(Run.open(Path(run)).path / "spec.yaml"))


def kept_on_all(world: World, stack: ExitStack, spec: Callable[[], Spec]) -> Path:
    """A file with all of standard input, until the stack is left; rank 0 reads it and the spec, which says its format. Collective."""
    return Path(from_rank_0(world, lambda: str(stack.enter_context(kept_in_a_file(open_stream(spec())))), no_timeout=True))


@contextmanager
def kept_in_a_file(source: Stream) -> Iterator[Path]:
    """A temporary file with all of standard input."""
    with tempfile.TemporaryDirectory(prefix=STANDARD_FOLDER) as folder:
        path = Path(folder) / f"data{SUFFIXES[source.format]}"
        with path.open("wb") as file:
            shutil.copyfileobj(source.stream, file, 1 << 20)
        yield path
