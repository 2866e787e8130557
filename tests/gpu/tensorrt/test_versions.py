"""Which release can do what, and which GPUs it builds for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from localattn.core.errors import UsageError
from localattn.core.tensorrt_versions import FEATURES, describe, has
from localattn.core.versions import parse
from localattn.runtime.backends.tensorrt.builder.request import capability, resolve_targets
from localattn.runtime.backends.tensorrt.device import Device
from localattn.runtime.backends.tensorrt.library import open_library

from ...support.models.engine_models import needs_rtx

ORIN = Device("Orin", 87, "12.6")
ADA = Device("NVIDIA GeForce RTX 4090", 89, "13.0")


@pytest.mark.parametrize(
    ("version", "numbers"), [("10.3.0", (10, 3, 0)), ("10.7.0.post1", (10, 7, 0)), ("11.4.0.106", (11, 4, 0, 106))]
)
def test_versions_are_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert parse(version) == numbers


@pytest.mark.parametrize(
    ("library", "version", "features"),
    [
        ("tensorrt", "10.2.0", {"timing_cache"}),
        ("tensorrt", "10.3.0", {"supported", "timing_cache"}),
        ("tensorrt", "10.6.0.post1", {"supported", "timing_cache"}),
        ("tensorrt", "10.7.0.post1", {"supported", "timing_cache", "plugin_before_function"}),
        ("tensorrt", "10.14.1", {"supported", "timing_cache", "plugin_before_function"}),
        ("tensorrt", "10.16.0.72", {"supported", "timing_cache", "plugin_before_function", "aot_plugins"}),
        ("tensorrt", "11.4.0.106", set(FEATURES) - {"builds_without_gpu"}),
        ("tensorrt", "12.0.0", set(FEATURES) - {"supported", "builds_without_gpu"}),
        ("tensorrt-rtx", "1.7.1.116", {"supported", "plugin_before_function", "builds_without_gpu"}),
        ("tensorrt-rtx", "2.0.0", {"plugin_before_function", "builds_without_gpu"}),
    ],
)
def test_the_table(library: str, version: str, features: set[str]) -> None:
    assert {feature for feature in FEATURES if has(feature, library, version)} == features


def test_spans_in_words() -> None:
    assert describe("supported", "tensorrt") == "10.3 up to 11.x"
    assert describe("plugin_before_function", "tensorrt") == "10.7 or later"
    assert describe("builds_without_gpu", "tensorrt") == "none"
    assert describe("aot_plugins", "tensorrt") == "10.9 or later, not 10.14"


@pytest.mark.parametrize("name", ["rtx40", "RTX40", "sm_89", "sm89", "89", "8.9", " 8.9 "])
def test_a_target_has_many_names(name: str) -> None:
    assert capability(name) == 89


@pytest.mark.parametrize("name", ["", "rtx", "sm_", "sm_8", "ada", "8.9.1", "-89"])
def test_what_is_no_target(name: str) -> None:
    with pytest.raises(UsageError, match="no GPU target"):
        capability(name)


def test_tensorrt_builds_for_its_own_gpu() -> None:
    opened: Any = SimpleNamespace(has=lambda feature: False)
    assert resolve_targets(opened, [], ORIN) == resolve_targets(opened, ["sm_87"], ORIN) == [87]
    with pytest.raises(UsageError) as caught:
        resolve_targets(opened, ["sm_110"], ORIN)
    assert "sm_110" in caught.value.what and "Orin (sm_87)" in caught.value.why


@needs_rtx
def test_rtx_builds_for_what_it_is_told() -> None:
    opened = open_library("tensorrt-rtx")
    assert resolve_targets(opened, [], None) == [86, 89, 120]
    assert resolve_targets(opened, [], ADA) == [89]
    assert resolve_targets(opened, ["rtx50", "rtx30", "sm_86"], ADA) == [120, 86]
    with pytest.raises(UsageError, match="does not build for sm_87"):
        resolve_targets(opened, [], ORIN)
