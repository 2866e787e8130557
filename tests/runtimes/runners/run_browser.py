"""onnxruntime-web in headless Chromium: `run_browser.py wasm|webgpu FOLDER [KIND...]`, in the folder of npm's packages.

Runs in the environment of the tests, whose Chromium it drives. WebGPU is computed on the processor, by SwiftShader.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.support import chromium  # noqa: E402 (found through the line above)

# The build of onnxruntime-web, and what Chromium is given.
BUILDS = {
    "wasm": ("ort.wasm.min.js", ()),
    "webgpu": ("ort.webgpu.min.js", ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")),
}
_PACKAGE = "/node_modules/onnxruntime-web/"
_RUN = """(async () => {
  const bytes = async (name) => new Uint8Array(await (await fetch("/cases/%(case)s/" + name)).arrayBuffer());
  const document = JSON.parse(new TextDecoder().decode(await bytes("case.json")));
  const externalData = await Promise.all(document.data.map(async (path) => ({ path, data: await bytes(path) })));
  const model = await bytes("%(file)s");
  ort.env.wasm.numThreads = 1;
  try {
    const options = { externalData, executionProviders: ["%(provider)s"], logSeverityLevel: 3 };
    const session = await ort.InferenceSession.create(model, options);
    return { error: await largestError(ort, session, document, await bytes("arrays.bin")) };
  } catch (error) {
    return { failed: String(error.message || error).slice(0, 400) };
  }
})()"""


class _Files(SimpleHTTPRequestHandler):
    """Serve npm's packages, the cases, and the script that the runners share."""

    def __init__(self, *arguments: Any, cases: Path, build: str, **options: Any) -> None:
        self._cases, self._build = cases, build
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        scripts = (f"{_PACKAGE}dist/{self._build}", "/harness.cjs")
        page = "<!DOCTYPE html><title>cases</title>" + "".join(f'<script src="{x}"></script>' for x in scripts)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def translate_path(self, path: str) -> str:
        if path == "/harness.cjs":
            return str(HERE / "harness.cjs")
        return str(self._cases / path[7:]) if path.startswith("/cases/") else super().translate_path(path)

    def guess_type(self, path: Any) -> str:
        return "text/javascript" if str(path).endswith(".cjs") else super().guess_type(path)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    provider, folder, *kinds = sys.argv[1:]
    build, options = BUILDS[provider]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, cases=Path(folder), build=build, directory="."))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as profile, chromium.page(Path(profile), *options) as tab:
        for case in sorted(path.parent for path in Path(folder).glob("*/case.json")):
            document = json.loads((case / "case.json").read_text())
            if kinds and document["kind"] not in kinds:
                continue
            for form, file in document["forms"].items():
                tab.open(f"http://127.0.0.1:{server.server_port}/")  # a new page for each: one may end in an error
                tab.wait_for("typeof ort === 'object' && typeof largestError === 'function'")
                run = _RUN % {"case": case.name, "file": file, "provider": provider}
                results.setdefault(document["kind"], {})[form] = tab.value(run)
    version = json.loads(Path("." + _PACKAGE, "package.json").read_text())["version"]
    print(json.dumps({"version": version, "results": results}))


main()
