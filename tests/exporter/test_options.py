"""The options of an export: one name everywhere, old names with a warning, and what does not go together."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer

import localattn
from localattn.cli import command_line
from localattn.core.documents.sidecar import Sidecar
from localattn.core.errors import UsageError
from localattn.exporter.options import (
    ExportOptions,
    ExportRequest,
    ModuleOptions,
    ShapeRequest,
    Sizes,
    common,
    options_of,
    recorded,
)


def test_an_option_has_one_name_and_default_in_every_way() -> None:
    """What differs on the command line is declared: flags that switch something off, and --force."""
    node: Any = typer.main.get_command(command_line(("export",)))
    typed = {parameter.name: parameter for parameter in node.commands["export"].params}
    arguments = inspect.signature(localattn.export).parameters
    of_modules = inspect.signature(localattn.export_module).parameters
    requested = {field.name for kind in (ExportRequest, ShapeRequest) for field in fields(kind)}
    for name, option in options_of(ExportOptions).items():
        default = arguments[name].default
        assert name in requested, name
        assert (name in of_modules) == (name in options_of(ModuleOptions)), name
        if option.panel:
            parameter = typed[option.flag or name]
            switched = option.flag.startswith("no_")
            assert parameter.default == (not default if switched else default), name
            assert parameter.rich_help_panel == option.panel
    assert {option.flag for option in options_of(ExportOptions).values()} == {"", "no_function_body", "force"}


def test_docstrings_list_every_argument() -> None:
    for function in (localattn.export, localattn.export_module):
        told = inspect.getdoc(function) or ""
        assert all(f"\n    {name}: " in told for name in inspect.signature(function).parameters)
        assert "\n    function_body: False: leave out" in told and "\nRaises:\n    UsageError" in told


def test_old_names_are_taken_with_a_warning(tmp_path: Path) -> None:
    for quick, checks in ((True, "quick"), (False, "all")):
        with (
            pytest.warns(FutureWarning, match=f"export.quick=….*checks={checks!r}"),
            pytest.raises(UsageError, match="Cannot read"),
        ):
            localattn.export(tmp_path / "none.pt", quick=quick)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dtpye"):
        localattn.export(tmp_path / "none.pt", dtpye="fp16")  # type: ignore[call-arg]


def test_sidecars_of_older_releases_have_todays_names() -> None:
    sidecar: dict[str, Any] = {
        **{"class": "x.Y", "kwargs": {}, "inputs": [], "outputs": [], "seq_len": 1, "batch": 1, "dtype": "fp32"},
        **{"opset": 20, "function_body": True, "checkpoint_sha256": "", "checkpoint_name": "", "model_sha256": ""},
        **{"created": "", "options": {"weights": "int8", "attention": "fp8", "causal": True, "entry": "ema"}},
    }
    today = {"weight_dtype": "int8", "attention_dtype": "fp8", "causal": True, "entry": "ema"}
    assert Sidecar(**sidecar).options == today
    chosen = ExportOptions(weight_dtype="int8", attention_dtype="fp8", causal=True, entry="ema", opset=21)
    assert recorded(chosen) == today and recorded(ExportOptions()) == {}


def test_a_request_has_every_option() -> None:
    chosen = ExportOptions(seq_len=9, mask=True, dynamic=["batch"], mode="step", chunk=4, checks="quick", opset=21)
    request = chosen.request(Path("m.pt"), Path("m.onnx"))
    assert (request.shapes.mask, request.dynamic) == (True, ("batch",))
    assert common(ExportRequest, replace(chosen, dynamic=("batch",))).items() <= vars(request).items()
    assert request.quick and request.precision == "fp32"
    assert (request.shapes.seq_len, request.shapes.max_length) == (None, 9)
    whole = replace(chosen, mode="full", chunk=None).request(Path("m.pt"), Path("m.onnx"))
    assert (whole.shapes.seq_len, whole.shapes.max_length) == (9, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "steps"}, "Unknown mode"),
        ({"dtype": "float16"}, "Unknown dtype"),
        ({"checks": "few"}, "Unknown checks"),
        ({"chunk": 4}, "needs `mode='step'`"),
        ({"mode": "step", "position_ids": True}, "`position_ids=True` cannot be combined with `mode='step'`"),
        ({"mode": "prefill", "attention_dtype": "fp8"}, "cannot be combined with `mode='prefill'`"),
        ({"mode": "step", "chunk": 0}, "`chunk` is 0"),
        ({"mode": "step", "seq_len": 0}, "`seq_len` is 0"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        ExportOptions(**options).check()
    with pytest.raises(UsageError, match="contradict"):
        ModuleOptions(standard_ops=True, function_body=False)


def test_sizes_are_a_request() -> None:
    sizes = Sizes(16, 2, 4, 8, mask=True)
    assert isinstance(sizes, ShapeRequest) and replace(sizes, seq_len=3) == Sizes(3, 2, 4, 8, mask=True)
    assert {field.name for field in fields(Sizes)} == {field.name for field in fields(ShapeRequest)}
