"""What the process that answers offers to HTTP: predictions, the state of both processes, and commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from torch import Tensor

from ttac.model.weights import LoadedModel
from ttac.serving.batcher import Answer, Batcher
from ttac.serving.channels import MESSAGE_SIZE, Server
from ttac.serving.errors import RequestError, come_again
from ttac.serving.history import History
from ttac.serving.journal import LOGGER, Journal
from ttac.serving.live import LiveModel
from ttac.serving.protocol import PLATFORM, ServedModel
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout

LOOK_EVERY = 0.02  # seconds between two looks for new weights
SILENCE = 5.0  # seconds without word of the adapter, after which it counts as away
PATIENCE = 5.0  # seconds that a command is waited for; an update that is under way ends first


class PredictorService:
    """The served model in the process that answers.

    It reads what the adapter publishes and hands samples on to it, and waits for it nowhere but in `command`.
    """

    def __init__(self, server: Server, loaded: LoadedModel) -> None:
        job, channels, described = server.job, server.channels, loaded.description
        self.description = ServedModel(
            job.served_name,
            server.facts.shape,
            loaded.classifier.num_classes,
            described.classes,
            described.crop_pct,
            job.method.method,
        )
        self._channels = channels
        channels.busy[0] = 0  # a predecessor may have been killed in the middle of a pass
        self._device = str(loaded.classifier.device)
        self._folder = StateFolder(job.state)
        self._journal = Journal(self._folder.events)
        self._live = LiveModel(loaded.classifier, channels.weights)
        self._start_from_disk(loaded)
        self._begun = time.time()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._heard: tuple[int, dict[str, Any]] = (0, {})
        self._closing = threading.Event()
        self.history = History(self.description.labels)
        self.batcher = Batcher(
            self._predict,
            taken=lambda images: channels.ring.push(images.numpy()),
            max_batch=job.max_batch,
            wait=job.batch_wait_ms / 1000,
            max_waiting=job.max_waiting,
        )

    def _start_from_disk(self, loaded: LoadedModel) -> None:
        """Serve the newest version on disk where nothing is published yet: the adapter may need a while, or be dead."""
        self._live.refresh()
        for version in reversed(self._folder.versions() if not self._live.version else []):
            try:
                content = WeightsLayout.of(loaded.classifier.model).pack(self._folder.load_version(version))
            except (ValueError, OSError) as error:
                LOGGER.warning("version %d cannot be served: %s", version, error)
                continue
            self._live.start_from(content, version)
            return

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for new weights and hear the adapter's replies while the block lasts; then finish what was accepted."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channels.predictor_end, self._hear_replies)
        looking = threading.Thread(target=self._look, name="ttac-weights", daemon=True)
        looking.start()
        try:
            yield
        finally:
            loop.remove_reader(self._channels.predictor_end)
            self._closing.set()
            await asyncio.to_thread(self.batcher.close)
            looking.join()

    # Predictions

    def _predict(self, images: Tensor) -> Answer:
        self._channels.busy[0] = 1
        try:
            return self._live.predict(images)
        finally:
            self._channels.busy[0] = self.batcher.waiting

    def _look(self) -> None:
        noted = 0.0
        while not self._closing.wait(LOOK_EVERY):
            try:
                self._live.refresh()
                if time.monotonic() - noted >= 1:
                    noted = time.monotonic()
                    self.history.note(self._live.version, _mean(self._adapter_status().get("distances")))
            except Exception:  # a thread that ends here would leave old weights in service without a word
                LOGGER.exception("new weights could not be brought in")

    # What is told

    def status(self) -> dict[str, Any]:
        """Describe both processes, as plain values."""
        version = self._live.version
        published = self._folder.published(version) or self._begun
        adapter = dict(self._adapter_status())
        now = time.time()
        guard = adapter.pop("guard", {"enabled": False, "ok": None, "reasons": [], "measures": {}})
        distances = adapter.pop("distances", {})
        return {
            "name": self.description.name,
            "method": self.description.method,
            "platform": PLATFORM,
            "shape": list(self.description.shape),
            "crop_pct": self.description.crop_pct,
            "named": self.description.classes is not None,
            "classes": list(self.description.labels),
            "version": version,
            "uptime_seconds": now - self._begun,
            "predictor": {
                "pid": os.getpid(),
                "device": self._device,
                "version": version,
                "published": published,
                "weights_age_seconds": max(now - published, 0.0),
                "restarts": int(self._channels.restarts[0]),
                "waiting": self.batcher.waiting,
                **self.history.summary(),
            },
            "adapter": {
                **adapter,
                "up": self._adapter_is_up(),
                "seconds_since_heard": time.monotonic() - adapter["monotonic"] if adapter else None,
                "restarts": int(self._channels.restarts[1]),
                "lag": self._channels.ring.waiting,
                "dropped": self._channels.ring.dropped,
            },
            "guard": guard,
            "distances": distances,
            "admin": {"token_needed": True},
        }

    @property
    def version(self) -> int:
        """The version of the next answer."""
        return self._live.version

    def events(self, count: int) -> list[dict[str, Any]]:
        """Give the newest events, oldest first."""
        return self._journal.tail(count)

    def _adapter_status(self) -> dict[str, Any]:
        found = self._channels.status.read(after=self._heard[0])
        if found is not None:
            version, content = found
            self._heard = (version, json.loads(content))
        return self._heard[1]

    def _adapter_is_up(self) -> bool:
        adapter = self._adapter_status()
        # Of the clock that both processes share and that nobody sets.
        if not adapter or time.monotonic() - adapter["monotonic"] > SILENCE:
            return False
        try:
            os.kill(adapter["pid"], 0)
        except OSError:  # it is gone, or its number is another's
            return False
        return True

    # Commands

    async def command(self, name: str, arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Give the adapter a command, and wait a while for its reply; one that it does not do raises an error.

        The status of HTTP says whether it is done, 200, or the adapter has it and is still busy, 202.
        """
        if not self._adapter_is_up():
            raise come_again(503, "the adapter is not running; it is being started again")
        number = time.time_ns()  # a predictor that was killed may have left replies to its own commands
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = reply
        try:
            message = json.dumps({**arguments, "id": number, "command": name}).encode()
            try:
                self._channels.predictor_end.send(message)
            except BlockingIOError as error:
                raise come_again(503, "the adapter does not take commands: too many wait already") from error
            found = await asyncio.wait_for(reply, PATIENCE)
        except asyncio.TimeoutError:
            message_text = f"{name} was passed on; an update is under way, and it is done when that ends"
            if not self._adapter_is_up():  # its successor finds the command, if it did not take it with it
                message_text = f"{name} was passed on, and the adapter ended: look at /events before you send it again"
            return 202, {"message": message_text, "version": self._live.version}
        finally:
            del self._pending[number]
        if not found["ok"]:
            raise RequestError(409, found["message"])
        return 200, {"message": found["message"], "version": found["version"]}

    def _hear_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                reply = json.loads(self._channels.predictor_end.recv(MESSAGE_SIZE))
                pending = self._pending.get(reply["id"])
                if pending is not None and not pending.done():
                    pending.set_result(reply)


def _mean(distances: dict[str, list[float | None]] | None) -> float | None:
    known = [value for value in (distances or {}).get("adapted", []) if value is not None]
    return float(np.mean(known)) if known else None
