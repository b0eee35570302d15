"""What must be known, and right, before a server takes its first request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ttac.common.resumable import plain_settings
from ttac.evaluation.method_choice import MethodChoice
from ttac.methods.base import Adapter
from ttac.model.classifier import Classifier
from ttac.model.weights import check_size, usable_device
from ttac.serving.guard import GuardOptions
from ttac.serving.settings import ServeJob
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout
from ttac.source.statistics import SourceStatistics

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
    usable_device(job.device_predict)
    usable_device(job.device_adapt)
    choice = job.choice(job.device_adapt)
    description, classifier = choice.model.description, choice.model.classifier
    if description.size is None:
        raise ValueError("the model does not say which size of images it takes: name it with --size")
    check_size(classifier, description.size)
    console = Console(soft_wrap=True)
    identity = snapshot_identity(choice)
    StateFolder(job.state).check(identity)
    GuardOptions(narrow=job.guard_narrow)
    adapter = build_adapter(job, choice, console)
    layout = WeightsLayout.of(classifier.model)
    first = layout.pack(adapter.adapted().model.state_dict())  # raises where the method's weights are not the model's
    if job.guard and first != layout.pack(classifier.model.state_dict()):
        raise ValueError(
            f"{adapter.capabilities.title} predicts with another head than the model's from the beginning, and the "
            "guard cannot compare the confidences of the two: add --no-guard"
        )
    return Facts((classifier.channels, *description.size), layout.size, identity)


def snapshot_identity(choice: MethodChoice) -> dict[str, Any]:
    """Name all that a state goes on from, which may be on another device."""
    return plain_settings({key: value for key, value in choice.settings().items() if key != "device"})


def build_adapter(job: ServeJob, choice: MethodChoice, console: Console) -> Adapter:
    """Make the adapter; statistics that have to be inferred are so once in the life of a state folder."""
    path = job.state / INFERRED

    def inferred() -> SourceStatistics:
        if path.exists():
            return SourceStatistics.load(path, choice.model.classifier)
        stats = choice.infer(console)
        stats.save(path)
        return stats

    return choice.adapter(console, inferred)
