"""OpenVINO, in fp32."""

import openvino as ov
from harness import main

core = ov.Core()


def opened(path, case):
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()

    def run(inputs):
        request.infer(inputs)
        return {name: request.get_tensor(name).data.copy() for name in case["order"]["outputs"]}

    return run


main(opened, ov.__version__.split("-")[0])
