"""Run by test_torch_samples.py in a process of its own: torch's samples of its recurrent modules, through ours and through torch's.

To import them changes what a whole process does: among other things, torch's global flags can no longer be set. Prints how many samples of
each module are equal, and those that are not.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.testing._internal.common_modules import module_db

import carrywave as cw

DTYPE = torch.float64  # in which only the order of sums differs


def made(kind: Any, sample: Any, *, training: bool) -> list[Tensor]:
    """The outputs, the carry, and the gradients of the weights and of all inputs."""
    torch.manual_seed(0)
    module = kind(*sample.constructor_input.args, **sample.constructor_input.kwargs, dtype=DTYPE).train(training)
    given = [*sample.forward_input.args, *sample.forward_input.kwargs.values()]
    y, carry = module(*sample.forward_input.args, **sample.forward_input.kwargs)
    found = [*tensors(y), *tensors(carry)]
    leaves = [each for each in tensors(given) if each.requires_grad]
    gradients = torch.autograd.grad([each.square().sum() for each in found], [*module.parameters(), *leaves])
    return [*found, *gradients]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [each for part in value for each in tensors(part)]


def main() -> None:
    assert torch.backends.flags_frozen()
    equal, unequal = Counter[str](), []
    for info in module_db:
        name = info.module_cls.__name__
        for training in (True, False) if name in ("LSTM", "GRU", "RNN") else ():
            for sample in info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=True, training=training):
                try:
                    ours, theirs = (made(each, sample, training=training) for each in (getattr(cw, name), info.module_cls))
                    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
                    equal[name] += 1
                except Exception as error:  # whatever it is, the others are tried too
                    unequal.append(f"{name}({sample.constructor_input.kwargs}): {type(error).__name__}: {error}")
    print(json.dumps([equal, unequal]))


if __name__ == "__main__":
    main()
