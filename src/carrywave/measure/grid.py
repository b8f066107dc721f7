"""Measures a device on a grid of sizes, for a profile to be shared: `python -m carrywave.measure.grid FILE NAME [--shares 4,2]`.

A machine's own profile holds only the sizes of the models planned on it; a shared profile has to cover all models. With shares of a GPU,
one more file is written for each number of them, beside the first (`NAME-1of4.json`): a share as a device of its own, with messages and
sums between shares. What they take there is also what recorded stages on whole GPUs spend on a message, besides the copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from carrywave.launch.shares.mps import shares
from carrywave.measure.profiles import Wanted, empty, extended, read
from carrywave.plan.cost.profile import Overheads, Profile
from carrywave.plan.cost.sample_requests import LARGEST, Ask, lighter_ask
from carrywave.plan.cost.shipped_profiles import LINKS

# Widths and lanes of layers over whole windows, by precision. Our kernels, in half precision, have steps between powers of two, which no
# interpolation finds; cuDNN's have few.
OURS = (64, 128, 200, 320, 400, 512, 650, 800, 1024, 1150, 1536, 2048), (8, 20, 32, 64, 100, 256)
CUDNN = {"fp32": ((64, 128, 200, 400, 650, 1024, 1150, 2048), (1, 4, 8, 32, 80, 100, 256)), "tf32": ((200, 650, 1150), (32, 100))}
# The same for other cells with kernels of their own
OTHER_CELLS, OTHER_UNITS, OTHER_LANES = ("gru",), (64, 200, 512, 1024), (1, 8, 32, 100)
WINDOWS = (16, 128)  # steps
LARGEST_WINDOW = 3e11  # multiplications: a larger one is timed on fewer steps
# (inputs, hidden) of layers whose input width differs from their own, and the lanes and steps they are timed with
OTHER_INPUTS, OTHER_WINDOWS = ((1, 128), (256, 1024), (1024, 256), (400, 1150), (1150, 400)), ((16, 128), (100, 64))
# Layers that are also timed as chunks; and, on a machine that is measured in passing, all of them.
MODEST_HIDDEN, MODEST_LANES, STEPS = (128, 256, 512, 1024, 2048), (16, 64), (8, 32, 128)
SHORT = 32  # steps: as long as this, a call is also timed as a chunk
CHUNKS = 4  # of the window that such a chunk is part of
# (hidden, lanes, layers) of stacks in one call
TOGETHER = (
    (128, 32, 2),
    (200, 20, 2),
    (256, 16, 4),
    (256, 64, 2),
    (512, 16, 2),
    (512, 32, 2),
    (512, 16, 8),
    (512, 64, 4),
    (650, 20, 2),
    (1024, 16, 2),
    (1024, 64, 4),
)
# Of all other units; most vocabularies are no multiple of 8, with which products in half precision have faster kernels.
WIDTHS, OUTPUTS, TOKENS = (128, 400, 1024), (10, 100, 2_000, 10_000, 10_001, 33_000, 33_278), ((16, 8), (32, 64), (100, 70))
MODEST_WIDTHS, MODEST_OUTPUTS, MODEST_TOKENS = (256, 1024), (2_000, 10_000, 50_000), TOKENS[:2]
MODEST = {"lstm": 1024}  # the largest width of a modest grid on a CPU; 10,000 for other kinds
PRECISIONS = ("bf16", "fp32", "tf32")
OPTIMIZERS = ("adam", "sgd")
DEVICES_PER_HOST = 8
MESSAGE_SECONDS = 20e-6  # of a launched message: one kernel launch; assumed, as there was no second GPU
RECORDED_MESSAGE_SECONDS = 3e-6  # where no shares are measured: a signal or a wait, as between shares of an H200

SHARE_HIDDEN, SHARE_STEPS, SHARE_WINDOW = (512, 1024), (8, 16, 32), 256
SHARE_WORDS, SHARE_PRECISION = 10_000, "bf16"


def grid(precision: str) -> list[Ask]:
    """The calls to time in one precision."""
    widths, several_lanes = CUDNN.get(precision, OURS)
    asks = [*_modest_layers(precision), *_other_units(precision, WIDTHS, OUTPUTS, TOKENS)]
    for hidden in widths:
        for lanes in several_lanes:
            asks += _windows("lstm", hidden, lanes, precision)
    for cell in OTHER_CELLS if precision != "tf32" else ():
        asks += [ask for hidden in OTHER_UNITS for lanes in OTHER_LANES for ask in _windows(cell, hidden, lanes, precision)]
    for inputs, hidden in OTHER_INPUTS:
        asks += [Ask("lstm", inputs, hidden, lanes, steps, precision=precision) for lanes, steps in OTHER_WINDOWS]
    return _each_once([*asks, *_stacks(precision)])


def _windows(cell: str, hidden: int, lanes: int, precision: str) -> list[Ask]:
    return [lighter_ask(Ask(cell, hidden, hidden, lanes, steps, precision=precision), LARGEST_WINDOW) for steps in WINDOWS]


def modest_grid(kind: str, precision: str) -> list[Ask]:
    """The calls to time where a whole grid would take too long: fewer sizes, and on a CPU large calls on fewer steps."""
    asks = [*_modest_layers(precision), *_other_units(precision, MODEST_WIDTHS, MODEST_OUTPUTS, MODEST_TOKENS)]
    if kind == "cuda":
        return [*asks, *_stacks(precision)]
    small = [ask for ask in asks if max(ask.inputs, ask.outputs) <= MODEST.get(ask.kind, 10_000)]
    return _each_once(lighter_ask(ask, LARGEST[kind] / 2) for ask in small)


def _modest_layers(precision: str) -> Iterator[Ask]:
    for hidden in MODEST_HIDDEN:
        for lanes in MODEST_LANES:
            for steps in STEPS:
                yield _ask("lstm", hidden, hidden, lanes, steps, precision)


def _stacks(precision: str) -> Iterator[Ask]:
    for hidden, lanes, layers in TOGETHER:
        yield Ask("lstm", hidden, hidden, lanes, 64, precision=precision, layers=layers)


def _other_units(precision: str, widths: Sequence[int], outputs: Sequence[int], tokens: Sequence[tuple[int, int]]) -> Iterator[Ask]:
    """Encoders and heads with so many words or labels, dropout and norms."""
    for width in widths:
        for lanes, steps in tokens:
            for words in outputs:
                yield _ask("softmax", width, words, lanes, steps, precision)
                yield _ask("embedding", words, width, lanes, steps, precision)
            for kind, out in (("linear", 24), ("dropout", width), ("norm", width)):
                yield _ask(kind, width, out, lanes, steps, precision)


def _each_once(asks: Iterable[Ask]) -> list[Ask]:
    """The requests without those for the same call; of these, one that is timed as a chunk, too, comes first."""
    found: dict[tuple[object, ...], Ask] = {}
    for ask in asks:
        found.setdefault(ask.size, ask)
    return list(found.values())


def share_grid() -> Iterator[Ask]:
    """The calls to time on a share: fewer, since shares are for trying plans out."""
    for hidden in SHARE_HIDDEN:
        for lanes in MODEST_LANES:
            for steps in (*SHARE_STEPS, SHARE_WINDOW):
                yield _ask("lstm", hidden, hidden, lanes, steps, SHARE_PRECISION)
        for steps in (SHARE_STEPS[0], SHARE_WINDOW):
            yield _ask("linear", hidden, 1, MODEST_LANES[-1], steps, SHARE_PRECISION)
            yield _ask("softmax", hidden, SHARE_WORDS, MODEST_LANES[-1], steps, SHARE_PRECISION)
            yield _ask("embedding", SHARE_WORDS, hidden, MODEST_LANES[-1], steps, SHARE_PRECISION)
            yield _ask("dropout", hidden, hidden, MODEST_LANES[-1], steps, SHARE_PRECISION)


def _ask(kind: str, inputs: int, outputs: int, lanes: int, steps: int, precision: str) -> Ask:
    chunks = CHUNKS if steps <= SHORT else 1
    return Ask(kind, inputs, outputs, lanes, steps, precision=precision, chunks=chunks)


def measure(
    name: str, kind: str, *, precisions: Sequence[str] = PRECISIONS, before: Profile | None = None, shared: Profile | None = None
) -> Profile:
    """Measure this machine's devices. For GPUs, hosts of eight are assumed, with the usual links, since none are measured here.

    `before`: an earlier profile, of which samples that are not measured now are kept. `shared`: that of shares of such a GPU.
    """
    found = empty(kind)
    found = found if before is None else replace(before, overheads=found.overheads)
    for precision in precisions if kind == "cuda" else ("fp32",):
        optimizers = OPTIMIZERS if precision == precisions[0] or kind == "cpu" else ()
        wanted = Wanted(grid(precision), optimizers, links=False)
        found = extended(found, kind, precision, wanted, 1, launched=True, environment={})
    if kind == "cuda":
        own = RECORDED_MESSAGE_SECONDS if shared is None else shared.overheads.recorded_message_seconds
        overheads = replace(found.overheads, message_seconds=MESSAGE_SECONDS, recorded_message_seconds=own)
        found = replace(found, within=LINKS["nvlink4"], between=LINKS["infiniband-ndr"], overheads=overheads)
        found = replace(found, devices_per_host=DEVICES_PER_HOST)
    return replace(found, name=name)


def measure_shares(name: str, count: int) -> Profile:
    """Measure shares of a GPU, all at work at once: each as one device of a host that has as many as there are shares."""
    whole = empty("cuda")
    found = replace(
        whole,
        name=f"{name}-1of{count}",
        hardware=f"1/{count} of {whole.hardware}",
        memory_bytes=whole.memory_bytes // count,
        devices_per_host=count,
        between=None,
        overheads=Overheads(),
    )
    wanted = Wanted(list(share_grid()), OPTIMIZERS[:1], links=count > 1)
    with shares(count) as environment:
        return extended(found, "cuda", SHARE_PRECISION, wanted, count, launched=count == 1, environment=environment)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and write what the command line asks for."""
    words = argparse.ArgumentParser(prog="python -m carrywave.measure.grid", description=__doc__.partition("\n")[0])
    words.add_argument("file", type=Path, help="of the profile; samples in it that are not measured again are kept")
    words.add_argument("name", help="of the profile")
    words.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    words.add_argument("--precisions", default=",".join(PRECISIONS), help="to measure on a GPU; empty: only shares")
    words.add_argument("--shares", default="", help="numbers of shares of a GPU to measure, such as 4,2")
    asked = words.parse_args(given)
    precisions = [precision for precision in asked.precisions.split(",") if precision]
    shared: Profile | None = None
    for count in (int(number) for number in asked.shares.split(",") if number):
        shared = measure_shares(asked.name, count)
        shared.write(asked.file.with_name(f"{shared.name}.json"))
    if precisions:
        before = read(asked.file, asked.device)
        if asked.file.is_file() and not before.samples:
            words.error(f"{asked.file} is of another machine or version, or was measured with other threads; name a file of its own")
        measure(asked.name, asked.device, precisions=precisions, before=before, shared=shared).write(asked.file)


if __name__ == "__main__":
    main()
