"""Builds the documentation site: plain HTML files that need no server, no network and no build tool but Python.

    python scripts/docsite/build.py      # into build/site; exits with 1, and says why, if anything is wrong

The site has every page that nav.yaml lists, each source file that a page links to, the pictures, one style sheet, and a search that runs
in the browser over an index which is a file of the site.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import jinja2
from markdown_it.token import Token
from pages import ROOT, Broken, Library, Page, parser, plain, target_of
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

HERE = Path(__file__).parent
OUT = ROOT / "build" / "site"
ASSETS = ("style.css", "search.js")
FORMAT = HtmlFormatter(nowrap=True)


def place_of(file: Path) -> str:
    """The address, within the site, of the page made from a file of the repository."""
    name = file.relative_to(ROOT)
    if name.as_posix() == "README.md":
        return "index.html"
    if name.as_posix() == "examples/README.md":
        return "examples.html"
    if name.suffix == ".md":
        return f"{name.stem.lower()}.html"
    if name.suffix in (".svg", ".png"):
        return f"pictures/{name.name}"
    return f"source/{name.as_posix()}.html"


def coloured(code: str, language: str) -> str:
    """Code as HTML. An unknown language is a mistake on the page."""
    return str(highlight(code, get_lexer_by_name(language), FORMAT))


class Body:
    """The body of a page as HTML: links are those of the site, headings have anchors, wide tables scroll by themselves.

    `uses` is what it needs besides: pictures to copy, sources to show.
    """

    def __init__(self, page: Page, library: Library) -> None:
        self.page, self.library = page, library
        self.uses: set[Path] = set()
        self._anchors = iter([heading.anchor for heading in page.headings])
        self._anchor = ""
        markdown = parser()
        rules = ("fence", "heading_open", "heading_close", "link_open", "text", "image")
        markdown.renderer.rules |= {name: getattr(self, f"_{name}") for name in rules}
        markdown.renderer.rules |= {"table_open": lambda *_: '<div class="wide"><table>\n', "table_close": lambda *_: "</table></div>\n"}
        self.html = markdown.renderer.render(page.tokens, markdown.options, {})

    def _address(self, href: str) -> str:
        target = target_of(self.page, href)
        if target.file is None:
            return href
        if target.file.suffix != ".md":
            self.uses.add(target.file)
        return place_of(target.file) + (f"#{target.anchor}" if target.anchor else "")

    def _link_open(self, tokens: list[Token], index: int, *_: object) -> str:
        return f'<a href="{escape(self._address(str(tokens[index].attrs["href"])))}">'

    def _text(self, tokens: list[Token], index: int, *_: object) -> str:
        text = tokens[index].content
        if index and tokens[index - 1].type == "link_open":
            file = target_of(self.page, str(tokens[index - 1].attrs["href"])).file
            if file is not None and file.suffix == ".md" and text.endswith(file.name):
                text = self.library.page(file).title  # in a clone a file's name says where to look; here its title does
        return escape(text, quote=False)

    def _image(self, tokens: list[Token], index: int, *_: object) -> str:
        return f'<img src="{escape(self._address(str(tokens[index].attrs["src"])))}" alt="{escape(tokens[index].content)}">'

    def _heading_open(self, tokens: list[Token], index: int, *_: object) -> str:
        self._anchor = next(self._anchors)
        return f'<{tokens[index].tag} id="{escape(self._anchor)}">'

    def _heading_close(self, tokens: list[Token], index: int, *_: object) -> str:
        tag = tokens[index].tag
        link = f' <a class="here" href="#{escape(self._anchor)}" aria-label="link to this section">#</a>' if tag != "h1" else ""
        return f"{link}</{tag}>\n"

    def _fence(self, tokens: list[Token], index: int, *_: object) -> str:
        language, code = tokens[index].info.strip(), tokens[index].content
        return f'<pre class="code" tabindex="0"><code>{coloured(code, language) if language else escape(code, quote=False)}</code></pre>\n'


def sections(page: Page) -> Iterator[dict[str, str]]:
    """What the search finds: each section of a page with its words."""
    headings = iter(page.headings)
    found = {"page": page.title, "title": page.title, "at": place_of(page.path), "text": ""}
    inside = False
    for token in page.tokens:
        if token.type == "heading_open":
            heading = next(headings)
            if heading.level > 1:
                yield found
                found = {"page": page.title, "title": heading.text, "at": f"{place_of(page.path)}#{heading.anchor}", "text": ""}
            inside = True
        elif token.type == "heading_close":
            inside = False
        elif not inside and token.type in ("inline", "fence", "code_block"):
            found["text"] += " " + (plain(token) if token.type == "inline" else token.content)
    yield found


def source_page(file: Path) -> str:
    """The body of a page that shows a source file."""
    text = file.read_text("utf-8")
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return f'<h1>{file.relative_to(ROOT)}</h1>\n<pre class="code" tabindex="0"><code>{highlight(text, lexer, FORMAT)}</code></pre>\n'


def build(out: Path, library: Library) -> list[str]:
    """Write the site to a folder that does not exist yet. What is wrong is returned, one line each, and then nothing is written."""
    problems = library.check()
    made: dict[Path, Body] = {}
    for page in library.pages:
        try:
            made[page.path] = Body(page, library)
        except Broken:
            pass  # the library's check names it
        except ClassNotFound as unknown:
            problems.append(f"{page.name}: {unknown}")
    if problems:
        return problems

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.get_template("page.html")
    groups = [(group, [(page.title, place_of(page.path)) for page in pages]) for group, pages in library.groups]
    order = [entry for _, entries in groups for entry in entries]
    out.mkdir(parents=True)
    for number, page in enumerate(library.pages):
        contents = [heading for heading in page.headings if heading.level in (2, 3)]
        around = {"before": order[number - 1] if number else None, "after": order[number + 1] if number + 1 < len(order) else None}
        words = {"title": page.title, "body": made[page.path].html, "groups": groups, "contents": contents}
        _write(out, place_of(page.path), template, **words, **around)
    used = set().union(*(each.uses for each in made.values()))
    for file in sorted(used):
        if file.suffix in (".svg", ".png"):
            (out / "pictures").mkdir(exist_ok=True)
            shutil.copy(file, out / place_of(file))
        else:
            title = str(file.relative_to(ROOT))
            _write(out, place_of(file), template, title=title, body=source_page(file), groups=groups, contents=[], before=None, after=None)
    for name in ASSETS:
        shutil.copy(HERE / name, out / name)
    index = [{**each, "text": re.sub(r"\s+", " ", each["text"]).strip()} for page in library.pages for each in sections(page)]
    (out / "search-index.js").write_text(f"window.searchIndex = {json.dumps(index, ensure_ascii=False)};\n", "utf-8")
    return []


def _write(out: Path, place: str, template: jinja2.Template, **words: object) -> None:
    path = out / place
    path.parent.mkdir(parents=True, exist_ok=True)
    root = os.path.relpath(out, path.parent).rstrip(".") if path.parent == out else os.path.relpath(out, path.parent) + "/"
    path.write_text(template.render(here=place, root=root, **words), "utf-8")


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    problems = build(OUT, Library())
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} problems; nothing was built", file=sys.stderr)
        return 1
    print(f"{len(list(OUT.rglob('*.html')))} pages in {OUT.relative_to(ROOT)}; open {OUT.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
