"""A trained LSTM or GRU as one C99 file: weights as constant arrays, a struct for the state of a sequence, and a function for a step.

Numbers go in as they are in the data, and what comes out is what `predict` says. The functions that the step calls are in layers.c.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave import __version__
from carrywave.errors import UserError
from carrywave.exporting.portable import Portable
from carrywave.model.encoders import Embedding, Features
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import Pooled
from carrywave.model.portable_names import beyond_cell
from carrywave.tasks.task import Task

MOST_NUMBERS = 5_000_000  # of weights: compilers take about 200 bytes for each of them, and minutes for this many
FARTHEST = "1e25f"  # numbers that are larger are refused, as in training
MOST_LISTED = 64  # columns in the comment
A_LINE = 8
CELLS = ("lstm", "gru")


def check_c(task: Task, portable: Portable) -> None:
    """Refuse what the file has no form of."""
    model, codec, numbers = portable.model, task.codec, sum(each.numel() for each in portable.parameters())
    found = {
        f"the cell {model.lstm.cell.name}": model.lstm.cell.name not in CELLS,
        beyond_cell(model.lstm): bool(beyond_cell(model.lstm)),
        "forecasts": codec.task == "forecasting",
        "data.standardize=sequence": codec.own_scale,
        "data.missing=mask": codec.masked,
        f"the head {type(model.head).__name__}": not hasattr(model.head, "weight"),
        f"the encoder {type(model.encoder).__name__}": model.encoder is not None and "Spelled" in type(model.encoder).__name__,
        f"more than {MOST_NUMBERS:,} weights, with which compilers struggle,": numbers > MOST_NUMBERS,
    }
    for what, here in found.items():
        if here:
            raise UserError(f"a C file has no form of {what}; use --to onnx --step, which computes what the model does, in its own units")


def in_units(task: Task, portable: Portable, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the file computes, by the model itself: a step from numbers as they are in the data to probabilities or values."""
    codec, given = task.codec, list(inputs)
    if codec.kind is None:
        given[0] = (given[0] - given[0].new_tensor(codec.mean)) / given[0].new_tensor(codec.std)
    out, *state = portable(*given)
    if codec.task == "regression":
        out = out * out.new_tensor(codec.target_std) + out.new_tensor(codec.target_mean)
    else:
        out = out.sigmoid() if task.spec.data.multi_label else out.softmax(-1)
    return [out, *state]


def source(task: Task, portable: Portable, name: str) -> str:
    """The text of the file."""
    return "\n".join(_Source(task, portable).lines(name)) + "\n"


class _Source:
    def __init__(self, task: Task, portable: Portable) -> None:
        self.task, self.model, self.codec, self.portable = task, portable.model, task.codec, portable
        self.arrays: dict[str, Tensor] = {}
        self.outputs = int(portable.outputs[0].shape[1])
        self.result = "values" if task.codec.task == "regression" else "probabilities"

    def lines(self, name: str) -> Iterator[str]:
        step = list(self.step())  # which finds the arrays that it reads
        yield from self.comment(name)
        yield from self.declarations()
        for title, texts in self.texts():
            yield from (f"const char *const {title}[{len(texts)}] = {{", *(f'    "{quoted(text)}",' for text in texts), "};", "")
        for title, tensor in self.arrays.items():
            numbers = [written(value) for value in tensor.detach().float().reshape(-1).tolist()]
            yield f"static const float {title}[{len(numbers)}] = {{"
            yield from (f"    {', '.join(numbers[first : first + A_LINE])}," for first in range(0, len(numbers), A_LINE))
            yield "};"
        yield (files("carrywave.exporting") / "layers.c").read_text("utf-8")
        yield from step
        yield (files("carrywave.exporting") / "main.c").read_text("utf-8").rstrip()

    def comment(self, name: str) -> Iterator[str]:
        codec = self.codec
        state, weights = (4 * sum(each.numel() for each in tensors) for tensors in (self.portable.start(1), self.arrays.values()))
        number = "token, its place in model_vocabulary" if codec.kind in ("char", "word") else "token, its number"
        columns = ", ".join(f"[{place}] {column}" for place, column in enumerate(codec.columns[:MOST_LISTED]))
        given = f"x, numbers as they are in the data: {columns}" if codec.kind is None else number
        when = "" if not self.model.pooled else " of the sequence so far"
        targets = ", ".join(codec.step_targets)
        what = f"the values{when} {targets}".rstrip() if self.result == "values" else f"the probability of each label or token{when}"
        about = [
            f"{name}: one step of a {codec.task} model, by carrywave {__version__}. C99, with math.h and nothing else.",
            "",
            "    model_state state;    // of one sequence; there may be any number of them",
            "    model_init(&state);   // before its first step",
            f"    model_step(&state, {', '.join(name for name, _ in self.inputs())}, {self.result});",
            "",
            "Compile it with cc -std=c99 -O2 -c model.c, and link with -lm. Other files include it after #define MODEL_DECLARATIONS.",
            "To try it: cc -std=c99 -O2 -DMODEL_MAIN model.c -lm -o model; it reads steps from standard input, and prints a line for each.",
            "",
            f"In: {given}. Out: {what}.",
            f"Weights: {weights:,} bytes. State: {state:,} bytes for each sequence.",
        ]
        yield from ("/*", *(f" * {remarked(line)}".rstrip() for line in about), " */")

    def inputs(self) -> Iterator[tuple[str, str]]:
        """The name of each input, and its declaration."""
        yield ("x", "const float *x") if self.codec.kind is None else ("token", "int token")
        if isinstance(self.model.encoder, Features):
            yield "codes", "const int *codes"

    def texts(self) -> Iterator[tuple[str, Sequence[str]]]:
        if self.codec.labels:
            yield "model_labels", self.codec.labels
        if self.codec.kind in ("char", "word"):
            yield "model_vocabulary", self.codec.vocabulary

    def signature(self) -> str:
        return f"int model_step(model_state *state, {', '.join(declared for _, declared in self.inputs())}, float *{self.result})"

    def declarations(self) -> Iterator[str]:
        yield from ("#ifndef CARRYWAVE_MODEL", "#define CARRYWAVE_MODEL", "")
        encoder = self.model.encoder
        yield f"#define MODEL_OUTPUTS {self.outputs}"
        yield f"#define MODEL_NUMBERS {len(self.codec.columns) if self.codec.kind is None else 0}"
        yield f"#define MODEL_CODES {len(encoder.inputs.places) if isinstance(encoder, Features) else 0}"
        yield f"#define MODEL_STEP(state, token, x, codes, out) model_step(state, {', '.join(name for name, _ in self.inputs())}, out)"
        if self.task.spec.data.multi_label:
            yield "#define MODEL_THRESHOLD 0.5f"
        yield from ("", "typedef struct {", *(f"    float {port.name}[{port.shape[1]}];" for port in self.portable.state))
        yield from ("} model_state;", "", "/* Begin a sequence. */", "void model_init(model_state *state);", "")
        yield "/* Read a step, and write what the model says after it. Returns 0, or -1 if an input is out of range: nothing is done. */"
        yield from (f"{self.signature()};", "", *(f"extern const char *const {name}[{len(texts)}];" for name, texts in self.texts()))
        yield from ("", "#endif", "", "#ifndef MODEL_DECLARATIONS", "#include <math.h>", "")

    def array(self, name: str, tensor: Tensor | None) -> str:
        """The name of a constant array; of none, a null pointer."""
        if tensor is None:
            return "0"
        self.arrays[name] = tensor
        return name

    def step(self) -> Iterator[str]:
        yield from ("void model_init(model_state *state)", "{")
        for port, first in zip(self.portable.state, self.portable.start(1), strict=True):
            value = f"{self.array(f'initial_{port.name}', first[0])}[i]" if first.any() else "0.0f"
            yield from (f"    for (int i = 0; i < {port.shape[1]}; i++)", f"        state->{port.name}[i] = {value};")
        yield from ("}", "", self.signature(), "{")
        y, lstm = (yield from self.encoded()), self.model.lstm
        yield f"    float gates[{2 * lstm.cell.gates * max(lstm.widths)}], wide[{max(lstm.widths)}];"
        for layer, hidden in enumerate(lstm.widths):
            y = yield from self.layer(layer, hidden, y)
        yield from self.head(y, lstm.output_size)
        yield from ("    (void)wide;", "    return 0;", "}")

    def encoded(self) -> Generator[str, None, str]:
        """Check the inputs and encode them; returns the name of the row that the first layer reads."""
        codec, encoder, lstm = self.codec, self.model.encoder, self.model.lstm
        if isinstance(encoder, Embedding):
            yield from (f"    if (token < 0 || token >= {encoder.vocabulary})", "        return -1;")
            return f"{self.array('embedding', encoder.weight)} + (long)token * {encoder.width}"
        count = len(codec.columns)
        yield from (f"    for (int i = 0; i < {count}; i++)", f"        if (!(fabsf(x[i]) <= {FARTHEST}))", "            return -1;")
        if isinstance(encoder, Features):
            for place, table in enumerate(encoder.inputs.places):
                yield from (
                    f"    if (codes[{place}] < 0 || codes[{place}] >= {encoder.inputs.tables[table][0]})",
                    "        return -1;",
                )
        mean, std = (self.array(f"data_{name}", torch.tensor(values)) for name, values in (("mean", codec.mean), ("std", codec.std)))
        yield f"    float input[{lstm.input_size}];"
        yield from (f"    for (int i = 0; i < {count}; i++)", f"        input[i] = (x[i] - {mean}[i]) / {std}[i];")
        if isinstance(encoder, Features):
            done = count
            for place, table in enumerate(encoder.inputs.places):
                width, weight = encoder.inputs.tables[table][1], self.array(f"categories_{table}", encoder.tables[table])
                yield f"    for (int i = 0; i < {width}; i++)"
                yield f"        input[{done} + i] = {weight}[(long)codes[{place}] * {width} + i];"
                done += width
        return "input"

    def layer(self, layer: int, hidden: int, x: str) -> Generator[str, None, str]:
        """One layer; returns the name of its output."""
        lstm, [weights] = self.model.lstm, self.model.lstm.weights(layer)
        rows, inputs, width = lstm.cell.gates * hidden, weights.w_ih.shape[1], lstm.outputs(layer)
        arrays = {name: getattr(weights, name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")}
        w_ih, w_hh, b_ih, b_hh, w_hr = (self.array(f"l{layer}_{name}", tensor) for name, tensor in arrays.items())
        h, target = f"state->h_l{layer}", f"state->h_l{layer}" if weights.w_hr is None else "wide"
        yield f"    linear(gates, {w_ih}, {b_ih}, {x}, {rows}, {inputs});"
        yield f"    linear(gates + {rows}, {w_hh}, {b_hh}, {h}, {rows}, {width});"
        carry = f"{target}, state->c_l{layer}" if lstm.cell.name == "lstm" else target
        yield f"    {lstm.cell.name}_step({carry}, gates, {hidden});"
        yield from [f"    linear({h}, {w_hr}, 0, wide, {width}, {hidden});"] if weights.w_hr is not None else []
        if not lstm.layer_norm:
            return h
        norm = getattr(lstm, f"norm_l{layer}")
        gain, bias = (self.array(f"l{layer}_norm_{name}", getattr(norm, name)) for name in ("weight", "bias"))
        yield f"    float y{layer}[{width}];"
        yield f"    normed(y{layer}, {h}, {gain}, {bias}, {width}, {written(norm.eps)});"
        return f"y{layer}"

    def head(self, y: str, width: int) -> Iterator[str]:
        head: Any = self.model.head
        codec = self.codec
        if isinstance(head, Pooled):
            y = yield from self.pooled(head, y, width)
        tied = isinstance(head, Softmax) and isinstance(self.model.encoder, Embedding) and head.weight is self.model.encoder.weight
        weight, bias = self.array("embedding" if tied else "head_weight", head.weight), self.array("head_bias", head.bias)
        yield f"    linear({self.result}, {weight}, {bias}, {y}, {self.outputs}, {head.weight.shape[1]});"
        if self.result == "values":
            mean, std = (
                self.array(f"target_{name}", torch.tensor(values))
                for name, values in (("mean", codec.target_mean), ("std", codec.target_std))
            )
            yield from (f"    for (int i = 0; i < {self.outputs}; i++)", f"        values[i] = values[i] * {std}[i] + {mean}[i];")
        elif self.task.spec.data.multi_label:
            yield from (f"    for (int i = 0; i < {self.outputs}; i++)", "        probabilities[i] = sigmoid(probabilities[i]);")
        else:
            yield f"    softmax(probabilities, {self.outputs});"

    def pooled(self, head: Pooled, y: str, width: int) -> Generator[str, None, str]:
        """What a pooled head reads of the steps so far; returns its name."""
        kept, pool = "state->pooled", head.pooling
        yield f"    float steps = state->count[0] + 1.0f, read[{head.weight.shape[1]}];"
        yield "    state->count[0] = steps;"
        if pool == "attention":
            yield f"    attended(read, {kept}, {y}, {self.array('head_query', head.query)}, {width}, steps);"
            return "read"
        yield f"    for (int i = 0; i < {width}; i++) {{"
        if pool in ("mean", "mean_max"):
            yield from (f"        {kept}[i] += {y}[i];", f"        read[i] = {kept}[i] / steps;")
        if pool in ("max", "mean_max"):
            place = f"{width if pool == 'mean_max' else 0} + i"
            yield f"        read[{place}] = {kept}[{place}] = steps > 1.0f ? fmaxf({kept}[{place}], {y}[i]) : {y}[i];"
        if pool == "last":
            yield f"        read[i] = {kept}[i] = {y}[i];"
        yield "    }"
        return "read"


def written(value: float) -> str:
    """A number as a float constant of C, with enough digits to be read as the same."""
    text = f"{float(np.float32(value)):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def remarked(text: str) -> str:
    """A text within a comment of C, on one line: nothing in it ends the comment, begins another, or is a trigraph."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"(?<=\?)(?=\?)|(?<=\*)(?=/)|(?<=/)(?=\*)", " ", plain)


def quoted(text: str) -> str:
    """A text within a string of C, in ASCII: others are octal numbers, which no digit after them can be taken for a part of."""
    plain = {ord(each) for each in map(chr, range(32, 127))} - {ord(each) for each in '"\\?'}
    return "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode("utf-8", "replace"))
