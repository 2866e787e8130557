"""Define `localattn plugin`: build libraries of attention kernels, find, show and check them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import MissingDependency, UsageError
from ..core.limits import MOST_JOBS
from ..core.storage.file_kinds import LIBRARY, REWRITTEN
from .parts.console import bytes_text, note, print_json, progress, say, suggest
from .parts.options import FormatOption
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.plugins import plugin_cpu
from .parts.plugins.newest import newest
from .parts.plugins.options import Backend, Fp32Products
from .parts.terminal.help import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.storage.library_store import Library
    from ..plugins.kernel.compile import AnySpec
    from ..plugins.kernel.targets import Target
    from ..plugins.library.registry import RegistrySummary
    from ..plugins.library.sidecar import Arch, LibrarySidecar

app = typer.Typer(
    name="plugin",
    cls=Group,
    help="Build and check libraries of compiled attention kernels: for TensorRT, and for onnxruntime on the CPU.",
    no_args_is_help=True,
)

ArchOption = Annotated[str, typer.Option("--arch", help="Processor: x86_64 or aarch64. (Default: this machine's.)")]
BackendOption = Annotated[
    Backend,
    typer.Option(
        help="The inference library; onnxruntime: on the CPU. One plugin library serves tensorrt and tensorrt-rtx."
    ),
]


@app.command()
def build(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Exported models: build only the kernels that they need."), INPUT
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="GPUs, such as sm_87,sm_90. (Default: sm_80,sm_90,sm_100; for aarch64 also sm_87,sm_110.)"),
    ] = "",
    arch: ArchOption = "",
    backend: BackendOption = "tensorrt",
    dtype: Annotated[str, typer.Option(help="Element types, from fp16,bf16,fp32,fp8. (Default: all but fp8.)")] = "",
    head_dim: Annotated[str, typer.Option(help="Head sizes, 16 to 256. (Default: 16,32,64,128,256.)")] = "",
    fp32_products: Annotated[
        Fp32Products,
        typer.Option(
            help="How fp32 is multiplied: exactly, as three TF32 products, or as one, which has fp16's precision."
        ),
    ] = "ieee",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The library to write. (Default: in the cache.)"),
        OutputPath(LIBRARY),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=MOST_JOBS, help="Kernels compiled at a time. (Default: one per processor.)")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again, and replace an existing file.")] = False,
    output_format: FormatOption = "console",
) -> None:
    """Build the plugin library, with all kernels or with those that models need.

    For TensorRT it needs Triton, a C++ compiler, and TensorRT's headers; no GPU, no CUDA toolkit, no TensorRT. Every
    library has PTX for later GPUs besides the machine code of its targets. For onnxruntime it needs the C++ compiler.
    """
    from ..core.storage.library_store import prepare_cache
    from ..plugins.kernel.targets import target as target_called
    from ..plugins.library.build import up_to_date
    from ..plugins.library.selection import default_targets, every_kernel

    if backend == "onnxruntime":
        chosen = {"Models": models, "--target": target, "--dtype": dtype, "--head-dim": head_dim, "--jobs": jobs}
        chosen["--fp32-products"] = fp32_products != "ieee"
        plugin_cpu.refuse_options(chosen)
        plugin_cpu.build(output, _arch(arch), force=force, as_json=output_format == "json")
        return
    models = models or []
    _refuse_contradictions(named=bool(models), chosen=bool(dtype or head_dim), products=fp32_products, output=output)
    chosen_arch = _arch(arch)
    targets = [target_called(name) for name in _split(target)] or default_targets(chosen_arch)
    if models:
        specs = _needed_by(models, fp32_products)
    else:
        specs = every_kernel(_split(dtype), _numbers(head_dim), fp32_products)
    path = output or prepare_cache(chosen_arch) / _file_name(models)
    sidecar = up_to_date(path, specs, targets, chosen_arch) if output is None and not force else None
    if sidecar is not None:
        note(f"{path} is up to date; --force builds it again.")
    else:
        sidecar = _built(path, specs, targets, chosen_arch, overwrite=force or output is None, jobs=jobs)
    if output is not None:
        note(f"{path} is not loaded automatically: name it with --plugin-library {path}, or build without --output.")
    if output_format == "json":
        print_json(_document(sidecar))
    else:
        _print_library(sidecar)
        suggest("localattn", "plugin", "check", *([] if output is None else [output]))


def _refuse_contradictions(*, named: bool, chosen: bool, products: str, output: Path | None) -> None:
    """Refuse options of `plugin build` that contradict each other.

    Args:
        named: whether models are given.
        chosen: whether kernels are chosen by type or head size.
        products: how fp32 is multiplied.
        output: the library to write; None for one in the cache.

    Raises:
        UsageError: some do.
    """
    if named and chosen:
        raise UsageError(
            "--dtype and --head-dim cannot be combined with models.",
            why="Models say themselves what they need.",
            fix="Leave out the one or the other.",
        )
    if products != "ieee" and output is None:
        raise UsageError(
            f"A library with --fp32-products {products} needs --output.",
            why="Commands take libraries of the cache by themselves, and their numbers are those of fp32.",
            fix="Give --output, and name the library with --plugin-library.",
        )


def _built(
    path: Path, specs: Sequence[AnySpec], targets: Sequence[Target], arch: Arch, *, overwrite: bool, jobs: int | None
) -> LibrarySidecar:
    """Build the library for TensorRT, and say with what."""
    from ..plugins.compilers import find_compiler
    from ..plugins.library.build import build_library
    from ..plugins.library.headers import find_cuda_headers, find_tensorrt_headers

    note(f"TensorRT headers {find_tensorrt_headers(arch).describe()}")
    note(f"CUDA headers {find_cuda_headers(arch).describe()}")
    note(f"Compiler {find_compiler(arch).version}")
    with progress() as step:
        return build_library(
            path, specs=specs, targets=targets, arch=arch, overwrite=overwrite, jobs=jobs, progress=step
        )


@app.command()
def path(
    arch: ArchOption = "",
    backend: BackendOption = "tensorrt",
    companion: Annotated[
        bool,
        typer.Option(
            "--companion",
            help="Print the path of the companion library, which registers the plugin in hosts that only preload "
            "libraries.",
        ),
    ] = False,
    output_format: FormatOption = "console",
) -> None:
    """Print the path of the library in the cache that was built last for a processor."""
    from ..core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN

    chosen_arch = _arch(arch)
    if companion and backend == "onnxruntime":
        raise UsageError(
            "--companion cannot be combined with --backend onnxruntime.",
            why="onnxruntime gets its library by name and needs no registration.",
            fix="Leave out --companion.",
        )
    library = newest(CPU_KERNELS if backend == "onnxruntime" else TENSORRT_PLUGIN, chosen_arch)
    found, sha256 = _companion(library) if companion else (library.path, library.sha256)
    if output_format == "json":
        print_json({"path": str(found), "sha256": sha256})
    else:
        say(str(found))


@app.command("list")
def list_libraries(
    output_format: FormatOption = "console",
) -> None:
    """Show the libraries that may be loaded automatically, the newest of each kind first, and their contents."""
    from ..core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN, candidates
    from ..plugins.cpu.sidecar import parse_sidecar as parse_cpu_sidecar
    from ..plugins.library.sidecar import parse_sidecar

    libraries = [parse_sidecar(found.sidecar, found.path) for found in candidates(TENSORRT_PLUGIN)]
    for_cpu = [parse_cpu_sidecar(found.sidecar, found.path) for found in candidates(CPU_KERNELS)]
    if output_format == "json":
        print_json([*map(_document, libraries), *map(plugin_cpu.document, for_cpu)])
        return
    if not (libraries or for_cpu):
        say("There is no plugin library in your cache. Build one with: localattn plugin build")
    for sidecar in libraries:
        _print_library(sidecar)
    for cpu_sidecar in for_cpu:
        plugin_cpu.print_library(cpu_sidecar)
    paths = [*(sidecar.path for sidecar in libraries), *(sidecar.path for sidecar in for_cpu)]
    suggest("localattn", "plugin", *(("check", paths[0]) if paths else ("build",)))


@app.command()
def check(
    library: Annotated[
        Path | None, typer.Argument(help="A plugin library. (Default: the one built last.)", show_default=False), INPUT
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(
            help="The inference library to load the plugin library into. (Default: the one it was built for.)"
        ),
    ] = None,
    output_format: FormatOption = "console",
) -> None:
    """Load a library into its runtime, and show the kernels that the runtime finds.

    That is TensorRT's plugin registry, without a GPU; or onnxruntime, where each kernel runs once.
    """
    from ..core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN, kind_of, read_named
    from ..plugins.aot.availability import why_not as why_not_ahead_of_time
    from ..plugins.library.registry import BACKENDS, load_into_registry
    from ..plugins.library.sidecar import host_arch
    from ..runtime.backends import registry as runtimes

    named_for_cpu = backend is None and library is not None and kind_of(library) is CPU_KERNELS
    if backend == "onnxruntime" or named_for_cpu:
        plugin_cpu.check(library, as_json=output_format == "json")
        return
    found = newest(TENSORRT_PLUGIN, host_arch()) if library is None else read_named(TENSORRT_PLUGIN, library)
    backends = [known for known in BACKENDS if backend is None or known == backend]
    for chosen in backends:
        runtimes.builder(chosen).prepare_plugins()
    registered = load_into_registry(found, backends)
    reason = why_not_ahead_of_time()
    if output_format == "json":
        ahead_of_time = {"usable": not reason, "why_not": reason}
        print_json({"path": str(found.path), **asdict(registered), "ahead_of_time": ahead_of_time})
    else:
        _print_registry(found.path, registered, reason)
        suggest("localattn", "doctor")


@app.command()
def rewrite(
    model: Annotated[Path, typer.Argument(help="An exported model.onnx.", show_default=False), INPUT],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file to write the rewritten model to."), OutputPath(REWRITTEN)
    ],
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Rewrite a model for onnxruntime's TensorRT provider, which only uses plugins of the domain trt.plugins.

    The attention nodes move there and lose their ONNX function: the file then runs nowhere without the plugin. All
    other functions are inlined, because the provider accepts none.
    """
    from ..plugins.library.tensorrt_provider import rewrite_for_provider

    rewritten = rewrite_for_provider(model, output, overwrite=force)
    if output_format == "json":
        print_json({"path": str(output), "nodes": rewritten.nodes, "kept": rewritten.kept, "sha256": rewritten.sha256})
        return
    say(f"{output}  {len(rewritten.nodes)} attention node(s) in the domain trt.plugins")
    for name, why in rewritten.kept.items():
        say(f"  kept    {name} as an ONNX function: no kernel computes it: {why}")
    say("Before onnxruntime opens it, load the plugin library into TensorRT in the same process:")
    say("  tensorrt.get_plugin_registry().load_library(PATH), where `localattn plugin path` prints PATH")


def _needed_by(models: list[Path], fp32_products: Fp32Products) -> list[AnySpec]:
    """Return the kernels that the models need together.

    Raises:
        UsageError: they need none.
    """
    from ..plugins.library.selection import needed_by, without_kernel

    specs = list(dict.fromkeys(spec for model in models for spec in needed_by(model, fp32_products)))
    if not specs:
        reasons = {why for model in models for why in without_kernel(model).values()}
        why = ["No node of the models is an attention node that a kernel can compute", *sorted(reasons)]
        raise UsageError("These models need no plugin.", why=f"{'; '.join(why)}.")
    return specs


def _file_name(models: list[Path]) -> str:
    """Return the name of a library in the cache: one for the full set, one for each set of models."""
    from ..core.storage.library_store import TENSORRT_PLUGIN

    name = Path(TENSORRT_PLUGIN.file_name)
    return f"{name.stem}-{'-'.join(model.stem for model in models)[:80]}{name.suffix}" if models else str(name)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _split(text)]
    except ValueError:
        raise UsageError(
            f"--head-dim {text} is not a list of numbers.", fix="Write numbers with commas, such as 64,128."
        ) from None


def _arch(text: str) -> Arch:
    from ..plugins.library.sidecar import ARCHITECTURES, host_arch

    if not text:
        return host_arch()
    for arch in ARCHITECTURES:
        if arch == text:
            return arch
    raise UsageError(f"Unknown processor {text!r}.", fix=f"Known: {', '.join(ARCHITECTURES)}.")


def _companion(library: Library) -> tuple[Path, str]:
    """Return path and SHA-256 of a plugin library's companion library, which registers it.

    Raises:
        MissingDependency: there is no companion that was built with it.
    """
    from ..plugins.library.sidecar import companion_path, parse_sidecar

    sidecar = parse_sidecar(library.sidecar, library.path)
    path = companion_path(library.path)
    if sidecar.companion is None or not sidecar.has_companion():
        raise MissingDependency(
            f"{library.path} has no companion next to it.",
            why=f"{path.name} is missing, or was not built together with it.",
            fix="Build both libraries again: localattn plugin build --force",
        )
    return path, sidecar.companion.sha256


def _document(sidecar: LibrarySidecar) -> dict[str, Any]:
    return {"path": str(sidecar.path), **sidecar.model_dump(mode="json")}


def _print_library(sidecar: LibrarySidecar) -> None:
    say(f"{sidecar.path}  {sidecar.arch}, {bytes_text(sidecar.bytes)}, {len(sidecar.kernels)} kernels")
    alike: dict[tuple[str, str], list[str]] = {}
    for op_type in dict.fromkeys(kernel.op_type for kernel in sidecar.kernels):
        for dtype in dict.fromkeys(kernel.dtype for kernel in sidecar.kernels):
            mine = [kernel for kernel in sidecar.kernels if (kernel.op_type, kernel.dtype) == (op_type, dtype)]
            if mine:
                sizes = ", ".join(dict.fromkeys(str(kernel.head_dim) for kernel in mine if kernel.head_dim))
                alike.setdefault((op_type, sizes), []).append(dtype)
    for (op_type, sizes), dtypes in alike.items():
        say(f"  kernel  {op_type}: {', '.join(dtypes)}" + (f"; head sizes {sizes}" if sizes else ""))
    for machine_code, ptx in dict.fromkeys((tuple(k.machine_code), tuple(k.ptx)) for k in sidecar.kernels):
        say(f"  for     machine code of {', '.join(machine_code)}; PTX of {', '.join(ptx)} for later GPUs")
    say(
        f"  built   {sidecar.created}, TensorRT headers {sidecar.tensorrt_headers}, {sidecar.compiler}, "
        f"glibc ≥ {sidecar.glibc}"
    )
    if sidecar.companion is not None:
        say(f"  with    {sidecar.companion.name} registers it in hosts that only open or preload libraries")
    say(f"  sha256  {sidecar.sha256}")


def _print_registry(library: Path, registry: RegistrySummary, reason: str) -> None:
    say(f"{library} in {registry.backend} {registry.version}:")
    for creator in registry.creators:
        say(f"  {creator.name}  version {creator.version}, namespace {creator.namespace}")
    if registry.creators:
        attributes = dict.fromkeys(attribute for creator in registry.creators for attribute in creator.attributes)
        listed = (f"{a.name} {a.type}" + (f"[{a.length}]" if a.length > 1 else "") for a in attributes)
        say(f"  attributes, each of some op types: {', '.join(listed)}")
    say(f"Ahead-of-time plugin, without a library: {'not here: ' + reason if reason else 'usable'}")
