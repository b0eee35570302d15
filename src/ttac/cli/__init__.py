"""The command line; what takes long to import is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser, Namespace

from ttac import __version__
from ttac.cli.adapt import adapt_command, adapt_parser, parse_options
from ttac.cli.common import new_parser
from ttac.cli.demo import demo_command, demo_parser
from ttac.cli.methods import methods_command, methods_parser
from ttac.cli.stats import collect_command, collect_parser, infer_command, infer_parser
from ttac.cli.train import train_command, train_parser

__all__ = ["build_parser", "main", "parse_options"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; mistakes of the user end with one line and the code 2."""
    chosen = build_parser().parse_args(arguments)
    command, details = chosen.command, chosen[chosen.command]
    if command == "stats":
        command, details = f"stats {details.action}", details[details.action]
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
    stats = new_parser("Make the statistics of a source model that methods anchor to.")
    commands.add_subcommand("stats", stats, help="make source statistics")
    actions = stats.add_subcommands(dest="action")
    actions.add_subcommand("collect", collect_parser(), help="from source images")
    actions.add_subcommand("infer", infer_parser(), help="from the head's weights alone")
    commands.add_subcommand("methods", methods_parser(), help="list the methods and what they can do")
    commands.add_subcommand("demo", demo_parser(), help="train, shift, adapt and report on small images")
    return parser


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "train": train_command,
    "adapt": adapt_command,
    "stats collect": collect_command,
    "stats infer": infer_command,
    "methods": methods_command,
    "demo": demo_command,
}
