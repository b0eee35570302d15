"""What methods share that learn whenever a window of samples has come."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ttac.adaptation.memory import SampleQueue
from ttac.adaptation.step import Updater
from ttac.methods.base import Adapter, Moment, Options, require
from ttac.model.norms import BatchNormTracker


@dataclass(frozen=True)
class WindowOptions(Options):
    """What can be set for methods that learn from windows of the stream."""

    moments: ClassVar[tuple[Moment, ...]] = ("before", "during", "after")

    window: int = 256  # N_B, samples between updates and in a minibatch
    predict: Moment = "after"  # the update that an arrival triggers
    queue: int = 0  # N_C, samples that an update walks over; 0: the window alone
    passes: int = 1  # N_itr over the queue an update
    walk: int = 0  # samples of the queue that a pass visits: the window and the least visited; 0: all
    bn_clip: int = 512  # samples that the past of the batch-norm statistics counts as, at most

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.window >= 2, "window must be at least 2", self.window)
        require(self.predict in self.moments, f"predict must be {' or '.join(self.moments)}", self.predict)
        rule = f"queue must be 0 or hold a window of {self.window}"
        require(self.queue == 0 or self.queue >= self.window, rule, self.queue)
        require(self.passes >= 1, "passes must be at least 1", self.passes)
        rule = f"walk must be 0 or hold a window of {self.window} and no more than the queue of {self.queue}"
        require(self.walk == 0 or self.window <= self.walk <= self.queue, rule, self.walk)
        require(self.bn_clip >= 1, "bn_clip must be at least 1", self.bn_clip)


class WindowAdapter(Adapter):
    """An adapter that updates whenever a window of samples has come, whatever the arrival batches are.

    An arrival batch is walked in the pieces that windows cut it into, so the same stream gives the same updates in
    batches of any size, and a large batch the same predictions as windows that arrive one by one. A sample that comes
    before its window is full is predicted by the model of that moment.
    """

    options: WindowOptions

    @abstractmethod
    def _step(self, slots: Tensor, number: int) -> Tensor | None:
        """Learn from the queue's samples at `slots [n]` in pass `number`: their logits `[n, K]`, None if refused."""

    def _begin(self) -> None:
        options = self.options
        self.generator = torch.Generator().manual_seed(options.seed)
        self.queue = SampleQueue(options.queue or options.window, self.classifier.num_classes)
        self.tracker = BatchNormTracker(self.classifier, clip=options.bn_clip)

    def _update(self) -> Tensor | None:
        """Walk the queue now that a window is full: the window's logits before their last steps, None if refused."""
        newest = self.queue.newest(self.options.window)
        head = self.classifier.head.weight
        logits = head.new_full((len(self.queue), self.classifier.num_classes), torch.nan)
        for number in range(self.options.passes):
            for slots in self.queue.minibatches(self.options.window, self.generator, self.options.walk):
                if self.before_step is not None:
                    self.before_step()
                found = self._step(slots, number)
                logits[slots] = torch.nan if found is None else found.detach().to(logits)
        window = logits[newest]
        return window if bool(window.isfinite().all()) else None

    def _check(self, images: Tensor) -> Tensor:
        images = super()._check(images)
        self.queue.check(images)
        if not len(self.queue):  # a size that the model cannot take must not enter the queue
            try:
                self.predict(images[:1])
            except (RuntimeError, AssertionError) as error:
                size = " x ".join(map(str, images.shape[1:]))
                raise ValueError(f"the model does not take images of {size}: {error}") from error
        return images

    def _arrive(self, images: Tensor) -> Tensor:
        return torch.cat([self._arrive_within_window(piece) for piece in self._pieces(images)])

    def _learn(self, images: Tensor) -> None:
        for piece in self._pieces(images):
            self._take(piece)

    def _pieces(self, images: Tensor) -> Iterator[Tensor]:
        cuts = range(self.options.window - self.queue.fresh, len(images), self.options.window)
        yield from images.tensor_split(tuple(cuts))

    def _arrive_within_window(self, images: Tensor) -> Tensor:
        logits = self._timed_predict(images) if self.options.predict == "before" else None
        window_logits = self._take(images)
        if self.options.predict == "during" and window_logits is not None:
            logits = window_logits[-len(images) :]
        return self._timed_predict(images) if logits is None else logits

    def _take(self, images: Tensor) -> Tensor | None:
        """Store images and learn if they fill the window: its logits `[N_B, K]` if it did."""
        self.queue.push(images)
        if self.queue.fresh < self.options.window:
            return None
        started = self._now()
        try:
            return self._update()
        finally:
            self.queue.settle()
            self.last_step.update_seconds.append(self._now() - started)

    def _timed_predict(self, images: Tensor) -> Tensor:
        started = self._now()
        logits = self.predict(images)
        self.last_step.predict_seconds += self._now() - started
        return logits

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {**super().counters(), "refused_statistics": self.tracker.refused}

    def _state(self) -> dict[str, Any]:
        return {
            "queue": self.queue.state(),
            "batch_norm": self.tracker.state(),
            "generator": self.generator.get_state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.queue.load(state["queue"])
        self.tracker.load(state["batch_norm"])
        self.generator.set_state(state["generator"])


@dataclass(frozen=True)
class GradientOptions(WindowOptions):
    """What can be set for methods that take gradient steps."""

    lr: float | None = None  # of every step; None: `rate_budget` shared out among the steps, see `_rate`
    rate_budget: float = 0.02  # learning rate that 256 samples may spend, however many steps and windows they make
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.lr is None or self.lr > 0, "lr must be positive", self.lr)
        require(self.rate_budget > 0, "rate_budget must be positive", self.rate_budget)
        require(0 <= self.momentum < 1, "momentum must be in [0, 1)", self.momentum)


@dataclass(frozen=True)
class Trial:
    """A minibatch's losses before their step, and what to store if the step is taken."""

    losses: dict[str, Tensor]  # weighted, by name; that of an alignment has its gradient alone
    logits: Tensor  # [n, K]
    keep: Callable[[], None] = lambda: None
    later: Callable[[], dict[str, Tensor]] | None = None  # losses of another pass, see `Updater.step`


class GradientAdapter(WindowAdapter):
    """A window adapter that descends on losses of the backbone; a step that is not finite leaves no trace."""

    options: GradientOptions

    @abstractmethod
    def _try(self, slots: Tensor, number: int) -> Trial:
        """Compute the losses of the queue's samples at `slots [n]` in pass `number`."""

    def _parameters_to_change(self) -> dict[str, nn.Parameter]:
        backbone = self.classifier.backbone_parameters()
        if not backbone:
            raise ValueError(f"{self.capabilities.title} adapts the backbone, and this model is a linear head alone")
        return backbone

    def _make_optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(values, momentum=self.options.momentum)  # its rate is set before every update

    def _begin(self) -> None:
        super()._begin()
        self.updater = Updater(self._learning, self._make_optimizer)

    def _update(self) -> Tensor | None:
        self.updater.set_rate(self._rate())
        return super()._update()

    def _rate(self) -> float:
        """Give the rate of a step: `lr`, or what a window may spend divided by the steps that are made of it."""
        options = self.options
        if options.lr is not None:
            return options.lr
        steps = options.passes * self.queue.minibatch_count(options.window, options.walk)
        return options.rate_budget * options.window / 256 / steps

    def _step(self, slots: Tensor, number: int) -> Tensor | None:
        before = self.tracker.snapshot()
        trial = self._try(slots, number)
        # Without a loss there is no gradient to tell that something overflowed.
        sound = bool(trial.losses) or bool(trial.logits.isfinite().all())
        if not (sound and self.updater.step(trial.losses, trial.later)):
            self.tracker.restore(before)
            return None  # what the step was refused for is no prediction either
        trial.keep()
        return trial.logits

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {**super().counters(), "steps": self.updater.steps, "skipped_steps": self.updater.skipped}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "updater": self.updater.state()}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.updater.load(state["updater"])
