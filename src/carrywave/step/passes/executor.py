"""Executes a `Program` on the batches of one optimizer step: forward and backward of each time chunk of each micro-batch of lanes, and the
weight gradients of each micro-batch where the schedule has them as a task of their own.

The schedule of 2 stages and 3 chunks, with the weight gradients (W) as tasks of their own; time runs to the right:

    stage 0   F0 F1 F2       B2 B1 B0 W
    stage 1      F0 F1 F2 B2 B1 B0 W

Every chunk has its own autograd graph. Here are those of chunk k on stage s and its neighbours; forward runs along the arrows, and each
gradient returns against its arrow:

                       x from stage s - 1
                               │ leaf: receives x.grad, which is sent back
    carry of chunk k - 1 ──→ [F k] ──→ carry for chunk k + 1
      (leaf: its gradient      │         (root: its gradient is the leaf's of chunk k + 1)
       is handed back)         ↓
                 y to stage s + 1 (root: its gradient is received), or the loss (root)

What a chunk passes to the next (the carry, and a pooled head's accumulator) is detached in the forward pass, and its gradient is passed
back explicitly in the backward pass. Activations travel between stages over the links, and their gradients come back the same way. A
chunk's saved tensors are therefore freed as soon as its backward is done, and a single device runs the same code as a pipeline stage.

If the head is shared, the last stage sends its outputs for a chunk to the stage that scores them, which runs the head's forward and
backward at once and returns the gradient. The two stages need to know nothing else about each other.

Message shapes follow from the batch, which every stage knows: nothing is negotiated, and shapes may differ from step to step.

Shapes: T time, B lane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from carrywave.data.batch import Batch
from carrywave.errors import PlanError
from carrywave.kernels import deferred_gradients
from carrywave.kernels.deferred_gradients import Deferred, deferring
from carrywave.kernels.pass_cache import pass_cache
from carrywave.model.heads import scoring
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import shorter
from carrywave.model.stage import Stage, regularize
from carrywave.model.state import Chunk, State
from carrywave.parallel.links.links import Links, Message, Pending
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, Program, incoming, outgoing
from carrywave.plan.schedule.schedule import Phase, StageTask, name
from carrywave.step.gradients import Gradients
from carrywave.step.passes.chunks import Chunks
from carrywave.step.passes.jobs import BatchOutcome, Observer, PassJob, flatten, join_states, program_for, split_lanes, split_state
from carrywave.step.passes.timing import Arrived, TaskClock, span
from carrywave.step.precision import HALVES, autocast


@dataclass
class _Kept:
    """What backward of a chunk needs from forward; with recomputation, only what reruns it (the carry only at the start of a segment)."""

    x: Tensor
    entered: State | None
    y: Tensor | None = None
    left: State | None = None
    root: Tensor | None = None


class _Outcome(NamedTuple):
    """What the forward of a chunk came to."""

    y: Tensor  # the output, for the next stage or for whoever scores it
    left: State  # the state after the chunk
    root: Tensor | None = None  # what to differentiate; None: nothing here
    sums: Tensor | None = None  # loss, count and penalty; None without a head: there is nothing to add


@torch.no_grad()
def forward(
    stage: Stage | OpaqueModel, mesh: Mesh, batch: Batch, state: State, *, uncut_time: bool, precision: str, observe: Observer | None
) -> BatchOutcome:
    """Run one batch forward only, as an evaluation does. `uncut_time`: as in `program_for`."""
    program = program_for(mesh.plan, [batch], backward=False, uncut_time=uncut_time)
    job = PassJob(batch, state, precision=precision, observe=observe)
    [outcome] = Pass(stage, mesh.plan, program, [job], mesh.links, stage_number=mesh.stage).run()
    return outcome


class Pass:
    """One execution of a program by the stage with this number; gradients accumulate in the parameters' `.grad`. Everything is kept by
    micro-batch: a part of a job's lanes, numbered over all jobs.

    `gradients` learns which become final, in the last backward of a step and in the weight gradients after it. `clock` times each task.
    """

    def __init__(
        self,
        stage: Stage | OpaqueModel,
        plan: Plan,
        program: Program,
        jobs: Sequence[PassJob],
        links: Links | None = None,
        *,
        stage_number: int = 0,
        gradients: Gradients | None = None,
        clock: TaskClock | None = None,
    ) -> None:
        program = program if links is None else links.arranged(program)
        self.stage, self.plan, self.program, self.jobs, self.links = stage, plan, program, jobs, links
        self.stage_number, self.gradients, self.clock = stage_number, gradients, clock
        self.schedule, self.steps = program.schedule, program.stages[stage_number]
        self.batches: list[Batch] = []  # by micro-batch
        self.owner: list[int] = []  # the job of each micro-batch
        self.first: list[int] = []  # the first micro-batch of each job
        self.states: list[State | None] = []  # current state of each micro-batch; None: not started
        for number, job in enumerate(jobs):
            lanes = job.batch.lanes.shape[0]
            parts = min(plan.micro_batches, lanes)  # never more than it has lanes
            self.first.append(len(self.batches))
            self.owner += [number] * parts
            self.batches += [job.batch] if parts == 1 else split_lanes(job.batch, parts, pooled=stage.pooled)
            self.states += [job.state] * parts if parts == 1 or job.state is None else split_state(job.state, parts, lanes)
        self.forwards = [0] * len(self.batches)  # chunks of each micro-batch that have run forward
        self.kept: dict[tuple[int, int], _Kept] = {}  # by chunk and micro-batch
        self.arriving: dict[StageTask, Pending] = {}  # by the task that reads it
        self.leaving: dict[StageTask, Tensor] = {}  # by the task that made it
        self.staying: dict[StageTask, Tensor] = {}  # what the last stage keeps for itself when it scores a chunk of a shared head
        self.none = torch.zeros(3, dtype=torch.float64, device=jobs[0].batch.lengths.device)
        self.sums = [self.none] * len(jobs)  # loss, count and penalty of each job
        self.carry_gradients: dict[int, list[Tensor | None]] = {}  # from a chunk to the one before it, by micro-batch
        self.last_stage, self.share_head = stage_number == len(program.stages) - 1, bool(self.schedule.scorers)
        backwards = [step.task for step in self.steps if step.kind == "run" and step.task.phase == "B"]
        self.last_backward = backwards[-1] if backwards else None
        self.armed = False  # True from the last backward on: gradients become final one after another
        self.trains = bool(backwards)  # autograd graphs are needed only if the program has a backward pass
        # Weight gradients that wait for their task, by micro-batch.
        self.deferred = {task.micro_batch: Deferred() for task in self.schedule.stages[stage_number] if task.phase == "W"}
        # The last stage starts its backward as soon as it has scored and finishes before the others, so it can defer the head's weight
        # gradients. The other stages score while they wait and finish later, so they compute these gradients right after scoring.
        self.deferred_head = Deferred() if self.share_head and not self.last_stage else None
        reads_lengths = isinstance(stage, OpaqueModel)
        self.chunks = Chunks(self.batches, self.schedule.chunks, plan.chunk_steps, self.deferred, reads_lengths=reads_lengths)
        self.dtype = HALVES.get(jobs[0].precision, stage.dtype)  # of messages between stages
        self.casts = any(job.precision in HALVES for job in jobs)
        # Where messages are read in place, the sender must learn when their buffers are free: after the last step of a micro-batch.
        self.in_place = links is not None and links.in_place
        self.lasts = {step.task.micro_batch: number for number, step in enumerate(self.steps)} if self.in_place else {}

    def run(self) -> list[BatchOutcome]:
        """Carry out the steps of this stage in order."""
        try:
            with pass_cache() if len(self.steps) > 2 else nullcontext():
                self._carry_out()
        except BaseException:
            self.arriving.clear()  # receives would keep the connections open for as long as somebody keeps the error
            raise
        if len(self.jobs) == len(self.batches) == 1:
            return [BatchOutcome(self.sums[0], cast(State, self.states[0])._replace(tail=None))]
        outcomes = []
        for number, (low, high) in enumerate(zip(self.first, [*self.first[1:], len(self.batches)], strict=True)):
            states = [cast(State, state)._replace(tail=None) for state in self.states[low:high]]
            outcomes.append(BatchOutcome(self.sums[number], join_states(states)))
        return outcomes

    def _carry_out(self) -> None:
        tasks = {"F": self._forward, "B": self._backward, "H": self._score, "W": self._weights}
        scored: StageTask | None = None  # the last task that ran, if it scored a chunk of a shared head
        watched = self.clock is not None or profiler._is_profiler_enabled
        if self.links is not None:
            self.links.begin(self.program, self._messages)
        for number, (kind, task) in enumerate(self.steps):
            if kind == "receive":
                channel = cast(Channel, incoming(task, self.schedule))
                self.arriving[task] = cast(Links, self.links).receive(channel, self._shape(channel, task), self.dtype)
            elif kind == "send":
                with self._timed("send", task) if watched else nullcontext():
                    cast(Links, self.links).send(cast(Channel, outgoing(task, self.schedule)), self.leaving.pop(task))
            else:
                if self.links is not None:
                    self.links.flush()
                if scored is not None:  # after the send, because another stage is waiting for it
                    self._flush_head(scored)
                if watched and task in self.arriving:
                    with self._timed("wait", task):
                        self.arriving[task] = Arrived(self.arriving[task].wait())
                deferred = self.deferred.get(task.micro_batch)
                # Also around F: in forward, a layer learns where its weight gradients will go.
                with self._timed(task.phase, task) if watched else nullcontext(), deferring(deferred) if deferred else nullcontext():
                    tasks[task.phase](task)
                scored = task if task.phase == "H" else None
            if self.in_place and self.lasts[task.micro_batch] == number < len(self.steps) - 1:
                cast(Links, self.links).finished(task.micro_batch)
        if self.links is not None:
            self.links.flush()
        if scored is not None:
            self._flush_head(scored)
        if self.links is not None:
            self.links.end()

    def _timed(self, label: str, task: StageTask) -> AbstractContextManager[object]:
        """Times a part of a task, if there is a clock, or shows it to a profiler."""
        if self.clock is not None:
            return self.clock.lap(label, task)
        what = name(task, self.schedule)
        return span(what if label == task.phase else f"{label} {what}")

    def _flush_head(self, done: StageTask) -> None:
        """Compute the head's weight gradients after scoring, on all stages but the last."""
        if self.deferred_head is not None:
            with self._timed("W", done):
                self.deferred_head.flush()

    def _weights(self, task: StageTask) -> None:
        """Compute the weight gradients that the backwards of this micro-batch have left pending."""
        self.deferred[task.micro_batch].flush(self._settled if self.armed else None)

    def _pending(self, weight: Tensor) -> bool:
        """True if part of a weight's gradient waits for a later task."""
        return any(deferred.pending(weight) for deferred in self.deferred.values())

    def _settled(self, weight: Tensor) -> None:
        """After the last backward: a weight's gradient is final unless other micro-batches have yet to add to it."""
        if self.gradients is not None and not self._pending(weight):
            self.gradients.is_final(weight)

    def _shape(self, channel: Channel, task: StageTask) -> tuple[int, int, int]:
        """The shape of a message on a channel, from one of the tasks at its ends, which work on the same chunk."""
        first, end = self.chunks.step_range(task.micro_batch, task.chunk)
        head = channel.phase == "H" or (channel.phase == "B" and channel.sender < channel.receiver)
        from_below = self.stage_number == (channel.receiver if channel.phase == "F" else channel.sender)
        width = self.stage.width_head if head else self.stage.width_in if from_below else self.stage.width_out
        return shorter(end - first, self.stage.stride), self.batches[task.micro_batch].lanes.shape[0], width

    def _messages(self) -> dict[Channel, list[Message]]:
        """Every message that this stage sends or receives, by channel, in order."""
        by_channel: dict[Channel, list[Message]] = {}
        for kind, task in self.steps:
            if kind != "run":
                channel = cast(Channel, (outgoing if kind == "send" else incoming)(task, self.schedule))
                size = math.prod(self._shape(channel, task)) * self.dtype.itemsize
                by_channel.setdefault(channel, []).append(Message(task.micro_batch, size))
        return by_channel

    def _forward(self, task: StageTask) -> None:
        part, chunk = task.micro_batch, task.chunk
        entered = self._entered(task)
        if self.stage_number > 0:
            x = self.arriving.pop(task).wait().requires_grad_(self.trains)
        else:
            inputs = self.batches[part].inputs
            x = inputs if self.schedule.chunks[part] == 1 else inputs[slice(*self.chunks.step_range(part, chunk))]
        if self.trains and chunk > 0:  # the first chunk keeps its link to an initial carry that may be learned
            entered = entered.leaves()
        with torch.set_grad_enabled(self.trains and not self.plan.recompute), self._cast(task) if self.casts else nullcontext():
            done = self._run_chunk(task, x, entered)
        if done.sums is not None:
            self._add(part, done.sums)
        left = done.left.detach()
        self.states[part] = left.compact() if self.plan.recompute else left  # outputs of the chunk must not stay in memory with its carry
        self.forwards[part] += 1
        if not self.last_stage or self.share_head:
            self._queue(task, done.y.detach().contiguous())
        if self.trains and self.plan.recompute:
            self.kept[chunk, part] = _Kept(x, None if self._place_in_segment(task) else entered)
        elif self.trains:
            self.kept[chunk, part] = _Kept(x, entered, done.y, done.left, done.root)

    def _add(self, micro_batch: int, sums: Tensor) -> None:
        job = self.owner[micro_batch]
        self.sums[job] = sums if self.sums[job] is self.none else self.sums[job] + sums

    def _run_chunk(self, task: StageTask, x: Tensor, entered: State) -> _Outcome:
        """Forward of one chunk: what goes to the next stage, the state after it, and, where the head is, what to differentiate."""
        stage, batch, job = self.stage, self.batches[task.micro_batch], self.jobs[self.owner[task.micro_batch]]
        idle = batch.part_of is not None and batch.idle
        if idle and isinstance(stage, OpaqueModel) and not stage.has_norms:
            # Nothing depends on a placeholder, and a user's module need not be able to read a sequence of no steps.
            return _Outcome(x, entered, sums=self.none)
        chunk = self.chunks.at(task.micro_batch, task.chunk, job.key, in_window=task.phase == "F")
        y, raw, left = stage(x, entered, chunk)
        if not stage.has_head:
            # The next layer computes in this dtype anyway, so sending a wider one would gain nothing.
            return _Outcome(y.to(self.dtype), left)
        loss = count = penalty = self.none[0]
        root: Tensor | None = None
        pooled = stage.pooled and batch.resets is None  # with resets, sequences end in any chunk, at any step
        if (task.chunk == self.schedule.chunks[task.micro_batch] - 1 or not pooled) and not self.share_head:
            targets = batch.targets
            if targets is not None and not pooled and self.schedule.chunks[task.micro_batch] > 1:
                targets = targets[slice(*self.chunks.step_range(task.micro_batch, task.chunk))]
            if job.observe is not None:
                out = stage.output(y, left, chunk)
                seen = scoring.seen(targets, chunk.weights, pooled=pooled)
                job.observe(out, seen, batch.sequence, batch.offset + chunk.start)
                if targets is not None and not batch.idle:
                    root, count = stage.score(out, y, left, scoring.known(targets), chunk)
            elif targets is not None and not idle:
                root, count = stage.loss(y, left, targets if self.trains else scoring.known(targets), chunk)
            loss = loss if root is None else root.detach()
        if idle and stage.has_norms and torch.is_grad_enabled():  # norms of other workers wait for this one in backward, too
            root = torch.stack([0.0 * tensor.sum() for tensor in tree_leaves(y)]).sum()
        if job.alpha or job.beta:
            lengths = None if chunk.lengths is None else shorter(chunk.lengths, stage.stride)
            extra = regularize(raw, y, entered.tail, job.alpha, job.beta, lengths, job.per_change, chunk.resets)
            left = left._replace(tail=raw[-1] if job.beta else None)
            penalty = extra.detach()
            root = extra if root is None else root + extra
        y = y.to(self.dtype) if self.share_head else y
        return _Outcome(y, left, root, torch.stack([loss.double(), count.detach().double(), penalty.double()]))

    def _queue(self, task: StageTask, tensor: Tensor) -> None:
        """Queue a tensor for another stage, or keep it if the last stage scores its own chunk."""
        if outgoing(task, self.schedule) is not None:
            self.leaving[task] = tensor
        else:
            self.staying[task] = tensor

    def _take(self, task: StageTask, giver: Phase) -> Tensor:
        """The input of a task: received from another stage, or kept by the last stage for itself."""
        return self.arriving.pop(task).wait() if task in self.arriving else self.staying.pop(task._replace(phase=giver))

    def _score(self, task: StageTask) -> None:
        """Run forward and backward of the head on a chunk, and pass back the gradient of its input."""
        batch, job = self.batches[task.micro_batch], self.jobs[self.owner[task.micro_batch]]
        y = self._take(task, "F").requires_grad_()  # the head reads a copy, which it may change in place
        if batch.targets is not None and not batch.idle:
            targets = batch.targets[slice(*self.chunks.step_range(task.micro_batch, task.chunk))]
            with deferring(self.deferred_head or self.deferred.get(task.micro_batch)):
                with torch.enable_grad(), self._cast(task):
                    loss_sum, count = self.stage.loss(y.clone(), State(()), targets, self._chunk(task))
                if loss_sum.requires_grad:
                    deferred_gradients.backward([loss_sum], [None if job.scale is None else job.scale.to(loss_sum.dtype)])
            self._add(task.micro_batch, torch.stack([loss_sum.detach().double(), count.detach().double(), self.none[2]]))
        self._queue(task, torch.zeros_like(y) if y.grad is None else y.grad.contiguous())

    def _entered(self, task: StageTask) -> State:
        """The state of the micro-batch before this task. One that has not started takes that of the same lanes after the previous job."""
        state = self.states[task.micro_batch]
        if state is None:
            job = self.owner[task.micro_batch]
            before = self.first[job - 1] + task.micro_batch - self.first[job]
            if self.forwards[before] < self.schedule.chunks[before]:
                raise PlanError("the schedule starts a batch before the previous one has left its carry; run the batches in order")
            state = cast(State, self.states[before])
        # The penalty on changes of the output (`beta`) does not span windows.
        return state if task.chunk > 0 or state.tail is None else state._replace(tail=None)

    def _backward(self, task: StageTask) -> None:
        kept = self.kept.pop((task.chunk, task.micro_batch))
        entered = self._restored(task) if kept.entered is None else kept.entered
        if self.plan.recompute:
            with torch.enable_grad(), self._cast(task):
                done = self._run_chunk(task, kept.x, entered)
            kept = _Kept(kept.x, entered, done.y, done.left, done.root)
        roots: list[Tensor] = []
        root_gradients: list[Tensor | None] = []
        if kept.root is not None and kept.root.requires_grad:
            scale = self.jobs[self.owner[task.micro_batch]].scale
            roots.append(kept.root)
            root_gradients.append(scale.to(kept.root.dtype) if scale is not None else None)
        if not self.last_stage or self.share_head:
            gradient = self._take(task, "H")
            if kept.y is not None and kept.y.requires_grad:
                roots.append(kept.y)
                root_gradients.append(gradient)
        handed = self.carry_gradients.pop(task.micro_batch, None)
        if handed is not None and kept.left is not None:
            for tensor, gradient_or_none in zip(flatten(kept.left), handed, strict=True):
                if gradient_or_none is not None and tensor.requires_grad:
                    roots.append(tensor)
                    root_gradients.append(gradient_or_none)
        if task == self.last_backward and self.gradients is not None:
            self.gradients.sum_early(self._pending if self.deferred else None)
            self.armed = True
        if roots:
            deferred_gradients.backward(roots, root_gradients)
        if task.chunk > 0:
            self.carry_gradients[task.micro_batch] = [tensor.grad for tensor in flatten(entered)]
        elif self.deferred:
            self.chunks.finish(task.micro_batch)
        if self.stage_number > 0:
            self.leaving[task] = torch.zeros_like(kept.x) if kept.x.grad is None else kept.x.grad.contiguous()

    def _place_in_segment(self, task: StageTask) -> int:
        """The chunks from the last kept carry to this chunk."""
        return task.chunk % self.plan.segment(self.schedule.chunks[task.micro_batch])

    @torch.no_grad()
    def _restored(self, task: StageTask) -> State:
        """The carry with which a chunk was entered, recomputed from the start of its segment; those of the chunks between are kept now."""
        job = self.jobs[self.owner[task.micro_batch]]
        for chunk in range(task.chunk - self._place_in_segment(task), task.chunk):
            before = self.kept[chunk, task.micro_batch]
            with self._cast(task):
                _, raw, left = self.stage(before.x, cast(State, before.entered), self._chunk(task._replace(chunk=chunk)))
            if self.stage.has_head and job.beta:
                left = left._replace(tail=raw[-1])
            entered: State = left.compact().leaves()
            if chunk + 1 < task.chunk:
                self.kept[chunk + 1, task.micro_batch].entered = entered
        return entered

    def _cast(self, task: StageTask) -> AbstractContextManager[object]:
        """The arithmetic of a task, where it is not that of the parameters."""
        return autocast(self.jobs[self.owner[task.micro_batch]].precision, self.batches[task.micro_batch].lengths.device)

    def _chunk(self, task: StageTask) -> Chunk:
        key = self.jobs[self.owner[task.micro_batch]].key
        return self.chunks.at(task.micro_batch, task.chunk, key, in_window=False)
