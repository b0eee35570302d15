"""With which weights an adapter answers."""

from __future__ import annotations

from torch import Tensor

from ttac.common.state import Stateful
from ttac.model.classifier import Classifier


class Answers(Stateful):
    """The learner's own weights. A method that answers with others overrides these, and keeps what they need.

    An average of the weights or an ensemble with the source is another class of this kind.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    def predict(self, images: Tensor) -> Tensor:
        """Predict images that have been checked, and change nothing: `[N, C, H, W] -> [N, K]`."""
        logits: Tensor = self.classifier(images)
        return logits

    def adapted(self) -> Classifier:
        """Give a classifier that predicts the same, for its weights to be kept; it is not to be changed."""
        return self.classifier

    def after_step(self) -> None:
        """Follow the learner, which has just taken a step."""
