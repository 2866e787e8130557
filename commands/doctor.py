"""Define `localattn doctor`: what is installed, what each command can do here, and how to add the rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..core.errors import LocalAttnError, MissingDependency, UsageError
from .parts.console import print_json, progress, say, styled, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..doctor.abilities import Verdict
    from ..doctor.probes import Finding, Probe, Status
    from ..plugins.library.facts import Arch

    Looked = tuple[Status, str, str, tuple[str, ...]]


def doctor(
    require: Annotated[
        str, typer.Option(help="Commands that must be able to work, as export,build; else exit code 3.")
    ] = "",
    output_format: Annotated[
        Literal["console", "json", "md"], typer.Option("--format", help="console, json, or md for a bug report.")
    ] = "console",
) -> None:
    """Look at this machine: packages, providers that really start, TensorRT, driver, headers, compilers.

    Then report for each command whether it can work here, and which commands would add what is missing.
    """
    with progress() as step:
        step("Looking; each library is tried in a process of its own")
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
        say(as_markdown(findings, verdicts))
    else:
        _print(findings, verdicts)
    _insist(wanted, verdicts)
    if output_format == "console":
        suggest("localattn", "demo")


def _wanted(require: str, commands: Sequence[str]) -> list[str]:
    """Split `--require` into its names: commands, or abilities in full.

    Raises:
        UsageError: a name that is neither.
    """
    names = [name.strip() for name in require.split(",") if name.strip()]
    for name in names:
        if not any(command == name or command.split()[0] == name for command in commands):
            known = ", ".join(dict.fromkeys(command.split()[0] for command in commands))
            raise UsageError(f"--require {name!r} is no command.", fix=f"Known: {known}.")
    return names


def _insist(wanted: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Refuse to go on, with exit code 3, unless each of `wanted` can work in one of its ways.

    Raises:
        MissingDependency: one of them cannot.
    """
    for name in wanted:
        ways = [v for v in verdicts if v.ability.command == name or v.ability.command.split()[0] == name]
        if not any(verdict.able for verdict in ways):
            first = ways[0]
            why = f"It lacks {', '.join(first.lacks)}."
            raise MissingDependency(f"localattn {name} cannot work here.", why=why, fix=" && ".join(first.add))


def _plugin_probes() -> tuple[Probe, ...]:
    """Make the probes for what the plugin library needs, by the code that builds it."""
    from ..doctor.install_hints import pip_install
    from ..doctor.probes import Probe
    from ..plugins.library.facts import ARCHITECTURES

    compilers = tuple(
        Probe(
            f"compiler-{arch}",
            f"C++ compiler for {arch}",
            "plugin",
            "building the plugin library",
            look=_safely(partial(_compiler, arch)),
            add=pip_install("ziglang"),
        )
        for arch in ARCHITECTURES
    )
    headers, library = pip_install("kernel-lens"), "localattn plugin build"
    return (
        Probe("headers", "Headers", "plugin", "building the plugin library", look=_safely(_headers), add=headers),
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
            detail = " ".join(line for line in (error.what, error.why) if line)
            return "missing" if isinstance(error, MissingDependency) else "broken", "", detail, ()

    return safe


def _headers() -> Looked:
    from ..plugins.library.facts import host_arch
    from ..plugins.library.headers import find_cuda_headers, find_tensorrt_headers

    tensorrt, cuda = find_tensorrt_headers(host_arch()), find_cuda_headers(host_arch())
    return "ok", tensorrt.version, f"TensorRT {tensorrt.describe()}", (f"CUDA {cuda.describe()}",)


def _compiler(arch: Arch) -> Looked:
    from ..plugins.compilers import find_compiler

    compiler = find_compiler(arch)
    return "ok", "", f"{' '.join(compiler.command)}: {compiler.version}", ()


def _library() -> Looked:
    from ..core.storage.library_store import TENSORRT_PLUGIN, candidates
    from ..plugins.library.facts import parse_facts

    built = [parse_facts(found.facts, found.path) for found in candidates(TENSORRT_PLUGIN)]
    items = [f"{facts.path}: {facts.arch}, {len(facts.kernels)} kernels, {','.join(facts.targets)}" for facts in built]
    return ("ok", "", f"{len(built)} installed or in your cache", tuple(items)) if built else ("missing", "", _NONE, ())


def _kernels_probe() -> Probe:
    """Make the probe that loads kernels of the newest plugin library onto the GPU: machine code of it, or PTX?"""
    from ..core.storage.library_image import for_child
    from ..core.storage.library_store import TENSORRT_PLUGIN, find
    from ..doctor.probes import Probe
    from ..plugins.library.facts import parse_facts

    library, wrong, kernels = None, None, {}
    try:
        library = find(TENSORRT_PLUGIN)
        if library is not None:
            facts = parse_facts(library.facts, library.path)
            # One head size an element type shows it: all of them are compiled for the same GPUs.
            kernels = {
                kernel.dtype: kernel.head_dim
                for kernel in facts.kernels
                if kernel.op_type in _PLAIN and not kernel.has_shared_qk
            }
    except LocalAttnError as error:
        wrong = error

    def look() -> Looked:
        if wrong is not None:
            raise wrong
        return "missing", "", "There is no plugin library of this release in your cache.", ()

    ask: tuple[str, ...] = ()
    if library is not None:
        names = [f"{dtype}:{head_dim}" for dtype, head_dim in kernels.items()]
        ask = ("kernels", for_child(library.image), str(library.path), *names)
    title, serves = "Plugin kernels on this GPU", "machine code of this GPU, or PTX"
    add = f"{TENSORRT_PLUGIN.how_to_build} --target sm_XX, for the compute capability X.X that the driver shows"
    return Probe("kernels", title, "plugin", serves, ask, None if ask else _safely(look), add=add)


def _cpu_library_probe() -> Probe:
    """Make the probe that loads, if there is one, the library that sessions on the CPU load automatically."""
    from ..core.storage.library_image import for_child
    from ..core.storage.library_store import CPU_KERNELS, candidates, find
    from ..doctor.probes import Probe
    from .parts.plugins.kernels_in_use import how_to_add

    library, wrong, command = None, None, how_to_add() or CPU_KERNELS.how_to_build
    try:
        library = find(CPU_KERNELS)
    except LocalAttnError as error:
        wrong = error

    def look() -> Looked:
        if wrong is not None:
            raise wrong
        found = tuple(str(stored.path) for stored in candidates(CPU_KERNELS))
        why = "Those here are of another release, or for another processor." if found else _NONE
        return "missing", "", f"{why} ONNX functions compute the attention. To add them: {command}", found

    ask = () if library is None else ("library", for_child(library.image), str(library.path))
    title, serves = "Compiled CPU kernels", "faster attention on the CPU"
    return Probe("cpu-library", title, "engines", serves, ask, None if ask else _safely(look), add=command)


_NONE = "There is none installed or in your cache; one built with --output is used when it is named."
_PLAIN = ("WindowedAttention",)  # the op type without mask and bias

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
            sign = styled(SIGNS[finding.status], fg=_COLOURS[finding.status])
            word = "" if finding.works else f"{finding.status.upper()}: "
            said = "  ".join(part for part in (finding.version, finding.detail) if part)
            say(f"  {sign} {finding.title:<{width}}  {word}{said}".rstrip())
            for item in finding.items:
                say(f"    {'':<{width}}  {item}")
    say("Commands:")
    width = max(len(verdict.ability.command) for verdict in verdicts)
    for verdict in verdicts:
        status = "ok" if verdict.able else "missing"
        sign = styled(SIGNS[status], fg=_COLOURS[status])
        lacks = f": lacks {', '.join(verdict.lacks)}" if verdict.lacks else ""
        say(f"  {sign} {verdict.ability.command:<{width}}  {verdict.ability.does}{lacks}")
    commands = commands_to_add(cast("list[Verdict]", list(verdicts)))
    if commands:
        say("What would add it:")
        for command in commands:
            say(f"  {command}")
