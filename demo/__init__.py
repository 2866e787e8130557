"""Find the small trained model that ships with the package, for `localattn demo`.

A byte-level `LocalTransformer`, trained by `examples/train_bytes.py` on Python's standard library.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def checkpoint_path() -> Path:
    """Return the path of the weights, stored as float16."""
    return _FOLDER / "pybytes_w64.safetensors"


def config_path() -> Path:
    """Return the path of the model's configuration, with its measured bits per byte."""
    return _FOLDER / "pybytes_w64.json"


def validation_path() -> Path:
    """Return the path of 64 rows of 512 bytes that the model was not trained on."""
    return _FOLDER / "pybytes_w64_val.bin"
