"""Assign each option to a panel of the help: one table for all commands, so that a name has one place.

Options of `exporter/options.py` say their panel themselves.
"""

from __future__ import annotations

MODULE = "Your own module"
# Panels in the order of the help, with their parameters.
OPTIONS = {
    "Input": (
        *("config", "entry", "against", "golden", "model", "load_inputs", "seed", "seeds", "samples", "engine"),
        *("prompt", "prompt_file", "prompt_ids"),
    ),
    "Output": (
        *("output", "save_inputs", "save_outputs", "standard_ops", "write_config"),
        *("shape", "web", "onnxruntime_web", "all_boundaries", "force", "dry_run", "output_format", "as_json"),
    ),
    "Shapes": (*("seq_len", "batch", "head_dim", "causal", "min_shapes", "opt_shapes", "max_shapes"),),
    "Precision": ("dtype", "fp32_products"),
    MODULE: ("factory", "factory_args"),
    "Step files": (),
    "Generation": (
        *("chat", "system", "max_tokens", "do_sample", "temperature", "top_k", "top_p"),
        *("repetition_penalty", "echo"),
    ),
    "Where it runs": (
        *("backend", "runtime", "target", "arch", "provider", "threads", "plugin", "plugin_library", "cuda_graph"),
        *("device", "run_libraries", "companion", "server"),
    ),
    "Building": (
        *("timing_cache", "workspace", "builder_optimization_level", "jobs", "version_compatible"),
        *("hardware_compatible", "refit", "strip_weights", "embed_plugin"),
    ),
    "Measuring": ("duration", "iterations", "warmup", "rounds", "percentile", "profile", "top", "rows"),
    "Triton": ("triton", "triton_instances", "triton_threads", "triton_max_batch", "max_sequences"),
    "Checks": (
        *("checks", "atol", "rtol"),
        *("files_only", "manifest_sha256", "require"),
    ),
    "Messages": ("verbose", "quiet", "help"),
}
PANELS = {name: panel for panel, names in OPTIONS.items() for name in names}
