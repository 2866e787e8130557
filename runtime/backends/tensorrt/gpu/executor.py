"""Run an engine on tensors in GPU memory: call by call, or by CUDA graphs where the same call comes again.

A graph holds the shapes and addresses it was recorded with, and the state of its execution context. NVIDIA's
documentation asks for one context for each graph, with one memory for all, and for one ordinary run after a change of
shapes before anything is recorded. So:

    the first call   is run by the plain context
    the second one   by a context of its own, which is then recorded
    all later ones   launch the graph
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .....core.error_texts import argument
from .....core.errors import MissingDependency, UsageError
from ..open import OpenEngine
from .graphs import Graph, NotRecorded, record
from .memory import Buffer

_log = logging.getLogger(__name__)

# Graphs an engine keeps; those that were not used for longest go first.
_MOST_GRAPHS = 4
# Calls that are remembered until they come again.
_MOST_SEEN = 16

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Refused(Exception):
    """TensorRT returned false; its log has the reason."""


@dataclass(frozen=True)
class Call:
    """Everything that a graph depends on.

    Args:
        addresses: of all inputs and outputs.
        shapes: of the inputs; empty if the engine has fixed sizes.
        profile: number of the optimization profile.
    """

    addresses: tuple[tuple[str, int], ...]
    shapes: Shapes = ()
    profile: int = 0


class _Context:
    """An execution context, which is told what changes."""

    def __init__(self, native: Any, stream: Any) -> None:
        if not native:
            raise Refused("It makes no execution context.")
        self._native, self._stream = native, stream
        self._profile = 0
        self._shapes: Shapes = ()
        self._addresses: dict[str, int] = {}

    def resize(self, profile: int, shapes: Shapes) -> None:
        """Set profile and shapes of inputs where they are others than before; raises `Refused`."""
        if profile != self._profile:
            if not self._native.set_optimization_profile_async(profile, self._stream.ptr):
                raise Refused(f"It does not take profile {profile}.")
            self._profile, self._shapes = profile, ()
        if shapes != self._shapes:
            self._shapes = ()  # whatever is refused now, the next call sets all of them again
            for name, shape in shapes:
                if not self._native.set_input_shape(name, shape):
                    raise Refused(f"It does not take the shape {list(shape)} for {name}.")
            self._shapes = shapes

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an input or output for the shapes that were set."""
        return tuple(self._native.get_tensor_shape(name))

    def prepare(self, call: Call) -> None:
        """Set whatever the call has otherwise than the one before; raises `Refused`."""
        self.resize(call.profile, call.shapes)
        for name, address in call.addresses:
            if self._addresses.get(name) != address:
                if not self._native.set_tensor_address(name, address):
                    raise Refused(f"It did not take an address for {name}.")
                self._addresses[name] = address

    def enqueue(self) -> bool:
        """Give one execution to the stream; return whether TensorRT took it."""
        return bool(self._native.execute_async_v3(self._stream.ptr))

    def can_be_recorded(self) -> bool:
        """Ask TensorRT-RTX; TensorRT itself cannot be asked."""
        ask = getattr(self._native, "is_stream_capturable", None)
        return ask is None or bool(ask(self._stream.ptr))


class Executor:
    """What runs an engine on a stream.

    Args:
        opened: the engine.
        stream: Polygraphy's CUDA stream.

    Attributes:
        cuda_graph: whether calls that come again become graphs.
        why_no_graph: why they do not although that was asked for; empty if nobody asked, or they do.

    Raises:
        Refused: there is not enough GPU memory for an execution context.
    """

    def __init__(self, opened: OpenEngine, stream: Any) -> None:
        self._opened, self._stream = opened, stream
        self.cuda_graph, self.why_no_graph = False, ""
        self._shared: Buffer | None = None
        self._plain = _Context(opened.engine.create_execution_context(), stream)
        self._recorded: OrderedDict[Call, tuple[_Context, Graph]] = OrderedDict()
        self._seen: OrderedDict[Call, None] = OrderedDict()

    def use_graphs(self) -> None:
        """Record calls that come again; where that fails, now or later, `why_no_graph` and a warning say so."""
        if self.cuda_graph or self.why_no_graph:
            return
        from polygraphy.exception import PolygraphyException

        size = getattr(self._opened.engine, "device_memory_size_v2", None)
        try:
            if size is None:
                raise Refused("This release does not tell how much memory a context needs.")
            self._shared = Buffer(size)
            self._plain = self._context()
        except (PolygraphyException, Refused) as error:
            self._shared = None
            self._give_up(self._opened.opened.messages.reason(error))
        else:
            self.cuda_graph = True

    def shape_of(self, name: str, profile: int, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of an output for inputs of these shapes; -1 where it depends on more than shapes.

        Raises:
            Refused: the shapes lie outside of those that the engine was built for.
        """
        self._plain.resize(profile, shapes)
        return self._plain.shape_of(name)

    def run(self, call: Call) -> None:
        """Give a call to the stream.

        Raises:
            Refused: TensorRT does not start it.
            PolygraphyException: CUDA does not start it.
        """
        found = self._recorded.get(call)
        if found is not None:
            self._recorded.move_to_end(call)
            _, graph = found
            graph.launch(self._stream.ptr)
            return
        if self.cuda_graph and call in self._seen:
            self._run_and_record(call)
            return
        self._run(self._plain, call)
        self._seen[call] = None
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)

    def _run(self, context: _Context, call: Call) -> None:
        context.prepare(call)
        if not context.enqueue():
            raise Refused("TensorRT did not start it.")

    def _run_and_record(self, call: Call) -> None:
        """Run a call in a context of its own, and record that."""
        while len(self._recorded) >= _MOST_GRAPHS:
            self._stream.synchronize()
            _, (_, oldest) = self._recorded.popitem(last=False)
            oldest.free()
        try:
            context = self._context()
        except Refused as error:
            self._give_up(self._opened.opened.messages.reason(error))
            self._run(self._plain, call)
            return
        self._run(context, call)
        # The run must be over before the same context is recorded: they share its memory.
        self._stream.synchronize()
        try:
            if not context.can_be_recorded():
                raise NotRecorded("TensorRT-RTX says that this engine cannot be recorded.")
            self._recorded[call] = context, record(self._stream.ptr, context.enqueue)
        except NotRecorded as error:
            self._give_up(str(error))

    def _context(self) -> _Context:
        """Return a context that works in the shared memory, which is right because one stream orders them all."""
        assert self._shared is not None
        kinds = self._opened.opened.trt.ExecutionContextAllocationStrategy
        native = self._opened.engine.create_execution_context(kinds.USER_MANAGED)
        context = _Context(native, self._stream)
        native.set_device_memory(self._shared.address, self._shared.size)
        return context

    def _give_up(self, why: str) -> None:
        self.cuda_graph, self.why_no_graph = False, why
        _log.warning("CUDA graphs are not used: %s", why)

    def close(self) -> None:
        """Free graphs and contexts."""
        for _, graph in self._recorded.values():
            graph.free()
        self._recorded.clear()
        del self._plain
        self._shared = None


class GpuWork:
    """A CUDA stream, and the executors and buffers of the work on it, freed together."""

    def __init__(self) -> None:
        from polygraphy import cuda

        # Not the default stream, because TensorRT would synchronise the whole device on it.
        self.stream = cuda.Stream()
        self._executors: list[Executor] = []
        self._buffers: dict[Hashable, Buffer] = {}

    def executor(self, opened: OpenEngine) -> Executor:
        """Return what runs an engine on the stream; raises what `Executor` raises."""
        self._executors.append(Executor(opened, self.stream))
        return self._executors[-1]

    def buffer(self, name: Hashable, size: int) -> Buffer:
        """Return the buffer of this name; it grows, and is then another one."""
        if name not in self._buffers or self._buffers[name].size < size:
            self.stream.synchronize()
            self._buffers[name] = Buffer(size)
        return self._buffers[name]

    def free(self) -> None:
        """Free all of them, once."""
        while self._executors:
            self._executors.pop().close()
        self._buffers.clear()
        self.stream.free()


def check_on_gpu(source: object, opened: OpenEngine) -> None:
    """Refuse an engine that wants an input or output in the memory of the processor, as sizes of others are.

    Raises:
        UsageError: it does.
    """
    on_gpu = opened.opened.trt.TensorLocation.DEVICE
    tensors = [spec.name for spec in (*opened.sidecar.inputs, *opened.sidecar.outputs)]
    elsewhere = [name for name in tensors if opened.engine.get_tensor_location(name) != on_gpu]
    if elsewhere:
        raise UsageError(
            f"{source} cannot be run here.",
            why=f"It wants {', '.join(elsewhere)} elsewhere than in GPU memory.",
            fix="Build it with localattn build, from a file of localattn export.",
        )


@contextmanager
def starting(source: object, opened: OpenEngine) -> Iterator[None]:
    """Turn a failure to start into an error with the reason from TensorRT's log.

    Raises:
        MissingDependency: it does not start.
    """
    from polygraphy.exception import PolygraphyException

    messages = opened.opened.messages
    messages.clear()
    try:
        yield
    except (PolygraphyException, Refused) as error:
        raise MissingDependency(
            f"{source} does not start on {opened.device.describe()}.",
            why=messages.reason(error),
            fix=f"Free GPU memory: close what else runs there, or build with a smaller {argument('workspace')}.",
        ) from error
