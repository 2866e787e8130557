"""Run the matrix, `python -m tests.runtimes [NAME...]`, and write its tables into docs/runtimes.md.

With names only these runtimes and tools are run; the figures of the others stay. Environments are fetched from PyPI
and npm when they are first needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cases import FORMS, write_cases
from .environments import RUNTIMES, TOOLS, Absent, Environment, run
from .kinds import KINDS

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtimes.md"
_FIGURES = Path(__file__).with_name("results.json")
# What a file may be off in another runtime: what the tolerances of `core.tolerance` allow, of numbers of about 1.
WRONG = {"fp16": 2e-2, "int8": 5e-2, "int4": 5e-2}
WRONG_FP32 = 1e-3
_WIDE = {"quantize_dynamic": 1.0}  # it makes int8 of fp32, which is not an error


def wrong(kind: str, error: float | None) -> bool:
    """Whether a largest error is no rounding any more."""
    allowed = max((WRONG[word] for word in kind.split() if word in WRONG), default=WRONG_FP32)
    return error is None or not error <= allowed


def explained(name: str) -> str:
    """Why a runtime may be wrong without an error, which the page says; empty where it may not."""
    environment = (RUNTIMES | TOOLS).get(name)
    return environment.wrong if environment else ""


def main() -> None:
    """Run, keep the figures, write the page; exit code 1 if anything is wrong without an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.runtimes", description=__doc__)
    known = [*RUNTIMES, *TOOLS]
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(known)}")
    parser.add_argument("--cases", type=Path, help="a folder of cases that were written before")
    asked = parser.parse_args()
    for name in set(asked.names) - set(known):
        parser.error(f"there is no {name}")
    figures: dict[str, Any] = json.loads(_FIGURES.read_text()) if _FIGURES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        cases = asked.cases or write_cases(Path(folder), list(KINDS))
        for name in asked.names or known:
            try:
                figures[name] = run(name, cases)
            except (Absent, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
            _FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    start, end = "<!-- matrix -->\n", "<!-- end of matrix -->"
    before, _, rest = _PAGE.read_text().partition(start)
    _PAGE.write_text(before + start + tables(figures) + end + rest.partition(end)[2])
    faults = [
        f"{name}, {kind}, {form}: error {result['error']}"
        for name, answer in figures.items()
        for kind, forms in answer["results"].items()
        for form, result in forms.items()
        if "error" in result and name not in _WIDE and wrong(kind, result["error"]) and not explained(name)
    ]
    print("\n".join(faults) or "Nothing is wrong without an error.")
    sys.exit(1 if faults else 0)


def tables(figures: dict[str, Any]) -> str:
    """One table of runtimes and one of tools, for each form of the files."""
    parts = []
    for title, environments in (("Runtimes", RUNTIMES), ("Tools", TOOLS)):
        for form in FORMS:
            ran = [name for name in environments if name in figures]
            if not ran:
                continue
            parts.append(f"\n### {title}: files {form if form == 'as exported' else 'in ' + form}\n\n")
            parts.append(_table(ran, environments, figures, form) + "\n")
    return "".join(parts)


def _table(ran: list[str], environments: dict[str, Environment], figures: dict[str, Any], form: str) -> str:
    lines = [f"| | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for name in ran:
        version = figures[name]["version"]
        title = environments[name].title
        shown = title if version.rpartition(".")[0] in title else f"{title} {version}"
        cells = [_cell(name, kind, figures[name]["results"].get(kind, {}).get(form)) for kind in KINDS]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, kind: str, result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "failed" in result:
        return "fails"
    error = result["error"]
    number = "0" if error == 0 else "not a number" if error is None else f"{error:.0e}".replace("e-0", "e-")
    return f"**wrong: {number}**" if name not in _WIDE and wrong(kind, error) else number


if __name__ == "__main__":
    main()
