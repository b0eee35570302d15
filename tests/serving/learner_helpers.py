"""A learner on a tiny network, in this process, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ttac import checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.guard import Guard, GuardReport
from ttac.serving.channels import Channels
from ttac.serving.journal import Journal
from ttac.serving.learner import Learner, LearnerSettings
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout

SHAPE = (3, 16, 16)
WINDOW = checks.WINDOW


class Service:
    """Memory and a folder, and the learners that come one after the other."""

    def __init__(self, path: Path, method: str = "tent", buffer: int = 512, **options: Any) -> None:
        self.subject = checks.subject(method, **options)
        self.layout = WeightsLayout.of(self.subject.make().classifier.model)
        self.folder = StateFolder(path)
        self.journal = Journal(self.folder.events)
        self.buffer = buffer
        self.new_memory()

    def new_memory(self) -> None:
        """Forget what only a running server has."""
        self.channels = Channels(SHAPE, self.layout.size, self.buffer)

    def learner(
        self, guard: ScriptedGuard | Guard | None = None, adapter: Adapter | None = None, **settings: Any
    ) -> Learner:
        """Make a learner that publishes at once, and saves when it is told to."""
        settings = {"publish_every": 0.0, "snapshot_every": 1e9, "chunk": 5, **settings}
        adapter = adapter or self.subject.make()
        return Learner(adapter, cast(Guard, guard), self.channels, self.folder, LearnerSettings(**settings))

    def started(self, **settings: Any) -> Learner:
        """Make a learner, and let it find what there is."""
        learner = self.learner(**settings)
        learner.start()
        return learner

    def push(self, images: Tensor) -> None:
        """Hand samples to the learner."""
        self.channels.ring.push(images.numpy())

    def serve(self) -> tuple[int, bytes]:
        """Give what the predictor would read."""
        found = self.channels.weights.read()
        assert found is not None
        return found[0], bytes(found[1])

    def packed(self, version: int) -> bytes:
        """Give a version on disk as the predictor would read it."""
        return bytes(self.layout.pack(self.folder.load_version(version)))

    def weights_of(self, adapter: Adapter) -> bytes:
        """Give an adapter's weights as the predictor would read them."""
        return bytes(self.layout.pack(adapter.adapted().model.state_dict()))

    def events(self, *names: str) -> list[str]:
        """Give the messages of some events."""
        return [entry["message"] for entry in self.journal.tail(10_000) if entry["event"] in names]

    def status(self) -> dict[str, Any]:
        """Give the status as it was published last."""
        found = self.channels.status.read()
        assert found is not None
        return dict(json.loads(found[1]))

    def ask(self, learner: Learner, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command, let the learner answer it, and give the answer."""
        self.channels.predictor_end.send(json.dumps({"id": 7, "command": command, **arguments}).encode())
        learner.turn()
        return dict(json.loads(self.channels.predictor_end.recv(65536)))


class ScriptedGuard:
    """A guard that says what it is told to, then that all is well."""

    def __init__(self, *actions: str) -> None:
        self.actions = list(actions)
        self.reason = "it collapsed"
        self.refused: str | None = None
        self.seen = 0
        self.told: list[Mapping[str, Tensor] | None] = []  # as published

    def published(self, weights: Mapping[str, Tensor] | None) -> None:
        """Note what is served."""
        self.told.append(None if weights is None else {name: tensor.clone() for name, tensor in weights.items()})

    def admit(self, images: Tensor) -> Tensor:
        """Admit all images, or none while `refused` says why."""
        self.seen += len(images)
        return images[:0] if self.refused else images

    def check(self, candidate: object) -> GuardReport:
        """Give the next action."""
        action = self.actions.pop(0) if self.actions else "publish"
        if action == "raise":
            raise RuntimeError("no probes")
        reasons = () if action == "publish" else (self.reason,)
        measures = {"entropy": {"adapted": float("nan"), "source": 1.0, "limit": None}}
        return GuardReport(cast(Any, action), reasons, measures, {"adapted": [0.5, None], "source": [0.1, 0.2]})

    def state(self) -> dict[str, Any]:
        """Give all that a stream has made."""
        return {"seen": self.seen}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.seen = state["seen"]

    def reset_state(self) -> None:
        """Forget the stream."""
        self.seen = 0


def learn_all(learner: Learner) -> None:
    """Let it learn from all that is waiting."""
    while learner.turn():
        pass


def same(a: Any, b: Any) -> bool:
    """Tell whether two states are equal, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
