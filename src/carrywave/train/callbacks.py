"""Callbacks: what a user's own code learns while a run trains, and how it may end the run, on all workers at the same step.

Only rank 0 calls them; it tells the others whether one asked to stop, or failed. They are given numbers, not the model, so that they do not
change what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carrywave.errors import UserError, one_line
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.world import World, all_gather_json, raise_on_all

EVENTS = ("on_step", "on_evaluation", "on_epoch")


@dataclass(frozen=True)
class Moment:
    """Where a run is when a callback is called.

    >>> import carrywave as cw
    >>> at = cw.Moment(run=Path("runs/ups"), epoch=2, epochs=5, step=300, lr=0.001, split="valid", metrics={"loss": 0.5, "accuracy": 0.75})
    >>> at.loss, at.metrics["accuracy"]
    (0.5, 0.75)
    """

    run: Path
    epoch: int  # from 1
    epochs: int
    step: int  # optimizer steps taken since the start of the run
    lr: float
    split: str = "train"  # in on_evaluation: valid, or test at the end of the run
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this evaluation; in on_epoch, of the last one
    read_loss: Callable[[], float] | None = field(default=None, repr=False, compare=False)

    @property
    def loss(self) -> float:
        """The mean loss: in on_step, of this step's targets; otherwise of the evaluation in `metrics`, NaN if there was none.

        In on_step with a GPU, reading it waits for the step to end, so do not read it at every step.
        """
        if self.read_loss is not None:
            return self.read_loss()
        return self.metrics.get("loss", math.nan)


class Callback:
    """A base class for what should happen while `cw.fit` trains. Override what you need; return True to end the run there.

    A run that a callback ends is finished as one that stops early: it is evaluated, and its best weights are kept. Callbacks are called on
    rank 0 only, in the order given. An exception in one ends the run, on all workers, as a `UserError`.

    >>> import carrywave as cw
    >>> class GoodEnough(cw.Callback):
    ...     def on_evaluation(self, at: cw.Moment) -> bool:
    ...         return at.split == "valid" and at.loss < 5.0
    >>> wave = [float(step % 4) for step in range(80)]
    >>> how = {"task": "forecasting", "data": {"horizon": 2}, "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 9}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, wave, **how, callbacks=[GoodEnough()])
    >>> result.ending
    'callback'
    """

    def on_step(self, at: Moment) -> bool | None:
        """Called after each optimizer step. On several workers this costs a message at each step; so leave it out if you can."""
        return None

    def on_evaluation(self, at: Moment) -> bool | None:
        """Called after each evaluation of valid, and after that of test at the end, whose answer is ignored."""
        return None

    def on_epoch(self, at: Moment) -> bool | None:
        """Called at the end of each epoch, after its evaluation."""
        return None


class Callbacks:
    """The callbacks of one run. Every rank has them, and asks at the same moments; only rank 0 calls them."""

    def __init__(self, callbacks: Sequence[object], world: World) -> None:
        self.world = world
        self._by_event = {event: [each for each in callbacks if _handles(each, event)] for event in EVENTS}
        self._pending: UserError | None = None
        self._ends = False

    def on_step(self, moment: Callable[[], Moment], *, agree: bool) -> bool:
        """True if a callback asks to stop after this step. Collective if `agree`; otherwise the answer waits until it is."""
        return self._call("on_step", moment, agree=agree, no_timeout=False)

    def on_evaluation(self, moment: Callable[[], Moment]) -> bool:
        """True if a callback asks to stop after this evaluation. Collective."""
        return self._call("on_evaluation", moment, agree=True, no_timeout=True)

    def on_epoch(self, moment: Callable[[], Moment]) -> bool:
        """True if a callback asks to stop after this epoch. Collective."""
        return self._call("on_epoch", moment, agree=True, no_timeout=True)

    def _call(self, event: str, moment: Callable[[], Moment], *, agree: bool, no_timeout: bool) -> bool:
        called = self._by_event[event]
        if not called:
            return False
        heartbeat.rest()  # what users do in a callback may take long, and is no hang
        if self.world.rank == 0 and self._pending is None:
            try:
                self._ask(event, called, moment())
            except UserError as error:
                self._pending = error
        ends = agree and self._agreed(no_timeout=no_timeout)
        heartbeat.mark()
        return ends

    def _agreed(self, *, no_timeout: bool) -> bool:
        with raise_on_all(self.world, same_message=True, no_timeout=no_timeout):
            if self._pending is not None:
                raise self._pending
        ends, self._ends = self._ends, False
        return bool(all_gather_json(self.world, ends)[0])

    def _ask(self, event: str, called: Sequence[object], at: Moment) -> None:
        for callback in called:
            try:
                self._ends = bool(getattr(callback, event)(at)) or self._ends
            except Exception as error:
                what = one_line(error)
                raised = f"{type(error).__name__}: {what}" if what else type(error).__name__
                raise UserError(
                    f"{type(callback).__name__}.{event} raised {raised} at step {at.step}; correct the callback, and resume the run, "
                    "or start it again if it has no snapshot yet"
                ) from error


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse what would never be called."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks is a {type(callbacks).__name__}, not a list; write callbacks=[...]")
    for each in callbacks:
        name = type(each).__name__
        if isinstance(each, type):
            raise UserError(f"callbacks holds the class {each.__name__}, not an object; write {each.__name__}()")
        unknown = [method for method in dir(each) if method.startswith("on_") and method not in EVENTS]
        if unknown:
            raise UserError(f"{name}.{unknown[0]} would never be called; callbacks have {', '.join(EVENTS)}")
        if not isinstance(each, Callback) and not any(callable(getattr(each, event, None)) for event in EVENTS):
            raise UserError(f"callbacks holds a {name}, which has none of {', '.join(EVENTS)}; derive it from cw.Callback")


def in_words(callbacks: Sequence[object]) -> str:
    """The callbacks and what they handle, on which all workers must agree."""
    return ", ".join(f"{type(each).__name__}({' '.join(event for event in EVENTS if _handles(each, event))})" for each in callbacks)


def _handles(callback: object, event: str) -> bool:
    """True if there is anything to call: a method that is not the empty one of the base class."""
    return callable(getattr(callback, event, None)) and getattr(type(callback), event, None) is not getattr(Callback, event)
