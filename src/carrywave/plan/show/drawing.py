"""What every drawing of ours is made with: round numbers on axes, points of lines, and the SVG around its parts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

# Of a file of its own: colours follow the viewer's light or dark theme, if it reports one.
LIGHT = ".ground{fill:#ffffff}text{fill:#1d2430;font:12px sans-serif}.title{font-size:15px}.mid{text-anchor:middle}"
DARK = ".ground{fill:#161b22}text{fill:#e6eaf0}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within a range, at most about this many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * most >= (high - low) * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def points_text(points: Iterable[tuple[float, float]]) -> str:
    """Points as the `points` of a line or an area."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def inline(kind: str, title: str, parts: Sequence[str], width: float, height: float, more: str = "") -> str:
    """A drawing in a page, whose styles it uses under its class."""
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}"{more} role="img"><title>{escape(title)}</title>\n'
    return head + "\n".join(parts) + "\n</svg>"


def document(title: str, parts: Sequence[str], width: float, height: float, *, light: str, dark: str) -> str:
    """A drawing as a file of its own, without scripts or external fonts and styles. `light`, `dark`: its styles beside the common ones."""
    style = f"{LIGHT}{light}@media (prefers-color-scheme:dark){{{DARK}{dark}}}".replace("\n", "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
