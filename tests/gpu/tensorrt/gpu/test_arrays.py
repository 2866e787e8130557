"""Arrays in GPU memory that an engine's session takes and gives; the stand-in's GPU memory is that of the processor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localattn.core.errors import UsageError
from localattn.runtime.backends.tensorrt.gpu import dlpack
from localattn.runtime.backends.tensorrt.gpu.arrays import GpuArray
from localattn.runtime.backends.tensorrt.gpu.memory import readable
from localattn.runtime.backends.tensorrt.library import open_library

from ....support.models.engine_models import needs_rtx
from ...simulators.engine_stand_in import Bench, Gpu, view
from ..test_session import expected, inputs, opened


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    open_library("tensorrt-rtx")
    yield Bench(tmp_path, monkeypatch)
    gc.collect()


class Foreign:
    """An array of another library on the stand-in's GPU, with DLPack."""

    def __init__(self, gpu: Gpu, values: np.ndarray, device: tuple[int, int] = (2, 0), skip: int = 0) -> None:
        self.address = gpu.malloc(values.nbytes + skip) + skip
        self.values = view(self.address, values.shape, values.dtype)
        self.values[...] = values
        self.device, self.streams = device, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self.values.__dlpack__()


class Interface:
    """The same with `__cuda_array_interface__` alone."""

    def __init__(self, gpu: Gpu, values: np.ndarray, **changes: Any) -> None:
        self.held = Foreign(gpu, values)
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.held.address, True),
            "version": 3,
            **changes,
        }


@needs_rtx
@pytest.mark.parametrize("kind", [Foreign, Interface])
def test_arrays_are_read_where_they_are(bench: Bench, tmp_path: Path, kind: Any) -> None:
    session = opened(tmp_path)
    given = inputs(3)
    arrays = {name: kind(bench.gpu, value) for name, value in given.items()}
    result = session.run_on_gpu(arrays)["y"]
    assert bench.gpu.copies == [], "nothing is copied"
    where = [array.address if kind is Foreign else array.held.address for array in arrays.values()]
    assert [bench.gpu.calls[-1][name] for name in arrays] == where
    np.testing.assert_array_equal(result.numpy(), expected(given))
    if kind is Foreign:
        assert arrays["x"].streams == [Gpu.STREAM], "the library lets this stream wait for its own work"


@needs_rtx
def test_an_array_at_an_odd_address_is_copied_within_the_gpu(bench: Bench, tmp_path: Path) -> None:
    given = inputs(3)
    arrays = {"x": Foreign(bench.gpu, given["x"], skip=16), "flag": given["flag"]}
    result = opened(tmp_path).run_on_gpu(arrays)["y"]
    assert bench.gpu.copies == [("within", 24), ("up", 6)]
    np.testing.assert_array_equal(result.numpy(), expected(given))


@needs_rtx
def test_with_graphs_arrays_are_copied_to_where_the_graph_reads(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    session.use_cuda_graph()
    for call in range(4):
        given = inputs(call)
        result = session.run_on_gpu({name: Foreign(bench.gpu, value) for name, value in given.items()})["y"]
        np.testing.assert_array_equal(result.numpy(), expected(given))
    assert len(bench.gpu.handle.launches) == 2


@needs_rtx
def test_sizes_of_arrays_may_change(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, ("batch", "n"))
    for shape in ((1, 3), (4, 50), (2, 2)):
        given = inputs(shape=shape)
        result = session.run_on_gpu({name: Foreign(bench.gpu, value) for name, value in given.items()})["y"]
        assert (result.shape, result.dtype) == (shape, "float32")
        np.testing.assert_array_equal(result.numpy(), expected(given))


class WithGradient(Foreign):
    """As a tensor of PyTorch before release 2.7."""

    def __dlpack__(self, stream: int | None = None) -> Any:
        raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")


@needs_rtx
def test_arrays_that_cannot_be_used_are_refused(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, ("batch", "n"))
    given = inputs()
    flag = Foreign(bench.gpu, given["flag"])
    turned = Foreign(bench.gpu, given["x"])
    turned.values = turned.values.T
    wrong = {
        r"lies on DLPack's device 2:1, not on cuda:0": Foreign(bench.gpu, given["x"], (2, 1)),
        r"lies on DLPack's device 1:0": torch.zeros(2, 3),
        "it is not contiguous": turned,
        "a list is no array": [[1.0]],
        "use tensor.detach()": WithGradient(bench.gpu, given["x"]),
        "dtype float64": Foreign(bench.gpu, given["x"].astype(np.float64)),
        r"with batch = 3": Foreign(bench.gpu, np.zeros((2, 3), np.float32)),
        "its Interface cannot be shared": Interface(bench.gpu, given["x"], typestr="|V2x"),
        "it is not contiguous ": Interface(bench.gpu, given["x"], strides=(4, 8)),
    }
    for message, array in wrong.items():
        other = Foreign(bench.gpu, np.zeros((3, 3), bool)) if "batch" in message else flag
        with pytest.raises(UsageError) as caught:
            session.run_on_gpu({"x": array, "flag": other} if "batch" not in message else {"flag": other, "x": array})
        assert message.strip() in f"{caught.value.what} {caught.value.why}" or "batch = 2" in caught.value.why
    with pytest.raises(UsageError, match="do not match the model's"):
        session.run_on_gpu({"x": flag})
    assert not bench.gpu.calls


class HostArray(GpuArray):
    """A `GpuArray` on the stand-in's GPU, which tells other libraries where that memory really is."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@needs_rtx
def test_results_are_shared_with_other_libraries(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    result = session.run_on_gpu(inputs(3))["y"]
    assert result.__dlpack_device__() == (2, 0)
    interface = result.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == ((2, 3), "<f4", (result.address, False))
    held = weakref.ref(result._buffer)
    shared = torch.from_dlpack(HostArray(result._buffer, result.shape, result.dtype, 0))
    by_numpy = np.from_dlpack(HostArray(result._buffer, result.shape, result.dtype, 0))
    address = result.address
    session.close()
    del session, result
    gc.collect()
    assert (shared.data_ptr(), by_numpy.ctypes.data) == (address, address)
    np.testing.assert_array_equal(shared.numpy(), expected(inputs(3)))
    np.testing.assert_array_equal(by_numpy, expected(inputs(3)))
    assert held() is not None, "its memory lives as long as somebody shares it"
    del shared, by_numpy
    gc.collect()
    assert held() is None and address not in bench.gpu.memory and not dlpack._given


@needs_rtx
def test_a_capsule_that_nobody_takes_frees_its_array(bench: Bench, tmp_path: Path) -> None:
    result = opened(tmp_path).run_on_gpu(inputs())["y"]
    capsule = result.__dlpack__(stream=1, max_version=(1, 0), dl_device=(2, 0))
    assert dlpack.take(capsule) == (result.address, (2, 3), "float32", True)
    assert len(dlpack._given) == 1
    del capsule
    gc.collect()
    assert not dlpack._given
    for asked in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="shared where it is"):
            result.__dlpack__(**asked)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64", "uint8", "bool"])
def test_dlpack_of_pytorch_is_read(dtype: str) -> None:
    tensor = torch.zeros(4, 3, 5, dtype=getattr(torch, dtype))
    assert dlpack.take(tensor.__dlpack__()) == (tensor.data_ptr(), (4, 3, 5), dtype, True)
    part = tensor[1:]
    assert dlpack.take(part.__dlpack__()) == (part.data_ptr(), (3, 3, 5), dtype, True)
    assert not dlpack.take(tensor[:, :, 1:].__dlpack__())[-1]
    assert not dlpack.take(tensor.transpose(0, 1).__dlpack__())[-1]


def test_a_capsule_that_was_taken_is_refused() -> None:
    tensor = torch.zeros(3)
    capsule = tensor.__dlpack__()
    torch.from_dlpack(capsule)
    with pytest.raises(ValueError, match="was taken already"):
        dlpack.take(capsule)


def test_bfloat16_is_read_exactly() -> None:
    numbers = torch.tensor([0.0, -1.5, 3.0e38, 1e-40, float("inf")], dtype=torch.bfloat16)
    bits = numbers.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(readable(bits, "bfloat16"), numbers.float().numpy())
