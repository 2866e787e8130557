"""The figures of `docs/images/`, drawn from `results/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .limit.roofline import name_of_limit
from .machine import ROOT, read_result
from .panels import OURS, OURS_TOO, Look, draw_panels

IMAGES = ROOT / "docs" / "images"
Result = dict[str, Any]
Limit = tuple[str, list[float]]

# Of the two dense graphs the better is drawn.
_NODE = Look(
    ours=("kernel", "node"),
    colors={
        "kernel": OURS,
        "node": OURS_TOO,
        "upstream": "#c2410c",
        "sdpa": "#7c3aed",
        "attention_op": "#0f766e",
        "dense": "#57606a",
    },
    panels=(("median_ms", "Time of one call", "ms"), ("peak_mib", "Peak memory of one call", "MiB")),
    axis="sequence length",
    title="Windowed attention on the CPU: linear in the sequence length",
)
_GENERATE = Look(
    ours=("step",),
    colors={"step": OURS, "cached": "#c2410c", "recompute": "#57606a", "uncached": "#7c3aed"},
    panels=(("median_ms", "Time of one token", "ms"), ("peak_mib", "Peak memory", "MiB")),
    axis="tokens before it",
    title="Generating on the CPU: time does not grow with the context",
)
_DECODER = Look(
    ours=("ours", "ours_int4"),
    colors={
        "ours": OURS,
        "ours_int4": OURS_TOO,
        "pytorch": "#c2410c",
        "optimum": "#7c3aed",
        "transformers": "#4d7c0f",
        "genai": "#0f766e",
        "genai_int4": "#57606a",
        "llama": "#a16207",
        "llama_int4": "#be185d",
    },
    panels=(("token_ms", "Time of one token", "ms"), ("peak_mib", "Peak memory", "MiB")),
    axis="tokens before it",
    title="A Hugging Face decoder on the CPU, token by token",
)
_HUGGING_FACE = Look(
    ours=("ours_kernels", "ours"),
    colors={
        "ours_kernels": OURS,
        "ours": OURS_TOO,
        "torch_sdpa": "#7c3aed",
        "transformers_fused": "#c2410c",
        "transformers_onnx": "#57606a",
        "optimum": "#0f766e",
        "torch_onnx": "#a16207",
    },
    panels=(("cpu_s", "Processor time of one call", "s"), ("peak_mib", "Peak memory, weights included", "MiB")),
    axis="sequence length",
    title="A Hugging Face encoder on the CPU: one file beside those of other exporters",
)


# By image: look, label and value of the dotted line at a size, subtitle; the last two from a result and its setting.
_FIGURES: dict[str, tuple[Look, Callable[[Result], Limit | None], Callable[[Result], str]]] = {
    "node": (
        _NODE,
        lambda r: (name_of_limit(r["sizes"][0]), [size["limit_ms"] for size in r["sizes"]]),
        lambda r: "{heads} heads of {head_dim}, window {window_size}, causal exact, {dtype}, {threads} threads".format(
            **r["setting"]
        ),
    ),
    "generate": (
        _GENERATE,
        lambda r: ("weights' products", [r["limit"]["median_ms"]] * len(r["sizes"])),
        lambda r: "{0}, batch {batch}, {dtype}, {threads} threads".format(r["checkpoint"], **r["setting"]),
    ),
    "decoder": (
        _DECODER,
        lambda _: None,
        lambda r: f"{r['model']}, fp32 where nothing is said, {r['threads']} threads",
    ),
    "hugging_face": (
        _HUGGING_FACE,
        lambda _: None,
        lambda r: f"{r['model']}, fp32, batch 1, {r['threads']} threads",
    ),
}


def draw(image: str, name: str | None = None) -> Path:
    """Draw `image`.png from the newest result of that name; returns the file.

    Args:
        image: a name of `_FIGURES`.
        name: of the result, where it is not the image's.
    """
    look, limit, subtitle = _FIGURES[image]
    result = read_result(name or image)
    sizes = [{"length": size.get("context"), **size} for size in result["sizes"]]
    shown = f"{subtitle(result)}, {machine(result)}"
    return draw_panels({**result, "sizes": sizes}, look, IMAGES / f"{image}.png", limit=limit(result), subtitle=shown)


def machine(result: Result) -> str:
    """Processor and releases, as a subtitle names them."""
    versions = result["versions"]
    return f"{result['machine']['cpu']}; onnxruntime {versions['onnxruntime']}, torch {versions['torch']}"
