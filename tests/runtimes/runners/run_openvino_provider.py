"""onnxruntime with OpenVINO's execution provider, from its plugin package."""

import importlib.metadata

import onnxruntime as ort
import onnxruntime_ep_openvino as provider
from harness import main

ort.register_execution_provider_library("OpenVINOExecutionProvider", provider.get_library_path())
devices = [d for d in ort.get_ep_devices() if d.ep_name.startswith("OpenVINO") and "CPU" in str(d.device.type)]


def opened(path, case):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_provider_for_devices(devices[:1], {"precision": "ACCURACY"})
    session = ort.InferenceSession(str(path), options)
    names = [x.name for x in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs)))  # noqa: B905


main(opened, importlib.metadata.version("onnxruntime-ep-openvino"))
