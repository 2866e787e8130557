"""What must be true of a wheel before it is published."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from localattn.core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN
from localattn.plugins.library.sidecar import companion_path

from .examine import Examined, examine
from .wheel_file import Files, read

_COMPANION = companion_path(Path(TENSORRT_PLUGIN.file_name)).name
LARGEST = 100_000_000  # bytes of a wheel, which package indexes take
_PLUGINS = Path(__file__).resolve().parents[1] / "plugins"


def _exported(sources: str) -> set[str]:
    """Return the symbols that the linker's script next to a library's sources lets out."""
    text = (_PLUGINS / sources / "exports.map").read_text(encoding="utf-8")
    return set(re.findall(r"\w+(?=;)", text[text.index("global:") : text.index("local:")]))


_EXPORTS = {
    CPU_KERNELS.file_name: _exported("cpu/source"),
    TENSORRT_PLUGIN.file_name: _exported("library/source"),
    _COMPANION: _exported("library/companion"),
}
# Libraries that every Linux, macOS or Windows has.
_SYSTEMS_OWN = re.compile(
    r"(lib(c|m|dl|pthread)\.so\.\d+|ld-linux-[\w.-]+|/usr/lib/libSystem\.B\.dylib|KERNEL32\.dll|api-ms-win-crt-[\w-]+\.dll)"
)


class Wrong(Exception):
    """A wheel or library is not as it must be."""


def check_wheel(wheel: Path) -> str:
    """Check a wheel's size, its libraries, their sidecars and the platforms it is for; return what was found, in words.

    Raises:
        Wrong: something is not as it must be.
    """
    if wheel.stat().st_size > LARGEST:
        raise Wrong(f"{wheel.name} has {wheel.stat().st_size} bytes")
    files = read(wheel)
    libraries = {name: data for name, data in files.items() if name.endswith(".so")}
    for name, data in libraries.items():
        found = check_library(data, _EXPORTS[Path(name).name])
        if _stated(files, name) != (hashlib.sha256(data).hexdigest(), found.machine):
            raise Wrong(f"the sidecar of {name} is that of another library")
        if f"_{found.machine}" not in wheel.name:
            raise Wrong(f"{wheel.name} has a library for {found.machine}")
    if not libraries:
        return "no library"
    return f"auditwheel: {audited(wheel)}"


def _stated(files: Files, library: str) -> tuple[str, str]:
    """Return SHA-256 and processor of a library by the sidecar next to it; those of a companion are its library's."""
    path = PurePosixPath(library)
    if path.name == _COMPANION:
        sidecar = json.loads(files[f"{path.parent}/{TENSORRT_PLUGIN.file_name}.json"])
        return sidecar["companion"]["sha256"], sidecar["arch"]
    sidecar = json.loads(files[f"{library}.json"])
    return sidecar["sha256"], sidecar["arch"]


def check_library(data: bytes, exports: set[str] = _EXPORTS[CPU_KERNELS.file_name]) -> Examined:
    """Check what a library exports and needs.

    Raises:
        Wrong: it exports something else, or needs more than the system's own libraries.
    """
    found = examine(data)
    # On macOS the linker adds names of its own, and the C++ library's operators new and delete stay visible, as weak
    # symbols that defer to the system's.
    seen = {name for name in found.exports if not re.match(r"_Z[nd][awl]|__dso_handle$|_mh_dylib_header$", name)}
    if seen != exports:
        raise Wrong(f"it exports {sorted(seen)}")
    foreign = sorted(name for name in found.needs if not _SYSTEMS_OWN.fullmatch(name))
    if foreign:
        raise Wrong(f"it needs {', '.join(foreign)}")
    return found


def audited(wheel: Path) -> str:
    """Return the oldest platform that auditwheel finds a wheel to run on, which must be the one in its name.

    Raises:
        Wrong: it is a newer one.
    """
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = " ".join((ended.stdout + ended.stderr).split())
    found = re.search(r'following platform tag: "(\w+)"', said)
    if ended.returncode or found is None or found[1] not in wheel.name:
        raise Wrong(f"auditwheel says of {wheel.name}: {said}")
    return found[1]
