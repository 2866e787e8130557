"""Give the command that installs an extra of this package from the package's own origin.

Texts name it as for a package of an index, `pip install 'localattn[cpu]'`. `as_installed` turns that into what works
here: a source checkout is installed again with the extra, and so is a wheel.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAMED = re.compile(r"pip install 'localattn\[([a-z,]+)\]'")
_FROM_AN_INDEX = "pip install 'localattn[{}]'"


def as_installed(text: str) -> str:
    """Rewrite each install command for an extra into the one that works here."""
    if "localattn[" not in text:
        return text
    try:
        here = Path.cwd()
    except OSError:  # the working folder was removed
        here = Path("/")
    command = _command(here)
    return _NAMED.sub(lambda match: command.format(match[1]), text)


@cache
def _command(here: Path) -> str:
    """Return the install command for the working folder `here`, with `{}` for the extra."""
    from importlib.metadata import PackageNotFoundError, distribution

    tree = Path(__file__).resolve().parents[1]
    try:
        origin = distribution("localattn").read_text("direct_url.json")
    except PackageNotFoundError:  # run from its source tree
        return command_of("", tree, here)
    return _FROM_AN_INDEX if origin is None else command_of(origin, tree, here)


def command_of(origin: str, tree: Path, here: Path) -> str:
    """Return the install command for a package of one origin.

    Args:
        origin: what `direct_url.json` holds (packaging.python.org, "Direct URL Data Structure"); "" for a source tree
            that is not installed.
        tree: that source tree.
        here: the working folder.
    """
    try:
        known: Any = json.loads(origin) if origin else {"url": tree.as_uri(), "dir_info": {"editable": True}}
        url, folder = known["url"], known.get("dir_info", {})
        is_folder, editable = "dir_info" in known, bool(folder.get("editable"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _FROM_AN_INDEX
    if not isinstance(url, str) or "{" in url or "}" in url:
        return _FROM_AN_INDEX
    if not is_folder or not url.startswith("file:"):  # a wheel, an archive, a repository
        return f'pip install "localattn[{{}}] @ {url}"'
    path = unquote(urlsplit(url).path)
    short = "." if Path(path) == here else path
    return f'pip install {"-e " if editable else ""}"{short}[{{}}]"'
