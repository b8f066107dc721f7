"""Draws docs/wavefront-grid.svg and docs/wavefront-step.svg: what depends on what, and a step on four devices under three schedules.

    python scripts/wavefront.py            # redraw them
    python scripts/wavefront.py --check    # exit with code 1 if a drawing in docs is out of date

The timelines are the schedules that the package executes, with ideal times: a backward takes twice as long as a forward, messages take no
time, and half the work takes half the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from carrywave.plan.schedule.schedule import Schedule, bubble, durations, gpipe, name, start_times, wavefront

DOCS = Path(__file__).parents[1] / "docs"
STAGES, CHUNKS, MICRO_BATCHES = 4, 8, 4
STYLE = (
    ".ground{fill:#ffffff}.track{fill:#eceff3}.edge{stroke:#7a8699;fill:none}text{fill:#1d2430;font:13px sans-serif}.bold{font-weight:bold}"
    ".in{fill:#10151d;font-size:11px;text-anchor:middle}.F{fill:#6ea8e5}.B{fill:#f2a65a}.W{fill:#bd93d8}.now{fill:#6ea8e5}"
    ".done{fill:#d7e5f5}.mid{text-anchor:middle}.soft{fill:#586375}.tip{fill:#7a8699}"
    "@media (prefers-color-scheme:dark){.ground{fill:#161b22}.track{fill:#262d37}text{fill:#e6eaf0}.in{fill:#10151d}.done{fill:#33455c}"
    ".soft{fill:#9aa6b6}.edge{stroke:#8b97a7}.tip{fill:#8b97a7}.later{fill:#e6eaf0}}"
)
HEAD = (
    '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path class="tip" d="M0 0L6 3L0 6z"/></marker>'
)


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style><defs>{HEAD}</defs>"
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


def grid(now: int = 4) -> str:
    """Layers over time chunks. Cells of one diagonal can be computed at the same time; that of slot `now` is marked."""
    wide, high, left, top = 72, 44, 96, 52
    parts = [f'<text class="bold" x="16" y="28">Four layers, one on each device; eight chunks of one window; slot {now}</text>']
    for layer in range(STAGES):
        y = top + (STAGES - 1 - layer) * (high + 18)
        parts.append(f'<text x="16" y="{y + 27}">layer {layer + 1}</text>')
        for chunk in range(CHUNKS):
            x, slot = left + chunk * (wide + 18), layer + chunk
            kind = "now" if slot == now else "done" if slot < now else "track"
            label = "in" if slot == now else "mid later"
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="{high}" rx="4"/>')
            parts.append(f'<text class="{label}" x="{x + wide / 2:g}" y="{y + 27}">slot {slot}</text>')
            if chunk:
                parts.append(f'<path class="edge" marker-end="url(#tip)" d="M{x - 17} {y + high / 2:g}H{x - 2}"/>')
            if layer:
                parts.append(f'<path class="edge" marker-end="url(#tip)" d="M{x + wide / 2:g} {y + high + 17}V{y + high + 2}"/>')
    bottom = top + STAGES * (high + 18)
    for chunk in range(CHUNKS):
        parts.append(f'<text class="mid soft" x="{left + chunk * (wide + 18) + wide / 2:g}" y="{bottom + 6}">chunk {chunk}</text>')
    parts += legend([("done", "done"), ("now", "computed at the same time"), ("track", "later")], bottom + 24)
    parts.append(f'<text class="soft" x="430" y="{bottom + 35}">→ the carry, to the next chunk; ↑ the output, to the next layer</text>')
    return svg(left + CHUNKS * (wide + 18), bottom + 48, "What each chunk of each layer needs", parts)


def timeline(title: str, schedule: Schedule, parts_of_step: int, top: int, scale: float) -> tuple[list[str], int]:
    """One schedule to scale, its rows the stages; the step's work is the same however many parts it has."""
    times = {"forward": 1 / parts_of_step, "backward": 2 / parts_of_step, "weights": 0.5 / parts_of_step}
    seconds, left, high = durations(schedule, **times), 92, 24
    starts = start_times(schedule, **times)
    end = max(start + seconds(task) for task, start in starts.items())
    waiting = bubble(schedule, **times)
    drawn = [f'<text class="bold" x="16" y="{top + 16}">{title}: devices wait for {100 * waiting:.0f}% of the time</text>']
    for stage, tasks in enumerate(schedule.stages):
        y = top + 28 + stage * (high + 4)
        drawn.append(f'<text x="16" y="{y + 17}">device {stage}</text>')
        drawn.append(f'<rect class="track" x="{left}" y="{y}" width="{end * scale:.1f}" height="{high}"/>')
        for task in tasks:
            x, width = left + starts[task] * scale, seconds(task) * scale
            drawn.append(f'<rect class="{task.phase}" x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{high}"/>')
            label = name(task, schedule)
            if width > 7 * len(label) + 2:
                drawn.append(f'<text class="in" x="{x + width / 2:.1f}" y="{y + 16}">{label}</text>')
    return drawn, top + 28 + STAGES * (high + 4) + 16


def legend(entries: list[tuple[str, str]], top: int) -> list[str]:
    """Colours and their meanings, side by side."""
    drawn, x = [], 16
    for kind, meaning in entries:
        drawn.append(f'<rect class="{kind}" x="{x}" y="{top}" width="14" height="14" rx="2"/>')
        drawn.append(f'<text class="soft" x="{x + 20}" y="{top + 11}">{meaning}</text>')
        x += 42 + 7 * len(meaning)
    return drawn


def step() -> str:
    """A step of the same model and batch, three times, on one time axis."""
    rows = [
        ("Layers on four devices, one after the other", gpipe(STAGES, 1), 1),
        (f"GPipe: the batch in {MICRO_BATCHES} micro-batches", gpipe(STAGES, MICRO_BATCHES), MICRO_BATCHES),
        (f"Wavefront: the window in {CHUNKS} chunks, the batch whole", wavefront(STAGES, CHUNKS), CHUNKS),
    ]
    scale = (980 - 92 - 16) / (3 * STAGES)
    parts, top = [], 12
    for title, schedule, pieces in rows:
        drawn, top = timeline(title, schedule, pieces, top, scale)
        parts += drawn
    parts += legend([("F", "forward"), ("B", "backward"), ("W", "weight gradients"), ("track", "waiting")], top)
    parts.append(f'<text class="soft" x="500" y="{top + 11}">The same work three times, to one scale, with ideal times.</text>')
    return svg(980, top + 26, "A training step on four devices under three schedules", parts)


DRAWINGS = {"wavefront-grid.svg": grid, "wavefront-step.svg": step}


def main() -> int:
    old = [file for file, draw in DRAWINGS.items() if not (DOCS / file).is_file() or (DOCS / file).read_text("utf-8") != draw()]
    if "--check" in sys.argv[1:]:
        if old:
            print(f"{', '.join(old)} in docs out of date; run: python scripts/wavefront.py", file=sys.stderr)
        return int(bool(old))
    for file in old:
        (DOCS / file).write_text(DRAWINGS[file](), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
