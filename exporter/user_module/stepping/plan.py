"""Plan how a captured graph is computed a few positions at a time: one rule for each operator (`rules/`).

Values that no input reaches are constants. Those with a row for each position, such as position embeddings, become
tables, of which a call reads the rows of its positions; they bound how many positions the file has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .along import Along, CannotStep, size_of, sizes_of, tensors_of, time_axes

# What a node computes in a call: a tensor, or a tuple of them.
Execute = Callable[["Call"], Any]
Rule = Callable[["At"], tuple[Any, Execute]]


@dataclass(frozen=True)
class Cache:
    """A tensor that a call leaves for the next one.

    Args:
        name: its name.
        shape: its shape.
        dtype: its element type.
        fill: each number of it before the first call.
        begin: the constant that takes the place of entries before position 0, where that is no one number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float
    begin: str | None = None


@dataclass
class Call:
    """One call of the step module while it runs.

    Args:
        values: of the nodes computed so far.
        position: of the call's first token, int64 `[1]`.
        chunk: tokens of the call `C`.
        caches: by name, as the call before left them.
        module: has the constants, tables and layers.
        before: it stands for the entries before position 0, which wait in no cache.
        kept: caches for the next call.
        shared: values that several nodes compute alike, by a key.
    """

    values: dict[fx.Node, Any]
    position: Tensor
    chunk: int
    caches: Mapping[str, Tensor]
    module: Any
    before: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)

    def keep_last(self, cache: Cache, axis: int, new: Tensor) -> Tensor:
        """Append a call's entries to those in a cache, keep as many of the last ones, and return all."""
        count, earlier = cache.shape[axis], self.caches[cache.name]
        if cache.begin is not None:
            place = torch.arange(-count, 0).reshape([-1 if n == axis else 1 for n in range(new.dim())])
            begin = getattr(self.module, cache.begin)
            earlier = torch.where(self.position + place < 0, begin, earlier)
        whole = torch.cat((earlier, new), dim=axis)
        self.kept[cache.name] = whole.narrow(axis, self.chunk, count)
        return whole


@dataclass(frozen=True)
class Step:
    """One node of the plan, and how it is computed."""

    node: fx.Node
    execute: Execute


class Plan:
    """The steps of a captured graph.

    Args:
        graph_module: the captured module.
        layers: of `capture_layers`.
        length: of the longest sequence: rows that tables have.
        chunk: tokens per call; plans of all chunks have the same caches.
        rules: by the name of an operator.

    Raises:
        CannotStep: an operator has no rule, or its rule refuses; `where` names it.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        layers: Mapping[int, tuple[str, nn.Module]],
        length: int,
        chunk: int,
        rules: Mapping[str, Rule],
    ) -> None:
        self.graph_module, self.layers, self.length, self.chunk = graph_module, layers, length, chunk
        self.along: dict[fx.Node, Any] = {}
        self.steps: list[Step] = []
        self.caches: list[Cache] = []
        self.buffers: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.modules: dict[str, tuple[str, nn.Module]] = {}
        self.has_tables = False
        self._fixed_at: dict[int, dict[fx.Node, Any]] = {}
        self._buffer_of: dict[fx.Node, str] = {}
        self.inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        (returned,) = next(node for node in graph_module.graph.nodes if node.op == "output").args
        self.outputs = [node for node in returned if isinstance(node, fx.Node)]
        for node in self._needed:
            try:
                self._add(node, rules)
            except CannotStep as reason:
                raise CannotStep(f"{where(node)}: {reason}") from None
        self._check_outputs()

    @cached_property
    def _needed(self) -> list[fx.Node]:
        """The nodes that the outputs need, in order."""
        seen: set[fx.Node] = set()
        rest = list(self.outputs)
        while rest:
            node = rest.pop()
            if node not in seen:
                seen.add(node)
                rest += node.all_input_nodes
        return [node for node in self.graph_module.graph.nodes if node in seen]

    def _add(self, node: fx.Node, rules: Mapping[str, Rule]) -> None:
        if node.op == "placeholder":
            axes = time_axes(tensors_of(node)[0])
            if len(axes) != 1:
                raise CannotStep("the input has no axis named seq, and a call has no place for it")
            self.along[node] = Along(axes[0])
        elif self.is_fixed(node) or not tensors_of(node):
            return  # evaluated where a step uses it
        else:
            name = name_of(node)
            rule = rules.get(name)
            if rule is None:
                raise CannotStep(f"there is no rule how to compute {name} position by position")
            along, execute = rule(At(self, node))
            if isinstance(along, Along) and along.pre and along.alone:
                along = replace(along, before=self._before(node, execute))
            self.along[node] = along
            self.steps.append(Step(node, execute))

    def _before(self, node: fx.Node, execute: Execute) -> Tensor | None:
        """Return what an operator computes of what its arguments are before position 0; None where that varies."""
        values: dict[fx.Node, Any] = {}
        for x in node.all_input_nodes:
            along = self.along.get(x)
            if along is not None:
                values[x] = along.before if isinstance(along, Along) else None
                if values[x] is None:
                    return None
            elif tensors_of(x) and time_axes(tensors_of(x)[0]) and len(self.buffers[self.buffer(x)]) > 1:
                return None
        constants = SimpleNamespace(**self.buffers, **self.weights)
        constants.get_buffer = lambda name: getattr(constants, name)
        with torch.no_grad():
            found = execute(Call(values, torch.zeros(1, dtype=torch.int64), 1, {}, constants, before=True))
        return found if isinstance(found, Tensor) else None

    def _check_outputs(self) -> None:
        for node in self.outputs:
            along = self.along.get(node)
            if not isinstance(along, Along):
                raise CannotStep(f"{where(node)}: the output has no row for each position")
            (size,) = (sizes_of(tensors_of(node)[0])[along.axis],)
            if along.pre or size.rest or size.factor != 1:
                raise CannotStep(f"{where(node)}: the output is not as long as the input")

    def is_fixed(self, node: fx.Node) -> bool:
        """Return whether no input reaches a node; sizes of inputs may."""
        if node.op == "get_attr" or not tensors_of(node):
            return node.op != "placeholder"
        if name_of(node) in _CASTS:
            return node.all_input_nodes[0] not in self.along
        return all(x not in self.along for x in node.all_input_nodes) or name_of(node) in _FILLED

    def fixed(self, node: fx.Node, length: int) -> Any:
        """Return the value of a node that no input reaches, for sequences of this length.

        Raises:
            CannotStep: it cannot be computed for so long a sequence.
        """
        known = self._fixed_at.setdefault(length, {})
        if node in known:
            return known[node]
        value: Any = node.meta.get("val")
        if node.op == "get_attr":
            found: Any = _attribute(self.graph_module, str(node.target))
        elif not tensors_of(node) and not isinstance(value, tuple | list):
            found = size_of(value).at(length) if isinstance(value, torch.SymInt | int) else value
        elif name_of(node) in _FILLED and any(x in self.along for x in node.all_input_nodes):
            (tensor,) = tensors_of(node)
            sizes = [size.at(length) for size in sizes_of(tensor)]
            found = torch.full(sizes, _FILLED[name_of(node)](node), dtype=tensor.dtype)
        elif name_of(node) in _CASTS:
            found = self.fixed(node.all_input_nodes[0], length).to(tensors_of(node)[0].dtype)
        else:

            def given(x: fx.Node) -> Any:
                return self.fixed(x, length)

            args: Any = fx.map_arg(node.args, given)
            kwargs: Any = fx.map_arg(node.kwargs, given)
            try:
                with torch.no_grad():
                    found = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, IndexError, ValueError) as error:
                line = (str(error).splitlines() or [""])[0][:200]
                raise CannotStep(f"it does not take a sequence of {length} ({line})") from None
        known[node] = found
        return found

    def weight(self, target: str) -> str:
        """Return the name that the step module gives a tensor of the captured module, which it holds unchanged."""
        name = f"weight_{target.replace('.', '_')}"
        self.weights[name] = _attribute(self.graph_module, target)
        return name

    def buffer(self, node: fx.Node) -> str:
        """Return the name of the constant or table with the value of a node that no input reaches.

        A table has its rows on its first axis; one whose rows are all equal has one row.

        Raises:
            CannotStep: it depends on the length of the sequence otherwise than by its rows.
        """
        if node not in self._buffer_of:
            self._buffer_of[node] = name = f"fixed_{len(self._buffer_of)}"
            self.buffers[name] = self._table(node)
        return self._buffer_of[node]

    def _table(self, node: fx.Node) -> Tensor:
        axes = time_axes(tensors_of(node)[0])
        if len(axes) > 1:
            raise CannotStep("it has a number for each pair of positions, which a step file does not keep")
        long: Tensor = self.fixed(node, self.length)
        short: Tensor = self.fixed(node, max(2, self.length // 2))
        if not axes:
            if not torch.equal(long, short):
                raise CannotStep("it depends on the length of the sequence")
            return long.clone()
        rows, fewer = long.movedim(axes[0], 0), short.movedim(axes[0], 0)
        if not torch.equal(rows[: len(fewer)], fewer):
            raise CannotStep("what belongs to a position depends on the length of the sequence")
        if torch.equal(rows, rows[:1].expand_as(rows)):
            return rows[:1].clone()
        self.has_tables = True
        return rows.contiguous()


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


_PACKAGE = Path(__file__).parents[3]
# Operators that change the element type of their first value; another value says to which.
_CASTS = ("to", "type_as", "_to_copy")
# Operators that take nothing but sizes of their first input → the number that they fill with.
_FILLED: dict[str, Callable[[fx.Node], Any]] = {
    "zeros_like": lambda node: 0,
    "ones_like": lambda node: 1,
    "full_like": lambda node: node.args[1],
    "new_zeros": lambda node: 0,
    "new_ones": lambda node: 1,
    "new_full": lambda node: node.args[2],
}


class At:
    """One node as its rule sees it.

    Args:
        plan: the plan so far.
        node: the node.
    """

    def __init__(self, plan: Plan, node: fx.Node) -> None:
        self.plan, self.node = plan, node

    @cached_property
    def given(self) -> dict[str, Any]:
        """The node's arguments by name, with defaults."""
        schema: Any = self.node.target._schema  # type: ignore[union-attr]
        found = {}
        for place, argument in enumerate(schema.arguments):
            if place < len(self.node.args) and not argument.kwarg_only:
                found[argument.name] = self.node.args[place]
            elif argument.name in self.node.kwargs:
                found[argument.name] = self.node.kwargs[argument.name]
            else:
                found[argument.name] = argument.default_value if argument.has_default_value() else None
        return found

    def along(self, x: object) -> Along | None:
        """Return the time axis of an argument; None where it has none.

        Raises:
            CannotStep: it is a size of the sequence.
        """
        if isinstance(x, fx.Node) and x not in self.plan.along and not tensors_of(x):
            raise CannotStep("it computes with the length of the sequence")
        found = self.plan.along.get(x) if isinstance(x, fx.Node) else None
        return found if isinstance(found, Along) else None

    def moving(self) -> Iterator[tuple[fx.Node, Along]]:
        """Yield the arguments that have a time axis."""
        for x in self.node.all_input_nodes:
            if tensors_of(x) and (found := self.along(x)) is not None:
                yield x, found

    def value(self) -> tuple[fx.Node, Along]:
        """Return the value that an operator of one value is called on.

        Raises:
            CannotStep: it is a constant, and an input says what to do with it.
        """
        x = next(self.given[name] for name in ("self", "input", "x") if name in self.given)
        along = self.along(x)
        if along is None:
            raise CannotStep("it arranges a constant as an input is arranged")
        return x, along

    def sizes(self, x: fx.Node) -> list[Any]:
        """Return the sizes of a value's axes."""
        return sizes_of(tensors_of(x)[0])

    def rank(self, x: fx.Node) -> int:
        """Return how many axes a value has."""
        return tensors_of(x)[0].dim()

    def result(self, pre: int = 0, before: Tensor | None = None, *, alone: bool = True) -> Any:
        """Return the time axis of what the node computes, by the sizes that the exporter states.

        Raises:
            CannotStep: it has none, or several.
        """
        found = []
        for tensor in tensors_of(self.node):
            axes = time_axes(tensor)
            if len(axes) != 1 or sizes_of(tensor)[axes[0]].factor != 1:
                raise CannotStep("it mixes positions")
            found.append(Along(axes[0], pre, before, alone))
        return found if isinstance(self.node.meta.get("val"), tuple | list) else found[0]

    def cache(self, shape: Sequence[int], dtype: torch.dtype, fill: float = 0.0, begin: str | None = None) -> Cache:
        """Make a cache."""
        made = Cache(f"state.{len(self.plan.caches)}", tuple(shape), dtype, fill, begin)
        self.plan.caches.append(made)
        return made

    def history(self, x: fx.Node, count: int, *, padded: bool = False) -> Cache:
        """Make a cache of the last `count` entries of a value.

        Args:
            x: the value.
            count: how many.
            padded: zeros come before what the value has before position 0.

        Raises:
            CannotStep: what comes before position 0 varies.
        """
        along = self.along(x)
        assert along is not None
        shape = [count if axis == along.axis else size.of_call(1) for axis, size in enumerate(self.sizes(x))]
        dtype = tensors_of(x)[0].dtype
        if not along.pre:
            return self.cache(shape, dtype)
        before = along.before
        if before is None or (padded and along.pre < count and bool(before.count_nonzero())):
            raise CannotStep("what it reads before the first position differs from entry to entry")
        first = before.flatten()[0]
        if bool((before == first).all()):
            return self.cache(shape, dtype, float(first))
        name = f"begin_{len(self.plan.caches)}"
        self.plan.buffers[name] = before
        return self.cache(shape, dtype, 0.0, name)

    def operand(self, x: object, pre: int, axis: int | None = None) -> Callable[[Call], Any]:
        """Return how a call gets an argument that is combined with values of `pre` entries before position 0.

        Args:
            x: the argument.
            pre: of the result.
            axis: the time axis of the argument where it is a table; None where no table fits.

        Raises:
            CannotStep: it is a size of the sequence, or a table where none fits.
        """
        if not isinstance(x, fx.Node):
            return lambda call: x
        along = self.along(x)
        if along is not None:
            return self._delayed(x, along, along.pre - pre)
        if x.op == "get_attr" and not time_axes(tensors_of(x)[0]):
            name = self.plan.weight(str(x.target))
            return lambda call: getattr(call.module, name)
        axes = time_axes(tensors_of(x)[0])
        if axes and axes[0] != axis:
            raise CannotStep("it combines the positions of two values otherwise than one by one")
        return self._rows(self.plan.buffer(x), axes[0] if axes else None, pre)

    def _rows(self, name: str, axis: int | None, pre: int) -> Callable[[Call], Any]:
        if axis is None:
            return lambda call: call.module.get_buffer(name)
        if len(self.plan.buffers[name]) == 1:
            return lambda call: call.module.get_buffer(name).movedim(0, axis)

        def rows(call: Call) -> Tensor:
            from ...models.parts.step_rotary import rows_of

            key = ("rows", pre)
            if key not in call.shared:
                first = call.position + pre if pre else call.position
                call.shared[key] = first if call.chunk == 1 else first + torch.arange(call.chunk)
            found: Tensor = rows_of(call.module.get_buffer(name), call.shared[key]).movedim(0, axis)
            return found

        return rows

    def _delayed(self, x: fx.Node, along: Along, by: int) -> Callable[[Call], Any]:
        if not by:
            return lambda call: call.values[x]
        cache = self.history(x, by)

        def delayed(call: Call) -> Tensor:
            new: Tensor = call.values[x]
            return new if call.before else call.keep_last(cache, along.axis, new).narrow(along.axis, 0, call.chunk)

        return delayed

    def run(self, operands: Mapping[str, Callable[[Call], Any]], **replaced: Any) -> Execute:
        """Return how to call the node's operator with some arguments from a call, and the others as they are."""
        rest = {name: value for name, value in {**self.given, **replaced}.items() if name not in operands}
        target: Any = self.node.target
        only = {argument.name for argument in target._schema.arguments if argument.kwarg_only}

        def execute(call: Call) -> Any:
            values = {**rest, **{name: operand(call) for name, operand in operands.items()}}
            ordered = [values[name] for name in self.given if name not in only]
            return target(*ordered, **{name: values[name] for name in self.given if name in only})

        return execute


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator, as `layer_norm`."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return str(getattr(target, "__name__", target)) if schema is None else str(schema.name).rpartition("::")[2]


def where(node: fx.Node) -> str:
    """Name the place of a node for an error: its module, its line in the user's code, and its operator."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path and not path.startswith("_")]
    path = paths[-1].removeprefix("model").lstrip(".") if paths else ""
    line = ""
    frames = str(node.meta.get("stack_trace") or "").split('File "')[1:]
    for frame in frames:
        head, _, code = frame.partition("\n")
        file, _, rest = head.partition('", line ')
        path_of = Path(file)
        if "site-packages" not in path_of.parts and _PACKAGE not in path_of.parents and path_of.is_absolute():
            shown = f"`{code.strip().splitlines()[0][:80]}`, " if code.strip() else ""
            line = f"{shown}{Path(file).name}:{rest.partition(',')[0]}"
    operator = name_of(node).removeprefix("captured_") if node.op == "call_function" else f"the input {node.name}"
    return f"{path or 'the module itself'}, {operator}{f' ({line})' if line else ''}"
