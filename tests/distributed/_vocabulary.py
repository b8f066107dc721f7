"""A worker of test_vocabulary.py: a program of the user's own with a vocabulary that is split over all workers, and runs around it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import carrywave as cw
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.parallel.world import leave

RANK = int(os.environ.get("RANK", "0"))
WORDS, WIDTH, LANES, STEPS = 23, 6, 5, 4


def model() -> cw.Model:
    torch.manual_seed(7)
    encoder = Embedding(WORDS, WIDTH, 0.2)
    return cw.Model(encoder, cw.LSTM(WIDTH, WIDTH, num_layers=2), Softmax(WIDTH, WORDS, tied=encoder.weight)).double()


def batches(number: int) -> list[cw.Batch]:
    generator = torch.Generator().manual_seed(number)
    made = []
    for step in range(3):
        tokens_TB = torch.randint(WORDS, (STEPS + 1, LANES), generator=generator)
        fresh = number == 0 and step == 0
        made.append(cw.Batch.of(tokens_TB[:-1], tokens_TB[1:], [STEPS, 2, STEPS, 0, 3], fresh=fresh, step=10 * number + step))
    return made


def trainer(*, own: bool, plan: dict[str, Any] | None) -> cw.Trainer:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.05) if own else None
    spec = {"clip": 0.5} if own else {"optimizer": "adam", "lr": 0.05, "clip": 0.5}
    return cw.Trainer(made, spec, plan=plan, optimizer=optimizer, device="cpu")


def outcome(one: cw.Trainer) -> dict[str, Tensor]:
    """The weights after some steps, the loss on other batches, and the logits of all lanes there, on rank 0."""
    seen: list[Tensor] = []
    loss = one.evaluate(batches(5), lambda out, _: seen.append(out))
    found = {name: tensor.clone() for name, tensor in one.gathered(each_once=True).items()}
    return found | {"loss": torch.tensor(loss), f"logits {RANK}": torch.cat(seen)}


def own_loop(folder: Path, name: str, plan: dict[str, Any] | None) -> None:
    """Some steps, a state that another trainer goes on from, and what becomes of both."""
    for own in (False, True):
        first = trainer(own=own, plan=plan)
        for batch in batches(0):
            first.step(batch)
        state = first.state_dict()
        second = trainer(own=own, plan=plan)
        second.load_state_dict(state)
        if RANK == 0:
            torch.save(state, folder / f"{name}-{own}.pt")
        for kind, one in (("through", first), ("resumed", second)):
            for batch in batches(1):
                one.step(batch)
            save_file(outcome(one), folder / f"{name}-{own}-{kind}-{RANK}.safetensors")


def from_state(folder: Path, name: str, given: str, plan: dict[str, Any] | None) -> None:
    """Goes on from a state that another plan left."""
    for own in (False, True):
        one = trainer(own=own, plan=plan)
        one.load_state_dict(torch.load(folder / f"{given}-{own}.pt", weights_only=True))
        for batch in batches(1):
            one.step(batch)
        save_file(outcome(one), folder / f"{name}-{own}-resumed-{RANK}.safetensors")


def whole_run(folder: Path) -> None:
    """A run from Python that starts from the weights of another, and leaves a whole model."""
    result = cw.fit(
        {"hidden": 6, "layers": 1},
        None,
        spec={"data": {"train": str(folder / "text.txt"), "tokens": "char"}, "batch": {"lanes": 4, "steps": 5}},
        train={"epochs": 1, "precision": "fp64"},
        plan={"replicas": 2, "split_vocabulary": True},
        run=folder / "python",
        init=str(folder / "alone"),
        device="cpu",
    )
    tensors = {name: tensor for name, tensor in result.model.state_dict().items() if name != "head.weight"}
    save_file(tensors, folder / f"python-{RANK}.safetensors")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if "run" in sys.argv:
        whole_run(where)
        sys.exit()
    split = {"replicas": 2, "split_vocabulary": True}
    own_loop(where, "split", split)
    from_state(where, "joined", "split", {"replicas": 2})
    from_state(where, "cut", "serial", split)
    one = trainer(own=False, plan=split)
    leave(one.mesh.world)
