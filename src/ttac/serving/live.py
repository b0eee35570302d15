"""The model that answers, and an idle twin that the next weights are copied into."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from ttac.model.classifier import Classifier
from ttac.serving.batcher import Answer
from ttac.serving.shared import Slots
from ttac.serving.weights import WeightsLayout


class Served(NamedTuple):
    """A classifier and the version of the weights that are in it; the two never part."""

    classifier: Classifier
    version: int


class LiveModel:
    """Answers with the newest weights; `refresh` brings them in from another thread, off the path of requests.

    New weights go into the twin, which nobody reads. `predict`, which one thread alone calls, swaps the two before a
    batch, so that all of a batch comes from one version.
    """

    def __init__(self, classifier: Classifier, slots: Slots) -> None:
        self._slots = slots
        self._layout = WeightsLayout.of(classifier.model)
        self._serving = Served(classifier, 0)
        self._idle: Classifier | None = classifier.copy()
        self._ready: Served | None = None
        self._exchange = threading.Lock()  # for pointers alone: nothing is computed or copied under it
        self._seen = 0
        self._content: bytearray | None = None  # kept, as new memory for a large network stops all threads a while
        device = classifier.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def version(self) -> int:
        """The version of the next answer."""
        with self._exchange:
            return (self._ready or self._serving).version

    def start_from(self, content: bytearray, version: int) -> None:
        """Serve these weights, before any request."""
        self._layout.load(content, self._serving.classifier.model)
        self._serving = Served(self._serving.classifier, version)
        self._seen = version

    def refresh(self) -> bool:
        """Bring in weights that are newer than those at hand, and tell whether there were any."""
        found = self._slots.read(after=self._seen, reuse=self._content)
        if found is None:
            return False
        version, content = found
        self._content = content
        with self._exchange:
            # Weights that are ready and were not asked for yet make room for newer ones.
            twin = self._idle if self._ready is None else self._ready.classifier
            self._idle = self._ready = None
        assert twin is not None
        try:
            # Beside the kernels of requests where the device has streams, of which the copy alone is waited for.
            with torch.cuda.stream(self._stream):
                self._layout.load(content, twin.model)
            if self._stream is not None:
                self._stream.synchronize()
        except Exception:
            self._idle = twin
            raise
        with self._exchange:
            self._ready = Served(twin, version)
        self._seen = version
        return True

    def predict(self, images: Tensor) -> Answer:
        """Answer a batch `[N, C, H, W]` with the newest weights that are ready."""
        with self._exchange:
            if self._ready is not None:
                self._idle, self._serving, self._ready = self._serving.classifier, self._ready, None
            serving = self._serving
        with torch.inference_mode():
            logits = serving.classifier(images.to(serving.classifier.device))
        return Answer(logits.cpu(), serving.version)
