"""Judge an ONNX model before any engine sees it: functions, loops, names, depth, and the sizes that tensors claim.

It uses Python's standard library alone, because a bundle takes it along to devices without onnx. It reads attributes
that `onnx.ModelProto` and `wire_model.Message` have in common, so that both are judged by the same code. Functions are
told apart by domain, name and overload, and the domains "" and "ai.onnx" are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

# The largest exported models have about ten thousand nodes.
MOST_NODES = 1 << 20
# Nodes, weights, attributes and other parts of a file together.
MOST_PARTS = 1 << 20
# Bytes that nodes of functions may take after inlining, beyond those of the file.
MOST_ADDED_BYTES = 1 << 28
# onnxruntime needs half a microsecond even for a trivial node: half an hour in all.
MOST_RUNS = 1 << 32
# Graphs inside graphs, functions inlined. Protobuf itself reads no more than 32 in one file.
DEEPEST_GRAPHS = 32
# Depth of functions that call functions, for which engines and tools recurse. onnxruntime 1.32 supports 100.
DEEPEST_CALLS = 101  # the call from the graph included
# Constants that calls of functions give, each of which the loops in the function are counted for.
MOST_CALLS = 1 << 15
# Versions of the operators of domains that engines know: OpenVINO tries each lower one in turn.
MOST_VERSION = 1 << 10
_KNOWN_DOMAINS = ("ai.onnx", "com.microsoft", "org.openvinotoolkit", "org.pytorch")
# Dimensions of a tensor.
MOST_SIZES = 64
# Bytes of all sparse tensors of a file, in dense form.
MOST_DENSE_BYTES = 1 << 31

LOOP, SCAN = "Loop", "Scan"
_ENDLESS = (1 << 63) - 1  # rounds of a Loop without a count
_FIX = "Export the model again; this file was not made by an exporter."
_LOOP_FIX = "Give the Loop a count or a condition that ends it, or export the model again."
_COPY_FIX = "Copy the file again, or export the model again."
_GIVEN_GRAPH = "It gives a graph to its function {} as an attribute: how often the graph runs is not known before."
_DATA_FIX = "Keep the external data file in the model's folder, under its original name."

# Bits of an element, by the numbers of onnx.TensorProto.DataType; text is missing.
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
    **dict.fromkeys((27, 28), 6),
}
_TEXT, _INT32, _INT64, _FLAG = 8, 6, 7, 9
# The field of numbers that are not raw bytes, by data type; every type that is not here has `int32_data`.
_TYPED = {1: "float_data", 14: "float_data", 11: "double_data", 15: "double_data", 7: "int64_data"}
_TYPED |= {12: "uint64_data", 13: "uint64_data", _TEXT: "string_data"}
_ALL_TYPED = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_EXTERNAL = 1
# Lists of a graph or function.
_PARTS = (
    "node",
    "initializer",
    "sparse_initializer",
    "input",
    "output",
    "attribute",
    "attribute_proto",
    "opset_import",
)
# The field of an attribute's value, by the numbers of onnx.AttributeProto.AttributeType.
_VALUES = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 11: "sparse_tensor", 13: "tp"}
_LISTS = {6: "floats", 7: "ints", 8: "strings", 9: "tensors", 10: "graphs", 12: "sparse_tensors", 14: "type_protos"}

# Domain, name and overload of a function.
Key = tuple[str, str, str]
# Returns the size in bytes of a file of external data, by the location in the model; None if there is no file.
Sizes = Callable[[str], "int | None"]


class Refused(ValueError):
    """The model is refused.

    Args:
        why: the reason, a sentence.
        fix: what to do.
    """

    def __init__(self, why: str, fix: str = _FIX) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


@dataclass(frozen=True)
class Growth:
    """Measure a graph, or one call of a function, after every function is inlined.

    Args:
        nodes: its nodes, including graphs inside it.
        size: their bytes.
        depth: how deeply graphs are nested.
        calls: how many functions call each other.
        doubled: its nodes, each counted twice for every graph around it.
    """

    nodes: int
    size: int
    depth: int
    calls: int
    doubled: int


def judge(model: Any, size: int, sizes: Sizes) -> Growth:
    """Judge a model, and return the size of its graph after inlining.

    Args:
        model: the model.
        size: bytes of its file.
        sizes: of external data.

    Raises:
        Refused: no engine may see it.
    """
    functions = functions_of(model)
    _check_versions((model, *functions.values()))
    grown = growth(model, functions, size)
    for body in (model.graph, *functions.values()):
        free = _free_names(body)
        if free:
            raise Refused(f"It reads the value {_shown(min(free))}, which no node computes.")
    _check_tensors(model, sizes)
    _check_loops(model, functions)
    return grown


def _check_versions(bodies: Iterable[Any]) -> None:
    for entry in (entry for body in bodies for entry in body.opset_import):
        domain = domain_of(entry)
        if (not domain or domain.startswith(_KNOWN_DOMAINS)) and not 0 <= entry.version <= MOST_VERSION:
            raise Refused(f"It imports version {entry.version} of the operators of {_shown(domain or 'ai.onnx')}.")


def check_count(model: Any) -> None:
    """Refuse a model that has more parts than any model has, before each is looked at.

    Raises:
        Refused: there are more than `MOST_PARTS`.
    """
    left = MOST_PARTS

    def count(*lists: Any) -> None:
        nonlocal left
        left -= sum(map(len, lists))
        if left < 0:
            raise Refused(f"It has more than {MOST_PARTS} nodes, weights and attributes.")

    count(model.functions, model.opset_import)
    bodies = [model.graph, *model.functions]
    while bodies:
        body = bodies.pop()
        count(*(getattr(body, name, ()) for name in _PARTS))
        tensors = list(getattr(body, "initializer", ()))
        for node in body.node:
            count(node.attribute)
            for attribute in node.attribute:
                count(attribute.tensors, attribute.graphs, attribute.sparse_tensors)
                bodies += graphs_of_attribute(attribute)
                tensors += attribute.tensors
                if attribute.HasField("t"):
                    tensors.append(attribute.t)
        for tensor in tensors:
            count(tensor.external_data)


def lies_inside(location: str) -> bool:
    """Check that external data is in the model's folder or below it; ONNX allows no other place.

    "*" is not a file name either: onnxruntime marks addresses in memory by such locations.
    """
    parts = (*PurePosixPath(location).parts, *PureWindowsPath(location).parts)
    whole = not PurePosixPath(location).is_absolute() and not PureWindowsPath(location).anchor
    return bool(location) and "\0" not in location and whole and not {"..", "*"} & {*parts}


def domain_of(entry: Any) -> str:
    """Return the domain of a node, function or operator set; that of ONNX's own operators is ""."""
    return "" if entry.domain == "ai.onnx" else entry.domain


def graphs_of(node: Any) -> Iterator[Any]:
    """Yield the graphs inside a node of control flow."""
    for attribute in node.attribute:
        yield from graphs_of_attribute(attribute)


def graphs_of_attribute(attribute: Any) -> Iterator[Any]:
    """Yield the graphs of an attribute."""
    yield from attribute.graphs
    if attribute.HasField("g"):
        yield attribute.g


def _shown(name: str) -> str:
    """Quote a name of the file, in limited length."""
    return repr(name if len(name) <= 100 else name[:99] + "…")


def _by_name(key: Key) -> Key:
    return (*key[:2], "")


# Functions: which calls which, and how large everything becomes.


def functions_of(model: Any) -> dict[Key, Any]:
    """Return the functions of a model.

    Raises:
        Refused: two have the same domain, name and overload, or one has a graph as an attribute.
    """
    found: dict[Key, Any] = {}
    for body in model.functions:
        key = (domain_of(body), body.name, body.overload)
        if key in found:
            raise Refused(f"It defines twice the function {_shown('::'.join(part for part in key if part))}.")
        if any(attribute.HasField("g") or len(attribute.graphs) for attribute in body.attribute_proto):
            raise Refused(_GIVEN_GRAPH.format(_shown(body.name)))
        found[key] = body
    return found


@dataclass
class _Own:
    """Measure a graph or function before its calls are replaced."""

    nodes: int = 0
    size: int = 0
    depth: int = 0
    doubled: int = 0
    calls: Counter[Key] = field(default_factory=Counter)
    doubled_calls: Counter[Key] = field(default_factory=Counter)
    # What its nodes are, without overloads.
    operators: set[Key] = field(default_factory=set)
    # Depth of the deepest call of each function.
    called_at: dict[Key, int] = field(default_factory=dict)

    def add(self, graph: Any, functions: Mapping[Key, Any], depth: int) -> None:
        self.depth = max(self.depth, depth)
        for node in graph.node:
            key = (domain_of(node), node.op_type, node.overload)
            self._check_attributes(node)
            self.operators.add(_by_name(key))
            if key in functions:
                if any(graphs_of(node)):
                    raise Refused(_GIVEN_GRAPH.format(_shown(node.op_type)))
                self.calls[key] += 1
                self.doubled_calls[key] += 1 << depth
                self.called_at[key] = max(self.called_at.get(key, 0), depth)
            else:
                self.nodes += 1
                self.doubled += 1 << depth
            if depth == 0:
                self.size += node.ByteSize()
            for inner in graphs_of(node):
                self.add(inner, functions, depth + 1)

    @staticmethod
    def _check_attributes(node: Any) -> None:
        names = set()
        for attribute in node.attribute:
            if attribute.name in names:
                raise Refused(f"A node {_shown(node.op_type)} has two attributes {_shown(attribute.name)}.")
            names.add(attribute.name)
            held = {kind for kind, value in _VALUES.items() if attribute.HasField(value)}
            held |= {kind for kind, values in _LISTS.items() if len(getattr(attribute, values))}
            if len(held) > 1 or (held and attribute.type not in (0, *held)):
                raise Refused(
                    f"The attribute {_shown(attribute.name)} of a node {_shown(node.op_type)} has a value of another "
                    "type than it states."
                )


def growth(model: Any, functions: Mapping[Key, Any], size: int, *, overloads: bool = True) -> Growth:
    """Return the size of a model's graph after inlining; functions without callers must be valid too.

    Args:
        model: the model.
        functions: its functions.
        size: bytes of its file.
        overloads: whether overloads distinguish functions; some engines ignore them.

    Raises:
        Refused: functions call each other in a circle, too often or too deep, or graphs are nested too deeply.
    """
    own: dict[Key, _Own] = {}
    for key, body in functions.items():
        own[key] = _Own()
        own[key].add(body, functions, 0)
    top = _Own()
    top.add(model.graph, functions, 0)
    if not overloads:
        by_name: dict[Key, set[Key]] = {_by_name(key): set() for key in own}
        for key, entry in own.items():
            by_name[_by_name(key)] |= entry.operators & by_name.keys()
        for _ in _callees_first(by_name):  # it refuses circles
            pass
    grown: dict[Key, Growth] = {}
    for key in _callees_first({key: set(entry.calls) for key, entry in own.items()}):
        grown[key] = _grown(own[key], grown)
        _check_growth(grown[key], size)
    whole = _grown(top, grown)
    _check_growth(whole, size)
    if sum(each.nodes for each in grown.values()) > 4 * MOST_NODES:
        raise Refused(f"Its functions would become more than {4 * MOST_NODES} nodes together.")
    return whole


def _callees_first(calls: Mapping[Key, set[Key]]) -> Iterator[Key]:
    """Yield each function after the functions that it calls.

    Raises:
        Refused: some call each other in a circle.
    """
    waiting = {key: len(called) for key, called in calls.items()}
    callers: dict[Key, list[Key]] = {}
    for key, called in calls.items():
        for each in called:
            callers.setdefault(each, []).append(key)
    ready = [key for key, count in waiting.items() if not count]
    done = 0
    while ready:
        key = ready.pop()
        done += 1
        yield key
        for caller in callers.get(key, ()):
            waiting[caller] -= 1
            if not waiting[caller]:
                ready.append(caller)
    if done < len(calls):
        stuck = min(key[1] for key, count in waiting.items() if count)
        raise Refused(f"Its functions call each other in a circle, for example {_shown(stuck)}.")


def _grown(entry: _Own, grown: Mapping[Key, Growth]) -> Growth:
    called = [(count, grown[key]) for key, count in entry.calls.items()]
    return Growth(
        entry.nodes + sum(count * max(1, each.nodes) for count, each in called),
        entry.size + sum(count * each.size for count, each in called),
        max([entry.depth, *(entry.called_at[key] + grown[key].depth for key in entry.calls)]),
        1 + max((each.calls for _, each in called), default=0),
        entry.doubled + sum(count * grown[key].doubled for key, count in entry.doubled_calls.items()),
    )


def _check_growth(found: Growth, size: int) -> None:
    if found.nodes > MOST_NODES:
        raise Refused(f"Its functions call each other so often that it would become more than {MOST_NODES} nodes.")
    if found.size > 2 * size + MOST_ADDED_BYTES:
        raise Refused(f"Its functions call each other so often that it would become {found.size} bytes.")
    if found.depth > DEEPEST_GRAPHS:
        raise Refused(f"Its graphs are nested {found.depth} deep; the limit is {DEEPEST_GRAPHS}.")
    if found.calls > DEEPEST_CALLS:
        raise Refused(f"Its functions call each other {found.calls} deep; the limit is {DEEPEST_CALLS}.")


# Names: every value is computed once, and before it is read.


def _free_names(graph: Any) -> set[str]:
    """Return the names that a graph or function reads but does not compute.

    Raises:
        Refused: it makes one twice, or nodes need each other's results.
    """
    given = Counter(_name(entry) for entry in graph.input)
    weights: Counter[str] = Counter(tensor.name for tensor in getattr(graph, "initializer", ()))
    weights.update(tensor.values.name for tensor in getattr(graph, "sparse_initializer", ()))
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    made = Counter(name for node in graph.node for name in node.output if name)
    results = Counter(_name(entry) for entry in graph.output)
    twice = [name for names in (given, weights, made, results) for name, count in names.items() if count > 1]
    twice += [name for name in made if name in given or name in weights]
    if twice:
        raise Refused(f"Two nodes compute the value {_shown(min(twice))}.")
    reads = [_reads(node) for node in graph.node]
    _check_order([{maker[name] for name in names if name in maker} for names in reads])
    known = given.keys() | weights.keys() | made.keys()
    return set().union(results, *reads) - known - {""}


def _name(entry: Any) -> str:
    """Return the name of an input or output: in a function they are names, in a graph values."""
    return entry if isinstance(entry, str) else str(entry.name)


def _reads(node: Any) -> set[str]:
    return set(node.input).union(*map(_free_names, graphs_of(node)))


def _check_order(needs: list[set[int]]) -> None:
    """Refuse nodes that need each other's results; engines sort nodes in any other order."""
    if all(max(of, default=-1) < index for index, of in enumerate(needs)):
        return
    waiting = [len(of) for of in needs]
    readers: dict[int, list[int]] = {}
    for index, of in enumerate(needs):
        for each in of:
            readers.setdefault(each, []).append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        done += 1
        for reader in readers.get(ready.pop(), ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    if done < len(needs):
        raise Refused("Some of its nodes need each other's results.")


# Tensors: they contain what they state.


def tensors_of(model: Any) -> Iterator[Any]:
    """Yield every tensor of a model: weights, and those in attributes and sparse tensors."""
    for body in (model.graph, *model.functions):
        yield from _tensors_in(body)


def _tensors_in(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for sparse in getattr(graph, "sparse_initializer", ()):
        yield from (sparse.values, sparse.indices)
    for attribute in getattr(graph, "attribute_proto", ()):
        yield from _tensors_of(attribute)
    for node in graph.node:
        for attribute in node.attribute:
            yield from _tensors_of(attribute)


def _tensors_of(attribute: Any) -> Iterator[Any]:
    yield from attribute.tensors
    if attribute.HasField("t"):
        yield attribute.t
    for sparse in _sparse_of(attribute):
        yield from (sparse.values, sparse.indices)
    for graph in graphs_of_attribute(attribute):
        yield from _tensors_in(graph)


def _sparse_of(attribute: Any) -> Iterator[Any]:
    yield from attribute.sparse_tensors
    if attribute.HasField("sparse_tensor"):
        yield attribute.sparse_tensor


def _sparse_in(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "sparse_initializer", ())
    for node in graph.node:
        for attribute in node.attribute:
            yield from _sparse_of(attribute)
        for inner in graphs_of(node):
            yield from _sparse_in(inner)


def _check_tensors(model: Any, sizes: Sizes) -> None:
    for tensor in tensors_of(model):
        check_tensor(tensor, sizes)
    dense = 0
    for body in (model.graph, *model.functions):
        for sparse in _sparse_in(body):
            _check_sizes(f"The sparse tensor {_shown(sparse.values.name)}", sparse.dims)
            dense += prod(sparse.dims) * max(8, _BITS.get(sparse.values.data_type, 8)) // 8
    if dense > MOST_DENSE_BYTES:
        raise Refused(f"Its sparse tensors would take {dense} bytes.")


def _check_sizes(name: str, dims: Any) -> None:
    if len(dims) > MOST_SIZES:
        raise Refused(f"{name} has {len(dims)} dimensions.")
    if min(dims, default=0) < 0:
        raise Refused(f"{name} has a negative size.")


def claimed_bytes(tensor: Any) -> int | None:
    """Return how many bytes a tensor's type and sizes need; None for text."""
    return None if tensor.data_type == _TEXT else -(-prod(tensor.dims) * _BITS[tensor.data_type] // 8)


def check_tensor(tensor: Any, sizes: Sizes) -> None:
    """Refuse a tensor whose data does not fit its type and sizes.

    Args:
        tensor: the tensor.
        sizes: of external data.

    Raises:
        Refused: the data does not fit, or it is outside the model's folder.
    """
    name, kind = f"The tensor {_shown(tensor.name)}", tensor.data_type
    if kind != _TEXT and kind not in _BITS:
        raise Refused(f"{name} has elements of type {kind}, which ONNX does not define.")
    _check_sizes(name, tensor.dims)
    count, external = prod(tensor.dims), tensor.data_location == _EXTERNAL
    typed = {values for values in _ALL_TYPED if len(getattr(tensor, values))}
    if len(typed) + bool(len(tensor.raw_data)) + external > 1:
        raise Refused(f"{name} holds its numbers in two places.", _COPY_FIX)
    shape = f"{name} claims {'×'.join(map(str, list(tensor.dims)[:8])) or 'one'} elements"
    if external:
        if kind == _TEXT:
            raise Refused(f"{name} has text in another file, which ONNX does not allow.")
        _check_external(tensor, shape, sizes)
    elif typed:
        values = typed.pop()
        found = len(getattr(tensor, values))
        if values != _TYPED.get(kind, "int32_data") or found not in _entries(kind, count):
            raise Refused(f"{shape}, but holds {found} numbers.", _COPY_FIX)
    elif (kind == _TEXT or len(tensor.raw_data) not in _raw_sizes(kind, count)) and (count or len(tensor.raw_data)):
        raise Refused(f"{shape}, but holds {len(tensor.raw_data)} bytes.", _COPY_FIX)


def _entries(kind: int, count: int) -> set[int]:
    """Return how many entries of a typed field such a tensor may have."""
    if kind in (14, 15):
        return {2 * count}
    return {count, -(-count * _BITS[kind] // 8)} if _BITS.get(kind, 8) < 8 else {count}


def _raw_sizes(kind: int, count: int) -> set[int]:
    whole = -(-count * _BITS[kind] // 8)
    return {whole, count} if _BITS[kind] == 6 else {whole}


def _check_external(tensor: Any, shape: str, sizes: Sizes) -> None:
    found: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in found:
            raise Refused(f"The tensor {_shown(tensor.name)} states its {_shown(entry.key)} twice.")
        found[entry.key] = entry.value
    location = found.get("location", "")
    if not lies_inside(location):
        raise Refused(f"It takes weights from {_shown(location)}, which is not a file in its folder.", _DATA_FIX)
    for key in ("offset", "length"):  # an entry without a value is none that all libraries read alike
        text = found.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise Refused(
                f"The tensor {_shown(tensor.name)} has an offset or a length of its data that is not a number."
            )
    offset, length = int(found.get("offset", "0")), int(found.get("length", "0"))
    needed = _raw_sizes(tensor.data_type, prod(tensor.dims))
    if "length" in found and length not in needed:
        raise Refused(f"{shape}, but its external data has {length} bytes.", _COPY_FIX)
    there = sizes(location)
    if there is not None and offset + min(needed) > there:
        raise Refused(
            f"{shape}, but {_shown(location)} has only {max(0, there - offset)} bytes for it.",
            "The external data file is incomplete: copy it again, or export the model again.",
        )


def locations_of(model: Any) -> frozenset[str]:
    """Return the locations of a model's external data, as stated in the file."""
    tensors: Iterable[Any] = (tensor for tensor in tensors_of(model) if tensor.data_location == _EXTERNAL)
    return frozenset(entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")


# Loops: none is endless, as far as the file's constants show. A Loop has an input for the most rounds, and its
# subgraph says after each round whether to continue. Where neither depends on inputs of the model or computed values,
# the rounds are known before anything runs (ONNX, operator Loop). A Scan takes as many rounds as its inputs are long.


def _check_loops(model: Any, functions: Mapping[Key, Any]) -> None:
    """Refuse loops that run too long, and calls of functions with too many constants to tell."""
    runs = _Runs(functions)
    total = runs.of(model.graph, _Scope(model.graph, None))
    if total > MOST_RUNS:
        most = f", most of them in {_shown(runs.worst)}." if runs.worst else "."
        raise Refused(f"Its loops run more than {MOST_RUNS} nodes{most}", _LOOP_FIX)


class _Scope:
    """Map the names of a graph or function to the constants among them.

    Args:
        graph: the graph or function.
        outer: the graph it is in.
        known: names whose values are known besides.
        attributes: of a function: the numbers that its caller gives as attributes.
    """

    def __init__(
        self,
        graph: Any,
        outer: _Scope | None,
        known: Mapping[str, int | bool | None] | None = None,
        attributes: Mapping[str, int | bool | None] | None = None,
    ) -> None:
        self._outer = outer
        # Every name that was looked up, so that each is looked up once.
        self._known: dict[str, int | bool | None] = {"": None, **(known or {})}
        self._attributes: Mapping[str, int | bool | None] = (
            attributes if attributes is not None else outer._attributes if outer is not None else {}
        )
        self._nodes = {name: node for node in graph.node for name in node.output}
        self._tensors = {tensor.name: tensor for tensor in getattr(graph, "initializer", ())}
        # A function's inputs are names, a graph's are values.
        self._fed = {_name(entry): entry for entry in graph.input}

    def attribute(self, attribute: Any) -> int | bool | None:
        """Return the number of an attribute, which the caller of the function may have set; None for others."""
        if attribute.ref_attr_name:
            return self._attributes.get(attribute.ref_attr_name)
        return _number(attribute)

    def value(self, name: str) -> int | bool | None:
        """Return the number or flag that a name has in every run; None if unknown."""
        waiting: list[tuple[_Scope, str]] = [(self, name)]
        while waiting:
            scope, wanted = waiting[-1]
            if wanted in scope._known:
                waiting.pop()
                continue
            where, operands, computed = scope._origin(wanted)
            missing = [(where, each) for each in operands if each not in where._known]
            if missing:  # no value needs itself: the order of nodes was checked
                waiting += missing
            else:
                values = [where._known[each] for each in operands]
                scope._known[wanted] = None if None in values else computed(values)
        return self._known[name]

    def _origin(self, name: str) -> tuple[_Scope, Sequence[str], Callable[[list[Any]], int | bool | None]]:
        """Return the scope and the names of the values that a name is computed from, and how."""
        node = self._nodes.get(name)
        kind = None if node is None or domain_of(node) else node.op_type
        if name in self._tensors:
            tensor = self._tensors[name]
            return self, (), lambda _: _scalar(tensor)
        if node is None:
            if name in self._fed or self._outer is None:
                return self, (), _unknown
            return self._outer, (name,), _first
        if kind in _PASSED_ON:
            return self, node.input[:1], _first
        if kind in _COMPUTED:
            return self, node.input, _COMPUTED[kind]
        if kind == "Constant":
            return self, (), lambda _: next((x for a in node.attribute if (x := self.attribute(a)) is not None), None)
        return self, (), _unknown

    def length(self, name: str, axis: int) -> int:
        """Return the length of a value along an axis by its declaration; 1 if unknown."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope._tensors:
                return _size(list(scope._tensors[name].dims), axis)
            node = scope._nodes.get(name)
            if node is not None:
                tensors = [each.t for each in node.attribute if node.op_type == "Constant" and each.HasField("t")]
                return _size(list(tensors[0].dims), axis) if tensors else 1
            if name in scope._fed:
                entry = scope._fed[name]
                if isinstance(entry, str) or not entry.type.HasField("tensor_type"):
                    return 1
                sizes = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
                return max(1, _size(sizes, axis))
            scope = scope._outer
        return 1


def _size(sizes: list[int], axis: int) -> int:
    return sizes[axis] if -len(sizes) <= axis < len(sizes) else 1


def _first(values: list[Any]) -> int | bool | None:
    return values[0] if values else None


def _unknown(_: list[Any]) -> None:
    return None


# Operators that return their first input, if that is one number.
_PASSED_ON = frozenset(("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten"))
_COMPUTED: dict[str, Callable[[list[Any]], int | bool | None]] = {
    "Add": lambda x: _bounded(sum(x)),
    "Sub": lambda x: _bounded(x[0] - x[1]) if len(x) == 2 else None,
    "Mul": lambda x: _bounded(x[0] * x[1]) if len(x) == 2 else None,
    "Pow": lambda x: _bounded(x[0] ** x[1]) if len(x) == 2 and 0 <= x[1] <= 64 and abs(x[0]) < 1 << 64 else None,
    "Neg": lambda x: _bounded(-x[0]) if len(x) == 1 else None,
    "Abs": lambda x: abs(x[0]) if len(x) == 1 else None,
    "Max": lambda x: max(x, default=None),
    "Min": lambda x: min(x, default=None),
    "Not": lambda x: not x[0] if len(x) == 1 else None,
    "And": lambda x: all(x),
    "Or": lambda x: any(x),
    "Equal": lambda x: x[0] == x[1] if len(x) == 2 else None,
    "Less": lambda x: x[0] < x[1] if len(x) == 2 else None,
    "LessOrEqual": lambda x: x[0] <= x[1] if len(x) == 2 else None,
    "Greater": lambda x: x[0] > x[1] if len(x) == 2 else None,
    "GreaterOrEqual": lambda x: x[0] >= x[1] if len(x) == 2 else None,
}


def _bounded(value: int) -> int:
    """Keep a result in 64 bits."""
    return max(-_ENDLESS, min(_ENDLESS, value))


class _Runs:
    """Counter of the nodes that run.

    Args:
        functions: those of the model, none of which calls itself.
    """

    def __init__(self, functions: Mapping[Key, Any]) -> None:
        self._functions = functions
        # By function, and by the constants of its caller: values of inputs, numbers of attributes.
        self._known: dict[tuple[object, ...], int] = {}
        self.worst = ""
        self._most = 0

    def of(self, graph: Any, scope: _Scope) -> int:
        """Count the nodes that run when a graph or function runs once."""
        return sum(self._of_node(node, scope) for node in graph.node)

    def _of_node(self, node: Any, scope: _Scope) -> int:
        key = (domain_of(node), node.op_type, node.overload)
        if key in self._functions:
            return self._of_call(key, node, scope)
        inner = list(graphs_of(node))
        if key[:2] == ("", LOOP) and len(inner) == 1:
            return self._of_loop(node, inner[0], scope)
        if key[:2] == ("", SCAN) and len(inner) == 1:
            return self._of_scan(node, inner[0], scope)
        return 1 + sum(self.of(graph, _Scope(graph, scope)) for graph in inner)

    def _of_call(self, key: Key, node: Any, scope: _Scope) -> int:
        body = self._functions[key]
        names = [_name(entry) for entry in body.input]
        # An omitted input has no value, not one of an outer graph.
        inputs = {
            name: scope.value(given) if given else None
            for name, given in zip(names, [*node.input, *[""] * len(names)], strict=False)
        }
        attributes = {each.name: _number(each) for each in body.attribute_proto}
        attributes |= {each.name: scope.attribute(each) for each in node.attribute}
        called = (key, tuple(inputs.values()), tuple(sorted(attributes.items(), key=lambda item: item[0])))
        if called not in self._known:
            if len(self._known) >= MOST_CALLS:
                raise Refused(f"Its functions are called with more than {MOST_CALLS} different constants.")
            known = {name: value for name, value in inputs.items() if value is not None}
            self._known[called] = self.of(body, _Scope(body, None, known, attributes))
        return self._known[called]

    def _of_loop(self, node: Any, body: Any, scope: _Scope) -> int:
        count, goes_on = (*node.input, "", "")[:2]
        # The subgraph gets the flag of the first round; if it then continues once more, it always continues.
        first = scope.value(goes_on) if goes_on else True
        fed = {body.input[1].name: first} if len(body.input) > 1 else {}
        inside = _Scope(body, scope, fed)
        rounds = 1
        if first and len(body.output) and inside.value(body.output[0].name):
            most = scope.value(count) if count else _ENDLESS
            rounds = 1 if most is None else max(0, most)
        return self._count(node, rounds, self.of(body, inside))

    def _of_scan(self, node: Any, body: Any, scope: _Scope) -> int:
        numbers = {each.name: each.i for each in node.attribute}
        axes = next((list(each.ints) for each in node.attribute if each.name == "scan_input_axes"), [])
        count = max(0, min(numbers.get("num_scan_inputs", 0), len(node.input)))
        scanned = list(node.input)[len(node.input) - count :]
        rounds = [scope.length(name, axes[index] if index < len(axes) else 0) for index, name in enumerate(scanned)]
        return self._count(node, max(rounds, default=1), self.of(body, _Scope(body, scope)))

    def _count(self, node: Any, rounds: int, once: int) -> int:
        total = 1 + rounds * max(1, once)
        if total > self._most:
            self._most, self.worst = total, node.name
        return total


def _number(attribute: Any) -> int | bool | None:
    """Return the number or flag of an attribute: an integer, or a list or tensor of one integer; else None."""
    if attribute.HasField("t"):
        return _scalar(attribute.t)
    if len(attribute.ints) == 1:
        return int(attribute.ints[0])
    return int(attribute.i) if attribute.HasField("i") else None


def _scalar(tensor: Any) -> int | bool | None:
    """Return the value of a tensor of one integer or flag that is in the file."""
    kind = tensor.data_type
    if kind not in (_INT64, _INT32, _FLAG) or prod(tensor.dims) != 1 or tensor.data_location == _EXTERNAL:
        return None
    typed = tensor.int64_data if kind == _INT64 else tensor.int32_data
    value = int(typed[0]) if len(typed) else int.from_bytes(bytes(tensor.raw_data), "little", signed=True)
    return bool(value) if kind == _FLAG else value
