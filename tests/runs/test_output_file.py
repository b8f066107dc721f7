"""Files that a user named: whole or not at all, links and devices as they were."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from carrywave.errors import UserError
from carrywave.runs import output_file

HAS_NODES = os.name == "posix" and os.getuid() == 0  # only root makes nodes of devices


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_plain_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    output_file.write(file, "é")
    assert file.read_text("utf-8") == "é"
    file.chmod(0o600)
    other = tmp_path / "hard"
    os.link(file, other)
    output_file.write(file, "second")
    assert (file.read_text(), other.read_text("utf-8")) == ("second", "é")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert names(tmp_path) == ["hard", "out.json"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("second")
    (tmp_path / "second").symlink_to("there/file")
    for text in ("new", "newer"):  # at first it leads to nothing
        output_file.check(tmp_path / "link")
        output_file.write(tmp_path / "link", text)
        assert (tmp_path / "there" / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "second").is_symlink()
    assert names(tmp_path / "there") == ["file"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "astray").symlink_to("none/file")
    for name, message in (("round", "cannot be written: "), ("folder", "is a folder; "), ("astray", "folder .*none not found; create it")):
        for refuse in (output_file.check, lambda path: output_file.write(path, "x")):
            with pytest.raises(UserError, match=message):
                refuse(tmp_path / name)
    assert names(tmp_path) == ["astray", "folder", "round"]


def test_an_address_in_a_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)  # where it would be written
    with pytest.raises(UserError, match=r"s3://bucket/out\.json is an address in a store"):
        output_file.write(Path("s3://bucket/out.json"), "text")
    assert names(tmp_path / "s3:" / "bucket") == []


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        output_file.check(path)
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()))  # noqa: B023
        reader.start()
        output_file.write(path, "a row\n" * 20_000)
        reader.join()
        assert read == ["a row\n" * 20_000]
        assert pipe.is_fifo()


@pytest.mark.skipif(not HAS_NODES, reason="only root makes nodes of devices")
def test_a_device_is_written_into(tmp_path: Path) -> None:
    null, full = tmp_path / "null", tmp_path / "full"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        output_file.write(null, "x")
    except PermissionError:
        pytest.skip("nodes of devices cannot be made or used here")
    with pytest.raises(UserError, match=r"full could not be written: No space left on device; free disk space, or use another path"):
        output_file.write(full, "x")
    assert null.is_char_device()
    assert full.is_char_device()
    assert names(tmp_path) == ["full", "null"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_standard_output_by_name_goes_on_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("before\n")
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    code = "import sys; from pathlib import Path; from carrywave.runs import output_file; output_file.write(Path(sys.argv[1]), 'row\\n')"
    for path in ("/proc/self/fd/1", str(tmp_path / "link")):
        with file.open("ab") as out:
            subprocess.run([sys.executable, "-c", code, path], stdout=out, check=True)
    assert file.read_text() == "before\nrow\nrow\n"


def test_half_a_pair_of_surrogates_stays_json(tmp_path: Path) -> None:
    output_file.write(tmp_path / "x", '"\ud83d"')
    assert (tmp_path / "x").read_bytes() == b'"\\ud83d"'


def _half_way(fault: type[BaseException]) -> str:
    raise fault


def test_a_file_written_piece_by_piece_appears_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("old")
    with output_file.OutputFile(file) as out:
        out.write("one ")
        assert file.read_text() == "old"
        assert names(tmp_path) == [".out.part", "out"]
        out.write("two")
    assert file.read_text() == "one two"
    for fault in (KeyboardInterrupt, ValueError):
        with pytest.raises(fault), output_file.OutputFile(file) as out:
            out.write(_half_way(fault))
    assert (file.read_text(), names(tmp_path)) == ("one two", ["out"])
