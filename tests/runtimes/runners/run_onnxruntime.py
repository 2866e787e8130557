"""onnxruntime from Python, any release."""

import onnxruntime as ort
from harness import main


def opened(path, case):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs)))  # noqa: B905 (Python 3.9)


main(opened, ort.__version__)
