"""A `Store` is a folder in an object store, or whatever else `fsspec` opens by its address: `s3://bucket/folder`, `memory://`, `file://`.

Every failure of the library behind it becomes one line. Data files are fetched once per host into the cache folder, and read there as any
other file; the store's own marks (entity tag, checksum, time, size) tell when one has changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from carrywave.errors import DataError, ResourceError, UserError, from_system, one_line

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # at least two letters, unlike a drive
# What stores report about an object that changes when its content does.
MARKS = ("ETag", "etag", "md5Hash", "md5", "content_md5", "crc32c", "checksum", "version_id", "VersionId", "generation")
TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
# How paths begin that were made from addresses of the usual stores.
FIRST_PARTS = ("s3:", "s3a:", "gs:", "gcs:", "az:", "abfs:", "abfss:", "oss:", "oci:", "tos:", "memory:", "file:", "http:", "https:")


def is_address(name: object) -> bool:
    """True if a name is an address in a store, not a path."""
    return isinstance(name, str) and ADDRESS.match(name) is not None


def check_local(path: Path, error: type[UserError] = UserError) -> None:
    """Refuse to write to a path that was an address before it became one: it would be a folder `s3:` of this machine."""
    if len(path.parts) > 1 and path.parts[0] in FIRST_PARTS:
        address = f"{path.parts[0]}//{'/'.join(path.parts[1:])}"
        raise error(f"{address} is an address in a store, but only a path on this machine can be used here; write there, then copy it")


class Store:
    """A folder in a store, and everything below it. Names are relative to it, with slashes."""

    def __init__(self, address: str, error: type[UserError] = DataError) -> None:
        self.address, self._error = address.rstrip("/"), error
        self._answered = False  # it has done something that was asked of it: what fails later is no mistake in the address
        with self._one_line_errors("cannot be opened"):
            from fsspec.core import url_to_fs

            try:
                self._files, root = url_to_fs(self.address)
            except ImportError as missing:
                raise error(
                    f"{self.address} needs a package that is not installed ({one_line(missing, 200)}); "
                    "install it: pip install 'carrywave[remote]' has that for s3"
                ) from missing
        self._root = str(root).rstrip("/")
        self._answered = False  # opening it asks nothing of it

    def marks(self, name: str = "") -> dict[str, str]:
        """What the store says of an object: its size, and what changes whenever its content does."""
        with self._one_line_errors("cannot be read", name):
            self._files.invalidate_cache()
            info = self._files.info(self._at(name))
            if info.get("type") == "directory":
                raise IsADirectoryError("it is a folder")
            strong = {mark: str(info[mark]) for mark in MARKS if info.get(mark)}
            weak = {mark: str(info[mark]) for mark in TIMES if info.get(mark)}
            return {"size": str(info.get("size")), **(strong or weak)}

    def get(self, name: str, path: Path) -> None:
        """Copy an object into a file."""
        with self._one_line_errors("cannot be read", name):
            self._files.get_file(self._at(name), str(path))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _one_line_errors(self, what: str, name: str = "") -> Iterator[None]:
        """Turn whatever the library raises into one line."""
        try:
            yield
            self._answered = True
        except UserError:
            raise
        except Exception as error:  # each library has its own classes
            where = f"{self.address}/{name}" if name else self.address
            fact = "not found" if isinstance(error, FileNotFoundError) else f"{what} ({one_line(error, 200) or type(error).__name__})"
            mistake = not self._answered or isinstance(error, FileNotFoundError | PermissionError)
            kind = self._error if mistake else ResourceError
            raise kind(f"{where}: {fact}; check the address, the credentials and the connection") from error


def fetch(address: str, where: Path) -> Path:
    """A copy of a data file, in the cache folder `where`: fetched if there is none yet, or if the store's has changed since."""
    store = Store(address)
    marks = store.marks()
    key = hashlib.sha256(json.dumps([store.address, marks], sort_keys=True).encode()).hexdigest()[:32]
    place = where / "fetched" / key / (PurePosixPath(store.address.partition("://")[2]).name or "data")
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            store.get("", draft)
            draft.replace(place)
    except OSError as error:
        reason = error.strerror or str(error)
        fact, remedy = f"{store.address} cannot be kept in {place.parent} ({reason})", "set $CARRYWAVE_CACHE to another folder"
        raise from_system(error, DataError)(f"{fact}; {remedy}") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return place
