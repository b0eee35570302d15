"""`ttac serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ttac.cli.adapt import add_method_arguments, parse_options
from ttac.cli.common import add_model_arguments, add_speed_arguments, load_chosen_model, new_parser, run_job

if TYPE_CHECKING:
    from ttac.model.weights import LoadedModel


def serve_parser() -> ArgumentParser:
    """Describe `ttac serve`."""
    parser = new_parser(
        "Serve a model that predicts at once and adapts behind the scenes: Open Inference Protocol v2, a page at /."
    )
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_method_arguments(parser)
    add = parser.add_argument
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop image files to (default: the model's)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the model's)")
    add("--name", type=str, metavar="NAME", help="of the model in addresses (default: that of its file or folder)")
    add(
        "--state",
        type=Path,
        default=Path("ttac-state"),
        metavar="FOLDER",
        help="what outlives a kill: weights, snapshot, events (default: %(default)s)",
    )
    _add_process_arguments(parser)
    _add_access_arguments(parser)
    _add_limit_arguments(parser)
    return parser


def _add_process_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--device-predict", type=str, metavar="NAME", help="of the process that answers (default: --device)")
    add("--device-adapt", type=str, metavar="NAME", help="of the process that learns (default: --device)")
    add("--threads-predict", type=PositiveInt, metavar="N", help="of the process that answers (default: 1)")
    add(
        "--threads-adapt", type=PositiveInt, metavar="N", help="of the process that learns (default: all cores but one)"
    )
    add(
        "--buffer",
        type=PositiveInt,
        default=1024,
        metavar="N",
        help="samples on their way to the adapter; more push the oldest out (default: %(default)s)",
    )
    add(
        "--publish-every",
        type=NonNegativeFloat,
        default=1.0,
        metavar="SECONDS",
        help="at least, between two versions (default: %(default)s)",
    )
    add("--snapshot-every", type=NonNegativeFloat, default=60.0, metavar="SECONDS", help="(default: %(default)s)")
    add("--keep", type=PositiveInt, default=16, metavar="N", help="versions on disk (default: %(default)s)")
    add(
        "--guard-narrow",
        type=float,
        default=0.6,
        metavar="X",
        help="share of the usual variety of classes under which a stream is not learned from; 0: any is "
        "(default: %(default)s)",
    )
    add("--no-guard", action="store_true", help="publish whatever the method makes of the model")
    add("--paused", action="store_true", help="do not learn until told to resume")


def _add_access_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", type=str, default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: %(default)s)")
    add("--port", type=NonNegativeInt, default=8000, metavar="N", help="0: any that is free (default: %(default)s)")
    add(
        "--allow-host",
        type=str,
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of this server in requests (default: this machine's at a loopback address, else any)",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="bearer token of every call (default: none; one of its own in --state for calls that change something)",
    )
    add("--log-requests", action="store_true", help="log a line for every request")


def _add_limit_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-batch",
        type=PositiveInt,
        default=64,
        metavar="N",
        help="images of a pass, and of a request (default: %(default)s)",
    )
    add(
        "--batch-wait-ms",
        type=NonNegativeFloat,
        default=1.0,
        metavar="MS",
        help="that a request waits for others (default: %(default)s)",
    )
    add("--max-waiting", type=PositiveInt, default=256, metavar="N", help="images; more get 429 (default: %(default)s)")
    add(
        "--timeout",
        type=PositiveFloat,
        default=10.0,
        metavar="SECONDS",
        help="of reading a request, and of answering it (default: %(default)s)",
    )
    add("--max-body-mib", type=PositiveFloat, default=16.0, metavar="MIB", help="of a request (default: %(default)s)")
    add("--max-pixels", type=PositiveInt, default=2**24, metavar="N", help="of an image file (default: %(default)s)")


def serve_command(chosen: Namespace) -> int:
    """Serve a model until a signal ends it."""
    # Before numpy is imported: its threads would not outlive a fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from ttac.serving.supervisor import run_serve
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: install what serving needs with pip install 'ttac[serve]'") from error
    from ttac.serving.settings import ServeJob

    def load(device: str) -> LoadedModel:
        return load_chosen_model(Namespace({**chosen, "device": device}))

    cores = usable_cores()
    job = ServeJob(
        load,
        state=chosen.state,
        method=chosen.method,
        preset=chosen.preset,
        options=parse_options(chosen.method, chosen.set),
        stats=chosen.stats,
        name=chosen.name or Path(chosen.model).stem,
        host=chosen.host,
        port=int(chosen.port),
        token=None if chosen.token_file is None else read_token(chosen.token_file),
        hosts=tuple(host.lower().rstrip(".") for host in chosen.allow_host),
        device_predict=chosen.device_predict or chosen.device,
        device_adapt=chosen.device_adapt or chosen.device,
        threads_predict=int(chosen.threads_predict or 1),
        threads_adapt=int(chosen.threads_adapt or max(cores - 1, 1)),
        max_batch=int(chosen.max_batch),
        batch_wait=chosen.batch_wait_ms / 1000,
        max_waiting=int(chosen.max_waiting),
        timeout=float(chosen.timeout),
        max_body=int(min(chosen.max_body_mib, 2**20) * 2**20),
        max_pixels=int(chosen.max_pixels),
        buffer=int(chosen.buffer),
        snapshot_every=float(chosen.snapshot_every),
        publish_every=float(chosen.publish_every),
        keep=int(chosen.keep),
        guard=not chosen.no_guard,
        guard_narrow=chosen.guard_narrow,
        paused=chosen.paused,
        log_requests=chosen.log_requests,
    )
    return run_job(run_serve, job)


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the cores that this process may use; a container may have many and time on a few."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, limit.read_text().split())  # microseconds; "max" is no number
        return max(min(cores, -(-quota // period)), 1)
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def read_token(file: Path) -> str:
    """Read a bearer token, the only word of a file."""
    words = file.read_text(encoding="utf-8").split()
    if len(words) != 1:
        raise ValueError(f"{file} must hold one token, and holds {len(words)} words")
    return words[0]
