"""The formulas of `cell.cuh` as Python functions over tensors: what is tested is what the kernel's source says.

Reads the few forms that its formulas have: declarations and assignments, several of them between commas, conditional expressions,
statements behind an `if`, and results in braces. Anything else does not compile here.

Shapes: M numbers of a unit's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carrywave.kernels.hopper.buffers import Noise

SOURCE = "cell.cuh"


class NoiseOf(NamedTuple):
    """What noise does to one unit at a step, for many of them."""

    candidate: Tensor | float = 1.0
    old_h: Tensor | float = 0.0
    old_memory: Tensor | float = 0.0


@dataclass
class Float4:
    """CUDA's float4, for many of them."""

    x: Tensor
    y: Tensor
    z: Tensor
    w: Tensor | float


def noise_of(noise: Noise, bytes_NU: Tensor | None) -> NoiseOf:
    """The noise of some units, from their bytes where there are any."""
    members = {"scale": noise.scale, "old_h": noise.old_h, "old_memory": noise.old_memory}
    return NoiseOf(*_formula("of", "lstm", 2 if bytes_NU is None else 1, tuple(members))(bytes_NU, **members)[0])


def forward(cell: str, noise: NoiseOf | None, a: Sequence[Tensor], memory: Tensor, h_before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next h, what backward needs of the four numbers [..., 4], and the memory [..., M], which is given like this."""
    h, after = _formula("cell_forward", cell, int(noise is not None))(list(a), _parts(memory), h_before, noise or NoiseOf())
    return h, torch.stack(after["a"], dim=-1), _together(after["memory"])


def backward(
    cell: str, noise: NoiseOf | None, a: Sequence[Tensor], before: Tensor, now: Tensor, dh: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the four sums [..., 4], of the memory before the step [..., M], and of h before it but for the recurrent product."""
    noisy = int(noise is not None)
    # The constructor's variables are the members that `apply` reads.
    _, members = _formula("Slopes", cell, noisy)(list(a), _parts(before), _parts(now), noise or NoiseOf())
    unwritten = torch.full_like(dh, torch.nan)
    _, after = _formula("apply", cell, noisy, tuple(members))(dh, [unwritten] * 4, _parts(memory), None, **members)
    return torch.stack(after["d"], dim=-1), _together(after["memory"]), after["past"] + torch.zeros_like(dh)


def _parts(memory: Tensor) -> Tensor | Float4:
    return memory[..., 0] if memory.shape[-1] == 1 else Float4(*memory.unbind(-1))


def _together(memory: Tensor | Float4) -> Tensor:
    if isinstance(memory, Tensor):
        return memory[..., None]
    return torch.stack([torch.as_tensor(each).expand_as(memory.x) for each in (memory.x, memory.y, memory.z, memory.w)], dim=-1)


@cache
def _formula(name: str, cell: str, noise: int, members: tuple[str, ...] = ()) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function of the source: returns its result, and all its variables as it leaves them. It is also given the members that it reads."""
    text = _preprocessed(_text(), cell)
    found = re.search(rf"\b{name}\(([^{{;]*)\) (?:const )?\{{", text)
    assert found is not None, f"{SOURCE} has no {name}"
    parameters = [re.findall(r"[a-z_]\w*", re.sub(r"\[\d\]", "", each))[-1] for each in found[1].split(", ")]
    body, depth = text[found.end() :], 1
    for end, letter in enumerate(body):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            body = body[:end]
            break
    lines = [f"def {name}({', '.join([*parameters, *members])}):"]
    for statement in filter(None, map(str.strip, body.split(";"))):
        lines += [f"    {line}" for line in _statement(" ".join(statement.split()))]
    known: dict[str, Any] = {
        "NOISE": noise,
        "LEAST": _least(),
        "sigmoid": torch.sigmoid,
        "tanh_": torch.tanh,
        "exponential": torch.exp,
        "reciprocal": torch.reciprocal,
        "softplus": lambda x: x.logaddexp(torch.zeros_like(x)),
        "fmaxf": lambda x, y: x.maximum(torch.as_tensor(y, dtype=x.dtype)),
        "make_float4": Float4,
        "chosen": _chosen,
    }
    if name != "mixed":
        known["mixed"] = lambda *given: _formula("mixed", cell, noise)(*given)[0]
    exec(compile("\n".join([*lines, "    return None, locals()"]), SOURCE, "exec"), known)
    made: Callable[..., tuple[Any, dict[str, Any]]] = known[name]
    return made


@cache
def _text() -> str:
    return files("carrywave.kernels").joinpath("source", SOURCE).read_text("utf-8")


@cache
def _least() -> float:
    found = re.search(r"#define LEAST ([\d.e+-]+)f", _text())
    assert found is not None
    return float(found[1])


def _preprocessed(text: str, cell: str) -> str:
    """Without comments, and with one cell's lines only."""
    kept, shown, chosen = [], True, False  # chosen: one of the branches that belong together was shown
    for line in re.sub(r"//.*", "", text).splitlines():
        if condition := re.match(r"#(if|elif) CELL == (\w+)", line):
            shown = condition[2].lower() == cell and (condition[1] == "if" or not chosen)
            chosen = shown or (condition[1] == "elif" and chosen)
        elif line.startswith("#else"):
            shown = not chosen
        elif line.startswith("#endif"):
            shown = True
        elif line.startswith("#if"):
            raise AssertionError(f"{line}: a condition that is not read here")
        elif shown and not line.startswith("#"):
            kept.append(line)
    return "\n".join(kept)


def _statement(text: str) -> list[str]:
    """The lines of one statement."""
    condition = re.match(r"if \(([^()]*)\) ", text)
    if condition is not None:
        return [f"if {_expression(condition[1])}:", *(f"    {line}" for line in _statement(text[condition.end() :]))]
    if text.startswith("return "):
        return [f"return {_expression(text.removeprefix('return '))}, locals()"]
    lines = []
    for each in _apart(text.removeprefix("float "), ","):
        assigned = re.fullmatch(r"(\w+(?:\[\d\]|\.\w)?) ([-+]?)= (.+)", each)
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
        return f"chosen({_expression(condition)}, {_expression(yes)}, {_expression(no)})"
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


def _chosen(condition: Any, yes: Any, no: Any) -> Any:
    if not isinstance(condition, Tensor):
        return yes if condition else no
    return torch.where(condition != 0, *(torch.as_tensor(each, dtype=torch.float64) for each in (yes, no)))
