"""What to serve, how to adapt it, and within which limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttac.evaluation.method_choice import MethodChoice
    from ttac.model.weights import LoadedModel


@dataclass(frozen=True)
class ServeJob:
    """A model behind HTTP, and the method that adapts it."""

    load: Callable[[str], LoadedModel]  # by device; the two processes load it on their own
    state: Path
    method: str = "ttac++"
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stats: Path | None = None
    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # that every call needs; None: none but those that change something
    hosts: tuple[str, ...] = ()  # names under which requests may come, beside those of this machine
    device_predict: str = "cpu"
    device_adapt: str = "cpu"
    threads_predict: int = 1
    threads_adapt: int = 1
    max_batch: int = 64  # images of a pass, and of a request
    batch_wait: float = 0.001  # seconds that a request waits for company
    max_waiting: int = 256  # images; more are refused
    timeout: float = 10.0  # seconds, of reading a request and of answering it
    max_body: int = 16 * 2**20  # bytes
    max_pixels: int = 2**24  # of an image file
    buffer: int = 1024  # samples on their way to the adapter; more push the oldest out
    snapshot_every: float = 60.0  # seconds
    publish_every: float = 1.0  # seconds, at least
    keep: int = 16  # versions on disk
    guard: bool = True
    guard_narrow: float = 0.6  # see `GuardOptions`
    paused: bool = False
    log_requests: bool = False

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in ("threads_predict", "threads_adapt", "max_batch", "max_body", "max_pixels", "buffer", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.max_waiting < self.max_batch:
            raise ValueError(f"--max-waiting {self.max_waiting} must hold a batch of {self.max_batch} (--max-batch)")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be in 0..65535, not {self.port}")
        for name in ("timeout", "batch_wait", "snapshot_every", "publish_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a number of seconds, not {getattr(self, name)}")
        if self.timeout == 0:
            raise ValueError("--timeout must be more than 0 seconds")
        for host in self.hosts:
            if not host or host != host.lower().rstrip(".") or set(host) & set("/: "):
                raise ValueError(f"--allow-host takes names such as model.example.com, not {host!r}")
        if not self.name or set(self.name) & set("/?#%") or self.name in (".", ".."):
            raise ValueError(f"--name is part of an address, and {self.name!r} cannot be")

    def choice(self, device: str) -> MethodChoice:
        """Load the model on a device, with the method that adapts it."""
        from ttac.evaluation.method_choice import MethodChoice
        from ttac.methods.registry import methods

        known = methods().get(self.method)
        preset = self.preset
        if preset is None and known is not None and "fast" in known.presets:
            preset = "fast"  # a walk over all of a long queue would keep new weights back for minutes
        return MethodChoice(self.load(device), self.method, preset, self.options, self.stats).completed()
