"""Write the README of a bundle: its contents, and the commands to type on the device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from shlex import quote as quoted
from typing import Any

from ...core.spelling import markdown_code, markdown_text, spelled
from ...core.tensors import TensorSpec


def readme_text(
    manifest: Mapping[str, Any], notes: Sequence[str], served: Sequence[str], onnxruntime_web: str | None = None
) -> str:
    """Return the README of a bundle in Markdown.

    Args:
        manifest: the manifest without the README's own entry.
        notes: lines on what is special about these files.
        served: folders of the Triton repository; empty without one.
        onnxruntime_web: version of onnxruntime-web on the web page; None without a page.
    """
    blocks = [
        f"# {markdown_text(manifest['name'])}",
        f"Made by localattn {markdown_text(manifest['localattn'])}. "
        "`manifest.json` has the SHA-256 and size of every file.",
        *_check(manifest),
        *_run(manifest),
        *_kernels(manifest),
        *_build(manifest),
        *_served(manifest, served),
        *_web(onnxruntime_web),
        *_contents(manifest),
        *(["## Notes", _lines(*(f"- {markdown_text(note)}" for note in notes))] if notes else []),
    ]
    return "\n\n".join(blocks) + "\n"


def _lines(*lines: str) -> str:
    return "\n".join(lines)


def _code(*lines: str, language: str = "sh") -> str:
    return _lines(f"```{language}", *lines, "```")


def quote(word: str) -> str:
    """Quote a word for a shell in a line of code; invisible characters are escaped, which changes the word."""
    return quoted(spelled(word))


def _within_quotes(word: str) -> str:
    """Write a word within a shell's double quotes."""
    return re.sub(r'([$`"\\])', r"\\\1", spelled(word))


def _paths(manifest: Mapping[str, Any], role: str) -> list[str]:
    return [entry["path"] for entry in manifest["files"] if entry["role"] == role]


def _check(manifest: Mapping[str, Any]) -> list[str]:
    engines = sorted({model["backend"] for model in manifest["models"] if model["kind"] == "engine"})
    needs = "Python 3.10 or newer, `python3 -m pip install numpy onnxruntime`"
    if engines:
        needs += f", and for the engines {markdown_text(' or '.join(engines))} of the version below"
    return [
        "## Check it on the device",
        f"Needs {needs}. Neither torch nor localattn is used.",
        _code(
            "python3 verify.py                  # SHA-256 of every file, then the samples against their outputs",
            "python3 verify.py --provider cuda  # the same on the GPU, with onnxruntime-gpu",
            "python3 verify.py --files-only     # only the files",
            "python3 verify.py --run-libraries  # also with the libraries in it, if you trust who made the bundle",
        ),
        "Exit codes: 0 all is well; 1 a file was changed, a model does not load, or an output differs; 2 this is not "
        "a bundle, or wrong usage; 3 something is missing on this machine.",
    ]


def _run(manifest: Mapping[str, Any]) -> list[str]:
    blocks = ["## Run it"]
    for model in manifest["models"]:
        made_for = f" for {markdown_text(_made_for(model))}" if model["kind"] == "engine" else ""
        blocks.append(f"{markdown_code(model['path'])}{made_for}:")
        specs = [(kind, spec) for kind in ("input", "output") for spec in model[f"{kind}s"]]
        blocks.append(_lines(*(f"- {kind} {markdown_code(_spec(spec))}" for kind, spec in specs)))
    samples = manifest["samples"]
    example = f" --load-inputs {quote(samples[0]['inputs'])}" if samples else ""
    first = quote(manifest["models"][0]["path"])
    return [
        *blocks,
        "With localattn on the device (it needs no torch there):",
        _code(f"localattn run {first}{example} --save-outputs ../out.npz", "localattn bundle verify ."),
    ]


def _kernels(manifest: Mapping[str, Any]) -> list[str]:
    """Explain how a program uses the compiled kernels for the CPU."""
    libraries = _paths(manifest, "kernels")
    if not libraries:
        return []
    model = manifest["models"][0]["path"]
    runs = [
        f"localattn run {quote(model)} --plugin-library {quote(x)}  # {spelled(x.split('/')[1])}" for x in libraries
    ]
    return [
        "## Faster on the CPU",
        "With localattn:",
        _code(*runs),
        "In a program of your own:",
        _code(
            "options = onnxruntime.SessionOptions()",
            f"options.register_custom_ops_library({json.dumps(libraries[0])})  # {spelled(libraries[0].split('/')[1])}",
            f'session = onnxruntime.InferenceSession({json.dumps(model)}, options, providers=["CPUExecutionProvider"])',
            language="python",
        ),
        "`python3 verify.py --run-libraries` runs every sample with the library for its processor too, and says which "
        "of its kernels ran. Without the option no library of the bundle is loaded: a library is code.",
    ]


def _build(manifest: Mapping[str, Any]) -> list[str]:
    """Explain how to build an engine on the device: the ONNX file and plugin library are portable, engines are not."""
    command = f"trtexec --onnx={quote(manifest['models'][0]['path'])} --saveEngine=../model.engine"
    plugins = _paths(manifest, "plugin")
    note = "Without a plugin library the attention is built from standard operators."
    if plugins:
        note = "TensorRT 10.3 (JetPack 6) prefers the standard operators to the plugin: use `localattn build`."
    with_plugins = [f"{command} --dynamicPlugins={quote(x)}  # {spelled(x.split('/')[1])}" for x in plugins]
    return ["## Build an engine on the device", _code(*(with_plugins or [command])), note]


def _served(manifest: Mapping[str, Any], served: Sequence[str]) -> list[str]:
    if not served:
        return []
    plugins = _paths(manifest, "plugin")
    option = f" --backend-config={quote('tensorrt,plugins=' + ';'.join(plugins))}" if plugins else ""
    folders = {path.split("/")[1]: path.rpartition("/")[0] for path in sorted(set(_paths(manifest, "kernels")))}
    start = [
        f'export LD_LIBRARY_PATH="$PWD/{_within_quotes(folder)}:$LD_LIBRARY_PATH"  # {spelled(arch)}'
        for arch, folder in folders.items()
    ]
    name = served[0]
    return [
        "## Serve it with NVIDIA Triton Inference Server",
        _code(
            *start,
            "tritonserver --model-repository=triton --exit-on-error=false --http-address=127.0.0.1 "
            f"--grpc-address=127.0.0.1 --metrics-address=127.0.0.1{option}",
            f"localattn bundle verify . --server http://127.0.0.1:8000 --model {quote(name)}",
        ),
        f"Models: {', '.join(map(markdown_code, served))}. A TensorRT engine runs only in a server with the "
        "TensorRT version and the kind of GPU it was built for. Of several plugin libraries name the one for the "
        "server's processor.",
        "Without the addresses the server listens on every network of the machine, to anybody. Without "
        "`--exit-on-error=false` one model that does not load stops all.",
        *([_SERVED_KERNELS] if start else []),
    ]


_SERVED_KERNELS = (
    "The configurations name the compiled kernels for the CPU, and the server finds them through "
    "`LD_LIBRARY_PATH`: set the line for its processor. To serve without them, remove `model_operations` from "
    "`config.pbtxt`, and the name in `libraries` of `stream.json`."
)


def _web(version: str | None) -> list[str]:
    if version is None:
        return []
    return [
        "## Open it in a browser",
        _code("python3 -m http.server --directory web"),
        "and open http://localhost:8000. The folder `web` is all that a server needs: copy it to any host of static "
        "files. Once loaded the page works offline, where the address is `localhost` or begins with `https`. It "
        "computes on one thread: more need a server that sends the headers `Cross-Origin-Opener-Policy` and "
        "`Cross-Origin-Embedder-Policy`, and a change of `step.js`.",
        f"The page runs onnxruntime-web {markdown_text(version)} (MIT licence, "
        "https://github.com/microsoft/onnxruntime).",
    ]


def _contents(manifest: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {markdown_code(entry['path'])} | {markdown_text(entry['role'])} | {entry['size']:,} |"
        for entry in manifest["files"]
    ]
    return ["## Contents", _lines("| file | what | bytes |", "|---|---|---|", *rows)]


def _made_for(model: Mapping[str, Any]) -> str:
    gpu = f", compute capability {model['compute_capability']}" if model["compute_capability"] else ""
    return f"{model['backend']} {model['backend_version']}{gpu}"


def _spec(spec: Mapping[str, Any]) -> str:
    return TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"])).describe()
