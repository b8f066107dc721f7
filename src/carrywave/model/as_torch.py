"""Where layers do what torch's modules do, as these do it: one call of torch's function for a whole stack, the dtypes of autocast, and the
node in a graph of torch.fx.

On the CPU, with few units or steps, most of the time of a call is Python and the start of each operation; so where a call asks for nothing
that only our kernels do, and torch's are faster, it goes to torch's function in as few steps as in torch's own modules.

Shapes: T time, B lane, I input, H hidden, P output width (the projection, or H), L layers, D directions, O = P·D.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.fx import Proxy

from carrywave.kernels import torch_kernels
from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.weights import LayerWeights
from carrywave.model.arguments import GivenCarry
from carrywave.model.layer_stack import LayerStack


def whole_stack(layers: LayerStack, x_TBI: Tensor, carry: GivenCarry | None, *, batched: bool) -> tuple[Tensor, Any] | None:
    """Outputs, and the carry in torch's form, by one call of torch's function; None where our kernels are faster or only they do what is
    asked, and for a carry that does not fit, which `split_carry` refuses.
    """
    backends = layers.backends
    if backends.torch_function is None or beyond_torch(layers) or not torch_kernels.runs_stacks(x_TBI):
        return None
    if backends.check(layers.kernel) != "auto":
        return None
    parts = None if carry is None and layers.learned_carry else _stacked(layers, carry, x_TBI, batched=batched)
    weights = [getattr(layers, each) for each in layers.weight_names]
    last = weights[-len(weights) // (layers.num_layers * layers.directions) :]
    library = backends.library(x_TBI, LayerWeights(last[0], last[1], w_hr=last[-1] if layers.proj_size else None))
    if parts is None or library is None:
        return None
    form = {"biased": layers.bias, "both": layers.bidirectional, "onednn": library == "oneDNN"}
    y_TBO, *ends = torch_kernels.stack(backends.torch_function, x_TBI, parts, weights, layers.num_layers, **form)
    ends = ends if batched else [end[:, 0] for end in ends]
    return y_TBO, layers.cell.carry(*ends) if len(ends) > 1 else ends[0]


def beyond_torch(layers: LayerStack) -> bool:
    """True if layers do what torch's modules do not, or do otherwise, as keyed dropout."""
    dropped = layers.training and (layers.weight_drop or (layers.dropout and layers.num_layers > 1))
    more = layers.noisy or layers.layer_norm or layers.cell_norm or layers.num_heads > 1
    return bool(dropped or more or isinstance(layers.hidden_size, tuple))


def _stacked(layers: LayerStack, carry: GivenCarry | None, x_TBI: Tensor, *, batched: bool) -> list[Tensor] | None:
    """A carry as [L·D, B, P] and so on, in the dtype of x; of zeros if none is given; None if it has another form, or does not fit."""
    rows, lanes = layers.num_layers * layers.directions, x_TBI.shape[1]
    widths = layers.cell.widths(layers.widths[0], layers.proj_size)
    if carry is None:
        return [x_TBI.new_zeros(rows, lanes, width) for width in widths]
    parts: list[Any] = [carry] if isinstance(carry, Tensor) else list(carry)
    if not all(isinstance(part, Tensor) and part.dtype == x_TBI.dtype for part in parts):
        return None
    if [part.shape for part in parts] != [(rows, lanes, width) if batched else (rows, width) for width in widths]:
        return None
    return parts if batched else [part[:, None] for part in parts]


def as_cast(layers: LayerStack, y_TBO: Tensor, ends: AnyCarries, before: AnyCarries) -> tuple[Tensor, AnyCarries]:
    """Outputs and carries in the dtypes that torch's modules give them under autocast: all in the shorter one; but nn.GRU on the CPU, which
    autocast does not know there, in that of the carry before.
    """
    if layers.backends.torch_function is None:
        return y_TBO, ends
    whole = layers.backends.torch_function == "gru" and y_TBO.device.type == "cpu"
    dtype = before[0][0].dtype if whole else y_TBO.dtype
    return y_TBO.to(dtype), tuple(changed(end, lambda part: part.to(dtype)) for end in ends)


def recorded(layers: LayerStack, x: Proxy, carry: Any, **named: Any) -> tuple[Tensor, Any]:
    """The call of layers as one node of the graph that torch.fx records, as a call of torch's own modules is."""
    tracer: Any = x.tracer
    node: Any = tracer.create_proxy("call_module", tracer.path_of_module(layers), (x, carry), named)
    return cast(tuple[Tensor, Any], node)
