"""A user's own loop on a GPU: what is frozen, hooked, loaded or bad between recorded steps; and workers that are not given the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carrywave as cw
from carrywave.errors import Diverged
from carrywave.model.heads.classes import Softmax

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _own_loop import train
from test_own_loop import DIFFERENT, SAME, told_by_workers

pytestmark = pytest.mark.gpu
T, B, WIDTH, CLASSES = 6, 4, 8, 3


def model() -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH, num_layers=2, dropout=0.2), Softmax(WIDTH, CLASSES))


def batch(seed: int) -> cw.Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, 2, generator=draw)
    return cw.Batch.of(x, torch.randint(0, CLASSES, (T, B), generator=draw), fresh=seed == 0)


def trained(*, record: bool, steps: int = 10, keys: dict[str, Any] | None = None) -> tuple[cw.Trainer, list[float]]:
    net = model()
    trainer = cw.Trainer(net, {"precision": "fp32", **(keys or {"lr": 0.01, "clip": 0.5, "weight_decay": 0.1})}, device="cuda")
    if not record:
        trainer.capture = None
    losses = []
    for number in range(steps):
        net.head.requires_grad_(number > 2)
        net.encoder.requires_grad_(number not in (5, 6))
        losses.append(float(trainer.step(batch(number))))
    return trainer, losses


def test_recorded_steps_follow_what_is_frozen() -> None:
    (one, first), (two, second) = trained(record=True), trained(record=False)
    assert one.capture is not None
    assert one.capture.replays["step"] > 0
    assert first == pytest.approx(second, rel=1e-6)  # float32; recorded and not, the same kernels
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_a_bad_step_raises_one_step_later_and_harms_nothing() -> None:
    trainer, _ = trained(record=True)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    bad = batch(11)
    bad.inputs[1, 2] = torch.nan
    trainer.step(bad)
    with pytest.raises(Diverged, match="is no longer finite"):
        trainer.step(batch(12))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert trainer.step(batch(13)).isfinite()
    assert trainer.step(batch(14)).isfinite()


def test_hooks_are_called_at_every_step() -> None:
    trainer, _ = trained(record=True)
    seen: list[float] = []
    handle = trainer.model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    for number in range(3):
        trainer.step(batch(20 + number))
    assert len(seen) == 3
    handle.remove()
    trainer.step(batch(30))
    assert len(seen) == 3


def test_a_loop_goes_on_from_its_state_between_recordings() -> None:
    whole, _ = trained(record=True)
    half, _ = trained(record=True, steps=8)
    state = half.state_dict()
    other, _ = trained(record=True, steps=9)
    other.load_state_dict(state)
    for number in range(8, 10):
        other.step(batch(number))
    for (name, a), b in zip(whole.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_workers_of_one_gpu_that_are_not_given_the_same_say_so_one_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "1")
    # On a GPU a step looks at one weight or buffer, the next one at another: the turn of the buffer comes after this loop's end.
    cases = [case for case in DIFFERENT if case != "another buffer"]
    told = told_by_workers("2 replicas", cases, tmp_path, "cuda")
    for number, case in enumerate(cases):
        for answers in told:
            assert answers[number].get("error", "no error").startswith(f"WorkerError: {DIFFERENT[case]}"), (case, answers[number])


def test_replicas_on_one_gpu_compute_what_one_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "1")
    told = told_by_workers("2 replicas", list(SAME), tmp_path, "cuda")
    for number, case in enumerate(SAME):
        alone = train(case, {}, 0, tmp_path, "cuda")
        for answers in told:
            assert "error" not in answers[number], (case, answers[number])
            assert answers[number]["losses"] == pytest.approx(alone["losses"], rel=1e-10), case  # float64
