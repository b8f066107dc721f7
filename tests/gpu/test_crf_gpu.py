"""A CRF on CUDA: our kernels against the definition in float64 for sizes that hypothesis draws, recorded, and in whole training steps.

Shapes: T time, B lane, V labels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from _chains import Problem, problem

from carrywave.data.batch import Batch
from carrywave.kernels.crf import definition, dispatch
from carrywave.kernels.crf.definition import UNKNOWN, Chain
from carrywave.model.encoders import Numbers
from carrywave.model.heads.crf import CRF
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.step.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CUDA = torch.device("cuda")
LABELS = ("O", "B-x", "I-x", "B-y", "I-y")


class OnDevice:
    """A problem on the GPU in one precision, and its answer by the definition on the CPU in float64 from the same numbers."""

    def __init__(self, given: Problem, dtype: torch.dtype) -> None:
        self.leaves = [leaf.detach().to(CUDA, dtype).requires_grad_() for leaf in given.leaves]
        self.tags, self.lengths = given.tags_TB.to(CUDA), given.lengths_B.to(CUDA)
        self.weights = None if given.weights_B is None else given.weights_B.to(CUDA)
        wide = [leaf.detach().cpu().double().requires_grad_() for leaf in self.leaves]
        total = dispatch._plain(*wide, given.tags_TB, given.lengths_B, given.weights_B)
        self.exact = [total.detach(), *torch.autograd.grad(total, wide)]

    def ours(self) -> list[Tensor]:
        assert dispatch._serves(self.leaves[0], self.tags)
        total = dispatch.summed(self.leaves[0], self.tags, self.lengths, Chain(*self.leaves[1:]), self.weights)
        assert not dispatch._cuda_kernel.failures
        return [total.detach(), *torch.autograd.grad(total, self.leaves)]

    def paths(self) -> Tensor:
        return dispatch.best_paths(self.leaves[0], self.lengths, Chain(*(leaf.detach() for leaf in self.leaves[1:])))


def check(case: OnDevice, dtype: torch.dtype, steps: int) -> None:
    # Rounding of scores of up to 50, which adds up over steps; pairs are summed over all of them.
    most = 1e-11 if dtype == torch.float64 else 1e-4 * max(1.0, steps / 100)
    for number, (own, wanted) in enumerate(zip(case.ours(), case.exact, strict=True)):
        error = (own.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1.0)
        assert error <= most, (number, float(error))


@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 17), st.sampled_from([1, 2, 9, 31, 32, 33, 65, 130])),
    ruled_out=st.sampled_from([0.0, 0.5]),
    unknown=st.sampled_from([0.0, 0.3, 1.0]),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_kernels_are_the_definition(
    seed: int, sizes: tuple[int, int, int], ruled_out: float, unknown: float, weighted: bool, dtype: torch.dtype
) -> None:
    case = OnDevice(problem(seed, *sizes, ruled_out=ruled_out, unknown=unknown, weighted=weighted), dtype)
    check(case, dtype, sizes[0])
    found = case.paths()
    emissions, *chain = (leaf.detach() for leaf in case.leaves)
    wanted = definition.best_paths(emissions.cpu(), case.lengths.cpu(), Chain(*(each.cpu() for each in chain)))
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(("steps", "lanes", "labels"), [(1500, 3, 9), (20, 5, 1100), (2, 700, 5), (1, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_sequences_many_labels_and_many_lanes(steps: int, lanes: int, labels: int, dtype: torch.dtype) -> None:
    check(OnDevice(problem(1, steps, lanes, labels, ruled_out=0.3, unknown=0.1), dtype), dtype, steps)


def test_scores_far_below_the_others_are_not_lost() -> None:
    """Only the path of zeros ends, and it is 200 below the others at every step: float32 ends at e^-87."""
    emissions = torch.tensor([[[0.0, 200.0]]] * 5, device=CUDA)
    chain = Chain(*(torch.tensor(each, device=CUDA) for each in ([0.0, 0.0], [[0.0, 0.0], [-torch.inf, 0.0]], [0.0, -torch.inf])))
    tags = torch.tensor([[0], [UNKNOWN], [0], [0], [0]], device=CUDA)
    assert abs(float(dispatch.summed(emissions, tags, torch.tensor([5], device=CUDA), chain))) < 1e-4


def test_without_gradients_the_loss_has_the_same_bits() -> None:
    case = OnDevice(problem(3, 12, 9, 11), torch.float32)
    with torch.no_grad():
        alone = dispatch.summed(case.leaves[0], case.tags, case.lengths, Chain(*case.leaves[1:]))
    assert torch.equal(alone, case.ours()[0])


def test_second_derivatives_are_those_of_the_definition() -> None:
    few = problem(3, 3, 2, 3, ruled_out=0.0)
    leaves = [leaf.detach().to(CUDA).requires_grad_() for leaf in few.leaves]
    lengths, tags = torch.tensor([3, 2], device=CUDA), few.tags_TB.clamp(min=0).to(CUDA)
    assert torch.autograd.gradcheck(lambda *given: dispatch.summed(given[0], tags, lengths, Chain(*given[1:])), leaves)
    assert torch.autograd.gradgradcheck(lambda *given: dispatch.summed(given[0], tags, lengths, Chain(*given[1:])), leaves)


def test_a_recording_has_the_same_bits() -> None:
    case = OnDevice(problem(5, 30, 40, 25, weighted=True), torch.float32)
    first, paths = case.ours(), case.paths()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.ours(), case.paths()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded, recorded_paths = case.ours(), case.paths()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, recorded, strict=True))
    assert torch.equal(paths, recorded_paths)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_whole_steps_are_recorded(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[Batch]:
        draw = torch.Generator().manual_seed(1)
        made = []
        for number in range(6):
            tags = torch.randint(2, (12, 7), generator=draw)
            tags[torch.rand(12, 7, generator=draw) < 0.2] = UNKNOWN
            lengths = torch.randint(1, 13, (7,), generator=draw)
            made.append(Batch.of(torch.randn(12, 7, 5, generator=draw), tags, lengths, step=number).to(CUDA))
        return made

    found: list[Any] = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("CARRYWAVE_CAPTURE", wanted)
        torch.manual_seed(0)
        model = Model(Numbers(5), LSTM(5, 24, 2, dropout=0.2, bidirectional=True), CRF(48, LABELS))
        trainer = Trainer(model, {"optimizer": "adam", "lr": 0.01, "precision": precision, "clip": 0.5}, device="cuda")
        losses = [trainer.step(batch).item() for batch in batches()]
        found.append((losses, [tensor.clone() for _, tensor in trainer.named]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    assert trainer.capture is not None
    assert trainer.capture.replays["step"] >= 4
