"""The process that learns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
from rich.console import Console

from ttac.methods.base import Adapter
from ttac.model.weights import LoadedModel, usable_device
from ttac.serving.channels import Channels
from ttac.serving.guard import Guard, GuardOptions
from ttac.serving.journal import Journal
from ttac.serving.learner import Learner, LearnerSettings
from ttac.serving.logs import write_logs
from ttac.serving.prepare import build_adapter
from ttac.serving.server import Server
from ttac.serving.settings import ServeJob
from ttac.serving.state_folder import StateFolder
from ttac.source.bundle import Bundle

HOPELESS = 2  # ends without progress in a row, after which the samples at hand are taken to be the reason
# Where both processes want one core, a tenth is left for learning: the lowest priority could stop it for ever on a
# machine that does other work.
GIVE_WAY = 10
LONGEST_WAIT = 0.05  # seconds that a step waits for requests


def run_adapter(server: Server, failures: int) -> int:
    """Learn from the samples that the predictor hands on, until a signal ends it."""
    job = server.job
    server.listening.close()  # or clients would connect when the predictor has ended, and wait
    write_logs("adapter")
    stopping = _noted_signal()
    torch.set_num_threads(1)  # until it gives way: threads have the priority of who starts them
    choice = job.choice(job.device_adapt)
    server.facts.check(choice.model.classifier)
    adapter = build_adapter(job, choice, Console(quiet=True))
    if usable_device(job.device_adapt).type != "cpu" and _one_device(job):
        adapter.before_step = _wait_for(server.channels)
    settings = LearnerSettings(
        snapshot_every=job.snapshot_every,
        publish_every=job.publish_every,
        keep=job.keep,
        paused=job.paused,
        skip_waiting=failures >= HOPELESS,
        identity=server.facts.identity,
    )
    guard = _guard(choice.model, adapter, GuardOptions(narrow=job.guard_narrow)) if job.guard else None
    os.nice(GIVE_WAY)
    torch.set_num_threads(job.threads_adapt)
    folder = StateFolder(job.state)
    Learner(adapter, guard, server.channels, folder, Journal(folder.events), settings).run(stopping)
    return 0


def _one_device(job: ServeJob) -> bool:
    return usable_device(job.device_predict) == usable_device(job.device_adapt)  # cuda is cuda:0


def _guard(model: LoadedModel, adapter: Adapter, options: GuardOptions) -> Guard:
    """Guard with the adapter's statistics, or those of the bundle where the method has none."""
    bundled = model.statistics if isinstance(model, Bundle) else None
    return Guard(model.classifier, adapter.stats or bundled, options)


def _noted_signal() -> Callable[[], bool]:
    noted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    return lambda: bool(noted)


def _wait_for(channels: Channels) -> Callable[[], None]:
    """Make a step wait while requests do, but not for ever: on one accelerator their kernels queue behind its own."""

    def wait() -> None:
        until = time.monotonic() + LONGEST_WAIT
        while channels.busy[0] and time.monotonic() < until:
            time.sleep(0.001)

    return wait
