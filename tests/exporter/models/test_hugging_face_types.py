"""What one type of Hugging Face models differs in stands in the file of its name, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.23")

from localattn.exporter.models.hugging_face.quirks import Quirks  # noqa: E402
from localattn.exporter.models.hugging_face.types import known, module_names, quirks_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TYPES = ROOT / "exporter" / "models" / "hugging_face" / "types"
PRODUCT = ("core", "onnx_graph", "exporter", "runtime", "plugins", "commands", "demo", "doctor", "reports")
ELSEWHERE = [path for room in PRODUCT for path in (ROOT / room).rglob("*.py") if TYPES not in path.parents]


@pytest.mark.parametrize("name", sorted(known()))
def test_a_file_is_named_as_its_type_and_holds_its_quirks(name: str) -> None:
    types = {found.replace("-", "_") for found in transformers.CONFIG_MAPPING}
    assert name in types  # a file of another name would never be found
    quirks = quirks_of(name)
    assert isinstance(quirks, Quirks) and type(quirks).__module__.endswith(f".types.{name}")


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("longformer", "longformer"),
        ("led", "led"),
        ("led_text", "led"),
        ("olmo3-text", "olmo3"),
        ("gemma3_text", "gemma3_text"),
        ("gemma3", ""),
        ("mistral", ""),
        ("quirks", ""),
        ("__init__", ""),
        ("..quirks", ""),
        ("os", ""),
        ("", ""),
        (None, ""),
        (["led"], ""),
    ],
    ids=str,
)
def test_quirks_are_found_by_the_types_name_alone(model_type: object, module: str) -> None:
    """A folder may state any name: nothing but a file of `types/` is imported for it."""
    quirks = quirks_of(model_type)
    if module:
        assert type(quirks).__module__.endswith(f".types.{module}")
    else:
        assert type(quirks) is Quirks


def test_a_part_of_a_type_takes_its_modules_in_order() -> None:
    assert module_names("gemma3-text") == ["gemma3_text", "gemma3"]
    assert module_names("t5_encoder") == ["t5_encoder", "t5"]
    assert module_names("qwen3") == ["qwen3"]


def compared(node: ast.AST) -> Iterator[ast.expr]:
    """What a branch, a lookup or a table of a file asks for by value."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Match):
        yield node.subject
        yield from (x.value for x in ast.walk(node) if isinstance(x, ast.MatchValue))
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TELLS:
        yield node.func.value
        yield from node.args


_TELLS = ("startswith", "endswith", "get", "removeprefix", "removesuffix", "fullmatch", "match")


def branches_on_types(source: str, names: frozenset[str]) -> list[str]:
    """The lines that compare a type of model with something, or something with the name of a type or its class."""
    classes = re.compile("|".join(rf"{re.escape(name)}[A-Z]\w*" for name in names if name[:1].isupper()))
    found = []
    for node in ast.walk(ast.parse(source)):
        for part in compared(node):
            tested = isinstance(node, ast.Compare | ast.Match) or (
                isinstance(node, ast.Call) and part is node.func.value and node.func.attr != "get"  # type: ignore[attr-defined]
            )
            constants = {x.value for x in ast.walk(part) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
            asks = {x.attr for x in ast.walk(part) if isinstance(x, ast.Attribute)} | constants
            if tested and "model_type" in asks:
                found.append(f"{node.lineno}: asks for model_type")  # type: ignore[attr-defined]
            if any(x in names or classes.fullmatch(x) for x in constants):
                found.append(f"{node.lineno}: names a type")  # type: ignore[attr-defined]
    return found


def names_of_types() -> frozenset[str]:
    """The types that have a file, as `model_type` and as the beginning of their classes' names."""
    stems = {transformers.CONFIG_MAPPING[name].__name__.removesuffix("Config") for name in _model_types()}
    return frozenset({*known(), *_model_types(), *stems})


def _model_types() -> list[str]:
    return [name for name in transformers.CONFIG_MAPPING if name.replace("-", "_") in known()]


def test_nothing_else_branches_on_a_type() -> None:
    names = names_of_types()
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in ELSEWHERE
        for line in branches_on_types(path.read_text(encoding="utf-8"), names)
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        'if config.model_type == "mistral": pass',
        'if config["model_type"] in KNOWN: pass',
        'own = config.get("model_type") in ("a", "b")',
        'match config.model_type:\n    case "x": pass',
        'if config.model_type.startswith("gemma"): pass',
        'TABLE = {"led": 1}',
        'TABLE = {"LEDEncoder": 1}',
        'x = names["longformer"]',
        'if type(model).__name__ == "LongformerModel": pass',
        'x = TABLE.get("LEDEncoder")',
    ],
)
def test_a_branch_is_seen(source: str) -> None:
    assert branches_on_types(source, names_of_types())
    assert not branches_on_types('quirks_of(config.model_type); x = config["model_type"]', names_of_types())
