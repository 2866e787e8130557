"""A session may be called from several threads: every call gets the results of its own inputs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from localattn.runtime.session import load

from ..support.hostile_models import model, node


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("lean", [False, True])
def test_eight_threads_get_their_own_results(runtime: str, lean: bool, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    path = tmp_path / "m.onnx"
    path.write_bytes(
        model(
            [
                node("Einsum", ["x", "x"], ["z"], equation="ab,ac->bc"),
                node("Einsum", ["x", "z"], ["y"], equation="ab,bc->ac"),
            ]
        )
    )
    if lean:
        if runtime == "openvino":
            pytest.skip("only onnxruntime has lean sessions")
        from localattn.runtime.backends.onnxruntime.session import open_file

        session = open_file(path, "cpu", lean=True)
    else:
        session = load(path, "cpu", runtime=runtime)
    rows = [np.random.default_rng(index).standard_normal((1, 4)).astype(np.float32) for index in range(8)]
    wrong: list[str] = []
    start = threading.Barrier(len(rows))

    def call(x: np.ndarray) -> None:
        start.wait()
        for _ in range(50):
            try:
                if not np.allclose(session.run({"x": x})["y"], x @ (x.T @ x), rtol=1e-4, atol=1e-5):
                    wrong.append("another thread's results")
            except Exception as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=call, args=(x,)) for x in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
