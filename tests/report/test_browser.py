"""The report in a real browser: Debian's chromium through playwright. Skipped where either is missing:

apt-get install chromium && pip install playwright && pytest -m slow tests/report/test_browser.py
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import HOSTILE, write
from test_page import SAMPLES

from carrywave.report.live import LiveReport, server_of
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


class Page:
    """A page, and what it says where nobody looks."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which whatever can be named is named like a script."""
    folder = tmp_path_factory.mktemp("runs")
    workers = [{"rank": 0, "host": HOSTILE, "local_rank": 0, "replica": 0, "stage": 0}]
    plan = {"replicas": 1, "stages": 1, "cuts": [], "chunk_steps": None, "micro_batches": 1, "backends": [HOSTILE], "workers": workers}
    records = [read_run(write(folder / "a", train=HOSTILE, plan=plan), HOSTILE), read_run(write(folder / "b"), "plain")]
    (folder / "two.html").write_text(render(records, [SAMPLES, SAMPLES]))
    (folder / "one.html").write_text(render(records[1:], [SAMPLES]))
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_it_renders_without_a_word_in_the_console(browser: Any, hostile: Path, name: str, width: int, scheme: str) -> None:
    shown = Page(browser, f"file://{hostile / name}", width, scheme)
    assert shown.said == []
    assert [url for url in shown.asked if not url.startswith(("file:", "data:"))] == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width  # only tables and pictures scroll sideways
    drawn = shown.page.eval_on_selector_all("svg", "all => all.map(one => one.getBoundingClientRect()).map(r => r.width * r.height)")
    assert len(drawn) > 5
    assert min(drawn) > 1000
    light, dark = (sum(map(int, colour.strip("rgb()").split(","))) for colour in shown.page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
    ))  # fmt: skip
    assert (light > dark) == (scheme == "dark")
    shown.context.close()


def test_the_numbers_on_the_page_are_the_runs(browser: Any, hostile: Path) -> None:
    shown = Page(browser, f"file://{hostile / 'one.html'}")
    rows = [json.loads(line) for line in (hostile / "b" / "metrics.jsonl").read_text().splitlines()]
    best = min((row for row in rows if row["split"] == "valid"), key=lambda row: row["loss"])
    tiles = shown.page.eval_on_selector_all(".tile", "all => all.map(one => [...one.children].map(part => part.innerText))")
    named = {name: (value, note) for name, value, note in tiles}
    assert named["best validation loss"] == (f"{best['loss']:g}", f"at step {best['step']}, epoch 1")
    assert named["perplexity"][0] == f"{best['perplexity']:g}"
    assert named["restarts"] == ("1", "20 steps computed again")
    # The ring is drawn around the point of the best step.
    ring, dots = shown.page.evaluate(
        "(() => { const svg = document.querySelector('.chart'); const at = one => [one.getAttribute('cx'), one.getAttribute('cy')];"
        "return [at(svg.querySelector('.ring')), [...svg.querySelectorAll('.dot.c0')].map(at)]; })()"
    )
    assert ring == dots[[row["step"] for row in rows if row["split"] == "valid"].index(best["step"])]
    cells = shown.page.eval_on_selector_all(".matrix td", "all => all.map(one => one.innerText)")
    assert cells == ["7", "1", "2", "10"]
    widths = shown.page.eval_on_selector_all(".ranks tbody tr:first-child i", "all => all.map(one => one.getBoundingClientRect().width)")
    assert widths[0] == pytest.approx(sum(widths) / 2, rel=0.01)  # compute: 0.3 of 0.6 seconds
    shown.context.close()


def test_a_hostile_label_stays_text(browser: Any, hostile: Path) -> None:
    shown = Page(browser, f"file://{hostile / 'two.html'}")
    assert shown.page.title() != "gone"
    assert shown.page.evaluate("document.scripts.length") == 0
    assert HOSTILE in shown.text("h2.name")
    assert HOSTILE in shown.text("dl")
    assert HOSTILE in shown.text(".text pre")
    assert HOSTILE in shown.page.eval_on_selector_all(".matrix th span", "all => all.map(one => one.textContent)")
    assert shown.said == []
    shown.context.close()


def test_the_live_page_updates_by_itself(browser: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    server = server_of(LiveReport([(folder, "run")], None))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        shown = Page(browser, f"http://127.0.0.1:{server.server_port}/")
        with shown.page.expect_response("**/stamp"):  # it knows what it shows
            pass
        shown.page.click("summary")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"split": "valid", "epoch": 2, "step": 120, "loss": 1.5}) + "\n")
        shown.page.wait_for_selector(".tile .value:text-is('1.5')", timeout=30_000)
        assert shown.page.evaluate("document.querySelector('details').open")  # what was open stays open
        assert shown.said == []
        assert shown.text(".live") == "live"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    shown.page.wait_for_selector(".live.lost", timeout=30_000)
    shown.context.close()
