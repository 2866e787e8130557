"""A process that has imported everything, and forks a child for each task; the child is killed where the test says.

`python -m tests.support.kill_server` reads JSON lines: {"task": NAME, "arguments": [...], "step": K, "delay": SECONDS}.
Killed before its K-th change of the file system, or after a delay, by SIGKILL to its process group; neither: it runs to
its end. With "signal", its K-th change begins with that signal instead, taken as the command line takes it. The answer
tells the status, how many changes it made, and how long it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localattn import cli
from localattn.core.storage.files import sha256, work_folder
from localattn.core.storage.publishing import publish_together, sealed, sidecar_path

# Audit events of CPython that change files; "open" counts where it may write.
_CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink", "os.chmod"}


def export_with_data(checkpoint: str, output: str) -> None:
    """Export over what is there, weights in a file of their own."""
    from localattn.exporter.export import ExportRequest, export

    export(ExportRequest(Path(checkpoint), Path(output), overwrite=True, external_data_from=0, seeds=(0,)))


def export_steps(checkpoint: str, output: str) -> None:
    """Export a step file and its prefill file over what is there."""
    from localattn.exporter.export import ExportRequest, export

    export(ExportRequest(Path(checkpoint), Path(output), overwrite=True, mode="step", chunk=4))


def bundle(model: str, output: str) -> None:
    """Bundle over what is there; a tar if it is called one."""
    from localattn.runtime.bundle.create import BundleRequest, create_bundle

    create_bundle(BundleRequest(Path(model), Path(output), as_tar=output.endswith(".tar"), samples=1, overwrite=True))


def build(model: str, output: str) -> None:
    """Build an engine over what is there."""
    from localattn.runtime.backends.engines import BuildRequest
    from localattn.runtime.backends.tensorrt.builder.build import build_engine

    build_engine(BuildRequest(Path(model), Path(output), "tensorrt-rtx", ("rtx40",), overwrite=True))


def publish(folder: str, content: str) -> None:
    """Publish a set of files over what is there."""
    write_set(Path(folder), content.encode())


def write_set(folder: Path, content: bytes) -> None:
    """Publish weights, two models and their sidecars, all of one content."""
    main = folder / "model.onnx"
    with work_folder(main) as work:
        files = {}
        for name in (f"model.onnx.{content.hex()}.data", "model.prefill.onnx", "model.onnx"):
            (work / name).write_bytes(content)
            if name.endswith(".onnx"):
                sidecar = work / f"{name}.sidecar"
                sidecar.write_text(sealed(json.dumps({"model_sha256": sha256(work / name), "content": content.hex()})))
                files[sidecar] = sidecar_path(folder / name)
            files[work / name] = folder / name
        publish_together(files, work)


TASKS: dict[str, Callable[..., None]] = {
    "export": export_with_data,
    "steps": export_steps,
    "bundle": bundle,
    "build": build,
    "publish": publish,
}


def _count_changes(report: int, step: int, ended_by: int) -> None:
    """Write how many changes were made to a pipe as they are made; number `step` begins with a signal to the group."""
    made = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal made
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _CHANGES or writes:
            made += 1
            if made == step:
                os.killpg(0, ended_by)
            os.write(report, b".")

    sys.addaudithook(hook)


def _child(request: dict[str, Any], report: int) -> None:
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(silent, stream)
    code = 1
    try:
        with cli._unwinding():
            _count_changes(report, request.get("step", 0), request.get("signal", signal.SIGKILL))
            TASKS[request["task"]](*request["arguments"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(request, writing)
    os.close(writing)
    if "delay" in request:
        time.sleep(request["delay"])
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)  # it has not made its group yet
    changes = 0
    while piece := os.read(reading, 1 << 16):
        changes += len(piece)
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    return {"code": os.waitstatus_to_exitcode(status), "changes": changes, "seconds": time.monotonic() - started}


def main() -> None:
    """Import what the tasks need, then serve until stdin ends."""
    import onnx_ir  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch

    import localattn.exporter.export
    import localattn.runtime.bundle.create  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
