"""The training loop: epochs of optimizer steps, evaluation, the best weights, snapshots, and an orderly end.

All state is in `LoopState` and the trainer, so a run restored from a snapshot of them continues bit for bit. Anything that
depends on the clock goes only to the watcher and to timing.jsonl.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from carrywave.data.augmentation import Augmentation
from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor, Order
from carrywave.errors import Diverged
from carrywave.launch import launch_record
from carrywave.launch.signals import Reason, Stop
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import raise_on_all
from carrywave.prediction.evaluation import Kept
from carrywave.prediction.evaluation import evaluate as evaluate_part
from carrywave.runs.run import Run
from carrywave.runs.watcher import Watcher
from carrywave.step.nonfinite import BACK_FACTOR, Seen
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.result import StepResult
from carrywave.step.sync.meeting import SMALLEST_SCALE, Meetings
from carrywave.step.sync.pushing import Pushing
from carrywave.step.trainer import Trainer
from carrywave.tasks.kind import Part
from carrywave.tasks.task import Task
from carrywave.train import lr_schedule as rates
from carrywave.train.callbacks import Callbacks, Moment
from carrywave.train.checkpointer import Checkpointer
from carrywave.train.evaluations import DataParts, Stopped, improves, leave_if_asked, score_of
from carrywave.train.loop_state import Ending, LoopState
from carrywave.train.nonfinite_steps import check_can_go_back, handle_nonfinite, went_back
from carrywave.train.progress import Progress, place_of

LOOK_EVERY = 8  # steps between two checks of what a GPU has computed, with several workers


class Loop:
    """One run, from `state` to its end."""

    def __init__(
        self,
        task: Task,
        trainer: Trainer,
        parts: DataParts,
        order: Order,
        run: Run,
        watch: Watcher,
        checkpointer: Checkpointer,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.spec, self.task, self.trainer, self.parts, self.folder, self.watch = task.spec, task, trainer, parts, run, watch
        self.order = order
        spec = task.spec
        share = trainer.mesh.share(inputs=trainer.stage.has_encoder, targets=trainer.stage.scores)
        self.loader = Loader(
            parts.train.view, self.order, device=trainer.device, share=share, augmentation=Augmentation.of(spec, parts.train.view.inputs)
        )
        self.state, self.checkpointer = LoopState.start(trainer.device), checkpointer
        self.callbacks = callbacks or Callbacks((), trainer.mesh.world)
        # Of replicas that do not exchange at every step.
        self.meetings = None if trainer.sync is None else Meetings(trainer.mesh, trainer.sync)
        self.stop: Stop | None = None  # what evaluations check; None: they are never left early
        # Windows of varying length make the number of windows vary by epoch; otherwise one epoch stands for all.
        epochs = spec.train.epochs if spec.batch.vary else 1
        counted = sum(-(-self.order.num_steps(epoch) // spec.train.accumulate) for epoch in range(epochs))
        self.total_steps = min(counted * spec.train.epochs // epochs, spec.train.max_steps or math.inf)
        self.progress = Progress(task, run, watch, self.total_steps)

    @property
    def trains(self) -> bool:
        """True if there is anything left to train."""
        return self.state.trains(self.spec.train)

    def run(self, stop: Stop | None = None) -> Ending:
        """Train to the end, or until a signal asks to stop; a snapshot is written either way."""
        if stop is None:
            with Stop() as new_stop:
                return self.run(new_stop)
        train, at = self.spec.train, self.state
        self.stop = stop
        launch_record.begins_to_train()
        try:
            if train.on_nan == "back" and at.step == 0:
                self.checkpointer.save(self.state)  # so that there is always one to go back to
            if not self.trains and at.evaluated != at.step:
                self._end_here()  # it was stopped during its last evaluation, or its limit now lies before its current step
            while self.trains:
                try:
                    self._epoch(stop)
                    self.check()
                    reason = self._stop_reason(stop)
                    self.checkpointer.save(self.state)
                    if reason is not None:
                        return reason
                except Diverged as error:
                    self._go_back(error)
        except Stopped as stopped:
            self.state.ending = None  # the evaluation that would have ended the run is still pending
            self.check()
            self.checkpointer.save(self.state)
            return stopped.reason
        self.state.ending = self.state.ending or "done"
        return self.state.ending

    def _end_here(self) -> None:
        """Finish a run that lacks only its last evaluation."""
        self.write_row()
        self._evaluate()
        self.state.ending = self.state.ending or "done"
        self.checkpointer.save(self.state)

    def _epoch(self, stop: Stop) -> None:
        """Train from the cursor to the end of its epoch, then evaluate; return early if a stop is requested."""
        train, at = self.spec.train, self.state
        if at.step and self._evaluation_due() and at.evaluated != at.step:
            self._evaluate()  # the run was stopped during this evaluation
            self._save_if_due()
        reason = self._steps(stop) if at.ending is None else None
        finished = at.batch >= self.order.num_steps(at.epoch)
        if reason is not None and not finished and at.ending is None:
            return
        self.write_row()
        last = at.ending is not None or (finished and at.epoch + 1 >= train.epochs)
        if (last or not train.evaluate_every) and at.evaluated != at.step:
            self._evaluate()
        if finished:
            # Streams start over with the next epoch, so the carry of the lanes is not needed beyond this one.
            at.epoch, at.batch = at.epoch + 1, 0
            if self.callbacks.on_epoch(lambda: self.moment("train", at.latest)) and self.trains:
                at.ending = "callback"

    def _steps(self, stop: Stop) -> Reason | None:
        """Take the optimizer steps of an epoch from the cursor on; returns the reason to stop, if that was requested."""
        train, at = self.spec.train, self.state
        batches = self.loader.batches(Cursor(at.epoch, at.batch))
        reason: Reason | None = None
        try:
            for group in self._groups(batches):
                self.trainer.votes = stop.votes
                reason = self._step(group, stop)
                if train.max_steps is not None and at.step >= train.max_steps:
                    at.ending = "done"
                    break
                if self._evaluation_due():
                    self._evaluate()
                if at.ending is not None or reason is not None:
                    break
                self._save_if_due()
        finally:
            batches.close()
        return reason

    def _evaluation_due(self) -> bool:
        return self._due(self.spec.train.evaluate_every)

    def _due(self, every: int | None) -> bool:
        """True every `every` steps; where replicas train on their own, at their next meeting."""
        at = self.state
        if self.meetings is None:
            return bool(every and at.step % every == 0)
        return bool(every and at.met == at.step and at.step // every > at.met_before // every)

    def _save_if_due(self) -> None:
        if self._snapshot_due():
            self.check()
            self.checkpointer.save(self.state)

    def _snapshot_due(self) -> bool:
        """True every `snapshot_every` steps and after a new best evaluation, within an epoch; at its end there is a snapshot anyway."""
        at = self.state
        return at.batch < self.order.num_steps(at.epoch) and (at.best_step == at.step or self._due(self.spec.train.snapshot_every))

    def _groups(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """Group batches by optimizer step; the last group of an epoch may be smaller, and no batch is dropped."""
        group: list[Batch] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self.spec.train.accumulate:
                yield group
                group = []
        if group:
            yield group

    def _step(self, group: list[Batch], stop: Stop) -> Reason | None:
        """Take one optimizer step; returns the reason to stop, if a worker was asked to."""
        train, at = self.spec.train, self.state
        at.lr = rates.lr(train, at.rate, at.step, int(self.total_steps)) * BACK_FACTOR**at.backs
        if self.spec.batch.vary:
            # A shorter window has a smaller sum of gradients over time, so its learning rate is scaled down (AWD-LSTM).
            at.lr *= sum(batch.steps for batch in group) / (len(group) * self.spec.steps)
        self.trainer.set_lr(at.lr)
        result = self.trainer.update(*group)
        heartbeat.mark()
        at.step += 1
        at.batch += len(group)
        real, padded = (sum(cells) for cells in zip(*(batch.cells for batch in group), strict=True))
        at.cells = [at.cells[0] + real, at.cells[1] + padded]
        self.progress.count(real)
        meetings = self.meetings
        reason = self._on_its_own(meetings, result, stop) if meetings is not None else self._in_step(result, stop)
        if self.callbacks.on_step(lambda: self.moment("train", {}, result), agree=meetings is None or at.met == at.step):
            at.ending = "callback"
        return reason

    def _in_step(self, result: StepResult, stop: Stop) -> Reason | None:
        """After a step that all workers took together; returns the reason to stop, if one was asked to."""
        at = self.state
        self._add(result)
        alone = self.trainer.plan.workers == 1
        # Workers check at the same steps, not by their own clocks, so that all of them stop at the same one. If any of them has a GPU,
        # which runs asynchronously, none checks at every step.
        look = self.trainer.agreement.at_once or (self.progress.due if alone else at.step % LOOK_EVERY == 0)
        if look:
            self.check()
        if self.progress.due:
            self.progress.show_step(at, self.order.num_steps(at.epoch), result)
        if at.step % self.spec.train.log_every == 0:
            self.write_row()
        return stop.asked if alone else stop.decided(result.votes.tolist()) if look else None

    def _on_its_own(self, meetings: Meetings, result: StepResult, stop: Stop) -> Reason | None:
        """After a step that this replica took on its own: meet the others, if it is time; returns the reason to stop, if one was asked to.

        All replicas meet at the end of an epoch and of the run too, so that what is evaluated there is what all of them have trained.
        """
        train, at, sync = self.spec.train, self.state, meetings.sync
        meetings.add(result)
        if self.progress.due:
            self.progress.show_step(at, self.order.num_steps(at.epoch), result)
        last = at.batch >= self.order.num_steps(at.epoch) or at.step == train.max_steps
        if not sync.due(at.step, last=last):
            return None
        met = meetings.meet(self.trainer.news)
        at.met_before, at.met = at.met, at.step
        at.sums = at.sums + met.sums
        self._handle_nonfinite(met.seen, scale_gone=met.scale_gone)  # before anything non-finite reaches another replica
        sync.exchange(met.targets)
        if self._due(train.log_every):
            self.write_row()
            if isinstance(sync, Pushing):
                seen = sync.staleness
                self.folder.write_timing(place_of(at) | {"staleness": seen.mean, "most_stale": seen.most, "most_ahead": seen.ahead})
        return stop.decided(list(met.votes))

    def _stop_reason(self, stop: Stop) -> Reason | None:
        """The reason to stop, if any worker was asked to. Collective: every rank must call it."""
        votes = torch.tensor(stop.votes, dtype=torch.float64, device=self.trainer.device)
        return stop.decided(self.trainer.mesh.sum_(votes).tolist())

    def _add(self, result: StepResult) -> None:
        """Add one step to the running sums on the device; a non-finite step is only counted."""
        self.state.sums = self.state.sums + result.counted()

    def check(self) -> None:
        """Check for a non-finite loss or gradient; nothing of such a step is ever saved. Collective: every rank must call it."""
        if self.meetings is None:  # otherwise it was done when replicas met
            scaler = self.trainer.scaler
            self._handle_nonfinite(self.trainer.nonfinite.look(), scale_gone=scaler is not None and float(scaler.scale) < SMALLEST_SCALE)

    def _handle_nonfinite(self, seen: Seen, *, scale_gone: bool) -> None:
        handle_nonfinite(self.state, self.spec.train, self.trainer, seen, scale_gone=scale_gone, say=self.watch.say)

    def _go_back(self, error: Diverged) -> None:
        """Continue from the last snapshot with a lower learning rate, if the spec asks for it and the limit is not reached. Collective."""
        at = self.state
        check_can_go_back(at, self.spec.train, error)
        self.state = replace(self.checkpointer.go_back(), backs=at.backs + 1)
        self.folder.write_history("back", step=self.state.step)
        if self.meetings is not None:
            self.meetings.forget()
        self.watch.say(went_back(self.state, error))

    def write_row(self) -> None:
        """Write one row of metrics for the steps since the last one."""
        self.check()
        self.progress.write_steps(self.state)

    def _evaluate(self) -> None:
        """Evaluate, pass the result to the schedule and to weight averaging, keep the best weights, and decide on early stopping."""
        at, train = self.state, self.spec.train
        self.check()
        with self.trainer.evaluation_weights():
            if self.parts.valid is None:
                self._write_weights()
                at.evaluated = at.step
                return
            values = at.latest = self.evaluate(self.parts.valid, trained=True)
            at.evaluated = at.step
            loss = values["loss"]
            if not math.isfinite(loss):
                fact = f"the validation loss is {loss} at step {at.step}"
                raise on_every_rank(Diverged(f"{fact}; lower train.lr={train.lr:g} or set train.clip; nothing from that step was saved"))
            with raise_on_all(self.trainer.mesh.world):
                better, score = train.weights == "last" or improves(train.best, values, at.best), score_of(train.best, values)
            if better:
                at.best, at.best_step = values, at.step
                self._write_weights()
        at.losses.append(loss)
        at.rate = rates.after_evaluation(train, at.rate, score)
        optimizer = self.trainer.optimizer
        if isinstance(optimizer, optimizers.NTASGD) and not optimizer.average_active and optimizers.nonmonotone(at.losses, train.nonmono):
            optimizer.trigger()
            self.watch.say(f"weight averaging starts at step {at.step}")
        ends = self.callbacks.on_evaluation(lambda: self.moment("valid", values))
        if rates.stops_early(train, at.rate):
            at.ending = "early"
        elif ends:
            at.ending = "callback"

    def _write_weights(self) -> None:
        """Have rank 0 write the weights; non-finite weights are refused, with an error on every rank."""
        named = self.trainer.gathered(each_once=True)
        heartbeat.rest()  # a slow disk is no hang
        with raise_on_all(self.trainer.mesh.world, same_message=True, no_timeout=True):
            self.folder.write_weights(named, self.state.step, best=json.dumps(self.state.best))
        heartbeat.mark()

    def evaluate(self, part: Part, *, weights_step: int | None = None, trained: bool = False) -> dict[str, float]:
        """Evaluate the current weights on one part and write its row, with `weights_step` if the weights are not from the current step.

        `trained`: beside the loss stands that of training since the last evaluation, as it was computed there, with dropout.
        """
        at, trainer, started = self.state, self.trainer, time.monotonic()

        def tick(done: int, total: int) -> None:
            heartbeat.mark()
            if done < total:
                leave_if_asked(self.stop, trainer.mesh.world, done)
            self.progress.show_evaluation(at, part, done, total, started)

        kept = Kept(trainer.stage, trainer.capture, trainer.evaluation_trial)
        values = evaluate_part(trainer.model, self.task, part, mesh=trainer.mesh, kept=kept, tick=tick)
        place = place_of(at, part.name) | ({} if weights_step is None else {"weights_step": weights_step})
        train_loss = at.train_loss() if trained else None
        self.progress.write_evaluation(place, values, {} if train_loss is None else {"train_loss": train_loss}, started)
        return values

    def moment(self, split: str, metrics: Mapping[str, float], result: StepResult | None = None) -> Moment:
        """Where the run is, for a callback."""
        return self.progress.moment(self.state, split, metrics, result)
