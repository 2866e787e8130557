"""`python -m benchmarks {node,peers,model,export,generate,startup,plot,all}`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .machine import write_result


def _tell(step: str) -> None:
    print(f"· {step}", file=sys.stderr, flush=True)


def run_node(options: argparse.Namespace) -> bool:
    from . import node, report

    result = node.measure(options.lengths, options.seconds, _tell)
    write_result("node", result)
    report.print_node(result)
    if tuple(options.lengths) == node.LENGTHS:
        run_plot(options)
    return all(target["met"] for target in result["targets"])


def run_peers(options: argparse.Namespace) -> bool:
    from . import peers, peers_report

    result = peers.measure(options.patience, _tell, quick=options.quick)
    write_result("peers_quick" if options.quick else "peers", result)
    peers_report.print_peers(result)
    if not options.quick:
        _tell(f"Drew {peers_report.draw(result).name}")
    return all(target["met"] for target in result["targets"])


def run_model(options: argparse.Namespace) -> bool:
    from localattn.demo import checkpoint_path

    from . import model, peers_report

    checkpoint = options.checkpoint or checkpoint_path()
    result = model.measure(checkpoint, options.seconds, _tell)
    write_result(f"model_{checkpoint.stem}", result)
    peers_report.print_model(result)
    return all(target["met"] for target in result["targets"])


def run_export(options: argparse.Namespace) -> bool:
    from localattn.demo import checkpoint_path

    from . import export, report

    checkpoint = options.checkpoint or checkpoint_path()
    result = export.measure(checkpoint, options.repeats, _tell)
    write_result(f"export_{checkpoint.stem}", result)
    report.print_export(result)
    return True


def run_generate(options: argparse.Namespace) -> bool:
    from localattn.demo import checkpoint_path

    from . import generate, report

    checkpoint = options.checkpoint or checkpoint_path()
    result = generate.measure(checkpoint, options.contexts, options.seconds, _tell)
    write_result(f"generate_{checkpoint.stem}", result)
    report.print_generate(result)
    if tuple(options.contexts) == generate.CONTEXTS:
        from .plot import draw_generate

        _tell(f"Drew {draw_generate(f'generate_{checkpoint.stem}').name}")
    return all(target["met"] for target in result["targets"])


def run_startup(options: argparse.Namespace) -> bool:
    from . import report, startup

    result = startup.measure(options.samples, options.seconds, _tell)
    write_result("startup", result)
    report.print_startup(result)
    return all(target["met"] for target in result["targets"])


def run_plot(options: argparse.Namespace) -> bool:
    from .plot import draw_node

    _tell(f"Drew {draw_node().name}")
    return True


def run_all(options: argparse.Namespace) -> bool:
    met = [
        run(options) for run in (run_startup, run_export, run_node, run_generate)
    ]  # each runs, whatever the others find
    return all(met)


def parse_arguments() -> argparse.Namespace:
    node, peers, of_model, export, generate, startup, timed = (
        argparse.ArgumentParser(add_help=False) for _ in range(7)
    )
    lengths = (1024, 2048, 4096, 8192, 16384)
    node.add_argument("--lengths", type=int, nargs="+", default=lengths, help="sequence lengths")
    timed.add_argument("--seconds", type=float, default=60, help="patience for calm samples, at each length")
    of_model.add_argument("--checkpoint", type=Path, help="weights, configuration beside them [the demo's]")
    export.add_argument("--repeats", type=int, default=5, help="exports")
    contexts = (1024, 4096, 16384, 65536)
    generate.add_argument("--contexts", type=int, nargs="+", default=contexts, help="tokens before the one generated")
    peers.add_argument("--quick", action="store_true", help="the shortest length and two windows only")
    peers.add_argument("--patience", type=float, default=1.5, help="seconds to wait for calm samples in a cell")
    startup.add_argument("--samples", type=int, default=15, help="samples of each command")

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, text, run, parents in (
        ("node", "the attention node: time and memory", run_node, [node, timed]),
        ("peers", "the node beside every alternative, over a grid", run_peers, [peers]),
        ("model", "a whole model over its products and attention", run_model, [of_model, timed]),
        ("export", "the export of a checkpoint", run_export, [of_model, export]),
        ("generate", "generating: time of a token and memory", run_generate, [of_model, generate, timed]),
        ("startup", "start of the command line", run_startup, [startup, timed]),
        ("plot", "draw docs/images/node.png again", run_plot, []),
        ("all", "everything", run_all, [node, of_model, export, generate, startup, timed]),
    ):
        command = commands.add_parser(
            name, help=text, parents=parents, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.set_defaults(run=run)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()
    sys.exit(0 if options.run(options) else 1)
