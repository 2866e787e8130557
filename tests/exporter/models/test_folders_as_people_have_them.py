"""A file computes what the model in memory computed, whatever folder stands between: its head, tokenizer and release.

Nothing that was loaded from the folder is the judge here, only the model that wrote it. Rounded weights may be refused,
by the name of the check; a file that is written is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch

import localattn
from localattn.core.errors import CheckFailed

from ...support import tokenizer_folder
from ...support.models.hugging_face import CASES, HEADS, Case, save, update_config
from ...support.tokenizer_folder import BOS, EOS, VOCABULARY

pytest.importorskip("transformers")
BY_NAME = {case.name: case for case in CASES}
OLD = "4.57.6"
# Types that 4.57.6 had, and what it called the bases of rotation of layers that see everything, and of those with a
# window; its folders are compared with those of the release itself by hand.
_ONE = ("rope_theta", "")
RELEASE_4 = {
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "phi3", "gemma2", "starcoder2", "mixtral", "smollm3"), _ONE),
}
THETAS = (20_000.0, 3_000.0)
# Least cosine with the model in memory, for each precision. Those of rounded weights are 0.005 below what the product
# asks of its own rows, for they are of another, short row.
PRECISIONS = {"fp32": 1 - 1e-8, "fp16": 0.9999, "int8": 0.985, "int4": 0.98}
TEXT = "Das Schiff fährt um acht. Ils n'ont rien vu: `for x in range(3): print(x)`. The rest is in 中文, 3.50 € a page."
LEAST_ROUTED = 0.5  # of positions whose experts are those of the model in memory
WHOLE = ("gemma3_text", "mistral", "modernbert")  # of these types every combination, of the others every fifth
EVERY = 5


class Folder(NamedTuple):
    """A folder as people have it."""

    name: str
    head: str
    text: bool
    precision: str
    release: str


QUICK = (
    Folder("gemma3_text", "retied", True, "fp32", OLD),
    Folder("modernbert", "retied", False, "fp16", OLD),
    Folder("mistral", "tied", True, "int8", "5"),
)


def _grid() -> Iterator[Any]:
    yield from (pytest.param(folder, id="-".join(map(str, folder))) for folder in QUICK)
    for place, case in enumerate(case for case in CASES if case.name != "recurrent_gemma"):
        releases = (OLD, "5") if case.name in RELEASE_4 else ("5",)
        combinations = [Folder(case.name, *x) for x in product(HEADS, (True, False), PRECISIONS, releases)]
        chosen = combinations if case.name in WHOLE else combinations[place % EVERY :: EVERY]
        for folder in (folder for folder in chosen if folder not in QUICK):
            yield pytest.param(folder, id="-".join(map(str, folder)), marks=pytest.mark.slow)


@pytest.mark.parametrize("folder", list(_grid()))
def test_the_file_computes_what_the_model_in_memory_computed(
    folder: Folder, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case, where = BY_NAME[folder.name], tmp_path / "model"
    model = _written(case, folder, where)
    options = {"weight_dtype" if folder.precision.startswith("int") else "dtype": folder.precision}
    try:
        report: Any = localattn.export(where, tmp_path / "m.onnx", checks="quick", task=case.task, **options)
    except CheckFailed as error:
        assert folder.precision.startswith("int") and "parity" in f"{error.what} {error.why}", error
        record_property("refused", error.why)
        return
    assert report
    parity = next(check.detail for check in report.checks if check.name == "parity")
    assert ("of text" if folder.text else "drawn by rank") in parity, parity
    told = [note for note in report.notes if "although config.json says tie_word_embeddings" in note]
    own = folder.head == "retied" and model.get_output_embeddings() is not None and case.task is None
    assert bool(told) is own, report.notes
    ids = _tokens(folder)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    feed = {x.name: ids if x.name == "input_ids" else np.ones_like(ids) for x in session.get_inputs()}
    (output,) = (x.name for x in session.get_outputs())
    judge = model.get_encoder() if case.task is not None else model
    judge.set_experts_implementation("eager")  # the others compute nothing in float64
    with torch.no_grad():
        wanted = judge.double()(**{name: torch.from_numpy(x) for name, x in feed.items()})[output].numpy()
    (found,) = session.run([output], feed)
    found = found.astype(np.float64)
    if folder.precision != "fp32" and any("expert" in name for name, _ in model.named_modules()):
        # Rounding may choose another expert for a token; what sees that token differs too. The others must be right.
        products = (found * wanted).sum(-1) / np.sqrt((found**2).sum(-1) * (wanted**2).sum(-1))
        good = products >= PRECISIONS[folder.precision]
        assert good.mean() >= LEAST_ROUTED, np.sort(products.ravel())
        return
    cosine = (found * wanted).sum() / np.sqrt((found**2).sum() * (wanted**2).sum())
    record_property("cosine", float(cosine))
    assert cosine >= PRECISIONS[folder.precision], cosine
    assert abs(np.sqrt((found**2).mean() / (wanted**2).mean()) - 1) < 0.1


def _tokens(folder: Folder) -> Any:
    """Draw a row; for rounded weights one as in use.

    They were rounded by text. On bytes drawn uniformly int4 has cosines 0.01 lower, in ModernBERT 0.976 to 0.980 and on
    text 0.987 to 0.994.
    """
    generator, size = np.random.default_rng(5), 100
    if not folder.precision.startswith("int"):
        ids = generator.integers(0, 256, size)
    elif folder.text:
        ids = np.frombuffer(TEXT.encode()[:size], np.uint8).astype(np.int64)
    else:
        weights = 1 / (np.arange(256) + 10.0)
        ids = generator.choice(256, size, p=weights / weights.sum())
    return np.array([[BOS, *ids]])


def _written(case: Case, folder: Folder, where: Path) -> Any:
    """Write the folder, and return the model as it is in memory."""
    values: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS}
    values |= {name: VOCABULARY for name in ("vocab_size_per_layer_input",) if name in case.values}
    values |= {"cls_token_id": BOS, "sep_token_id": EOS} if "cls_token_id" in case.values else {}
    if folder.release == OLD:
        full, window = THETAS
        flat = {"rope_type": "default", "rope_theta": full}
        kinds = {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": window}}
        values["rope_parameters"] = kinds if RELEASE_4[case.name][1] else flat
    model = save(where, case, folder.head, **values)
    if folder.text:
        tokenizer_folder.write(where)
    if folder.release == OLD:
        written = {name: theta for name, theta in zip(RELEASE_4[case.name], THETAS, strict=True) if name}
        written |= {"transformers_version": OLD, "torch_dtype": "float32"}
        if case.name == "modernbert":  # every third layer sees everything
            written["global_attn_every_n_layers"] = 3
        gone = ["rope_parameters", "dtype", *(["layer_types"] if case.name == "modernbert" else [])]
        update_config(where, written, gone)
    return model
