"""Data files by their address, in an object store or wherever else `fsspec` opens: fetched once into the cache.

Every failure of the library behind it becomes one line. What the store says of an object (tag, time, size) tells when it has changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from pathlib import Path, PurePosixPath

from carrywave.errors import DataError, UserError, one_line

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # at least two letters, unlike a drive
# What stores report about an object that changes when its content does.
MARKS = (
    "size",
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "crc32c",
    "version_id",
    "generation",
    "LastModified",
    "updated",
    "mtime",
    "created",
)
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


def fetch(address: str, where: Path) -> Path:
    """A copy of a data file, in the cache folder `where`: fetched if there is none yet, or if the store's has changed since."""
    draft: Path | None = None
    try:
        from fsspec.core import url_to_fs

        files, at = url_to_fs(address)
        files.invalidate_cache()
        info = files.info(at)
        if info.get("type") == "directory":
            raise IsADirectoryError("it is a folder")
        marks = {mark: str(info[mark]) for mark in MARKS if info.get(mark)}
        key = hashlib.sha256(json.dumps([address, marks], sort_keys=True).encode()).hexdigest()[:32]
        place = where / "fetched" / key / (PurePosixPath(address.partition("://")[2]).name or "data")
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
            files.get_file(at, str(draft))
            draft.replace(place)
        return place
    except ImportError as error:
        remedy = "install it: pip install 'carrywave[remote]' has that for s3"
        raise DataError(f"{address} needs a package that is not installed ({one_line(error, 200)}); {remedy}") from error
    except Exception as error:  # each library has its own classes
        fact = "not found" if isinstance(error, FileNotFoundError) else f"cannot be read ({one_line(error, 200) or type(error).__name__})"
        raise DataError(f"{address}: {fact}; check the address, the credentials and the connection") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)
