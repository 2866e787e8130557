"""Serve an exported file with KServe's own server: `python kserve_runtime.py model.onnx --http_port 8080`.

The model has the file's name. `--enable_grpc false` and KServe's other options may follow.
"""

import argparse
from pathlib import Path

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.utils.utils import generate_uuid

from localattn import load

_NAMES = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "int32": "INT32", "int64": "INT64"}


class LocalAttention(Model):
    """A model that `localattn.load` opens."""

    def __init__(self, path: str) -> None:
        super().__init__(Path(path).stem)
        self.session = load(path)
        self.ready = True

    def get_input_types(self) -> list[dict]:
        """Return name, type and shape of each input."""
        return [_described(spec) for spec in self.session.inputs]

    def get_output_types(self) -> list[dict]:
        """Return the same of each output."""
        return [_described(spec) for spec in self.session.outputs]

    def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        """Answer a request."""
        kinds = {spec.name: spec.dtype for spec in self.session.inputs}
        found = self.session.run({x.name: x.as_numpy().astype(kinds[x.name]) for x in payload.inputs})
        outputs = []
        for name, array in found.items():
            outputs.append(InferOutput(name, list(array.shape), _NAMES[str(array.dtype)]))
            outputs[-1].set_data_from_numpy(array, binary_data=False)
        return InferResponse(payload.id or generate_uuid(), self.name, outputs)


def _described(spec) -> dict:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": _NAMES[spec.dtype], "shape": shape}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("model")
    ModelServer().start([LocalAttention(parser.parse_args().model)])
