"""A `Formula` as one C99 file: the weights as constant arrays, a struct for the state, and a function for a step of one sequence.

Each operation becomes a loop over a row. Rows that are not needed any more make room for others, so the step needs little memory, all of it
on the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.single_step.formula import BINARY, UNARY, Formula, Operation, Value

MOST_NUMBERS = 5_000_000  # of weights: compilers take about 200 bytes for each of them, and minutes for this many
FARTHEST = "1e25f"  # numbers that are larger are refused, as in training
A_LINE = 8

EXPRESSIONS = {
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "relu": "fmaxf({0}, 0.0f)",
    "sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "softplus": "fmaxf({0}, 0.0f) + log1pf(expf(-fabsf({0})))",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "fmaxf({0}, {1})",
    "minimum": "fminf({0}, {1})",
}  # others are functions of math.h with the same name and an f at the end

LINEAR = """
/* y = W x; of several blocks, each reads its own part of x, and in every period of rows the blocks take their turns. */
static void linear(float *y, const float *weight, const float *x, int rows, int columns, int blocks, int period)
{
    for (int row = 0; row < rows; row++) {
        const float *own = x + row % period / (period / blocks) * columns;
        float sum = 0.0f;
        for (int column = 0; column < columns; column++)
            sum += weight[column] * own[column];
        weight += columns;
        y[row] = sum;
    }
}
"""


@dataclass(frozen=True)
class Words:
    """What the file says about its data."""

    about: Sequence[str]  # lines of the comment at the top
    constants: Mapping[str, str] = field(default_factory=dict)  # further macros
    labels: Sequence[str] = ()  # of the outputs
    vocabulary: Sequence[str] = ()  # of the tokens
    least: Mapping[int, float] = field(default_factory=dict)  # numbers of x that must be larger than this


def source(formula: Formula, words: Words) -> str:
    """The text of the file."""
    if formula.numbers > MOST_NUMBERS:
        fact = f"the weights are {formula.numbers:,} numbers, and compilers struggle with more than {MOST_NUMBERS:,} in one file"
        raise UserError(f"{fact}; use --to onnx --step")
    return _Source(formula, words).text()


class _Source:
    def __init__(self, formula: Formula, words: Words) -> None:
        assert formula.result is not None
        self.formula, self.words = formula, words
        self.operations = formula.needed
        self.weights = {name: f"w_{re.sub('[^a-z0-9]+', '_', name.lower())}" for name in formula.weights}
        self.names = {**self.weights, **{port.name: port.name for port in formula.step_inputs}}
        self.names |= {name: f"state->{name}" for name in formula.states}
        self.port, self.out = formula.result
        self.bounds = formula.codes()
        self.single = {port.name for port in formula.step_inputs if len(port.shape) == 1}  # numbers, where others are arrays

    def text(self) -> str:
        """The whole file: a part with declarations, and one with everything else."""
        steps = list(self.lines_of_step())
        # The comment at the top says how much memory a step takes, which is known only now.
        return "\n".join([*self.comment(), *self.declarations(), *self.arrays(), *self.initial(), *steps, *self.main(), "#endif", ""])

    @property
    def arguments(self) -> str:
        inputs = [
            f"int {port.name}" if len(port.shape) == 1 else f"const {_kind(port.dtype)} *{port.name}" for port in self.formula.step_inputs
        ]
        return ", ".join(["model_state *state", *inputs, f"float *{self.port.name}"])

    def comment(self) -> Iterator[str]:
        state = sum(each.value.width for each in self.formula.states.values())
        sizes = [
            f"Weights: {4 * self.formula.numbers:,} bytes. State: {4 * state:,} bytes for each sequence. A step needs {4 * self.room:,} "
            "bytes of stack.",
        ]
        yield "/*"
        for line in [*self.words.about, "", *sizes]:
            yield f" * {_remarked(line)}".rstrip()
        yield " */"

    def declarations(self) -> Iterator[str]:
        """Types, constants and functions."""
        yield from ("#ifndef CARRYWAVE_MODEL", "#define CARRYWAVE_MODEL", "")
        sizes = {f"MODEL_{'NUMBERS' if p.name == 'x' else 'CODES'}": p.shape[1] for p in self.formula.step_inputs if len(p.shape) > 1}
        for name, value in {**sizes, "MODEL_OUTPUTS": self.out.width, **self.words.constants}.items():
            yield f"#define {name} {value}"
        yield from ("", "typedef struct {")
        yield from (f"    float {name}[{each.value.width}];" for name, each in self.formula.states.items())
        yield from ("} model_state;", "")
        yield from ("/* Begin a sequence. */", "void model_init(model_state *state);", "")
        yield "/* Read a step, and write what the model says after it. Returns 0, or -1 if an input is out of range: nothing is done. */"
        yield from (f"int model_step({self.arguments});", "")
        for name, texts in self._texts():
            yield from (f"extern const char *const {name}[{len(texts)}];", "")
        yield from ("#endif", "", "#ifndef MODEL_DECLARATIONS", "#include <math.h>", "")

    def arrays(self) -> Iterator[str]:
        """Labels and weights."""
        for name, texts in self._texts():
            yield f"const char *const {name}[{len(texts)}] = {{"
            yield from (f'    "{_quoted(text)}",' for text in texts)
            yield "};\n"
        read = {each.name for operation in self.operations for each in operation.inputs if isinstance(each, Value)}
        for name, weight in self.formula.weights.items():
            if name in read:
                yield f"/* {name} {list(weight.shape)} */"
                yield from _array(self.weights[name], weight)
        for name, each in self.formula.states.items():
            if each.uniform is None:
                yield from _array(f"initial_{name}", each.initial)

    def initial(self) -> Iterator[str]:
        """The function that begins a sequence."""
        yield from ("void model_init(model_state *state)", "{")
        for name, each in self.formula.states.items():
            value = f"initial_{name}[i]" if each.uniform is None else _number(each.uniform)
            yield from (f"    for (int i = 0; i < {each.value.width}; i++)", f"        state->{name}[i] = {value};")
        yield "}"

    def lines_of_step(self) -> Iterator[str]:
        """The function of a step."""
        room = _Room(self.operations, {self.out.name, *(value.name for value in self.formula.after.values())})
        body = [line for operation in self.operations for line in self._operation(operation, room)]
        self.room = room.size
        yield from [LINEAR] if any(operation.kind == "linear" for operation in self.operations) else [""]
        yield from (f"int model_step({self.arguments})", "{")
        yield from self._checks()
        yield from [f"    float work[{room.size}];", ""] if room.size else []
        yield from body
        yield from self._copied(self.port.name, self.out)
        for name in self.formula.states:
            yield from self._copied(f"state->{name}", self.formula.after[name])
        yield from ("    return 0;", "}")

    def _texts(self) -> Iterator[tuple[str, Sequence[str]]]:
        yield from [("model_labels", self.words.labels)] if self.words.labels else []
        yield from [("model_vocabulary", self.words.vocabulary)] if self.words.vocabulary else []

    def _checks(self) -> Iterator[str]:
        for port in self.formula.step_inputs:
            if len(port.shape) == 1:
                yield from (f"    if ({port.name} < 0 || {port.name} >= {self.bounds[port.name, 0]})", "        return -1;")
            elif not port.dtype.is_floating_point:
                rows = [self.bounds[port.name, place] for place in range(int(port.shape[1]))]
                yield f"    static const int {port.name}_rows[] = {{{', '.join(map(str, rows))}}};"
                yield f"    for (int i = 0; i < {len(rows)}; i++)"
                yield from (f"        if ({port.name}[i] < 0 || {port.name}[i] >= {port.name}_rows[i])", "            return -1;")
            else:
                yield f"    for (int i = 0; i < {port.shape[1]}; i++)"
                yield from (f"        if (!(fabsf({port.name}[i]) <= {FARTHEST}))", "            return -1;")
        for place, least in self.words.least.items():
            yield from (f"    if (!(x[{place}] > {_number(least)}))", "        return -1;")

    def _copied(self, to: str, value: Value) -> Iterator[str]:
        yield from (f"    for (int i = 0; i < {value.width}; i++)", f"        {to}[i] = {self.names[value.name]}[i];")

    def _operation(self, operation: Operation, room: _Room) -> Iterator[str]:
        kind, out, sizes = operation.kind, operation.out, operation.sizes
        name = self.names[out.name] = f"t{len(self.names)}"
        operands = [each if isinstance(each, Value) else _number(each) for each in operation.inputs]
        rows = [self.names[each.name] if isinstance(each, Value) else each for each in operands]
        if kind == "part":
            yield f"    const float *const {name} = {rows[0]} + {sizes['low']};"
            return
        if kind == "row":
            code = rows[1] if rows[1] in self.single else f"{rows[1]}[{sizes['place']}]"
            yield f"    const float *const {name} = {rows[0]} + {out.width} * {code};"
            return
        yield f"    float *const {name} = work + {room.place(operation)};"
        if kind in (*UNARY, *BINARY):
            pairs = zip(operands, rows, strict=True)
            terms = [row if not isinstance(each, Value) else f"{row}[{'0' if each.width == 1 else 'i'}]" for each, row in pairs]
            yield f"    for (int i = 0; i < {out.width}; i++)"
            yield f"        {name}[i] = {EXPRESSIONS.get(kind, f'{kind}f({{0}})').format(*terms)};"
        elif kind == "linear":
            yield f"    linear({name}, {rows[1]}, {rows[0]}, {out.width}, {sizes['columns']}, {sizes['blocks']}, {sizes['period']});"
        elif kind == "joined":
            done = 0
            for each, row in zip(operands, rows, strict=True):
                assert isinstance(each, Value)
                yield f"    for (int i = 0; i < {each.width}; i++)"
                yield f"        {name}[{done} + i] = {row}[i];"
                done += each.width
        else:
            [value] = operands
            assert isinstance(value, Value)
            yield from _gathered(kind, name, rows[0], value.width, out.width, sizes)

    def main(self) -> Iterator[str]:
        """A program to try the file with: it reads steps and prints outputs."""
        yield from ("", "#ifdef MODEL_MAIN", "#include <stdio.h>", "", "int main(void)", "{")
        yield f"    static model_state state;\n    float {self.port.name}[MODEL_OUTPUTS];"
        reads, names = [], []
        for port in self.formula.step_inputs:
            names.append(port.name)
            kind, format = _kind(port.dtype), "%f" if port.dtype.is_floating_point else "%d"
            if len(port.shape) == 1:
                yield f"    int {port.name};"
                reads += [f'        if (scanf("{format}", &{port.name}) != 1)', "            return 0;"]
            else:
                yield f"    {kind} {port.name}[{port.shape[1]}];"
                reads += [f"        for (int i = 0; i < {port.shape[1]}; i++)", f'            if (scanf("{format}", &{port.name}[i]) != 1)']
                reads += ["                return 0;"]
        yield from ("", "    model_init(&state);", "    for (;;) {", *reads)
        yield f"        if (model_step(&state, {', '.join([*names, self.port.name])}) != 0) {{"
        yield from ('            fprintf(stderr, "an input is out of range\\n");', "            return 2;", "        }")
        yield "        for (int i = 0; i < MODEL_OUTPUTS; i++)"
        yield f"            printf(\"%.9g%c\", (double){self.port.name}[i], i + 1 < MODEL_OUTPUTS ? ' ' : '\\n');"
        yield from ("    }", "}", "#endif")


class _Room:
    """Where each row lies in the memory of a step: a place that no row takes that is still to be read."""

    def __init__(self, operations: Sequence[Operation], kept: Iterable[str]) -> None:
        self.last: dict[str, int] = {}  # when the memory of a row is read for the last time
        self.number = {operation.out.name: number for number, operation in enumerate(operations)}
        self.owner: dict[str, str] = {}
        for number, operation in enumerate(operations):
            for each in operation.inputs:
                if isinstance(each, Value):
                    self.last[self._owner(each.name)] = number
            if operation.kind == "part" and isinstance(whole := operation.inputs[0], Value):
                self.owner[operation.out.name] = self._owner(whole.name)
        self.last |= {self._owner(name): len(operations) for name in kept}
        self.occupied: list[tuple[int, int, str]] = []  # (first, end, row)
        self.size = 0

    def _owner(self, name: str) -> str:
        """The row whose memory a part is in."""
        return self.owner.get(name, name)

    def place(self, operation: Operation) -> int:
        """Room for what an operation makes."""
        now, width, first = self.number[operation.out.name], operation.out.width, 0
        self.occupied = sorted(each for each in self.occupied if self.last.get(each[2], -1) >= now)
        for low, high, _ in self.occupied:
            if low - first >= width:
                break
            first = max(first, high)
        self.occupied.append((first, first + width, operation.out.name))
        self.size = max(self.size, first + width)
        return first


def _gathered(kind: str, name: str, row: str, before: int, after: int, sizes: Mapping[str, int]) -> Iterator[str]:
    """The loops of an operation that puts elements elsewhere, or makes one of several."""
    if kind == "turned":
        columns = after // sizes["rows"]
        yield f"    for (int i = 0; i < {after}; i++)"
        yield f"        {name}[i % {columns} * {sizes['rows']} + i / {columns}] = {row}[i];"
        return
    count = before // after
    yield f"    for (int i = 0; i < {after}; i++) {{"
    yield f"        float found = {row}[i * {count}];"
    yield f"        for (int j = 1; j < {count}; j++)"
    yield f"            found = {f'found + {row}[i * {count} + j]' if kind == 'mean' else f'fmaxf(found, {row}[i * {count} + j])'};"
    yield f"        {name}[i] = {f'found / {_number(float(count))}' if kind == 'mean' else 'found'};"
    yield "    }"


def _array(name: str, tensor: Tensor) -> Iterator[str]:
    numbers = [_written(value) for value in tensor.detach().float().reshape(-1).tolist()]
    yield f"static const float {name}[{len(numbers)}] = {{"
    for first in range(0, len(numbers), A_LINE):
        yield f"    {', '.join(numbers[first : first + A_LINE])},"
    yield "};\n"


def _number(value: float) -> str:
    """A number as a float constant of C."""
    return _written(float(np.float32(value)))


def _written(value: float) -> str:
    """A number of float32 as a constant of C, with enough digits to be read as the same."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "int"


def _remarked(text: str) -> str:
    """A text within a comment of C, on one line: nothing in it ends the comment, begins another, or is a trigraph."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"(?<=\?)(?=\?)|(?<=\*)(?=/)|(?<=/)(?=\*)", " ", plain)


def _quoted(text: str) -> str:
    """A text within a string of C, in ASCII: others are octal numbers, which no digit after them can be taken for a part of."""
    plain = {ord(each) for each in map(chr, range(32, 127))} - {ord(each) for each in '"\\?'}
    return "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode("utf-8", "replace"))
