"""Measure which onnxruntime reads which files, `python -m tests.runtimes.compatibility [NAME...]`, and write tables.

Each release of onnxruntime is installed from PyPI into an environment of its own, opens every file and runs it; the
outputs are compared with those of the installed onnxruntime. With names only these are run; the figures of the others
stay. The table is in docs/runtimes.md, between its marks. "targets" builds engines of TensorRT-RTX for each GPU series,
where it is installed; that table is in docs/deploy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..support.arm_machine import ONNXRUNTIME
from .__main__ import wrong
from .cases import write_case
from .environments import Absent, Environment, run
from .kinds import transformer

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtimes.md"
_ENGINES = _PAGE.with_name("deploy.md")
_FIGURES = Path(__file__).with_name("compatibility.json")
_OLD_NUMPY = ("1.16", "1.17", "1.18", "1.19", "1.20")


def _release(version: str, package: str = "onnxruntime") -> Environment:
    numpy = "numpy<2" if version.startswith(_OLD_NUMPY) else "numpy"
    return Environment(f"{package} {version}", (f"{package}=={version}", numpy), ("run_onnxruntime.py",))


_ARM = Environment(f"onnxruntime {ONNXRUNTIME}, aarch64", (), ("run_onnxruntime.py",), program="arm")
RELEASES = {
    environment.title: environment
    for environment in (
        *map(_release, ("1.16.3", "1.17.3", "1.18.1", "1.19.2", "1.20.1", "1.21.1", "1.22.1", "1.23.2")),
        *map(_release, ("1.24.4", "1.26.0", "1.28.0", "1.30.0", "1.32.0")),
        *(_release(version, "onnxruntime-gpu") for version in ("1.18.1", "1.23.2", "1.31.1")),
        _ARM,
    )
}
# The files: how each is exported.
FILES: dict[str, Callable[[Path], Path]] = {
    "opset 20 (default)": transformer,
    "opset 18": lambda folder: transformer(folder, opset=18),
    "opset 19": lambda folder: transformer(folder, opset=19),
    "opset 21": lambda folder: transformer(folder, opset=21),
    "opset 23": lambda folder: transformer(folder, opset=23),
    "opset 24": lambda folder: transformer(folder, opset=24),
    "fp16, opset 19": lambda folder: transformer(folder, dtype="fp16", opset=19),
    "int8-dynamic, opset 19": lambda folder: transformer(folder, weight_dtype="int8-dynamic", opset=19),
    "int8, opset 19": lambda folder: transformer(folder, weight_dtype="int8", opset=19),
    "int4, opset 19": lambda folder: transformer(folder, weight_dtype="int4", opset=19),
}


# What TensorRT-RTX builds for, and the files.
TARGETS = ("rtx20", "sm_80", "rtx30", "sm_87", "rtx40", "sm_90", "rtx50")
ENGINE_FILES: dict[str, dict[str, Any]] = {"fp32": {}, "fp16": {"dtype": "fp16"}, "bf16": {"dtype": "bf16"}}


def write_files(folder: Path, names: list[str]) -> Path:
    """Write a case of each of these files."""
    for number, name in enumerate(names):
        made = folder / f"made{number}"
        made.mkdir()
        write_case(folder, name, FILES[name](made), forms=("as exported",))
    return folder


def build_targets(folder: Path) -> dict[str, dict[str, str]]:
    """Build an engine of each kind of file for each target, and return "builds", or why not.

    Raises:
        Absent: TensorRT-RTX is not installed.
    """
    from localattn.core.errors import LocalAttnError, MissingDependency
    from localattn.runtime.backends.engines import BuildRequest
    from localattn.runtime.backends.tensorrt.builder.build import build_engine

    found: dict[str, dict[str, str]] = {}
    for kind, options in ENGINE_FILES.items():
        place = folder / f"engine-{kind}"
        place.mkdir()
        model = transformer(place, **options)
        for target in TARGETS:
            try:
                build_engine(BuildRequest(model, place / f"{target}.engine", "tensorrt-rtx", (target,)))
                answer = "builds"
            except MissingDependency as error:
                raise Absent(str(error)) from error
            except LocalAttnError as error:
                known = {"FP32 GEMM is not supported": "no fp32 products", "does not build for": "not a target"}
                text = str(error)
                answer = next((short for piece, short in known.items() if piece in text), "fails")
            found.setdefault(target, {})[kind] = answer
    return found


def main() -> None:
    """Run, keep the figures, write the pages; exit code 1 if an output is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.runtimes.compatibility", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(RELEASES)}, targets")
    asked = parser.parse_args()
    for name in set(asked.names) - {*RELEASES, "targets"}:
        parser.error(f"there is no {name}")
    figures: dict[str, Any] = json.loads(_FIGURES.read_text()) if _FIGURES.exists() else {}
    names = asked.names or [*RELEASES, "targets"]
    with tempfile.TemporaryDirectory() as folder:
        cases = write_files(Path(folder), list(FILES)) if {*names} & {*RELEASES} else Path(folder)
        for name in names:
            try:
                figures[name] = (
                    build_targets(Path(folder)) if name == "targets" else run(name, cases, environment=RELEASES[name])
                )
            except (Absent, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
            _FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    write_tables(figures)
    bad = [
        f"{name}, {kind}: {result['error']}"
        for name, answer in figures.items()
        if name in RELEASES
        for kind, forms in answer["results"].items()
        for result in forms.values()
        if "error" in result and wrong(kind.replace(",", ""), result["error"])
    ]
    print("\n".join(bad) or "Nothing is wrong without an error.")
    sys.exit(1 if bad else 0)


def write_tables(figures: dict[str, Any]) -> None:
    """Write the tables into their pages."""
    for page, mark, text in (
        (_PAGE, "compatibility", table(figures)),
        (_ENGINES, "targets", targets_table(figures.get("targets", {}))),
    ):
        start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = page.read_text().partition(start)
        page.write_text(before + start + text + end + rest.partition(end)[2])


def targets_table(found: dict[str, dict[str, str]]) -> str:
    """Write the table of engines: a row for each target, a column for each file."""
    lines = [f"| target | {' | '.join(ENGINE_FILES)} |", "|---|" + "---|" * len(ENGINE_FILES)]
    for target in TARGETS:
        if target in found:
            lines.append(f"| {target} | {' | '.join(found[target].get(kind, 'not run') for kind in ENGINE_FILES)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def table(figures: dict[str, Any]) -> str:
    """Write the table: a row for each release, a column for each file."""
    lines = [f"| | {' | '.join(FILES)} |", "|---|" + "---|" * len(FILES)]
    for name in RELEASES:
        if name in figures:
            results = figures[name]["results"]
            cells = [cell(results.get(file, {}).get("as exported")) for file in FILES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def cell(result: dict[str, Any] | None) -> str:
    """Write one cell: the largest difference, or why the file does not load."""
    if result is None:
        return "not run"
    if "failed" in result:
        reason = result["failed"]
        known = {
            "IR version": "IR too new",
            "guarantees": "opset too new",
            "accuracy_level": "no such operator",
            "Only 4b": "4 bits only",
        }
        return next((text for piece, text in known.items() if piece in reason), "fails")
    error = result["error"]
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    main()
