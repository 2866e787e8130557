"""`localattn bundle verify`: the checks of the bundle's own script, also for a tar, with the package's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.at_work import temporary_folder
from ...core.errors import CheckFailed, LocalAttnError, MissingDependency, UsageError
from ...core.limits import check_threads
from ...core.storage.reading import check_plain
from .archive import check_tar, extract, read_table, read_tar_manifest
from .device import check_files
from .device import verify as script
from .device.check_files import Fault

_ERRORS: dict[int, type[LocalAttnError]] = {
    check_files.ALTERED: CheckFailed,
    check_files.NO_BUNDLE: UsageError,
    check_files.MISSING: MissingDependency,
}


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Args:
        manifest: of the bundle.
        manifest_sha256: SHA-256 of its manifest.
        report: rows, what did not run, and the exit code, as `device.verify.run_bundle` returns them.
    """

    manifest: dict[str, Any]
    manifest_sha256: str
    report: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every file is intact, and every sample that ran agrees."""
        return bool(self.report["passed"])

    def __bool__(self) -> bool:
        """Return `passed`."""
        return self.passed


def verify_bundle(
    path: Path,
    *,
    model: str | None = None,
    provider: str = "auto",
    threads: int | None = None,
    files_only: bool = False,
    manifest_sha256: str | None = None,
    run_libraries: bool = False,
) -> Verified:
    """Check every file of a bundle, then run its samples.

    A tar is checked first; only then it is extracted to a temporary folder and run.

    Args:
        path: the folder or tar.
        model: run only this one, by its path or file name.
        provider: of onnxruntime: auto, cpu, cuda or tensorrt.
        threads: CPU threads for one operator.
        files_only: run nothing.
        manifest_sha256: refuse the bundle unless its manifest has this SHA-256. As the manifest fixes every file, the
            libraries are allowed too.
        run_libraries: also run with the libraries of the bundle, which are code.

    Raises:
        UsageError: no bundle, or one with a path, link or claim that is refused.
        CheckFailed: a file is missing, added or altered.
    """
    check_threads(threads)
    if provider not in ("auto", *script.PROVIDERS):
        raise UsageError(f"There is no provider {provider!r}.", fix=f"Known: auto, {', '.join(script.PROVIDERS)}.")
    with as_errors(), checked(path, manifest_sha256, unpack=not files_only) as (folder, manifest, digest):
        if folder is None:
            report = script.nothing_run(manifest)
        else:
            libraries = run_libraries or manifest_sha256 is not None
            report = script.run_bundle(folder, manifest, model, provider, threads, libraries=libraries)
    return Verified(manifest, digest, report)


@contextmanager
def as_errors() -> Iterator[None]:
    """Turn faults of the bundle's own script into the package's errors."""
    try:
        yield
    except Fault as fault:
        raise _ERRORS[fault.code](fault.what, why=fault.why, fix=fault.fix) from fault
    except OSError as error:
        raise UsageError("The bundle cannot be read.", why=str(error)) from error


@contextmanager
def checked(path: Path, expected: str | None, *, unpack: bool) -> Iterator[tuple[Path | None, dict[str, Any], str]]:
    """Check every file, then yield the folder to run (None without `unpack`), the manifest and its SHA-256."""
    table = None
    if not path.is_dir():
        check_plain(path)
        if not path.is_file():
            raise UsageError(f"Cannot read {path}.", why="There is no such file or folder.", fix="Give a bundle.")
        table = read_table(path)
    text = check_files.read_manifest(path) if table is None else read_tar_manifest(path, table)
    manifest, digest = check_files.read_expected(text, expected)
    if table is None:
        check_files.check_folder(path, manifest)
    else:
        check_tar(path, table, manifest)
    with ExitStack() as stack:
        folder = path
        if unpack and table is not None:
            folder = stack.enter_context(temporary_folder())
            extract(path, table, folder)
        yield (folder if unpack else None), manifest, digest
