"""List the needs of each command, and decide by the findings which commands work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..runtime.backends.registry import by_name
from .probes import Finding

# Any of these is enough.
Choice = tuple[str, ...]


@dataclass(frozen=True)
class Ability:
    """One ability of a command.

    Args:
        command: how it is typed, "build --backend tensorrt"; its first word is the command.
        does: its description in a few words.
        needs: names of probes; each entry lists alternatives of which one is enough.
    """

    command: str
    does: str
    needs: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether an ability works on this machine.

    Args:
        ability: the ability.
        able: whether everything it needs works.
        lacks: titles of what is missing, alternatives joined with "or".
        add: the commands that add it, in order, without repeats; for alternatives, those of the first.
    """

    ability: Ability
    able: bool
    lacks: tuple[str, ...]
    add: tuple[str, ...]


_CHECKED = (("torch",), ("onnx",), ("onnxscript",), ("onnx_ir",), ("einops",), ("safetensors",), ("cpu",))
_RUNS_ONNX = (("cpu", "cuda"),)
_TENSORRT = (("tensorrt",), ("polygraphy",), ("driver",))
_RTX = (("tensorrt_rtx",), ("polygraphy",))
_KERNEL = (("triton",), ("headers",))
_ANY_COMPILER = ("compiler-x86_64", "compiler-aarch64")

ABILITIES: tuple[Ability, ...] = (
    Ability("export", "a checkpoint or module to a checked ONNX file", _CHECKED),
    Ability("export FOLDER", "a Hugging Face model", (*_CHECKED, ("transformers",))),
    Ability("convert", "a file in standard operators", (("onnx",), ("onnxscript",), ("onnx_ir",), ("cpu",))),
    Ability("demo", "the shipped model, exported and run", _CHECKED),
    Ability("parity", "a file against its checkpoint", (("torch",), ("safetensors",), ("einops",), *_RUNS_ONNX)),
    Ability("parity --against model.onnx", "a file against another, without PyTorch", _RUNS_ONNX),
    Ability("bisect", "the first module that differs", _CHECKED),
    Ability("inspect model.pt", "what a checkpoint is", (("torch",), ("safetensors",))),
    Ability("inspect model.onnx", "what a file is", (("onnx",),)),
    Ability("run model.onnx", "a file on this machine", _RUNS_ONNX),
    Ability("run --provider cuda", "a file on the GPU", (("cuda",),)),
    Ability("run --provider tensorrt", "a file through TensorRT", (("tensorrt-provider",),)),
    *(
        Ability(f"run --runtime {runtime.name}", f"a file in {runtime.title}", ((runtime.doctor_lines()[0].name,),))
        for runtime in by_name()[1:]  # the first runs it where none is named
    ),
    Ability("run model.engine", "an engine", (("tensorrt", "tensorrt_rtx"), ("polygraphy",), ("driver",))),
    Ability("generate", "text from a step file", _RUNS_ONNX),
    Ability("generate --prompt", "text of a model with a tokenizer", (*_RUNS_ONNX, ("tokenizers",))),
    Ability("generate --chat", "the same as a conversation", (*_RUNS_ONNX, ("tokenizers",), ("jinja2",))),
    Ability("bench", "latency and memory", _RUNS_ONNX),
    Ability("bench --format html", "the same as a page", (*_RUNS_ONNX, ("jinja2",))),
    Ability("build --backend tensorrt", "an engine for this GPU", _TENSORRT),
    Ability("build --backend tensorrt-rtx", "an engine for RTX cards, also without a GPU", _RTX),
    Ability("plugin build --arch x86_64", "the plugin library for x86-64", (*_KERNEL, ("compiler-x86_64",))),
    Ability("plugin build --arch aarch64", "the plugin library for Jetson", (*_KERNEL, ("compiler-aarch64",))),
    Ability("plugin build --backend onnxruntime", "compiled attention for the CPU", (_ANY_COMPILER,)),
    Ability("plugin list", "the libraries built here"),
    Ability("plugin rewrite", "a model for onnxruntime's TensorRT provider", (("onnx",),)),
    Ability("plugin check", "whether TensorRT takes the library", (("tensorrt", "tensorrt_rtx"), ("library",))),
    Ability("plugin check --backend onnxruntime", "whether its kernels run", (("cpu",), ("cpu-library",))),
    Ability("bundle create", "a model with all a device needs", (("onnx",), ("cpu",))),
    Ability("bundle verify", "a bundle's files and samples", _RUNS_ONNX),
    Ability("doctor", "this report"),
)


def judge(findings: Iterable[Finding], abilities: Sequence[Ability] = ABILITIES) -> list[Verdict]:
    """Decide for every ability whether it works, by the findings; a missing finding counts as missing."""
    found = {finding.name: finding for finding in findings}
    return [_judge(ability, found) for ability in abilities]


def _judge(ability: Ability, found: Mapping[str, Finding]) -> Verdict:
    lacks: list[str] = []
    add: dict[str, None] = {}
    for choice in ability.needs:
        known = [found[name] for name in choice if name in found]
        if any(finding.works for finding in known):
            continue
        lacks.append(" or ".join(finding.title for finding in known) or " or ".join(choice))
        if known and known[0].add:
            add[known[0].add] = None
    return Verdict(ability, not lacks, tuple(lacks), tuple(add))
