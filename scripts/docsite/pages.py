"""Reads the project's Markdown: the pages of the site, their headings, and whether every link and picture leads somewhere.

Pages are CommonMark with tables, as GitHub shows them, and headings have GitHub's anchors: a link that works in a clone works on the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
NAV = Path(__file__).with_name("nav.yaml")


def parser() -> MarkdownIt:
    """Raw HTML is shown as text: pages are to read the same everywhere."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def slug(text: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def plain(inline: Token) -> str:
    """The words of a line, without its marks."""
    spaces = {"softbreak": " ", "hardbreak": " "}
    return "".join(spaces.get(each.type, "") or each.content * (each.type in ("text", "code_inline")) for each in inline.children or [])


@dataclass(frozen=True)
class Heading:
    """One heading of a page, with the anchor that leads to it."""

    level: int
    text: str
    anchor: str


@dataclass
class Page:
    """One Markdown file of the repository."""

    path: Path
    tokens: list[Token] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, parser().parse(path.read_text("utf-8")))

    @property
    def name(self) -> str:
        """The path as messages give it."""
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def headings(self) -> list[Heading]:
        found: list[Heading] = []
        seen: dict[str, int] = {}
        for token, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if token.type == "heading_open":
                anchor = slug(plain(inline))
                again = seen.get(anchor, 0)
                seen[anchor] = again + 1
                found.append(Heading(int(token.tag[1]), plain(inline), f"{anchor}-{again}" if again else anchor))
        return found

    @cached_property
    def anchors(self) -> frozenset[str]:
        return frozenset(heading.anchor for heading in self.headings)

    @property
    def title(self) -> str:
        return next((heading.text for heading in self.headings if heading.level == 1), "")

    def spans(self) -> Iterator[Token]:
        """Links, pictures and the like: the parts of all its lines."""
        for token in self.tokens:
            yield from token.children or []


@dataclass(frozen=True)
class Target:
    """Where a link leads: a file of the repository and an anchor in it, or an address elsewhere (no file)."""

    file: Path | None
    anchor: str = ""


class Broken(ValueError):
    """A link or a picture that leads nowhere."""


def target_of(page: Page, href: str) -> Target:
    """The target of a link on a page; one without a file is an address elsewhere."""
    address = urlsplit(href)
    if address.scheme or address.netloc:
        if address.scheme not in ("http", "https", "mailto"):
            raise Broken(f"{href} is no address that a browser opens")
        return Target(None)
    file = (page.path.parent / unquote(address.path)).resolve() if address.path else page.path
    if not file.is_relative_to(ROOT):
        raise Broken(f"{href} leads out of the repository")
    if file.is_dir():
        file = file / "README.md"
    if not file.is_file() and file != page.path:
        raise Broken(f"{href} leads to a file that does not exist")
    return Target(file, unquote(address.fragment))


class Library:
    """All Markdown pages: those of the site in order, and the README, which is checked like them."""

    def __init__(self) -> None:
        self._pages: dict[Path, Page] = {}
        groups = [(each["group"], [ROOT / name for name in each["pages"]]) for each in yaml.safe_load(NAV.read_text("utf-8"))]
        named = {path for _, paths in groups for path in paths}
        others = sorted(path for path in (ROOT / "docs").glob("*.md") if path not in named)
        groups.insert(-1, ("More", others))
        self.problems = [f"{NAV.relative_to(ROOT)}: {path.relative_to(ROOT)} does not exist" for path in named if not path.is_file()]
        self.groups = [(group, [self.page(path) for path in paths if path.is_file()]) for group, paths in groups if paths]
        self.readme = self.page(ROOT / "README.md")

    @property
    def pages(self) -> list[Page]:
        return [page for _, pages in self.groups for page in pages]

    def page(self, path: Path) -> Page:
        if path not in self._pages:
            self._pages[path] = Page.read(path)
        return self._pages[path]

    def check(self) -> list[str]:
        """What is wrong, one line each: titles, links, anchors, pictures."""
        return [*self.problems, *(problem for page in [self.readme, *self.pages] for problem in self.check_page(page))]

    def check_page(self, page: Page) -> list[str]:
        found = []
        if [heading.level for heading in page.headings].count(1) != 1:
            found.append(f"{page.name}: a page has one heading of the first level, its title")
        for span in page.spans():
            try:
                if span.type == "link_open":
                    self._check_link(page, str(span.attrs["href"]))
                elif span.type == "image":
                    self._check_picture(page, span)
            except Broken as broken:
                found.append(f"{page.name}: {broken}")
        return found

    def _check_link(self, page: Page, href: str) -> None:
        target = target_of(page, href)
        if not target.anchor or target.file is None:
            return
        if target.file.suffix != ".md":
            raise Broken(f"{href} names an anchor in a file that has none")
        if target.anchor not in (page if target.file == page.path else self.page(target.file)).anchors:
            raise Broken(f"{href} names a heading that {target.file.relative_to(ROOT)} does not have")

    def _check_picture(self, page: Page, span: Token) -> None:
        if target_of(page, str(span.attrs["src"])).file is None:
            raise Broken(f"the picture {span.attrs['src']} is elsewhere; keep it in docs/")
        if not span.content:
            raise Broken(f"the picture {span.attrs['src']} has no words for those who cannot see it")
