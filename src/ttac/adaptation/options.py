"""Options in groups: a method combines those that mean something to it, and adds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ttac.common.options import Checked, require, setting
from ttac.model.views import LARGEST_MAGNITUDE, StrongView

Moment = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Options(Checked):
    """What can be set for every method."""

    seed: int = setting(0, "of everything random", least=0, most=2**63 - 1)
    reset_every: int = setting(0, "samples after which the source model is started from again; 0: never", least=0)


@dataclass(frozen=True)
class WindowOptions(Options):
    """Methods that learn from windows of the stream."""

    moments: ClassVar[tuple[Moment, ...]] = ("before", "during", "after")

    window: int = setting(256, "N_B, samples between updates and in a minibatch", least=2)
    predict: Moment = setting("after", "when a sample is predicted: before, during or after its update")
    queue: int = setting(0, "N_C, samples that an update walks over; 0: the window alone", least=0)
    passes: int = setting(1, "N_itr over the queue an update", least=1)
    walk: int = setting(0, "samples of the queue that a pass visits: the window and the least visited; 0: all", least=0)
    bn_clip: int = setting(512, "samples that the past of the batch-norm statistics counts as, at most", least=1)

    def check(self) -> None:
        """Refuse a memory that does not hold a window, and a moment that the method does not have."""
        super().check()
        require(self.predict in self.moments, f"predict must be {' or '.join(self.moments)}", self.predict)
        require(self.queue == 0 or self.queue >= self.window, f"queue must be 0 or at least {self.window}", self.queue)
        rule = f"reset_every must be 0 or at least a window of {self.window}, or nothing is ever learned"
        require(self.reset_every == 0 or self.reset_every >= self.window, rule, self.reset_every)
        rule = f"walk must be 0 or hold a window of {self.window} and no more than the queue of {self.queue}"
        require(self.walk == 0 or self.window <= self.walk <= self.queue, rule, self.walk)


@dataclass(frozen=True)
class GradientOptions(WindowOptions):
    """Methods that take gradient steps."""

    lr: float | None = setting(None, "rate of every step; None: rate / sqrt(n) in updates of n steps", above=0)
    rate: float = setting(0.05, "of the step, where an update has one", above=0)
    momentum: float = setting(0.9, "of SGD, or Adam's first beta", least=0, below=1)


@dataclass(frozen=True)
class ViewOptions(GradientOptions):
    """Methods that look at weak and strong views of a sample."""

    moments: ClassVar[tuple[Moment, ...]] = ("before", "after")  # the logits of an update are those of mirrored views

    # Running estimates of the target lag, and momentum shoots past them.
    momentum: float = setting(0.0, "of SGD, or Adam's first beta", least=0, below=1)
    trust: float = setting(0.003, "share of the weights' norm that a step moves them by at most; 0: any", least=0)
    flip: bool = setting(True, "whether a mirrored image is still of its class")
    crop: bool = setting(False, "whether the weak view is shifted as well")
    strong: StrongView = setting("fixmatch", "kind of strong view; own-range: of faint images too, nothing cut out")
    operations: int = setting(2, "of RandAugment in a strong view", least=0)
    magnitude: int | None = setting(
        None, "of operations; fixmatch draws up to it; None: 27, own-range 10", least=0, most=LARGEST_MAGNITUDE
    )


@dataclass(frozen=True)
class BranchOptions(ViewOptions):
    """Methods that align features and may go on training the source's contrastive branch."""

    # The branch goes on with the views that source training shows it.
    strong: StrongView = setting("own-range", "kind of strong view, which the branch contrasts with the weak one")
    contrastive_weight: float = setting(0.0, "of the branch that the Y protocols train; 0: it is not used", least=0)
