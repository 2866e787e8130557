"""The digests by which libraries of other releases are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from localattn.core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN
from localattn.plugins import fingerprints


def digests(plugins: Path) -> tuple[str, str]:
    """Those of the libraries for onnxruntime and TensorRT, from the sources in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_HERE", plugins)
        kernels, plugin = (fingerprints.fingerprint.__wrapped__(kind.name) for kind in (CPU_KERNELS, TENSORRT_PLUGIN))
    return kernels, plugin


@pytest.mark.parametrize(
    ("changed", "of_cpu", "of_gpu"),
    [
        ("cpu/source/tiles.inl", True, False),
        ("cpu/build.py", True, False),
        ("shared_library.py", True, True),
        ("library/source/launch.cpp", False, True),
        ("library/companion/register.cpp", False, True),
        ("library/build.py", False, True),
        ("library/embed.py", False, True),
        ("kernel/ring_attention.py", False, True),
        ("cpu/probes.py", False, False),
    ],
)
def test_a_changed_source_changes_the_digests_of_what_is_made_from_it(
    changed: str, of_cpu: bool, of_gpu: bool, tmp_path: Path
) -> None:
    plugins = shutil.copytree(Path(fingerprints.__file__).parent, tmp_path / "plugins")
    before = digests(plugins)
    assert before == (CPU_KERNELS.fingerprint(), TENSORRT_PLUGIN.fingerprint())
    with (plugins / changed).open("ab") as file:
        file.write(b"\n")
    after = digests(plugins)
    assert [old != new for old, new in zip(before, after, strict=True)] == [of_cpu, of_gpu]
