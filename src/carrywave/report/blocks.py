"""What a page is made of: tiles, charts, tables, passages of text and what is folded away, put into one template. The page is one file
without scripts that loads nothing; everything that a user or a file can name is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from carrywave.report.chart import Chart, style
from carrywave.report.figures import Tile


@dataclass(frozen=True)
class Listing:
    """A table: names of its columns, and rows whose first cell is a heading. `shades`: how dark each further cell is, from 0 to 1."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    shades: Sequence[Sequence[float]] = ()
    kind: ClassVar[str] = "listing"


@dataclass(frozen=True)
class Passage:
    """A text from the data, what the model wrote after it, and what really follows."""

    prompt: str
    written: str
    truth: str
    kind: ClassVar[str] = "passage"


@dataclass(frozen=True)
class Folded:
    """A text that opens at a click."""

    title: str
    text: str
    kind: ClassVar[str] = "folded"


Block = str | Chart | Listing | Passage | Folded  # a text is a paragraph


@dataclass(frozen=True)
class PagePart:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]


def page(title: str, about: str, tiles: Sequence[Tile], parts: Sequence[PagePart]) -> str:
    """The HTML of a page."""
    where = PackageLoader("carrywave.report")
    templates = Environment(loader=where, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    whole = templates.get_template("page.html")
    return whole.render(title=title, about=about, tiles=tiles, parts=parts, chart_style=Markup(style()))
