"""The view of a transcription's data: labels in a row for each sequence, refused if they cannot fit into its steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences, View
from carrywave.errors import DataError
from carrywave.spec.model_spec import ModelSpec

END = -1  # follows the labels of a lane
SHOWN = 8  # labels of a transcription in a message


def view(name: str, data: Sequences, codec: Codec, model: ModelSpec | None) -> View:
    """The steps and labels of a part. Rows of labels are as wide as the longest that fits a window: sizes of batches recur. Without a
    `model`, nothing is known of what fits.
    """
    if data.labels is None or data.spans is None:
        return View(data.inputs, data.starts, data.lengths)
    labels, spans = data.labels, data.spans
    if model is not None:
        check_fit(name, data, codec, model)
    longest = int((spans[:, 1] - spans[:, 0]).max(initial=0))

    def at(sequences_B: Ints, steps: int) -> NDArray[np.int64]:
        place_L = np.arange(max(1, longest if model is None else min(longest, model.output_steps(steps))))
        first_B1, end_B1 = spans[sequences_B, :1], spans[sequences_B, 1:]
        rows_BL = np.minimum(first_B1 + place_L, max(len(labels) - 1, 0))
        labels_BL = labels[rows_BL] if len(labels) else np.full(rows_BL.shape, END)
        return np.where(first_B1 + place_L < end_B1, labels_BL, END).astype(np.int64)

    return View(data.inputs, data.starts, data.lengths, labels_at=at, weights=data.weights)


def check_fit(name: str, data: Sequences, codec: Codec, model: ModelSpec) -> None:
    """Refuse labels that no alignment fits into the steps at which the model answers: its loss would be infinite."""
    assert data.labels is not None
    assert data.spans is not None
    needed = steps_needed(np.asarray(data.labels), data.spans)
    lengths, which = np.unique(data.lengths, return_inverse=True)
    available = np.array([model.output_steps(int(length)) for length in lengths], np.int64)[which]
    short = np.flatnonzero(needed > available)
    if not len(short):
        return
    first = int(short[0])
    low, high = data.spans[first].tolist()
    written = codec.transcript(data.labels[low : low + SHOWN].tolist() if high > low + SHOWN else data.labels[low:high].tolist())
    shown = f"{written!r}" if isinstance(written, str) else " ".join(map(str, written))
    many = f"{len(short):,} of {len(data):,} sequences have" if len(short) > 1 else "a sequence has"
    which_one = f"sequence {first} ({shown}{' …' if high - low > SHOWN else ''})"
    factor = int(np.ceil(needed[short] * model.upsample / available[short]).max())
    raise DataError(
        f"{name}: {many} more labels than the model has answers: {which_one} needs {needed[first]}, with a blank between equal labels, but "
        f"gets {available[first]} for its {_many(int(data.lengths[first]))}; set model.upsample={factor}"
        f"{', use smaller strides in model.front,' if model.front_layers else ''} or remove such sequences"
    )


def _many(steps: int) -> str:
    return f"{steps:,} step{'s' * (steps != 1)}"


def steps_needed(labels: NDArray[np.int64], spans: Ints) -> Ints:
    """[n]: the fewest steps that the labels of each sequence fit into: one for each, and one for a blank between two that are equal."""
    equal = np.zeros(len(labels) + 1, np.int64)
    equal[2:] = np.cumsum(labels[1:] == labels[:-1]) if len(labels) > 1 else 0  # [k]: pairs among the first k labels
    first, end = spans[:, 0], spans[:, 1]
    repeats = np.where(end > first, equal[end] - equal[np.minimum(first + 1, len(labels))], 0)
    return np.asarray(end - first + repeats, np.int64)
