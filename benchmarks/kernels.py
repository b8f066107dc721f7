"""Claim: our kernels run a stack forward and backward faster than cuDNN, also in a CUDA graph, and faster still with lengths; resets inside
a window and noise inside the cell cost next to nothing.

A call is the forward and backward pass of a whole stack whose input is as wide as its layers, including the input projections, the input
gradient and all weight gradients. Ours casts its float32 weights in every call, as training does. Peers run in the same process and take
turns (a round gives each one block of calls; the median over rounds counts):

- cuDNN eager: `nn.LSTM` or `nn.GRU` in the short dtype; with lengths, packed from presorted lanes, with packing and unpacking timed; with
  resets, on the sequences between them, split and padded to the longest (where they begin is known beforehand); not with noise;
- cuDNN in a graph: the same call, captured. Packing reads the lengths on the host and cannot be captured, so with lengths cuDNN runs all
  steps with the padding masked (our `aten` backend);
- compiled eager: for norms inside the cell, a loop over steps that torch.compile has compiled;
- plain: ours in a graph, without the resets or the noise of the row.

Dropout is applied between layers. The error is the largest relative error of any output or gradient against the same stack in float64,
over at most 32 steps; for cuDNN it is measured through `aten`, which draws the same dropout masks. Rows where ours is slower are included.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.harness import timing
from benchmarks.harness.command import main
from benchmarks.peers.gpu_stacks import Stack, StackCase, relative_error
from carrywave.errors import UserError
from carrywave.kernels.hopper import persistent

SHAPES = (
    (1, 256, 64, 256),
    (1, 512, 64, 256),
    (1, 1024, 16, 256),
    (1, 1024, 64, 256),
    (1, 1024, 256, 256),
    (1, 2048, 64, 256),
    (2, 650, 20, 35),
    (4, 1024, 64, 128),
    (8, 1024, 64, 128),
    (8, 512, 128, 256),
    (8, 512, 16, 256),
    (1, 512, 512, 128),
    (4, 768, 128, 128),
    (2, 1500, 20, 35),
    (1, 2048, 16, 256),
    (1, 128, 64, 256),
    (2, 200, 20, 35),
    (2, 1150, 100, 70),
)
QUICK = ((1, 128, 16, 32), (2, 64, 8, 16))
GRU_SHAPES = ((1, 512, 64, 256), (2, 650, 20, 35), (1, 1024, 64, 256), (1, 256, 64, 256), (4, 512, 16, 128))
MARKED_SHAPES = ((1, 256, 128, 128), (1, 512, 256, 128))
MARKS = {"resets": 0.03, "zoneout": 0.1, "recurrent_dropout": 0.25}
NORM_SHAPES = ((1, 512, 64, 128), (1, 1024, 64, 128))
HEAD_SHAPES = (((1, 768, 16, 1024), 12), ((1, 768, 16, 1024), 6), ((1, 1024, 64, 256), 8))  # with the number of heads
MOST_ERROR = 1.5  # times cuDNN's error, at most

PEERS = ("cudnn_eager", "cudnn_graph", "compiled_eager")
OURS = ("ours_eager", "ours_graph", "plain_graph")
BLOCK_MS, BUDGET_MS, ROUNDS = 4.0, 400.0, (3, 15)
ERROR_STEPS = 32


@dataclass
class Measured:
    """Measurements of a case. Implementations that could not run are missing; the notes say why."""

    ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    auto: str = ""
    notes: list[str] = field(default_factory=list)


def run(*, quick: bool = False, rows: Sequence[str] = ()) -> list[dict[str, object]]:
    """One row per case. `rows` selects cases that match all words of any entry: `["1x1024 bf16 padded", "8x512 B16"]`."""
    device = timing.cuda_device()
    forced = os.environ.get("CARRYWAVE_KERNEL", "")
    if forced:
        raise UserError(f"CARRYWAVE_KERNEL={forced} forces one backend, but this benchmark compares several; unset it")
    table: list[dict[str, object]] = []
    for case in cases(quick=quick, rows=rows):
        measured = measure(case, device, budget_ms=BUDGET_MS / 10 if quick else BUDGET_MS)
        table.append(row_of(case, torch.cuda.get_device_name(device), measured))
    return table


def cases(*, quick: bool = False, rows: Sequence[str] = ()) -> list[StackCase]:
    """Every shape in both dtypes, with and without lengths; stacks of several layers also with dropout between them."""
    every = [
        StackCase(*shape, dtype, lengths, dropout)
        for dtype in ("bf16", "fp16")
        for shape in (QUICK if quick else SHAPES)
        for dropout in ((0.0, 0.5) if shape[0] > 1 else (0.0,))
        for lengths in (False, True)
    ]
    shapes = QUICK[:1] if quick else MARKED_SHAPES
    every += [StackCase(*shape, dtype, cell="gru") for dtype in ("bf16", "fp16") for shape in (QUICK if quick else GRU_SHAPES)]
    if not quick:
        every += [StackCase(*shape, cell=cell, norm=True) for cell in ("lstm", "gru") for shape in NORM_SHAPES]
        every += [StackCase(*shape, cell=cell, heads=heads) for cell in ("slstm", "lstm") for shape, heads in HEAD_SHAPES]
    unmarked = [StackCase(*shape, cell=cell) for cell in ("lstm", "gru") for shape in shapes]
    every += [replace(case, **{mark: share}) for case in unmarked for mark, share in MARKS.items()]  # type: ignore[arg-type]
    asked = [frozenset(words.split()) for words in rows]
    kept = [case for case in every if not asked or any(_picks(words, case) for words in asked)]
    if not kept:
        words = "1x1024, B64, bf16, lengths, dropout0.5, gru, resets0.03"
        raise UserError(f"no case matches {' or '.join(rows)}; use words such as {words}")
    return kept


def _picks(words: frozenset[str], case: StackCase) -> bool:
    return words <= case.words and (not case.special or bool(words & case.special))


def row_of(case: StackCase, device: str, measured: Measured) -> dict[str, object]:
    """The row of a case."""
    ms = measured.ms
    best_ms = min((ms[name] for name in PEERS if name in ms), default=None)
    ours_ms = ms.get("ours_graph")
    notes = list(measured.notes)
    if len(measured.errors) == 2 and not measured.errors["ours"] <= MOST_ERROR * measured.errors["cudnn"]:
        notes.append(f"ours: its error is more than {MOST_ERROR} times cuDNN's")
    return {
        "case": case.name,
        "cell": case.cell,
        "marks": " ".join(filter(None, (case.marks, "norm" * case.norm, f"{case.heads} heads" * (case.heads > 1)))),
        "device": device,
        "dtype": case.dtype,
        "input": "lengths" if case.lengths else "padded",
        "dropout": case.dropout,
        **{f"{name}_ms": None if name not in ms else round(ms[name], 3) for name in (*PEERS, *OURS)},
        "ratio": None if ours_ms is None or best_ms is None else round(best_ms / ours_ms, 2),
        **{f"{who}_error": None if who not in measured.errors else float(f"{measured.errors[who]:.2e}") for who in ("ours", "cudnn")},
        "auto": measured.auto,
        "note": "; ".join(notes),
    }


def shown(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The rows as they fit a screen: what tells them apart in one column, and no column that is empty or the same in all."""
    named = [{"case": f"{row['case']} {row['cell']} {row['marks']} {row['dtype']} {row['input']} {row['dropout']}"} for row in rows]
    apart = ("case", "cell", "marks", "dtype", "input", "dropout", "device")
    columns = [name for name in rows[0] if name not in apart and any(row[name] not in (None, "") for row in rows)]
    return [name | {column: row[column] for column in columns} for name, row in zip(named, rows, strict=True)]


def measure(case: StackCase, device: torch.device, *, budget_ms: float) -> Measured:
    """Run a case with every implementation that supports it."""
    stack, measured = Stack(case, device), Measured()
    # Check first: a backend that cannot run a layer falls back to another, which would then be timed instead.
    refused = persistent.refusal(stack.x_TBI, stack.layers[0], None if stack.marks is None else stack.marks[0], case.cell)
    if refused and not case.norm:
        measured.notes.append(f"ours: {refused}")
    unmarked = Stack(replace(case, resets=0.0, zoneout=0.0, recurrent_dropout=0.0), device) if case.marked else None
    calls = _calls(stack, unmarked, refused, measured)
    timed = timing.time_calls(calls, block_ms=BLOCK_MS, budget_ms=budget_ms, rounds=ROUNDS)
    measured.ms |= {name: statistics.median(values) for name, values in timed.items()}
    compared = (
        ("ours",) if case.marked or case.norm or case.heads > 1 else ("ours", "cudnn")
    )  # on a marked stack, `aten` is not cuDNN alone
    measured.errors = _errors(case, device, [who for who in compared if f"{who}_eager" in calls], measured)
    measured.auto = stack.backends.choose("auto", stack.x_TBI, stack.layers[0], None if stack.marks is None else stack.marks[0])
    del calls, stack, unmarked
    gc.collect()
    torch.cuda.empty_cache()  # graphs hold private memory pools
    return measured


def _calls(stack: Stack, unmarked: Stack | None, refused: str, measured: Measured) -> dict[str, timing.Call]:
    """Every implementation, warmed up. A failure is noted and does not stop the others."""
    ours = partial(stack.ours, "auto" if stack.case.norm else "persistent")
    plain: dict[str, timing.Call] = {}
    if stack.case.norm:
        plain |= {"compiled_eager": stack.compiled}
    elif stack.case.heads == 1 and not stack.case.zoneout and not stack.case.recurrent_dropout:
        plain |= {"cudnn_eager": stack.torchs, "cudnn_graph": partial(stack.ours, "aten") if stack.case.lengths else stack.torchs}
    if not refused or stack.case.norm:
        plain |= {"ours_eager": ours, "ours_graph": ours}
        plain |= {} if unmarked is None else {"plain_graph": partial(unmarked.ours, "persistent")}
    calls: dict[str, timing.Call] = {}
    for name, call in plain.items():
        try:
            ready = timing.graphed(call) if name.endswith("_graph") else timing.warmed_up(call)
            # After a failure the dispatcher warns and falls back permanently.
            if call is ours and stack.backends.choose(ours.args[0], stack.x_TBI, stack.layers[0]) in ("reference", "aten"):
                measured.notes.append("ours: the kernel failed (see the warning)")
                break
            calls[name] = ready
        except Exception as error:
            torch.cuda.synchronize()
            measured.notes.append(f"{name}: {timing.one_line(error)}")
    return calls


def _errors(case: StackCase, device: torch.device, wanted: Sequence[str], measured: Measured) -> dict[str, float]:
    """Relative errors against float64, over at most `ERROR_STEPS` steps."""
    short = Stack(replace(case, steps=min(case.steps, ERROR_STEPS)), device)
    exact = short.exact()
    backends = {"ours": "auto" if case.norm else "persistent", "cudnn": "aten"}
    errors: dict[str, float] = {}
    for who in wanted:
        try:
            errors[who] = relative_error(short.ours(backends[who]), exact)
        except Exception as error:
            measured.notes.append(f"error of {who}: {timing.one_line(error)}")
    return errors


if __name__ == "__main__":
    main("benchmarks.kernels")
