"""What a method says: which parameters move, what its losses are, when it answers, what it knows of the source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ttac.adaptation.answers import Answers
from ttac.adaptation.memory import SampleQueue
from ttac.adaptation.normalisation import FollowingNorms
from ttac.adaptation.options import GradientOptions, Options, WindowOptions
from ttac.adaptation.resets import ResetEvery
from ttac.adaptation.step import GradientSteps, Loss
from ttac.common.state import Stateful
from ttac.model.classifier import Classifier
from ttac.model.norms import NORM_LAYERS
from ttac.source.knowledge import Knowledge

if TYPE_CHECKING:
    from ttac.adaptation.adapter import Adapter

EVERY_PROTOCOL = ("N-O-SF", "N-O-SL", "Y-O-SL", "N-M-SF", "N-M-SL", "Y-M-SL")


@dataclass(frozen=True)
class Capabilities:
    """What a method is allowed in, needs and changes; the command line, checks and documents read it."""

    name: str
    title: str
    protocols: tuple[str, ...]
    changes: str
    citation: str
    needs: tuple[str, ...] = ()  # kinds of knowledge of the source, always
    may_use: tuple[str, ...] = ()  # kinds that an option asks for, as Y protocols demand


@dataclass(frozen=True)
class View:
    """What the network makes of one view of a minibatch."""

    features: Tensor  # [n, D]
    logits: Tensor  # [n, K]

    @property
    def posterior(self) -> Tensor:
        """The posteriors as constants: `[n, K]`."""
        return self.logits.detach().float().softmax(1)


class Batch:
    """Samples of the memory that one step learns from, and how the network is run on them."""

    def __init__(self, adapter: Adapter, slots: Tensor, number: int) -> None:
        self.slots = slots  # [n] in the memory
        self.number = number  # of the pass over the memory that the update is in
        self.images = adapter.memory_in_use.take(slots)  # [n, C, H, W]
        self.logits: Tensor | None = None  # [n, K] of the pass that the stored batch-norm statistics follow
        self._adapter = adapter
        self._weak: Tensor | None = None  # views of the last weak pass
        self._actions: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self.slots)

    def forward(self, images: Tensor | None = None) -> View:
        """Run the images, or views of them, normalised by their own statistics, which the stored ones follow."""
        with self._adapter.norms.following(len(self)):
            view = self._adapter.view(self.images if images is None else images)
        self.logits = view.logits
        return view

    def apart(self, images: Tensor) -> View:
        """Run other images, normalised apart: they neither bend nor enter the statistics of the stream."""
        with self._adapter.norms.apart():
            return self._adapter.view(images)

    def weak(self) -> View:
        """Run weak views of the images; the stored batch-norm statistics follow them."""
        self._weak = self.weakened()
        return self.forward(self._weak)

    def pair(self, strength: float = 1.0, *, count: int | None = None, follow_both: bool = False) -> tuple[View, View]:
        """Run weak views and strong ones of the first `count` of them in one batch: normalised together.

        The stored batch-norm statistics follow with `follow_both`, as the authors' do, and else have to be taken of the
        images afterwards. Those of the weak rows within the joint pass would be wrong from the second layer on: what
        comes before has been normalised by other statistics than predictions are.
        """
        norms, size = self._adapter.norms, len(self)
        self._weak = self.weakened()
        views = torch.cat([self._weak, self.strengthened(strength, count)])
        with norms.following(size) if follow_both else norms.apart():
            both = self._adapter.view(views)
        self.logits = both.logits[:size]
        return View(both.features[:size], self.logits), View(both.features[size:], both.logits[size:])

    def posterior_by_stored(self) -> Tensor:
        """Compute the posteriors `[n, K]` of the weak views that were run, normalised by the stored statistics."""
        assert self._weak is not None, "no weak views have been run"
        with torch.no_grad():
            return self._adapter.view(self._weak).posterior

    def strong(self, strength: float = 1.0, count: int | None = None) -> View:
        """Run strong views of the first `count` of the images, normalised apart."""
        return self.apart(self.strengthened(strength, count))

    def weakened(self) -> Tensor:
        """Draw weak views of the images."""
        adapter, options = self._adapter, self._adapter.options
        return adapter.classifier.input.weak(self.images, adapter.generator, flip=options.flip, crop=options.crop)

    def strengthened(self, strength: float = 1.0, count: int | None = None) -> Tensor:
        """Draw strong views of the first `count` images (None: all), at a `strength` of 0 mirrored and shifted ones."""
        adapter, options = self._adapter, self._adapter.options
        return adapter.classifier.input.strong(
            self.images[:count],
            adapter.generator,
            flip=options.flip,
            kind=options.strong,
            operations=options.operations,
            magnitude=options.magnitude,
            strength=strength,
        )

    def when_taken(self, action: Callable[[], None]) -> None:
        """Do something if the step is taken: a refused one leaves no trace."""
        self._actions.append(action)

    def commit(self) -> None:
        """Do all that waits for the step to be taken."""
        for action in self._actions:
            action()


class Method(Stateful):
    """A method on one adapter. Subclasses override what they do differently; the loop is the adapter's.

    What a stream changes is declared (`self.declare(name=function)`), which makes it part of resets and saved states.
    """

    capabilities: ClassVar[Capabilities]
    options_type: ClassVar[type[Options]] = WindowOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Options under which the conformance checks see the method at work, on a random network of few samples.
    checked_with: ClassVar[Mapping[str, Any]] = {}
    # Whether its confidences are those of the model's own head, so that a guard can compare them with the source's.
    guardable: ClassVar[bool] = True

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.classifier: Classifier = adapter.classifier
        self.knowledge: Mapping[str, Knowledge] = adapter.knowledge

    # What it knows

    @classmethod
    def uses(cls, options: Any) -> tuple[str, ...]:
        """Name the kinds of knowledge that the method uses under its options."""
        return cls.capabilities.needs

    @classmethod
    def informed(cls, given: Mapping[str, Any], known: Mapping[str, Knowledge]) -> dict[str, Any]:
        """Complete the options that were `given` by what is known of the source, or raise where it contradicts them."""
        return dict(given)

    @property
    def exempt(self) -> dict[str, str]:
        """The checks of `ttac.checks` that the options make impossible, with the reason of each."""
        return {}

    # The parts that it is made of

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name the parameters that move; all others stay without gradient."""
        return {}

    def optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer; its rate is set before every update."""
        return torch.optim.SGD(values, momentum=self.adapter.options.momentum)

    def memory(self) -> SampleQueue | None:
        """Make the memory of samples, None for a method that keeps none and learns nothing."""
        options = self.adapter.options
        return SampleQueue(options.queue or options.window, self.classifier.input, self.columns())

    def columns(self) -> dict[str, Tensor]:
        """Name what is remembered of each sample, with what that is for one that has just come."""
        return {}

    def norms(self) -> FollowingNorms:
        """Make what normalises passes."""
        clip = getattr(self.adapter.options, "bn_clip", 1)
        return FollowingNorms(self.classifier, clip=clip, reduction=self.adapter.reduction)

    def steps(self, parameters: Mapping[str, nn.Parameter]) -> GradientSteps:
        """Make what takes steps."""
        trust = getattr(self.adapter.options, "trust", 0.0)
        return GradientSteps(parameters, self.optimizer, self.adapter.reduction, trust=trust)

    def answers(self) -> Answers:
        """Make what predicts."""
        return Answers(self.classifier)

    def resets(self) -> ResetEvery:
        """Make what says when to go back to the source model."""
        return ResetEvery(self.adapter.options.reset_every)

    # What it does

    def losses(self, batch: Batch) -> dict[str, Loss]:
        """Compute the weighted losses of a minibatch by name, none where the pass itself is all."""
        raise NotImplementedError(f"{type(self).__name__} must define losses")

    def rate(self) -> float:
        """Give the rate of a step: `lr`, or `rate` divided by the root of the number of steps of an update."""
        options: GradientOptions = self.adapter.options
        if options.lr is not None:
            return options.lr
        steps = self.passes() * self.adapter.memory_in_use.minibatch_count(options.window, options.walk)
        return float(options.rate / steps**0.5)

    def check_images(self, images: Tensor) -> None:
        """Refuse images that the method cannot use, though the model can."""

    def passes(self) -> int:
        """How often an update walks the memory."""
        passes: int = self.adapter.options.passes
        return passes

    def before_update(self) -> None:
        """Prepare an update, now that a window is full or the stream ends."""

    def after_update(self, newest: Tensor, logits: Tensor) -> Tensor:
        """End an update: give the logits of the window's slots `newest [N_B]`, which are `logits [N_B, K]`."""
        return logits

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Prepare a pass over the target set, which `target` walks in the order in which it will come."""

    def measures(self) -> dict[str, Tensor | float]:
        """Tell what the update has noticed and users may want to know, by name."""
        return {}

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset, beside what the adapter counts."""
        return {}


def norm_affine(classifier: Classifier) -> dict[str, nn.Parameter]:
    """Name the affine parameters of norm layers, without the head's."""
    backbone = classifier.backbone_parameters()
    found = {
        f"{name}.{key}": value
        for name, module in classifier.named_modules()
        if isinstance(module, NORM_LAYERS)
        for key, value in module.named_parameters(recurse=False)
        if f"{name}.{key}" in backbone
    }
    if not found:
        raise ValueError("the method adapts the affine parameters of norm layers, and this model has none: use another")
    return found


def backbone(classifier: Classifier) -> dict[str, nn.Parameter]:
    """Name the parameters of the backbone; the linear head stays as it is."""
    found = classifier.backbone_parameters() if classifier.head is not None else {}
    if not found:
        raise ValueError("the method adapts the backbone, and this model is a linear head alone: use another")
    return found
