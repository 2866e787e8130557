"""A module of the user's own as step files: captured once, planned for one token a call and for chunks of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import fx

from ....core.documents.step_record import CacheRecord, StepRecord
from ....core.error_texts import argument
from ....core.errors import UsageError
from ....core.limits import LARGEST_SIZE
from ....core.tensors import SEQUENCE, TensorSpec
from ...lowering import functions, trace
from ..module_runner import Entry
from ..observe import working_copy
from ..opened_module import OpenedModule
from .along import CannotStep
from .captured import CapturedRecurrent, capture_layers
from .module import StepEntry, StepModule
from .plan import Plan
from .rules.table import rules_of

POSITION = "position"
DEFAULT_CHUNK = 64
# The cells of a recurrent layer are written out for each token of a call.
_RECURRENT_CHUNK = 8


class Stepped:
    """A module for `C` tokens a call.

    Args:
        opened: the module, with an open axis for the sequence.
        chunk: tokens per call of the prefill file; None chooses.

    Raises:
        UsageError: an operator of it cannot run position by position.
    """

    def __init__(self, opened: OpenedModule, chunk: int | None) -> None:
        self.opened, self.length = opened, opened.sizes[SEQUENCE]
        entry = Entry(working_copy(opened.replacement.module), opened.names, opened.by_name)
        self.layers = capture_layers(entry)
        self._title = type(opened.module).__name__
        try:
            self._graph = self._captured(entry)
            self._rules = rules_of(self._graph.graph)
            self.plans = {1: self._planned(1)}
        except CannotStep as reason:
            raise self._refused(f"{reason}.") from None
        self.axis = self._axis()
        if chunk is None:
            recurrent = any(isinstance(part, CapturedRecurrent) for part in entry.modules())
            most = _RECURRENT_CHUNK if recurrent else DEFAULT_CHUNK
            chunk = min(most, (self.length + 1) // 2) if self.plans[1].has_tables else most
        if self.max_positions is not None and chunk > self.max_positions:
            raise UsageError(
                f"{argument('chunk', chunk)} is beyond the file's {self.max_positions} positions.",
                fix=f"Use {self.max_positions} or less, or a larger {argument('seq_len')}.",
            )
        self.chunk = chunk
        if chunk > 1:
            self.plans[chunk] = self._planned(chunk)

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self._title} cannot run step by step.",
            why=why,
            fix=f"Export whole sequences: {argument('mode', 'full')}.",
        )

    def _captured(self, entry: Entry) -> fx.GraphModule:
        """Capture the module with a sequence of any length."""
        opened = self.opened
        examples = tuple(torch.from_numpy(x) for x in opened.draw(0, opened.sizes).values())
        dim = torch.export.Dim(SEQUENCE, min=2, max=max(3, self.length))
        shapes = tuple({i: dim for i, axis in enumerate(x.axes) if axis == SEQUENCE} for x in opened.inputs)
        try:
            with trace.quiet(), torch.no_grad():
                program = torch.export.export(entry, examples, dynamic_shapes=(shapes,), strict=False)
        except Exception as error:  # PyTorch's exporter and the user's module may raise anything
            raise trace.export_failed(error) from error
        module = program.module()
        assert isinstance(module, fx.GraphModule)
        return module

    def _planned(self, chunk: int) -> Plan:
        return Plan(self._graph, self.layers, self.length, chunk, self._rules)

    def _axis(self) -> int:
        """Return the axis of the sequence, the same in the inputs and in the output."""
        plan = self.plans[1]
        if len(plan.outputs) != 1:
            names = ", ".join(self.opened.output_names)
            raise self._refused(f"It returns {names}, and a step file has one output beside its caches.")
        axes = {plan.along[node].axis for node in (*plan.inputs, *plan.outputs)}
        if len(axes) != 1:
            raise self._refused(f"The sequence is on other axes in its output than in its inputs: {sorted(axes)}.")
        return int(axes.pop())

    @property
    def max_positions(self) -> int:
        """The number of positions with rows in its tables; without tables, the number that fits 32 bits."""
        return self.length if self.plans[1].has_tables else LARGEST_SIZE

    def data(self, chunk: int | str) -> list[TensorSpec]:
        """List the inputs of the module at a length."""
        return [
            replace(spec, shape=(*spec.shape[: self.axis], chunk, *spec.shape[self.axis + 1 :]))
            for spec in (x.spec() for x in self.opened.inputs)
        ]

    @property
    def caches(self) -> list[CacheRecord]:
        """The tensors that a call leaves for the next one."""
        return [
            CacheRecord(
                input=cache.name,
                output=f"next_{cache.name}",
                shape=list(cache.shape),
                dtype=str(cache.dtype).removeprefix("torch."),
                fill=cache.fill,
            )
            for cache in self.plans[1].caches
        ]

    def inputs(self, chunk: int) -> list[TensorSpec]:
        """List the inputs of a file: data, position, caches."""
        caches = [TensorSpec(x.input, x.dtype, tuple(x.shape)) for x in self.caches]
        return [*self.data(chunk), TensorSpec(POSITION, "int64", (1,)), *caches]

    def record(self, chunk: int, mode: str, prefill: str | None) -> StepRecord:
        """Return what the sidecar records about a file."""
        attends = any(path.modules for path in self.plans.values())
        return StepRecord(
            mode=mode,  # type: ignore[arg-type]
            chunk=chunk,
            token_input=self.opened.names[0],
            sequence_axis=self.axis,
            position_input=POSITION,
            logits_output=self.opened.output_names[0],
            caches=self.caches,
            max_positions=self.max_positions,
            in_place=chunk == 1 and attends and self._only_rings,
            prefill=prefill,
        )

    @property
    def _only_rings(self) -> bool:
        """Whether all caches are rings of attention, which a node may overwrite as it reads them."""
        nodes = [step.node for step in self.plans[1].steps]
        rings = 2 * sum("captured_attention" in str(node.target) for node in nodes)
        return rings == len(self.plans[1].caches)

    def trace(self, chunk: int, opset: int) -> ir.Model:
        """Trace the file of a chunk to ONNX, with step nodes and their functions."""
        module = StepEntry(StepModule(self.plans[chunk]).eval(), len(self.opened.names))
        specs = self.inputs(chunk)
        examples = tuple(_example(spec) for spec in specs)
        outputs = [self.opened.output_names[0], *(x.output for x in self.caches)]
        model = trace.trace_module(module, examples, [spec.name for spec in specs], outputs, opset)
        CommonSubexpressionEliminationPass()(model)
        functions.attach_functions(model)
        return model

    def integer_limits(self, chunk: int) -> dict[str, int | None]:
        """Return, for tokens and the position, one more than the largest value."""
        limits: dict[str, Any] = {x.name: x.limit for x in self.opened.inputs if "int" in x.dtype}
        return {**limits, POSITION: self.max_positions - chunk + 1}

    @property
    def reach(self) -> int:
        """How many positions the longest cache keeps."""
        plan = self.plans[1]
        return max((max(cache.shape[-2:], default=1) for cache in plan.caches if len(cache.shape) > 1), default=1)


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros([int(size) for size in spec.shape], dtype=getattr(torch, spec.dtype))
