"""The head's output for each sequence, computed by all workers and brought together on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.model.model import Model
from carrywave.parallel.gather import collect
from carrywave.prediction.evaluation import passes
from carrywave.prediction.saved_run import Saved
from carrywave.spec.data_spec import BatchSpec
from carrywave.step.graphs.capture import Capture
from carrywave.tasks.task import Part

Numbers = NDArray[Any]
RAGGED = ("tagging", "transcription")  # tasks with an output for each step of a sequence


class Outputs:
    """Computes outputs for any number of `Sequences`, keeping CUDA graphs from one to the next.

    With `shares`, tags are given as logits, as several labels for each step always are.
    """

    def __init__(self, saved: Saved, *, shares: bool = False) -> None:
        self.saved = saved
        self._shares = shares
        spec = saved.spec
        if spec.task == "tagging" and spec.streams:
            # Predictions are for each sequence by itself, however the model was trained.
            spec = spec.model_copy(update={"batch": BatchSpec(tokens=spec.lanes * spec.steps)})
        self._spec = spec
        mesh = saved.mesh
        self._capture = Capture.of(mesh.device, mesh.plan, saved.model, on_device=mesh.messages_on_device)

    def of(self, data: Sequences) -> list[Numbers]:
        """The output for the whole of each sequence (classification, regression), its tags (tagging), the log-probabilities of each step
        (transcription), the numbers of its steps, or the forecast after its last step.

        Empty on ranks other than 0. Collective.
        """
        spec = self.saved.spec
        pieces: dict[int, list[Tensor]] = {}
        for out, lengths, owners in self._walk(data):
            if spec.task == "tagging" and not (self._shares or spec.data.multi_label or spec.model.crf):
                out = out.argmax(-1)
            for lane, (length, owner) in enumerate(zip(lengths, owners, strict=True)):
                if owner < 0 or not length:
                    continue
                # Of a stream, the last window counts, or all if each step has an output; copies, since views would keep the windows.
                if spec.each_step:
                    pieces.setdefault(owner, []).append(out[:length, lane].clone())
                elif spec.task == "tagging":
                    pieces[owner] = [out[:length, lane].clone()]
                elif spec.task == "transcription":
                    pieces[owner] = [out[: self._answers(length), lane].clone()]
                else:
                    pieces[owner] = [out[lane] if self.saved.stage.pooled else out[length - 1, lane].clone()]
        by_number = self._together({owner: torch.cat(each) if len(each) > 1 else each[0] for owner, each in pieces.items()})
        return [by_number[number] for number in range(len(data))] if by_number else []

    def _answers(self, length: int) -> int:
        """At how many steps a sequence of this length is answered."""
        assert isinstance(self.saved.model, Model)
        return self.saved.model.output_steps(length)

    def _walk(self, data: Sequences) -> Iterator[tuple[Tensor, list[int], list[int]]]:
        """Yield the outputs of each batch, in host memory, with the length and the sequence of each lane."""
        saved = self.saved
        seen: list[Tensor] = []

        def observe(out: Tensor, *_: object) -> None:
            seen.append(out)

        part = Part("input", data, saved.task.unlabelled(data))
        each = passes(saved.model, self._spec, part, mesh=saved.mesh, stage=saved.stage, observe=observe, capture=self._capture)
        for batch, _ in each:
            if not saved.stage.has_head or not seen:  # a module in one piece is not run on a worker without lanes
                continue
            # Chunks are concatenated over time; a pooled head's output counts after the last one.
            out = torch.cat(seen) if len(seen) > 1 and not saved.stage.pooled else seen[-1]
            seen.clear()
            yield out.float().cpu(), batch.lengths.tolist(), batch.sequence.tolist()

    @property
    def _ragged(self) -> bool:
        """True if outputs are as long as their sequences."""
        return self.saved.spec.task in RAGGED or self.saved.spec.each_step

    def _together(self, pieces: Mapping[int, Tensor]) -> dict[int, Numbers]:
        """On rank 0, the pieces of all workers by number."""
        local: dict[str, Tensor] = {}
        if pieces:
            outs = list(pieces.values())
            ragged = self._ragged
            sizes = [len(out) for out in outs] if ragged else [1] * len(outs)
            # A few large messages instead of one for each sequence.
            local = {
                "number": torch.tensor(list(pieces), dtype=torch.int64),
                "size": torch.tensor(sizes, dtype=torch.int64),
                "out": torch.cat(outs) if ragged else torch.stack(outs),
            }
        by_number: dict[int, Numbers] = {}
        for received in collect(self.saved.mesh.world, local):
            if received:
                parts = torch.split(received["out"], received["size"].tolist())
                alone = not self._ragged
                by_number |= {
                    number: (part[0] if alone else part).numpy() for number, part in zip(received["number"].tolist(), parts, strict=True)
                }
        return by_number
