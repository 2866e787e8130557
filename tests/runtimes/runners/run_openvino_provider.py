"""onnxruntime with OpenVINO's execution provider, from its plugin package, in fp32.

Its option `precision` does not keep the CPU from bf16; OpenVINO's own, through `load_config`, does.
"""

import importlib.metadata
import json
import sys

import onnxruntime as ort
import onnxruntime_ep_openvino as provider
from harness import main

ort.register_execution_provider_library("OpenVINOExecutionProvider", provider.get_library_path())
devices = [d for d in ort.get_ep_devices() if d.ep_name == "OpenVINOExecutionProvider" and "CPU" in str(d.device.type)]
if not devices:
    sys.exit("the provider offers no device here: it lists those of Intel alone")

FP32 = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})}


def opened(path, case):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_provider_for_devices(devices[:1], FP32)
    session = ort.InferenceSession(str(path), options)
    names = [x.name for x in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs)))  # noqa: B905


main(opened, importlib.metadata.version("onnxruntime-ep-openvino"))
