"""Settles what a run is, once its data is known: what the spec left open, the task, the parts of the data, the order, and the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carrywave.data.order import Order
from carrywave.data.prepare import Prepared
from carrywave.data.text.tag_scheme import check_sequences
from carrywave.errors import DataError
from carrywave.launch import launch_record
from carrywave.model.heads.scoring import IGNORED
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.world import raise_on_all
from carrywave.plan.plan import Plan, check_sync, fewer, resolve
from carrywave.prediction.evaluation import no_targets, order_for
from carrywave.runs.tracking import check_installed
from carrywave.spec.defaults import AUTO, resolve_for_data, with_kept_weights, with_keys, with_precision, with_spans
from carrywave.spec.idle_keys import idle
from carrywave.spec.spec import Spec
from carrywave.step.checks.arguments import in_model_dtype
from carrywave.step.precision import not_made_for_bf16, settled
from carrywave.tasks.task import Task
from carrywave.train import held_out
from carrywave.train.evaluations import DataParts
from carrywave.train.start.linear_start import linear_part
from carrywave.train.start.opening import Start
from carrywave.train.start.own_model import own_model


@dataclass(frozen=True)
class Ready:
    """A run whose every setting is known, the same on every worker."""

    spec: Spec
    data: Prepared
    files: Mapping[str, str]  # SHA-256 by part, for parts that are files
    task: Task
    parts: DataParts
    order: Order  # of training
    own: Model | OpaqueModel | None  # the user's own model; None: the spec describes it
    bf16: bool  # all devices are made for it
    reasons: tuple[str, ...]  # why some of it was chosen

    @property
    def layers(self) -> int:
        """The recurrent layers that a plan can place."""
        return self.spec.model.layers if self.own is None else self.own.lstm.num_layers if isinstance(self.own, Model) else 0

    @property
    def pooled(self) -> bool:
        """True if the head pools."""
        return self.spec.pooled if self.own is None else self.own.pooled

    @property
    def reads_whole(self) -> bool:
        """True if time is not to be cut unasked."""
        return self.spec.reads_whole or (isinstance(self.own, Model) and (self.own.whole_head or self.own.has_norms))


def settle(start: Start, opened: tuple[Prepared, Mapping[str, str]]) -> Ready:
    """Fill in what the spec leaves open, and refuse what does not fit the data. Collective."""
    prepared, files = opened
    world, asked, say = start.world, start.asked, start.asked.watch.say
    for line in idle(start.spec, valid=prepared.valid is not None, numbers=prepared.facts.features > 0):
        say(line)
    spec = with_kept_weights(start.spec, None if prepared.valid is None else prepared.valid.counted)
    spec, why_crf = with_whole_spans(spec, prepared)
    spec = resolve_for_data(spec, prepared.facts)
    unfit = not_made_for_bf16(world)
    goes_on = None if start.snapshot is None else start.folder.path
    linear = None if asked.model is not None or asked.dry_run else linear_part(spec, prepared, world, goes_on, say)
    with raise_on_all(world):
        check_installed(spec.train.track if world.rank == 0 else ())
        own = None if asked.model is None else own_model(asked.model, spec, prepared.facts, asked.loss)
        if own is not None:
            spec = spec.model_copy(update={"train": in_model_dtype(spec.train, own)})
        precision, why_precision = settled(unfit, world.size, own) if spec.train.precision == AUTO else (spec.train.precision, None)
        spec = with_precision(spec, precision)
        task = replace(Task.of(spec, prepared.codec, prepared.facts, prepared.train), own_model=own is not None, linear=linear)
        parts = DataParts(
            task.part("train", prepared.train),
            None if prepared.valid is None else task.part("valid", prepared.valid),
            None if prepared.test is None else task.part("test", prepared.test),
        )
        held_out.check(spec, parts)
        for part in (parts.valid, parts.test):
            tags = None if part is None else part.data.tags
            if part is not None and tags is not None and tags.dtype.kind == "i" and (tags == IGNORED).all():
                raise no_targets(part)
        order = order_for(spec, parts.train.view, training=True)
    reasons = tuple(why for why in (why_precision, why_crf) if why is not None)
    return Ready(spec, prepared, files, task, parts, order, own, not unfit, reasons)


def choose_plan(start: Start, ready: Ready) -> tuple[Plan, Sequence[str]]:
    """The plan that all workers follow, and why. One device has no choice, and needs no planner. Collective."""
    spec, workers = ready.spec, start.workers
    reasons: Sequence[str] = ()
    if workers == 1:
        asked = fewer(spec.plan_spec, workers) if launch_record.with_fewer() else spec.plan_spec
        lanes = spec.lanes if spec.streams else None
        with raise_on_all(start.world):
            plan = resolve(asked, layers=ready.layers, workers=1, lanes=lanes, pooled=ready.pooled, whole=ready.reads_whole)
    else:
        from carrywave.train.start.planning import plan_of_run

        plan, reasons = plan_of_run(start, ready)
    with raise_on_all(start.world):
        check_sync(plan, spec.train.sync)
    return plan, reasons


def flat(spec: Spec) -> dict[str, str]:
    """Every key of a spec that workers must agree on, by its full name; file paths may differ from host to host and are left out."""
    values: dict[str, str] = {}
    for section, value in spec.model_dump(mode="json").items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        values |= {f"{section}.{key}".rstrip("."): json.dumps(setting) for key, setting in pairs}
    for name in ("train", "valid", "test", "cache"):
        values.pop(f"data.{name}", None)
    return values


def with_whole_spans(spec: Spec, prepared: Prepared) -> tuple[Spec, str | None]:
    """The spec with a CRF in place of `auto` if labels write spans, and a line that says so. It allows all pairs if the data has some that
    their scheme forbids; of rows that hold several sequences, labels are chosen one by one.
    """
    found = with_spans(spec, spans=prepared.facts.spans > 0, spelled=prepared.facts.characters > 0)
    if spec.model.crf != AUTO or not found.model.crf:
        return found, None
    parts = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    if any(part is not None and part.resets is not None and part.resets.any() for part in parts.values()):
        return with_keys(found, {"model": {"crf": False, "word_scores": 0}}), None
    fact = "labels write spans, so they are chosen together (model.crf)"
    fact += ", by layers and by scores of their words (model.word_scores)" if found.model.word_scores else ""
    try:
        for name, part in parts.items():
            if part is not None:
                check_sequences(name, part, prepared.codec.labels, spec.data.scheme)
    except DataError as error:
        if "scheme" in spec.data.model_fields_set:
            raise
        return with_keys(found, {"data": {"scheme": "none"}}), f"{fact}; {str(error).partition(', by which')[0]}, so any may follow any"
    return found, f"{fact}; for a softmax, set model.crf=false"
