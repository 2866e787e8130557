"""Compare the counts in config.json with what the files of weights hold, before anything is allocated for them.

A configuration of a few bytes may claim 30 million labels or layers. The headers of safetensors files state every
tensor's shape without any of its numbers, and safetensors compares them with the bytes that are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ....core.errors import MissingDependency, UsageError
from .config import raised

# A count up to this costs nothing, whatever the weights hold.
_FREE = 4096
# Entries that count parts that are built one by one: layers, heads, experts, labels.
_COUNT = re.compile(r"(?:num|n)_\w+|\w+_(?:layers|heads|experts|labels)|depth")
_LAYERS = re.compile(r"(?:num|n)_(?:hidden_|encoder_|decoder_)?layers?|(?:encoder|decoder)_layers")
# A model may have this many times the numbers of its files: tied weights are stored once, and tensors that are missing
# or of another shape are told by name later. Tables of positions, which no file stores, come on top.
_TIMES, _TABLES = 2, 1 << 26
_FIX = "Correct config.json, or copy the folder again."


class Held(NamedTuple):
    """What files of weights hold.

    Args:
        names: of the tensors.
        numbers: how many numbers all tensors have together.
        largest: the largest size of any axis.
    """

    names: frozenset[str]
    numbers: int
    largest: int


def held(files: Sequence[Path], where: str) -> Held:
    """Read the headers of safetensors files.

    Args:
        files: the files.
        where: the folder, for errors.

    Raises:
        UsageError: one of them is missing or damaged.
        MissingDependency: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingDependency("This checkpoint needs safetensors.", fix="pip install safetensors") from error
    names: set[str] = set()
    numbers, largest = 0, 0
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as stream:
                for name in stream.keys():  # noqa: SIM118
                    shape = stream.get_slice(name).get_shape()
                    names.add(name)
                    numbers += math.prod(shape)
                    largest = max(largest, *shape, 0)
        except FileNotFoundError as error:
            why = "A model of its family has one."
            raise UsageError(f"{where} has no {path.name}.", why=why, fix="Copy all of it.") from error
        except Exception as error:  # safetensors' own errors, and those of the operating system
            raise UsageError(f"{where} cannot be loaded.", why=raised(error), fix="Copy or save it again.") from error
    return Held(frozenset(names), numbers, largest)


def check_counts(config: Mapping[str, Any], found: Held, where: str) -> None:
    """Refuse a count of layers, heads, experts or labels that the weights cannot have.

    Raises:
        UsageError: there is one.
    """
    most = max(_FREE, found.largest, len(found.names))
    for name, value in _counts(config):
        if _LAYERS.fullmatch(name) and value > len(found.names):
            why = f"The weights hold {len(found.names)} tensors, and a layer has at least one."
        elif value > most:
            why = f"The weights hold {len(found.names)} tensors, and no axis is longer than {found.largest:,}."
        else:
            continue
        raise UsageError(f"{where}: {name} is {value:,}.", why=why, fix=_FIX)


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the counts of a configuration and of those inside it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and not isinstance(value, bool) and _COUNT.fullmatch(str(name)):
            yield str(name), value


def check_size(model: nn.Module, found: Held, where: str) -> None:
    """Refuse a configuration whose model is far larger than its weights; the model lies on the meta device.

    Raises:
        UsageError: it is.
    """
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if numbers > _TIMES * found.numbers + _TABLES:
        raise UsageError(
            f"{where} does not fit its configuration.",
            why=f"config.json describes a model of {numbers:,} numbers; the weights hold {found.numbers:,}.",
            fix=_FIX,
        )
