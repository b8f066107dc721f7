"""The C file of a run: one step in the units of its data, with words on what goes in and comes out, compiled and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carrywave import __version__
from carrywave.data.tables.channels import LEAST
from carrywave.exporting.comparison import SIZES, TOLERANCE, check_difference, largest_step_difference, with_rounding
from carrywave.exporting.portable import Portable
from carrywave.exporting.single_step import c_library
from carrywave.exporting.single_step.c_source import Words, source
from carrywave.exporting.single_step.formula import Formula
from carrywave.exporting.single_step.network import network
from carrywave.exporting.single_step.step_module import StepModule
from carrywave.exporting.single_step.units import in_units
from carrywave.tasks.task import Task

MANY_NUMBERS = 500_000  # weights that a compiler takes its time with
MOST_LISTED = 64  # columns, series or labels in the comment


def c_file(task: Task, portable: Portable, name: str, note: Callable[[str], None]) -> tuple[str, Formula, float]:
    """The text of the file, its formula, and the largest difference from the model."""
    step, formula = network(portable), in_units(task, portable)
    text = source(formula, _words(task, formula, name))
    with torch.no_grad():
        module = StepModule(step)
        worst = largest_step_difference(portable, step, lambda inputs: module(*inputs), what="a step in plain operations")
        command = c_library.compiler()
        if command is None:
            note("no C compiler was found (cc, gcc or clang), so the file was written without being compiled and run")
            return text, formula, worst
        if formula.numbers > MANY_NUMBERS:
            note(f"compiling {formula.numbers:,} weights, to compare the file with the model; this may take minutes")
        return text, formula, max(worst, _difference(task, formula, c_library.runner(text, formula, command)))


def _difference(task: Task, formula: Formula, run: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> float:
    """The largest difference of the compiled file from the same formula in float64, relative to the largest output."""
    single = StepModule(formula)
    definition = copy.deepcopy(single).double()
    worst = 0.0
    for seed, (lanes, steps) in enumerate(SIZES):
        draw = torch.Generator().manual_seed(seed)
        run_state = rounded = list(formula.initial(lanes))
        state = [part.double() for part in run_state]
        which = {name: torch.randint(rows, (lanes,), generator=draw) for (name, _), rows in formula.codes().items() if name == "series"}
        for step in range(steps):
            inputs = [
                which.get(port.name, _drawn(task, formula, port.name, lanes, draw, which.get("series"))) for port in formula.step_inputs
            ]
            right, *state = definition(*(each.double() if each.is_floating_point() else each for each in inputs), *state)
            near, *rounded = single(*inputs, *rounded)
            got, *run_state = run([*inputs, *run_state])
            size, where = max(float(right.abs().amax()), 1e-30), f"{lanes} lanes, step {step + 1}"
            allowed = with_rounding(TOLERANCE, near.double() / size, right / size)
            worst = max(worst, check_difference("the C file", formula.outputs[0], got.double() / size, right / size, allowed, where))
    return worst


def _drawn(task: Task, formula: Formula, name: str, lanes: int, draw: torch.Generator, series: Tensor | None) -> Tensor:
    """Random values of an input: a token, codes, or numbers as they are in the data, of each series by its own scale if it has one."""
    codec = task.codec
    if name != "x":
        rows = [count for (port, _), count in sorted(formula.codes().items()) if port == name]
        codes = torch.stack([torch.randint(count, (lanes,), generator=draw) for count in rows], dim=1)
        return codes if name == "codes" else codes[:, 0]
    scale = (codec.mean, codec.std) if series is None else (codec.means, codec.stds)
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, len(codec.mean)) for values in scale)
    mean, std = (values.expand(lanes, -1) if series is None else values[series] for values in (mean, std))
    places_ahead = list(codec.known_columns) * (task.spec.data.horizon if codec.task == "forecasting" else 0)
    places = [*range(len(codec.mean)), *places_ahead]
    values = mean[:, places] + std[:, places] * torch.randn(lanes, len(places), generator=draw, dtype=torch.float64)
    if codec.transform in LEAST:
        for place in codec.targets:
            values[:, place] = values[:, place].exp() if codec.transform == "log" else values[:, place].expm1()
    return values.float()


def _words(task: Task, formula: Formula, name: str) -> Words:
    codec, data = task.codec, task.spec.data
    inputs = ", ".join(port.name for port in formula.step_inputs)
    about = [
        f"{name}: one step of a {codec.task} model, by carrywave {__version__}. C99, with math.h and nothing else.",
        "",
        "    model_state state;    // of one sequence; there may be any number of them",
        "    model_init(&state);   // before its first step",
        f"    model_step(&state, {inputs}, {formula.outputs[0].name});",
        "",
        "Compile it with cc -std=c99 -O2 -c model.c, and link with -lm. Other files include it after #define MODEL_DECLARATIONS.",
        "To try it: cc -std=c99 -O2 -DMODEL_MAIN model.c -lm -o model; it reads steps from standard input, and prints a line for each.",
        "",
        *(_input(task, port.name) for port in formula.step_inputs),
        f"Out: {_output(task)}.",
    ]
    if data.reset is not None:
        about.append(f"A document ends with data.reset={data.reset}: call model_init before the step after it.")
    constants = {}
    if data.multi_label:
        about.append("A label holds if its probability is at least MODEL_THRESHOLD.")
        constants["MODEL_THRESHOLD"] = f"{float(task.spec.train.threshold)!r}f"
    if codec.task == "forecasting":
        sizes = {"HORIZON": data.horizon, "COLUMNS": len(codec.targets), "QUANTILES": len(data.quantiles or (0,))}
        constants |= {f"MODEL_{name}": str(size) for name, size in sizes.items()}
    least = dict.fromkeys(codec.targets, LEAST[codec.transform]) if codec.transform in LEAST else {}
    return Words(about, constants, codec.labels, codec.vocabulary if codec.kind in ("char", "word") else (), least)


def _output(task: Task) -> str:
    codec, data = task.codec, task.spec.data
    match codec.task:
        case "language":
            return "the probability of each token to be the next"
        case "regression":
            of = f"at this step: {_listed(codec.step_targets)}" if codec.step_targets else "of the sequence so far"
            return f"the values {of}, in the units of the data"
        case "forecasting":
            levels = ", each with its quantiles " + ", ".join(f"{level:g}" for level in data.quantiles) if data.quantiles else ""
            columns = "the column" if codec.channels else _listed([codec.columns[place] for place in codec.targets])
            return f"the forecasts of the next {data.horizon} rows, one row after the other: {columns}{levels}, in the units of the data"
    each = "for the sequence so far" if codec.task == "classification" else "for this step"
    return f"the probability of each of model_labels, {each}"


def _input(task: Task, name: str) -> str:
    """What the comment says about an input."""
    codec = task.codec
    ahead = range(1, task.spec.data.horizon + 1) if codec.task == "forecasting" else ()
    match name:
        case "token":
            places = {"char": "its place in model_vocabulary", "int": "as it is in the data"}
            places |= {"word": places["char"], "byte": "the byte"}
            where = places.get(codec.kind or "", "its number; the tokenizer is codec.bpe in model.json")
            where += ", in lower case" if codec.lowercase else ""
            return f"In: token, from 0 to {codec.size - 1}: {where}."
        case "series":
            return f"In: series, the one that this is, from 0 to {len(codec.names) - 1}: {_listed(codec.names)}."
        case "codes":
            ahead_names = [name for name in codec.categorical if name in codec.known]
            names = [*codec.categorical, *(f"{name}, {step} ahead" for step in ahead for name in ahead_names)]
            return f"In: codes, the place of each value in codec.categories of model.json, from 1; 0 if it is not there: {_listed(names)}."
    ahead_names = [codec.columns[place] for place in codec.known_columns]
    names = [*codec.columns, *(f"{name}, {step} ahead" for step in ahead for name in ahead_names)]
    return f"In: x, numbers as they are in the data: {_listed(names)}."


def _listed(names: Sequence[str]) -> str:
    """Names by their places; where they are no more than these, just how many."""
    if list(names) == [str(place) for place in range(len(names))]:
        return f"{len(names)} of them"
    more = f", … ({len(names) - MOST_LISTED} more)" if len(names) > MOST_LISTED else ""
    return ", ".join(f"[{place}] {name}" for place, name in enumerate(names[:MOST_LISTED])) + more
