"""Maps a recurrent layer onto the GPU for the persistent kernels: which lanes and hidden units each thread block gets.

Arithmetic without torch; the results are compile-time constants of `persistent.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

MOST_HIDDEN = 2048
MOST_PASSES = 8
THREADS = 512  # per block
WIDE_LANES, WIDE_THREADS = 64, 256  # of `wide.cu`
STREAM_THREADS = 384  # of `stream.cu`: one warpgroup of three loads
MOST_STAGES = 32
SHARED_BYTES = 227 << 10  # per block
CELLS = {"lstm": 0, "gru": 1, "slstm": 2}  # as `cell.cuh` numbers them


@dataclass(frozen=True)
class Chip:
    """The part of a GPU that a kernel may fill: a whole one, a MIG slice, or a share under MPS. One block runs on each multiprocessor."""

    multiprocessors: int
    in_fours: int = 0  # blocks that run at once in clusters of 4: the remaining multiprocessors cannot form a full cluster
    in_eights: int = 0
    in_sixteens: int = 0

    @staticmethod
    def with_multiprocessors(count: int, clusters: Mapping[int, int], kept_free: int = 0) -> Chip:
        """The chip with this many multiprocessors. A few of them stay free for concurrent work. `clusters`: how many clusters of each size
        run at once. `kept_free`: multiprocessors that other kernels may occupy for as long as ours run; wherever they are, each leaves room
        for one cluster less at most.
        """
        most = max(0, count - max(count // 32, kept_free))
        return Chip(most, *(min(size * max(0, clusters.get(size, 0) - kept_free), most) for size in (4, 8, 16)))

    def room(self, cluster: int) -> int:
        """How many blocks run at once, in clusters of this size; 0: without clusters."""
        return {0: self.multiprocessors, 4: self.in_fours, 8: self.in_eights, 16: self.in_sixteens}.get(cluster, 0)


H200 = Chip(128, 120, 120, 112)


@dataclass(frozen=True)
class LayerShape:
    """The mapping of a layer of this width onto the GPU, for a given number of lanes."""

    hidden: int  # hidden units of a head, padded
    groups: int  # groups of lanes, each on its own blocks
    lanes: int  # lanes per pass
    passes: int
    units: int = 16  # hidden units per block
    cluster: int = 0  # blocks per cluster, which communicate without global memory: the 4 of a quad in backward, or a whole group; 0: none
    cell: str = "lstm"
    heads: int = 1  # with a recurrent matrix each; several only if each group of one is a cluster
    streamed: int | None = None  # for layouts of `stream.cu`: how many 64-wide blocks of K each of its two warpgroups has in registers

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
        """Blocks of K that fit into shared memory at once, in `stream.cu`."""
        room = max(0, min(MOST_STAGES, (SHARED_BYTES - self._stream_bytes) // (self.lanes * 128 + 16)))
        return room - room % max(1, self.cluster)

    @property
    def marks(self) -> int:
        """Words by which the blocks of `stream.cu` tell each other how far they are."""
        return self.passes * self.blocks

    @property
    def exchange_bytes(self) -> int:
        """Of h of two steps, in `stream.cu`; of gate gradients, four times as much."""
        return 2 * self.groups * self.passes * self.lanes * self.hidden * 2

    @property
    def _stream_bytes(self) -> int:
        """Shared memory of `stream.cu` without its stages."""
        assert self.streamed is not None
        weights = 2 * (-(-self.hidden // 128) - self.streamed) * 8192
        slots = -(-14 * self.units * self.lanes // (256 * 16)) * 256 * 16
        return weights + 2 * self.lanes * 76 * 4 + self.passes * (slots + 2 * 4 * self.lanes + 8 * self.units * self.lanes + 8)

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
        return self.groups * self.width // self.units

    @property
    def near(self) -> bool:
        """True if a whole group is one cluster. Groups are independent of each other, so they need not all run at once."""
        return self.cluster == self.hidden // self.units

    @property
    def continues(self) -> bool:
        """True if backward can go on from the gate gradients that another launch has left in memory."""
        return not self.near

    @property
    def k_blocks(self) -> int:
        """64-wide blocks of K per warpgroup."""
        return -(-self.hidden // 256)

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
            whole = self.hidden % 64 == 0 and self.units == 16 and self.cell != "slstm" and self.hidden // 64 % max(1, self.cluster) == 0 and self.lanes in (32, 64)
            return whole and self.hidden <= MOST_HIDDEN and self.passes <= MOST_PASSES and self.stages >= 4
        if self.wide:
            whole = self.hidden % 64 == 0 and self.units == 16 and self.cell != "slstm" and not self.near
            return whole and self.passes <= MOST_PASSES and self.shared_bytes <= SHARED_BYTES
        whole = self.hidden % (4 * self.units) == 0 and self.units * self.lanes <= THREADS and self.passes <= MOST_PASSES
        return whole and self.hidden <= MOST_HIDDEN and self.shared_bytes <= SHARED_BYTES

    def fits(self, chip: Chip) -> bool:
        """True if the layout is valid and the chip has room for all of its blocks at once."""
        return self.valid and self.blocks <= chip.room(self.cluster)

    def _bytes(self, sum_buffers: int) -> int:
        if self.streamed is not None:
            return self._stream_bytes + self.stages * (self.lanes * 128 + 16)
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
        )


def _dealt(hidden: int, units: int, groups: int, lanes: int, widest: int) -> LayerShape:
    """Deal this many lanes to this many groups, in passes of at most `widest`."""
    of_group = -(-lanes // groups)
    passes = -(-of_group // widest)
    return LayerShape(hidden, groups, -(-of_group // (passes * 8)) * 8, passes, units)


def shapes_for(chip: Chip, hidden: int, lanes: int) -> list[LayerShape]:
    """All layouts that fit, with blocks of 16 or 32 units, fewest passes first."""
    padded = -(-hidden // 64) * 64
    shapes = []
    for units in (16, 32):
        groups = min(chip.multiprocessors * units // padded, -(-lanes // 8))
        for widest in (32, 24, 16, 8) if groups else ():
            shape = _dealt(padded, units, groups, lanes, widest)
            if shape.fits(chip) and shape not in shapes:
                shapes.append(shape)
    return sorted(shapes, key=lambda shape: shape.passes)


@cache
def shape_for(chip: Chip, hidden: int, lanes: int) -> LayerShape | None:
    """The layout to use; None if none fits. Of those with the fewest passes, one with 32-unit blocks is used if there is no other, or if
    all its weights stay in registers and 16-unit blocks would need more than 16 lanes: that halves the reads from other blocks.
    """
    shapes = shapes_for(chip, hidden, lanes)
    best = [shape for shape in shapes if shape.passes == shapes[0].passes]
    small, wide = ([shape for shape in best if shape.units == units] for units in (16, 32))
    if wide and (not small or (small[0].lanes > 16 and wide[0].in_registers == wide[0].k_blocks)):
        return wide[0]
    return small[0] if small else None


@cache
def wide_for(chip: Chip, hidden: int, lanes: int) -> LayerShape | None:
    """The layout of `wide.cu` for backward, which needs clusters; forward's is the same without them. None if it does not fit."""
    padded = -(-hidden // 64) * 64
    groups = min(chip.in_fours * 16 // padded, -(-lanes // WIDE_LANES))
    shape = LayerShape(padded, groups, WIDE_LANES, -(-lanes // (WIDE_LANES * max(1, groups))), cluster=4)
    return shape if groups and shape.fits(chip) else None


@cache
def back_for(chip: Chip, shape: LayerShape, lanes: int) -> LayerShape:
    """Backward's layout for a layer alone on the GPU: clusters of 4 if they fit in one pass, as forward does, with few lanes per pass (at
    most 16; or 32 up to 512 units, as many as forward above that), otherwise forward's layout. 24 lanes take as long as 32.
    """
    for groups in range(min(chip.in_fours * 16 // shape.hidden, -(-lanes // 8)), 0, -1):
        candidate = replace(_dealt(shape.hidden, 16, groups, lanes, 32), cluster=4)
        few = candidate.lanes <= 16 or candidate.lanes == (32 if shape.hidden <= 512 else shape.lanes)
        if shape.passes == 1 and candidate.fits(chip) and candidate.passes == 1 and few:
            return candidate
    return shape


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


@cache
def near_for(chip: Chip, hidden: int, lanes: int) -> LayerShape | None:
    """A layout in which every group of eight lanes is one cluster: the fastest for narrow layers, if all groups fit at once."""
    for padded in (64, 128, 256):
        for units in (16, 32) if hidden <= padded else ():
            shape = LayerShape(padded, -(-lanes // 8), 8, 1, units, padded // units)
            if shape.fits(chip):
                return shape
    return None


@cache
def heads_for(chip: Chip, hidden: int, heads: int, lanes: int, cell: str) -> LayerShape | None:
    """A layout for heads of this many units, each group of lanes of a head as one cluster: as few lanes in a group as still let all groups
    run at once; if none does, as many as possible, and groups wait their turn. None if there is none.
    """
    shapes = [
        LayerShape(hidden, -(-lanes // of_group), of_group, 1, units, hidden // units, cell, heads)
        for of_group in (8, 16, 32)
        for units in (16, 32)
        if hidden % (4 * units) == 0 and chip.room(hidden // units)
    ]
    shapes = [shape for shape in shapes if shape.valid]
    at_once = [shape for shape in shapes if shape.fits(chip)]
    return at_once[0] if at_once else shapes[-1] if shapes else None


def alone(chip: Chip, hidden: int, lanes: int, steps: int, *, plain: bool = False) -> Wave | None:
    """A single layer over all of its steps; None if no layout fits. `plain`: it has nothing that `wide.cu` does not run."""
    near, shape = near_for(chip, hidden, lanes), shape_for(chip, hidden, lanes)
    if near is not None and near.units == 16:
        return Wave(near, 1, steps)
    # Blocks of 32 units gain from whole-group clusters only in backward, which otherwise has two round trips to memory per step.
    if shape is None:
        return None
    wide = wide_for(chip, hidden, lanes) if plain and shape.groups == 1 and shape.passes > 2 else None
    if wide is not None:
        return Wave(replace(wide, cluster=0), 1, steps, wide)
    back = near if near is not None and near.hidden == shape.hidden else back_for(chip, shape, lanes)
    return Wave(shape, 1, steps, None if back == shape else back)


@cache
def wave_for(chip: Chip, layers: int, hidden: int, lanes: int, steps: int, *, plain: bool = False) -> Wave | None:
    """The layers one after the other, each over the whole GPU; or concurrently, a chunk apart, if that is clearly faster: small batches
    leave most of the GPU idle. None if no layout fits. `plain` as in `alone`.
    """
    best = alone(chip, hidden, lanes, steps, plain=plain)
    if best is None or layers == 1:
        return best
    least = 0.95 * layers * (steps * _step_us(best.shape) + _LAUNCH_US)
    padded = -(-hidden // 64) * 64
    for units in (16, 32):
        for groups in range(1, min(chip.multiprocessors * units // padded, -(-lanes // 8)) + 1):
            shape = _dealt(padded, units, groups, lanes, THREADS // units)
            streams = min(layers, chip.multiprocessors // shape.blocks)
            if not shape.fits(chip) or streams < 2:
                continue
            # Short chunks fill and drain the pipeline sooner, but need more launches.
            chunk = min(steps, max(8, round((20 * steps / (streams - 1)) ** 0.5)))
            chunks = -(-steps // chunk)
            rounds = chunks + layers - 1 if streams == layers else -(-layers // streams) * chunks + streams - 1
            took = rounds * (chunk * _step_us(shape) + _LAUNCH_US)
            if took < least:
                back = replace(shape, cluster=4)
                # Clusters may leave no room for one of many small layers, which then waits its turn: backward is still faster with them.
                together = back.fits(chip) and (streams * shape.blocks <= chip.in_fours or shape.blocks <= 16)
                best, least = Wave(shape, streams, chunk, back if together else None), took
    return best


_LAUNCH_US = 60.0  # overhead per chunk, forward and backward: two launches, small matrix products


def _step_us(shape: LayerShape) -> float:
    """Microseconds per step, forward and backward, as measured on an H200: latency, reads from other blocks, the block's own cells, and
    weights read from shared memory.
    """
    if shape.near:
        return 2.1 + 0.0012 * shape.hidden
    if shape.wide:
        return shape.passes * (2.8 + 0.0057 * shape.hidden)
    gathered, cells = shape.hidden * shape.lanes / 512, shape.units * shape.lanes
    spilled = (shape.k_blocks - shape.in_registers) * shape.units / 16
    return shape.passes * (2.6 + 0.035 * gathered + 0.0038 * cells + 0.75 * spilled)
