"""How much the network weighs beside the linear part of its model, chosen by what comes of it on valid once the network is trained.

Valid may be small, and chance would choose: a share far from the one that suits most data must be better by several nats.
"""

from __future__ import annotations

import math
from dataclasses import replace

from carrywave.prediction.evaluation import Kept, evaluate
from carrywave.tasks.kind import Part
from carrywave.train.loop import Loop

SHARES = tuple(tenth / 10 for tenth in range(11))  # of the network
CAUTION = 10.0  # nats that a share of 1 would have to gain on one of 0


def choose_share(loop: Loop) -> bool:
    """Choose the network's share, write it and say so; False if there is nothing to choose, or nothing to choose by."""
    linear, valid = loop.task.linear, loop.parts.valid
    if linear is None or valid is None or not linear.first_share:
        return False
    trainer, costs = loop.trainer, {}
    for share in SHARES:
        part = with_share(valid, share)
        loss = evaluate(trainer.model, loop.task, part, mesh=trainer.mesh, kept=Kept(trainer.stage, trainer.capture))["loss"]
        nats = math.log(max(loss, 1e-12)) / 2 if linear.kind == "numbers" else loss
        costs[share] = nats * valid.data.counted + CAUTION * (share - linear.first_share) ** 2
    best = min(costs, key=costs.__getitem__)
    loop.task = replace(loop.task, linear=replace(linear, share=best))
    test = None if loop.parts.test is None else with_share(loop.parts.test, best)
    loop.parts = replace(loop.parts, valid=with_share(valid, best), test=test)
    loop.folder.write_linear(replace(linear, share=best).tensors())
    alone = "the network adds nothing to the linear part, which answers alone"
    loop.watch.say(f"valid: {f'answers are {best:.0%} the network and {1 - best:.0%} the linear part' if best else alone}")
    return True


def with_share(part: Part, share: float) -> Part:
    """The part with another share of the network in its answers."""
    assert part.view.linear is not None
    answers = part.view.linear.copy()
    answers[:, -1] = share
    return replace(part, view=replace(part.view, linear=answers))
