"""Draws docs/architecture.svg: the package's folders by floor, their contents, and their imports.

    python scripts/architecture.py            # redraw it
    python scripts/architecture.py --check    # exit with code 1 if the drawing in docs is out of date

Everything is derived from the source: floors from the import contract in pyproject.toml, a folder's purpose from the first line of its
`__init__.py`, its modules from the files, arrows from the import statements. Arrows implied by others are omitted.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "carrywave"
DRAWING = ROOT / "docs" / "architecture.svg"
WIDTH, MARGIN, GAP, FLOOR_GAP = 1180, 20, 16, 34
LINE, PAD, LETTER = 15, 9, 5.7  # line height, padding around text, width of a small letter
COLOURS = ("#e8f0fe", "#e6f4ea", "#fef7e0", "#fce8e6", "#f3e8fd", "#e4f7fb")

Edges = dict[str, dict[str, int]]  # importer -> imported -> number of import statements


def floors() -> list[list[str]]:
    """The folders and single modules of each floor, top floor first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    [contract] = [each for each in settings["contracts"] if each["type"] == "layers"]
    return [[name.strip().removeprefix("carrywave.") for name in layer.split("|")] for layer in contract["layers"]]


def imports() -> Edges:
    """The number of imports between each pair of folders."""
    found: Edges = defaultdict(lambda: defaultdict(int))
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "carrywave" and len(parts) > 1 and parts[1] != importer:
                    found[importer][parts[1]] += 1
    return found


def without_shortcuts(edges: Edges) -> list[tuple[str, str, int]]:
    """The transitive reduction: drop an import that is implied by a longer path."""

    def reaches(start: str, end: str, seen: frozenset[str]) -> bool:
        return any(each == end or (each not in seen and reaches(each, end, seen | {each})) for each in edges.get(start, {}))

    kept = []
    for importer, targets in edges.items():
        for target, count in targets.items():
            others = [each for each in targets if each != target]
            if not any(reaches(each, target, frozenset({importer, each})) for each in others):
                kept.append((importer, target, count))
    return sorted(kept)


def purpose(name: str) -> str:
    """The first line of the docstring of a folder or module."""
    path = PACKAGE / f"{name}.py"
    path = path if path.is_file() else PACKAGE / name / "__init__.py"
    said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return said.splitlines()[0] if said else ""


def contents(name: str) -> list[str]:
    """One text for the modules of a folder, and one for each subfolder, prefixed with its name."""
    folder = PACKAGE / name
    if not folder.is_dir():
        return []
    own = ", ".join(sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__")))
    inner = []
    for inside in sorted(path.parent for path in folder.glob("*/__init__.py")):
        inner.append(f"{inside.name}/: " + ", ".join(sorted(path.stem for path in inside.glob("*.py") if path.stem != "__init__")))
    return [text for text in (own, *inner) if text]


def wrapped(text: str, width: float) -> list[str]:
    """Wrap text into lines that fit the width."""
    lines, most = [""], max(12, int(width / LETTER))
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def draw() -> str:
    """The drawing as SVG text."""
    edges = imports()
    boxes: dict[str, tuple[float, float, float, float]] = {}
    parts: list[str] = []
    top: float = MARGIN
    for number, floor in enumerate(floors()):
        width = (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor)
        texts = {name: [wrapped(each, width - 2 * PAD) for each in (purpose(name), *contents(name))] for name in floor}
        height = max(LINE * (1 + sum(map(len, several))) + 2 * PAD for several in texts.values())
        for place, name in enumerate(floor):
            left = MARGIN + place * (width + GAP)
            boxes[name] = (left, top, width, height)
            parts += _box(name, texts[name], boxes[name], COLOURS[number % len(COLOURS)])
        top += height + FLOOR_GAP
    arrows = [
        _arrow(boxes[importer], boxes[target], f"{importer} imports {target} ({count} times)")
        for importer, target, count in without_shortcuts(edges)
        if importer in boxes and target in boxes
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" font-family="sans-serif" font-size="11">'
    # In the dark the same picture with light and dark exchanged; turning the hues back keeps the colours of the floors.
    style = "<style>@media (prefers-color-scheme:dark){svg{filter:invert(0.9) hue-rotate(180deg)}}</style>"
    style += '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip = '<path d="M0 0L8 4L0 8z" fill="#5f6368"/></marker></defs>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top:.0f}" fill="white"/>', style + tip, *arrows, *parts, "</svg>"]) + "\n"


def _box(name: str, texts: list[list[str]], box: tuple[float, float, float, float], colour: str) -> list[str]:
    left, top, width, height = box
    rows = [f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" fill="{colour}" stroke="#9aa0a6"/>']
    at = top + PAD + LINE - 4
    rows.append(f'<text x="{left + PAD:.1f}" y="{at:.1f}" font-weight="bold" font-size="13">{escape(name)}</text>')
    for number, lines in enumerate(texts):
        for line in lines:
            at += LINE
            colour_of_text = "#202124" if number == 0 else "#5f6368"
            rows.append(f'<text x="{left + PAD:.1f}" y="{at:.1f}" fill="{colour_of_text}">{escape(line)}</text>')
    return rows


def _arrow(start: tuple[float, float, float, float], end: tuple[float, float, float, float], title: str) -> str:
    x1, y1 = start[0] + start[2] / 2, start[1] + start[3]
    x2, y2 = end[0] + end[2] / 2, end[1]
    middle = (y1 + y2) / 2
    curve = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
    return f'<path d="{curve}" fill="none" stroke="#5f6368" marker-end="url(#tip)"><title>{escape(title)}</title></path>'


def main(words: list[str]) -> int:
    """Write the drawing or, with `--check`, compare it."""
    drawing = draw()
    if words == ["--check"]:
        if DRAWING.is_file() and DRAWING.read_text("utf-8") == drawing:
            return 0
        print("docs/architecture.svg is out of date; run: python scripts/architecture.py", file=sys.stderr)
        return 1
    DRAWING.write_text(drawing, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
