"""Define `localattn demo`: the main job in one command, with nothing else needed."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Annotated

import typer

from ..core.storage.file_kinds import FOLDER
from ..exporter.options import Dtype
from .parts.console import bytes_text, print_checks, print_json, progress, say, say_text, suggest
from .parts.options import FormatOption, finite, seed_option
from .parts.paths import ForceOption, OutputPath
from .parts.plugins.kernels_in_use import has_nodes, say_kernels


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the exported file."), OutputPath(FOLDER)
    ] = Path("localattn-demo"),
    prompt: Annotated[str, typer.Option(help="Text that the model continues.")] = "import os\n\n\ndef ",
    max_tokens: Annotated[int, typer.Option(min=0, max=2000, help="Tokens to generate, each a byte.")] = 240,
    temperature: Annotated[
        float, typer.Option(min=0.01, callback=finite, help="Sampling temperature: lower is safer, higher is bolder.")
    ] = 0.5,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the file.")] = "fp32",
    rows: Annotated[int, typer.Option(min=1, max=64, help="Rows of held-out text to measure, of 64.")] = 64,
    seed: Annotated[int, seed_option("Seed of the sampling.")] = 0,
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Export a small trained model that ships with the package, check it, run it.

    The model is a byte-level LocalTransformer trained on Python's standard library.
    """
    if not prompt:
        raise typer.BadParameter("it is empty; give text to continue", param_hint="--prompt")
    begin = os.fsencode(prompt)
    with progress() as step:
        step("Loading PyTorch")
        from ..demo.run import run_demo, write_on

        result = run_demo(output, rows, step, dtype=dtype, overwrite=force)
        text = write_on(result.session, begin, max_tokens, seed, temperature)
    model = result.report.path
    if output_format == "json":
        document = {
            "model": str(model),
            "passed": result.report.passed,
            "outcomes": result.report.outcomes,
            "plugin": result.session.plugin,
            "checks": [check.model_dump() for check in result.report.sidecar.checks],
            "bits_per_byte": result.bits_per_byte,
            "bits_per_byte_in_pytorch": result.stated,
            "text": (begin + bytes(text)).decode("utf-8", "replace"),
        }
        print_json(document)
        return
    say(f"Exported a trained LocalTransformer to {model} ({bytes_text(model.stat().st_size)}). Checks:")
    print_checks(result.report.sidecar.checks)
    say(
        f"Held-out text: {result.bits_per_byte:.4f} bits per byte from the file over {result.rows} rows; "
        f"{result.stated:.4f} over 64 rows when it was trained in PyTorch."
    )
    say("It continues your prompt, byte by byte, in onnxruntime:")
    say("")
    say_text(prompt, bold=True)
    for piece in codecs.iterdecode((bytes([byte]) for byte in text), "utf-8", "replace"):
        say_text(piece)
    say_text("\n\n")
    say_kernels(lambda: has_nodes(model), result.session, "auto")
    suggest("localattn", "inspect", model)
