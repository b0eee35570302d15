"""What must be known, and right, before a server takes its first request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ttac.common.resumable import plain_settings
from ttac.model.classifier import Classifier
from ttac.model.weights import check_size, usable_device
from ttac.serving.settings import ServeJob
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout

INFERRED = "inferred.safetensors"


@dataclass(frozen=True)
class Facts:
    """What the processes of a server share about its model; plain values, which come through a pipe."""

    shape: tuple[int, int, int]  # of an image: channels, height, width
    weights_size: int  # bytes
    identity: dict[str, Any]  # settings that a snapshot must match

    def check(self, classifier: Classifier) -> None:
        """Raise an error where a process that is started again finds another model than the server began with."""
        if classifier.fingerprint() != self.identity["model"]:
            raise ValueError("the model's file has changed while it is served: put it back, or start the server anew")


def prepare(job: ServeJob) -> Facts:
    """Load everything once, so that what is wrong shows before anything is bound, written or answered.

    Statistics that the method needs and nobody gives are inferred here and kept in the state folder.
    """
    usable_device(job.predict_on)
    usable_device(job.adapt_on)
    method = job.prepare_method()
    description, classifier = method.model.description, method.model.classifier
    if description.size is None:
        raise ValueError("the model does not say which size of images it takes: name it with --size")
    check_size(classifier, description.size)
    # All that a state goes on from, which may be on another device.
    identity = plain_settings({key: value for key, value in method.settings().items() if key != "device"})
    StateFolder(job.state).check(identity)
    adapter = method.adapter(Console(soft_wrap=True), keep=job.state / INFERRED)
    layout = WeightsLayout.of(classifier.model)
    layout.pack(adapter.adapted().model.state_dict())  # raises where the method's weights are not the model's
    if job.guard and not adapter.method.guardable:
        raise ValueError(
            f"{adapter.capabilities.title} predicts with another head than the model's from the beginning, and the "
            "guard cannot compare the confidences of the two: add --no-guard"
        )
    return Facts((classifier.channels, *description.size), layout.size, identity)
