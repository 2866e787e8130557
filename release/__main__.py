"""`python -m release`: build, check, install and list everything that a release publishes, in a folder.

Run from the root of the checkout, on Linux, on either processor. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Build what was asked for; end with an error at the first thing that is not right."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder (default: dist)")
    parser.add_argument("--no-plugin-library", action="store_true", help="leave out TensorRT's plugin library")
    parser.add_argument("--no-install", action="store_true", help="do not install anything, which takes the network")
    options = parser.parse_args()
    _the_package_is_this_tree()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"{out} is not empty.")
    os.environ.setdefault("SOURCE_DATE_EPOCH", _commit_time())

    from localattn.release import kernels, plugin_library
    from localattn.release.checks import check_library, check_wheel

    pure, _source = build_pure(ROOT, out)
    made = [pure, *kernels.wheels(pure, out)]
    for library in kernels.untested(out):
        check_library(library.read_bytes())
        _tell(f"{library.name}: exports and dependencies are right; nobody has run it")
    if not options.no_plugin_library:
        made += plugin_library.wheels(pure, out, progress=_tell)
    for wheel in made:
        _tell(f"{wheel.name}: {check_wheel(wheel)}, {wheel.stat().st_size / 1e6:.1f} MB")
    if not options.no_install:
        _install(out, with_plugin_library=not options.no_plugin_library)
    listed = [path for path in sorted(out.iterdir()) if path.is_file()]
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in listed)
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def build_pure(tree: Path, out: Path) -> tuple[Path, Path]:
    """Build the source distribution and from it the wheel without libraries, with the tools that are installed."""
    from localattn.release.sbom import with_sbom
    from localattn.release.source_file import repeatable
    from localattn.release.wheel_file import read, write

    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch, str(tree)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"The build failed:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
        (wheel,), (source,) = Path(scratch).glob("*.whl"), Path(scratch).glob("*.tar.gz")
        (out / source.name).write_bytes(repeatable(source.read_bytes()))
        return write(with_sbom(read(wheel), ()), out, "py3-none-any"), out / source.name


def _install(out: Path, *, with_plugin_library: bool) -> None:
    from localattn.release.installed import Environment, check_kernels, check_plugin_library
    from localattn.release.plugin_library import NAME

    with TemporaryDirectory() as scratch:
        environment = Environment.create(Path(scratch, "venv"))
        # First from the folder alone: an index may have a package of that name. Then what it requires.
        ours = ("--no-index", "--no-deps", "--find-links", str(out))
        environment.install(*ours, "localattn")
        environment.install("localattn[cpu]")
        found = check_kernels(environment)
        times = {row["plugin"] or "none": row["latency"]["percentiles"]["p50"] for row in found["bench"]["rows"]}
        _tell(f"installed with [cpu] and no compiler: {found['checked']['instruction_set']}, {times}")
        if with_plugin_library:
            environment.install(*ours, NAME)
            environment.install("localattn[plugin-library]")
            _tell(f"installed with [plugin-library]: {check_plugin_library(environment)['path']}")


def _commit_time() -> str:
    ended = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return ended.stdout.strip() or "0"


def _the_package_is_this_tree() -> None:
    """End unless `import localattn` finds the checkout: its libraries are built from what is imported."""
    import localattn

    if Path(localattn.__file__).resolve().parent != ROOT:
        sys.exit(f"localattn is imported from {localattn.__file__}: run pip install -e . here first.")


def _tell(step: str) -> None:
    print(f"· {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
