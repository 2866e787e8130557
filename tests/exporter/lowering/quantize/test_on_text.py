"""Weights rounded on text, held against the same model's weights rounded by their own numbers, on other text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import localattn.demo
from localattn.core.errors import UsageError
from localattn.exporter.checks.quality import QUALITY
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.lowering.quantize.blocked import Rounding
from localattn.exporter.lowering.quantize.blocks import Blocks, round_in_blocks
from localattn.exporter.lowering.quantize.calibration import Calibration, kind_of
from localattn.exporter.lowering.quantize.mixed_bits import Rounded, choose
from localattn.exporter.lowering.quantize.on_text import rounding_on_text
from localattn.exporter.options import ShapeRequest
from localattn.runtime.backends.onnxruntime.session import open_bytes
from localattn.runtime.text_inputs.tokens import open_tokens

from ....conftest import save_upstream
from ....support.steps import export_steps

DEMO = next(Path(localattn.demo.__file__).parent.glob("*.safetensors"))


@pytest.fixture(scope="module")
def rounding() -> Rounding:
    """How the demo's trained model is rounded."""
    request = ExportRequest(DEMO, Path("unwritten.onnx"), shapes=ShapeRequest(seq_len=512), weight_dtype="int4")
    found = rounding_on_text(request, open_request(request)[1])
    assert found is not None and found.calibration is not None
    return found


def judgement(calibration: Calibration, length: int = 512) -> Calibration:
    """The same model, with rows of the text that files are judged on."""
    tokens = open_tokens([DEMO.parent], 256, None, "judgement")
    assert tokens is not None
    rows = [(torch.from_numpy(tokens.row(start, length, pieces=2)[None]),) for start in range(4)]
    return Calibration(calibration.entry, [], rows, "")


def test_text_rounds_a_trained_model_better_than_its_numbers_alone(rounding: Rounding) -> None:
    calibration = rounding.calibration
    assert calibration is not None
    judged = judgement(calibration)
    wanted = judged.outputs()
    matrices = {
        path: np.ascontiguousarray(layer.weight.detach().numpy().T)
        for path, layer in calibration.layers.items()
        if min(layer.weight.shape) >= 32
    }
    kept = {path: calibration.layers[path].weight for path in matrices}

    def distance(blocks: dict[str, Blocks]) -> float:
        for path, made in blocks.items():
            weight = torch.from_numpy(np.ascontiguousarray(made.matrix().T))
            calibration.layers[path].weight = torch.nn.Parameter(weight, requires_grad=False)
        found = judged.distance(wanted, logits=True)
        for path, weight in kept.items():
            calibration.layers[path].weight = weight
        return found

    made = dict(rounding.blocks(matrices))
    assert made.keys() == matrices.keys() and rounding.calibration is None
    assert "8 rows of text, 4,096 tokens" in rounding.notes[0]
    alone = distance({path: round_in_blocks(matrix) for path, matrix in matrices.items()})
    assert judged.distance(wanted, logits=True) == 0
    assert 0 < distance(made) < 0.8 * alone


def test_the_kind_of_layer_that_matters_gets_8_bits() -> None:
    """One kind is followed by a scale of 30: rounding it costs the outputs most."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.ModuleDict({"loud": torch.nn.Linear(64, 32), "quiet": torch.nn.Linear(64, 640)})
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([y for part in self.blocks for y in (30 * part["loud"](x), part["quiet"](x))], -1)

    class Entry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Two()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model(x),)

    torch.manual_seed(0)
    rows = [(torch.randn(8, 64),)]
    calibration = Calibration(Entry(), rows, rows, "")
    before = [weight.clone() for weight in calibration.entry.parameters()]
    rounded = {
        path: Rounded(
            *(round_in_blocks(np.ascontiguousarray(layer.weight.detach().numpy().T), bits) for bits in (4, 8))
        )
        for path, layer in calibration.layers.items()
    }
    alone, chosen = choose(calibration, rounded, logits=False)
    assert [effect.kind for effect in chosen] == ["blocks.*.loud"] and chosen[0].distance < alone / 3
    assert all(torch.equal(old, new) for old, new in zip(before, calibration.entry.parameters(), strict=True))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("model.layers.12.self_attn.v_proj", "model.layers.*.self_attn.v_proj"), ("3", "*"), ("block2.fc1", "block2.fc1")],
)
def test_layers_of_a_kind_differ_in_numbers_alone(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_moments_are_those_of_the_inputs_and_shared_where_the_input_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from localattn.exporter.lowering.quantize import calibration as module

    class Entry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("a", "b", "c", "unused")})

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model["c"](self.model["a"](x) + self.model["b"](x)),)

    torch.manual_seed(0)
    rows = [(torch.randn(3, 5, 8),), (torch.randn(2, 8),)]
    made = Calibration(Entry(), rows, [], "")
    whole = torch.cat([row[0].reshape(-1, 8) for row in rows])
    with torch.no_grad():
        inner = made.layers["a"](whole) + made.layers["b"](whole)
    for memory in (1 << 30, 1):
        monkeypatch.setattr(module, "_MEMORY", memory)
        found = {path: x for part in made.moments(["a", "b", "c", "unused"]) for path, x in part.items()}
        assert found.keys() == {"a", "b", "c"}
        for path, x in (("a", whole), ("b", whole), ("c", inner)):
            torch.testing.assert_close(found[path], x.T @ x / len(x), rtol=1e-5, atol=1e-6)


def test_step_and_chunk_files_hold_the_same_rounded_weights(tmp_path: Path) -> None:
    report = export_steps(ExportRequest(DEMO, tmp_path / "s.onnx", weight_dtype="int4", checks="quick"), chunk=16)[0]
    assert any("rounded on" in note for note in report.notes)
    assert len(list(tmp_path.glob("*.data"))) == 1


def test_a_model_without_tokens_is_rounded_by_its_numbers_and_says_so(tmp_path: Path) -> None:
    kwargs = {"dim": 64, "window_size": 8, "dim_head": 32, "heads": 2, "causal": True}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", kwargs)
    shapes = ShapeRequest(seq_len=32)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=shapes, weight_dtype="int4", checks="quick"))
    assert any("without calibration" in note for note in report.notes)
    assert any(node.op_type == "MatMulNBits" for node in onnx.load(tmp_path / "m.onnx").graph.node)


def notes_of(tmp_path: Path, **options: Any) -> list[str]:
    request = ExportRequest(
        DEMO, tmp_path / "m.onnx", shapes=ShapeRequest(seq_len=64), checks="quick", overwrite=True, **options
    )
    return list(export(request).notes)


def test_weights_are_rounded_on_a_users_text_or_arrays(tmp_path: Path) -> None:
    text, arrays = tmp_path / "mine.txt", tmp_path / "mine.npz"
    text.write_text("\n\n".join(f"Sentence {place} of a text of mine, which is about nothing." for place in range(99)))
    (note,) = [x for x in notes_of(tmp_path, weight_dtype="int4", calibration=text) if "rounded on" in x]
    assert "4,096 tokens of mine.txt" in note
    np.savez(arrays, tokens=np.random.default_rng(0).integers(0, 256, (9, 64)))
    (note,) = [x for x in notes_of(tmp_path, weight_dtype="int4", calibration=arrays) if "rounded on" in x]
    assert "9 rows of mine.npz, 576 positions" in note


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"other": np.zeros((2, 64), int)}, {}, "no array 'tokens'"),
        ({"tokens": np.full((2, 64), 256)}, {}, "tokens outside of 0 … 255"),
        ({"tokens": np.zeros(64, int)}, {}, "2 axes are needed"),
        ({"tokens": np.zeros((2, 64), int)}, {"weight_dtype": "int8"}, "no effect"),
        ({"tokens": np.zeros((2, 64), int)}, {"weight_dtype": None, "table_dtype": "int4"}, "does not apply here"),
    ],
    ids=["name", "tokens", "axes", "int8", "table alone"],
)
def test_a_calibration_that_cannot_be_used_is_refused(
    arrays: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError) as caught:
        notes_of(tmp_path, **{"weight_dtype": "int4", "calibration": path, **options})
    assert said in f"{caught.value.what} {caught.value.why}"
    for content in (b"", b"\xff\xfe\xff"):
        (tmp_path / "none.txt").write_bytes(content)
        with pytest.raises(UsageError, match="Cannot read"):
            notes_of(tmp_path, weight_dtype="int4", calibration=tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("weights", "table", "most"), [("int8", None, 0.002), pytest.param("int4", None, 0.05, marks=pytest.mark.slow)]
)
def test_a_rounded_file_tells_what_rounding_costs_on_text(
    weights: str, table: str | None, most: float, tmp_path: Path
) -> None:
    request = ExportRequest(DEMO, tmp_path / "m.onnx", shapes=ShapeRequest(seq_len=512), weight_dtype=weights)
    record = next(check for check in export(request).sidecar.checks if check.name == QUALITY)
    figures = {name: float(value) for name, value in record.figures.items()}
    assert record.status == "passed" and "2 rows of text, 1,024 tokens" in record.detail
    assert 0 < figures["divergence"] < most and figures["agreement"] > 0.9
    assert abs(figures["perplexity"] / figures["perplexity_before"] - 1) < 0.02
    assert figures["bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert f"perplexity {figures['perplexity_before']:.4g} before rounding" in record.detail


def test_pieces_of_a_packed_matrix_keep_their_own_numbers() -> None:
    """They have one path, that of the layer they were cut from."""

    class Entry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model(x),)

    torch.manual_seed(0)
    rows = [(torch.randn(256, 64),)]
    calibration = Calibration(Entry(), rows, rows, "")
    packed = calibration.layers["0"].weight.detach().numpy().T
    pieces = {"0": packed[:, :64], "0/1": packed[:, 64:80], "0/2": packed[:, 80:]}
    made = Rounding(calibration).blocks({path: np.ascontiguousarray(x) for path, x in pieces.items()})
    for path, x in pieces.items():
        found = made[path].matrix()
        assert found.shape == x.shape and np.abs(found - x).mean() < 0.02, path


def _toy(weight: torch.Tensor, *rows: torch.Tensor) -> Calibration:
    """One linear layer, run on these rows."""
    entry = torch.nn.Module()
    entry.model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    entry.model[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    entry.forward = lambda x: (entry.model(x),)
    return Calibration(entry, [], [(row,) for row in rows], "")


@pytest.mark.parametrize("width", [64, 70])
def test_the_change_by_rounded_inputs_is_that_of_onnxruntime(width: int) -> None:
    """Of the token with a massive number the change is most of the outputs; of an ordinary one a hundredth."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, width, generator=generator)
    weight[:, 3] *= 1e-4
    x = torch.randn(5, width, generator=generator)
    x[2, 3] = 3e4
    matrix = np.ascontiguousarray(weight.numpy().T)
    blocks = round_in_blocks(matrix, 8)
    exact = torch.from_numpy(np.ascontiguousarray(blocks.matrix().T))
    found = []
    for level in (1, 4):
        node = helper.make_node(
            "MatMulNBits", ["x", "levels", "scales", "zeros"], ["y"], domain="com.microsoft", K=width, N=48, bits=8,
            block_size=32, accuracy_level=level,
        )  # fmt: skip
        parts = {"levels": blocks.levels, "scales": blocks.scales.reshape(-1), "zeros": blocks.zeros.reshape(-1)}
        kind = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node], "one", [kind("x", 1, [5, width])], [kind("y", 1, [5, 48])],
            [numpy_helper.from_array(array, name) for name, array in parts.items()],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        session = open_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
        found.append(session.run({"x": x.numpy()})["y"])
    if np.array_equal(*found):
        pytest.skip("this processor has no product of 8-bit numbers")
    change = np.linalg.norm(found[1] - found[0], axis=1)
    sizes = np.linalg.norm(found[0], axis=1)
    wanted = change / np.maximum(sizes, np.median(sizes))
    told = [_toy(exact, x[place : place + 1]).rounded_inputs({"0": 32})["0"] for place in range(5)]
    alone = change / sizes  # the median of one token is its own size
    assert np.allclose(told, alone, rtol=0.02), (told, alone)
    assert _toy(exact, x).rounded_inputs({"0": 32})["0"] == pytest.approx(wanted.max(), rel=0.02)
    assert told[2] > 0.5 and max(told[:2] + told[3:]) < 0.03


def test_tokens_whose_outputs_are_next_to_nothing_have_no_say() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    x = torch.randn(9, 64, generator=generator)
    hidden = torch.linalg.svd(weight).Vh[-1]  # the layer gives nothing for it
    rows = torch.cat([x, hidden[None], torch.zeros(1, 64)])
    assert _toy(weight, hidden[None]).rounded_inputs({"0": 32})["0"] > 1
    assert _toy(weight, rows).rounded_inputs({"0": 32})["0"] < 0.03
    assert _toy(weight, torch.zeros(2, 64)).rounded_inputs({"0": 32})["0"] == 0
