"""List the examples at the end of each command's help and in docs/commands.md, quoted for bash and zsh."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "export": (
        "localattn export model.pt -o model.onnx",
        "localattn export model.pt --dtype fp16 --dynamic batch,seq -o half.onnx",
        "localattn export --factory model.py:build --weights model.pt --input 'tokens:int64:[1,1024]' -o mine.onnx",
    ),
    "convert": ("localattn convert model.onnx -o plain.onnx --standard-ops",),
    "parity": (
        "localattn parity model.onnx --against model.pt",
        "localattn parity model.onnx --golden golden.npz",
        "localattn parity model.onnx --against model.pt -o parity.html",
        "localattn parity model.engine --against model.onnx",
    ),
    "build": (
        "localattn build model.onnx",
        "localattn build model.onnx --backend tensorrt-rtx --target rtx40 --plugin none",
        "localattn build open.onnx --min-shapes tokens:1x1 --opt-shapes tokens:1x512 --max-shapes tokens:8x1024",
    ),
    "run": (
        "localattn run model.onnx",
        "localattn run model.onnx --load-inputs in.npz --save-outputs out.npz",
        "localattn run model.engine --plugin-library liblocalattn_plugin.so",
    ),
    "generate": (
        "localattn generate model_step.onnx --prompt 'def '",
        "localattn generate model_step.onnx --prompt-ids 1,2,3 --max-tokens 40 --temperature 0",
        "localattn generate model_step.onnx --prompt-file prompt.txt --format json",
    ),
    "bench": (
        "localattn bench model.onnx --against half.onnx",
        "localattn bench model.onnx --plugin none,auto --threads 1,2",
        "localattn bench open.onnx --seq-len 512,1024 -o bench.html",
    ),
    "inspect": (
        "localattn inspect model.pt",
        "localattn inspect model.onnx -o model.html",
    ),
    "plugin build": (
        "localattn plugin build --backend onnxruntime",
        "localattn plugin build model.onnx --arch aarch64 --target sm_87 -o liblocalattn_plugin.so",
    ),
    "plugin path": ("localattn plugin path --backend onnxruntime",),
    "plugin list": ("localattn plugin list --format json",),
    "plugin check": (
        "localattn plugin check --backend onnxruntime",
        "localattn plugin check liblocalattn_plugin.so",
    ),
    "plugin rewrite": ("localattn plugin rewrite model.onnx -o provider.onnx",),
    "bundle create": (
        "localattn bundle model.onnx -o bundle.tar",
        "localattn bundle model.onnx -o bundle --triton --load-inputs in.npz",
        "localattn bundle model_step.onnx -o step.tar --plugin-library libkernels.so",
    ),
    "bundle verify": (
        "localattn bundle verify bundle.tar",
        "localattn bundle verify bundle --files-only",
        "localattn bundle verify bundle --server http://localhost:8000",
    ),
    "bisect": (
        "localattn bisect model.onnx --against model.pt",
        "localattn bisect model.onnx --against model.pt --all -o bisect.html",
    ),
    "doctor": (
        "localattn doctor",
        "localattn doctor --require 'export,build --backend tensorrt'",
    ),
    "demo": (
        "localattn demo",
        "localattn demo -o demo --prompt 'import json' --max-tokens 80",
    ),
}
