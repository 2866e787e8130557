"""The figures of `docs/images/`, drawn from `results/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .limit.roofline import name_of_limit
from .machine import ROOT, read_result
from .panels import OURS, OURS_TOO, Look, draw_panels

IMAGES = ROOT / "docs" / "images"

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


def draw_node() -> Path:
    """`node.png` from `node.json`; returns the file."""
    result = read_result("node")
    setting = result["setting"]
    return draw_panels(
        result,
        _NODE,
        IMAGES / "node.png",
        limit=(name_of_limit(result["sizes"][0]), [size["limit_ms"] for size in result["sizes"]]),
        subtitle=f"{setting['heads']} heads of {setting['head_dim']}, window {setting['window_size']}, causal exact, "
        f"{setting['dtype']}, {setting['threads']} threads, {machine(result)}",
    )


def draw_generate(name: str) -> Path:
    """`generate.png` from a result of the benchmark `generate`; returns the file."""
    result = read_result(name)
    setting = result["setting"]
    return draw_panels(
        result,
        _GENERATE,
        IMAGES / "generate.png",
        limit=("weights' products", [result["limit"]["median_ms"]] * len(result["sizes"])),
        subtitle=f"{result['checkpoint']}, batch {setting['batch']}, {setting['dtype']}, {setting['threads']} threads, "
        f"{machine(result)}",
    )


def draw_decoder() -> Path:
    """`decoder.png` from `decoder.json`; returns the file."""
    result = read_result("decoder")
    sizes = [{**size, "length": size["context"]} for size in result["sizes"]]
    return draw_panels(
        {**result, "sizes": sizes},
        _DECODER,
        IMAGES / "decoder.png",
        limit=None,
        subtitle=f"{result['model']}, fp32 where nothing is said, {result['threads']} threads, {machine(result)}",
    )


def draw_hugging_face() -> Path:
    """`hugging_face.png` from the newest `hugging_face.json`; returns the file."""
    result = read_result("hugging_face")
    return draw_panels(
        result,
        _HUGGING_FACE,
        IMAGES / "hugging_face.png",
        limit=None,
        subtitle=f"{result['model']}, fp32, batch 1, {result['threads']} threads, {machine(result)}",
    )


def machine(result: dict[str, Any]) -> str:
    """Processor and releases, as a subtitle names them."""
    versions = result["versions"]
    return f"{result['machine']['cpu']}; onnxruntime {versions['onnxruntime']}, torch {versions['torch']}"
