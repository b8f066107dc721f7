"""The orders of `wide.cu` without a GPU, by its own expressions: what each thread multiplies and adds up are the sums of its units."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import torch
from torch import Tensor

from carrywave.kernels.hopper.choice import alone
from carrywave.kernels.hopper.layout import H200

SOURCE = "".join(files("carrywave.kernels").joinpath("source", name).read_text("utf-8") for name in ("wide/product.cuh", "wide/wide.cu"))
HIDDEN = 128


def expression(pattern: str, **constants: int) -> list[Callable[..., int]]:
    """The integer expressions of the source that match, as functions of their variables."""
    found = [code.replace("/", "//") for code in re.findall(pattern, SOURCE)]
    return [lambda code=code, **names: eval(code, {}, constants | names) for code in found]  # type: ignore[misc]


def tiles_of(weights_NK: Tensor, units: int) -> Tensor:
    """The weights' numbers in shared memory, as `load_weights` puts them there, four bytes at a time."""
    [at] = expression(r"u32 at = tiles \+ (.+);", ROWS=4 * units)
    [chunk] = expression(r"int chunk = (.+?);", ROWS=4 * units)
    memory = torch.full((weights_NK.numel(),), -1.0, dtype=torch.float64)
    for n, row in enumerate(weights_NK.unflatten(-1, (-1, 4, 2))):
        for piece, words in enumerate(row):
            for word, pair in enumerate(words):
                first = at(n=n, piece=piece, chunk=chunk(piece=piece, word=word)) // 2
                assert memory[first] == -1.0
                memory[first : first + 2] = pair
    return memory


def products(a_LK: Tensor, memory: Tensor, units: int) -> Tensor:
    """[64, 4 * units]: what the tensor cores make of the threads' registers and of shared memory (128-byte swizzle)."""
    rows, hidden = 4 * units, a_LK.shape[1]
    sums = torch.zeros(64, rows, dtype=torch.float64)
    n, k = torch.arange(rows)[:, None], torch.arange(16)[None]
    for block in range(hidden // 64):
        for warpgroup in range(2):
            # Of 32 numbers, a thread has 8 neighbours; an instruction takes 4 of them, in places 8 apart.
            of_threads = a_LK[:, block * 64 + warpgroup * 32 :][:, :32].reshape(64, 4, 2, 2, 2)  # row, thread, instruction, place, number
            for instruction in range(2):
                a = of_threads[:, :, instruction].permute(0, 2, 1, 3).reshape(64, 16)
                at = warpgroup * 32 + instruction * 16 + k
                b = memory[block * rows * 64 + n * 64 + ((at // 8) ^ (n % 8)) * 8 + at % 8]
                sums += a @ b.t()
    return sums


def of_thread(sums_LN: Tensor, row: int, quarter: int) -> list[float]:
    """The sums that a thread has of one row: two of every eight."""
    return [float(sums_LN[row, n * 8 + quarter * 2 + m]) for n in range(sums_LN.shape[1] // 8) for m in range(2)]


def test_a_thread_has_the_gates_of_its_units_in_forward_and_the_units_of_each_block_in_backward() -> None:
    units = 16
    torch.manual_seed(0)
    a_LK, weights_NK = (torch.randint(-9, 10, (rows, HIDDEN)).double() for rows in (64, 4 * units))
    exact_LN, each = a_LK @ weights_NK.t(), units // 4
    forward, backward = expression(r"\[\]\(int n\) \{\s*return (.+?);", EACH=each, UNITS=units)
    for row_of, wanted in ((forward, exact_LN.view(64, units, 4)), (backward, exact_LN.view(64, 4, units))):
        order = [row_of(n=n) for n in range(4 * units)]
        assert sorted(order) == list(range(4 * units))
        sums_LN = products(a_LK, tiles_of(weights_NK[order], units), units)
        for row, quarter in ((0, 0), (7, 1), (40, 2), (63, 3)):
            own = slice(quarter * each, (quarter + 1) * each)
            expected = wanted[row, own] if row_of is forward else wanted[row, :, own]
            assert of_thread(sums_LN, row, quarter) == expected.flatten().tolist()


def test_it_serves_plain_layers_whose_lanes_would_need_many_passes() -> None:
    wide, marked, few = alone(H200, 1150, 100, 70, plain=True), alone(H200, 1150, 100, 70), alone(H200, 1150, 64, 70, plain=True)
    assert wide is not None
    assert marked is not None
    assert few is not None
    assert (wide.shape.wide, wide.shape.passes, wide.shape.cluster, wide.back.cluster) == (True, 2, 0, 4)
    assert wide.of_cell("gru").shape.valid
    assert not wide.of_cell("slstm").shape.valid
    assert not marked.shape.wide
    assert not few.shape.wide
