"""The head's output for each sequence, computed by all workers and brought together on rank 0; of several runs, their mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.model.model import Model
from carrywave.parallel.gather import collect
from carrywave.prediction.ensemble import mean_of_outputs
from carrywave.prediction.evaluation import Kept, passes
from carrywave.prediction.saved_run import Saved
from carrywave.spec.data_spec import BatchSpec
from carrywave.step.graphs.capture import Capture
from carrywave.tasks.kind import Part

Numbers = NDArray[Any]
RAGGED = ("tagging", "transcription")  # tasks with an output for each step of a sequence


class HeadOutputs:
    """Computes outputs for any number of `Sequences`, keeping CUDA graphs from one to the next."""

    def __init__(self, *members: Saved) -> None:
        self.members = members
        self._each = [_Outputs(member, shares=len(members) > 1) for member in members]

    def of(self, *data: Sequences) -> list[Numbers]:
        """The output for the whole of each sequence (classification, regression), its tags (tagging), the log-probabilities of each step
        (transcription), the numbers of its steps, or the forecast after its last step. `data` are the sequences as each of the runs reads
        them.

        Empty on ranks other than 0. Collective.
        """
        by_run = [outputs.of(sequences) for outputs, sequences in zip(self._each, data, strict=True)]
        if len(by_run) == 1:
            return by_run[0]
        means = [mean_of_outputs(self.members, [torch.from_numpy(out) for out in outs]) for outs in zip(*by_run, strict=True)]
        spec = self.members[0].spec
        tags = spec.task == "tagging" and not spec.data.multi_label
        return [(mean.argmax(-1) if tags else mean).numpy() for mean in means]


class _Outputs:
    """Those of one run. With `shares`, tags are given as logits, as several labels for each step always are."""

    def __init__(self, saved: Saved, *, shares: bool) -> None:
        self.saved = saved
        spec = saved.spec
        if spec.task == "tagging" and spec.streams:
            # Predictions are for each sequence by itself, however the model was trained.
            spec = spec.model_copy(update={"batch": BatchSpec(tokens=spec.lanes * spec.steps)})
        self._spec, mesh = spec, saved.mesh
        self._tags = spec.task == "tagging" and not (shares or spec.data.multi_label or spec.model.crf)
        self._ragged = spec.task in RAGGED or spec.each_step  # outputs are as long as their sequences
        self._kept = Kept(saved.stage, Capture.of(mesh.device, mesh.plan, saved.model, on_device=mesh.messages_on_device))

    def of(self, data: Sequences) -> list[Numbers]:
        spec, model = self._spec, self.saved.model
        pieces: dict[int, list[Tensor]] = {}
        for out, lengths, owners in self._walk(data):
            out = out.argmax(-1) if self._tags else out
            for lane, (length, owner) in enumerate(zip(lengths, owners, strict=True)):
                if owner < 0 or not length:
                    continue
                # Of a stream, the last window counts, or all if each step has an output; copies, since views would keep the windows.
                steps = model.output_steps(length) if spec.task == "transcription" and isinstance(model, Model) else length
                if spec.each_step:
                    pieces.setdefault(owner, []).append(out[:length, lane].clone())
                elif self._ragged:
                    pieces[owner] = [out[:steps, lane].clone()]
                else:
                    pieces[owner] = [out[lane] if self.saved.stage.pooled else out[length - 1, lane].clone()]
        by_number = self._together({owner: torch.cat(each) if len(each) > 1 else each[0] for owner, each in pieces.items()})
        return [by_number[number] for number in range(len(data))] if by_number else []

    def _walk(self, data: Sequences) -> Iterator[tuple[Tensor, list[int], list[int]]]:
        """Yield the outputs of each batch, in host memory, with the length and the sequence of each lane."""
        saved = self.saved
        seen: list[Tensor] = []

        def observe(out: Tensor, *_: object) -> None:
            seen.append(out)

        part = Part("input", data, saved.task.unlabelled(data))
        each = passes(saved.model, self._spec, part, mesh=saved.mesh, kept=self._kept, observe=observe)
        for batch, _ in each:
            if not saved.stage.has_head or not seen:  # a module in one piece is not run on a worker without lanes
                continue
            # Chunks are concatenated over time; a pooled head's output counts after the last one.
            out = torch.cat(seen) if len(seen) > 1 and not saved.stage.pooled else seen[-1]
            seen.clear()
            yield out.float().cpu(), batch.lengths.tolist(), batch.sequence.tolist()

    def _together(self, pieces: Mapping[int, Tensor]) -> dict[int, Numbers]:
        """On rank 0, the pieces of all workers by number."""
        local: dict[str, Tensor] = {}
        if pieces:
            # A few large messages instead of one for each sequence.
            outs: Sequence[Tensor] = [out if self._ragged else out[None] for out in pieces.values()]
            sizes = torch.tensor([len(out) for out in outs], dtype=torch.int64)
            local = {"number": torch.tensor(list(pieces), dtype=torch.int64), "size": sizes, "out": torch.cat(list(outs))}
        by_number: dict[int, Numbers] = {}
        for received in collect(self.saved.mesh.world, local):
            if received:
                parts = torch.split(received["out"], received["size"].tolist())
                numbers = received["number"].tolist()
                by_number |= {number: (part if self._ragged else part[0]).numpy() for number, part in zip(numbers, parts, strict=True)}
        return by_number
