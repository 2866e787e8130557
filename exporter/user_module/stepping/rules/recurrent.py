"""Recurrent layers: their state is the cache.

The cells are written out, one after the other for the positions of a call: PyTorch's own layers would be exported for
one length in any case. Formulas and the order of gates: `torch.nn.LSTM`, `GRU`, `RNN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..along import CannotStep
from ..plan import At, Call, Execute

State = tuple[Tensor, ...]


def _lstm(layer: Any, given: Tensor, state: State, hidden: Tensor) -> State:
    entry, forget, cell, out = (given + hidden).chunk(4, dim=-1)
    carried = forget.sigmoid() * state[1] + entry.sigmoid() * cell.tanh()
    return out.sigmoid() * carried.tanh(), carried


def _gru(layer: Any, given: Tensor, state: State, hidden: Tensor) -> State:
    (r, z, n), (own_r, own_z, own_n) = given.chunk(3, dim=-1), hidden.chunk(3, dim=-1)
    update = (z + own_z).sigmoid()
    new = (n + (r + own_r).sigmoid() * own_n).tanh()
    return ((1 - update) * new + update * state[0],)


def _rnn(layer: Any, given: Tensor, state: State, hidden: Tensor) -> State:
    summed = given + hidden
    return (summed.tanh() if layer.nonlinearity == "tanh" else summed.relu(),)


_CELLS: dict[type, tuple[Callable[[Any, Tensor, State, Tensor], State], int]] = {
    nn.LSTM: (_lstm, 2),
    nn.GRU: (_gru, 1),
    nn.RNN: (_rnn, 1),
}


def recurrent(at: At) -> tuple[Any, Execute]:
    """Compute a recurrent layer of one direction."""
    x = at.given["x"]
    along = at.along(x)
    path, layer = at.plan.layers[at.given["layer"]]
    module: Any = layer
    if module.bidirectional:
        raise CannotStep(f"the {type(module).__name__} is bidirectional: it also reads the sequence from its end")
    if getattr(module, "proj_size", 0):
        raise CannotStep("an LSTM with proj_size has no rule")
    if along is None or along.axis != _time_axis(module, at.rank(x)):
        raise CannotStep("its sequence is not the one of the input")
    if along.pre:
        raise CannotStep("it reads what comes before the first position")
    cell, states = _CELLS[type(module)]
    batch = [size.rest for axis, size in enumerate(at.sizes(x)) if axis not in (along.axis, at.rank(x) - 1)]
    shape = [*batch, module.hidden_size]
    given = at.given["states"]
    known = all(at.plan.is_fixed(x) for x in given)
    begins = not known or any(bool(at.plan.fixed(x, at.plan.length).count_nonzero()) for x in given)
    begin = [at.operand(state, 0) for state in given] if begins else []
    caches = [[at.cache(shape, torch.float32) for _ in range(states)] for _ in range(module.num_layers)]
    name = f"layer_{at.given['layer']}"
    at.plan.modules[name] = (path, module)

    def execute(call: Call) -> Tensor:
        rows: Sequence[Tensor] = call.values[x].unbind(along.axis)
        first = [begun(call) for begun in begin]
        for number in range(module.num_layers):
            state = tuple(call.caches[cache.name] for cache in caches[number])
            if first:
                starts = call.position == 0
                state = tuple(
                    torch.where(starts, begun[number].expand(own.shape), own)
                    for begun, own in zip(first, state, strict=True)
                )
            rows, state = _run(module, number, cell, rows, state)
            for cache, kept in zip(caches[number], state, strict=True):
                call.kept[cache.name] = kept
        return torch.stack(list(rows), dim=along.axis)

    return at.result(), execute


def _time_axis(module: Any, rank: int) -> int:
    return 0 if rank == 2 or not module.batch_first else 1


def _run(
    module: Any,
    number: int,
    cell: Callable[[Any, Tensor, State, Tensor], State],
    rows: Sequence[Tensor],
    state: State,
) -> tuple[list[Tensor], State]:
    """Compute one layer on the rows of a call."""
    own, recur = (getattr(module, f"weight_{kind}_l{number}") for kind in ("ih", "hh"))
    bias: Any = None
    recur_bias: Any = None
    if module.bias:
        bias, recur_bias = (getattr(module, f"bias_{kind}_l{number}") for kind in ("ih", "hh"))
    found = []
    for row in rows:
        state = cell(module, F.linear(row, own, bias), state, F.linear(state[0], recur, recur_bias))
        found.append(state[0])
    return found, state


def last_state(at: At) -> tuple[Any, Execute]:
    """Refuse the state after the last position."""
    raise CannotStep("it reads the state after the last position of the sequence")
