"""Pieces of optimizer state: who owns what, how much memory that takes, and how any range is put together from any others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.errors import RunError, UserError
from carrywave.parallel.sums.group_sums import Summing
from carrywave.plan.plan import Plan
from carrywave.spec.load import parse
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.arguments import check_spec
from carrywave.step.checks.hooks import Hooks
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import piece_state, pieces
from carrywave.step.optim.piece_state import Wanted
from carrywave.step.optim.pieces import Pieces, bounds, share_size

CPU = torch.device("cpu")


class Together:
    """What replicas exchange, in one process: the rows of all are set before the last one gathers."""

    on_device = False

    def __init__(self) -> None:
        self.rows: list[dict[int, Tensor]] = []  # by round
        self.round = 0

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError("nothing is summed here")

    def all_gather(self, rows: Tensor, index: int) -> None:
        if self.round == len(self.rows):
            self.rows.append({})
        self.rows[self.round][index] = rows[index].clone()
        for replica, row in self.rows[self.round].items():
            rows[replica] = row
        self.round += 1


def model(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(1)
    return [(f"p{n}", nn.Parameter(torch.randn(tuple(shape), generator=draw, dtype=dtype))) for n, shape in enumerate(shapes)]


def cut(named: list[tuple[str, nn.Parameter]], replica: int, replicas: int, group: object = None) -> Pieces:
    found = Pieces(replica, replicas, cast(Summing, group))
    found.add(named)
    return found


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_every_element_has_one_owner(numel: int, replicas: int, dtype: torch.dtype) -> None:
    parameter = torch.empty(numel, dtype=dtype)
    found = [bounds(parameter, replica, replicas) for replica in range(replicas)]
    assert found[0][0] == 0
    assert found[-1][1] == numel
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert all(first * parameter.element_size() % pieces.ALIGNED_BYTES == 0 for first, last in found if first < last)
    assert max(last - first for first, last in found) <= share_size(parameter, replicas)


@pytest.mark.parametrize(("kind", "states"), [("adam", 2), ("sgd", 1), ("ntasgd", 1)])
def test_a_quarter_of_the_state_on_each_of_four_replicas(kind: str, states: int) -> None:
    """A small LSTM with its embedding: the bytes of what an optimizer keeps, within 30% of a quarter on every replica."""
    named = model((50, 24), (96, 24), (96, 24), (96,), (96,), (50, 24), (50,), dtype=torch.float32)
    spec = TrainSpec.model_validate({"optimizer": kind, "momentum": 0.9 if kind == "sgd" else 0.0})
    whole = sum(p.nbytes for _, p in named) * states
    for replica in range(4):
        index = cut(named, replica, 4)
        optimizer = optimizers.build(spec, index.named, CPU)
        if isinstance(optimizer, optimizers.NTASGD):
            optimizer.trigger()
        kept = [t for t in optimizers.state_tensors(optimizer, index.named).values() if t.dim()]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in kept)  # no view of something larger
        assert sum(t.nbytes for t in kept) == pytest.approx(whole / 4, rel=0.3)


@pytest.mark.parametrize("round_bytes", [64, 8 << 20])
@pytest.mark.parametrize("kind", ["adam", "adamw", "momentum", "ntasgd"])
def test_pieces_take_the_steps_of_a_whole_optimizer(kind: str, round_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also where a step is skipped, a parameter has no gradient, or its values lie elsewhere."""
    monkeypatch.setattr(pieces, "ROUND_BYTES", round_bytes)
    shapes = [(7, 11), (3,), (), (64, 5), (0,)]
    keys = {"optimizer": "sgd" if kind == "momentum" else kind, "momentum": 0.9 if kind == "momentum" else 0.0}
    spec = TrainSpec.model_validate(keys | {"lr": 0.1, "weight_decay": 0.01})
    wanted, replicas = model(*shapes), [model(*shapes) for _ in range(3)]
    whole, group = optimizers.build(spec, wanted, CPU), Together()
    owned = [cut(named, replica, 3, group) for replica, named in enumerate(replicas)]
    parts = [optimizers.build(spec, each.named, CPU) for each in owned]
    for step in range(4):
        skip = torch.tensor(float(step == 2))
        draw = torch.Generator().manual_seed(step)
        grads = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for _, p in wanted]
        if step == 1:  # what was there is moved: a view of old memory would not change it
            for named in replicas:
                named[0][1].data = named[0][1].data.clone()
        if step == 2 and isinstance(whole, optimizers.NTASGD):
            for each in (whole, *parts):
                cast(optimizers.NTASGD, each).trigger()
        for named in (wanted, *replicas):
            for (_, p), grad in zip(named, grads, strict=True):
                p.grad = None if step == 3 and p.dim() == 1 else grad.clone()
        for each, index in zip(parts, owned, strict=True):
            index.take()
            each.found_inf = skip  # type: ignore[attr-defined]
            each.step()
        whole.found_inf = skip  # type: ignore[attr-defined]
        whole.step()
        for _ in range(2):  # the second time, the rows of all are there
            for index in owned:
                group.round = 0
                index.exchange()
        group.rows.clear()
        for named in replicas:
            assert all(torch.equal(p, q) for (_, p), (_, q) in zip(named, wanted, strict=True))
    given_ = {key: t for each, index in zip(parts, owned, strict=True) for key, t in piece_state.saved(each, index.owned).items()}
    names = {name: Wanted.whole(name, p) for name, p in wanted}
    needed = {key: t for key, t in given_.items() if piece_state.needed(key, t.shape, names, names)}
    found = piece_state.assembled(needed, names, names)
    expected = optimizers.state_tensors(whole, wanted)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(st.integers(1, 299), max_size=5), st.integers(0, 300), st.integers(0, 300))
def test_any_range_from_any_ranges(numel: int, edges: list[int], one: int, other: int) -> None:
    state = torch.arange(numel, dtype=torch.float32)
    steps = sorted({0, numel, *(edge for edge in edges if edge < numel)})
    given_ = {f"exp_avg/p:{first}-{last}": state[first:last] for first, last in itertools.pairwise(steps)}
    first, last = sorted((min(one, numel - 1), min(other, numel)))
    last = max(last, first + 1)
    wanted = {"p": Wanted("p", first, last, numel, (last - first,))}
    needed = {key: t for key, t in given_.items() if piece_state.needed(key, t.shape, wanted, {"p"})}
    assert torch.equal(piece_state.assembled(needed, wanted, {"p"})["exp_avg/p"], state[first:last])
    assert len(needed) == sum(low < last and high > first for low, high in itertools.pairwise(steps))
    assert torch.equal(piece_state.assembled({"exp_avg/p": state}, wanted, {"p"})["exp_avg/p"], state[first:last])


@pytest.mark.parametrize("keys", [["0-4"], ["0-4", "5-8"], ["0-5", "4-8"], ["4-8"], ["0-4", "0-8"]])
def test_gaps_and_overlaps_are_refused(keys: list[str]) -> None:
    wanted = {"p": Wanted("p", 0, 8, 8, (2, 4))}
    given_ = {f"exp_avg/p:{key}": torch.zeros(int(key[-1]) - int(key[0])) for key in keys}
    with pytest.raises(RunError, match="does not contain all of the optimizer state exp_avg/p; resume from another snapshot"):
        piece_state.assembled(given_, wanted, {"p"})


@pytest.mark.parametrize(
    ("key", "shape"), [("exp_avg/p:0-9", (9,)), ("exp_avg/p:4-12", (8,)), ("exp_avg/q:0-4", (4,)), ("exp_avg/p", (9,))]
)
def test_what_matches_no_parameter_is_refused_before_it_is_read(key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(RunError, match="which matches no parameter of this run"):
        piece_state.needed(key, shape, {"p": Wanted("p", 0, 8, 8, (8,))}, {"p"})


def test_a_parameter_may_be_named_like_a_range() -> None:
    assert piece_state.parsed("exp_avg/p:0-4", {"p:0-4"}) == ("exp_avg", "p:0-4", None)
    assert piece_state.parsed("exp_avg/p:0-4", {"p"}) == ("exp_avg", "p", (0, 4))


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(UserError, match=r"the model's p is not contiguous in memory.*create the parameter from tensor\.contiguous\(\)"):
        cut([("p", nn.Parameter(torch.zeros(4, 3).T))], 0, 2)


def test_the_key_is_one_of_the_spec() -> None:
    assert parse({"train": {"shard_optimizer": True}}).train.shard_optimizer
    assert not TrainSpec().shard_optimizer


def test_hooks_on_gradients_are_refused() -> None:
    net = nn.Linear(2, 2)
    hooks = Hooks(dict(net.named_parameters()), net, Plan(replicas=2), in_pieces=True)
    with hooks.put_off():
        pass
    net.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UserError, match=r"would see only a piece of it with train\.shard_optimizer; remove the hook"), hooks.put_off():
        pass


def test_an_optimizer_of_ones_own_is_not_divided() -> None:
    spec = TrainSpec.model_validate({"shard_optimizer": True})
    with pytest.raises(UserError, match=r"train\.shard_optimizer does not apply to your own optimizer"):
        check_spec(spec, user_optimizer=True)
    check_spec(spec, user_optimizer=False)
