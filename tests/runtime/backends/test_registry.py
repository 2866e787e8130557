"""The table of runtimes: every row is whole, and which of them a file and a name choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localattn import load, open_step
from localattn.core.documents.sidecar import Sidecar
from localattn.core.errors import MissingDependency, UsageError
from localattn.runtime.backends import registry
from localattn.runtime.backends.backend import Place

FOLDER = Path(registry.__file__).parent
ONNX, ENGINE = Path("model.ONNX"), Path("model.engine")


@pytest.mark.parametrize("name", registry.ROWS)
def test_every_row_is_a_folder_with_the_same_files(name: str) -> None:
    backend = registry.named(name)
    assert backend.name == name and backend.providers() and backend.doctor_lines()[0].title == backend.title
    assert {"__init__.py", "package.py", "backend.py"} <= {
        path.name for path in (FOLDER / registry.ROWS[name]).iterdir()
    }


def test_every_folder_has_a_row() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == set(registry.ROWS.values())


@pytest.mark.parametrize(
    ("path", "runtime", "chosen"),
    [
        (ONNX, "auto", ("onnxruntime", "")),
        (ONNX, "onnxruntime", ("onnxruntime", "")),
        (ONNX, "openvino", ("openvino", "")),
        (ONNX, "openvino:bf16", ("openvino", "bf16")),
        (ENGINE, "auto", ("tensorrt", "")),
    ],
)
def test_a_file_and_a_name_choose_a_runtime(path: Path, runtime: str, chosen: tuple[str, str]) -> None:
    backend, precision = registry.choose(path, runtime)
    assert (backend.name, precision) == chosen


@pytest.mark.parametrize(
    ("path", "runtime", "said"),
    [
        (ONNX, "toy", "There is no runtime 'toy'. Known: auto, onnxruntime, openvino; openvino:bf16 lets"),
        (ONNX, "onnxruntime:bf16", "There is no runtime 'onnxruntime:bf16'."),
        (ONNX, "tensorrt", "There is no runtime 'tensorrt'."),
        (ENGINE, "openvino", "A file named .engine does not run in openvino."),
        (Path("model.pte"), "auto", "No backend runs files named .pte. Known: .onnx, .engine."),
        (Path("model"), "openvino", "No backend runs files named without a suffix."),
    ],
)
def test_what_does_not_fit_is_refused(path: Path, runtime: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        registry.choose(path, runtime)
    assert said in " ".join(filter(None, (refused.value.what, refused.value.why, refused.value.fix)))


@pytest.mark.parametrize("name", [backend.name for backend in registry.by_name()])
def test_a_provider_or_precision_that_a_runtime_lacks_is_refused_before_the_file_is_opened(name: str) -> None:
    backend = registry.named(name)
    for place, said in ((Place("no-such"), "no provider 'no-such'"), (Place(precision="int3"), "'int3'")):
        with pytest.raises(UsageError, match=said):
            backend.check_place(ONNX, place)
    for provider in ("auto", *backend.providers()):
        backend.check_place(ONNX, Place(provider))


@pytest.mark.parametrize("suffix", registry.suffixes())
@pytest.mark.parametrize("name", ["no\0file", "n" * 5000, "no-file"])
def test_a_name_that_no_file_has_is_one_error(name: str, suffix: str) -> None:
    for opened in (load, open_step):
        with pytest.raises(UsageError, match="There is no such file"):
            opened(f"{name}{suffix}")


def test_runtimes_that_build_files_are_those_that_build_is_asked_for() -> None:
    assert [backend.name for backend in registry.backends() if backend.built] == ["tensorrt", "tensorrt-rtx"]
    assert [registry.builder(backend.name) for backend in registry.builders()] == registry.builders()
    for name in ("openvino", "toy"):
        with pytest.raises(UsageError, match=f"no backend {name!r} that builds") as refused:
            registry.builder(name)
        assert refused.value.fix == "Known: tensorrt, tensorrt-rtx."


@pytest.mark.parametrize("name", registry.ROWS)
def test_a_missing_runtime_is_told_before_a_file_is_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.named(name)

    def missing() -> None:
        raise MissingDependency(f"{name} is missing.")

    monkeypatch.setattr(backend, "require", missing)
    file, place = Path(f"none{backend.suffix}"), Place("auto", None, "none", "")
    ways: list[Callable[[], object]] = [
        lambda: backend.open(file, place),
        lambda: backend.open_step(file, Sidecar.model_construct(), None, place),
    ]
    if backend.tuned:
        ways.append(lambda: backend.open_tuned(file, place, cuda_graph=True, profile=None))
    for way in ways:
        with pytest.raises(MissingDependency, match=f"{name} is missing"):
            way()
