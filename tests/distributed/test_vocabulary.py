"""A vocabulary split over two workers in programs of the user's own: states that other plans go on from, logits, and runs from Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from _vocabulary import own_loop

import carrywave as cw
from _warm import start

WORKER = Path(__file__).with_name("_vocabulary.py")
# Sums in another order, in float64, over some steps.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker did, and two of them beside it."""
    folder = tmp_path_factory.mktemp("vocabulary")
    own_loop(folder, "serial", None)
    ended = start([sys.executable, str(WORKER), str(folder)], 2)
    assert ended.code == 0, ended
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["optimizer", "own optimizer"])
@pytest.mark.parametrize("name", ["split-through", "split-resumed", "joined-resumed", "cut-resumed"])
def test_a_program_of_the_users_own_goes_on_from_any_state(folder: Path, name: str, own: bool) -> None:
    plan, kind = name.split("-")
    parts = [load_file(folder / f"{plan}-{own}-{kind}-{rank}.safetensors") for rank in range(2)]
    wanted = load_file(folder / f"serial-{own}-through-0.safetensors")
    torch.testing.assert_close(torch.cat([parts[rank].pop(f"logits {rank}") for rank in range(2)], dim=1), wanted.pop("logits 0"), **CLOSE)
    assert parts[1].keys() == {"loss"}  # rank 0 has all weights
    assert parts[0].keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(parts[0][key], tensor, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")
    again = load_file(folder / f"split-{own}-through-0.safetensors")
    if name == "split-resumed":
        assert all(torch.equal(parts[0][key], again[key]) for key in parts[0])


@pytest.mark.slow
def test_a_run_from_python_starts_from_weights_and_leaves_a_whole_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 6)
    how = {"data": {"train": str(tmp_path / "text.txt"), "tokens": "char"}, "batch": {"lanes": 4, "steps": 5}}
    train = {"epochs": 1, "precision": "fp64"}
    shape = {"hidden": 6, "layers": 1}
    cw.fit(shape, None, spec=how, train=train, run=tmp_path / "alone", device="cpu")
    alone = cw.fit(shape, None, spec=how, train=train, run=tmp_path / "again", init=str(tmp_path / "alone"), device="cpu")
    ended = start([sys.executable, str(WORKER), str(tmp_path), "run"], 2)
    assert ended.code == 0, ended
    for rank in range(2):
        whole = load_file(tmp_path / f"python-{rank}.safetensors")
        for name, tensor in alone.model.state_dict().items():
            if name in whole:
                torch.testing.assert_close(whole[name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
