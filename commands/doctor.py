"""Define `localattn doctor`: what is installed, what each command can do here, and how to add the rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..core.errors import LocalAttnError, MissingDependency, UsageError
from .parts.console import print_json, progress, say, say_outcome, say_page, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.storage.library_store import Library, LibraryKind
    from ..doctor.abilities import Verdict
    from ..doctor.probes import Finding, Looked, Probe
    from ..plugins.library.sidecar import Arch


def doctor(
    require: Annotated[
        str, typer.Option(help="Commands that must work here, such as export,build; else exit code 3.")
    ] = "",
    output_format: Annotated[
        Literal["console", "json", "md"], typer.Option("--format", help="console, json, or md for a bug report.")
    ] = "console",
) -> None:
    """Look at this machine: packages, providers that really start, TensorRT, driver, headers, compilers.

    Then report for each command whether it can work here, and which commands would add what is missing.
    """
    with progress() as step:
        step("Trying each library in its own process")
        from ..doctor.abilities import ABILITIES, judge
        from ..doctor.probes import PROBES
        from ..doctor.report import as_dict, as_markdown
        from ..doctor.run_probes import run_probes

        wanted = _wanted(require, [ability.command for ability in ABILITIES])
        findings = run_probes((*PROBES, *_plugin_probes()))
        verdicts = judge(findings, ABILITIES)
    if output_format == "json":
        print_json(as_dict(findings, verdicts))
    elif output_format == "md":
        say_page(as_markdown(findings, verdicts))
    else:
        _print(findings, verdicts)
    _insist(wanted, verdicts)
    if output_format == "console":
        suggest("localattn", "demo")


def _wanted(require: str, commands: Sequence[str]) -> dict[str, list[str]]:
    """Return the abilities that each name of `--require` stands for: those of a command, or one in full.

    Raises:
        UsageError: a name that is neither.
    """
    wanted = {}
    for name in [part.strip() for part in require.split(",") if part.strip()]:
        wanted[name] = [command for command in commands if name in (command, command.split()[0])]
        if not wanted[name]:
            known = ", ".join(dict.fromkeys(command.split()[0] for command in commands))
            raise UsageError(f"--require {name!r} is not a command.", fix=f"Known: {known}.")
    return wanted


def _insist(wanted: Mapping[str, Sequence[str]], verdicts: Sequence[Verdict]) -> None:
    """Refuse to go on, with exit code 3, unless each of `wanted` can work in one of its ways.

    Raises:
        MissingDependency: one of them cannot.
    """
    for name, commands in wanted.items():
        ways = [verdict for verdict in verdicts if verdict.ability.command in commands]
        if not any(verdict.able for verdict in ways):
            why = f"It lacks {', '.join(ways[0].lacks)}."
            raise MissingDependency(f"localattn {name} cannot work here.", why=why, fix=" && ".join(ways[0].add))


def _plugin_probes() -> tuple[Probe, ...]:
    """Make the probes for what the plugin library needs, by the code that builds it."""
    from ..doctor.install_hints import pip_install
    from ..doctor.probes import Probe
    from ..plugins.library.sidecar import ARCHITECTURES

    zig, headers, library = pip_install("ziglang"), pip_install("kernel-lens"), "localattn plugin build"
    building = partial(Probe, area="plugin", serves="building the plugin library")
    compilers = [
        building(f"compiler-{arch}", f"C++ compiler for {arch}", look=_safely(partial(_compiler, arch)), add=zig)
        for arch in ARCHITECTURES
    ]
    return (
        building("headers", "Headers", look=_safely(_headers), add=headers),
        *compilers,
        Probe("library", "Plugin library", "plugin", "the kernel in TensorRT", look=_safely(_library), add=library),
        _kernels_probe(),
        _cpu_library_probe(),
    )


def _safely(look: Callable[[], Looked]) -> Callable[[], Looked]:
    """Wrap a look, so that errors of this package become its result."""

    def safe() -> Looked:
        try:
            return look()
        except LocalAttnError as error:
            return _told(error)

    return safe


def _told(error: LocalAttnError) -> Looked:
    """Turn an error into what a look finds."""
    detail = " ".join(line for line in (error.what, error.why) if line)
    return ("missing" if isinstance(error, MissingDependency) else "broken"), "", detail, ()


def _headers() -> Looked:
    from ..plugins.library.headers import find_cuda_headers, find_tensorrt_headers
    from ..plugins.library.sidecar import host_arch

    tensorrt, cuda = find_tensorrt_headers(host_arch()), find_cuda_headers(host_arch())
    return "ok", tensorrt.version, f"TensorRT {tensorrt.describe()}", (f"CUDA {cuda.describe()}",)


def _compiler(arch: Arch) -> Looked:
    from ..plugins.compilers import find_compiler

    compiler = find_compiler(arch)
    return "ok", "", f"{' '.join(compiler.command)}: {compiler.version}", ()


def _library() -> Looked:
    from ..core.storage.library_store import TENSORRT_PLUGIN, candidates
    from ..plugins.library.sidecar import parse_sidecar

    built = [parse_sidecar(found.sidecar, found.path) for found in candidates(TENSORRT_PLUGIN)]
    items = [
        f"{sidecar.path}: {sidecar.arch}, {len(sidecar.kernels)} kernels, {','.join(sidecar.targets)}"
        for sidecar in built
    ]
    return ("ok", "", f"{len(built)} installed or in your cache", tuple(items)) if built else ("missing", "", _NONE, ())


def _kernels_probe() -> Probe:
    """Make the probe that loads kernels of the newest plugin library onto the GPU, from machine code or from PTX."""
    from ..core.storage.library_store import TENSORRT_PLUGIN
    from ..doctor.probes import Probe
    from ..plugins.library.sidecar import parse_sidecar

    def some_kernels(library: Library) -> list[str]:
        """Name one head size for each element type: all sizes are compiled for the same GPUs."""
        head_dims = {
            kernel.dtype: kernel.head_dim
            for kernel in parse_sidecar(library.sidecar, library.path).kernels
            if kernel.op_type == _PLAIN and not kernel.has_shared_qk
        }
        return [f"{dtype}:{head_dim}" for dtype, head_dim in head_dims.items()]

    def absent() -> Looked:
        return "missing", "", "There is no plugin library of this release in your cache.", ()

    ask, look = _load_in_child("kernels", TENSORRT_PLUGIN, absent, some_kernels)
    title, serves = "Plugin kernels on this GPU", "machine code of this GPU, or PTX"
    add = f"{TENSORRT_PLUGIN.how_to_build} --target sm_XX, for the compute capability X.X that the driver shows"
    return Probe("kernels", title, "plugin", serves, ask, look, add=add)


def _cpu_library_probe() -> Probe:
    """Make the probe that loads, if there is one, the library that sessions on the CPU load automatically."""
    from ..core.storage.library_store import CPU_KERNELS, candidates
    from ..doctor.probes import Probe
    from .parts.plugins.kernels_in_use import how_to_add

    command = how_to_add() or CPU_KERNELS.how_to_build

    def absent() -> Looked:
        found = tuple(str(stored.path) for stored in candidates(CPU_KERNELS))
        why = "The libraries here are of another release or for another processor." if found else _NONE
        return "missing", "", f"{why} ONNX functions compute the attention. To add them: {command}", found

    ask, look = _load_in_child("library", CPU_KERNELS, absent, lambda library: [])
    title, serves = "Compiled CPU kernels", "faster attention on the CPU"
    return Probe("cpu-library", title, "engines", serves, ask, look, add=command)


def _load_in_child(
    name: str, kind: LibraryKind, absent: Callable[[], Looked], arguments: Callable[[Library], list[str]]
) -> tuple[tuple[str, ...], Callable[[], Looked] | None]:
    """Let a child process load the newest library of a kind; return `ask` and `look` of the probe, one of them empty.

    Args:
        name: what the child is asked to do, the first word of its arguments.
        kind: the kind of library.
        absent: tells that there is none.
        arguments: returns further arguments of the child for a library.
    """
    from ..core.storage.library_image import for_child
    from ..core.storage.library_store import find

    try:
        library = find(kind)
        if library is None:
            return (), _safely(absent)
        return (name, for_child(library.image), str(library.path), *arguments(library)), None
    except LocalAttnError as error:
        found = _told(error)
        return (), lambda: found


_NONE = "No library is installed or in your cache; a library built with --output is used only when named."
_PLAIN = "WindowedAttention"  # the op type without mask and bias

_AREAS = {
    "system": "This machine",
    "python": "Exporting",
    "engines": "Running",
    "gpu": "GPU",
    "plugin": "The TensorRT plugin",
}
_COLOURS = {"ok": "green", "limited": "yellow", "missing": "yellow", "broken": "red"}


def _print(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> None:
    from ..doctor.report import SIGNS, commands_to_add

    width = max(len(finding.title) for finding in findings)
    for area, title in _AREAS.items():
        say(f"{title}:")
        for finding in (finding for finding in findings if finding.area == area):
            word = "" if finding.works else f"{finding.status.upper()}: "
            said = "  ".join(part for part in (finding.version, finding.detail) if part)
            line = f"{finding.title:<{width}}  {word}{said}"
            say_outcome(SIGNS[finding.status], _COLOURS[finding.status], line)
            for item in finding.items:
                say(f"    {'':<{width}}  {item}")
    say("Commands:")
    width = max(len(verdict.ability.command) for verdict in verdicts)
    for verdict in verdicts:
        status = "ok" if verdict.able else "missing"
        lacks = f": lacks {', '.join(verdict.lacks)}" if verdict.lacks else ""
        line = f"{verdict.ability.command:<{width}}  {verdict.ability.does}{lacks}"
        say_outcome(SIGNS[status], _COLOURS[status], line)
    commands = commands_to_add(verdicts)
    if commands:
        say("To add what is missing:")
        for command in commands:
            say(f"  {command}")
