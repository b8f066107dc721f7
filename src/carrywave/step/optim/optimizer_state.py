"""The state of a user-supplied optimizer: its `state_dict`, with parameters identified by name instead of by index.

This keeps everything the optimizer reports about itself, and any plan can load it: each worker picks out the parameters it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.errors import RunError
from carrywave.parallel.nested import plain

Saved = dict[str, Any]  # per-parameter state by name, other state, groups with parameter names, and anything else the class adds


def saved(optimizer: Optimizer, held: Mapping[str, nn.Parameter]) -> Saved:
    """Return the complete state, copied to the host."""
    kind = type(optimizer).__name__
    given = optimizer.state_dict()
    names = _names(optimizer, given, held)
    entries = plain(given["state"], f"the {kind} state entry")
    state = {names[key]: value for key, value in entries.items() if key in names}
    other = {key: value for key, value in entries.items() if key not in names}
    groups = [
        {**plain({key: value for key, value in group.items() if key != "params"}, f"the {kind} group setting")}
        | {"params": [names[number] for number in group["params"]]}
        for group in given["param_groups"]
    ]
    rest = {key: plain(value, f"the {kind} state_dict entry {key}") for key, value in given.items() if key not in _KNOWN}
    return {"state": state, "other": other, "groups": groups, "rest": rest}


def joined(parts: Sequence[Saved], order: Sequence[str]) -> Saved:
    """Merge the parts held by the workers into the state of the whole model; anything not tied to one parameter is taken from rank 0."""
    first = parts[0]
    state = dict(first["state"])
    for part in parts[1:]:
        state |= {name: value for name, value in part["state"].items() if name not in state}
    places = {name: index for index, name in enumerate(order)}
    groups = [
        group | {"params": sorted({name for part in parts for name in part["groups"][number]["params"]}, key=places.__getitem__)}
        for number, group in enumerate(first["groups"])
    ]
    return first | {"state": state, "groups": groups}


def load(optimizer: Optimizer, held: Mapping[str, nn.Parameter], given: Saved) -> None:
    """Load what `saved` returned, under this plan or another. Nothing is changed if the state is refused."""
    current = optimizer.state_dict()
    names = _names(optimizer, current, held)
    if len(given["groups"]) != len(current["param_groups"]):
        many = f"the state has {len(given['groups'])}, this optimizer has {len(current['param_groups'])}"
        raise RunError(f"the number of parameter groups does not match: {many}; create the optimizer with the same groups")
    groups = []
    for number, (saved_group, group) in enumerate(zip(given["groups"], current["param_groups"], strict=True)):
        mine = {names[each] for each in group["params"]}
        if odd := sorted(mine ^ (set(saved_group["params"]) & held.keys())):
            which = "in this optimizer but not in the state" if odd[0] in mine else "in the state but not in this optimizer"
            raise RunError(f"group {number} of the optimizer does not match the state: {odd[0]} is {which}; use the same groups")
        groups.append({**saved_group, "params": group["params"]})
    state = {number: given["state"][name] for number, name in names.items() if name in given["state"]} | given["other"]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups, **given["rest"]})
    except Exception as error:
        what = f"the optimizer {type(optimizer).__name__} rejected the state ({type(error).__name__}: {error})"
        raise RunError(f"{what}; pass the state of an optimizer of this class") from error
    # torch casts loaded state to the parameter's dtype; put back the original dtype so that no precision is lost.
    for name, kept in given["state"].items():
        now = optimizer.state.get(held[name], {}) if name in held else {}
        for key, value in kept.items() if isinstance(kept, Mapping) else ():
            loaded = now.get(key)
            if isinstance(loaded, Tensor) and isinstance(value, Tensor) and loaded.shape == value.shape and loaded.dtype != value.dtype:
                now[key] = value.to(loaded.device)


def _names(optimizer: Optimizer, given: Mapping[str, Any], held: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Map each parameter index of a `state_dict` to the parameter's name."""
    names_by_id = {id(parameter): name for name, parameter in held.items()}
    if not given.keys() >= _KNOWN:
        raise RunError(f"the state_dict of the optimizer {type(optimizer).__name__} lacks {' or '.join(sorted(_KNOWN))}; save it yourself")
    return {
        number: names_by_id[id(parameter)]
        for packed, group in zip(given["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(packed["params"], group["params"], strict=True)
    }


_KNOWN = {"state", "param_groups"}
