"""Maps a recurrent layer onto the GPU for the persistent kernels: which lanes and hidden units each thread block gets.

Arithmetic without torch; the results are compile-time constants of `persistent.cu`, `wide.cu`, `stream.cu` and `joined.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MOST_HIDDEN = 2048
MOST_PASSES = 8
THREADS = 512  # per block
MOST_JOINED = 16  # layers: their arguments are those of one launch
WIDE_LANES, WIDE_THREADS = 64, 256  # of `wide.cu`
STREAM_LANES, STREAM_THREADS, STREAM_CLUSTER = 64, 384, 2  # of `stream.cu`
SHARED_BYTES = 227 << 10  # per block
CELLS = {"lstm": 0, "gru": 1, "slstm": 2}  # as `cell.cuh` numbers them


@dataclass(frozen=True)
class Chip:
    """The part of a GPU that a kernel may fill: a whole one, a MIG slice, or a share under MPS. One block runs on each multiprocessor."""

    multiprocessors: int
    in_fours: int = 0  # blocks that run at once in clusters of 4: the remaining multiprocessors cannot form a full cluster
    in_eights: int = 0
    in_sixteens: int = 0
    in_twos: int = 0

    @staticmethod
    def with_multiprocessors(count: int, clusters: Mapping[int, int], kept_free: int = 0) -> Chip:
        """The chip with this many multiprocessors. A few of them stay free for concurrent work. `clusters`: how many clusters of each size
        run at once. `kept_free`: multiprocessors that other kernels may occupy for as long as ours run; wherever they are, each leaves room
        for one cluster less at most.
        """
        most = max(0, count - max(count // 32, kept_free))
        return Chip(most, *(min(size * max(0, clusters.get(size, 0) - kept_free), most) for size in (4, 8, 16, 2)))

    def room(self, cluster: int) -> int:
        """How many blocks run at once, in clusters of this size; 0: without clusters."""
        return {0: self.multiprocessors, 2: self.in_twos, 4: self.in_fours, 8: self.in_eights, 16: self.in_sixteens}.get(cluster, 0)


H200 = Chip(128, 120, 120, 112, 128)


@dataclass(frozen=True)
class LayerShape:
    """The mapping of a layer of this width onto the GPU, for a given number of lanes."""

    hidden: int  # hidden units of a head, padded
    groups: int  # groups of lanes, each on its own blocks
    lanes: int  # lanes per pass
    passes: int
    units: int = 16  # hidden units per block
    cluster: int = 0  # blocks per cluster: the 4 of a quad in backward, a whole group, or 2 that share reads (`stream.cu`); 0: none
    cell: str = "lstm"
    heads: int = 1  # with a recurrent matrix each; several only if each group of one is a cluster
    streamed: int | None = None  # for layouts of `stream.cu`: how many 64-wide blocks of K each of its two warpgroups has in registers
    joined: int = (
        1  # layers in one launch, if several: a layout of `joined.cu`, where groups and blocks of the others are those of each layer
    )

    @property
    def wide(self) -> bool:
        """True if it is a layout of `wide.cu`: 64 lanes in a pass."""
        return self.lanes == WIDE_LANES and self.streamed is None

    @property
    def polled(self) -> bool:
        """True if blocks wait for the data itself, in a buffer that is marked as not yet written."""
        return not self.near and self.streamed is None

    @property
    def threads(self) -> int:
        """Of a block."""
        return STREAM_THREADS if self.streamed is not None else WIDE_THREADS if self.wide else THREADS

    @property
    def stages(self) -> int:
        """64-wide blocks of K that fit into shared memory at once, in `stream.cu`: as many for each block of a cluster."""
        room = (SHARED_BYTES - self._stream_bytes) // self._stage_bytes
        return max(0, room - room % self.cluster)

    @property
    def marks(self) -> int:
        """Words by which the blocks of `stream.cu` tell each other how far they are."""
        return self.passes * self.blocks

    @property
    def exchange_bytes(self) -> int:
        """Of h of two steps, in `stream.cu`; of gate gradients, four times as much."""
        return 2 * self.groups * self.passes * self.lanes * self.hidden * 2

    @property
    def _stage_bytes(self) -> int:
        return self.lanes * 128 + 16

    @property
    def _stream_bytes(self) -> int:
        """Shared memory of `stream.cu` without its stages."""
        weights = 2 * (self.hidden // 128 - (self.streamed or 0)) * 8192
        of_pass = 16 * 1024 + 2 * 4 * self.lanes + 8 * self.units * self.lanes + 8
        return weights + 2 * self.lanes * 76 * 4 + self.passes * of_pass

    @property
    def width(self) -> int:
        """Hidden units of all heads, padded."""
        return self.heads * self.hidden

    @property
    def memory(self) -> int:
        """Numbers in the memory of a unit."""
        return 4 if self.cell == "slstm" else 1

    @property
    def blocks(self) -> int:
        return self.joined * self.groups * self.width // self.units

    @property
    def near(self) -> bool:
        """True if a whole group is one cluster. Groups are independent of each other, so they need not all run at once."""
        return self.cluster == self.hidden // self.units and self.joined == 1

    @property
    def continues(self) -> bool:
        """True if backward can go on from the gate gradients that another launch has left in memory."""
        return not self.near

    @property
    def k_blocks(self) -> int:
        """64-wide blocks of K per warpgroup."""
        return -(-self.hidden // (256 if self.joined == 1 else 128))

    @property
    def in_registers(self) -> int:
        """How many of these stay in registers; the rest of the weights are in shared memory."""
        return min(self.k_blocks, (4 if self.lanes <= 16 else 3) * 16 // self.units)

    @property
    def sum_buffers(self) -> int:
        return 2 if self._bytes(2) <= SHARED_BYTES else 1

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.sum_buffers)

    @property
    def reset_bytes(self) -> int:
        """Shared memory for resets, besides."""
        return 2 * 4 * self.lanes * self.passes

    @property
    def valid(self) -> bool:
        """True if the kernel has this layout."""
        if (self.near and self.passes > 1) or (self.heads > 1 and not self.near):
            return False
        if self.streamed is not None:
            whole = self.hidden % 128 == 0 and self.units == 16 and self.lanes == STREAM_LANES and self.cluster == STREAM_CLUSTER
            return whole and self.cell != "slstm" and self.hidden <= MOST_HIDDEN and self.passes <= MOST_PASSES and self.stages >= 4
        if self.wide:
            whole = self.hidden % 64 == 0 and self.units == 16 and self.cell != "slstm" and not self.near
            return whole and self.passes <= MOST_PASSES and self.shared_bytes <= SHARED_BYTES
        whole = self.hidden % (4 * self.units) == 0 and self.units * self.lanes <= THREADS and self.passes <= MOST_PASSES
        if self.joined > 1 and (self.passes > 1 or self.cell == "slstm" or self.joined > MOST_JOINED):
            return False
        return whole and self.k_blocks <= MOST_HIDDEN // 256 and self.shared_bytes <= SHARED_BYTES

    def fits(self, chip: Chip) -> bool:
        """True if the layout is valid and the chip has room for all of its blocks at once."""
        return self.valid and self.blocks <= chip.room(self.cluster)

    def _bytes(self, sum_buffers: int) -> int:
        if self.streamed is not None:
            return self._stream_bytes + self.stages * self._stage_bytes
        if self.wide:
            of_thread = -(-14 * self.units // 64) * 16  # bytes that it fetches for a pass
            kept = self.passes * (of_thread * WIDE_THREADS + 2 * 4 * self.lanes)
            swapped = 2 * (4 * 4 * self.units * self.lanes + 8) if self.cluster else 0
            return 8 * self.units * self.hidden + sum_buffers * 1024 * self.units + kept + swapped
        operand = 4 * self.k_blocks * self.lanes * 128
        weights = 4 * (self.k_blocks - self.in_registers) * 512 * self.units
        sums = sum_buffers * 4 * 4 * self.units * (self.lanes + (2 if self.k_blocks > 6 else 4)) * 4
        owners = self.units * self.lanes
        swapped = 2 * (4 * 4 * owners + 8) if self.cluster else 0
        swapped += operand + 16 * owners + 16 if self.near else 0
        slot = 16 if self.memory == 1 else 32
        return operand + weights + sums + self.passes * (slot * owners + 2 * 4 * self.lanes) + swapped

    def constants(self, *, fp16: bool, resets: int = 0, noise: int = 0) -> tuple[tuple[str, int], ...]:
        """The source's compile-time constants. `resets`: 1 to zeros, 2 to a learned carry."""
        return (
            ("FP16", int(fp16)),
            ("KBLOCKS", self.hidden // 64),
            ("KREG", self.in_registers if self.streamed is None else self.streamed),
            ("UNITS", self.units),
            ("LANES", self.lanes),
            ("PASSES", self.passes),
            ("SUM_BUFFERS", self.sum_buffers) if self.streamed is None else ("STAGES", self.stages),
            ("CLUSTER", self.cluster),
            ("CELL", CELLS[self.cell]),
            ("HEADS", self.heads),
            ("RESETS", resets),
            ("NOISE", noise),
            *((("LAYERS", self.joined),) if self.joined > 1 else ()),
        )


def dealt(hidden: int, units: int, groups: int, lanes: int, widest: int) -> LayerShape:
    """Deal this many lanes to this many groups, in passes of at most `widest`."""
    of_group = -(-lanes // groups)
    passes = -(-of_group // widest)
    return LayerShape(hidden, groups, -(-of_group // (passes * 8)) * 8, passes, units)


@dataclass(frozen=True)
class Wave:
    """How a stack of layers of one width runs: each layer `chunk_steps` steps at a time, at most `streams` layers at once."""

    shape: LayerShape
    streams: int
    chunk_steps: int
    apart: LayerShape | None = None  # backward's layout, if it differs

    @property
    def back(self) -> LayerShape:
        return self.apart or self.shape

    def of_cell(self, cell: str) -> Wave:
        """The same for layers of another cell: all cells have four rows for each unit."""
        return replace(self, shape=replace(self.shape, cell=cell), apart=None if self.apart is None else replace(self.apart, cell=cell))
