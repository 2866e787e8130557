"""Check a bundle on the device: every file's SHA-256 first, then the samples against their expected outputs.

    python verify.py                     # the bundle next to this script
    python verify.py --provider cuda --format json
    python verify.py --run-libraries     # also with the bundle's own libraries, which are code

Needs Python 3.10 and numpy; onnxruntime for ONNX files, for its TensorRT provider onnx too; TensorRT for engines. Exit
codes: 0 all is well; 1 a file was altered, a model does not load, or an output differs; 2 this is no bundle, or wrong
usage; 3 something is missing from this machine.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Other files in this folder are not checked yet: no import may find them, and no stale bytecode may replace them.
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]  # noqa: PTH100
    sys.dont_write_bytecode = True

import argparse
import contextlib
import io
import json
import math
import mmap
import re
import struct
import tempfile
import tokenize
import types
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any


@cache
def _script(name: str) -> types.ModuleType:
    """Load the script `name` in this folder from its source."""
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look up their module
    source = Path(__file__).with_name(f"{name}.py")
    exec(compile(source.read_bytes(), str(source), "exec"), module.__dict__)
    return module


if TYPE_CHECKING or __package__:
    from ....core.storage import library_image
    from ....onnx_graph import judgement, wire_model
    from . import check_files, results
else:
    _scripts = ("check_files", "library_image", "results", "judgement", "wire_model")
    check_files, library_image, results, judgement, wire_model = map(_script, _scripts)

ALTERED, NO_BUNDLE, MISSING = check_files.ALTERED, check_files.NO_BUNDLE, check_files.MISSING
Fault = check_files.Fault
Report = dict[str, Any]


# Errors of zipfile and numpy on a damaged file. numpy has Python parse a header: what nests too deep for it is a
# RecursionError, which is a RuntimeError, or a MemoryError.
_BAD_ARRAYS = (
    OSError, EOFError, KeyError, MemoryError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile,
)  # fmt: skip


def read_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of an uncompressed `.npz`; allocate nothing for a header that states too much."""
    import numpy as np
    from numpy.lib import format as npy

    arrays: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its arrays state more bytes than the file has")
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    raise ValueError("an array is compressed")
                data = io.BytesIO(archive.read(member))
                reader = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(data)]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Python's on the header
                    shape, column_order, dtype = reader(data)
                left = member.file_size - data.tell()
                if dtype.kind not in "biuf" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != left:
                    raise ValueError("an array's header does not fit its bytes")
                array = np.frombuffer(data.getbuffer()[data.tell() :], dtype)
                arrays[member.filename.removesuffix(".npy")] = array.reshape(shape, order="F" if column_order else "C")
    except _BAD_ARRAYS as error:
        why = str(error).split("\n")[0][:200] or type(error).__name__
        raise Fault(ALTERED, f"{path.name} is not a sample.", why) from error
    return arrays


Run = Callable[[dict[str, Any]], dict[str, Any]]

# TF32 would round fp32 products to 10 bits and miss the tolerance.
_CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})
_CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
TENSORRT = "TensorrtExecutionProvider"
PROVIDERS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "cpu": [_CPU],
    "cuda": [_CUDA, _CPU],
    "tensorrt": [(TENSORRT, {}), _CUDA, _CPU],
}

_NO_KERNEL = "Could not find an implementation"  # onnxruntime's message for an element type that it cannot compute in


def _every(*parts: Sequence[str]) -> list[str]:
    """List all combinations of one word from each part."""
    return ["".join(words) for words in product(*parts)]


# The operators of the CPU kernel libraries. Without such a library a model uses its ONNX functions.
KERNELS = (
    *_every(["WindowedAttention"], ["", "Mask"], ["", "Bias"], ["", "Xpos"]),
    *_every(["GroupedWindowedAttention", "GlobalAttention"], ["", "Mask"], ["", "Softcap"], ["", "Sinks"]),
    *_every(["AFTLocal"], ["", "Causal"], ["", "Mask"]),
    *_every(["WindowedAttention"], ["Step", "Chunk"], ["", "Xpos"]),
    *_every(["GroupedWindowedAttention"], ["Step", "Chunk"], ["", "Softcap"], ["", "Sinks"]),
    *("ReadStreams", "ReadStreamsNorm", "MixStreams", "MixReadStreamsNorm"),
    *("AddToStreams", "BeginStreams", "EndStreams", "RotateHeads", "RotatePairs"),
    *("GatedGelu", "GatedGeluTanh", "GatedSilu"),
)


def load_library(folder: Path, manifest: Report, path: str) -> Report:
    """Read a library of the bundle once and compare it with the manifest; load only the returned image.

    Returns:
        `source` (its path in the bundle), `sha256`, `image`.
    """
    [entry] = [entry for entry in manifest["files"] if entry["path"] == path]
    try:
        data = library_image.read_regular_file(folder / path)
        check_files.check_bytes(path, entry, iter([data]))
        image = library_image.loadable(data, Path(path).name)
    except OSError as error:
        raise Fault(ALTERED, f"{path} cannot be read.", str(error)) from error
    return {"source": path, "sha256": entry["sha256"], "image": image}


def check_model(path: Path) -> None:
    """Refuse an ONNX file that would never end, use all memory, or read files in other folders.

    The package judges a file by the same rules when it opens one.
    """
    what = f"{path.name} cannot be loaded."
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                judgement.judge(wire_model.read(data), size, lambda location: _size(path.parent / location))
    except judgement.Refused as error:
        raise Fault(ALTERED, what, error.why, error.fix) from error
    except (OSError, ValueError) as error:
        raise Fault(ALTERED, what, f"It is not an ONNX model: {error}.") from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def open_with_library(path: Path, threads: int | None, library: Report) -> tuple[Run, Callable[[], list[str]]]:
    """Open an ONNX file on the CPU with a library of compiled kernels.

    Returns:
        A function from inputs to outputs, and one that ends the session's profile and names the kernels that ran.
    """
    check_model(path)
    ort = _onnxruntime()
    folder = tempfile.TemporaryDirectory(prefix="localattn-")
    try:
        session = _session(ort, path, "cpu", threads, library["image"], os.path.join(folder.name, "profile"))  # noqa: PTH118
    except Exception as error:
        what = f"onnxruntime {ort.__version__} does not load {path.name} with {Path(library['source']).name}."
        raise Fault(MISSING, what, _one_line(error).replace(library["image"], library["source"])) from error

    def kernels() -> list[str]:
        with folder:
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        ran = {event["args"].get("op_name") for event in events if event.get("cat") == "Node"}
        return [name for name in KERNELS if name in ran]

    return _runner(session), kernels


def _onnxruntime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # without this it writes files into the user's cache on import
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise Fault(MISSING, "onnxruntime cannot be imported.", str(error), "pip install onnxruntime") from error
    return ort


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:2000]  # a long path may precede the reason


def open_onnx(path: Path, provider: str, threads: int | None) -> tuple[str, Run]:
    """Open an ONNX file in onnxruntime; return the provider that really runs, and a function from inputs to outputs."""
    check_model(path)
    ort = _onnxruntime()
    wanted = ["cuda", "cpu"] if provider == "auto" else [provider]
    reason = ""
    for name in wanted:
        first = PROVIDERS[name][0][0]
        if first not in ort.get_available_providers():
            reason = f"onnxruntime {ort.__version__} here was built without {first}."
            continue
        try:
            session = _session(ort, path, name, threads)
        except Exception as error:
            reason = _one_line(error)
            continue
        if session.get_providers()[0] == first:
            return name, _runner(session)
        reason = f"{first} did not start."
    if wanted[-1] == "cpu" and _NO_KERNEL in reason:
        what = f"onnxruntime {ort.__version__} lacks kernels for {path.name} on the CPU. A bf16 model needs a GPU."
        raise Fault(MISSING, what, reason, "Use --provider cuda.")
    if wanted[-1] == "cpu":
        raise Fault(ALTERED, f"onnxruntime {ort.__version__} does not load {path.name}.", reason, _too_new(reason))
    raise Fault(
        MISSING,
        f"The provider {provider!r} does not run on this device.",
        reason,
        "Use --provider cpu, or install what the provider needs.",
    )


def _too_new(reason: str) -> str:
    """Return advice if onnxruntime refuses a file because it is too new."""
    if "Only 4b quantization is supported" in reason:  # matrices in blocks of 8 bits
        return "Update onnxruntime to 1.22 or later, or export the model again with --weight-dtype int8-dynamic."
    newest = re.search(r"max supported IR version: (\d+)|till opset (\d+)", reason)
    if newest is None:
        return "Update onnxruntime."
    opset = newest[2] or {"8": "18", "9": "20"}.get(newest[1], "22")
    return f"Update onnxruntime, or export the model again with --opset {opset}, and make the bundle again."


def _runner(session: Any) -> Run:
    outputs = [value.name for value in session.get_outputs()]
    return lambda inputs: dict(zip(outputs, session.run(outputs, inputs), strict=True))


def _session(ort: Any, path: Path, name: str, threads: int | None, library: str = "", profile: str = "") -> Any:
    options = ort.SessionOptions()
    if library:
        options.register_custom_ops_library(library)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    options.log_severity_level = 4  # onnxruntime also raises its messages
    ort.set_default_logger_severity(4)
    if threads is not None:
        options.intra_op_num_threads = threads
    if name != "cpu" and hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()
    model: str | bytes = os.fspath(path)
    providers = list(PROVIDERS[name])
    if name == "tensorrt":
        model, providers[0] = _for_tensorrt(path)
    session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
    session.disable_fallback()
    return session


def _for_tensorrt(path: Path) -> tuple[bytes, tuple[str, dict[str, str]]]:
    """Return the model and provider options for onnxruntime's TensorRT provider.

    The model is a copy with its ONNX functions inlined, because the provider refuses calls of them, and all weights
    inside. The options allow the 16-bit types of the weights.
    """
    import onnx
    import onnx.inliner

    model = onnx.inliner.inline_local_functions(onnx.load(os.fspath(path)))
    types = {tensor.data_type for tensor in model.graph.initializer}
    by_name = {"trt_fp16_enable": onnx.TensorProto.FLOAT16, "trt_bf16_enable": onnx.TensorProto.BFLOAT16}
    return model.SerializeToString(), (TENSORRT, {option: "True" for option, kind in by_name.items() if kind in types})


def open_engine(path: Path, model: Report, plugins: list[Report]) -> tuple[str, Run, Report]:
    """Open a TensorRT engine with `run_engine`; return its backend, a function that runs it, and its plugin library."""
    if TYPE_CHECKING or __package__:
        from . import run_engine
    else:
        run_engine = _script("run_engine")
    try:
        return str(model["backend"]), *run_engine.open_engine(path, model, plugins)
    except run_engine.NotHere as error:
        raise Fault(MISSING, f"{path.name} does not run on this device.", str(error)) from error
    except run_engine.Refused as error:
        raise Fault(ALTERED, f"{path.name} does not load.", str(error)) from error


def compare(actual: Any, expected: Any, tolerance: Report) -> Report:
    """Compare an output with the expected one, by the same code as the package."""
    if TYPE_CHECKING or __package__:
        from ....core import closeness
    else:
        closeness = _script("closeness")
    import numpy as np

    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or not expected.size:
        return {"passed": False, "why": f"shape {list(actual.shape)}, expected {list(expected.shape)}"}
    atol, rtol, cosine = tolerance["atol"], tolerance["rtol"], tolerance["cosine"]
    figures = closeness.measure(actual, expected, atol, rtol)
    found = results.verdict(figures, closeness.accepts(figures, atol, rtol, cosine), tolerance)
    return found | {"proves_nothing": closeness.proves_nothing(figures, atol, rtol, cosine)}


def run_model(
    folder: Path, manifest: Report, model: Report, provider: str, threads: int | None, kernels: str = ""
) -> list[Report]:
    """Run a model's samples, with `kernels` on the CPU if such a library is named; return a row for each output.

    The entry `kernels` of a row states what computed the attention: `source` ("ONNX functions", "engine", or a
    library's path), `sha256` of the library, and its `ops` that really ran.
    """
    path = folder / model["path"]
    ran: Callable[[], list[str]] = list
    library: Report = {}
    if kernels:
        library = load_library(folder, manifest, kernels)
        where = f"cpu, {kernels}"
        run, ran = open_with_library(path, threads, library)
    elif model["kind"] == "onnx":
        where, run = open_onnx(path, provider, threads)
    else:
        plugins = [load_library(folder, manifest, plugin) for plugin in model["plugins"]]
        where, run, library = open_engine(path, model, plugins)
    rows: list[Report] = []
    for sample in manifest["samples"]:
        if sample["model"] != model["samples_of"]:
            continue
        expected = read_arrays(folder / sample["outputs"])
        try:
            actual = run(read_arrays(folder / sample["inputs"]))
        except Fault:
            raise
        except Exception as error:
            raise Fault(ALTERED, f"{path.name} did not run on {sample['inputs']}.", _one_line(error)) from error
        place = {"model": model["path"], "provider": where, "sample": sample["inputs"]}
        place["tolerance"] = results.unusual_tolerance(model)
        if not expected:
            rows.append(place | results.NO_OUTPUTS)
        for name, wanted in expected.items():
            row = place | {"output": name, "dtype": str(wanted.dtype)}
            found = {"passed": False, "why": "the model has no such output"}
            if name in actual:
                found = compare(actual[name], wanted, model["tolerance"])
            rows.append(row | found)
    source = library.get("source") or ("ONNX functions" if model["kind"] == "onnx" else "engine")
    computed = {"source": source, "sha256": library.get("sha256", ""), "ops": library.get("ops") or ran()}
    return results.that_prove_something([row | {"kernels": computed} for row in rows])


def run_bundle(
    folder: Path,
    manifest: Report,
    only: str | None = None,
    provider: str = "auto",
    threads: int | None = None,
    *,
    libraries: bool = False,
) -> Report:
    """Run the samples of every model (or of `only`, its path) of a bundle whose files were checked.

    Libraries of the bundle are code, and are loaded only with `libraries`.

    Returns:
        `code` (an exit code), `rows` (one a sample and output), `not_run` (what could not run here, and why),
        `libraries_not_run` (the libraries that were not loaded), `no_samples` (models without samples to run).
    """
    wanted = [model for model in manifest["models"] if only in (None, model["path"], Path(model["path"]).name)]
    if only is not None and not wanted:
        known = ", ".join(model["path"] for model in manifest["models"])
        raise Fault(NO_BUNDLE, f"The bundle has no model {only!r}.", f"It has: {known}.")
    try:
        import numpy  # noqa: F401 - one clear line instead of a traceback in the middle of a run
    except ImportError as error:
        raise Fault(MISSING, "numpy cannot be imported.", str(error), "python3 -m pip install numpy") from error
    rows: list[Report] = []
    not_run: list[Report] = []
    left_alone = [] if libraries else [library for model in wanted for library in _for_here(model)]
    for model in wanted:
        takes_kernels = libraries and model["kind"] == "onnx" and provider in ("auto", "cpu")
        for kernels in ("", *(_for_here(model) if takes_kernels else ())):
            try:
                if model["kind"] == "engine" and model["plugins"] and not libraries:
                    what = f"{model['path']} needs a plugin library from the bundle. {results.ONLY_IF_TOLD}"
                    raise Fault(MISSING, what)
                rows += run_model(folder, manifest, model, provider, threads, kernels)
            except Fault as fault:
                not_run.append(_not_run(model["path"], model["kind"], fault))
    not_run += [
        _not_run(library, "library", Fault(ALTERED, f"{library} was loaded, but has no kernel that a model uses."))
        for library in sorted(_without_kernels(rows))
    ]
    ran = {row["model"] for row in rows}
    # A bundle may contain an engine for each kind of GPU; one that runs is enough.
    an_engine_ran = any(model["kind"] == "engine" and model["path"] in ran for model in wanted)
    codes = {entry["code"] for entry in not_run if not (an_engine_ran and _for_other_gpu(entry))}
    failed = ALTERED in codes or not all(row["passed"] for row in rows)
    code = ALTERED if failed else MISSING if MISSING in codes else 0
    have_samples = {sample["model"] for sample in manifest["samples"]}
    found: Report = {
        "passed": code == 0,
        "code": code,
        "rows": rows,
        "not_run": not_run,
        "libraries_not_run": sorted(set(left_alone)),
    }
    found["no_samples"] = [model["path"] for model in wanted if model["samples_of"] not in have_samples]
    return nothing_run(manifest) | found


def nothing_run(manifest: Report) -> Report:
    """Return the report for intact files without a run."""
    return {"passed": True, "code": 0, "rows": [], "not_run": [], "samples": len(manifest["samples"])}


def _not_run(path: str, kind: str, fault: Fault) -> Report:
    reason = " ".join(line for line in (fault.what, fault.why, fault.fix) if line)
    return {"model": path, "kind": kind, "code": fault.code, "why": reason}


def _without_kernels(rows: list[Report]) -> set[str]:
    """List the libraries that computed no node of any model."""
    loaded = [row["kernels"] for row in rows if row["kernels"]["sha256"]]
    used = {library["source"] for library in loaded if library["ops"]}
    return {library["source"] for library in loaded} - used


def _for_here(model: Report) -> list[str]:
    """List the model's libraries for this processor."""
    return [path for path in model["plugins"] if Path(path).parent.name == results.arch()]


def _for_other_gpu(entry: Report) -> bool:
    return entry["kind"] == "engine" and entry["code"] == MISSING and "another GPU" in entry["why"]


def main() -> int:
    """Run the script's command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Check a bundle and run its samples on this device.")
    parser.add_argument("--model", help="run only this model of the manifest")
    parser.add_argument("--provider", default="auto", choices=["auto", "cpu", "cuda", "tensorrt"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--files-only", action="store_true", help="check the SHA-256 of every file; run nothing")
    parser.add_argument("--run-libraries", action="store_true", help="also run with the bundle's libraries")
    parser.add_argument(
        "--manifest-sha256", help="refuse the bundle unless its manifest has this SHA-256, which allows its libraries"
    )
    parser.add_argument("--format", default="console", choices=["console", "json"])
    options = parser.parse_args()
    folder = Path(__file__).resolve().parent
    try:
        text = check_files.read_manifest(folder)
        manifest, digest = check_files.read_expected(text, options.manifest_sha256)
        check_files.check_folder(folder, manifest)
        report = nothing_run(manifest)
        if not options.files_only:
            libraries = options.run_libraries or options.manifest_sha256 is not None
            report = run_bundle(folder, manifest, options.model, options.provider, options.threads, libraries=libraries)
    except Fault as fault:
        return _tell(fault)
    except OSError as error:
        return _tell(Fault(NO_BUNDLE, "The bundle cannot be read.", str(error)))
    if options.format == "json":
        print(json.dumps({"bundle": manifest["name"], "manifest_sha256": digest, **report}, indent=2))
    else:
        lines = [] if options.files_only else results.report_lines(report)
        print(f"{manifest['name']}: {len(manifest['files'])} files are intact.", *lines, sep="\n")
    return int(report["code"])


def _tell(fault: Fault) -> int:
    """Print a fault on stderr; return the exit code for it."""
    lines = [f"Error: {fault.what}", *[f"  {line}" for line in (fault.why, fault.fix) if line]]
    print(*map(results.shown, lines), sep="\n", file=sys.stderr)
    return fault.code


if __name__ == "__main__":
    sys.exit(main())
