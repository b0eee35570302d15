"""What methods share that learn from weak and strong views of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ttac.methods.base import Moment, require
from ttac.methods.windows import GradientAdapter, GradientOptions
from ttac.model.views import LARGEST_MAGNITUDE, strong_view, weak_view


@dataclass(frozen=True)
class ViewOptions(GradientOptions):
    """What can be set of the views that a method makes."""

    moments: ClassVar[tuple[Moment, ...]] = ("before", "after")  # the logits of an update are those of mirrored views

    flip: bool = True  # whether a mirrored image is still of its class
    crop: bool = False  # whether the weak view is shifted as well
    operations: int = 2  # of RandAugment in a strong view
    magnitude: int = 10  # of RandAugment, 0..30

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.operations >= 0, "operations must not be negative", self.operations)
        rule = f"magnitude must be in 0..{LARGEST_MAGNITUDE}"
        require(0 <= self.magnitude <= LARGEST_MAGNITUDE, rule, self.magnitude)


@dataclass(frozen=True)
class View:
    """What the network makes of one view of a minibatch."""

    features: Tensor  # [n, D]
    logits: Tensor  # [n, K]

    @property
    def posterior(self) -> Tensor:
        """The posteriors as constants: `[n, K]`."""
        return self.logits.detach().float().softmax(1)


class ViewAdapter(GradientAdapter):
    """A gradient adapter that looks at weak and strong views of the queue's samples."""

    options: ViewOptions

    def _weak(self, images: Tensor) -> View:
        """Look at weak views; the stored batch-norm statistics follow them."""
        with self.tracker.following(len(images)):
            return View(*self.classifier.features_and_logits(self._weakened(images)))

    def _strong(self, images: Tensor) -> View:
        """Look at strong views; normalised apart, they neither bend nor enter the statistics of the stream."""
        with self.tracker.apart():
            return View(*self.classifier.features_and_logits(self._strengthened(images)))

    def _weakened(self, images: Tensor) -> Tensor:
        return weak_view(images, self.generator, flip=self.options.flip, crop=self.options.crop)

    def _strengthened(self, images: Tensor) -> Tensor:
        options = self.options
        return strong_view(
            images, self.generator, flip=options.flip, operations=options.operations, magnitude=options.magnitude
        )
