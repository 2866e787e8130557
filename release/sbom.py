"""What a wheel carries, as a CycloneDX 1.6 document (cyclonedx.org), which lies in the wheel (PEP 770)."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from .compiled_in import Part
from .wheel_file import Files, information, metadata


def with_sbom(files: Files, carried: Sequence[Part]) -> dict[str, bytes]:
    """Return the files of a wheel with its document and the licences of what it carries.

    Args:
        files: of the wheel.
        carried: what was linked into its libraries.
    """
    info = information(files)
    texts = {f"{info}/licenses/{part.name}.txt": part.text for part in carried}
    return {**files, **texts, f"{info}/sboms/localattn.cdx.json": _text(document(files, carried))}


def document(files: Files, carried: Sequence[Part]) -> dict[str, Any]:
    """Describe a wheel: itself, its files that are no source, what is compiled into them, and what it requires."""
    name, version = metadata(files, "Name"), metadata(files, "Version")
    own = f"pkg:pypi/{name}@{version}"
    data = [path for path in sorted(files) if not path.endswith((".py", ".typed")) and ".dist-info/" not in path]
    libraries = [_part(part) for part in carried]
    content = json.dumps([own, [(path, _sha256(files[path])) for path in data], libraries])
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # A name of the content, not of the moment: the same wheel has the same document.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "purl": own,
                "licenses": [{"expression": metadata(files, "License-Expression")}],
            }
        },
        "components": [
            *(
                {
                    "type": "file",
                    "bom-ref": path,
                    "name": path,
                    "hashes": [{"alg": "SHA-256", "content": _sha256(files[path])}],
                }
                for path in data
            ),
            *libraries,
        ],
        "dependencies": [
            {"ref": own, "dependsOn": data},
            *(
                {"ref": path, "dependsOn": [_reference(part) for part in _inside(path, carried)]}
                for path in data
                if path.endswith(".so") and carried
            ),
        ],
    }


def _inside(library: str, carried: Sequence[Part]) -> list[Part]:
    """Return what a library of the wheel has in it."""
    return [part for part in carried if part.inside in ("", library.split("/")[-1])]


def _reference(part: Part) -> str:
    return f"{part.name}@{part.version}"


def _part(part: Part) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": _reference(part),
        "name": part.name,
        "version": part.version,
        "purl": part.purl,
        "licenses": [{"expression": part.licence}],
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
