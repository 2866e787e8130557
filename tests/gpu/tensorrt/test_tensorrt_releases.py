"""The TensorRT code with NVIDIA's real Python bindings, on TensorRT-RTX's libraries: see `tensorrt_releases`.

By default with the release that the extra `dev` brings; marked slow, with the others of `releases.OTHERS`, whose wheels
are fetched from the package index.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from localattn.core.errors import MissingDependency
from localattn.core.nodes.gpu import RINGS_BY_OP_TYPE, SERVED_BY_OP_TYPE, SERVED_OP_TYPES
from localattn.core.tensorrt_versions import FEATURES, has
from localattn.exporter.export import ExportRequest, export
from localattn.plugins.aot.register import attributes_of
from localattn.runtime.backends.tensorrt.device import find_device_or_none

from ...support.models.engine_models import NODES, needs_plugin_tools, open_node, small_checkpoint, small_model
from ...support.native.plugin_build import folder, small_library
from ..simulators.tensorrt_releases import names
from ..simulators.tensorrt_releases.networks import LEVEL, WORKSPACE
from ..simulators.tensorrt_releases.releases import OTHERS, Release, installed, run

pytestmark = needs_plugin_tools

HERE = "installed"
EVERY = [HERE, *(pytest.param(release, marks=pytest.mark.slow, id=str(release)) for release in OTHERS)]

OP_TYPES = sorted(SERVED_OP_TYPES)
AOT_SINCE = FEATURES["aot_plugins"]["tensorrt"].at_least
ALIASES_SINCE = (10, 15)
PREFER_AOT = "PREFER_AOT_PYTHON_PLUGINS"


@cache
def models() -> dict[str, Path]:
    """ONNX files: a small model, the same with its weights beside it, a node of dynamic sizes, an unknown operator."""
    path = folder() / "models"
    path.mkdir()
    export(ExportRequest(small_checkpoint("fp16"), path / "beside.onnx", dtype="fp16", external_data_from=0))
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Nothing", ["x"], ["y"], name="a_node", domain="nobody")
    graph = onnx.helper.make_graph([node], "graph", [value("x", 1, [2])], [value("y", 1, [2])])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("nobody", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path / "unknown.onnx")
    shutil.copy(open_node(path), path / "open.onnx")
    return {"small": small_model("fp16"), **{name: path / f"{name}.onnx" for name in ("beside", "open", "unknown")}}


_told: dict[Release, dict[str, Any]] = {}


def told_by(release: Release, store: Path | None) -> dict[str, Any]:
    """What the child process saw with the bindings of this release."""
    if release not in _told:
        files = {name: str(path) for name, path in models().items()}
        plans = {"none": (files["small"], "none"), "open": (files["open"], "none")}
        if takes_plugins(release):
            plans["library"] = (files["beside"], "library")
        used = {kind: sorted(found) for kind, found in names.used().items()}
        _told[release] = run(
            "networks", release, store, names=used, library=str(small_library()), models=plans, served=files["beside"],
            unknown=files["unknown"], aot=release.numbers >= AOT_SINCE,
        )  # fmt: skip
    return _told[release]


def takes_plugins(release: Release) -> bool:
    """Whether the parser below takes plugins: that of TensorRT-RTX 1.4.0 does not."""
    return release.libraries == "1.7.1"


@pytest.fixture(params=EVERY)
def release(request: pytest.FixtureRequest) -> Release:
    return installed() if request.param == HERE else request.param


@pytest.fixture
def shown(release: Release, request: pytest.FixtureRequest) -> dict[str, Any]:
    installed()
    cache = request.config.cache
    assert cache is not None
    return told_by(release, cache.mkdir("tensorrt") if release.package else None)


def test_the_release_is_opened(release: Release, shown: dict[str, Any]) -> None:
    assert (shown["version"], shown["is_rtx"]) == (release.version, False)
    assert "tensorrt" in shown["backends"]
    assert shown["doctor"] == {"version": release.version}
    kind, what, why = shown["other"]
    assert (kind, what) == ("UsageError", "This process cannot use tensorrt-rtx.")
    assert "already uses tensorrt" in why


def test_the_table_of_features_is_true(release: Release, shown: dict[str, Any]) -> None:
    """As far as the Python API tells; which comes first, plugin or function, is the business of a release's parser."""
    features, api = shown["features"], shown["api"]
    assert features == {feature: has(feature, "tensorrt", release.version) for feature in features}
    assert features["supported"]
    assert "STRONGLY_TYPED" in api["flags"]
    # A release whose networks are always strongly typed has no flags left that would choose a precision.
    assert features["always_strongly_typed"] == (not api["weakly_typed_precisions"])
    assert features["timing_cache"] == api["timing_cache"]
    assert features["builds_without_gpu"] == api["compute_capabilities"]
    assert (PREFER_AOT in api["flags"]) == (release.numbers >= AOT_SINCE)
    assert api["aliases"] == (release.numbers >= ALIASES_SINCE)


def test_every_name_that_is_used_is_there(release: Release, shown: dict[str, Any]) -> None:
    expected = [] if release.numbers >= AOT_SINCE else [f"NetworkDefinitionCreationFlag.{PREFER_AOT}"]
    assert shown["missing"] == expected


def test_names_are_found_in_the_source() -> None:
    used = names.used()
    assert {"Builder", "OnnxParser", "ILogger", "init_libnvinfer_plugins"} <= used[""]
    assert {"execute_async_v3", "set_tensor_address", "set_input_shape"} <= used["IExecutionContext"]
    assert {"get_flag", "num_layers"} <= used["INetworkDefinition"]
    assert {"get_creator", "load_library", "deregister_library"} <= used["IPluginRegistry"]


def test_the_registry_takes_the_library(shown: dict[str, Any]) -> None:
    # AFT-local's op types say all themselves.
    def fields_of(name: str) -> int:
        if name in RINGS_BY_OP_TYPE:
            return 1 + RINGS_BY_OP_TYPE[name].has_softcap
        return len(attributes_of(SERVED_BY_OP_TYPE[name])) if name in SERVED_BY_OP_TYPE else 0

    fields = [fields_of(name) for name in OP_TYPES]
    assert shown["creators"] == [[name, "1", "localattn", count] for name, count in zip(OP_TYPES, fields, strict=True)]
    code, out, _ = shown["check"]
    assert code == 0
    assert [creator["name"] for creator in json.loads(out)["creators"]] == OP_TYPES


@pytest.mark.parametrize("name", ["none", "open", "library"])
def test_files_become_networks_and_engines(name: str, release: Release, shown: dict[str, Any]) -> None:
    if name == "library" and not takes_plugins(release):
        pytest.skip("the parser of TensorRT-RTX 1.4.0, which stands below TensorRT 10, takes no plugins")
    model = shown["models"][name]
    plugins = NODES if name == "library" else 0
    assert (model["nodes"], model["plugins"], model["named"]) == (plugins, plugins, bool(plugins))
    expected = ["plugin in network", "precision of network", "products of network"]
    assert model["checks"] == dict.fromkeys(expected, "passed")
    assert sorted(model["op_types"]) == (OP_TYPES if plugins else [])
    assert model["engine"] > 100_000
    assert model["left"] == []


@pytest.mark.parametrize("name", ["none", "open"])
def test_every_option_reaches_the_builder(name: str, shown: dict[str, Any]) -> None:
    model = shown["models"][name]
    assert model["config"] == {
        "workspace": WORKSPACE,
        "level": LEVEL,
        "profiles": 1,
        "verbosity": "DETAILED",
        "tf32": False,
        "monitored": True,
    }
    assert model["sizes"] == ([[1, 16], [2, 32], [4, 64]] if name == "open" else [])
    assert model["times"] == ["a timing cache", [], []], "the timing cache is written, and combined with itself"
    assert model["staged"]
    assert model["again"] == model["engine"], "and read"


def test_options_for_special_engines_reach_the_builder(shown: dict[str, Any]) -> None:
    """For later releases, other GPUs, other weights, and with the plugin inside. Building them needs a GPU."""
    assert shown["kinds"] == {
        "flags": ["VERSION_COMPATIBLE", "REFIT", "STRIP_PLAN"],
        "levels": ["AMPERE_PLUS"],
        "plugins": [True],
    }


def test_progress_is_told_and_ends_on_an_interrupt(shown: dict[str, Any]) -> None:
    model = shown["models"]["none"]
    assert model["lines"][0].startswith("Building: ")
    steps = [line.rpartition(" ")[2].split("/") for line in model["lines"] if "/" in line]
    assert steps and all(0 < int(done) <= int(of) for done, of in steps)
    assert model["cancelled"]


def test_a_file_without_functions(release: Release, shown: dict[str, Any]) -> None:
    """What `plugin_before_function` does not hold for is parsed without them, weights beside the file."""
    if takes_plugins(release):
        assert shown["stripped"] == ["passed"] * 3
    else:  # the function is really left out: nobody here knows the node
        kind, why = shown["stripped"]
        assert kind == "BuildFailed" and "Op type WindowedAttention is not supported" in why


def test_the_parsers_errors_are_told(shown: dict[str, Any]) -> None:
    kind, what, why = shown["unknown"]
    assert kind == "BuildFailed" and what.startswith("tensorrt cannot read ")
    assert why.endswith("(node a_node, Nothing)")


def test_a_network_that_is_not_made_is_told(release: Release, shown: dict[str, Any]) -> None:
    """TensorRT-RTX knows no ahead-of-time plugins: their flag, which the bindings have, is refused by what is below."""
    if release.numbers < AOT_SINCE:
        assert shown["aot"] == []
        return
    kind, what, why = shown["aot"]
    assert (kind, what) == ("BuildFailed", f"tensorrt {release.version} makes no network for ahead-of-time plugins.")
    assert "Parameter check failed" in why, "the error itself, not what follows it"


@pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")
def test_the_command_wants_a_gpu(shown: dict[str, Any]) -> None:
    code, out, said = shown["build"]
    assert (code, out, shown["files"]) == (MissingDependency.exit_code, "", [])
    assert "tensorrt builds on a GPU only." in said
