"""Draws timelines as one self-contained SVG file, without scripts or external fonts and styles.

Rows are stages and rectangles are tasks, left to right in real time; several timelines are stacked on one time axis, so that their lengths
can be compared. Colours follow the viewer's light or dark theme if it reports one, and the drawing has its own background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from carrywave.plan.show import drawing
from carrywave.plan.show.text import MOST_TICKS, seconds_text
from carrywave.plan.simulation import TaskSpan, Timeline

WIDTH = 1000
ROW, GAP, MARGIN, HEAD = 22, 4, 14, 30  # pixels: height of a row, between rows, around everything, height of a title line
LABEL = 170  # pixels for the names of rows
SHORTEST = 16  # pixels needed to show the name of a chunk
LIGHTEST = 0.55  # opacity of the first chunk; the last is fully opaque

_NAMES = {
    "F": "forward",
    "B": "backward",
    "H": "shared head",
    "W": "deferred weight gradients",
    "reduce": "gradients summed over workers",
    "update": "update",
    "send": "message sent",
    "rest": "the rest (sums, update)",
}
_LIGHT = """
.track{fill:#eceff3}.tick{stroke:#c3cad4}.in{fill:#10151d;font-size:10px;text-anchor:middle}
.F{fill:#6ea8e5}.B{fill:#f2a65a}.H{fill:#7fc48a}.W{fill:#bd93d8}.reduce,.send{fill:#e2727b}.update,.rest{fill:#a9a196}
"""
_DARK = ".track{fill:#262d37}.tick{stroke:#4a5462}.in{fill:#10151d}"


@dataclass(frozen=True)
class Panel:
    """A timeline with its title and the names of its rows."""

    title: str
    timeline: Timeline
    names: Sequence[str]


def draw(panels: Sequence[Panel], title: str = "", *, within: str = "") -> str:
    """The SVG of one or several timelines on a common time axis. `within`: its class in a page that has styles and a ground of its own."""
    seconds = max(panel.timeline.seconds for panel in panels)
    scale = (WIDTH - LABEL - 2 * MARGIN) / seconds if seconds else 0.0
    parts, top = [], MARGIN
    if title:
        parts.append(f'<text class="title" x="{MARGIN}" y="{top + 16}">{escape(title)}</text>')
        top += HEAD
    for panel in panels:
        parts.append(f'<text x="{MARGIN}" y="{top + 14}">{escape(panel.title)}</text>')
        top += HEAD - 8
        for number, row in enumerate(panel.timeline.rows):
            name = f"{number}: {panel.names[number]}" if number < len(panel.names) else str(number)
            parts += _row(name, row, top, scale, panel.timeline.seconds)
            top += ROW + GAP
        top += MARGIN
    parts += _axis(seconds, top, scale)
    top += HEAD + 8
    labels = {span.label for panel in panels for row in panel.timeline.rows for span in row}
    parts += _legend([label for label in _NAMES if label in labels], top)
    height = top + HEAD
    caption = title or panels[0].title
    if within:
        return drawing.inline(within, caption, parts, WIDTH, height)
    return drawing.document(caption, parts, WIDTH, height, light=_LIGHT, dark=_DARK)


def _row(name: str, spans: Sequence[TaskSpan], top: int, scale: float, seconds: float) -> list[str]:
    left = LABEL + MARGIN
    short = name if len(name) <= 27 else name[:26] + "…"
    parts = [
        f'<text x="{MARGIN}" y="{top + 15}">{escape(short)}</text>',
        f'<rect class="track" x="{left}" y="{top}" width="{seconds * scale:.2f}" height="{ROW}"/>',
    ]
    chunks = 1 + max((span.task.chunk for span in spans if span.task is not None), default=0)
    micro_batches = 1 + max((span.task.micro_batch for span in spans if span.task is not None), default=0)
    for span in spans:
        x, width = left + span.start * scale, (span.end - span.start) * scale
        name = _task_name(span, micro_batches)
        when = f"{seconds_text(span.start)} to {seconds_text(span.end)}"
        shade = "" if span.task is None or span.label == "W" else f' fill-opacity="{_shade(span.task.chunk, chunks):.2f}"'
        # Leave a hairline gap between neighbours if there is room for one.
        width = width - 0.6 if width > 3 else width
        parts.append(
            f'<rect class="{span.label}" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{ROW}"{shade}>'
            f"<title>{escape(name)}, {when}</title></rect>"
        )
        if span.task is not None and width >= SHORTEST:
            parts.append(f'<text class="in" x="{x + width / 2:.2f}" y="{top + 15}">{escape(name)}</text>')
    return parts


def _task_name(span: TaskSpan, micro_batches: int) -> str:
    if span.task is None:
        return _NAMES[span.label]
    chunk = "" if span.label == "W" else span.task.chunk
    return f"{span.label}{chunk}" + (chr(ord("a") + span.task.micro_batch % 26) if micro_batches > 1 else "")


def _shade(chunk: int, chunks: int) -> float:
    return LIGHTEST + (1 - LIGHTEST) * (chunk / (chunks - 1) if chunks > 1 else 1.0)


def _axis(seconds: float, top: int, scale: float) -> list[str]:
    parts = []
    for moment in drawing.ticks(0.0, seconds, MOST_TICKS) if seconds else []:
        x = LABEL + MARGIN + moment * scale
        parts.append(f'<line class="tick" x1="{x:.2f}" y1="{top - 8}" x2="{x:.2f}" y2="{top}"/>')
        # The last label would be cut off by the edge if it were centred.
        where = f'text-anchor="end" x="{WIDTH - 2}"' if x > WIDTH - 3 * MARGIN else f'class="mid" x="{x:.2f}"'
        parts.append(f'<text {where} y="{top + 14}">{seconds_text(moment)}</text>')
    return parts


def _legend(labels: Sequence[str], top: int) -> list[str]:
    parts, x = [], float(MARGIN)
    for label in labels:
        parts.append(f'<rect class="{label}" x="{x:.0f}" y="{top}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20:.0f}" y="{top + 12}">{_NAMES[label]}</text>')
        x += 44 + 6.4 * len(_NAMES[label])
    return [
        *parts,
        f'<rect class="track" x="{x:.0f}" y="{top}" width="14" height="14"/><text x="{x + 20:.0f}" y="{top + 12}">waiting</text>',
    ]
