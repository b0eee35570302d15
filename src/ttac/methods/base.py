"""What every method is: options, capabilities, and an adapter that predicts and learns."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ttac.common.tensor_memory import held_bytes
from ttac.model.branches import BranchKind
from ttac.model.classifier import Classifier
from ttac.model.weights import misfit
from ttac.source.statistics import SourceStatistics

Moment = Literal["before", "during", "after"]
Need = Literal["statistics", "contrastive branch", "rotation branch"]


@dataclass(frozen=True)
class Capabilities:
    """What a method is allowed in, needs and changes; the command line, checks and documents read it."""

    name: str
    title: str
    protocols: tuple[str, ...]
    needs: tuple[Need, ...]  # always; a branch that an option asks for is not among them
    changes: str
    citation: str
    may_use: tuple[Need, ...] = ()  # where an option asks for it, as Y protocols demand


@dataclass(frozen=True)
class Options:
    """What can be set for every method."""

    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if type(option.default) is int:
                whole = isinstance(value, int) and not isinstance(value, bool)
                require(whole or value is None, f"{option.name} must be a whole number", value)
            elif isinstance(value, float):
                require(math.isfinite(value), f"{option.name} must be finite", value)
        require(0 <= self.seed < 2**63, "seed must be a non-negative integer", self.seed)


def require(condition: bool, rule: str, value: object) -> None:
    """Raise a ValueError with the rule and the value unless the condition holds."""
    if not condition:
        raise ValueError(f"{rule}, not {value!r}")


@dataclass
class Step:
    """What the last call did, for the engine's clock."""

    predict_seconds: float = 0.0
    update_seconds: list[float] = dataclasses.field(default_factory=list)


class Adapter(ABC):
    """A classifier that predicts every arrival batch and may learn from it.

    `adapter(images)` predicts and learns, `predict` never changes anything, `reset` goes back to the source model, and
    `state_dict` holds all that a stream goes on from, bit for bit. The classifier given is copied, never changed.
    """

    capabilities: ClassVar[Capabilities]
    options_type: ClassVar[type[Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    before_step: Callable[[], None] | None = None  # called before each step of an update, to wait while others compute

    def __init__(self, classifier: Classifier, stats: SourceStatistics | None, options: Options) -> None:
        if stats is not None and not isinstance(stats, SourceStatistics):
            raise TypeError(
                f"stats must be ttac.SourceStatistics, not {type(stats).__name__}: SourceStatistics.collect makes them "
                "of source data (source-light), SourceStatistics.infer of the weights (source-free)"
            )
        if stats is not None:
            stats.check(classifier)
        elif "statistics" in self.capabilities.needs:
            raise ValueError(
                f"{self.capabilities.title} needs source statistics: pass stats=SourceStatistics.collect(clf, loader) "
                "(source-light) or stats=SourceStatistics.infer(clf) (source-free)"
            )
        self.source_fingerprint = classifier.fingerprint()
        self.stats = None if stats is None else stats.to(classifier.mean.device)
        self._statistics_print = None if stats is None else stats.fingerprint()
        self.options = options
        self.source_branch: BranchKind | None = None if classifier.branch is None else classifier.branch.kind
        self.classifier = classifier.copy().eval()
        self._keep_branch_if_used()
        self._source = {name: tensor.clone() for name, tensor in self.classifier.state_dict().items()}
        self.last_step = Step()
        self._learning = self._parameters_to_change()
        self.classifier.requires_grad_(False)
        for parameter in self._learning.values():
            parameter.requires_grad_(True)
        self.reset()

    def _keep_branch_if_used(self) -> None:
        """Take away the branch that the method does not say it uses, so that it is a plain classifier to it."""
        wanted = self.branch_used
        if wanted is None:
            self.classifier.branch = None
            if self.stats is not None:
                self.stats = dataclasses.replace(self.stats, projected=None)
        elif wanted != self.source_branch:
            found = "none" if self.source_branch is None else f"a {self.source_branch} branch"
            raise ValueError(
                f"{self.capabilities.title} with these options needs a model trained with a {wanted} branch, and this "
                f"one has {found}: train it with the objective ce+{wanted}"
            )

    # What a method defines

    @property
    def branch_used(self) -> BranchKind | None:
        """The branch of the source model that the method uses under its options."""
        return None

    @property
    def exempt(self) -> dict[str, str]:
        """The checks of `ttac.checks` that the options make impossible, with the reason of each."""
        return {}

    def _parameters_to_change(self) -> dict[str, nn.Parameter]:
        """Name the parameters that the method moves; all others stay without gradient."""
        return {}

    @abstractmethod
    def _begin(self) -> None:
        """Make all that a stream changes, apart from the classifier, as it is before the first sample."""

    @abstractmethod
    def _arrive(self, images: Tensor) -> Tensor:
        """Predict and learn from images that have been checked: `[N, C, H, W] -> [N, K]`."""

    def _learn(self, images: Tensor) -> None:
        """Learn from images that have been checked and need no prediction; override where that saves work."""
        self._arrive(images)

    def _begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:  # noqa: B027 - most need none
        """Prepare a pass over the target set, which `target` walks in the order in which it will come."""

    def _check(self, images: Tensor) -> Tensor:
        return self.classifier.check(images)

    def _now(self) -> float:
        """Read the clock, when the device has done what it was given."""
        if self.classifier.mean.is_cuda:
            torch.cuda.synchronize(self.classifier.mean.device)
        return time.perf_counter()

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Give what `_begin` made, as it is now."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Take back what `_state` gave."""

    # What a user calls

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.capabilities.name

    @property
    def changed_parameters(self) -> frozenset[str]:
        """The names of the parameters that the method may move."""
        return frozenset(self._learning)

    def __call__(self, images: Tensor) -> Tensor:
        """Predict one arrival batch and learn from it: raw images `[N, C, H, W]` in [0, 1] to logits `[N, K]`."""
        with self._learning_mode():
            images = self._check(_outside_inference(images))
            self.last_step = Step()
            self.samples_seen += len(images)  # first: an interrupted call must not leave an adapter that looks fresh
            return self._arrive(images)

    def learn(self, images: Tensor) -> None:
        """Learn from one batch of a multi-pass protocol, whose predictions come after all passes."""
        with self._learning_mode():
            images = self._check(_outside_inference(images))
            self.last_step = Step()
            self.samples_seen += len(images)
            self.several_passes = True
            self._learn(images)

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Say that pass `epoch` (from 0) of `epochs` over the images of `target` begins, in multi-pass protocols."""
        with self._learning_mode():
            self.several_passes = True
            self._begin_epoch(epoch, epochs, (self.classifier.check(_outside_inference(images)) for images in target))

    @staticmethod
    @contextmanager
    def _learning_mode() -> Iterator[None]:
        """Keep a caller's no_grad or inference_mode from stopping the adapter's learning."""
        with torch.inference_mode(False), torch.enable_grad():
            yield

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the model as it is and change nothing: `[N, C, H, W] -> [N, K]`."""
        logits: Tensor = self.classifier(self.classifier.check(images))
        return logits

    def adapted(self) -> Classifier:
        """Give the classifier as it is now, for its weights to be kept; do not change it."""
        return self.classifier

    def reset(self) -> None:
        """Go back to the source model and forget the stream."""
        self._start(self._source)

    def restart_from(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights of `adapted().model` and forget the stream; else raise and change nothing."""
        problem = misfit(self.classifier.model, weights)
        if problem is not None:
            raise ValueError(f"the weights are not of this adapter's model: {problem}")
        self._start(self._source | {f"model.{name}": tensor for name, tensor in weights.items()})

    def _start(self, weights: dict[str, Tensor]) -> None:
        self.classifier.load_state_dict(weights)
        self.samples_seen = 0
        self.several_passes = False  # whether `learn` or `begin_epoch` was called, which ends all one-pass protocols
        self._begin()

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {"samples": self.samples_seen}

    def memory_parts(self) -> dict[str, int]:
        """Count the bytes of the tensors that the adapter keeps between calls, by the attribute that keeps them.

        `classifier` is the network as it is now, `source` as it came, `updater` the optimiser's state, `stats` are the
        source's statistics, `alignments` the anchors made of them and the target's Gaussians. What two share counts for
        the first. A `queue` is whole from the first sample on, and comes to its `limit` where images are not 8-bit.
        """
        counted: set[int] = set()
        parts = {name.lstrip("_"): held_bytes(value, counted) for name, value in vars(self).items()}
        return {name: size for name, size in parts.items() if size}

    def memory_bytes(self) -> int:
        """Count the bytes of all that the adapter keeps between calls."""
        return sum(self.memory_parts().values())

    def state_dict(self) -> dict[str, Any]:
        """Give a copy of everything that the stream has made; plain tensors, numbers and text."""
        return _cloned(
            {
                "method": self.name,
                "options": dataclasses.asdict(self.options),
                "fingerprint": self.source_fingerprint,
                "statistics": self._statistics_print,
                "samples_seen": self.samples_seen,
                "several_passes": self.several_passes,
                "classifier": dict(self.classifier.state_dict()),
                "method_state": self._state(),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same method, options and source model; else raise and change nothing."""
        mine = {
            "method": self.name,
            "options": dataclasses.asdict(self.options),
            "fingerprint": self.source_fingerprint,
            "statistics": self._statistics_print,
        }
        # A state of before an option was there is one with its default.
        given = state.get("options")
        filled = {**dataclasses.asdict(self.options_type()), **given} if isinstance(given, dict) else given
        its = {**state, "options": filled}
        for key, value in mine.items():
            if its.get(key) != value:
                raise ValueError(f"the state is of another {key}: it has {its.get(key)!r}, this adapter {value!r}")
        before = self.state_dict()
        try:
            self._restore(_cloned(state))
        except Exception as error:
            self._restore(before)
            raise ValueError(f"the state is damaged and was not loaded: {error!r}") from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.classifier.load_state_dict(state["classifier"])
        self._begin()
        self._load(state["method_state"])
        self.samples_seen = int(state["samples_seen"])
        self.several_passes = bool(state["several_passes"])


def _outside_inference(images: Any) -> Any:
    """Copy tensors made in inference mode, which autograd refuses."""
    return images.clone() if isinstance(images, Tensor) and images.is_inference() else images


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(item) for item in value)
    return value
