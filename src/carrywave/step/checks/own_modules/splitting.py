"""Checks that a user's modules give the same answer however the work is split; a module that does not is refused by name, or warned about.

What a plan cuts is compared as it cuts it: on the real batch, once whole and once in the plan's own pieces (chunks of time, lanes of each
replica and micro-batch). That happens at steps 1, 2, 3, 4, 6, 9, 13 and so on, each half as far again; at batches of a new size, and the
first with padding; and after a change to the modules. A module that cannot be compared is refused, unless its owner vouches for it. A
module is only harmed along an axis that the plan cuts: a convolution over time trains fine on one device. So what only other plans would
break is a warning, given once, after a trial on a few lanes and steps.

Some faults are recognised by the module's class and options (`known`). Our own modules, and those of torch that work on one step of one
lane at a time, are known to be safe and are not tried.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError, WorkerError
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.rows import Exchange, gather_rows
from carrywave.parallel.startup.rendezvous import on_every_rank, start_seconds
from carrywave.parallel.world import all_arrive, all_gather_text, wait_for_all
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.own_modules import probe
from carrywave.step.checks.own_modules.cuts import Axis, Extent, cut_of, extent_of
from carrywave.step.checks.own_modules.module_changes import ModuleChanges, is_power_of_2
from carrywave.step.checks.own_modules.module_traces import untouched, why_not_restorable
from carrywave.step.checks.own_modules.parts import VOUCHED, Part, is_known, is_safe, known, parts_of
from carrywave.step.checks.own_modules.probe import Finding, Trial
from carrywave.step.checks.own_modules.probe_sample import all_of, few_of, is_absent
from carrywave.step.checks.own_modules.shared_objects import changed_by, shared_objects
from carrywave.step.precision import autocast

_EACH_ALONE: dict[Axis | None, str] = {
    None: "make it work whatever the plan",
    "time": "make it work step by step",
    "lanes": "make it work lane by lane",
    "both": "make it work step by step and lane by lane",
}
_WHEN = {None: "", "time": "when split by time", "lanes": "when split by lanes", "both": "when split by time and lanes"}
ALL_SIZES = 16  # sizes of batches that are all compared


class SplitCheck:
    """Checks the modules of one worker's stage.

    `mesh`: those who split a step. `any_of`: tells
    whether something is so on any worker; given where workers may be at different steps, which it then reports.
    """

    def __init__(
        self,
        model: Model | OpaqueModel,
        stage: Stage | OpaqueModel,
        mesh: Mesh,
        *,
        precision: str,
        any_of: Callable[[bool], bool] | None = None,
    ) -> None:
        self.model, self.stage, self.mesh, self.precision = model, stage, mesh, precision
        self._any = any_of or self._gathered
        self.whole_time = isinstance(stage, OpaqueModel) or stage.lstm.bidirectional or stage.whole_head or stage.has_front
        self._seen = {training: _Seen(stage) for training in (True, False)}
        self._resets = False  # whether new sequences have begun inside a lane: what looks at other steps then looks into other sequences
        self._concerned: bool | None = None  # whether any worker has something that needs a check, once that is known

    def look(self, batches: Sequence[Batch], keys: Sequence[Tensor], *, training: bool) -> None:
        """Refuse what this plan would break and, at the first training step, warn about what others would. Collective: every rank calls it
        with the same batches, whole ones or its own parts of them.
        """
        seen = self._seen[training]
        if self._concerned is None:
            roots = [part.root for part in parts_of(self.stage)]
            self._concerned = self._any(any(not is_safe(self.stage, root) or any(True for _ in known(root, "")) for root in roots))
        elif not self._concerned:
            self._concerned = self._concerned_late()
        before, self._resets = self._resets, self._resets or any(batch.resets is not None for batch in batches)
        if not self._concerned or (seen.sizes and not self._splits):
            return  # what other plans would break was warned about
        regular = seen.looks + 1 >= seen.next or before != self._resets
        changed = bool(seen.sizes) and seen.changes.due()
        extents = [self._extent(batch, masked=seen.extent is not None and seen.extent.masked) for batch in batches]
        news = [seen.is_new(extent) for extent in extents]
        if self._any(regular or any(news) or changed):  # from here on all workers are known to be given the same
            for batch, key, new in zip(batches, keys, news, strict=True):
                if regular or new or not any(news):
                    self._check(batch, key, training=training, first=training and not seen.sizes, changed=changed)
            seen.changes.settle()
        for extent in extents:
            seen.add(extent)
        seen.looks += 1
        if regular:
            seen.next = seen.looks + max(1, seen.looks // 2)

    def _gathered(self, mine: bool) -> bool:
        """True if this is so on any worker. Collective."""
        world = self.mesh.world
        if world.size == 1:
            return mine
        return any(flag for (flag,) in gather_rows(Exchange.FLAG, [int(mine)], world.size, world.group))

    def _concerned_late(self) -> bool:
        """True if a module that was known to be safe no longer is, on all workers: it was given a hook, or another forward."""
        names = ("module",) if isinstance(self.model, OpaqueModel) else ("encoder", "lstm", "head")
        for path, root in [(name, getattr(self.model, name)) for name in names] if self._splits else ():
            if is_safe(self.stage, root):
                continue
            world = self.mesh.world
            # Workers that saw no change are already entering the step and will never come here.
            if world.size > 1 and not all_arrive(world, "hooks", start_seconds()):
                raise WorkerError(
                    f"{path} ({type(root).__name__}) was given a hook or another forward on rank {world.rank}, but not on all others; "
                    "make the same change on all workers before the same step"
                )
            return True
        return False

    def _extent(self, batch: Batch, *, masked: bool) -> Extent:
        """The same on all workers, whether they were given the full batch or parts of it. `masked`: it need not be found out."""
        real, cells = batch.cells
        cut = cut_of(self.mesh.plan, batch.steps, cells // batch.steps, whole_time=self.whole_time)
        masked = masked or real != cells  # also if it is not known
        if not masked and batch.part_of is None and batch.targets is not None and not batch.targets.is_cuda:
            masked = bool(is_absent(batch.targets).any())
        return extent_of(cut, masked=masked)

    def _check(self, batch: Batch, key: Tensor, *, training: bool, first: bool, changed: bool) -> None:
        parts = list(parts_of(self.stage))
        tried = [part for part in parts if not is_safe(self.stage, part.root)]
        errors: list[str] = []
        warned: list[str] = []
        cause: Exception | None = None
        for part in parts if first else ():
            for sentence, always in known(part.root, part.path):
                (errors if always or self._splits else warned).append(sentence)
        shared: list[object] = []
        if self.mesh.plan.stages > 1 and isinstance(self.model, Model):
            shared = shared_objects(self.model.encoder, self.model.head) if tried else []
        whole = self._whole(batch)
        before = [*self.stage.parameters(), *self.stage.buffers()]
        # Replicas have the same modules, so one of them tries those of its stage on behalf of all, unless only others were changed.
        for part in tried if (self.mesh.replica == 0 or changed) and not errors else []:
            for found, harmful in self._found(part, whole, key, shared, training=training, first=first):
                cause = found.cause if harmful and not errors else cause
                if harmful and found.fault == "fails" and found.cause is not None and not errors and self.mesh.world.size == 1:
                    raise found.cause  # in the module's own words; several workers would wait for each other
                # If this plan does not cut, the step itself shows what is wrong.
                matters = found.fault not in ("raises", "fails", "unknown") or (
                    found.fault == "raises" and isinstance(found.cause, UserError)
                )
                if harmful or matters:
                    (errors if harmful else warned).append(say(found, part, self._uncut(found.axis) if harmful else ""))
        if [*map(id, before)] != [*map(id, [*self.stage.parameters(), *self.stage.buffers()])]:
            names = ", ".join(part.path for part in tried)
            errors.insert(0, f"trying {names} left other tensors in the model than it had; set {VOUCHED} = True there, and report it")
        told = self._agreed(errors, warned, cause)
        if told is not None:
            warnings.warn(f"{told}; this plan does not change the result, but others would", stacklevel=5)

    @property
    def _splits(self) -> bool:
        """True if the plan splits the work at all. What draws random numbers or keeps state also breaks if it is run twice, or apart from
        the rest of the model.
        """
        plan = self.mesh.plan
        return self._cuts_lanes or self._cuts_time or bool(plan.recompute) or plan.stages > 1

    @property
    def _cuts_lanes(self) -> bool:
        return self.mesh.plan.replicas * self.mesh.plan.micro_batches > 1

    @property
    def _cuts_time(self) -> bool:
        return self._resets or (self.mesh.plan.chunk_steps is not None and not self.whole_time)

    def _uncut(self, axis: Axis | None) -> str:
        """How to leave time, lanes or both in one piece, of what this plan cuts, as an alternative to what precedes it in a message."""
        plan, ways = self.mesh.plan, []
        if axis in ("time", "both") and self._resets:
            ways.append("give each sequence a lane of its own, without resets")
        elif axis in ("time", "both") and self._cuts_time:
            lanes_instead = plan.stages > 1 and plan.micro_batches == 1 and axis == "time"
            ways.append("use plan.micro_batches=2 or more without plan.chunk_steps" if lanes_instead else "remove plan.chunk_steps")
        if axis in ("lanes", "both"):
            ways += ["train on one replica"] if plan.replicas > 1 else []
            ways += ["remove plan.micro_batches"] if plan.micro_batches > 1 else []
        return f", or {' and '.join(ways)}" if ways else ""

    def _found(
        self, part: Part, batch: Batch, key: Tensor, shared: Sequence[object], *, training: bool, first: bool
    ) -> Iterator[tuple[Finding, bool]]:
        """What is found, and whether it changes the result of this plan."""
        plan, width = self.mesh.plan, self.stage.width_head
        path, root, run, beside = part
        thorough = training
        if (why := why_not_restorable([root, *beside.values()])) is not None:
            yield Finding("unknown", path, type(root).__name__, why), self._splits
            return
        if self._splits:
            own = batch.to(self.mesh.device)
            cut = cut_of(plan, own.steps, own.lanes.shape[0], whole_time=self.whole_time)
            cut = cut if own.resets is None or path == "lstm" else cut.at_resets(own.resets)
            how = Trial((True, False) if first else (training,), thorough, self.precision, bool(plan.recompute), beside)
            real = self._head_input(own, key) if path == "head" else None
            samples = [all_of(own, key, width, pooled=self.stage.pooled, y=real)] if real is not None else []
            if first or real is None:
                samples.append(all_of(own, key, width, pooled=self.stage.pooled, seed=self._seen[training].looks))
            if shared:
                with untouched([root, *beside.values()], self.mesh.device, self.stage.dtype), suppress(Exception):
                    kind = changed_by(lambda: run(samples[-1], samples[-1].whole.pieces), shared)
                    if kind is not None:
                        yield Finding("shared", path, type(root).__name__, kind), True
                        return
            for sample in samples:
                faults = probe.probe(run, root, path, replace(sample, maskable=self._maskable), [cut], how)
                for found in faults[:1]:
                    yield found, True
                    return  # one is enough to refuse the plan
            thorough = False
        if first:
            tried = batch if self.stage.has_head else batch.without(inputs=False, targets=True)  # of which only a head knows the shape
            few = few_of(tried.to(self.mesh.device), key, width, pooled=self.stage.pooled, whole_time=self.whole_time)
            cuts = [] if self.whole_time or self._cuts_time else [few.chunks]
            cuts += [] if self._cuts_lanes else [few.halves]
            how = Trial((True, False), thorough, self.precision, beside=beside)
            for found in probe.probe(run, root, path, replace(few, maskable=self._maskable), cuts, how):
                yield found, False

    @property
    def _maskable(self) -> bool:
        return isinstance(self.stage, Stage) and not self.stage.whole_head

    def _head_input(self, batch: Batch, key: Tensor) -> Tensor | None:
        """What the head really reads of this batch, if this worker has all layers; None if the other modules cannot make it."""
        stage, device = self.stage, self.mesh.device
        if isinstance(stage, OpaqueModel) or self.mesh.plan.stages > 1 or stage.encoder is None or stage.stride > 1:
            return None
        chunk = Chunk(batch.lengths, None, batch.lanes, 0, key.to(device), whole=True, resets=batch.resets)
        own = [each for each in (stage.encoder, stage.lstm, stage.head) if not is_known(stage, each)]
        with suppress(Exception), untouched(own, device, stage.dtype):
            with torch.no_grad(), autocast(self.precision, device):
                y: Tensor = stage(batch.inputs.clone(), stage.start(batch.lanes.shape[0], device).detach(), chunk)[0]
            return y.detach()
        return None

    def _whole(self, batch: Batch) -> Batch:
        """The full batch, put together from the replicas' parts of it if workers have only their own. Collective: every rank calls it."""
        if batch.part_of is None or self.mesh.plan.replicas == 1:
            return batch
        pooled = self.stage.pooled and batch.resets is None
        tensors = {"inputs": (batch.inputs, 1), "lengths": (batch.lengths, 0), "lanes": (batch.lanes, 0)}
        if batch.targets is not None:
            tensors["targets"] = batch.targets, 0 if pooled else 1
        if batch.weights is not None:
            tensors["weights"] = batch.weights, 0 if batch.weights.dim() == 1 else 1
        if batch.resets is not None:
            tensors["resets"] = batch.resets.to(torch.uint8), 1  # flags cannot be summed
        joined = self.mesh.join_lanes(tensors, batch.cells[1] // batch.steps)
        resets = None if batch.resets is None else joined["resets"].bool()
        return Batch.of(
            joined["inputs"],
            joined.get("targets"),
            joined["lengths"],
            lanes=joined["lanes"],
            pooled=self.stage.pooled,
            resets=resets,
            weights=joined.get("weights"),
        )

    def _agreed(self, errors: list[str], warned: list[str], cause: Exception | None) -> str | None:
        """Raise on every worker the first error that any of them found; otherwise return the warning that this worker is to report."""
        world = self.mesh.world
        wait_for_all(world)  # trying a large module takes its time
        said = [json.loads(text) for text in all_gather_text(world, json.dumps([errors[:1], warned[:1]]))]
        for rank, (error, _) in enumerate(said):
            if error:
                wrong: UserError = PlanError(error[0])
                raise (on_every_rank(wrong, rank) if world.size > 1 else wrong) from (cause if rank == world.rank else None)
        teller = next((rank for rank, (_, warning) in enumerate(said) if warning), None)
        return warned[0] if teller is not None and teller == world.rank else None


class _Seen:
    """What was checked so far, in training or in evaluation: how often it was looked at, the sizes of batches, and the modules."""

    def __init__(self, stage: Stage | OpaqueModel) -> None:
        self.looks, self.next = 0, 1
        self.sizes: set[tuple[int, int]] = set()  # steps and lanes
        self.extent: Extent | None = None
        roots = [part.root for part in parts_of(stage)]
        self.changes = ModuleChanges(roots, [stage.given_loss] if isinstance(stage, OpaqueModel) else [])

    def is_new(self, extent: Extent) -> bool:
        """True for a batch that is larger than all before, has a smaller piece or the first padding, or is of a new size. Of many sizes,
        those count that double their number.
        """
        if self.extent is None or self.extent.joined(extent) != self.extent:
            return True
        new = (extent.steps, extent.lanes) not in self.sizes
        return new and (len(self.sizes) < ALL_SIZES or is_power_of_2(len(self.sizes) + 1))

    def add(self, extent: Extent) -> None:
        """Take a batch for looked at."""
        self.extent = extent if self.extent is None else self.extent.joined(extent)
        self.sizes.add((extent.steps, extent.lanes))


def split_checks(
    model: Model | OpaqueModel, stage: Stage | OpaqueModel, mesh: Mesh, spec: TrainSpec, agreement: Agreement
) -> tuple[SplitCheck, SplitCheck]:
    """For those who share a step and those who share an evaluation (`mesh`): one check if they are the same."""
    within = agreement.mesh
    steps = SplitCheck(model, stage, within, precision=spec.precision, any_of=agreement.any_of)
    return steps, steps if within is mesh else SplitCheck(model, stage, mesh, precision=spec.precision)


def say(found: Finding, part: Part, uncut: str = "") -> str:
    """The message for a finding: the fact and the remedy. `uncut`: how to leave in one piece what the plan cuts."""
    what, when = f"{found.path} ({found.kind})", _WHEN[found.axis]
    remedy = f"{_EACH_ALONE[found.axis]}{uncut}"
    if found.path != part.path and found.fault == "output":
        what = f"{part.path} ({type(part.root).__name__}), through {what},"
    pools = part.path == "head" and found.axis != "lanes" and getattr(part.root, "pooled", False)
    hidden = ", and pass all that it pools through the accumulator" if pools else ""
    if part.path == "head" and found.axis == "time" and not uncut:
        remedy += ", or set reads_whole = True in the head, so that no plan cuts the time that it reads"
    if found.fault == "output" and found.axis == "lanes" and any(getattr(each, "batch_first", False) for each in part.root.modules()):
        return (
            f"{what} gives different results for a lane depending on the other lanes in its input, which is [time, lane, …], and a layer "
            "of the model has batch_first=True; build it without, or transpose what it reads"
        )
    functional = "use nn.Dropout, which is made keyed, instead of functional dropout or noise"
    added = "give the encoder or the head its nn.Dropout before the model is made of it, so that it is made keyed"
    words: dict[str, Callable[[], str]] = {
        "draws": lambda: (
            f"{what} draws from a random generator that is not keyed, so its numbers depend on how the work is split and on where a run "
            f"was stopped; {added if found.kind == 'Dropout' else functional}"
        ),
        "state": lambda: (
            f"{what} changes its {found.detail} {'when it is called' if found.path == 'loss' else 'in forward'}, so its result depends on "
            f"how often it is called, which a plan decides; change it between steps, outside {'it' if found.path == 'loss' else 'forward'}"
        ),
        "output": lambda: {
            "time": f"{what} gives different results for a step depending on the other steps in its input; {remedy}",
            "lanes": f"{what} gives different results for a lane depending on the other lanes in its input; {remedy}",
        }.get(str(found.axis), f"{what} gives different results {when}; {remedy}"),
        "loss": lambda: (
            f"{what} returns a {found.detail} {when}; return the sum over targets and their number "
            "(a mean would be divided once more), and leave weight penalties to the optimizer (train.weight_decay)"
        ),
        "gradient": lambda: (
            f"{what} has a gradient of {found.detail} that differs between the whole and the sum over parts {when}; "
            f"remove anything in it that scales, clips or detaches gradients{hidden}"
        ),
        "recompute": lambda: (
            f"{what} gives different results while gradients are switched off, as they are when plan.recompute runs it first; do not let "
            "it depend on torch.is_grad_enabled() or requires_grad, or remove plan.recompute"
        ),
        "in place": lambda: (
            f"{what} changes its {found.detail} in place, so another run on the same batch, as a plan may need it, would read something "
            "else; work on a copy (.clone())"
        ),
        "shared": lambda: (
            f"{what} changes an object ({found.detail}) in forward that encoder and head share, as in a skip connection, but they are on "
            "different stages, where each has a copy of its own; let the head do without it, or remove plan.stages"
        ),
        "raises": lambda: f"{what} works on a whole batch, but raises {found.detail} {when}, as this plan does; {remedy}",
        "unknown": lambda: (
            f"{what} could not be run on a whole batch to compare its result with that of the parts ({found.detail}); mend it, or, if you "
            f"know that no step and no lane depends on another in it, set {found.path.partition('.')[0]}.{VOUCHED} = True"
        ),
    }
    words["fails"] = words["unknown"]
    return f"{found.cause}{uncut}" if isinstance(found.cause, UserError) else words[found.fault]()
