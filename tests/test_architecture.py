"""The picture of the package is drawn from its imports: it must be that of the source as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_picture_is_current() -> None:
    drawn = subprocess.run([sys.executable, ROOT / "scripts" / "architecture.py", "--check"], capture_output=True, text=True, check=False)
    assert drawn.returncode == 0, drawn.stderr


def test_files_that_the_page_names_are_there() -> None:
    """Names without a folder are looked for anywhere."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    source = ROOT / "src" / "carrywave"
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", text):
        assert (source / name).exists() or (ROOT / name).exists() or list(source.rglob(name)), name
    for name in re.findall(r"tests/[a-z_/]+(?:\.py)?", text):
        assert (ROOT / name).exists(), name
