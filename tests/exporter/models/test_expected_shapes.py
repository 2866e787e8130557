"""The tensors that a state dict must have: read off the export-friendly module, and cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.models.family import expected_shapes
from localattn.exporter.models.local_mha.arguments import LocalMHAArgs
from localattn.exporter.models.local_mha.family import LOCAL_MHA

_SCRIPT = """
import sys
from localattn.exporter.models.family import expected_shapes
from localattn.exporter.models.local_transformer.arguments import LocalTransformerArgs
from localattn.exporter.models.local_transformer.family import LOCAL_TRANSFORMER
args = LocalTransformerArgs(num_tokens=5, max_seq_len=7, depth=2, dim=16)
assert expected_shapes(LOCAL_TRANSFORMER, args)["layers.1.1.branch.4.weight"] == (16, 42)
assert "torch._dynamo" not in sys.modules
"""


def test_pytorchs_compiler_is_not_loaded_for_shapes() -> None:
    """It takes a second, and `inspect` and `parity` need nothing of it."""
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)


def test_arguments_of_a_model_that_no_memory_holds_are_refused() -> None:
    largest = 2**30
    args = LocalMHAArgs(dim=largest, heads=largest, dim_head=largest, window_size=4)
    with pytest.raises(UsageError, match="a model that is too large"):
        expected_shapes(LOCAL_MHA, args)
