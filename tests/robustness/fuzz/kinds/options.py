"""Cases about options: numbers out of range, words that are none, texts of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from ..case import Case
from ..command_line import CALLS, Parameter, choices, parameters
from ..groups import gather
from ..seeds import Seeds
from .mutate import ODD_TEXTS
from .outputs import case_of

_NUMBERS = (
    *("-1", "0", "1", "2", "7", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775809", "18446744073709551616", str(10**30), "1" * 5000, "-0", "+1", " 1", "1_0", "0x10", "١"),
    *("nan", "inf", "-inf", "1e308", "-1e-320", "1e999", "0.5", "1e3", "", "abc", "1,2", "1x2", "None", "True"),
)
# What asks for much work or much memory is refused where it is beyond any machine; in between it is what was asked for.
_LENGTHY = {
    *("iterations", "duration", "warmup", "rounds", "max_tokens", "batch", "seq_len", "heads"),
    *("dim_head", "chunk", "rows", "triton_instances", "triton_max_batch", "max_sequences", "samples"),
    "triton_threads",
}
_ENDLESS = {"2147483648", "4294967296", "1e308", "-1"}
_TEXTS = (
    *(text for text in ODD_TEXTS if "\0" not in text and "\ud800" not in text),
    *(
        "\udcff",
        "auto",
        "cpu",
        "none",
        "cuda",
        "tensorrt",
        "1,2",
        "0",
        "-1",
        "512,1024",
        "1" * 30,
        "sm_87",
        "rtx40",
        "fp16",
    ),
    *("tokens:1x1", "tokens:0x0", "tokens:1x99999999999999999999", "tokens:", ":", "x:float32:[1000000,1000000]"),
    *("tokens:int64:[1,64]", "tokens:int64:[-1]", "tokens:object:[1]", "tokens:int64:[" + "1," * 3000 + "1]"),
    *("batch,seq", "seq", "[" * 5000, '{"a": 1}', "os:system", "missing.module:function", "{}/missing.py:make"),
)


def draw_option(random: Random, seeds: Seeds) -> Case:
    """A call of a command, with one or two options of odd values."""
    found = [(command, call) for command, calls in CALLS.items() for call in calls]
    command, call = random.choices(found, [1 / (0.3 + call.seconds) for _, call in found])[0]
    asked = [found for found in parameters()[command].values() if found.type not in (Path, bool) and found.option]
    values = dict(call.values)
    for parameter in random.sample(asked, min(len(asked), random.choice((1, 1, 1, 2)))):
        text = _value(random, parameter, command)
        values[parameter.name] = text if not isinstance(values.get(parameter.name), tuple) else (text,)
    return case_of(command, replace(call, values=values), gather(seeds, call.files))


def _value(random: Random, parameter: Parameter, command: str) -> str:
    if choices(parameter):
        return random.choice((*choices(parameter), *choices(parameter), *_TEXTS[:8], choices(parameter)[0].upper()))
    if parameter.type is str and parameter.name not in _LENGTHY:
        return random.choice(_TEXTS)
    bounds = [
        format(bound + off, "g") for bound in (parameter.low, parameter.high) if bound is not None for off in (-1, 0, 1)
    ]
    numbers = (*_NUMBERS, *bounds, "2000", "100000000") if parameter.name not in _LENGTHY else (*_NUMBERS, *bounds[:3])
    omitted = _ENDLESS if parameter.name in _LENGTHY else set()
    return random.choice([number for number in numbers if number not in omitted])
