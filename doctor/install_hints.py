"""Give the exact command that adds a Python package: this interpreter's pip, and the release needed."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from importlib import metadata

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def pip_install(package: str) -> str:
    """Return the command for a distribution, `onnxruntime` or `onnxruntime-gpu[cuda,cudnn]`."""
    return shlex.join([sys.executable, "-m", "pip", "install", requirement(package)])


def requirement(package: str) -> str:
    """Return a distribution with the releases that localattn's metadata allows; its bare name without any."""
    bare = package.split("[")[0]
    found = _requirements().get(_plain(bare), "")
    return found if found and ("[" not in package or "[" in found) else package


def allowed(package: str, version: str) -> bool:
    """Check whether localattn's metadata allows a release; True where that is not known."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    found = _requirements().get(_plain(package))
    if not (found and version):
        return True
    return bool(Requirement(found).specifier.contains(version.split("+")[0], prereleases=True))


@cache
def _requirements() -> dict[str, str]:
    """Return the requirements of the extras: plain name → `torch<2.14,>=2.13`."""
    try:
        lines = metadata.requires("localattn") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        text = line.split(";")[0].strip()
        match = _NAME.match(text)
        if match and _plain(match[0]) != "localattn":
            found.setdefault(_plain(match[0]), text)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
