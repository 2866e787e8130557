"""Export every model of `factories.py` and print the results as a Markdown table.

    python examples/packages/table.py                     every package that is installed
    python examples/packages/table.py performer colt5     some models
    python examples/packages/table.py --plain             also torch.onnx.export alone, both exporters
    python examples/packages/table.py --slow              also the models that take minutes
    python examples/packages/table.py --write FILE        put the tables between the markers of FILE
    python examples/packages/table.py --install           print the commands that bring the packages

It installs nothing. A package that is not here gets a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from localattn.core.errors import LocalAttnError
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.exporter.user_module.inputs import (
    SEQUENCE,
    axis_sizes,
    bind,
    call,
    name_axes,
    parse_input,
    with_token_limits,
)
from localattn.exporter.user_module.module_runner import as_arrays

TOKENS = "int64:[1,128]"
MASK = "mask:bool:[1,128]"
STATES = "float32:[1,128,64]"
TOLERANCE = 1e-4
# An odd length: upstream pads it where it was told to, and refuses it where it was not.
ODD = 100
# A longer cell is hard to read in a table.
CELL_WORDS = 10
BEGIN, END = "<!-- table.py {}: begin -->", "<!-- table.py {}: end -->"
INSTALL = """\
# torch first, from where you have it; the constraint keeps every line below from replacing it
echo torch==2.13.0 > constraints.txt
pip install -c constraints.txt performer-pytorch==1.1.4 colt5-attention==0.11.2 axial-positional-embedding==0.3.12
pip install -c constraints.txt linear-attention-transformer==0.19.1 routing-transformer==1.6.1 \\
    reformer-pytorch==1.4.4 sinkhorn-transformer==0.11.4
# these name packages that their models do not need (accelerate; fairseq, torchaudio, …)
pip install --no-deps simple-hierarchical-transformer==0.4.0 rotary-embedding-torch==0.9.1
pip install --no-deps audiolm-pytorch==2.4.0 gateloop-transformer==0.2.5
pip install -c constraints.txt vector-quantize-pytorch==1.32.0 beartype==0.23.1 loguru==0.7.3 torch-einops-utils==0.2.0
pip install --no-deps meshgpt-pytorch==1.8.1 pytorch-custom-utils==0.0.21
pip install -c constraints.txt huggingface-hub==0.36.2 accelerate==1.15.0 jaxtyping==0.3.11 environs==15.2.0 \\
    x-transformers==2.31.10 pytorch-warmup==0.2.0 torch-geometric==2.8.1 taylor-series-linear-attention==0.1.11 \\
    ema-pytorch==0.8.3
"""


@dataclass(frozen=True)
class Model:
    """One model to export.

    Args:
        factory: function of `factories.py`.
        package: where it is published.
        about: which of the package's models it is.
        inputs: as for `localattn export --input`.
        limits: what is not supported, and why.
        allow_quadratic: it has tensors that are square in the length by design.
        slow: it takes minutes.
    """

    factory: str
    package: str
    about: str
    inputs: tuple[str, ...]
    limits: str = ""
    allow_quadratic: bool = False
    slow: bool = False


MODELS = (
    Model("performer", "performer-pytorch", "PerformerLM", (f"x:{TOKENS}",)),
    Model("performer_masked", "performer-pytorch", "PerformerLM, padding mask", (f"ids:{TOKENS}", MASK)),
    Model(
        "performer_causal",
        "performer-pytorch",
        "PerformerLM, causal",
        (f"x:{TOKENS}",),
        "without the package's CUDA extension its causal heads unroll into 128 pieces: minutes to trace, a large file",
        slow=True,
    ),
    Model(
        "linear_attention_transformer",
        "linear-attention-transformer",
        "LinearAttentionTransformerLM, causal",
        (f"x:{TOKENS}",),
        "lengths that the window does not divide: the model refuses them",
    ),
    Model(
        "linear_attention_transformer_masked",
        "linear-attention-transformer",
        "the same, padding mask",
        (f"ids:{TOKENS}", MASK),
        "lengths that the window does not divide: the model refuses them",
    ),
    Model(
        "routing_transformer",
        "routing-transformer",
        "RoutingTransformerLM, causal, local and routed heads",
        (f"x:{TOKENS}",),
        "a model that was never run: its k-means start at the first call",
    ),
    Model(
        "routing_transformer_local",
        "routing-transformer",
        "RoutingTransformerLM, all heads local, two blocks each way",
        (f"x:{TOKENS}",),
        "lengths that the window does not divide: the model refuses them",
    ),
    Model(
        "reformer",
        "reformer-pytorch",
        "ReformerLM, causal, shared queries and keys, full attention beside",
        (f"x:{TOKENS}",),
        "a dynamic length: its full attention builds one mask for one length. "
        "The full attention is square in the length, which takes --allow-quadratic",
        allow_quadratic=True,
    ),
    Model(
        "reformer_hashed",
        "reformer-pytorch",
        "ReformerLM with hashed attention beside",
        (f"x:{TOKENS}",),
        "hashed (LSH) attention draws its hashes anew at every call, so there is no answer to reproduce",
    ),
    Model(
        "sinkhorn_transformer",
        "sinkhorn-transformer",
        "SinkhornTransformerLM, causal",
        (f"x:{TOKENS}",),
        "a dynamic length: its sorting works with the number of blocks it was traced with",
    ),
    Model(
        "sinkhorn_transformer_both",
        "sinkhorn-transformer",
        "SinkhornTransformerLM, both directions",
        (f"x:{TOKENS}",),
        "a dynamic length: its sorting works with the number of blocks it was traced with",
    ),
    Model(
        "hierarchical_transformer",
        "simple-hierarchical-transformer",
        "HierarchicalTransformer, two levels, two windows",
        (f"ids:{TOKENS}",),
        "a dynamic length: the levels pad to a multiple in Python, as traced once",
    ),
    Model(
        "colt5",
        "colt5-attention",
        "ConditionalRoutedTransformerBlock, cosine routing",
        (f"x:{STATES}",),
        "a dynamic length down to 1: with no more tokens than it routes, the block takes another path",
    ),
    Model(
        "colt5_ties",
        "colt5-attention",
        "ConditionalRoutedTransformerBlock, default routing",
        (f"x:{STATES}",),
        "more tokens score exactly 1 than it picks, and among equals each engine's topk picks others",
    ),
    Model("soundstream", "audiolm-pytorch", "SoundStream, sound to sound", ("audio:float32:[1,1024]",)),
    Model(
        "soundstream_bias",
        "audiolm-pytorch",
        "SoundStream, dynamic position bias",
        ("audio:float32:[1,1024]",),
    ),
    Model(
        "soundstream_decoder",
        "audiolm-pytorch",
        "SoundStream, codes to sound",
        ("codes:int64:[1,128,2]:32",),
        "a dynamic length: looking up the codes fixes it",
    ),
    Model(
        "meshgpt_decoder",
        "meshgpt-pytorch",
        "MeshAutoencoder's decoder, mask",
        ("quantized:float32:[1,128,72]", MASK),
        "the encoder, whose faces and edges are gathered by masks, and the transformer, which has no local attention",
    ),
)


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    model: Model
    version: str
    exports: str = ""
    error: str = ""
    window: str = ""
    dynamic_length: str = ""

    def cells(self) -> list[str]:
        """The row, as in `HEAD`."""
        m = self.model
        return [m.package, self.version, m.about, self.exports, self.error, self.window, self.dynamic_length, m.limits]


HEAD = ("package", "version", "model", "exports", "largest error", "window", "dynamic length", "limits")
PLAIN_HEAD = ("model", "torch.onnx.export", "with a dynamic length", "torch.onnx.export(dynamo=False)")


def load_factories() -> ModuleType:
    """`factories.py`, which is no part of a package."""
    name = "localattn_package_factories"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("factories.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def build(model: Model) -> nn.Module:
    """The model; ImportError if a package is missing."""
    with quiet():
        return getattr(load_factories(), model.factory)()


def measure(model: Model) -> Row:
    """Export a model with a fixed and with a dynamic length."""
    try:
        module, release = build(model), version(model.package)
    except (ImportError, PackageNotFoundError) as error:
        return Row(model, "not installed", f"not tried: {error}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            with quiet():
                options = ModuleOptions(allow_quadratic=model.allow_quadratic)
                report = export_module(module, model.inputs, path, options)
        except LocalAttnError as error:
            return Row(model, release, f"no: {first_line(error)}")
        checks = {record.name: record for record in report.sidecar.checks}
        parity, window = checks["parity"], checks["window"]
        windows = {x.describe() for x in report.replacement.windows}
        proven = f"{'; '.join(sorted(windows))}: {window.figures.get('boundaries', 0)} boundaries"
        try:
            with quiet():
                options = ModuleOptions(dynamic=(SEQUENCE,), overwrite=True, allow_quadratic=model.allow_quadratic)
                opened = export_module(module, model.inputs, path, options)
            figures = next(record.figures for record in opened.sidecar.checks if record.name == "parity")
            dynamic_length = f"yes, {figures['trials']} sizes to {float(figures['max_abs']):.1e}"
        except LocalAttnError as error:
            dynamic_length = f"no: {first_line(error)}"
    left = sum("does not call it" not in x.why for x in report.replacement.left)
    exports = f"yes, {len(report.replacement.replaced)} layer(s)" + (f", {left} left as they are" if left else "")
    error = f"{float(parity.figures['max_abs']):.1e}"
    return Row(model, release, exports, error, proven if window.status == "passed" else window.detail, dynamic_length)


def measure_plain(model: Model) -> list[str]:
    """The untouched model and PyTorch's two exporters."""
    try:
        module = build(model)
    except ImportError as error:
        return [model.factory, *[f"not tried: {error}"] * 3]
    parsed = name_axes([parse_input(x) for x in model.inputs], ())
    by_name = bind(module, [x.name for x in parsed])
    inputs, _ = with_token_limits(parsed, module, by_name)
    sizes = axis_sizes(inputs)

    def arrays(length: int) -> dict[str, np.ndarray[Any, Any]]:
        return {x.name: x.draw(0, {**sizes, SEQUENCE: length}) for x in inputs}

    def attempt(lengths: Sequence[int], **how: Any) -> str:
        example = tuple(torch.from_numpy(x) for x in arrays(sizes[SEQUENCE]).values())
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "plain.onnx"))
            try:
                with quiet(), torch.no_grad():
                    torch.onnx.export(module, example, path, input_names=[x.name for x in inputs], **how)
                    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
            except Exception as error:
                return f"no: {first_line(error)}"
            return "; ".join(_differs(session, module, arrays(n), by_name, n) for n in lengths)

    seen: dict[str, Any] = {SEQUENCE: torch.export.Dim(SEQUENCE, min=2, max=4 * sizes[SEQUENCE])}
    dynamic_axes = tuple({i: seen[a] for i, a in enumerate(x.axes) if a in seen} for x in inputs)
    fixed = sizes[SEQUENCE]
    return [
        model.factory,
        attempt([fixed], dynamo=True, opset_version=20, verbose=False),
        attempt([fixed, ODD * fixed // 128], dynamo=True, opset_version=20, verbose=False, dynamic_shapes=dynamic_axes),
        attempt([fixed], dynamo=False, opset_version=17),
    ]


def _differs(
    session: ort.InferenceSession, module: nn.Module, arrays: Mapping[str, Any], by_name: bool, length: int
) -> str:
    """How far a file is from the module at one length."""
    try:
        expected = next(iter(as_arrays(call(module, arrays, by_name)).values()))
    except Exception:
        return f"{length}: the model refuses it"
    try:
        with quiet():
            got = session.run(None, {x.name: arrays[x.name] for x in session.get_inputs()})[0]
    except Exception:
        return f"{length}: onnxruntime fails"
    error = float(np.abs(got - expected).max()) if got.shape == expected.shape else float("inf")
    return f"{length}: {error:.1e}" if error <= TOLERANCE else f"{length}: **differs by {error:.1e}**"


def first_line(error: BaseException) -> str:
    """What went wrong, short enough for a table."""
    if isinstance(error, LocalAttnError):
        text = " ".join(filter(None, (error.what, error.why)))
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        start = next((i + 1 for i, line in enumerate(lines) if "Exception summary" in line), 0)
        text = f"{type(error).__name__}: {(lines[start:] or ['no message'])[0]}"
    text = re.sub(r"\S*/(?=[^/\s]+)", "", re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", text))
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing on the terminal, not from C++ either."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; cells of more than `CELL_WORDS` words become numbered notes below it."""
    notes: dict[str, int] = {}

    def cell(text: str) -> str:
        if len(text.split()) > CELL_WORDS:
            verdict, found, reason = text.partition(": ")
            is_verdict = found and len(verdict.split()) <= 2
            number = notes.setdefault(reason if is_verdict else text, len(notes) + 1)
            text = f"{verdict}, note {number}" if is_verdict else f"note {number}"
        return text.replace("|", chr(92) + "|")

    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "\n".join(f"{number}. {text[:1].upper()}{text[1:]}" for text, number in notes.items())
    return f"{table}\n\n{below}" if notes else table


def write(path: Path, name: str, table: str) -> None:
    """Put a table between its markers."""
    text = path.read_text(encoding="utf-8")
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path} has no markers {begin} and {end}.")
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(m.factory for m in MODELS))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--install", action="store_true")
    given = parser.parse_args()
    if given.install:
        print(INSTALL, end="")
        return
    unknown = set(given.models) - {m.factory for m in MODELS}
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    chosen = [m for m in MODELS if (m.factory in given.models if given.models else given.slow or not m.slow)]
    rows, plain = [], []
    for number, model in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {model.factory}", file=sys.stderr, flush=True)
        rows.append(measure(model).cells())
        if given.plain:
            plain.append(measure_plain(model))
        gc.collect()
    tables = {"export": markdown(HEAD, rows)} | ({"plain": markdown(PLAIN_HEAD, plain)} if plain else {})
    for name, table in tables.items():
        print(f"\n{table}")
        if given.write:
            write(given.write, name, table)


if __name__ == "__main__":
    main()
