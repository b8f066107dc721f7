"""A model behind ports computes what the model computes, in one call or in several with its state passed on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _export_models import FORMS, made

from carrywave.errors import UserError
from carrywave.exporting.portable import Portable


@pytest.mark.parametrize(("name", "stateful"), FORMS)
def test_ports_say_what_comes_out(name: str, stateful: bool) -> None:
    portable = Portable(made(name), stateful=stateful)
    found = portable(*portable.sample(3, 5, seed=1))
    # The front's strides make one step of six; padding within the model leaves one more.
    sizes = {"batch": 3, "time": 5, "answers": 2 * 2 if "front" in name else 3 * 5}
    for port, tensor in zip(portable.outputs, found, strict=True):
        assert list(tensor.shape) == [sizes[size] if isinstance(size, str) else size for size in port.shape], port.name
        assert tensor.dtype == port.dtype


@pytest.mark.parametrize(
    "name", ["language, widths, norms, learned carry", "classification", "classification, mean", "forecasting", "forecasting, categories"]
)
def test_parts_of_a_sequence_give_what_the_whole_gives(name: str) -> None:
    model = made(name).double()
    whole, parts = Portable(model), Portable(model, stateful=True)
    steps = [tensor for tensor in whole.sample(4, 9, seed=2) if tensor.dim() > 1]
    lengths = torch.tensor([9, 4, 6, 1])
    given = [*steps, lengths] if whole.takes_lengths else steps
    [expected] = whole(*given)
    state, outs = [torch.full_like(tensor, 7) for tensor in parts.start(4)], []  # fresh lanes must not read it
    for start, stop in ((0, 4), (4, 9)):
        here = (lengths - start).clamp(0, stop - start)
        flags = torch.full((4, 1), start == 0), torch.ones(4, 1, dtype=torch.bool)
        out, *state = parts(*(each[:, start:stop] for each in steps), here, *flags, *state)
        outs.append(out)
    found = outs[-1] if model.pooled else torch.cat(outs, dim=1)
    real = torch.ones_like(found, dtype=torch.bool) if model.pooled else (torch.arange(9) < lengths[:, None])
    torch.testing.assert_close(found[real], expected[real], rtol=1e-12, atol=1e-12)  # float64, the same operations


def test_a_lane_that_is_not_ready_keeps_its_state() -> None:
    portable = Portable(made("classification"), stateful=True)
    given = dict(zip((port.name for port in portable.inputs), portable.sample(3, 5, seed=3), strict=True))
    given["fresh"] = torch.zeros(3, 1, dtype=torch.bool)
    given["ready"] = torch.tensor([[True], [False], [True]])
    given["lengths"] = torch.tensor([5, 5, 2])
    _, *after = portable(*given.values())
    for port, tensor in zip(portable.state, after, strict=True):
        assert torch.equal(tensor[1], given[port.name][1]), port.name
        assert not torch.equal(tensor[0], given[port.name][0]), port.name


def test_both_directions_have_no_state() -> None:
    with pytest.raises(UserError, match=r"bidirectional layers read whole sequences, .*; export whole sequences, with --to onnx"):
        Portable(made("tagging, both ways"), stateful=True)
