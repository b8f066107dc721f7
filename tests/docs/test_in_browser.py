"""The site in a real browser, opened as files: a quiet console, nothing fetched from elsewhere, no page wider than the screen, search.

Needs playwright (pip install playwright) and Debian's chromium; skipped where either is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    build = f"import sys; from pathlib import Path; from build import *; sys.exit(bool(build(Path({str(out)!r}), Library())))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts" / "docsite")}
    subprocess.run([sys.executable, "-c", build], env=environment, check=True)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as engine:
        started = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_every_page_is_quiet_and_fits(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
    files = sorted(site.rglob("*.html"))
    assert len(files) > 20
    for file in files:
        page.goto(file.as_uri())
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{file.name} is {wider} pixels wider than the screen"
    assert complaints == []
    page.close()


def test_pictures_keep_their_size_on_a_phone(site: Path, browser: Any) -> None:
    """Their smallest text has 10 of 1,000 units; at the width of a phone it would be 4 pixels high."""
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto((site / "index.html").as_uri())
    assert page.evaluate("document.querySelector('main img').getBoundingClientRect().width") > 600
    page.close()


def test_the_search_finds_a_section(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("vocabulary split over replicas")
    page.wait_for_selector("#found a")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/parallel.html#a-vocabulary-split-over-replicas")
    page.keyboard.press("/")
    page.keyboard.type("zzzz no such words")
    page.wait_for_selector("#found .none")
    page.close()


def test_the_menu_is_open_where_there_is_room(site: Path, browser: Any) -> None:
    for width, is_open in ((1400, True), (390, False)):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((site / "clusters.html").as_uri())
        assert page.evaluate("document.getElementById('menu').open") is is_open
        assert page.is_visible("nav a[aria-current=page]") is is_open
        page.close()
