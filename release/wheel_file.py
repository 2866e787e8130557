"""Wheels, written so that the same content gives the same bytes (packaging.python.org, "Binary distribution")."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

Files = Mapping[str, bytes]

_MOMENT = (1980, 1, 1, 0, 0, 0)  # the oldest that a ZIP archive knows
# pip takes the first that it knows: older ones know only the second name of the same platform.
_PLATFORMS = "manylinux_2_17_{arch}.manylinux2014_{arch}"


def platform_tag(arch: str) -> str:
    """Return the tag of wheels without Python code of one version, for Linux with the glibc of 2012 or later."""
    return f"py3-none-{_PLATFORMS.format(arch=arch)}"


def read(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel, without its list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith(("/", "/RECORD"))}


def information(files: Files) -> str:
    """Return the folder of a wheel's metadata, `localattn-0.1.0.dist-info`."""
    return next(name.split("/")[0] for name in files if name.endswith(".dist-info/METADATA"))


def metadata(files: Files, name: str) -> str:
    """Return a field of a wheel's metadata, as `Version`."""
    return str(Parser().parsestr(files[f"{information(files)}/METADATA"].decode())[name])


def write(files: Files, folder: Path, tag: str) -> Path:
    """Write a wheel for the platforms of a tag, with its list of files, and return its path."""
    info = information(files)
    pure = tag.endswith("-any")
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in tag.split("-")[-1].split("."))
    header = f"Wheel-Version: 1.0\nGenerator: localattn\nRoot-Is-Purelib: {str(pure).lower()}\n{tags}"
    # The metadata comes last, as the format recommends.
    listed = sorted({**files, f"{info}/WHEEL": header.encode()}.items(), key=lambda item: (info in item[0], item[0]))
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in listed) + f"{info}/RECORD,,\n"
    path = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in (*listed, (f"{info}/RECORD", record.encode())):
            entry = zipfile.ZipInfo(name, _MOMENT)
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
