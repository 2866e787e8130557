"""Define `localattn bundle`: pack a model with everything a device needs, and check such a bundle.

`bundle MODEL …` means `bundle create MODEL …`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..core.storage.file_kinds import BUNDLE
from .parts.console import bytes_text, print_json, print_notes, progress, say, suggest
from .parts.declared import from_fields
from .parts.options import FormatOption, ThreadsOption, number_option, seed_option, size_option
from .parts.paths import INPUT, OutputPath
from .parts.terminal.help import Group

if TYPE_CHECKING:
    from ..runtime.bundle.create import CreatedBundle
    from ..runtime.bundle.triton import Serving


# Where npm installs it, relative to the folder that npm runs in.
NPM_FOLDER = Path("node_modules/onnxruntime-web")


class _CreateByDefault(Group):
    """Group whose first word may be left out: then it is `create`, whose help is shown with the group's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["create", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the group, then that of `create`."""
        super().format_help(ctx, formatter)
        create = self.commands["create"]
        create.format_help(create.make_context("create", [], parent=ctx, resilient_parsing=True), formatter)


app = typer.Typer(
    name="bundle",
    cls=_CreateByDefault,
    help="Pack a model with everything a device needs (`bundle MODEL -o …`), or check such a bundle (`bundle verify`).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    """What `localattn bundle` packs."""

    triton: Annotated[bool, typer.Option("--triton", help="Add a repository for Triton Inference Server.")] = False
    web: Annotated[
        bool, typer.Option("--web", help="Add a web page on which a step file writes text in any browser.")
    ] = False
    onnxruntime_web: Annotated[
        Path | None,
        typer.Option(
            help="For --web: npm's package onnxruntime-web, which runs the model there. "
            "(Default: node_modules/onnxruntime-web.)"
        ),
        INPUT,
    ] = None
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Random samples to draw for each model.")] = 2
    seed: Annotated[int, seed_option("Seed of the first sample.")] = 0
    load_inputs: Annotated[
        list[Path] | None, typer.Option(help="Inputs (.npz) to use as a sample instead; may be repeated."), INPUT
    ] = None
    plugin_library: Annotated[
        list[Path] | None,
        typer.Option(help="A library of plugins or of CPU kernels to include; may be repeated."),
        INPUT,
    ] = None
    engine: Annotated[
        list[Path] | None, typer.Option(help="An engine of the model to include; may be repeated."), INPUT
    ] = None
    atol: Annotated[float | None, number_option("Absolute tolerance on the device, instead of the type's.")] = None
    rtol: Annotated[float | None, number_option("Relative tolerance on the device, instead of the type's.")] = None
    triton_instances: Annotated[int, size_option("Copies of the model that Triton runs at once.", least=1)] = 1
    triton_threads: Annotated[
        int | None,
        size_option("CPU threads per copy. (Default: 1 for step files and several copies, else all.)", least=1),
    ] = None
    triton_max_batch: Annotated[
        int, size_option("Requests that Triton joins in a call, if rows are proven independent.", least=1)
    ] = 8
    max_sequences: Annotated[
        int, size_option("Sequences that a copy of a step file serves at once; others wait.", least=1)
    ] = 16


@app.command()
@from_fields
def create(
    *,
    model: Annotated[Path, typer.Argument(help="The exported model (model.onnx).", show_default=False), INPUT],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder or tar to write.", show_default=False), OutputPath(BUNDLE)
    ],
    shape: Annotated[
        Literal["dir", "tar"] | None,
        typer.Option("--format", help="dir or tar; by default a name that ends in .tar is a tar."),
    ] = None,
    options: CreateOptions,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier bundle.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest and nothing else, as JSON.")] = False,
) -> None:
    """Pack a model with samples, their expected outputs and a script that checks them on the device."""
    if options.onnxruntime_web is not None and not options.web:
        raise typer.BadParameter("it needs --web", param_hint="--onnxruntime-web")
    if options.web and options.triton:
        raise typer.BadParameter(
            "a bundle holds the model once: make one for --triton and another for --web", param_hint="--web"
        )
    with progress() as step:
        from ..runtime.bundle.create import BundleRequest, create_bundle

        as_tar = shape == "tar" or (shape is None and output.suffix.lower() == ".tar")
        request = BundleRequest(
            model=model,
            output=output,
            as_tar=as_tar,
            samples=options.samples,
            seed=options.seed,
            load_inputs=tuple(options.load_inputs or ()),
            plugins=tuple(options.plugin_library or ()),
            engines=tuple(options.engine or ()),
            triton=_serving(options) if options.triton else None,
            onnxruntime_web=(options.onnxruntime_web or NPM_FOLDER) if options.web else None,
            atol=options.atol,
            rtol=options.rtol,
            overwrite=force,
        )
        created = create_bundle(request, step)
    if as_json:
        print_json({"path": str(created.path), "manifest_sha256": created.manifest_sha256, **created.manifest})
    else:
        _print_created(created)


def _serving(options: CreateOptions) -> Serving:
    """Return how Triton Inference Server runs the model."""
    from ..runtime.bundle.triton import Serving

    return Serving(options.triton_instances, options.triton_max_batch, options.max_sequences, options.triton_threads)


def _print_created(created: CreatedBundle) -> None:
    print_notes(created.notes)
    files = created.manifest["files"]
    say(f"{created.path}  {len(files) + 1} files, {bytes_text(sum(entry['size'] for entry in files))}")
    roles: dict[str, list[str]] = {}
    for entry in files:
        roles.setdefault(entry["role"], []).append(entry["path"])
    for role, paths in roles.items():
        say(f"  {role:<8} {', '.join(paths)}")
    say(f"  manifest SHA-256 {created.manifest_sha256}")
    if not created.manifest["samples"]:
        say("The bundle has no samples: a device can check its files, but cannot compare outputs.")
    say(f"On the device: {_on_device(created.path, created.manifest['name'])}")
    suggest("localattn", "bundle", "verify", created.path)


def _on_device(bundle: Path, name: str) -> str:
    """Return the command that checks a bundle on a device, run from the folder that it was copied to.

    Args:
        bundle: the folder or tar.
        name: name in the manifest, which is that of the folder in a tar.
    """
    if bundle.is_dir():
        return f"python3 {shlex.quote(f'{bundle.resolve().name}/verify.py')}"
    return f"tar xf {shlex.quote(bundle.name)} && python3 {shlex.quote(f'{name}/verify.py')}"


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle: folder or tar.", show_default=False), INPUT],
    model: Annotated[
        str | None,
        typer.Option(help="Run only this model of the bundle; with --server, the model of this name on the server."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Send the samples to a server of the Open Inference Protocol v2: http://HOST:8000."),
    ] = None,
    provider: Annotated[str, typer.Option(help="onnxruntime's provider: auto, cpu, cuda or tensorrt.")] = "auto",
    threads: ThreadsOption = None,
    files_only: Annotated[bool, typer.Option("--files-only", help="Check the files only; run nothing.")] = False,
    run_libraries: Annotated[
        bool, typer.Option("--run-libraries", help="Also run with the bundle's libraries, which are code.")
    ] = False,
    manifest_sha256: Annotated[
        str | None,
        typer.Option(help="Refuse the bundle unless its manifest has this SHA-256, which allows its libraries too."),
    ] = None,
    output_format: FormatOption = "console",
) -> None:
    """Check every file of a bundle, then run its samples and compare. Exit codes 0, 1, 2, 3."""
    if server is not None:
        given = {
            "--provider": provider != "auto",
            "--threads": threads is not None,
            "--files-only": files_only,
            "--run-libraries": run_libraries,
        }
        refused = [option for option, is_given in given.items() if is_given]
        if refused:
            raise typer.BadParameter(
                "it cannot be used with --server, which runs nothing on this machine", param_hint=refused[0]
            )
    with progress() as step:
        step("Checking the bundle")
        from ..runtime.bundle.device.results import report_lines

        if server is not None:
            from ..runtime.bundle.verify_server import verify_on_server

            found = verify_on_server(bundle, server, model, manifest_sha256)
        else:
            from ..runtime.bundle.verify import verify_bundle

            found = verify_bundle(
                bundle,
                model=model,
                provider=provider,
                threads=threads,
                files_only=files_only,
                manifest_sha256=manifest_sha256,
                run_libraries=run_libraries,
            )
    if output_format == "json":
        document = {"bundle": found.manifest["name"], "manifest_sha256": found.manifest_sha256, **found.report}
        print_json(document)
    else:
        say(f"{bundle}: {len(found.manifest['files'])} files are intact.")
        for line in [] if files_only else report_lines(found.report):
            say(line)
        say(f"On the device: {_on_device(bundle, found.manifest['name'])}")
    raise typer.Exit(found.report["code"])
