"""A `ttac serve` in processes of its own, for the benchmarks: started, asked, pinned to cores, and ended (Linux)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttac.evaluation.spec import StreamSpec
from ttac.serving.client import InferenceClient
from ttac.serving.journal import Journal
from ttac.serving.replay import RemoteModel
from ttac.serving.state_folder import StateFolder

LONGEST = 120.0  # seconds for anything to happen
MANY = 2**20  # events: all that a journal holds


class ServerProcess:
    """A server at a free port, whose state and log are below `folder`; the block ends it."""

    def __init__(self, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.state, self.log, token_file = folder / "state", folder / "log", folder / "token"
        self.token = secrets.token_urlsafe(16)
        token_file.write_text(self.token)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "ttac", "serve", "--model", str(model), "--state", str(self.state)]
        command += ["--port", str(port), "--token-file", str(token_file), *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> ServerProcess:
        try:
            with self.client() as client:
                self.wait(client.ready)
            self.wait(lambda: bool(self.status()["adapter"]["up"]))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(LONGEST)
        finally:
            self._process.kill()

    def client(self, patience: float = 0.0) -> InferenceClient:
        """Make a client of the server."""
        # A request that came after a kill waits for the next predictor, which a busy machine keeps back.
        return InferenceClient(self.url, token=self.token, timeout=LONGEST, patience=patience)

    def status(self) -> dict[str, Any]:
        """Ask for the state of both processes, until there is an answer."""
        with self.client(LONGEST) as client:
            return client.get("/status")

    def events(self, *kinds: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Give what the journal has of some kinds of events, oldest first."""
        found = Journal(StateFolder(self.state).events).tail(MANY)
        return [one for one in found if one["event"] in kinds and one["time"] >= since]

    def adapt(self, on: bool) -> None:
        """Let the adapter learn, or let it end its update and rest."""
        with self.client(LONGEST) as client:
            client.post("/admin/resume" if on else "/admin/pause")

        def done() -> bool:
            adapter = self.status()["adapter"]
            return (adapter["state"] != "paused") if on else (adapter["state"] == "paused" and not adapter["updating"])

        self.wait(done)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; raise an error where the server ends, or it takes too long."""
        until = time.monotonic() + LONGEST
        while not condition():
            if self._process.poll() is not None or time.monotonic() > until:
                text = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the server ended or hangs; the end of its log:\n{text}")
            time.sleep(0.05)


def pin(process: int, cores: set[int]) -> None:
    """Keep a process on some cores: all of its threads, and those that they will start."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may have ended just now
            os.sched_setaffinity(int(thread.name), cores)


def stream_levels(server: ServerProcess, data: str, count: int) -> tuple[str, NDArray[np.uint8]]:
    """Give the name of the served model and images under Gaussian noise for it: `[count, C, H, W]`."""
    with server.client() as client:
        model = RemoteModel.ask(client)
    (arrival,) = StreamSpec(data, samples=count, batch=count, corruption=("gaussian_noise",)).build(model)
    return model.name, (255 * arrival.images).round().byte().numpy()
