"""List which releases of TensorRT and TensorRT-RTX have which feature.

The sources are NVIDIA's release notes and the change log of onnx-tensorrt, except where a line says "seen".
"""

from __future__ import annotations

from dataclasses import dataclass

from .versions import Version, parse

TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"


@dataclass(frozen=True)
class Span:
    """A range of a library's releases: `at_least ≤ version < below`, with exceptions.

    Args:
        at_least: the first release, as many numbers as matter.
        below: the first release after the range; None if it has no end.
        without: releases between them that do not belong, with all that begin with the same numbers.
    """

    at_least: Version
    below: Version | None = None
    without: tuple[Version, ...] = ()

    def holds(self, version: Version) -> bool:
        """Check whether a release belongs to the range."""
        inside = version >= self.at_least and (self.below is None or version < self.below)
        return inside and not any(version[: len(single)] == single for single in self.without)


# Feature → library → releases that have it; a library that is not named never has it.
FEATURES: dict[str, dict[str, Span]] = {
    # Releases that this package is written for.
    "supported": {TENSORRT: Span((10, 3), below=(12,)), TENSORRT_RTX: Span((1, 7), below=(2,))},
    # A plugin is preferred to a function of the same name in the file. In older releases the function always wins: the
    # function must be left out for the plugin to be found (NVIDIA/TensorRT issue 4113).
    "plugin_before_function": {TENSORRT: Span((10, 7)), TENSORRT_RTX: Span((1,))},
    # Builds for a GPU that the machine lacks (seen with 1.7.1).
    "builds_without_gpu": {TENSORRT_RTX: Span((1,))},
    # Has strongly typed networks only.
    "always_strongly_typed": {TENSORRT: Span((11,))},
    # Times kernels during the build; RTX does so at run time, and its timing cache has no effect.
    "timing_cache": {TENSORRT: Span((10,))},
    # Finds plugins whose kernels are compiled ahead of time for the nodes of an ONNX file. 10.14 supports
    # such plugins but does not find them (seen).
    "aot_plugins": {TENSORRT: Span((10, 9), without=((10, 14),))},
}


def has(feature: str, library: str, version: str | Version) -> bool:
    """Check whether a release of "tensorrt" or "tensorrt-rtx" has a feature of the table."""
    span = FEATURES[feature].get(library)
    return span is not None and span.holds(parse(version) if isinstance(version, str) else version)


def describe(feature: str, library: str) -> str:
    """Name the releases of a library that have a feature, for messages: `10.3 up to 11.x`."""
    span = FEATURES[feature].get(library)
    if span is None:
        return "none"
    first = _text(span.at_least)
    releases = f"{first} or later" if span.below is None else f"{first} up to {span.below[0] - 1}.x"
    return releases + "".join(f", not {_text(single)}" for single in span.without)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
