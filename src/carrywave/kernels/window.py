"""A `ChunkedWindow` seen by a kernel that is given it chunk by chunk: where the chunks lie, and what stays on the device between them.

With a window, a kernel may keep whole-window buffers from the first chunk's forward to the weight gradients, instead of making its own for
every chunk. The carry between two chunks then stays in the kernel's own format, and what is passed on in its place is a token.

The executor makes one window for each micro-batch, and promises that its chunks run forward in order, each from the state that the one
before it returned, and backward in the opposite order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Span = tuple[int, int]  # half-open range of steps


@dataclass
class ChunkedWindow:
    """The steps of one micro-batch on one stage, cut into chunks."""

    spans: tuple[Span, ...]  # of the chunks
    lengths: Tensor | None  # [B] real steps of each lane in the window; None: every step is real
    kept: dict[Hashable, Any] = field(default_factory=dict)  # what kernels keep between chunks
    same: list[Tensor] = field(default_factory=list)  # derived weights that every chunk derives in the same way, as the first one has them

    @property
    def steps(self) -> int:
        return self.spans[-1][1]


@dataclass(frozen=True)
class WindowChunk:
    """One chunk of a window."""

    window: ChunkedWindow
    index: int

    @property
    def span(self) -> Span:
        """The chunk's steps within the window."""
        return self.window.spans[self.index]

    @property
    def last(self) -> bool:
        """True if no chunk follows."""
        return self.index == len(self.window.spans) - 1
