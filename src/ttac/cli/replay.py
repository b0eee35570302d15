"""`ttac replay`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from ttac.cli.common import new_parser, read_class_names, run_job
from ttac.cli.serve import read_token
from ttac.cli.stream import add_stream_arguments, chosen_stream


def replay_parser() -> ArgumentParser:
    """Describe `ttac replay`."""
    parser = new_parser(
        "Send a stream of labelled images to a running `ttac serve`, which never sees the labels, and measure its "
        "error over time. The stream is that of `ttac evaluate` with the same arguments."
    )
    add = parser.add_argument
    add(
        "--url",
        type=str,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the server (default: %(default)s)",
    )
    add("--name", type=str, metavar="NAME", help="model that is to answer (default: the one that is served)")
    add("--token-file", type=Path, metavar="FILE", help="bearer token of the server")
    add_stream_arguments(parser, batch=1, batch_help="images of a request")
    add(
        "--rate",
        type=PositiveFloat,
        metavar="X",
        help="images a second (default: as fast as they are answered); latencies then count from when a request was "
        "due, also where the one before it, or this computer, was late",
    )
    add(
        "--patience",
        type=NonNegativeFloat,
        default=30.0,
        metavar="SECONDS",
        help="for which a request is sent again where the server is away or busy (default: %(default)s)",
    )
    add("--out", type=Path, metavar="FILE", help="record to write; one that is there is not replaced")
    return parser


def replay_command(chosen: Namespace) -> int:
    """Replay one stream."""
    from ttac.serving.replay import ReplayJob, run_replay

    job = ReplayJob(
        chosen_stream(chosen),
        chosen.url,
        model=chosen.name,
        token=None if chosen.token_file is None else read_token(chosen.token_file),
        classes=None if chosen.classes is None else read_class_names(chosen.classes),
        rate=None if chosen.rate is None else float(chosen.rate),
        patience=float(chosen.patience),
        out=chosen.out,
    )
    return run_job(run_replay, job)
