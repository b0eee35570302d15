"""What to serve, how to adapt it, within which limits, and what to send to a server; without torch until it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ttac.common.options import Checked, setting
from ttac.evaluation.spec import MethodSpec, ModelSpec, StreamSpec

if TYPE_CHECKING:
    from ttac.evaluation.prepare import PreparedMethod
    from ttac.model.weights import LoadedModel


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the cores that this process may use; a container may have many and time on a few."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, limit.read_text().split())  # microseconds; "max" is no number
        return max(min(cores, -(-quota // period)), 1)
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def read_token(file: Path | None) -> str | None:
    """Read a bearer token, the only word of a file."""
    if file is None:
        return None
    words = file.read_text(encoding="utf-8").split()
    if len(words) != 1:
        raise ValueError(f"{file} must hold one token, and holds {len(words)} words")
    return words[0]


@dataclass(frozen=True)
class ServeJob(Checked):
    """Serve a model that predicts at once and adapts behind the scenes: Open Inference Protocol v2, a page at /."""

    model: ModelSpec
    method: MethodSpec
    name: str | None = setting(None, "of the model in addresses (default: that of its file or folder)")
    state: Path = setting(Path("ttac-state"), "what outlives a kill: weights, snapshot, events", output="folder")
    device_predict: str | None = setting(None, "of the process that answers (default: --device)")
    device_adapt: str | None = setting(None, "of the process that learns (default: --device)")
    threads_predict: int = setting(1, "of the process that answers", least=1)
    threads_adapt: int = setting(
        make=lambda: max(usable_cores() - 1, 1), help="of the process that learns (default: all cores but one)", least=1
    )
    buffer: int = setting(1024, "samples on their way to the adapter; more push the oldest out", least=1)
    publish_every: float = setting(1.0, "seconds at least, between two versions", least=0)
    snapshot_every: float = setting(60.0, "seconds between two", least=0)
    keep: int = setting(16, "versions on disk", least=1)
    guard_narrow: float = setting(0.6, "least variety of classes to learn from, of the usual", least=0, most=0.9)
    guard: bool = setting(True, "publish whatever the method makes of the model")
    paused: bool = setting(False, "do not learn until told to resume")
    host: str = setting("127.0.0.1", "to listen at")
    port: int = setting(8000, "0: any that is free", least=0, most=2**16 - 1)
    allow_host: tuple[str, ...] = setting((), "names in requests (default: any, or loopback's where it listens)")
    token_file: Path | None = setting(
        None, "bearer token of every call (default: none; one of its own in --state for calls that change something)"
    )
    log_requests: bool = setting(False, "log a line for every request")
    max_batch: int = setting(64, "images of a pass, and of a request", least=1)
    batch_wait_ms: float = setting(1.0, "that a request waits for others", least=0)
    max_waiting: int = setting(256, "images; more get 429", least=1)
    timeout: float = setting(10.0, "seconds of reading a request, and of answering it", above=0)
    max_body_mib: float = setting(16.0, "of a request", above=0)
    max_pixels: int = setting(2**24, "of an image file", least=1)

    def check(self) -> None:
        """Refuse names that cannot be, limits that contradict each other, and a token that cannot be read."""
        if self.max_waiting < self.max_batch:
            raise ValueError(f"--max-waiting {self.max_waiting} must hold a batch of {self.max_batch} (--max-batch)")
        for host in self.allow_host:
            if not host or set(host) & set("/: "):
                raise ValueError(f"--allow-host takes names such as model.example.com, not {host!r}")
        if not self.served_name or set(self.served_name) & set("/?#%") or self.served_name in (".", ".."):
            raise ValueError(f"--name is part of an address, and {self.served_name!r} cannot be")
        _ = self.token  # read now and once: all processes go by what it was before anything started

    @property
    def served_name(self) -> str:
        """The model's name in addresses."""
        return self.name if self.name is not None else Path(self.model.model).stem

    @cached_property
    def token(self) -> str | None:
        """What every call needs; None: none but those that change something."""
        return read_token(self.token_file)

    @property
    def max_body(self) -> int:
        """The most bytes of a request."""
        return max(int(min(self.max_body_mib, 2**20) * 2**20), 1)

    @property
    def predict_on(self) -> str:
        """The device of the process that answers."""
        return self.device_predict or self.model.device

    @property
    def adapt_on(self) -> str:
        """The device of the process that learns."""
        return self.device_adapt or self.model.device

    def load(self, device: str) -> LoadedModel:
        """Load the model; the two processes do so on their own."""
        return replace(self.model, device=device).load()

    def prepare_method(self) -> PreparedMethod:
        """Load the model for learning, with the method that adapts it."""
        from ttac.evaluation.prepare import PreparedMethod
        from ttac.methods.registry import find_method

        method = self.method
        if method.preset is None and "fast" in find_method(method.method).presets:
            # A walk over all of a long queue would keep new weights back for minutes.
            method = replace(method, preset="fast")
        return PreparedMethod(method, self.load(self.adapt_on))


@dataclass(frozen=True)
class RequestStream(StreamSpec):
    """Labelled images in requests."""

    batch: int = setting(1, "images of a request", least=1)


@dataclass(frozen=True)
class ReplayJob(Checked):
    """Send a stream of labelled images to a running `ttac serve`, which never sees the labels, and measure its error.

    The stream is that of `ttac evaluate` with the same arguments.
    """

    stream: RequestStream
    url: str = setting("http://127.0.0.1:8000", "address of the server")
    name: str | None = setting(None, "model that is to answer (default: the one that is served)")
    token_file: Path | None = setting(None, "bearer token of the server")
    classes: Path | None = setting(None, "class names, one a line (default: the model's)")
    rate: float | None = setting(None, "images a second (default: as fast as they are answered)", above=0)
    patience: float = setting(30.0, "seconds for which a request is sent again where nobody answers", least=0)
    out: Path | None = setting(None, "record to write; one that is there is not replaced", output="file")
