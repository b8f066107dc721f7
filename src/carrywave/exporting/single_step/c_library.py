"""Compiles the C file of a model and runs it, if there is a compiler on this machine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import UserError, one_line
from carrywave.exporting.portable import Runner
from carrywave.exporting.single_step.formula import Formula

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-O1")
COMPILE_SECONDS = 600


def compiler() -> str | None:
    """A C compiler; None: there is none."""
    return next((path for path in map(shutil.which, COMPILERS) if path is not None), None)


def runner(source: str, formula: Formula, command: str) -> Runner:
    """The step of a C file, lane by lane."""
    with tempfile.TemporaryDirectory(prefix="carrywave-c-") as folder:
        Path(folder, "model.c").write_text(source, encoding="utf-8")
        made = Path(folder, "model.so")
        words = [command, *FLAGS, "-shared", "-fPIC", "model.c", "-o", str(made), "-lm"]
        try:
            ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{command} could not compile the C file ({one_line(error, 200)}); nothing was written") from error
        if ended.returncode != 0 or ended.stderr.strip():
            complaint = one_line(UserError(ended.stderr), 300)
            raise UserError(f"{command} did not accept the C file ({complaint}); nothing was written: please report this")
        library = ctypes.CDLL(str(made))  # which stays loaded when its file is gone

    widths = [each.value.width for each in formula.states.values()]
    outputs = formula.outputs
    shape = [int(size) for size in outputs[0].shape[1:]]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        steps, states = inputs[: len(formula.step_inputs)], inputs[len(formula.step_inputs) :]
        state_BS = torch.cat([part.float() for part in states], dim=1).contiguous().numpy()
        out_BO = np.zeros((len(state_BS), int(np.prod(shape))), np.float32)
        for lane in range(len(state_BS)):
            words: list[Any] = [_address(state_BS[lane])]
            kept = [part[lane].numpy().astype(np.float32 if part.is_floating_point() else np.int32) for part in steps]
            words += [_address(each) if each.ndim else ctypes.c_int(int(each)) for each in kept]
            if library.model_step(*words, _address(out_BO[lane])) != 0:
                raise UserError("the C file refused its input; nothing was written: please report this with the spec.yaml of the run")
        return [torch.from_numpy(out_BO).reshape(-1, *shape), *torch.split(torch.from_numpy(state_BS), widths, dim=1)]

    return run


def _address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
