"""The exact command that adds a Python package: this interpreter's pip, and the release that localattn asks for."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from importlib import metadata

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def pip_install(package: str) -> str:
    """The command for a distribution, `onnxruntime` or `onnxruntime-gpu[cuda,cudnn]`."""
    return shlex.join([sys.executable, "-m", "pip", "install", requirement(package)])


def requirement(package: str) -> str:
    """A distribution with the releases that localattn's own metadata allows; its bare name where it names none."""
    bare = package.split("[")[0]
    found = _requirements().get(_plain(bare), "")
    return found if found and ("[" not in package or "[" in found) else package


def allowed(package: str, version: str) -> bool:
    """Whether a release is one that localattn's metadata allows; True where that cannot be told."""
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
    """What the extras ask for: plain name → `torch<2.14,>=2.13`."""
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
