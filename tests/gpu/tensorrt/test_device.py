"""The GPU as libcuda tells it; a stand-in for libcuda answers where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import localattn
from localattn.core.errors import MissingDependency
from localattn.runtime.backends.tensorrt.device import find_device, find_device_or_none

# What find_device asks of the driver, answered from the environment.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int answer(const char *name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { return answer("INIT"); }
int cuDriverGetVersion(int *version) { *version = 12060; return 0; }
int cuDeviceGetCount(int *count) { *count = answer("COUNT"); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Orin", length); return device != 7; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 7 : -1;
  return device != 7;
}
"""

ASK = """
from localattn.core.errors import MissingDependency
from localattn.runtime.backends.tensorrt.device import find_device
try:
    device = find_device(int(__import__("os").environ.get("GPU", "0")))
    print(device.name, device.capability, device.target, device.driver)
except MissingDependency as error:
    print(error.what, error.why)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that answers as it is told."""
    if shutil.which("gcc") is None or not sys.platform.startswith("linux"):
        pytest.skip("gcc on Linux is needed to make a stand-in for the driver")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"], cwd=folder, check=True)
    return folder


def ask(driver: Path, **environment: str) -> str:
    tree = str(Path(localattn.__file__).parents[1])  # the package as this process has it
    finished = subprocess.run(
        [sys.executable, "-c", ASK],
        env={"LD_LIBRARY_PATH": str(driver), "PATH": "", "PYTHONPATH": tree, **environment},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_the_first_gpu_is_described(driver: Path) -> None:
    assert ask(driver, INIT="0", COUNT="1") == "Orin 87 sm_87 12.6"


def test_another_gpu_is_found_by_its_number(driver: Path) -> None:
    assert "There is no GPU 3. The driver shows 2 to this process" in ask(driver, INIT="0", COUNT="2", GPU="3")
    # This driver opens the first alone: it was asked for the second.
    assert "GPU 1 cannot be opened (CUresult 1)" in ask(driver, INIT="0", COUNT="2", GPU="1")


def test_a_driver_that_does_not_start_is_missing(driver: Path) -> None:
    assert "CUresult 803" in ask(driver, INIT="803", COUNT="1")


def test_a_driver_without_gpus_is_missing(driver: Path) -> None:
    assert "No NVIDIA GPU can be seen" in ask(driver, INIT="0", COUNT="0")


def test_a_machine_without_driver_says_so() -> None:
    if find_device_or_none() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(MissingDependency) as caught:
        find_device()
    assert caught.value.fix
