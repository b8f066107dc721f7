"""The programs in examples/ and the Python in the documentation run, small, and do what they say; messages are quoted as they are."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import carrywave

ROOT = Path(__file__).parents[1]
ALONE = ("classify_arrays", "drop_in_lstm", "own_cell", "own_loop", "own_modules", "recurrent_ppo", "step_by_hand")
MANY = ("accumulate", "any_module", "replicas", "stages", "stateful_stream", "variable_lengths")
# How programs for several devices are started, with further words that make a start small.
SCRIPTS = {
    "python examples/replicas.py": "2 6000",
    "python examples/replicas.py 4": "6000",
    "python examples/stages.py": "2 1 4000",
    "python examples/stages.py 3": "1 4000",
    "python examples/stages.py 2 2": "4000",
    "python examples/variable_lengths.py": "60 1",
}
UNDER_TORCHRUN = {
    "torchrun --nproc-per-node 2 examples/accumulate.py": "",
    "torchrun --nproc-per-node 2 examples/any_module.py": "",
    "torchrun --nproc-per-node 2 examples/stateful_stream.py": "",
    "torchrun --nproc-per-node 2 examples/stateful_stream.py stages=2 chunk_steps=4": "",
}
# Every process takes seconds to load torch, so one start is quick enough for every run of the tests.
QUICK = ("torchrun --nproc-per-node 2 examples/stateful_stream.py stages=2 chunk_steps=4",)
LOSS = re.compile(r"\b[0-9]+\.[0-9]{5}\b")


def program(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def each(commands: Iterable[str]) -> list[Any]:
    return [pytest.param(command, marks=() if command in QUICK else pytest.mark.slow, id=command) for command in commands]


def losses(text: str) -> list[list[float]]:
    """The losses, with five digits, on each line that has any."""
    found = ([float(loss) for loss in LOSS.findall(line)] for line in text.splitlines())
    return [line for line in found if line]


def start(command: str, more: str) -> str:
    """What a program prints that is started by `command`."""
    launcher, *words = command.split()
    python = [sys.executable]
    if launcher == "torchrun":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        python += ["-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    ended = subprocess.run([*python, *words, *more.split()], capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs write to runs/ in the current folder, and those that they start find the package that is under test."""
    monkeypatch.chdir(tmp_path)
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def test_classify_arrays(tmp_path: Path) -> None:
    assert program("classify_arrays").main(number=150, epochs=12, hidden=16, run=tmp_path / "run") > 0.8
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_own_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    program("own_modules").main(steps=1000, epochs=3, hidden=16, run=tmp_path / "run")
    nats = [float(number) for number in re.findall(r"(-?[0-9.]+) nats a value", capsys.readouterr().out)]
    assert len(nats) == 2
    assert max(nats) < 1.4  # what a constant normal distribution reaches


def test_own_loop() -> None:
    kept, dropped = program("own_loop").main(passes=4, steps=160, lanes=24, hidden=24)
    # Without the carry, nothing that came before a window can be known.
    assert kept > dropped + 0.2


def test_drop_in_lstm() -> None:
    assert program("drop_in_lstm").main(steps=5, hidden=8) < 1e-6  # float32, summed in another order


def test_recurrent_ppo(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((ROOT / "examples" / "recurrent_ppo.py").read_text().splitlines()) <= 300
    pytest.importorskip("gymnasium", reason="needs gymnasium, which is in the extra examples")
    ppo = program("recurrent_ppo")
    settings = ppo.Settings(environments=8, steps=32, epochs=4, parts=2, hidden=16)
    torch.manual_seed(1)
    policy = ppo.Policy(settings.hidden)
    actors = ppo.Actors(policy, settings, seed=1)
    actors.rollout()
    rollout, first = actors.rollout()
    assert bool(rollout.resets.any())  # inside the window
    assert bool((rollout.resets[1:] & ~rollout.real[:-1]).any())  # a step is spent on starting again, and counts in no loss
    with torch.no_grad():  # before anything is learned, the window as a whole gives what was said step by step
        chances, value, _ = policy(rollout.seen, first, rollout.resets)
    torch.testing.assert_close(chances.gather(-1, rollout.action[..., None])[..., 0], rollout.chance)
    torch.testing.assert_close(value, rollout.value - rollout.advantage, rtol=1e-4, atol=1e-5)  # float32, added and taken away
    assert ppo.main(frames=2560, settings=settings) > 0
    assert "2,560 frames" in capsys.readouterr().out


def test_step_by_hand() -> None:
    by_hand = program("step_by_hand")
    assert len((ROOT / "examples" / "step_by_hand.py").read_text().splitlines()) <= 200
    reached = by_hand.main()
    assert [*reached] == ["cw.Trainer", "one_device", "replicas", "stages"]
    for loss, distance in reached.values():
        assert loss == pytest.approx(reached["cw.Trainer"][0], rel=1e-13)  # float64, summed in another order
        assert distance < 1e-14
    torch.manual_seed(0)
    before = by_hand.Parts().double().state_dict()
    moved = []
    for clip in (by_hand.CLIP, 1e9):  # it does clip
        parts = by_hand.Parts().double()
        parts.load_state_dict(before)
        by_hand.CLIP = clip
        by_hand.stages(parts)
        moved.append(max(float((each - before[name]).abs().max()) for name, each in parts.state_dict().items()))
    assert 0 < moved[0] < 0.9 * moved[1]


@pytest.mark.parametrize("command", each(SCRIPTS))
def test_workers_of_a_script_reach_the_loss_of_one_device(command: str) -> None:
    reached = losses(start(command, SCRIPTS[command]))
    assert len(reached) == (3 if "variable_lengths" in command else 2)  # each is told once, not by every worker
    assert all(line == reached[0] for line in reached)


@pytest.mark.slow
@pytest.mark.parametrize("command", each(UNDER_TORCHRUN))
def test_workers_of_torchrun_have_the_losses_of_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    together = losses(start(command, UNDER_TORCHRUN[command]))
    [name] = [name for name in MANY if f"{name}.py" in command]
    program(name).main()
    assert together == losses(capsys.readouterr().out)
    assert together[-1] < together[0]


def test_accumulated_batches_are_one_batch() -> None:
    whole, pieces = program("accumulate").main(passes=5)
    assert pieces == pytest.approx(whole, rel=1e-6)  # told in float32


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^- `([^`]+)`", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    there = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}
    assert sorted(listed) == sorted(there)
    data = ("exported_forecast", "cmudict_data", "music_data", "python_data", "slot_filling", "spoken_digits", "streamflow")
    assert {f"{name}.py" for name in (*ALONE, *MANY, *data)} == {name for name in there if name.endswith(".py")}


@pytest.mark.parametrize("page", ["docs/python.md", "docs/prediction.md", "docs/models.md", "README.md"])
def test_the_python_on_a_page_runs(page: str) -> None:
    """All blocks of a page in one program, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})


@pytest.mark.slow
def test_a_cell_of_ones_own_on_two_stages_has_the_loss_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    together = losses(start("python examples/own_cell.py", ""))
    program("own_cell").main(devices=1)
    assert together == losses(capsys.readouterr().out)
    assert together[0][0] < 0.6  # of 0.69 for two classes that are equally frequent
