"""Random changes to sequences of numbers in training (`data.augment`): another beginning, factors, noise.

What becomes of a sequence is a pure function of (seed, epoch, sequence): whoever reads it, in whatever batch and lane, and after however
many interruptions, reads the same.

Shapes: T time, B lane, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.shuffle import Floats, draw_uniforms, draw_words
from carrywave.spec.signal_spec import AugmentSpec
from carrywave.spec.spec import Spec

SHIFT, SCALE, NOISE = range(102, 105)  # sites of draws, beyond those of `shuffle`


@dataclass(frozen=True)
class Augmentation:
    """What is changed, and the seed of the changes."""

    setting: AugmentSpec
    seed: int

    @staticmethod
    def of(spec: Spec, inputs: NDArray[Any]) -> Augmentation | None:
        """The changes that a spec asks for, if any; tokens are not changed."""
        setting = spec.data.augment if spec.augments and inputs.dtype.kind == "f" else None
        return None if setting is None else Augmentation(setting, spec.train.seed)

    def steps(self, time_T1: Ints, length: Ints, sequence: Ints, epoch: int) -> Ints:
        """[T, B]: the step that is read at each time of each lane, counted from the lane's first."""
        if not self.setting.shift:
            return time_T1
        return (time_T1 + self._below(length, epoch, SHIFT, sequence)) % np.maximum(length, 1)

    def inputs(self, inputs_TBF: NDArray[Any], sequence: Ints, epoch: int) -> NDArray[Any]:
        """Inputs with factors and noise."""
        steps, _, features = inputs_TBF.shape
        if self.setting.scale:
            inputs_TBF = inputs_TBF * (1.0 + self.setting.scale * self._normal(epoch, SCALE, sequence, features))
        if self.setting.noise:
            noise = self._normal(epoch, NOISE, sequence, steps * features).reshape(-1, steps, features)
            inputs_TBF = inputs_TBF + self.setting.noise * noise.transpose(1, 0, 2)
        return inputs_TBF.astype(np.float32, copy=False)

    def _below(self, limit: Ints, epoch: int, site: int, sequence: Ints) -> Ints:
        """A whole number from 0 to `limit` - 1 for each lane; 0 if the limit is 0."""
        return np.floor(draw_uniforms(self.seed, epoch, site, sequence) * limit).astype(np.int64)

    def _normal(self, epoch: int, site: int, sequence: Ints, count: int) -> Floats:
        """[B, count]: standard normal numbers of each sequence (Box-Muller)."""
        word_B1 = draw_words(self.seed, epoch, site, sequence)[:, None]
        index = (word_B1 + np.arange(count, dtype=np.uint64)).view(np.int64)
        radius = np.sqrt(-2.0 * np.log(draw_uniforms(self.seed, epoch, 2 * site, index)))
        angle = 2.0 * np.pi * draw_uniforms(self.seed, epoch, 2 * site + 1, index)
        normal: Floats = radius * np.cos(angle)
        return normal
