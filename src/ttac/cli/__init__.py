"""The command line: a dataclass says what a command takes, a function does it, and both are imported when it is called.

The modules of the dataclasses do not import torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from ttac import __version__
from ttac.cli.parsing import check_outputs, parse
from ttac.common.files import DISK_FULL, DiskError
from ttac.common.lookup import suggestion

__all__ = ["main"]
UNWRITABLE = 74  # EX_IOERR of sysexits.h
EXIT_CODES = (
    "Exit codes: 0 done, 1 what was fetched or checked is not whole, 2 a mistake or a failed run, 74 a disk that is "
    "full or cannot be written, 128 + N ended by signal N (the same command goes on)."
)


# What a command takes, a dataclass, and what it does with it and a console: `module:name`, below `ttac`.
COMMANDS = {
    "train": ("source.spec:TrainJob", "source.train_job:run_train"),
    "adapt": ("evaluation.spec:AdaptJob", "evaluation.adapt_folder:run_adapt"),
    "evaluate": ("evaluation.spec:EvaluateJob", "evaluation.evaluate_job:run_evaluate"),
    "replay": ("serving.settings:ReplayJob", "serving.replay:run_replay"),
    "bench": ("benchmark.jobs:BenchesJob", "cli.bench:run_benches"),
    "serve": ("serving.settings:ServeJob", "cli.serve:run_serve"),
    "stats collect": ("cli.stats:CollectJob", "cli.stats:collect"),
    "stats infer": ("cli.stats:InferJob", "cli.stats:infer"),
    "data list": ("cli.data:ListJob", "cli.data:list_data"),
    "data fetch": ("cli.data:FetchJob", "cli.data:fetch_data"),
    "data check": ("cli.data:CheckJob", "cli.data:check_data"),
    "corrupt": ("data.fields:CorruptJob", "data.corruptions.job:run_corrupt"),
    "attack": ("evaluation.spec:AttackJob", "evaluation.attack_job:run_attack"),
    "methods": ("cli.methods:MethodsJob", "cli.methods:list_methods"),
    "report": ("benchmark.jobs:ReportJob", "benchmark.report.job:run_report"),
    "demo": ("benchmark.jobs:DemoJob", "benchmark.demo:run_demo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which `EXIT_CODES` explains; what went wrong is told in one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words == ["--version"]:
            print(f"ttac {__version__}")
            return 0
        if words and words[-1] in ("-h", "--help") and words[:-1] in ([], ["stats"], ["data"]):
            print(overview("".join(words[:-1])))
            return 0
        name = find_command(words)
        job, run = COMMANDS[name]
        asked = parse(name, _imported(job), words[len(name.split()) :])
        check_outputs(asked)
        return run_job(run, asked)
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        unwritable = isinstance(error, DiskError) or getattr(error, "errno", None) in DISK_FULL
        return UNWRITABLE if unwritable else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def find_command(words: Sequence[str]) -> str:
    """Give the command that words begin with, or raise an error that suggests one.

    >>> find_command(["stats", "infer", "--model", "bundle/"])
    'stats infer'
    """
    group = [name for name in COMMANDS if words and name.startswith(f"{words[0]} ")]
    name = " ".join(words[: 2 if group else 1])
    if name in COMMANDS:
        return name
    if len(words) < 2 and (group or not words):
        raise ValueError(f"name a command: {', '.join(group or COMMANDS)}")
    raise ValueError(f"unknown command {name}{suggestion(name, COMMANDS, most=1) or '; see ttac --help'}")


def overview(group: str = "") -> str:
    """List the commands, or those of a group, with the first words that their dataclasses say of them."""
    lines = ["usage: ttac COMMAND [options]", "", "Test-time adaptation of classifiers on a live stream.", ""]
    for name, (job, _) in COMMANDS.items():
        if name.startswith(group):
            lines.append(f"  {name:15}{re.split('[;:.]', _imported(job).__doc__)[0]}")
    lines += ["", "Each command has a --help of its own; ttac --version prints the version.", EXIT_CODES]
    return "\n".join(lines)


def run_job(run: str, job: Any) -> int:
    """Run a job that ends cleanly on a signal, and give the exit code."""
    from rich.console import Console

    from ttac.common.resumable import StoppedError

    try:
        code = _imported(run)(job, Console(soft_wrap=True))
    except StoppedError as stop:
        sys.stderr.write(f"{stop}\n")
        return 128 + stop.signum
    return code if isinstance(code, int) else 0


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"ttac.{module}"), name)
