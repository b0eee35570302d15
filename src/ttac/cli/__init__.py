"""The command line; what takes long to import is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser, Namespace

from ttac import __version__
from ttac.cli.adapt import adapt_command, adapt_parser, parse_options
from ttac.cli.attack import attack_command, attack_parser
from ttac.cli.bench import bench_command, bench_parser
from ttac.cli.common import new_parser
from ttac.cli.corrupt import corrupt_command, corrupt_parser
from ttac.cli.data import check_command, check_parser, fetch_command, fetch_parser, list_command, list_parser
from ttac.cli.demo import demo_command, demo_parser
from ttac.cli.evaluate import evaluate_command, evaluate_parser
from ttac.cli.methods import methods_command, methods_parser
from ttac.cli.replay import replay_command, replay_parser
from ttac.cli.report import report_command, report_parser
from ttac.cli.serve import serve_command, serve_parser
from ttac.cli.stats import collect_command, collect_parser, infer_command, infer_parser
from ttac.cli.train import train_command, train_parser

__all__ = ["build_parser", "main", "parse_options"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; mistakes of the user end with one line and the code 2."""
    chosen = build_parser().parse_args(arguments)
    command, details = chosen.command, chosen[chosen.command]
    if details.get("action") is not None:  # of commands that are several
        command, details = f"{command} {details.action}", details[details.action]
    try:
        return COMMANDS[command](details)
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def build_parser() -> ArgumentParser:
    """Describe all commands."""
    parser = new_parser("Test-time adaptation of classifiers on a live stream.")
    parser.prog = "ttac"
    parser.add_argument("--version", action="version", version=f"ttac {__version__}", help="print the version and exit")
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("train", train_parser(), help="train a source model into a bundle")
    commands.add_subcommand("adapt", adapt_parser(), help="adapt a model to a folder of images")
    commands.add_subcommand("evaluate", evaluate_parser(), help="measure a method on a stream of labelled images")
    commands.add_subcommand("replay", replay_parser(), help="send labelled images to a server and measure its error")
    commands.add_subcommand("bench", bench_parser(), help="run an experiment: every method on every target")
    commands.add_subcommand("serve", serve_parser(), help="serve a model that adapts behind the scenes")
    stats = new_parser("Make the statistics of a source model that methods anchor to.")
    commands.add_subcommand("stats", stats, help="make source statistics")
    actions = stats.add_subcommands(dest="action")
    actions.add_subcommand("collect", collect_parser(), help="from source images")
    actions.add_subcommand("infer", infer_parser(), help="from the head's weights alone")
    data = new_parser("Data sets that have a name: which there are, how to get them, whether they are whole.")
    commands.add_subcommand("data", data, help="list, fetch and check data sets")
    actions = data.add_subcommands(dest="action")
    actions.add_subcommand("list", list_parser(), help="those that have a name")
    actions.add_subcommand("fetch", fetch_parser(), help="download one")
    actions.add_subcommand("check", check_parser(), help="tell whether one is whole")
    commands.add_subcommand("corrupt", corrupt_parser(), help="write a data set under corruptions")
    commands.add_subcommand("attack", attack_parser(), help="write a data set that deceives a model")
    commands.add_subcommand("methods", methods_parser(), help="list the methods and what they can do")
    commands.add_subcommand("report", report_parser(), help="make tables, figures and a page from records")
    commands.add_subcommand("demo", demo_parser(), help="train, shift, adapt and report on small images")
    return parser


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "train": train_command,
    "adapt": adapt_command,
    "evaluate": evaluate_command,
    "replay": replay_command,
    "bench": bench_command,
    "serve": serve_command,
    "stats collect": collect_command,
    "stats infer": infer_command,
    "data list": list_command,
    "data fetch": fetch_command,
    "data check": check_command,
    "corrupt": corrupt_command,
    "attack": attack_command,
    "methods": methods_command,
    "report": report_command,
    "demo": demo_command,
}
