"""TensorRT-RTX's library under the name it looks for: a shared library written without a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localattn.runtime.backends.tensorrt_rtx.preload import LOOKED_FOR, alias_library

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared libraries of Linux")

# Opens the alias by path, then the real library's symbol through the alias' name.
QEMU_PROGRAM = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
  if (!dlopen(argv[1], RTLD_NOW)) { puts(dlerror()); return 1; }
  void *again = dlopen("libabsent.so", RTLD_NOW);
  if (!again) { puts(dlerror()); return 2; }
  double (*cosine)(double) = (double (*)(double))dlsym(again, "cos");
  if (!cosine) { puts(dlerror()); return 3; }
  printf("%.1f\n", cosine(0.0));
  return 0;
}
"""


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@LINUX
def test_the_name_is_found_and_leads_to_the_real_library(tmp_path: Path) -> None:
    path = tmp_path / "somewhere.so"
    path.write_bytes(alias_library("libabsent-localattn.so", "libm.so.6", platform.machine()))
    with pytest.raises(OSError):
        ctypes.CDLL("libabsent-localattn.so")
    held = ctypes.CDLL(str(path))
    cosine = ctypes.CDLL("libabsent-localattn.so").cos
    cosine.restype, cosine.argtypes = ctypes.c_double, [ctypes.c_double]
    assert cosine(0.0) == 1.0
    assert held is not None


@pytest.mark.parametrize(("machine", "word"), [("x86_64", "X86-64"), ("aarch64", "AArch64")])
@needs("readelf")
def test_the_file_is_what_it_says(tmp_path: Path, machine: str, word: str) -> None:
    path = tmp_path / "alias.so"
    path.write_bytes(alias_library("libname.so", "libreal.so.1", machine))
    shown = subprocess.run(["readelf", "-hldW", str(path)], capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    assert word in shown.stdout
    assert "Library soname: [libname.so]" in shown.stdout
    assert "Shared library: [libreal.so.1]" in shown.stdout
    stack = next(line for line in shown.stdout.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack


@needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
def test_it_loads_on_aarch64(tmp_path: Path) -> None:
    (tmp_path / "alias.so").write_bytes(alias_library("libabsent.so", "libm.so.6", "aarch64"))
    (tmp_path / "main.c").write_text(QEMU_PROGRAM)
    subprocess.run(["aarch64-linux-gnu-gcc", "main.c", "-o", "main", "-ldl"], cwd=tmp_path, check=True)
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "./main", "./alias.so"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "1.0\n")


@LINUX
@pytest.mark.parametrize("first", ["preload", "tensorrt_rtx"])
def test_preload_makes_the_library_found(first: str) -> None:
    """In a process of its own: what is loaded stays loaded."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    code = "\n".join(
        [
            "import ctypes",
            *(["import tensorrt_rtx"] if first == "tensorrt_rtx" else []),
            "from localattn.runtime.backends.tensorrt_rtx.preload import preload",
            "preload(); preload()",
            f"print(bool(ctypes.CDLL({LOOKED_FOR!r}).getPluginRegistry))",
        ]
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "True\n"), finished.stderr
