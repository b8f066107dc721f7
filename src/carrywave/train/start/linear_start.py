"""The linear part that a run begins with: fitted by rank 0 for all workers, or as it is in the folder of a run that is resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from carrywave.data.prepare import Prepared
from carrywave.parallel.gather import broadcast
from carrywave.parallel.world import World, raise_on_all
from carrywave.prediction.saved_run import read_linear
from carrywave.spec.spec import Spec
from carrywave.tasks.first_weights import class_weights
from carrywave.tasks.linear import signals, texts
from carrywave.tasks.linear.part import LinearPart, kind_of


def linear_part(spec: Spec, prepared: Prepared, world: World, folder: Path | None, say: Callable[[str], None]) -> LinearPart | None:
    """The linear part, on every worker; None if the spec asks for none, or there is nothing to fit it to.

    `folder`: that of a run that goes on.
    """
    if not spec.mixes or not spec.model.linear or not (prepared.facts.features or prepared.codec.kind == "word"):
        return None
    found: dict[str, Tensor] = {}
    with raise_on_all(world, no_timeout=True):
        if world.rank == 0:
            saved = None if folder is None else read_linear(folder, spec, prepared.codec, world.device)
            part = fitted(spec, prepared, world, say) if saved is None else replace(saved, share=saved.first_share)
            found = {} if part is None else part.tensors()
    found = broadcast(world, found)
    return LinearPart.of(found, kind_of(spec), prepared.codec.vocabulary, world.device) if found else None


def fitted(spec: Spec, prepared: Prepared, world: World, say: Callable[[str], None]) -> LinearPart | None:
    """Fit it to train and to what was held out of it, and say what came of it."""
    began = time.monotonic()
    train, valid, facts = prepared.train, prepared.valid, prepared.facts
    held = valid if valid is not None and np.shares_memory(valid.inputs, train.inputs) else None
    kind, answers, weights = kind_of(spec), len(facts.labels) or facts.outputs, class_weights(spec, facts, train)
    if facts.features:
        part = signals.fit(kind, answers, train, held, spec.model.linear, spec.train.seed, world.device, weights)
    else:
        part = texts.fit(kind, answers, train, held, spec.model.linear, prepared.codec.vocabulary, weights)
    if part is not None:
        say(f"linear part: {part.seen} ({time.monotonic() - began:.1f} s)")
        if not part.share:
            say("linear part: it answers alone, since no class has two sequences, by which a network could be judged")
    return part
