"""What each worker writes of a snapshot and reads of it: any plan's is any other plan's. One process plays all workers in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from carrywave.errors import RunError
from carrywave.kernels.carry import Carry
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import GroupSum, Summing
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint import snapshot
from carrywave.runs.checkpoint.manifest import File, Manifest
from carrywave.runs.checkpoint.snapshot import Groups, open_stored, publish, write_part
from carrywave.runs.checkpoint.trainer_parts import load_state, part_of
from carrywave.spec.load import parse
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.trainer import Trainer
from carrywave.step.trainer_state import carry_tensors

WORDS, HIDDEN, LAYERS = 7, 3, 3
UNITS = LAYERS + 2
OPTIMIZERS = ("sgd", "adam", "ntasgd")


class Place(Mesh):
    """The place of one worker in a plan, without the others."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.world, self.device = plan, World.alone(torch.device("cpu")), torch.device("cpu")
        self.replica, self.stage = divmod(rank, plan.stages)
        self.links, self._all = None, None

    def replicas_of(self, stages: Sequence[int]) -> Summing | None:
        return GroupSum(cast(dist.ProcessGroup, None)) if self.plan.replicas > 1 and len(stages) == 1 else None


def worker(plan: Plan, rank: int, optimizer: str = "adam", *, tie: bool = False, hidden: int = HIDDEN) -> Trainer:
    encoder = Embedding(WORDS, hidden)
    head = Softmax(hidden, WORDS)
    if tie:
        head.weight = encoder.weight
    model = Model(encoder, LSTM(hidden, hidden, LAYERS), head)
    keys = {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    return Trainer(model, parse({"train": keys}).train, mesh=Place(plan, rank))


def workers(plan: Plan, optimizer: str = "adam", *, tie: bool = False) -> list[Trainer]:
    return [worker(plan, rank, optimizer, tie=tie) for rank in range(plan.workers)]


def drawn(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers that belong to a name: every worker that holds it holds the same."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return (torch.rand(tuple(shape), generator=generator) * 100).to(dtype)


def state(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer state that a worker holds."""
    return optimizers.state_tensors(trainer.optimizer, trainer.named)


def held(trainer: Trainer, lanes: int) -> Groups:
    """All that a worker holds, by the names of a whole model; its lanes of the carry."""
    low, high = trainer.mesh.share().bounds(lanes)
    carry = carry_tensors(trainer.state, trainer.stage)
    return {
        "parameters": trainer.parameters(),
        "optimizer": state(trainer),
        "carry": {f"{name}[{low}:{high}]": tensor for name, tensor in carry.items()},
    }


@torch.no_grad()
def fill(trainer: Trainer, lanes: int) -> None:
    """Have a worker hold what it would after some steps."""
    if isinstance(trainer.optimizer, optimizers.NTASGD):
        trainer.optimizer.trigger()
    low, high = trainer.mesh.share().bounds(lanes)
    carries = []
    for layer in trainer.stage.layers:
        whole = [drawn(f"l{layer}.{part}", (1, lanes, HIDDEN), torch.float32) for part in "hc"]
        carries.append(Carry(*(tensor[:, low:high] for tensor in whole)))
    trainer.state = State(tuple(carries))
    groups = held(trainer, lanes)
    for group in ("parameters", "optimizer"):
        for name, tensor in groups[group].items():
            tensor.copy_(drawn(name, (1000,), tensor.dtype)[: tensor.numel()].view(tensor.shape))


def write(folder: Path, crew: Sequence[Trainer], lanes: int) -> Path:
    draft = folder / ".tmp-draft"
    draft.mkdir(parents=True)
    files: dict[str, File] = {}
    for trainer in crew:
        for name, file in write_part(draft, part_of(trainer, lanes)).items():
            assert name not in files
            files[name] = file
    return publish(draft, "step-1", Manifest(files, {}), 1)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, UNITS))
    cuts = sorted(draw(st.permutations(range(1, UNITS)))[: stages - 1])
    plan = Plan(replicas=draw(st.integers(1, 4)), stages=stages, cuts=tuple(cuts), chunk_steps=2)
    return replace(plan, share_head=stages > 1 and draw(st.booleans()))


@settings(max_examples=25, deadline=None)
@given(plans(), plans(), st.sampled_from(OPTIMIZERS), st.booleans(), st.integers(4, 9))
def test_what_one_plan_wrote_another_reads(first: Plan, second: Plan, optimizer: str, tie: bool, lanes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        crew = workers(first, optimizer, tie=tie)
        for trainer in crew:
            fill(trainer, lanes)
        write(Path(name), crew, lanes)
        stored = open_stored(Path(name))
        stored.verify()
        for trainer in workers(second, optimizer, tie=tie):
            load_state(trainer, stored, lanes)
            found = held(trainer, lanes)
            fill(trainer, lanes)
            for group, wanted in held(trainer, lanes).items():
                assert found[group].keys() == wanted.keys()
                for key, tensor in wanted.items():
                    assert found[group][key].dtype == tensor.dtype
                    assert torch.equal(found[group][key], tensor), (group, key)


def test_replicas_share_the_writing() -> None:
    crew = workers(Plan(replicas=3))
    for trainer in crew:
        fill(trainer, 6)
    parts = [part_of(trainer, 6) for trainer in crew]
    sizes = [sum(tensor.nbytes for group in ("parameters", "optimizer") for tensor in part[group].values()) for part in parts]
    largest = max(tensor.nbytes for part in parts for tensor in part["parameters"].values())
    assert max(sizes) - min(sizes) <= largest
    assert [sorted(part["carry"])[0] for part in parts] == ["lstm.l0.c/0-2", "lstm.l0.c/2-4", "lstm.l0.c/4-6"]


def test_files_are_named_after_what_they_hold(tmp_path: Path) -> None:
    crew = workers(Plan(replicas=1, stages=2, cuts=(2,), chunk_steps=2))
    for trainer in crew:
        fill(trainer, 4)
    folder = write(tmp_path, crew, 4)
    assert sorted(path.name for path in folder.iterdir()) == [
        "carry-lstm.l0.h-0-4.safetensors",
        "carry-lstm.l1.h-0-4.safetensors",
        "manifest.json",
        "optimizer-step-encoder.weight.safetensors",
        "optimizer-step-lstm.weight_ih_l1.safetensors",
        "parameters-encoder.weight.safetensors",
        "parameters-lstm.weight_ih_l1.safetensors",
    ]


def test_each_worker_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(replicas=1, stages=2, cuts=(2,), chunk_steps=2)
    crew = workers(plan)
    for trainer in crew:
        fill(trainer, 4)
    write(tmp_path, crew, 4)
    opened: list[str] = []
    read = File.read
    monkeypatch.setattr(File, "read", lambda self, path, wanted: (opened.append(path.name), read(self, path, wanted))[1])
    load_state(worker(plan, 1), open_stored(tmp_path), 4)
    assert set(opened) == {
        "carry-lstm.l1.h-0-4.safetensors",
        "optimizer-step-lstm.weight_ih_l1.safetensors",
        "parameters-lstm.weight_ih_l1.safetensors",
    }


def test_a_snapshot_of_another_model_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = worker(Plan.serial(), 0)
    fill(serial, 4)
    write(tmp_path, [serial], 4)
    stored = open_stored(tmp_path)
    monkeypatch.setattr(File, "read", lambda *args: pytest.fail("it was read"))
    with pytest.raises(RunError, match=r"the snapshot has encoder.weight as \[7, 3\] float32, expected \[7, 4\] float32"):
        load_state(worker(Plan.serial(), 0, hidden=4), stored, 4)
    with pytest.raises(RunError, match=r"the snapshot has the carry of 4 lanes, but batch.lanes=5"):
        load_state(serial, stored, 5)


def changed(stored: snapshot.Stored, old: str, new: str, shape: tuple[int, ...] | None = None) -> snapshot.Stored:
    """A manifest that describes one tensor otherwise."""
    files = {}
    for name, file in stored.manifest.files.items():
        tensors = {new if key == old else key: form for key, form in file.tensors.items()}
        if shape is not None and new in tensors:
            tensors[new] = (tensors[new][0], shape)
        files[name] = replace(file, tensors=tensors)
    return replace(stored, manifest=Manifest(files, stored.manifest.meta))


CHANGED = {
    "a gap in the lanes": (("lstm.l1.c/0-4", "lstm.l1.c/1-5", (1, 4, 3)), "does not contain every lane of lstm.l1.c"),
    "more lanes": (("lstm.l1.c/0-4", "lstm.l1.c/0-5", (1, 5, 3)), "carry of 5 lanes, but batch.lanes=4"),
    "a wide carry": (
        ("lstm.l1.c/0-4", "lstm.l1.c/0-4", (1, 4, 2**40)),
        r"carry lstm.l1.c/0-4 has shape \[1, 4, 1099511627776\], which does not match",
    ),
    "a large state": (
        ("exp_avg/head.weight", "exp_avg/head.weight", (2**40,)),
        r"exp_avg/head.weight has shape \[1099511627776\], which matches no",
    ),
    "a state of nothing": (
        ("exp_avg/head.weight", "exp_avg/tail.weight", (2**40,)),
        r"exp_avg/tail.weight has shape .*, which matches no",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_does_not_fit_is_refused_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    serial = worker(Plan.serial(), 0)
    fill(serial, 4)
    write(tmp_path, [serial], 4)
    change, said = CHANGED[case]
    stored = changed(open_stored(tmp_path), *change)
    monkeypatch.setattr(File, "read", lambda *args: pytest.fail("it was read"))
    with pytest.raises(RunError, match=said):
        load_state(serial, stored, 4)
