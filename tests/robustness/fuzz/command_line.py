"""Every command and its parameters, read from the command line itself, and for each command calls that work.

A command or an option that holds a path and that is new here is no input and no output: `unknown_paths` names it, and a
test fails until `CALLS`, or the name of the output, says which it is.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

from localattn.cli import command_line

Value = str | tuple[str, ...] | bool
# Parameters of this name are outputs, wherever they are.
_OUTPUT = re.compile(r"output|save_\w+|timing_cache")
# Parameters whose value may be code that the user asks for.
NAMED_CODE = ("plugin", "library", "plugin_library", "factory")


@dataclass(frozen=True)
class Parameter:
    """One argument or option.

    Args:
        name: of the Python parameter.
        option: `--output`; "" for an argument.
        type: what a value is parsed as: Path, int, float, str, bool or a Literal.
        low: the smallest value that the command line takes; None for any.
        high: the largest.
    """

    name: str
    option: str
    type: Any
    low: float | None
    high: float | None

    @property
    def is_output(self) -> bool:
        return self.type is Path and _OUTPUT.fullmatch(self.name) is not None


@dataclass(frozen=True)
class Call:
    """A call of a command that works.

    Args:
        values: by parameter; `{}` stands for the folder of the files.
        files: the groups of `groups.GROUPS` that it needs.
        inputs: parameters whose value names a file that is read.
        writes: by output, the group that it writes ("model"), or "" for what is no group.
        seconds: what it takes, roughly, in a process that has loaded the packages.
        environment: variables that it needs.
        codes: exit codes that it may end with; 3 where it needs what is seldom installed.
    """

    values: Mapping[str, Value]
    files: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    writes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.1
    environment: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)


_MODEL = "{}/model.onnx"
_REPORT = {"output": "report"}
_CPU = {"provider": "cpu"}
# A library of kernels that a stand-in for a compiler made: it is read and verified, and onnxruntime does not load it.
_NAMED = {"plugin_library": "{}/lib.so"}
_UNUSABLE = (0, 1, 2, 3)
CALLS: dict[str, tuple[Call, ...]] = {
    "export": (
        Call(
            {"checkpoint": "{}/m.pt", "config": "{}/config.json", "output": "{}/out.onnx"},
            ("checkpoint",), ("checkpoint", "config"), {"output": "model"}, 2.0,
        ),
        Call(
            {"checkpoint": "{}/m.pt", "golden": "{}/golden.npz", "output": "{}/out.onnx"},
            ("checkpoint", "golden"), ("checkpoint", "golden"), {"output": "model"}, 2.0,
        ),
        # The matrices of the model are too narrow for 4 bits: the inputs are read, and the export ends without a file.
        Call(
            {
                "checkpoint": "{}/m.pt", "weight_dtype": "int4", "calibration": "{}/golden.npz",
                "output": "{}/out.onnx",
            },
            ("checkpoint", "golden"), ("checkpoint", "calibration"), {"output": "model"}, 2.0, codes=(4,),
        ),
        Call(
            {"checkpoint": "{}/m.pt", "mode": "step", "chunk": "4", "output": "{}/out.onnx"},
            ("checkpoint",), ("checkpoint",), {"output": "steps"}, 4.0,
        ),
        Call(
            {
                "factory": "{}/factory.py:make", "weights": "{}/w.pt", "load_inputs": "{}/in.npz",
                "output": "{}/out.onnx",
            },
            ("factory", "npz"), ("weights", "load_inputs"), {"output": "model"}, 2.0,
        ),
    ),
    "convert": (
        Call(
            {"model": _MODEL, "output": "{}/out.onnx", "standard_ops": True},
            ("model",), ("model",), {"output": "model"}, 0.5,
        ),
    ),
    "parity": (
        Call(
            {"models": (_MODEL,), "golden": "{}/golden.npz", **_CPU, "plugin": "none", "output": "{}/r.md"},
            ("model", "golden"), ("models", "golden"), _REPORT,
        ),
        Call(
            {
                "models": (_MODEL,), "against": "{}/other.onnx", "seeds": "1", "load_inputs": "{}/in.npz", **_CPU,
                "plugin": "none", "save_inputs": "{}/wi.npz", "save_outputs": "{}/wo.npz", "output": "{}/r.md",
            },
            ("model", "other", "npz"), ("models", "against", "load_inputs"),
            {**_REPORT, "save_inputs": "npz", "save_outputs": "npz"},
        ),
        Call(
            {"models": (_MODEL,), "against": "{}/other.onnx", "seeds": "1", **_CPU, **_NAMED},
            ("model", "other", "library"), ("models", "against", "plugin_library"), codes=_UNUSABLE,
        ),
        Call(
            {
                "models": (_MODEL,), "against": "{}/m.pt", "config": "{}/config.json", "seeds": "1", **_CPU,
                "save_outputs": "{}/wo.npz", "output": "{}/r.json",
            },
            ("model", "checkpoint"), ("models", "against", "config"), {**_REPORT, "save_outputs": "npz"},
        ),
    ),
    "build": (
        Call(
            {
                "model": _MODEL, "output": "{}/out.engine", "timing_cache": "{}/timing.cache",
                "plugin_library": "{}/lib.so",
            },
            ("model", "library"), ("model", "plugin_library"), {"output": "engine", "timing_cache": ""}, codes=(0, 3),
        ),
    ),
    "run": (
        Call(
            {
                "model": _MODEL, "load_inputs": "{}/in.npz", "save_outputs": "{}/wo.npz", **_CPU, "threads": "1",
                "plugin": "none",
            },
            ("model", "npz"), ("model", "load_inputs"), {"save_outputs": "npz"},
        ),
        Call({"model": _MODEL, **_CPU, "save_outputs": "{}/wo.npz"}, ("model",), ("model",), {"save_outputs": "npz"}),
        Call({"model": _MODEL, **_CPU, **_NAMED}, ("model", "library"), ("model", "plugin_library"), codes=_UNUSABLE),
    ),
    "generate": (
        Call(
            {"model": "{}/step.onnx", "prompt_ids": "1,2,3,4,5,6", "max_tokens": "3", **_CPU, "threads": "1"},
            ("steps",), ("model",),
        ),
        Call(
            {"model": "{}/step.onnx", "prompt_file": "{}/prompt.txt", "max_tokens": "3", **_CPU},
            ("steps", "text"), ("model", "prompt_file"),
        ),
        Call(
            {"model": "{}/step.onnx", "prompt_ids": "1,2", "max_tokens": "1", **_CPU, **_NAMED},
            ("steps", "library"), ("model", "plugin_library"), codes=_UNUSABLE,
        ),
    ),
    "bench": (
        Call(
            {
                "model": _MODEL, "against": ("{}/other.onnx",), "load_inputs": "{}/in.npz", **_CPU, "duration": "0",
                "iterations": "1", "warmup": "0", "rounds": "1", "threads": "1", "plugin": "none", "output": "{}/r.md",
            },
            ("model", "other", "npz"), ("model", "against", "load_inputs"), _REPORT, 0.4,
        ),
        Call(
            {"model": _MODEL, **_CPU, **_NAMED, "duration": "0", "iterations": "1", "warmup": "0", "rounds": "1"},
            ("model", "library"), ("model", "plugin_library"), seconds=0.4, codes=_UNUSABLE,
        ),
    ),
    "inspect": (
        Call({"file": _MODEL, "output": "{}/r.html"}, ("model",), ("file",), _REPORT),
        Call(
            {"file": "{}/m.pt", "config": "{}/config.json", "output": "{}/r.json"},
            ("checkpoint",), ("file", "config"), _REPORT,
        ),
        Call({"file": _MODEL, **_NAMED}, ("model", "library"), ("file", "plugin_library")),
    ),
    "bisect": (
        Call(
            {
                "model": _MODEL, "against": "{}/m.pt", "config": "{}/config.json", "load_inputs": "{}/in.npz", **_CPU,
                "output": "{}/r.md",
            },
            ("model", "checkpoint", "npz"), ("model", "against", "config", "load_inputs"), _REPORT, 0.3,
        ),
        Call(  # a library is for engines
            {"model": _MODEL, "against": "{}/m.pt", "plugin_library": "{}/lib.so", **_CPU},
            ("model", "checkpoint", "library"), ("model", "against", "plugin_library"), seconds=0.3, codes=(0, 2),
        ),
    ),
    "doctor": (Call({}, seconds=5.0), Call({"require": "run"}, seconds=5.0)),
    "demo": (Call({"output": "{}/demo", "rows": "1", "max_tokens": "1"}, writes={"output": ""}, seconds=9.0),),
    "plugin build": (
        Call(
            {"backend": "onnxruntime", "output": "{}/out.so"}, ("compiler",), (), {"output": "library"},
            # An option may ask for the kernels of all GPUs, which take many minutes to compile.
            environment={"CXX": "sh {}/compiler", "XDG_CACHE_HOME": "{}/cache", "TRITON_INTERPRET": "1"},
        ),
        Call(
            {"models": (_MODEL,), "target": "sm_90", "jobs": "1", "output": "{}/out.so"},
            ("model", "compiler"), ("models",), {"output": "library"},
            # Triton's interpreter compiles nothing, which is found when the models were read.
            environment={"CXX": "sh {}/compiler", "XDG_CACHE_HOME": "{}/cache", "TRITON_INTERPRET": "1"}, codes=(3,),
        ),
    ),
    "plugin path": (Call({"backend": "onnxruntime"}, codes=(0, 3)),),
    "plugin list": (Call({}),),
    "plugin check": (Call({}, codes=(0, 3)), Call({"library": "{}/lib.so"}, ("library",), ("library",), codes=(1,))),
    "plugin rewrite": (
        Call({"model": _MODEL, "output": "{}/out.onnx"}, ("model",), ("model",), {"output": "model"}),
    ),
    "bundle create": (
        Call(
            {"model": _MODEL, "output": "{}/out", "samples": "1", "load_inputs": ("{}/in.npz",)},
            ("model", "npz"), ("model", "load_inputs"), {"output": "bundle"},
        ),
        Call(
            {
                "model": _MODEL, "output": "{}/out.tar", "samples": "1", "engine": ("{}/model.engine",),
                "plugin_library": ("{}/lib.so",),
            },
            ("model", "engine", "library"), ("model", "engine", "plugin_library"), {"output": "tar"},
        ),
        Call(
            {
                "model": "{}/step.onnx", "output": "{}/out", "samples": "1", "web": True,
                "onnxruntime_web": "{}/npm",
            },
            ("steps", "npm"), ("model", "onnxruntime_web"), {"output": "bundle"}, codes=(2, 3),
        ),
    ),
    "bundle verify": (
        Call({"bundle": "{}/b", **_CPU}, ("bundle",), ("bundle",)),
        Call({"bundle": "{}/b.tar", **_CPU}, ("tar",), ("bundle",)),
    ),
}  # fmt: skip


@cache
def parameters() -> dict[str, dict[str, Parameter]]:
    """The parameters of every command, by name."""
    app = command_line()
    found = {}
    for prefix, info in _functions(app):
        name = info.name or info.callback.__name__.replace("_", "-")
        found[prefix + name] = {parameter.name: parameter for parameter in _parameters(info.callback)}
    return found


def _functions(app: Any) -> Iterator[tuple[str, Any]]:
    yield from (("", info) for info in app.registered_commands)
    for group in app.registered_groups:
        inner = group.typer_instance
        yield from ((f"{inner.info.name} ", info) for info in inner.registered_commands)


def _parameters(callback: Any) -> Iterator[Parameter]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for name in inspect.signature(callback).parameters:
        # Python 3.10 makes Optional[Annotated[…]] of what is None by default.
        for part in (hints[name], *typing.get_args(hints[name])):
            for info in getattr(part, "__metadata__", ()):
                if isinstance(info, ArgumentInfo | OptionInfo):
                    yield _parameter(name, part.__origin__, info)


def _parameter(name: str, hint: Any, info: ArgumentInfo | OptionInfo) -> Parameter:
    names = [text for text in info.param_decls or () if text.startswith("--")]
    option = "" if isinstance(info, ArgumentInfo) else names[0] if names else "--" + name.replace("_", "-")
    return Parameter(name, option, _value_type(hint), info.min, info.max)


def _value_type(hint: Any) -> Any:
    """What one value is: `list[Path] | None` is of paths."""
    if typing.get_origin(hint) is typing.Literal:
        return hint
    inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return _value_type(inner[0]) if inner else hint


def words(command: str, values: Mapping[str, Value]) -> tuple[str, ...]:
    """The command line with these values; arguments come last, after `--` where one begins with a dash."""
    options: list[str] = []
    arguments: list[str] = []
    for name, value in values.items():
        parameter = parameters()[command][name]
        if isinstance(value, bool):
            options += [parameter.option] * value
            continue
        for text in (value,) if isinstance(value, str) else value:
            if parameter.option:
                options += [f"{parameter.option}={text}"]
            else:
                arguments.append(text)
    return (*command.split(), *options, *(("--",) if any(a.startswith("-") for a in arguments) else ()), *arguments)


def unknown_paths() -> list[str]:
    """Parameters that hold a path of which nothing here says whether it is read or written."""
    return [
        f"{command} {name}"
        for command, found in parameters().items()
        for name, parameter in found.items()
        if parameter.type is Path
        and not any(name in (call.writes if parameter.is_output else call.inputs) for call in CALLS.get(command, ()))
    ]


def choices(parameter: Parameter) -> list[str]:
    """The words that an option takes; none for a number or a text."""
    return list(typing.get_args(parameter.type))
