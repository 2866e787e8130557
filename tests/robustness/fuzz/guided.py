"""Fuzzing guided by coverage, with atheris: `python -m tests.robustness.fuzz.guided TARGET RUNS`.

Runs in one process on the targets that are one file. The package is imported under atheris' instrumentation, so new
branches of it steer the search; half the mutations are ours, which keep the formats' sums and lengths right.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from random import Random

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install atheris")

with atheris.instrument_imports(include=["localattn"]):
    from localattn import cli
    from localattn.commands.parts import console
    from localattn.core.storage import publishing  # noqa: F401
    from localattn.exporter.checkpoint import describe, load, unwrap  # noqa: F401
    from localattn.onnx_graph import summary  # noqa: F401
    from localattn.runtime.bundle import archive, verify  # noqa: F401
    from localattn.runtime.bundle.device import check_files  # noqa: F401

from .case import Case, lay_out
from .judge import ALLOWED
from .kinds.mutate import mutate_bytes
from .kinds.targets import TARGETS
from .seeds import Seeds


def run_case(case: Case, folder: Path) -> None:
    """Run a case in this process; what is not documented becomes an exception, which atheris reports."""
    console.Verbosity.verbose = console.Verbosity.quiet = False
    sys.argv = ["localattn", *lay_out(case, folder)]
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    if code not in ALLOWED or "Traceback" in err.getvalue():
        raise AssertionError(f"exit {code}: {err.getvalue()[:500]}")


def main() -> None:
    """Fuzz until RUNS inputs were tried or one was a fault."""
    name, runs = sys.argv[1], int(sys.argv[2])
    target = TARGETS[name]
    if target.with_bytes is None or target.start is None or target.change is None:
        sys.exit(f"{name} is not one file; use python -m tests.robustness.fuzz --target {name}")
    with_bytes, change = target.with_bytes, target.change
    folder = Path(tempfile.mkdtemp(prefix="localattn-guided-"))
    (folder / "seeds").mkdir()
    (folder / "corpus").mkdir()
    seeds = Seeds(folder / "seeds")
    start = target.start(seeds)
    (folder / "corpus" / "sound").write_bytes(start)
    with_bytes(start, seeds)  # makes every other file before the inputs are counted

    def one(content: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="localattn-case-") as place:
            run_case(with_bytes(content, seeds), Path(place))

    def mutator(content: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(content, max_size))
        try:
            return change(random, content)[:max_size]
        except Exception:  # an input that is no longer of its format
            return mutate_bytes(random, content)[:max_size]

    options = [
        f"-runs={runs}",
        f"-max_len={4 * len(start)}",
        "-timeout=120",
        "-rss_limit_mb=6000",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(folder / "corpus"), *options], one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
