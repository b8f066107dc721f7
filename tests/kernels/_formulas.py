"""The formulas of `cell.cuh` as Python functions over tensors: what is tested is what the kernel's source says.

Reads the few forms that its formulas have: declarations and assignments, several of them between commas, conditional expressions,
statements behind an `if`, and results in braces. Anything else does not compile here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carrywave.kernels.hopper.marks import Noise

SOURCE = "cell.cuh"


class NoiseOf(NamedTuple):
    """What noise does to one unit at a step, for many of them."""

    candidate: Tensor | float = 1.0
    old_h: Tensor | float = 0.0
    old_memory: Tensor | float = 0.0


def noise_of(noise: Noise | None, bytes_NU: Tensor | None) -> NoiseOf:
    """The noise of some units, from their bytes where there are any."""
    if noise is None:
        return NoiseOf(*_formula("of", "lstm", False)(bytes_NU)[0])
    fields = tuple(noise._asdict().items())
    fields = (("bytes", noise.bytes_TBP is not None), *fields[1:])
    return NoiseOf(*_formula("of", "lstm", True, fields)(bytes_NU)[0])


def forward(cell: str, noise: NoiseOf | None, a: Sequence[Tensor], memory: Tensor, h_before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next h, what backward needs of the four numbers [..., 4], and the memory."""
    h, after = _formula("cell_forward", cell, noise is not None)(list(a), memory, h_before, noise or NoiseOf())
    return h, torch.stack(after["a"], dim=-1), after["memory"]


def backward(
    cell: str, noise: NoiseOf | None, a: Sequence[Tensor], before: Tensor, now: Tensor, dh: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the four sums [..., 4], of the memory before the step, and of h before it but for the recurrent product."""
    _, slopes = _formula("Slopes", cell, noise is not None)(list(a), before, now, noise or NoiseOf())
    apply = _formula("apply", cell, noise is not None)
    apply.__globals__.update(slopes)
    _, after = apply(dh, [torch.full_like(dh, torch.nan)] * 4, memory, None)
    return torch.stack(after["d"], dim=-1), after["memory"], after["past"] + torch.zeros_like(dh)


@cache
def _formula(name: str, cell: str, noise: bool, fields: tuple[tuple[str, Any], ...] = ()) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function of the source: returns its result, and all its variables as it leaves them."""
    text = _preprocessed(files("carrywave.kernels").joinpath("source", SOURCE).read_text("utf-8"), cell)
    found = re.search(rf"\b{name}\(([^{{;]*)\) (?:const )?\{{", text)
    assert found is not None, f"{SOURCE} has no {name}"
    parameters = [re.findall(r"[a-z_]\w*", re.sub(r"\[\d\]", "", each))[-1] for each in found[1].split(", ")]
    body, depth = text[found.end() :], 1
    for end, letter in enumerate(body):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            body = body[:end]
            break
    lines = [f"def {name}({', '.join(parameters)}):"]
    for statement in filter(None, map(str.strip, body.split(";"))):
        lines += [f"    {line}" for line in _statement(" ".join(statement.split()))]
    known: dict[str, Any] = {"NOISE": noise, "sigmoid": torch.sigmoid, "tanh_": torch.tanh, "choose": _choose, **dict(fields)}
    if name != "mixed":
        known["mixed"] = lambda *given: _formula("mixed", cell, noise)(*given)[0]
    exec(compile("\n".join([*lines, "    return None, locals()"]), SOURCE, "exec"), known)
    made: Callable[..., tuple[Any, dict[str, Any]]] = known[name]
    return made


def _preprocessed(text: str, cell: str) -> str:
    """Without comments, and with one cell's lines only."""
    kept, shown = [], True
    for line in re.sub(r"//.*", "", text).splitlines():
        if line.startswith("#if CELL == LSTM"):
            shown = cell == "lstm"
        elif line.startswith("#else"):
            shown = not shown
        elif line.startswith("#endif"):
            shown = True
        elif shown and not line.startswith("#"):
            kept.append(line)
    return "\n".join(kept)


def _statement(text: str) -> list[str]:
    """The lines of one statement."""
    condition = re.match(r"if \((!?\w+)\) ", text)
    if condition is not None:
        return [f"if {_expression(condition[1])}:", *(f"    {line}" for line in _statement(text[condition.end() :]))]
    if text.startswith("return "):
        return [f"return {_expression(text.removeprefix('return '))}, locals()"]
    lines = []
    for each in _apart(text.removeprefix("float "), ","):
        assigned = re.fullmatch(r"(\w+(?:\[\d\])?) ([-+]?)= (.+)", each)
        assert assigned is not None, f"{each} is no assignment"
        to, sign, value = assigned.groups()
        lines.append(f"{to} = {to} {sign} ({_expression(value)})" if sign else f"{to} = {_expression(value)}")
    return lines


def _expression(text: str) -> str:
    text = re.sub(r"(\d)f\b", r"\1", text.strip())
    if text.startswith("{"):
        return f"({', '.join(map(_expression, _apart(text[1:-1], ',')))},)"
    condition, *rest = _apart(text, "?")
    if rest:
        yes, no = _apart("?".join(rest), ":")
        return f"choose({_expression(condition)}, {_expression(yes)}, {_expression(no)})"
    return re.sub(r"!(\w)", r"not \1", text)


def _apart(text: str, by: str) -> list[str]:
    """The parts between separators that are inside no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == by and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if not isinstance(condition, Tensor):
        return yes if condition else no
    return torch.where(condition != 0, *(torch.as_tensor(each, dtype=torch.float64) for each in (yes, no)))
