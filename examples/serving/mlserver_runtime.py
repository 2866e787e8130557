"""Serve an exported file with MLServer: this class is the `implementation` of a model-settings.json.

`parameters.uri` names the file, `parameters.extra.threads` the CPU threads of a worker.
"""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor

from localattn import load

_NAMES = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "int32": "INT32", "int64": "INT64"}


class LocalAttention(MLModel):
    """A model that `localattn.load` opens."""

    async def load(self) -> bool:
        """Open the file, once a worker."""
        extra = self.settings.parameters.extra or {}
        self.session = load(self.settings.parameters.uri, threads=extra.get("threads", 1))
        self.inputs = [_described(spec) for spec in self.session.inputs]
        self.outputs = [_described(spec) for spec in self.session.outputs]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer a request."""
        kinds = {spec.name: spec.dtype for spec in self.session.inputs}
        arrays = {x.name: NumpyCodec.decode_input(x).astype(kinds[x.name]) for x in payload.inputs}
        found = self.session.run(arrays)
        wanted = [x.name for x in payload.outputs or []] or list(found)
        outputs = [NumpyCodec.encode_output(name, np.ascontiguousarray(found[name])) for name in wanted]
        return InferenceResponse(model_name=self.name, outputs=outputs)


def _described(spec) -> MetadataTensor:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return MetadataTensor(name=spec.name, datatype=_NAMES[spec.dtype], shape=shape)
