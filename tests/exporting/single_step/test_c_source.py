"""The C file compiles without a warning and computes what the model computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _steps import LAYERS, SOME, over_many, stateful

from carrywave.errors import UserError
from carrywave.exporting.comparison import largest_step_difference
from carrywave.exporting.portable import Port
from carrywave.exporting.single_step import c_library, c_source
from carrywave.exporting.single_step.c_source import Words, source
from carrywave.exporting.single_step.formula import Formula
from carrywave.exporting.single_step.network import network

COMPILER = c_library.compiler()
STRICT = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@needs_compiler
@pytest.mark.parametrize("name", SOME)
def test_the_file_computes_the_steps_of_the_model(name: str) -> None:
    portable = stateful(name)
    formula = network(portable)
    run = c_library.runner(source(formula, Words(["a test"])), formula, str(COMPILER))  # which refuses warnings
    # Far closer than an export has to be: these models are small, and float32 has 24 bits.
    assert largest_step_difference(portable, formula, run, what="it") < 4e-6


@needs_compiler
@pytest.mark.parametrize("name", ["classification, attention", "forecasting, linear, scaled, quantiles", *LAYERS])
def test_a_thousand_steps_are_one_sequence(name: str) -> None:
    portable = stateful(name)
    formula = network(portable)
    run = c_library.runner(source(formula, Words(["a test"])), formula, str(COMPILER))
    # Gates forget rounding errors about as fast as they arise: in float32, a thousand steps end a few dozen roundings away.
    assert over_many(portable, formula, run) < 1e-5


ODD = ['say "hi"', "back\\slash", "what??/", "*/ the end", "é\n\t", "\x00", "7"]


@needs_compiler
def test_texts_come_back_whatever_they_hold(tmp_path: Path) -> None:
    text = source(
        network(stateful("tagging")), Words(["ends here */ or /* not", "trigraph ???/", "line\nbreak \\"], labels=ODD[:-2], vocabulary=ODD)
    )
    (tmp_path / "model.c").write_text(text, encoding="utf-8")
    steps = " || ".join(f"model_step(&state, {token}, out) != {ends}" for token, ends in ((3, 0), (23, -1), (-1, -1)))
    (tmp_path / "main.c").write_text(
        '#define MODEL_DECLARATIONS\n#include "model.c"\n#include <stdio.h>\n'
        "int main(void)\n{\n    model_state state;\n    float out[MODEL_OUTPUTS];\n    model_init(&state);\n"
        f"    if ({steps})\n        return 1;\n"
        '    for (int i = 0; i < 7; i++)\n        printf("%s|", model_vocabulary[i]);\n    return 0;\n}\n'
    )
    subprocess.run([str(COMPILER), *STRICT, "-O2", "model.c", "main.c", "-o", "main", "-lm"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True).stdout.decode()
    assert said.split("|")[:-1] == [word.replace("\x00", "") for word in ODD]


@needs_compiler
def test_the_program_in_the_file_reads_steps(tmp_path: Path) -> None:
    portable = stateful("language")
    formula = network(portable)
    (tmp_path / "model.c").write_text(source(formula, Words(["a test"])))
    subprocess.run([str(COMPILER), *STRICT, "-DMODEL_MAIN", "model.c", "-o", "model", "-lm"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "model"], input="3 1\n4\n", text=True, check=True, capture_output=True).stdout
    run = c_library.runner(source(formula, Words(["a test"])), formula, str(COMPILER))
    state, right = formula.initial(1), []
    for token in (3, 1, 4):
        out, *state = run([torch.tensor([token]), *state])
        right.append(out[0])
    found = torch.tensor([[float(number) for number in line.split()] for line in said.splitlines()])
    torch.testing.assert_close(found, torch.stack(right), rtol=0, atol=1e-6)  # the same code with other optimizations
    ended = subprocess.run([tmp_path / "model"], input="23", text=True, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (2, "an input is out of range\n")


@needs_compiler
def test_numbers_that_are_none_change_nothing() -> None:
    formula = network(stateful("classification, mean"))
    run = c_library.runner(source(formula, Words(["a test"])), formula, str(COMPILER))
    for bad in (torch.nan, torch.inf, -torch.inf, 1e30):
        with pytest.raises(UserError, match="refused its input"):
            run([torch.tensor([[0.0, bad, 0.0, 0.0]]), *formula.initial(1)])


def test_weights_are_written_to_the_last_bit() -> None:
    numbers = torch.tensor([0.1, 1.0, -0.0, 1e-45, 3.4028234663852886e38, 16777217.0, 1 / 3])
    text = next(line for line in c_source._array("w", numbers) if "0.1" in line)
    back = torch.tensor([float(word.rstrip("f")) for word in text.strip().rstrip(",").split(", ")])
    assert torch.equal(back.view(torch.int32), numbers.view(torch.int32))


def test_rows_never_share_memory_that_is_still_needed() -> None:
    formula = network(stateful("forecasting, linear, scaled, quantiles"))
    operations = formula.needed
    assert formula.result is not None
    kept = {formula.result[1].name, *(value.name for value in formula.after.values())}
    room = c_source._Room(operations, kept)
    places = {each.out.name: range(first := room.place(each), first + each.out.width) for each in operations if each.kind != "part"}
    last = {name: room.last[name] for name in places}
    for number, each in enumerate(operations):
        alive = [name for name in places if name != each.out.name and room.number[name] < number <= last[name]]
        if each.out.name in places:
            own = places[each.out.name]
            assert not [name for name in alive if max(own.start, places[name].start) < min(own.stop, places[name].stop)]
    assert room.size < sum(map(len, places.values()))


def test_too_many_weights_are_refused() -> None:
    formula = Formula(torch.float32)
    x = formula.input(Port("x", torch.float32, ("batch", 4000)))
    formula.result = Port("y", torch.float32, ("batch", 4000)), x.linear("w", torch.empty(4000, 4000))
    with pytest.raises(
        UserError, match=r"the weights are 16,000,000 numbers, and .* more than 5,000,000 in one file; use --to onnx --step"
    ):
        source(formula, Words([]))
