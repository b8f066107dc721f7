"""The documentation site builds without a warning, every link in it leads somewhere, and no page needs the network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src", "object": "data"}
OUTSIDE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/)[\w.-]+\.\w+")  # a name space is no address that is fetched


@pytest.fixture(scope="module")
def builder() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        folder = ROOT / "scripts" / "docsite"
        patch.syspath_prepend(folder)
        # By its path: there is a package of the name `build`, which another test may have imported.
        spec = importlib.util.spec_from_file_location("docsite_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, found)  # where dataclasses look for their module
        spec.loader.exec_module(found)
        yield found


@pytest.fixture(scope="module")
def library(builder: ModuleType) -> Any:
    return builder.Library()


@pytest.fixture(scope="module")
def site(builder: ModuleType, library: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    assert builder.build(out, library) == []
    return out


class Reader(HTMLParser):
    """The anchors of a page, its links, and what a browser would load for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a":
            self.links.append(given["href"])
        if tag == "link":
            self.loaded.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loaded.append(given[LOADED[tag]])
        self.inline += [value for name, value in given.items() if name in ("style", "srcset", "onload", "onerror")]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    return {path: Reader(path) for path in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Reader]) -> None:
    assert len(pages) > 20
    for path, page in pages.items():
        for address in page.loaded:
            if address == "data:,":  # no icon
                continue
            assert not urlsplit(address).scheme, (path, address)
            assert not address.startswith("//"), (path, address)
            assert (path.parent / unquote(address)).is_file(), (path, address)
        assert page.inline == []
    for path in [*site.glob("*.css"), site / "search.js", *site.rglob("*.svg")]:
        assert OUTSIDE.findall(path.read_text("utf-8")) == [], path
        assert "@import" not in path.read_text("utf-8")


def test_every_link_of_the_site_leads_somewhere(site: Path, pages: dict[Path, Reader]) -> None:
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert target.is_file(), (path, link)
            if address.fragment:
                assert unquote(address.fragment) in pages[target].anchors, (path, link)


def test_every_page_can_be_reached(site: Path, pages: dict[Path, Reader]) -> None:
    """By following links from the first one."""
    reached, waiting = set(), [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        links = (urlsplit(link) for link in pages[path].links)
        waiting += [(path.parent / unquote(link.path)).resolve() for link in links if link.path and not link.scheme]
    assert set(pages) <= reached


def test_the_search_knows_every_page(site: Path, builder: ModuleType, library: Any) -> None:
    index = (site / "search-index.js").read_text("utf-8")
    places = {builder.place_of(page.path) for page in library.pages}
    assert {place for place in places if f'"at": "{place}"' not in index} == set()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](nowhere.md)", "nowhere.md leads to a file that does not exist"),
        ("[a](data.md#no-such-heading)", "data.md#no-such-heading names a heading that docs/data.md does not have"),
        ("[a](#nothing)", "#nothing names a heading that docs/trial.md does not have"),
        ("[a](../../elsewhere.md)", "../../elsewhere.md leads out of the repository"),
        ("[a](wavefront-grid.svg#part)", "wavefront-grid.svg#part names an anchor in a file that has none"),
        ("![a](https://pictures.example/a.png)", "the picture https://pictures.example/a.png is elsewhere; keep it in docs/"),
        ("![](wavefront-grid.svg)", "the picture wavefront-grid.svg has no words for those who cannot see it"),
        ("[a](javascript:alert(1))", None),  # no link at all to the parser
        ("# Another title", "a page has one heading of the first level, its title"),
        ("[a](data.md#text) [b](https://example.org/#anything) ![c](wavefront-grid.svg)", None),
    ],
)
def test_what_is_wrong_with_a_page_is_said(text: str, problem: str | None, builder: ModuleType, library: Any) -> None:
    page = builder.Page(ROOT / "docs" / "trial.md", builder.parser().parse(f"# Trial\n\n{text}\n"))
    assert library.check_page(page) == ([f"docs/trial.md: {problem}"] if problem else [])


def test_headings_have_the_anchors_of_github(builder: ModuleType) -> None:
    page = builder.Page(ROOT / "docs" / "trial.md", builder.parser().parse("# `a b`: c, *d* & e_f\n## Same\n## Same\n## – é 2 × 3\n"))
    assert [heading.anchor for heading in page.headings] == ["a-b-c-d--e_f", "same", "same-1", "-é-2--3"]


@pytest.mark.slow
def test_the_command_builds_into_an_ignored_folder() -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    built = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stderr
    assert "pages in build/site" in built.stdout
    assert (ROOT / "build/site/index.html").is_file()
    assert subprocess.run(["git", "check-ignore", "-q", "build/site/index.html"], cwd=ROOT, check=False).returncode == 0


def test_the_pictures_of_the_wavefront_are_current() -> None:
    drawn = subprocess.run([sys.executable, ROOT / "scripts" / "wavefront.py", "--check"], capture_output=True, text=True, check=False)
    assert drawn.returncode == 0, drawn.stderr
