"""Compiles the C file of a model and compares it with the model, if there is a compiler on this machine."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import UserError, one_line
from carrywave.exporting.c_file import in_units
from carrywave.exporting.comparison import SIZES, TOLERANCE, check_difference, with_rounding
from carrywave.exporting.portable import Portable, Runner
from carrywave.tasks.task import Task

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-O1")
COMPILE_SECONDS = 600


def compiler() -> str | None:
    """A C compiler; None: there is none."""
    return next((path for path in map(shutil.which, COMPILERS) if path is not None), None)


def compiled(source: str, portable: Portable, command: str) -> Runner:
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
    widths, outputs, reads = [int(port.shape[1]) for port in portable.state], int(portable.outputs[0].shape[1]), len(portable.read)

    def run(inputs: Any) -> list[Tensor]:
        state_BS = torch.cat([part.float() for part in inputs[reads:]], dim=1).contiguous().numpy()
        out_BO = np.zeros((len(state_BS), outputs), np.float32)
        for lane in range(len(state_BS)):
            given = [part[lane].numpy().astype(np.float32 if part.is_floating_point() else np.int32) for part in inputs[:reads]]
            words = [ctypes.c_void_p(each.ctypes.data) if each.ndim else ctypes.c_int(int(each)) for each in given]
            if library.model_step(ctypes.c_void_p(state_BS[lane].ctypes.data), *words, ctypes.c_void_p(out_BO[lane].ctypes.data)) != 0:
                raise UserError("the C file refused its input; nothing was written: please report this with the spec.yaml of the run")
        return [torch.from_numpy(out_BO), *torch.split(torch.from_numpy(state_BS), widths, dim=1)]

    return run


def largest_c_difference(task: Task, portable: Portable, run: Runner) -> float:
    """The largest difference from the model in float64, over steps of random data of the run's scale, relative to the largest output."""
    definition, codec, worst = copy.deepcopy(portable).double(), task.codec, 0.0
    for seed, (lanes, steps) in enumerate(SIZES):
        state, rounded = definition.start(lanes), portable.start(lanes)
        run_state = rounded
        for step in range(steps):
            given = portable.sample(lanes, 1, 100 * seed + step)[: len(portable.read)]
            if codec.kind is None:
                given[0] = (given[0].double() * torch.tensor(codec.std).double() + torch.tensor(codec.mean).double()).float()
            wide = [each.double() if each.is_floating_point() else each for each in given]
            with torch.no_grad():
                right, *state = in_units(task, definition, [*wide, *state])
                near, *rounded = in_units(task, portable, [*given, *rounded])
            got, *run_state = run([*given, *run_state])
            size, where = max(float(right.abs().amax()), 1e-30), f"{lanes} lanes, step {step + 1}"
            allowed = with_rounding(TOLERANCE, near.double() / size, right / size)
            worst = max(worst, check_difference("the C file", portable.outputs[0], got.double() / size, right / size, allowed, where))
    return worst
