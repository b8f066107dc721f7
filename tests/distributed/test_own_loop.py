"""A user's own loop on several workers: what one device computes, and one sentence where workers are not given the same."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

import _warm
from carrywave.launch import launcher

sys.path.insert(0, str(Path(__file__).parent))
from _own_loop import train

Told = Callable[[str, Sequence[str]], list[list[dict[str, Any]]]]
WORKER = Path(__file__).with_name("_own_loop.py")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 replicas": (2, {}),
    "2 stages": (2, {"stages": 2, "chunk_steps": 2}),
    "2 x 2": (4, {"stages": 2, "chunk_steps": 4}),
}
SAME = (
    "plain",
    "freezes",
    "own freezes",
    "spares",
    "own spares",
    "evaluates",
    "goes on",
    "own goes on",
    "Adagrad goes on",
    "freezes what it has kept",
    "one lane",
    "one lane, all counted",
    "few lanes, goes on",
    "any module",
    "there and back",
    "state set by all",
    "notes of one",
)
DIFFERENT = {
    "another batch": "rank 1 got a different batch than rank 0",
    "another label": "rank 1 got a different batch than rank 0",
    "another number": "rank 1 got 2 batches",
    "another rate": "rank 1 has lr 0.5, but rank 0 has lr 0.02",
    "another evaluation": "rank 1 got a different batch than rank 0",
    "a longer evaluation": "rank 1 got a batch of 6 steps x 4 lanes to evaluate, but rank 0 got no more batches to evaluate",
    "another count": "rank 1 got batch 8 of the loop, but rank 0 got batch 3 of the loop",
    "other weights": "the weights of rank 1 differ from those of rank 0",
    "another buffer": "the weights of rank 1 differ from those of rank 0",
}


MADE = {
    "made alike": "",
    "made in another order": "rank 1 has as parameter or buffer 1 of the model encoder.parts.b.weight: .*, but rank 0 has encoder.parts.a."
    "weight: .*; build its modules alike and in the same order on all workers",
    "made with another buffer": "",  # all get rank 0's
    "made with another seed": r"rank 1 has train\.seed 2, but rank 0 has 1; pass the same to every worker's Trainer; a seed too",
}
ALIKE_IN_STAGES = ("other weights", "another buffer")  # rank 1 holds other ones there


def told_by_workers(plan: str, cases: list[str], folder: Path, device: str = "cpu") -> list[list[dict[str, Any]]]:
    workers, keys = PLANS[plan]
    (folder / "jobs").write_text(json.dumps([{"case": case, "plan": keys, "device": device} for case in cases]))
    start = _warm.start if device == "cpu" else launcher.start
    ended = start([sys.executable, str(WORKER), str(folder), "jobs"], workers)
    assert ended.code == 0, ended
    return [json.loads((folder / f"jobs.{rank}.out").read_text()) for rank in range(workers)]


def different_in(plan: str) -> list[str]:
    return [case for case in DIFFERENT if plan == "2 replicas" or case not in ALIKE_IN_STAGES]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each worker told of the cases, by rank. Workers of a plan are started once for all of its cases, which takes longest."""

    @cache
    def all_of(plan: str) -> dict[tuple[str, ...], list[list[dict[str, Any]]]]:
        groups = [SAME, tuple(MADE), tuple(different_in(plan))]
        answers = told_by_workers(plan, [case for group in groups for case in group], tmp_path_factory.mktemp("own-loop"))
        ends = list(accumulate(map(len, groups)))
        return {group: [of_rank[end - len(group) : end] for of_rank in answers] for group, end in zip(groups, ends, strict=True)}

    return lambda plan, cases: all_of(plan)[tuple(cases)]


@pytest.mark.parametrize("plan", ["2 replicas", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("2 stages", "2 x 2"))])
def test_an_own_loop_computes_what_one_device_does(plan: str, told: Told, tmp_path: Path) -> None:
    """Also where layers are frozen in between, where a module is used in some steps only, and where the loop stops and goes on."""
    found = told(plan, SAME)
    for number, case in enumerate(SAME):
        alone = train(case, {}, 0, tmp_path)
        for rank, answers in enumerate(found):
            assert "error" not in answers[number], (case, rank, answers[number])
            assert answers[number]["losses"] == pytest.approx(alone["losses"], rel=1e-10), (case, rank)  # float64
        weights = found[0][number]["weights"]
        assert weights.keys() == alone["weights"].keys()
        for name, values in alone["weights"].items():
            # float64, summed in another order; Adam divides by the root of small squares.
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(values), rtol=1e-8, atol=1e-10, msg=f"{case} {name}")


@pytest.mark.parametrize("plan", ["2 replicas", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("2 stages", "2 x 2"))])
def test_workers_that_are_not_given_the_same_say_so(plan: str, told: Told) -> None:
    """Stages do before they wait for each other."""
    cases = different_in(plan)
    for answers in told(plan, cases):
        for case, answer in zip(cases, answers, strict=True):
            assert answer.get("error", "no error").startswith(f"WorkerError: {DIFFERENT[case]}"), (case, answer)
            found_at = 4 if case == "another buffer" else 3  # weights and buffers in turn, and all of them at steps 1, 2, 4, 8, …
            assert f"(step {found_at} of the trainer); " in answer["error"]


@pytest.mark.parametrize("plan", ["2 replicas", pytest.param("2 stages", marks=pytest.mark.slow)])
def test_modules_that_are_not_made_alike_are_refused(plan: str, told: Told) -> None:
    for answers in told(plan, tuple(MADE)):
        for words, answer in zip(MADE.values(), answers, strict=True):
            assert re.match(f"WorkerError: {words}", answer["error"]) if words else "error" not in answer, answer


@pytest.mark.slow
def test_one_that_freezes_alone_says_so(write: Any, python: Any, tmp_path: Path) -> None:
    """The others are in the step by then, and end with it."""
    program = write(
        "alone.py",
        f"""
        import sys
        sys.path.insert(0, {str(WORKER.parent)!r})
        import os, torch, carrywave as cw
        from _own_loop import batch, model
        net = model()
        trainer = cw.Trainer(net, {{"lr": 0.01}}, device="cpu")
        for number in range(4):
            net.lstm.requires_grad_(number != 2 or os.environ["RANK"] == "0")
            trainer.step(batch(number))
        """,
    )
    ended = python("-m", "torch.distributed.run", "--nproc-per-node", "2", program, CARRYWAVE_START_SECONDS="8", OMP_NUM_THREADS="1")
    assert ended.returncode
    assert "requires_grad of lstm.weight_ih_l0 changed on rank 1, but not on all others" in ended.stderr
