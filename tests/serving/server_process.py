"""A running `ttac serve` for tests, on a tiny network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from ttac.model.classifier import Classifier
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, save_model

SHAPE = (3, 16, 16)
CLASSES = ("ant", "bee", "cow", "dog")


def save_tiny_model(
    path: Path, seed: int = 0, size: tuple[int, int] = SHAPE[1:], classes: tuple[str, ...] = CLASSES, width: int = 4
) -> Classifier:
    """Write a residual network with random weights that `ttac serve --model` takes, and give it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = ResNet(8, len(classes), width=width)
    description = ModelDescription(
        "resnet8", len(classes), size=size, classes=classes, arch_options={"width": width}, mean=(0.0,), std=(1.0,)
    )
    save_model(path, network, description)
    return Classifier(network, mean=0, std=1).eval()


def free_port() -> int:
    """Give a port that nobody listens at, for a server that must come back at the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """`ttac serve` in a process of its own, with what a test asks of it."""

    def __init__(self, model: Path, state: Path, *arguments: str) -> None:
        self.state, self.port = state, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = state.with_name(f"{state.name}.log")
        command = [sys.executable, "-m", "ttac", "serve", "--model", str(model), "--state", str(state)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--name", "tiny", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_until(lambda: self.get("/v2/health/ready") is not None)
            self.wait_until(lambda: "samples" in self.status()["adapter"])
        except BaseException:  # no block begins, so the end of none ends it
            self.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """See to it that the server does not outlive its test."""
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self.process.kill()  # which is nothing to a process that has ended
            self.process.wait()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """End the server and give its exit code."""
        self.process.send_signal(signum)
        return self.process.wait(60)

    def get(self, path: str) -> Any:
        """Give the JSON of an address, None where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                text = answer.read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None
        return json.loads(text or b"{}")

    def status(self) -> dict[str, Any]:
        """Give the server's status, asked for until it answers."""
        found: list[dict[str, Any]] = []
        self.wait_until(lambda: (status := self.get("/status")) is not None and found.append(status) is None)
        return found[0]

    def admin(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Give a command with the server's own token."""
        token = (self.state / "token").read_text().strip()
        request = urllib.request.Request(
            f"{self.url}/admin/{command}",
            json.dumps(arguments).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def wait_until(self, condition: Any, seconds: float = 60.0) -> None:
        """Wait until a condition holds; a server that ended, or too long a time, is a failure."""
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < until, f"waited in vain:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def kill(self, *names: str) -> None:
        """Kill processes of the server with SIGKILL."""
        status = self.status()
        for name in names:
            os.kill(status[name]["pid"], signal.SIGKILL)
