"""Checks whether a run may be resumed with a spec: which settings may differ from those of the snapshot, and which it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from carrywave.errors import RunError, UserError, option
from carrywave.runs.checkpoint.snapshot import Stored
from carrywave.spec.defaults import AUTO, SPANS, open_keys
from carrywave.spec.section import Section
from carrywave.spec.spec import PAST_STEPS, Spec
from carrywave.spec.task_defaults import FRONT

# Settings in the train section that may change when a run is resumed.
MAY_CHANGE = (
    "epochs",
    "max_steps",
    "early_stop",
    "evaluate_every",
    "log_every",
    "track",
    "keep",
    "snapshot_every",
    "on_nan",
)
FILES = ("data.train", "data.valid", "data.test")
OF_FRONT = tuple(f"model.{name}" for name in FRONT)  # go with the front
# Chosen to fit the data and the devices if they have these values; a run keeps what was chosen for it.
OPEN: Mapping[str, object] = {
    **dict.fromkeys(("batch.lanes", "batch.steps", "batch.tokens", "train.early_stop")),
    **dict.fromkeys(("train.precision", "model.front", "train.weights", "model.crf"), AUTO),
    "train.epochs": 0,
    "model.linear": PAST_STEPS,
}


def spec_of(snapshot: Stored) -> Spec:
    """The spec that a snapshot was made with."""
    with sound():
        return Spec.model_validate(snapshot.meta["spec"])


def left_open(spec: Spec) -> set[str]:
    """The settings that a spec leaves to be chosen: those of a run that goes on stay."""
    found = {key for key, value in OPEN.items() if getattr(getattr(spec, key.partition(".")[0]), key.partition(".")[2]) == value}
    found |= set(OF_FRONT) if spec.model.front == AUTO else set()
    spans = open_keys(spec, SPANS) if spec.model.crf == AUTO else {}
    found |= {f"{section}.{name}" for section, values in spans.items() for name in values}
    return found | ({"model.linear"} if spec.mixes and "linear" not in spec.model.model_fields_set else set())


def check_same(new_spec: Spec, spec: Spec, *, files_move: bool = False) -> None:
    """Refuse to resume with a spec that would change the results; how the work is split, and when it ends, may change.

    `files_move`: data files may have other names, because their content is compared with that of the snapshot later.
    """
    kept = left_open(new_spec)
    before, now = spec.model_dump(mode="json"), new_spec.model_dump(mode="json")
    for section in ("task", "data", "model", "batch", "train"):
        if section == "task" or not isinstance(now[section], dict):
            pairs = [(section, before[section], now[section])]
        else:
            pairs = [(f"{section}.{name}", before[section].get(name), value) for name, value in now[section].items()]
        for name, old, new in pairs:
            if name in kept:
                continue
            if files_move and name in FILES and old is not None and new is not None:
                continue
            if old != new and name.removeprefix("train.") not in MAY_CHANGE and name != "data.cache":
                raise RunError(
                    f"the run was started with {name}={old}, not {new}; keep the old value, or start a new run with {option('init')}"
                )


def with_choices_of(new_spec: Spec, spec: Spec) -> Spec:
    """The spec with the settings of a run where it leaves them open: what was chosen to fit the data and the devices is not chosen
    again.
    """
    sections: dict[str, Section] = {}
    for key in left_open(new_spec):
        section, _, name = key.partition(".")
        settings = sections.get(section, getattr(new_spec, section))
        sections[section] = settings.model_copy(update={name: getattr(getattr(spec, section), name)})
    return new_spec.model_copy(update=sections)


@contextmanager
def sound() -> Iterator[None]:
    """Report malformed content as another version's: every byte of a snapshot was verified, so this version never wrote it."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:80]
        raise RunError(f"the snapshot was not written by this version ({what}); resume from another snapshot or start a new run") from error
