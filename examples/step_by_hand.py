"""One training step in plain PyTorch: on one device, on 2 replicas, and on 2 stages with chunks of time. All three, and carrywave's own
step, give the same loss and the same new weights.

The devices are played one after the other by this process, so nothing is sent; a comment says what would be.

    python examples/step_by_hand.py
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

import carrywave as cw

TOKENS, WIDTH, STEPS, LANES, CHUNK = 11, 8, 12, 6, 4
RATE, CLIP = 0.5, 0.1
LENGTHS = torch.tensor([12, 12, 9, 7, 4, 1])  # of the lanes; what follows is padding


class Head(nn.Module):
    """A softmax over tokens. The loss is a sum and a count, because a mean cannot be put together from means."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, TOKENS)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


class Parts(nn.Module):
    """An encoder, two layers and a head, in torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(2))
        self.head = Head()


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets [time, lane]; a target that does not count is -100."""
    tokens = torch.randint(TOKENS, (STEPS + 1, LANES), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(STEPS)[:, None] >= LENGTHS
    return tokens[:-1].masked_fill(padding, 0), tokens[1:].masked_fill(padding, -100)


def update(parts: Parts, count: Tensor) -> None:
    """Turn gradients of the summed loss into new weights: divide once, by the number of targets everywhere; clip by the norm of all
    gradients; take a step of SGD. In the package: `Engine._update` in step/engine.py.
    """
    gradients = [parameter.grad / count for parameter in parts.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()  # stages would add up their squares
    with torch.no_grad():
        for parameter, gradient in zip(parts.parameters(), gradients, strict=True):
            parameter -= RATE * gradient * (CLIP / (norm + 1e-6)).clamp(max=1.0)


def one_device(parts: Parts) -> Tensor:
    """Forward, backward, update."""
    tokens, target = batch()
    y = parts.encoder(tokens)
    for layer in parts.layers:
        y, _ = layer(y)
    total, count = parts.head.loss(y, target)
    total.backward()
    update(parts, count)
    return total.detach() / count


def replicas(parts: Parts) -> Tensor:
    """Each replica has a copy of the model and half of the lanes. Sums, counts and gradients are added up: an all-reduce, in the package
    `AllReduce` in step/all_reduce.py.
    """
    tokens, target = batch()
    copies = [copy.deepcopy(parts) for _ in range(2)]
    totals = []
    for replica, lanes in zip(copies, (slice(0, LANES // 2), slice(LANES // 2, LANES)), strict=True):
        y = replica.encoder(tokens[:, lanes])
        for layer in replica.layers:
            y, _ = layer(y)
        total, count = replica.head.loss(y, target[:, lanes])  # the halves have different numbers of targets
        total.backward()
        totals.append(torch.stack([total.detach(), count]))
    for parameter, *theirs in zip(parts.parameters(), *(replica.parameters() for replica in copies), strict=True):
        parameter.grad = sum(each.grad for each in theirs)
    total, count = sum(totals)
    update(parts, count)  # each replica does this, and ends with the same weights
    return total / count


Carry = tuple[Tensor, Tensor]  # (h, c), each [1, lane, width]


class Kept(NamedTuple):
    """What the backward of a chunk needs from its forward. Each chunk has an autograd graph of its own: it begins at detached leaves, the
    carry that entered and, on stage 1, x; it ends at y (or the loss) and the carry that left.
    """

    x: Tensor
    entered: Carry
    y: Tensor
    left: Carry


def stages(parts: Parts) -> Tensor:
    """Stage 0 has the encoder and the first layer, stage 1 the second layer and the head. Both work on the same batch, on different chunks
    of its time: a wavefront. Numbers are chunks, F is forward, B is backward:

        stage 0   F0 F1 F2       B2 B1 B0
        stage 1      F0 F1 F2 B2 B1 B0

    Forward, a stage hands y to the next stage and its carry to its own next chunk. Backward, the gradients of both return the same way.
    In the package: the ticks are `wavefront` in plan/schedule/schedule.py, the rest is step/passes/executor.py, which also puts off the
    weight gradients of all chunks to the end, as one product.
    """
    tokens, target = batch()
    spans = [slice(first, first + CHUNK) for first in range(0, STEPS, CHUNK)]
    kept: dict[tuple[int, int], Kept] = {}  # by stage and chunk
    carries = [(torch.zeros(1, LANES, WIDTH).double(), torch.zeros(1, LANES, WIDTH).double()) for _ in range(2)]
    totals = []

    def forward(stage: int, chunk: int) -> None:  # in the package: `_Run._forward`
        # Stage 1 receives the output of stage 0.
        x = parts.encoder(tokens[spans[chunk]]) if stage == 0 else kept[0, chunk].y.detach().requires_grad_()
        h, c = carries[stage]
        entered = h.detach().requires_grad_(), c.detach().requires_grad_()
        y, left = parts.layers[stage](x, entered)
        carries[stage] = left
        if stage == 1:
            y, count = parts.head.loss(y, target[spans[chunk]])
            totals.append(torch.stack([y.detach(), count]))
        kept[stage, chunk] = Kept(x, entered, y, left)

    def backward(stage: int, chunk: int) -> None:  # in the package: `_Run._backward`
        done = kept[stage, chunk]
        roots, gradients = [done.y], [None if stage == 1 else kept[1, chunk].x.grad]  # of the loss: 1; of y: received from stage 1
        if (stage, chunk + 1) in kept:  # the chunk that follows has left the gradient of the carry with which it was entered
            roots += done.left
            gradients += [part.grad for part in kept[stage, chunk + 1].entered]
        torch.autograd.backward(roots, gradients)  # adds to .grad of the weights, of x and of the carry that entered

    for tick in range(len(spans) + 1):  # what has the same tick would run at the same time
        for stage in range(2):
            if 0 <= tick - stage < len(spans):
                forward(stage, tick - stage)
    for tick in range(len(spans) + 1):
        for stage in (1, 0):
            if 0 <= tick - (1 - stage) < len(spans):
                backward(stage, len(spans) - 1 - (tick - (1 - stage)))
    total, count = sum(totals)
    update(parts, count)  # each stage has only its own weights and gradients; count and norm are summed over both
    return total / count


def carrywaves(parts: Parts) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step by `cw.Trainer`, from the same weights: the loss, and the new weights by the names that they have above. In one
    process, as everything here; examples/stages.py starts one for each stage.
    """
    lstm = cw.LSTM(WIDTH, WIDTH, num_layers=2)
    names = {
        f"{name}_l{number}": f"layers.{number}.{name}_l0"
        for number in range(2)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    weights = parts.state_dict()
    lstm.load_state_dict({own: weights[name] for own, name in names.items()})
    model = cw.Model(copy.deepcopy(parts.encoder), lstm, copy.deepcopy(parts.head))
    spec = {"optimizer": "sgd", "lr": RATE, "clip": CLIP, "precision": "fp64"}
    trainer = cw.Trainer(model, spec, plan={"chunk_steps": CHUNK}, device="cpu")
    loss = trainer.step(cw.Batch.of(*batch(), LENGTHS))
    new = model.state_dict()
    return loss, {name: new[f"lstm.{own}"] for own, name in names.items()} | {name: new[name] for name in weights if name in new}


def main() -> dict[str, tuple[float, float]]:
    """The loss of each way, and by how much its new weights differ from carrywave's."""
    torch.manual_seed(0)
    start = Parts().double()
    loss, weights = carrywaves(start)
    found = {"cw.Trainer": (float(loss), 0.0)}
    for step in (one_device, replicas, stages):
        parts = copy.deepcopy(start)
        loss = step(parts)
        found[step.__name__] = float(loss), max(float((each - weights[name]).abs().max()) for name, each in parts.state_dict().items())
    for name, (value, distance) in found.items():
        print(f"{name:<10}  loss {value:.12f}  new weights differ by {distance:.1e}")
    return found


if __name__ == "__main__":
    main()
