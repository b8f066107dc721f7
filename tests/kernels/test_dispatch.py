"""Which backend runs what, and what is said where one cannot: once, and never nothing where something is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from carrywave.cells.cell import by_name
from carrywave.errors import PlanError
from carrywave.kernels import dispatch, random, torch_kernels
from carrywave.kernels.carry import Carry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.dispatch import Backends, backends_of
from carrywave.kernels.hopper import persistent
from carrywave.kernels.hopper.layout import H200, Chip
from carrywave.kernels.layers import run_layers
from carrywave.kernels.lstm import aten
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import Layer, LayerWeights
from carrywave.model.lstm import GRU, LSTM

LAYER: Layer = (LayerWeights(torch.full((16, 3), 0.1), torch.full((16, 4), -0.2), torch.full((16,), 0.3), torch.zeros(16)),)
GRU_LAYER: Layer = (LayerWeights(torch.zeros(12, 3), torch.zeros(12, 4)),)
PROJECTED: Layer = (LAYER[0]._replace(w_hh=LAYER[0].w_hh[:, :2], w_hr=torch.zeros(2, 4)),)


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said or has failed yet, no variable is set, and a GPU that is asked what it is says that it is an H200."""
    monkeypatch.delenv("CARRYWAVE_KERNEL", raising=False)
    monkeypatch.setattr(persistent, "chip_of", lambda device: H200)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_failures", [])


def on_gpu(dtype: torch.dtype, steps: int = 40, lanes: int = 2) -> Tensor:
    """A tensor that says it is on a GPU, and is nowhere."""
    with FakeTensorMode():
        return torch.empty(steps, lanes, 3, dtype=dtype, device="cuda")


def refusing(why: str) -> Callable[[Tensor, Layer, StepMarks | None, str], str]:
    return lambda x, layer, marks, cell: why


def carry(dtype: torch.dtype = torch.float32) -> Carry:
    return Carry(torch.ones(1, 2, 4, dtype=dtype), torch.ones(1, 2, 4, dtype=dtype))


def test_choice_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.zeros(32, 1, 3), LAYER
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", True)
    assert LSTM.backends.choose("auto", x, layer) == "aten"
    # What oneDNN prepares of the weights takes many steps to be worth it, few if the weights are small, and never two.
    wide = tuple(LayerWeights(torch.zeros(1600, 400), torch.zeros(1600, 400)) for _ in layer)
    medium = tuple(LayerWeights(torch.zeros(800, 200), torch.zeros(800, 200)) for _ in layer)
    for steps, chosen in ((2, "mmm"), (3, "amm"), (9, "amm"), (10, "aam"), (31, "aam"), (32, "aaa")):
        assert [LSTM.backends.choose("auto", x[:steps], each)[0] for each in (layer, medium, wide)] == list(chosen)
    assert LSTM.backends.choose("auto", x.double(), layer) == "manual"
    assert LSTM.backends.choose("manual", x, layer) == "manual"
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", False)
    assert LSTM.backends.choose("auto", x, layer) == "manual"
    assert LSTM.backends.choose("auto", x, PROJECTED) == "aten"
    assert LSTM.backends.choose("auto", x.bfloat16(), layer) == "manual"
    assert LSTM.backends.choose("auto", x.to("meta"), layer) == "aten"
    assert LSTM.backends.choose("manual", x, PROJECTED) == "aten"
    assert LSTM.backends.choose("reference", x, layer) == "reference"
    with pytest.raises(PlanError, match="kernel=fast is not a backend; use one of auto, reference, aten"):
        LSTM.backends.check("fast")
    monkeypatch.setenv("CARRYWAVE_KERNEL", "aten")
    assert LSTM.backends.choose("reference", x, layer) == "aten"
    monkeypatch.setenv("CARRYWAVE_KERNEL", "none")
    with pytest.raises(PlanError, match="CARRYWAVE_KERNEL=none"):
        LSTM.backends.check("auto")


def test_choice_of_a_gru(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.zeros(64, 1, 3), GRU_LAYER
    assert [GRU.backends.choose("auto", each, layer) for each in (x, x.double(), x.bfloat16())] == ["manual"] * 3
    assert GRU.backends.choose("auto", x[:, :0], layer) == "reference"
    assert GRU.backends.in_use("aten", x, layer) == "aten (native)"
    for asked in ("auto", "manual"):
        assert GRU.backends.in_use(asked, on_gpu(torch.float32), layer) == "aten (cuDNN)"
    with pytest.raises(PlanError, match="kernel=fast is not a backend; use one of auto, reference, aten"):
        GRU.backends.check("fast")
    monkeypatch.setenv("CARRYWAVE_KERNEL", "reference")
    assert GRU.backends.choose("auto", x, layer) == "reference"


@pytest.mark.parametrize(("backends", "layer"), [(LSTM.backends, LAYER), (GRU.backends, GRU_LAYER)], ids=["lstm", "gru"])
def test_choice_with_resets_and_noise(backends: Backends, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    x, marks = torch.zeros(32, 1, 3), StepMarks(torch.zeros(32, 1, dtype=torch.bool))
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", True)
    assert backends.choose("auto", x, layer, marks) == "manual"  # torch's kernels would be called anew at every reset
    assert backends.choose("aten", x, layer, marks) == "aten"
    assert backends.choose("auto", x.to("meta"), layer, marks) == "reference"
    assert backends.choose("auto", on_gpu(torch.float32), layer, marks) == "aten"
    noisy = StepMarks(noise=CellNoise(0.1, (0.0, 0.0), ((1, 2, 3),)))
    for asked in ("auto", "manual", "aten"):
        assert backends.choose(asked, x, layer, noisy) == "reference"
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)  # a tracer cannot read where to cut
        assert backends.choose("auto", x, layer, marks) == "reference"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # nor can a graph
    assert backends.choose("auto", on_gpu(torch.float32), layer, marks) == "reference"


def test_on_a_gpu_halves_take_the_persistent_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: "")
    monkeypatch.setattr(persistent, "refusal", refusing(""))
    for dtype in (torch.bfloat16, torch.float16):
        assert LSTM.backends.choose("auto", on_gpu(dtype), LAYER) == "persistent"
    for dtype in (torch.float32, torch.float64):
        assert LSTM.backends.choose("auto", on_gpu(dtype), LAYER) == "aten"
    assert LSTM.backends.choose("aten", on_gpu(torch.bfloat16), LAYER) == "aten"
    monkeypatch.setenv("CARRYWAVE_KERNEL", "reference")
    assert LSTM.backends.choose("auto", on_gpu(torch.bfloat16), LAYER) == "reference"


def test_what_was_asked_for_and_does_not_fit_is_said_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: "")
    for why in ("4000 units and 2 lanes do not fit", "it does not support projections"):
        monkeypatch.setattr(persistent, "refusal", refusing(why))
        with pytest.warns(UserWarning, match=f"the persistent recurrent kernel is not used.*: {why}"):
            assert LSTM.backends.choose("persistent", on_gpu(torch.bfloat16), LAYER) == "aten"
        assert LSTM.backends.choose("persistent", on_gpu(torch.bfloat16), LAYER) == "aten"


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """A GPU of some capability, with or without a compiler, whose probe may fail; gives the list of devices that were probed."""

    def make(capability: int, missing: str = "", fault: str = "") -> list[int]:
        probed: list[int] = []

        def chip_of(device: int) -> Chip:
            probed.append(device)
            if fault:
                raise nvrtc.KernelError(fault)
            return H200

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(nvrtc, "available", lambda: missing)
        monkeypatch.setattr(persistent, "chip_of", chip_of)
        return probed

    persistent.device_refusal.cache_clear()
    yield make
    persistent.device_refusal.cache_clear()


def test_a_gpu_that_can_run_it_is_probed_and_chosen(a_gpu: Callable[..., list[int]]) -> None:
    probed = a_gpu(9)
    assert LSTM.backends.choose("auto", on_gpu(torch.bfloat16), LAYER) == "persistent"
    assert set(probed) == {0}


@pytest.mark.parametrize("asked", ["auto", "persistent"])
def test_a_kernel_that_fails_is_said_once_and_not_tried_again(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fails(*_: object, **named: object) -> tuple[Tensor, Carry]:
        tried.append("layer")
        raise nvrtc.KernelError("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")

    monkeypatch.setattr(persistent, "refusal", refusing(""))
    monkeypatch.setattr(persistent, "layer", fails)
    monkeypatch.setattr(dispatch, "_halves_on_gpu", lambda _: True)
    x = torch.randn(5, 2, 3)
    expected = aten.layer(x, carry(), LAYER, None)
    with pytest.warns(UserWarning, match="it failed: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") as said:
        first = LSTM.backends.run(asked, x, carry(), LAYER, None)
    second = LSTM.backends.run(asked, x, carry(), LAYER, None)
    assert len(said) == 1
    assert tried == ["layer"]
    for y, end in (first, second):
        assert torch.equal(y, expected[0])
        assert torch.equal(end.c, expected[1].c)


@pytest.mark.parametrize(("name", "directions"), [("lstm", 1), ("lstm", 2), ("gru", 1)])
def test_a_stack_with_nothing_between_its_layers_is_one_call_of_torchs(name: str, directions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cell = by_name(name)
    rows = cell.gates * 5

    def weights(inputs: int) -> LayerWeights:
        return LayerWeights(*(torch.rand(shape) - 0.5 for shape in ((rows, inputs), (rows, 5), (rows,), (rows,))))

    layers = [tuple(weights(inputs) for _ in range(directions)) for inputs in (3, 5 * directions, 5 * directions)]
    carries = tuple(cell.carry(*(torch.randn(directions, 2, 5) for _ in cell.parts)) for _ in layers)
    x, called = torch.randn(7, 2, 3), list[int]()
    together = torch_kernels.together

    def noted(*given: Any) -> Any:
        called.append(len(given[3]))
        return together(*given)

    monkeypatch.setattr("carrywave.kernels.layers.together", noted)
    options: dict[str, Any] = {"backends": backends_of(cell), "backend": "aten"}
    with monkeypatch.context() as patch:
        patch.setattr(torch_kernels, "stackable", lambda x, layers: False)
        expected = run_layers(x, carries, layers, **options)
    assert called == []
    y, ends = run_layers(x, carries, layers, **options)
    assert called == [3]
    torch.testing.assert_close(y, expected[0])
    for end, other in zip(ends, expected[1], strict=True):
        assert type(end) is type(other)
        torch.testing.assert_close(tuple(end), tuple(other))
    run_layers(x, carries, layers, torch.tensor([7, 3]), **options)
    run_layers(x, carries, layers, dropout=0.5, key=random.key(1), sites=[1, 2], **options)
    assert called == [3]


def test_only_layers_that_one_call_takes_are_stacked() -> None:
    plain, x = (LayerWeights(torch.empty(32, 8), torch.empty(32, 8)),), on_gpu(torch.float32)
    assert torch_kernels.stackable(x, [plain, plain])
    assert torch_kernels.stackable(torch.empty(4, 2, 8), [plain, plain])
    wider = (LayerWeights(torch.empty(64, 8), torch.empty(64, 16)),)
    projected = (plain[0]._replace(w_hr=torch.empty(4, 8)),)
    biased = (plain[0]._replace(b_ih=torch.empty(32), b_hh=torch.empty(32)),)
    for other in (wider, projected, biased, plain * 2):
        assert not torch_kernels.stackable(x, [plain, other])
