"""The options of an export: each declared once, with its name, type, default and help.

An option is one field here and the place that uses it. From the field follow the argument of `localattn.export` or
`export_module`, the option on the command line with its help, the field of the request, the entry in the sidecar
(`recorded`), and the line in docs/commands.md. The class that has the field says who takes the option:

| class | its options are taken by |
|---|---|
| `CheckOptions` | every export, and conversions |
| `FileOptions`, `PrecisionOptions` | checkpoints and modules |
| `CheckpointOptions`, `ShapeOptions` | checkpoints |

A help text names other options by `core.error_texts.argument`; the command line shows them as its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.error_texts import argument
from ..core.errors import UsageError
from ..core.tolerance import Tolerance, coarsest, tolerance_for
from ..core.versions import DEFAULT_OPSET, OPSETS

# How thoroughly a file is checked.
Checks = Literal["all", "quick"]
# Whole sequences, a few tokens a call, or the chunks of a prompt.
Mode = Literal["full", "step", "prefill"]
# Element type of the file.
Dtype = Literal["fp32", "fp16", "bf16"]
# Element type of the weights of linear layers, where it differs from the file's.
WeightDtype = Literal["int8", "int4", "int8-dynamic", "fp8", "int8-qdq"]
# Element type of large tables of embeddings, in files whose linear layers are stored in blocks.
TableDtype = Literal["int8", "int4"]
AttentionDtype = Literal["fp8"]
# What a Hugging Face model is for.
Task = Literal["feature-extraction", "fill-mask", "text-classification", "token-classification", "text-generation"]

# The one help of a length, for files of every kind.
_LENGTH = (
    f"Tokens per sequence; with {argument('dynamic', ('seq',))} the most, and in a Hugging Face step file all "
    "positions. (Default: that of the model or of the example; 4096 or fewer in a step file.)"
)

# A protobuf message is limited to 2 GiB; some room is left for the graph itself.
EXTERNAL_DATA_FROM = 1_900_000_000


@dataclass(frozen=True)
class Option:
    """Describe an option beyond its name, type and default.

    Args:
        help: one or two sentences; a default that is computed is written `(Default: …)` at the end.
        panel: the panel of `--help` that lists it; "" for an argument of Python only.
        flag: its name on the command line, if it differs from the field's.
        typed: what users type on the command line, "axes" or "file"; "" to follow the field's type.
        metavar: the name of its value in the help; "" for the name of the type.
        recorded: whether the sidecar's `options` record a value other than the default.
        why_not_steps: why step files do not take it; "" if they do.
        hint: for a value that is not a choice, what to write instead.
    """

    help: str
    panel: str = ""
    flag: str = ""
    typed: Literal["", "axes", "file"] = ""
    metavar: str = ""
    recorded: bool = False
    why_not_steps: str = ""
    hint: Mapping[str, str] = field(default_factory=dict)


def option(default: Any, help: str, panel: str = "", **rest: Any) -> Any:
    """Declare an option of a dataclass, as `Option` describes it."""
    return field(default=default, metadata={"option": Option(help, panel, **rest)})


def options_of(kind: type) -> dict[str, Option]:
    """Return the options among the fields of a dataclass, in their order."""
    return {x.name: x.metadata["option"] for x in fields(kind) if "option" in x.metadata}


def recorded(*chosen: Any) -> dict[str, Any]:
    """Return what a sidecar records of options: those that differ from their defaults."""
    return {
        x.name: getattr(options, x.name)
        for options in chosen
        for x in fields(options)
        if "option" in x.metadata and x.metadata["option"].recorded and getattr(options, x.name) != x.default
    }


def common(kind: type, values: object) -> dict[str, Any]:
    """Return the values of the fields that a dataclass has in common with another object."""
    return {x.name: getattr(values, x.name) for x in fields(kind) if x.init and hasattr(values, x.name)}


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How thoroughly a file is checked, and what is accepted."""

    checks: Checks = option(
        "all",
        "all, or quick to try out a large model: quick compares few inputs, and skips the checks of the window and "
        "of memory.",
        "Checks",
    )
    atol: float | None = option(
        None, "Absolute tolerance of the parity check. (Default: depends on the element type.)", "Checks"
    )
    rtol: float | None = option(
        None, "Relative tolerance of the parity check. (Default: depends on the element type.)", "Checks"
    )
    allow_quadratic: bool = option(False, "Accept tensors that grow with the square of the sequence length.", "Checks")
    allow_wide_integers: bool = option(
        False, "Accept integers that do not fit in 32 bits. Some runtimes cannot compute with them.", "Checks"
    )
    seeds: tuple[int, ...] | None = option(
        None, "Seeds of the random inputs that parity compares. (Default: one or two.)"
    )

    @property
    def quick(self) -> bool:
        """Whether to compare on one set of inputs, and leave out what the table of checks calls long."""
        return self.checks == "quick"

    def tolerance(self, precision: str, *, proven: bool = False) -> Tolerance:
        """Return the tolerance for a file of this precision, an entry of `core.tolerance`.

        Args:
            precision: of the file.
            proven: its graph and its weights are proven apart, so that only the quality of rounding is judged.
        """
        return tolerance_for(precision, self.atol, self.rtol, proven=proven)


@dataclass(frozen=True, kw_only=True)
class FileOptions(CheckOptions):
    """What a file to write is asked to be."""

    golden: str | Path | None = option(
        None,
        "An .npz file that localattn.record wrote from your own model. The file must match its outputs.",
        "Input",
        typed="file",
    )
    opset: int = option(
        DEFAULT_OPSET,
        f"ONNX opset, {OPSETS[0]} to {OPSETS[-1]}. TensorRT 10.3 reads opsets up to {DEFAULT_OPSET}.",
        "Output",
    )
    function_body: bool = option(
        True,
        "Leave out the attention node's ONNX function, for TensorRT 10.3. Only a plugin can run such a file.",
        "Output",
        flag="no_function_body",
    )
    standard_ops: bool = option(
        False,
        "Write standard operators only, without ONNX functions, for runtimes that do not support functions.",
        "Output",
    )
    dynamic: Sequence[str] | None = option(
        None,
        "Axes of variable size: batch,seq, or none. (Default: those of the model's family, usually none.)",
        "Shapes",
        typed="axes",
    )
    overwrite: bool = option(
        False, "Replace existing files. Each must be of the same kind as its replacement.", "Output", flag="force"
    )
    external_data_from: int = option(
        EXTERNAL_DATA_FROM, "Write the weights to a separate file if they have at least this many bytes."
    )

    def __post_init__(self) -> None:
        if isinstance(self.dynamic, str):  # one text, as on the command line
            names = () if self.dynamic == "none" else tuple(name.strip() for name in self.dynamic.split(","))
            object.__setattr__(self, "dynamic", names)
        if self.standard_ops and not self.function_body:
            raise UsageError(
                f"{argument('standard_ops', True)} and {argument('function_body', False)} contradict each other.",
                why="A file in standard operators computes the attention in them.",
                fix="Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The element types of a file."""

    dtype: Dtype = option(
        "fp32",
        "Element type of weights and activations.",
        "Precision",
        hint={name: f"For weights in {name}: {argument('weight_dtype', name)}" for name in get_args(WeightDtype)},
    )
    weight_dtype: WeightDtype | None = option(
        None,
        "Type of the weights of linear layers. int8, int4: 8-bit or 4-bit weights in blocks of 32. int8-dynamic: 8-bit "
        "products, scaled at run time. fp8, int8-qdq: 8-bit products in TensorRT engines. "
        f"(Default: that of {argument('dtype')}.)",
        "Precision",
        recorded=True,
    )

    @property
    def precision(self) -> str:
        """The entry of `core.tolerance` with the file's tolerance."""
        return self.weight_dtype or self.dtype


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Whether a file takes whole sequences, or a few tokens a call."""

    mode: Mode = option(
        "full",
        "full: the file takes whole sequences. step: the file takes one token per call, with caches; a prefill file "
        "for prompts is written next to it. prefill: only the prefill file.",
        "Step files",
    )
    chunk: int | None = option(
        None, "Tokens per call of the prefill file; 1 writes no prefill file. (Default: 64 or fewer.)", "Step files"
    )

    def check_chunk(self) -> None:
        """Refuse an unknown mode, and a chunk that does not go with it.

        Raises:
            UsageError: one of these.
        """
        if self.mode not in get_args(Mode):
            raise UsageError(f"Unknown mode {self.mode!r}.", fix=f"Known: {', '.join(get_args(Mode))}.")
        if self.mode == "full" and self.chunk is not None:
            raise UsageError(f"{argument('chunk')} needs {argument('mode', 'step')} or {argument('mode', 'prefill')}.")
        if self.chunk is not None and self.chunk < 1:
            raise UsageError(f"{argument('chunk')} is {self.chunk}.", why="A call takes at least 1 token.")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(PrecisionOptions, StepOptions):
    """How the model of a checkpoint is read, and in what precision and mode it is written."""

    config: str | Path | None = option(
        None,
        "Configuration file (JSON, TOML or YAML). (Default: the one next to the checkpoint.)",
        "Input",
        typed="file",
    )
    entry: str | None = option(
        None,
        "Which weights to read if the checkpoint has several sets: for example state_dict_ema, callbacks.EMA.state, "
        "or a prefix of tensor names. inspect lists them. (Default: the trained weights.)",
        "Input",
        metavar="NAME",
        recorded=True,
    )
    task: Task | None = option(
        None, "Task to export a Hugging Face folder for. (Default: the one it was saved for.)", "Input"
    )
    table_dtype: TableDtype | None = option(
        None,
        f"Large tables of embeddings, and heads that share them, with {argument('weight_dtype', 'int8')} or int4. "
        "(Default: int8.)",
        "Precision",
        recorded=True,
    )
    calibration: str | Path | None = option(
        None,
        "A text on which weights are rounded, or an .npz with inputs of the model, for weights or tables in int4. "
        "(Default: a text that ships with the package.)",
        "Precision",
        typed="file",
    )
    attention_dtype: AttentionDtype | None = option(
        None,
        "fp8: the plugin library computes attention in fp8, on GPUs of compute capability 8.9 or later. "
        f"(Default: that of {argument('dtype')}.)",
        "Precision",
        recorded=True,
        why_not_steps="Step and prefill files have no fp8 kernels.",
    )

    @property
    def precision(self) -> str:
        """The entry of `core.tolerance` with the file's tolerance."""
        return coarsest([self.weight_dtype or self.dtype, self.attention_dtype or "fp32"])


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """The sizes and inputs of a checkpoint's file."""

    seq_len: int | None = option(None, _LENGTH, "Shapes")
    batch: int = option(1, "Sequences per call.", "Shapes")
    heads: int | None = option(None, "Number of attention heads, if the weights do not show it.", "Shapes")
    dim_head: int | None = option(None, "Size of an attention head, if the weights do not show it.", "Shapes")
    mask: bool = option(False, "Add an input mask: bool, True keeps a token.", "Shapes")
    attn_bias: bool = option(False, "Add an input attn_bias of shape [H, w, K].", "Shapes")
    causal: bool = option(False, "AFTLocal: the model uses a causal mask.", "Shapes", recorded=True)
    full_mask: bool = option(
        False, "AFTLocal: add an input full_mask of shape [T, T]. The file then takes O(T²) time.", "Shapes"
    )
    position_ids: bool = option(
        False,
        "Hugging Face: add an input position_ids. Without it, positions count from 0.",
        "Shapes",
        why_not_steps="A step file counts the positions of its tokens itself.",
    )


@dataclass(frozen=True)
class ShapeRequest(ShapeOptions):
    """The sizes and inputs that are requested for a file; None means the model's own.

    Args:
        seq_len: sequence length `N`.
        batch: batch size `B`.
        dynamic_length: the sequence length is dynamic, up to `seq_len`.
        max_length: step files only: the largest number of positions in a sequence.
    """

    seq_len: int | None = None
    batch: int = 1
    dynamic_length: bool = field(default=False, kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Sizes(ShapeRequest):
    """A request for a file in which every size is decided."""

    seq_len: int = field()
    batch: int = field()
    heads: int = field(kw_only=False)
    dim_head: int = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(FileOptions, PrecisionOptions, StepOptions):
    """How a module of the user's own is exported; its inputs name the axes."""

    dynamic: Sequence[str] = option((), "Names of the axes of variable size.", "Shapes", typed="axes")
    seq_len: int | None = option(None, _LENGTH, "Shapes")


@dataclass(frozen=True)
class ExportRequest(FileOptions, CheckpointOptions):
    """What to export and how.

    By default there are two seeds, or one for long inputs because their reference is slow.

    Args:
        checkpoint: the weights.
        output: the ONNX file to write.
        shapes: sizes and optional inputs.
    """

    checkpoint: Path
    output: Path
    shapes: ShapeRequest = field(default_factory=ShapeRequest, kw_only=True)

    @property
    def inputs(self) -> list[Path]:
        """The files that are read, except those that are found next to them."""
        return [
            Path(path) for path in (self.checkpoint, self.config, self.golden, self.calibration) if path is not None
        ]


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FileOptions, CheckpointOptions, ShapeOptions):
    """The options of `localattn.export` and of the command `export`."""

    def check(self) -> None:
        """Refuse options that do not go together, before PyTorch is imported.

        Raises:
            UsageError: two that do not.
        """
        self.check_chunk()
        for name, known in (("dtype", Dtype), ("checks", Checks)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise UsageError(f"Unknown {name} {value!r}.", fix=f"Known: {', '.join(get_args(known))}.")
        if self.mode != "full":
            self._check_steps()

    def _check_steps(self) -> None:
        for name, declared in options_of(type(self)).items():
            value = getattr(self, name)
            if declared.why_not_steps and value not in (None, False):
                raise UsageError(
                    f"{argument(name, value)} cannot be combined with {argument('mode', self.mode)}.",
                    why=declared.why_not_steps,
                )
        if self.seq_len is not None and self.seq_len < 1:
            raise UsageError(f"{argument('seq_len')} is {self.seq_len}.", why="A sequence has at least 1 position.")

    def request(self, checkpoint: Path, output: Path) -> ExportRequest:
        """Return the request to export a checkpoint with these options."""
        shapes = ShapeRequest(**common(ShapeRequest, self))
        if self.mode != "full":  # a call takes a fixed number of tokens, and the file has this many positions
            shapes = replace(shapes, seq_len=None, max_length=self.seq_len)
        dynamic = None if self.dynamic is None else tuple(self.dynamic)
        own = {"checkpoint": checkpoint, "output": output, "shapes": shapes, "dynamic": dynamic}
        return ExportRequest(**{**common(ExportRequest, self), **own})
