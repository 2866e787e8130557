"""Checkpoints of small upstream models, and the command line run in this process."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .support import one_core  # noqa: F401 (it pins this process)

# isort: split
import pytest
import torch
from hypothesis import HealthCheck, settings

from localattn import cli
from localattn.plugins import shared_library

from . import packages
from .support import run_folder
from .support.native import compiled_once
from .thinning import thin

# How long an example takes is the machine's affair.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TINY = {
    "num_tokens": 23,
    "max_seq_len": 64,
    "dim": 16,
    "depth": 2,
    "local_attn_window_size": 4,
    "dim_head": 8,
    "heads": 2,
    "causal": True,
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the workers of this run share; remove it when the run ends."""
    if run_folder.begin():
        config.add_cleanup(run_folder.end)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the packages whose tests were skipped, and how to add them."""
    if absent := ", ".join(package.name for package in packages.missing()):
        terminalreporter.write_line(f"Not installed: {absent}. `python -m tests` adds them, and runs their tests.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow before pytest leaves the slow ones out."""
    thin(items)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def save_upstream(folder: Path, class_name: str, kwargs: dict[str, Any], name: str = "model.pt") -> Path:
    """An upstream model with random weights, saved with its config beside it."""
    import local_attention

    random.seed(0)  # hyper-connections draws a stream from it
    torch.manual_seed(0)
    module = getattr(local_attention, class_name.split(".")[1])(**kwargs)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    path = folder / name
    torch.save(module.state_dict(), path)
    path.with_suffix(".json").write_text(json.dumps({"class": class_name, "kwargs": kwargs}))
    return path


@pytest.fixture(autouse=True, scope="session")
def no_libraries_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Libraries that were built on this machine are not found: whoever wants one builds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def libraries_are_compiled_once() -> Iterator[None]:
    """A library of the same sources, options and compiler is compiled once a run; who builds it again gets a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_library, "subprocess", SimpleNamespace(run=compiled_once.run))
        yield


@pytest.fixture(autouse=True, scope="session")
def operators_are_listed_once() -> Iterator[None]:
    """At each step of an export PyTorch looks up every operator that C++ registered, some sixty times in all."""
    from torch._export import utils as export_utils

    look_up, seen = export_utils._materialize_cpp_cia_ops, []

    def looked_up_once() -> None:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if registered != seen:
            look_up()
            seen[:] = registered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_utils, "_materialize_cpp_cia_ops", looked_up_once)
        yield


@pytest.fixture(autouse=True)
def no_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test imported from its own folder goes with it: a later test of the process would find it instead."""
    before = set(sys.modules)
    yield
    scratch = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if any(place.startswith(scratch) for place in _places(sys.modules[name])):
            del sys.modules[name]


def _places(module: object) -> list[str]:
    """Where a module lies; a package without a file may lie in several folders."""
    file = getattr(module, "__file__", None)
    return [file] if isinstance(file, str) else [str(path) for path in getattr(module, "__path__", ())]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A LocalTransformer of two layers with windows of 4, as a checkpoint with its config."""
    return save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)


# How a stage begins on a stderr that is no terminal: "   1.2 s  Tracing the model".
STAGE = re.compile(r"^ *\d+\.\d s  (.*)\n", re.MULTILINE)


class Finished(NamedTuple):
    """How a command ended: `err` is what stderr had besides the stages."""

    code: int
    out: str
    err: str
    stages: tuple[str, ...] = ()


@pytest.fixture
def log_of_this_test() -> Iterator[None]:
    """What a command showed of its log, other tests do not."""
    log = logging.getLogger("localattn")
    handlers, level = [*log.handlers], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def localattn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log_of_this_test: None
) -> Callable[..., Finished]:
    """Run the command line in this process: `localattn("export", path)`."""

    def call(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["localattn", *map(str, arguments)])
        monkeypatch.setattr("localattn.commands.parts.console.Verbosity.verbose", False)
        monkeypatch.setattr("localattn.commands.parts.console.Verbosity.quiet", False)
        monkeypatch.setattr(
            "localattn.core.machine.process.owned", False
        )  # what `main` sets is not left to other tests
        capsys.readouterr()
        code = 0
        with warnings.catch_warnings():
            # Python hides these from users, pytest does not.
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            try:
                cli.main()
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
        captured = capsys.readouterr()
        return Finished(code, captured.out, STAGE.sub("", captured.err), tuple(STAGE.findall(captured.err)))

    return call
