"""The report in a real browser: Debian's chromium through playwright. Skipped where either is missing:

apt-get install chromium && pip install playwright && pytest -m slow tests/report/test_browser.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import HOSTILE, write
from test_page import SAMPLES

from carrywave.report.page import render
from carrywave.report.record import read_run

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright; pip install playwright")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root, in a container
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_renders_without_a_word_in_the_console(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    """A report in which whatever can be named is named like a script."""
    file = tmp_path / "report.html"
    file.write_text(render(read_run(write(tmp_path / "run", train=HOSTILE), HOSTILE), SAMPLES))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, said, asked = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.title() != "gone"
    assert page.evaluate("document.scripts.length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways
    drawn = page.eval_on_selector_all("svg", "all => all.map(one => one.getBoundingClientRect()).map(r => r.width * r.height)")
    assert len(drawn) > 5
    assert min(drawn) > 1000
    light, dark = (sum(map(int, colour.strip("rgb()").split(","))) for colour in page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
    ))  # fmt: skip
    assert (light > dark) == (scheme == "dark")
    context.close()
