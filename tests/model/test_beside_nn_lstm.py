"""What users of torch.nn.LSTM do with it, done with ours beside it: the same numbers, or a refusal in our words. float64.

Shapes: T time, B lane.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jacobian, jvp
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import carrywave as cw
from carrywave.errors import UserError

DOUBLE = torch.float64
# torch's own transforms of a graph that is the same but for the order of sums.
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}
JIT = "ignore:.torch.jit.*is deprecated"  # said by torch about itself

Kind = Callable[..., Any]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def made(kind: Kind, *sizes: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, **{"dtype": DOUBLE, **options})


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in module.named_parameters()}


def gradient_penalty(kind: Kind) -> Any:
    lstm, x, h, c = made(kind, 2, 3, 2), numbers(4, 2, 2), numbers(2, 2, 3, seed=2), numbers(2, 2, 3, seed=3)
    leaves = [x.requires_grad_(), h.requires_grad_(), c.requires_grad_(), *lstm.parameters()]
    y, (last_h, last_c) = lstm(x, (h, c))
    first = torch.autograd.grad(y.sum() + last_h.sum() + last_c.sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)


def of_functional(kind: Kind) -> Any:
    lstm, x = made(kind, 2, 3), numbers(3, 1, 2)

    def total(x: Tensor) -> Tensor:
        found: Tensor = lstm(x)[0].sum()
        return found

    def outputs(x: Tensor) -> Tensor:
        found: Tensor = lstm(x)[0]
        return found

    return [hessian(total, x), hvp(total, x, x)[1], jvp(outputs, x, x), jacobian(outputs, x), jacobian(outputs, x, vectorize=True)]


def of_func(kind: Kind) -> Any:
    lstm, x = made(kind, 2, 3, 2, bidirectional=True), numbers(4, 2, 2)
    y, back = torch.func.vjp(lambda x: lstm(x)[0], x)
    each = torch.func.grad(lambda given, x: functional_call(lstm, given, (x,))[0].square().sum())(weights_of(lstm), x)
    jacobians = [make(lambda x: lstm(x)[0])(x) for make in (torch.func.jacrev, torch.func.jacfwd)]
    return [back(y)[0], torch.func.jvp(lambda x: lstm(x)[0], (x,), (x,)), *jacobians, list(each.values())]


def in_forward_mode(kind: Kind) -> Any:
    lstm, x = made(kind, 2, 3), numbers(4, 2, 2)
    with forward_ad.dual_level():
        doubled = {name: forward_ad.make_dual(each, torch.ones_like(each)) for name, each in weights_of(lstm).items()}
        y, _ = functional_call(lstm, doubled, (forward_ad.make_dual(x, x.cos()),))
        return list(forward_ad.unpack_dual(y))


def called_with_other_weights(kind: Kind) -> Any:
    lstm = made(kind, 3, 4, 2)
    return functional_call(lstm, {name: 2.0 * each for name, each in weights_of(lstm).items()}, (numbers(5, 2, 3),))


def pruned(kind: Kind) -> Any:
    lstm, x = made(kind, 3, 4, 2), numbers(5, 2, 3)
    for name in ("weight_ih_l0", "weight_hh_l1"):
        prune.l1_unstructured(lstm, name, 0.5)
    y, carry = lstm(x)
    y.sum().backward()
    gradients = [lstm.weight_ih_l0_orig.grad, lstm.weight_hh_l1_orig.grad]
    prune.remove(lstm, "weight_ih_l0")
    return [y, carry, gradients, lstm(x)]


def parametrized(kind: Kind) -> Any:
    lstm, x = made(kind, 3, 4, 2), numbers(5, 2, 3)
    weight_norm(lstm, "weight_ih_l0")
    y, carry = lstm(x)
    y.sum().backward()
    gradients = [each.grad for each in lstm.parameters()]
    parametrize.remove_parametrizations(lstm, "weight_ih_l0")
    return [y, carry, gradients, lstm(x)]


def weights_put_in_by_hand(kind: Kind) -> Any:
    lstm = made(kind, 3, 4)
    raw = nn.Parameter(lstm.weight_ih_l0.detach())
    del lstm._parameters["weight_ih_l0"]
    lstm.weight_ih_l0 = raw * 2.0
    y, _ = lstm(numbers(5, 2, 3))
    y.sum().backward()
    return [y, raw.grad]


def an_empty_batch(kind: Kind) -> Any:
    found = []
    for options in ({"num_layers": 2}, {"bidirectional": True, "proj_size": 2, "batch_first": True}):
        lstm = made(kind, 3, 4, **options)
        y, (h, c) = lstm(numbers(5, 0, 3) if "num_layers" in options else numbers(0, 5, 3))
        (y.sum() + h.sum() + c.sum()).backward()
        found.append([y, h, c, [each.grad for each in lstm.parameters()]])
    return found


def copies(kind: Kind) -> Any:
    lstm, file = made(kind, 3, 4, 2), io.BytesIO()
    torch.save(lstm, file)
    file.seek(0)
    others = [copy.deepcopy(lstm), pickle.loads(pickle.dumps(lstm)), torch.load(file, weights_only=False)]
    return [each(numbers(5, 2, 3)) for each in others]


def names(kind: Kind) -> Any:
    lstm, x, carry = made(kind, 3, 4, 2, bidirectional=True, proj_size=2), numbers(5, 2, 3), (numbers(4, 2, 2), numbers(4, 2, 4))
    attributes = [
        getattr(lstm, name) for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "proj_size")
    ]
    lstm.flatten_parameters()
    return [lstm(input=x), lstm(x, hx=carry), lstm(input=x, hx=carry), lstm.all_weights, attributes, list(lstm.state_dict())]


def precisions(kind: Kind) -> Any:
    # As bits of their own precision they may differ in the last: so of each only what it is made of, and its dtype.
    found = [made(kind, 3, 4).to(dtype)(numbers(5, 2, 3).to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    return [[(part.shape, part.dtype) for part in (y, *carry)] for y, carry in found]


def float64_under_autocast(kind: Kind) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return made(kind, 3, 4)(numbers(5, 2, 3))


def without_storage(kind: Kind) -> Any:
    y, (h, c) = made(kind, 3, 4, 2, device="meta")(numbers(5, 2, 3).to("meta"))
    return [y.shape, y.dtype, h.shape, c.shape]


def traced(kind: Kind) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(made(kind, 3, 4, 2), numbers(5, 2, 3)), file)
    file.seek(0)
    return torch.jit.load(file)(numbers(5, 2, 3, seed=7))


def recomputed(kind: Kind) -> Any:
    lstm, x = made(kind, 3, 4, 2), numbers(5, 2, 3).requires_grad_()
    checkpoint(lstm, x, use_reentrant=False)[0].square().sum().backward()
    return [x.grad, [each.grad for each in lstm.parameters()]]


def outputs_changed_in_place(kind: Kind) -> Any:
    found = []
    for options in ({}, {"num_layers": 2}, {"batch_first": True}, {"bidirectional": True}):
        lstm, x = made(kind, 3, 4, **options), numbers(5, 2, 3).requires_grad_()
        y, (h, c) = lstm(x)
        h.mul_(2.0)
        c.tanh_()
        y[0].zero_()
        (y.relu_().square().sum() + h.sum() + c.sum()).backward()
        found.append([x.grad, [each.grad for each in lstm.parameters()]])
    return found


DONE = [
    gradient_penalty, of_functional, of_func, in_forward_mode, called_with_other_weights, pruned, parametrized, weights_put_in_by_hand,
    an_empty_batch, copies, names, precisions, float64_under_autocast, without_storage, traced, recomputed,
    outputs_changed_in_place,
]  # fmt: skip


# What is not about an LSTM's two parts or its projection, and so is the same with layers of another cell.
WITH_ANY_CELL = [
    of_functional, of_func, in_forward_mode, called_with_other_weights, pruned, parametrized, weights_put_in_by_hand, copies,
    float64_under_autocast, traced, recomputed,
]  # fmt: skip


@pytest.mark.filterwarnings(JIT, "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("name", "doing"),
    [*(("LSTM", each) for each in DONE), *((name, each) for name in ("GRU", "RNN") for each in WITH_ANY_CELL)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_it_does_as_torch_does(name: str, doing: Callable[[Kind], Any]) -> None:
    mine, theirs = flat(doing(getattr(cw, name))), flat(doing(getattr(nn, name)))
    assert len(mine) == len(theirs)
    for own, expected in zip(mine, theirs, strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(own, expected, **TOLERANCE)
        else:
            assert own == expected


def flat(value: Any) -> list[Any]:
    """Whatever was found, in a row, without graphs."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in flat(each)]
    return [value.detach() if isinstance(value, Tensor) else value]


def refused(doing: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        doing()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_export_takes_lengths_that_are_known_later() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = cw.LSTM(3, 4, dtype=DOUBLE)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.lstm(x, lengths=lengths)[0]

    outer, x = Outer(), numbers(5, 2, 3)
    exported = torch.export.export(outer, (x, torch.tensor([5, 3]))).module()
    for lengths in (torch.tensor([5, 3]), torch.tensor([2, 4])):
        torch.testing.assert_close(exported(x, lengths), outer(x, lengths))


def test_what_it_does_not_take_is_said_with_the_remedy() -> None:
    lstm, x = cw.LSTM(3, 4, dtype=DOUBLE), numbers(5, 2, 3)
    assert "dtype torch.bool; pass a whole number for each of the 2 lanes" in refused(lambda: lstm(x, lengths=torch.tensor([True, True])))
    packed: Any = pack_padded_sequence(x, [5, 3])
    assert refused(lambda: lstm(packed, lengths=[5, 3])) == "LSTM got a PackedSequence, which has its own lengths; remove lengths"
    tokens = pack_padded_sequence(torch.zeros(5, 2, 3, dtype=torch.int64), [5, 3])
    assert refused(lambda: lstm(input=tokens)).endswith("pass tokens through an embedding first")
    assert refused(lambda: lstm(x, input=x)) == "LSTM got both x and input, two names of one argument; pass one of them"
    assert refused(lambda: lstm(x, (x, x), hx=(x, x))) == "LSTM got both carry and hx, two names of one argument; pass one of them"
    assert refused(lambda: lstm(x.numpy())) == "LSTM got x as a ndarray; pass a tensor [time, lane, 3]"
    assert refused(lstm) == "LSTM got x as a NoneType; pass a tensor [time, lane, 3]"
    assert refused(lambda: lstm(x[:0])) == "LSTM got x of shape [0, 2, 3]; x must have at least one step"
    assert "pass [lane, time, 3]" in refused(lambda: cw.LSTM(3, 4, batch_first=True)(torch.zeros(2, 5, 7)))
    assert "x.to_padded_tensor" in refused(lambda: lstm(torch.nested.nested_tensor([x[:, 0], x[:2, 0]], layout=torch.jagged)))
    wrong: Any = 4.0
    assert refused(lambda: cw.LSTM(3, wrong)) == "hidden_size=4.0 must be a whole number"
