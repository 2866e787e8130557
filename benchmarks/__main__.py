"""`python -m benchmarks NAME`: what takes how long; `--help` lists the names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from localattn.demo import checkpoint_path

from . import report
from .machine import write_result


def _tell(step: str) -> None:
    print(f"· {step}", file=sys.stderr, flush=True)


def _finish(name: str, result: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> bool:
    """Write a result and print it; returns whether it keeps to its targets, if it has any."""
    write_result(name, result)
    show(result)
    return all(target["met"] for target in result.get("targets", ()))


def run_node(options: argparse.Namespace) -> bool:
    from .cases import node

    met = _finish("node", node.measure(options.lengths, options.seconds, _tell), report.print_node)
    if tuple(options.lengths) == node.LENGTHS:
        run_plot(options)
    return met


def run_aft(_options: argparse.Namespace) -> bool:
    from .cases import aft

    return _finish("aft", aft.measure(aft.LENGTHS, _tell), aft.print_aft)


def run_windows(options: argparse.Namespace) -> bool:
    from .limit import windows

    return _finish("windows", windows.measure(options.sets, _tell), windows.print_windows)


def run_peers(options: argparse.Namespace) -> bool:
    from .machine import result_path
    from .peers import report as peers_report
    from .peers import run as peers
    from .peers.grid import QUICK, choose
    from .peers.store import Store

    store = Store("peers_quick", choose(QUICK)) if options.quick else Store("peers", choose(()))
    try:
        wanted = peers.cells_to_measure(
            store, only=options.only, noisy=options.noisy, resume=options.resume, quick=options.quick
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return False
    try:
        result = peers.measure(store, wanted, options.patience, _tell, thorough=options.thorough)
    except KeyboardInterrupt:
        _tell(f"Stopped: {len(store.rows)} of {len(store.whole)} cells are kept; --resume measures the others")
        return False
    peers_report.print_peers(result)
    if missing := len(store.missing(store.whole)):
        _tell(f"{missing} of {len(store.whole)} cells are missing; --resume measures them")
    elif not options.quick:
        from .peers.plot import draw

        page = result_path("peers", "md")
        page.write_text(peers_report.markdown(result), encoding="utf-8")
        _tell(f"Wrote {page.name}, drew {draw(result).name}")
    return all(target["met"] for target in result["targets"])


def run_model(options: argparse.Namespace) -> bool:
    from .cases import model

    result = model.measure(options.checkpoint, options.seconds, _tell)
    return _finish(f"model_{options.checkpoint.stem}", result, report.print_model)


def run_export(options: argparse.Namespace) -> bool:
    from .cases import export

    if options.large:
        with TemporaryDirectory() as folder:
            return _finish("export_large", export.measure_large(Path(folder), _tell), report.print_export)
    result = export.measure(options.checkpoint, options.repeats, _tell)
    return _finish(f"export_{options.checkpoint.stem}", result, report.print_export)


def run_generate(options: argparse.Namespace) -> bool:
    from .cases import generate

    name = f"generate_{options.checkpoint.stem}"
    result = generate.measure(options.checkpoint, options.contexts, options.seconds, _tell)
    met = _finish(name, result, report.print_generate)
    if tuple(options.contexts) == generate.CONTEXTS:
        from .plot import draw

        _tell(f"Drew {draw('generate', name).name}")
    return met


def run_startup(options: argparse.Namespace) -> bool:
    from .cases import startup

    return _finish("startup", startup.measure(options.samples, options.seconds, _tell), report.print_startup)


def run_hugging_face(options: argparse.Namespace) -> bool:
    from .hugging_face import case

    options.folder.mkdir(parents=True, exist_ok=True)
    model = case.MODELS[options.model]
    keep = partial(write_result, model.result)
    result = case.measure(model, options.folder, options.lengths or model.lengths, options.only, _tell, keep)
    return _finish(model.result, result, report.print_hugging_face)


def run_decoder(options: argparse.Namespace) -> bool:
    from .hugging_face import decoder

    options.folder.mkdir(parents=True, exist_ok=True)
    shape = decoder.SHAPES[options.model]
    keep = partial(write_result, shape.result)
    result = decoder.measure(shape, options.folder, options.contexts, options.only, _tell, keep)
    return _finish(shape.result, result, report.print_decoder)


def run_getting_started(_options: argparse.Namespace) -> bool:
    from .cases import getting_started

    return _finish("getting_started", getting_started.measure(_tell), report.print_getting_started)


def run_precision(options: argparse.Namespace) -> bool:
    from localattn.demo import validation_path

    from .cases import precision

    text = options.text or (validation_path() if options.checkpoint == checkpoint_path() else None)
    result = precision.measure(options.checkpoint, text, options.rows, _tell)
    return _finish(f"precision_{options.checkpoint.stem}", result, precision.print_precision)


def run_serving(options: argparse.Namespace) -> bool:
    from .cases import serving

    if options.library is not None:
        options.folder.mkdir(parents=True)
        serving.prepare(options.folder, options.library, _tell)
        return True
    return _finish("serving", serving.measure(options.folder, options.seconds, _tell), serving.print_serving)


def run_plot(_options: argparse.Namespace) -> bool:
    from .peers.plot import draw as draw_peers
    from .peers.plot import latest
    from .plot import draw

    for path in (draw("node"), draw("decoder"), draw("hugging_face"), draw_peers(latest())):
        _tell(f"Drew {path.name}")
    return True


def run_all(options: argparse.Namespace) -> bool:
    light, heavy = (run_getting_started, run_startup, run_export), (run_model, run_generate, run_precision, run_peers)
    met = [run(options) for run in (*light, run_node, run_windows, run_aft, *heavy)]  # each, whatever the others find
    return all(met)


def parse_arguments() -> argparse.Namespace:
    node, sets, peers, of_model, export, generate, precision, startup, timed, serving, hugging, decoder = (
        argparse.ArgumentParser(add_help=False) for _ in range(12)
    )
    lengths = (1024, 2048, 4096, 8192, 16384)
    node.add_argument("--lengths", type=int, nargs="+", default=lengths, help="sequence lengths")
    sets.add_argument("--sets", nargs="+", default=[], help="only these instruction sets, the others keep their rows")
    timed.add_argument("--seconds", type=float, default=40, help="patience for calm samples, at each length")
    demo = checkpoint_path()
    of_model.add_argument("--checkpoint", type=Path, default=demo, help="weights, configuration beside them")
    export.add_argument("--repeats", type=int, default=5, help="exports")
    export.add_argument("--large", action="store_true", help="a model of 367 MB over 8,192 tokens, made on the spot")
    contexts = (1024, 4096, 16384, 65536)
    generate.add_argument("--contexts", type=int, nargs="+", default=contexts, help="tokens before the one generated")
    peers.add_argument("--quick", action="store_true", help="the shortest length and two windows only")
    filters = (
        "only these cells, the others keep their figures: window=256,512 length=4096 dtype=fp32 mask=no geometry=…"
    )
    peers.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE,…", help=filters)
    peers.add_argument("--noisy", type=float, metavar="SHARE", help="only cells in which others took more of the CPU")
    peers.add_argument("--resume", action="store_true", help="only cells that were not measured yet")
    peers.add_argument("--thorough", action="store_true", help="compile and export peers in every cell: much slower")
    peers.add_argument("--patience", type=float, default=6, help="seconds to wait for calm samples in a cell")
    precision.add_argument("--text", type=Path, help="bytes of held-out text [the demo's, for its checkpoint]")
    precision.add_argument("--rows", type=int, default=4, help="sequences of each kind")
    serving.add_argument("folder", type=Path, help="the bundles to serve; with --library they are made there")
    serving.add_argument("--library", type=Path, help="make the bundles, with this library of kernels; no timing")
    serving.add_argument("--seconds", type=float, default=3, help="of each figure")
    hugging.add_argument("--folder", type=Path, required=True, help="where model and files are kept")
    hugging.add_argument("--model", choices=("modernbert-base", "gemma-3-270m"), default="modernbert-base")
    hugging.add_argument("--lengths", type=int, nargs="+", help="sequence lengths [those with a target]")
    hugging.add_argument("--only", nargs="+", default=[], help="only these, the others keep their figures")
    decoder.add_argument("--folder", type=Path, required=True, help="where model and files are kept")
    decoder.add_argument("--model", choices=("gemma3", "mistral"), default="gemma3", help="whose shape")
    decoder.add_argument("--contexts", type=int, nargs="+", default=(1024, 8192, 32768), help="tokens of the prompt")
    decoder.add_argument("--only", nargs="+", default=[], help="only these, the others keep their figures")
    startup.add_argument("--samples", type=int, default=15, help="samples of each command")

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, text, run, parents in (
        ("node", "the attention node: time and memory", run_node, [node, timed]),
        ("aft", "the AFT-local node: time and memory", run_aft, []),
        (
            "windows",
            "the compiled kernel over its limit: windows, types, instruction sets, threads",
            run_windows,
            [sets],
        ),
        ("peers", "the node beside every alternative, over a grid", run_peers, [peers]),
        ("model", "a whole model over its products and attention", run_model, [of_model, timed]),
        ("export", "the export of a checkpoint", run_export, [of_model, export]),
        ("generate", "generating: time of a token and memory", run_generate, [of_model, generate, timed]),
        ("precision", "errors of fp32, fp16, bf16 and int8 files", run_precision, [of_model, precision]),
        ("startup", "start of the command line", run_startup, [startup, timed]),
        ("hugging-face", "a Hugging Face model beside other exporters", run_hugging_face, [hugging]),
        ("decoder", "a Hugging Face decoder, token by token, beside other ways", run_decoder, [decoder]),
        ("getting-started", "the ten commands of docs/getting-started.md", run_getting_started, []),
        ("serving", "a real Triton server: requests and tokens a second", run_serving, [serving]),
        ("plot", "draw node.png, decoder.png, hugging_face.png and peers.png of docs/images again", run_plot, []),
        ("all", "everything", run_all, [node, sets, peers, of_model, export, generate, precision, startup, timed]),
    ):
        command = commands.add_parser(
            name, help=text, parents=parents, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.set_defaults(run=run)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()
    sys.exit(0 if options.run(options) else 1)
