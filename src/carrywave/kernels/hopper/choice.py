"""Chooses how a layer, or a stack of layers of one width, runs on a chip, by costs measured on an H200."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from carrywave.kernels.hopper.layout import STREAM_CLUSTER, STREAM_LANES, THREADS, WIDE_LANES, Chip, LayerShape, Wave, dealt

MOST_STREAMED = 1024  # units: wider layers leave `stream.cu` too few stages, and cuDNN is faster


def shapes_for(chip: Chip, hidden: int, lanes: int) -> list[LayerShape]:
    """All layouts that fit, with blocks of 16 or 32 units, fewest passes first."""
    padded = -(-hidden // 64) * 64
    shapes = []
    for units in (16, 32):
        groups = min(chip.multiprocessors * units // padded, -(-lanes // 8))
        for widest in (32, 24, 16, 8) if groups else ():
            shape = dealt(padded, units, groups, lanes, widest)
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
def _streamed(chip: Chip, hidden: int, lanes: int) -> tuple[Wave, ...]:
    """The layouts of `stream.cu` that fit, for any number of groups. They have at least two passes, so that there is something to do while
    the numbers of one travel, and enough stages. Backward has fewer registers to spare for weights than forward.
    """
    padded = -(-hidden // 128) * 128
    fitting = []
    for groups in range(1, chip.in_twos * 16 // padded + 1) if padded <= MOST_STREAMED else ():
        passes = -(-lanes // (STREAM_LANES * groups))
        ahead, back = (
            LayerShape(padded, groups, STREAM_LANES, passes, cluster=STREAM_CLUSTER, streamed=min(padded // 128, most)) for most in (8, 3)
        )
        if passes >= 2 and ahead.fits(chip) and back.fits(chip) and back.stages >= 6:
            fitting.append(Wave(ahead, 1, 0, back))
    return tuple(fitting)


@cache
def back_for(chip: Chip, shape: LayerShape, lanes: int) -> LayerShape:
    """Backward's layout for a layer alone on the GPU: clusters of 4 if they fit in one pass, as forward does, with few lanes per pass (at
    most 16; or 32 up to 512 units, as many as forward above that), otherwise forward's layout. 24 lanes take as long as 32.
    """
    for groups in range(min(chip.in_fours * 16 // shape.hidden, -(-lanes // 8)), 0, -1):
        candidate = replace(dealt(shape.hidden, 16, groups, lanes, 32), cluster=4)
        few = candidate.lanes <= 16 or candidate.lanes == (32 if shape.hidden <= 512 else shape.lanes)
        if shape.passes == 1 and candidate.fits(chip) and candidate.passes == 1 and few:
            return candidate
    return shape


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


@cache
def alone(chip: Chip, hidden: int, lanes: int, steps: int, *, plain: bool = False) -> Wave | None:
    """A single layer over all of its steps; None if no layout fits. `plain`: it has nothing that `wide.cu` and `stream.cu` do not run."""
    near, shape = near_for(chip, hidden, lanes), shape_for(chip, hidden, lanes)
    if near is not None and near.units == 16:
        return Wave(near, 1, steps)
    if shape is None:
        return None
    streamed = min(_streamed(chip, hidden, lanes), key=lambda each: _step_us(each.shape), default=None) if plain else None
    if streamed is not None and _step_us(streamed.shape) < 0.95 * _step_us(shape):
        return replace(streamed, chunk_steps=steps)
    wide = wide_for(chip, hidden, lanes) if plain and shape.groups == 1 and shape.passes > 2 else None
    if wide is not None:
        return Wave(replace(wide, cluster=0), 1, steps, wide)
    # Blocks of 32 units gain from whole-group clusters only in backward, which otherwise has two round trips to memory per step.
    back = near if near is not None and near.hidden == shape.hidden else back_for(chip, shape, lanes)
    return Wave(shape, 1, steps, None if back == shape else back)


@cache
def _joined(chip: Chip, layers: int, hidden: int, lanes: int) -> tuple[LayerShape, ...]:
    """The layouts of `joined.cu` that fit, for any number of groups and both sizes of blocks."""
    padded = -(-hidden // 64) * 64
    shapes = [
        replace(dealt(padded, units, groups, lanes, THREADS // units), joined=layers)
        for units in (16, 32)
        for groups in range(1, min(chip.multiprocessors * units // (padded * layers), -(-lanes // 8)) + 1)
    ]
    return tuple(shape for shape in shapes if shape.fits(chip))


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
    candidates = [*_streamed(chip, hidden, lanes)] if plain else []
    for units in (16, 32):
        for groups in range(1, min(chip.multiprocessors * units // padded, -(-lanes // 8)) + 1):
            candidates.append(Wave(dealt(padded, units, groups, lanes, THREADS // units), 1, steps))
    for joined in _joined(chip, layers, hidden, lanes) if plain else ():
        took = (steps + layers - 1) * _step_us(joined) + _LAUNCH_US
        if took < least:
            back = replace(joined, cluster=4)
            best, least = Wave(joined, 1, steps, back if back.fits(chip) else None), took
    for candidate in candidates:
        shape = candidate.shape
        streams = min(layers, chip.room(shape.cluster) // shape.blocks)
        if not shape.fits(chip) or streams < 2:
            continue
        # Short chunks fill and drain the pipeline sooner, but need more launches.
        streamed = shape.streamed is not None
        chunk = min(steps, max(8, round(((10 if streamed else 20) * steps / (streams - 1)) ** 0.5)))
        chunks = -(-steps // chunk)
        rounds = chunks + layers - 1 if streams == layers else -(-layers // streams) * chunks + streams - 1
        took = rounds * (chunk * _step_us(shape) * (_BESIDE if streamed else 1.0) + _LAUNCH_US)
        if took < least:
            back = candidate.apart or replace(shape, cluster=4)
            # Clusters may leave no room for one of many small layers, which then waits its turn: backward is still faster with them.
            together = back.fits(chip) and (streams * shape.blocks <= chip.room(back.cluster) or shape.blocks <= 16)
            best, least = Wave(shape, streams, chunk, back if together else None), took
    return best


_BESIDE = 0.8  # of a step in `stream.cu` beside those of other layers, which fill what it leaves idle
_LAUNCH_US = 60.0  # overhead per chunk, forward and backward: two launches, small matrix products


def _step_us(shape: LayerShape) -> float:
    """Microseconds per step, forward and backward, as measured on an H200: latency, reads from other blocks, the block's own cells, and
    weights read from shared memory.
    """
    if shape.near:
        return 2.1 + 0.0012 * shape.hidden
    if shape.streamed is not None:
        return shape.passes * (6.0 + 0.0033 * shape.hidden)
    if shape.wide:
        return shape.passes * (2.8 + 0.0057 * shape.hidden)
    gathered, cells = (1 if shape.joined == 1 else 2) * shape.hidden * shape.lanes / 512, shape.units * shape.lanes
    spilled = (shape.k_blocks - shape.in_registers) * shape.units / 16
    return shape.passes * (2.6 + 0.035 * gathered + 0.0038 * cells + 0.75 * spilled)
