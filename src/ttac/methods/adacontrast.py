"""AdaContrast: pseudo labels voted by neighbours, and contrastive learning that leaves their classes together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.adaptation.losses import diversity
from ttac.adaptation.step import HALF
from ttac.methods.base import Capabilities, Moment, require
from ttac.methods.registry import register
from ttac.methods.views import ViewAdapter, ViewOptions
from ttac.methods.windows import Trial
from ttac.model.classifier import Classifier
from ttac.model.norms import batch_norms


@dataclass(frozen=True)
class AdaContrastOptions(ViewOptions):
    """The published defaults; strong views are RandAugment's instead of MoCo v2's.

    Predictions are collected on the fly, as the author described the one-pass form: those of the weak views, normalised
    by their own statistics, before their step. Multi-pass protocols predict at the end, whatever `predict` says.
    """

    moments = ("before", "during", "after")

    predict: Moment = "during"
    lr: float | None = 2e-4
    head_rate: float = 10.0  # of the head, in rates of the backbone
    weight_decay: float = 1e-4
    memory: int = 16384  # samples that may vote, and keys to be told apart from
    neighbours: int = 10  # that vote on a pseudo label
    temperature: float = 0.07
    ema: float = 0.999  # share of itself that the momentum encoder keeps in a step
    pseudo_weight: float = 1.0  # alpha
    contrast_weight: float = 1.0  # beta
    diversity_weight: float = 1.0  # gamma
    crop: bool = True

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.head_rate > 0, "head_rate must be positive", self.head_rate)
        require(self.weight_decay >= 0, "weight_decay must not be negative", self.weight_decay)
        require(self.memory >= self.window, f"memory must hold a window of {self.window}", self.memory)
        require(self.neighbours >= 1, "neighbours must be at least 1", self.neighbours)
        require(self.temperature > 0, "temperature must be positive", self.temperature)
        require(0 <= self.ema <= 1, "ema must be in [0, 1]", self.ema)
        for name in ("pseudo_weight", "contrast_weight", "diversity_weight"):
            require(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name))


class Ring:
    """The newest `capacity` rows of some tensors that belong together; each row has the number of its writing.

    >>> ring = Ring(3, values=torch.zeros(1))
    >>> ring.write(ring.next(2), values=torch.tensor([[1.0], [2.0]]))
    >>> ring.write(ring.next(2), values=torch.tensor([[3.0], [4.0]]))
    >>> len(ring), ring["values"].flatten().tolist()
    (3, [4.0, 2.0, 3.0])
    """

    def __init__(self, capacity: int, **like: Tensor) -> None:
        self.capacity = capacity
        self.written = 0
        self._rows = {name: row.new_zeros(capacity, *row.shape) for name, row in like.items()}

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name][: len(self)]

    def next(self, count: int) -> Tensor:
        """Give the numbers of `count` rows to be written next: `[count]`."""
        return self.written + torch.arange(count)

    def places(self, numbers: Tensor) -> Tensor:
        """Tell where rows are."""
        return numbers % self.capacity

    def write(self, numbers: Tensor, **rows: Tensor) -> None:
        """Write rows under numbers that are held or next, at most `capacity` of them."""
        for name, values in rows.items():
            self._rows[name][self.places(numbers)] = values.detach().to(self._rows[name])
        self.written = max(self.written, int(numbers.max()) + 1)

    def close(self) -> None:
        """Take no more rows than there are from now on: new ones replace the oldest."""
        self.capacity = len(self) or self.capacity

    def state(self) -> dict[str, Any]:
        """Give all content, by name."""
        return {"capacity": self.capacity, "written": self.written, "rows": {name: self[name] for name in self._rows}}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.capacity, self.written = state["capacity"], state["written"]
        for name in self._rows:
            self[name].copy_(state["rows"][name])


@register
class AdaContrast(ViewAdapter):
    """Teach strong views what the neighbours of a weak view say, and tell samples of different classes apart."""

    capabilities = Capabilities(
        name="adacontrast",
        title="AdaContrast",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="backbone, head, batch-norm statistics",
        citation="Chen et al., Contrastive Test-Time Adaptation, CVPR 2022",
    )
    options_type = AdaContrastOptions
    options: AdaContrastOptions

    def _parameters_to_change(self) -> dict[str, nn.Parameter]:
        return dict(self.classifier.named_parameters())

    def _make_optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        options = self.options
        backbone = self.classifier.backbone_parameters()
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, value in zip(self._learning, values, strict=True):
            groups[name not in backbone].append(value)
        factors = (1.0, options.head_rate)
        return torch.optim.SGD(
            [{"params": group, "rate_factor": factor} for group, factor in zip(groups, factors, strict=True)],
            momentum=options.momentum, weight_decay=options.weight_decay, nesterov=options.momentum > 0,
        )  # fmt: skip

    def _begin(self) -> None:
        super()._begin()
        self.slow = _momentum_encoder(self.classifier)
        self.memory = self._blank_memory()
        blank = self._blank()
        self.keys = Ring(self.options.memory, features=blank, labels=blank.new_zeros((), dtype=torch.int64))
        self.numbers = torch.full((self.queue.capacity,), -1)  # of the queue's samples in the memory
        self.progress = 0.0

    def _blank(self) -> Tensor:
        return torch.zeros(self.classifier.feature_dim, device=self.classifier.mean.device)

    def _blank_memory(self) -> Ring:
        blank = self._blank()
        return Ring(self.options.memory, features=blank, posteriors=blank.new_zeros(self.classifier.num_classes))

    def _begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Let the target set fill the memory before the first pass; with several passes the rate falls by a cosine.

        A target set that fits leaves no room: as published, the memory then holds every sample about once. Windows are
        normalised by their own statistics as all that comes later is; the published code uses the source's here.
        """
        self.progress = epoch / epochs
        if epoch:
            return
        self.memory = self._blank_memory()
        self.numbers.fill_(-1)
        for images in _windows(target, self.options.window):
            features, posteriors = self._slow_view(images)
            self.memory.write(self.memory.next(len(images)), features=features, posteriors=posteriors)
        self.memory.close()

    def _rate(self) -> float:
        return super()._rate() * 0.5 * (1 + math.cos(math.pi * self.progress))

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        images = self.queue.take(slots)
        weak = self._weakened(images)
        with torch.no_grad(), self.tracker.following(len(slots)):
            weak_features, weak_logits = self.classifier.features_and_logits(weak)
        features, posteriors = self._slow_view(weak)
        numbers = self._numbers(slots)
        labels = self._votes(_directions(weak_features), features, posteriors, numbers).argmax(1)
        strong = self._strong(images)
        key, _ = self._slow_view(self._strengthened(images))
        losses = {
            "pseudo": options.pseudo_weight * F.cross_entropy(strong.logits.float(), labels),
            "contrast": options.contrast_weight * self._contrast(_directions(strong.features), key, labels),
            "diversity": -options.diversity_weight * diversity(strong.logits.float()),
        }

        def keep() -> None:
            self.memory.write(numbers, features=features, posteriors=posteriors)
            self.numbers[slots] = numbers
            seen = self.queue.memory.rows(slots)
            self.queue.remember(slots, replace(seen, visits=seen.visits + 1))
            self.keys.write(self.keys.next(len(slots)), features=key, labels=labels)
            self._follow()

        return Trial(losses, weak_logits, keep)

    def _numbers(self, slots: Tensor) -> Tensor:
        """Give each sample its row of the memory: its own if it still has one, else the next.

        Each pass over the queue would otherwise write the same samples again, and soon vote for itself.
        """
        numbers = self.numbers[slots]
        oldest = self.memory.written + len(slots) - self.memory.capacity  # that this minibatch cannot drive out
        known = (self.queue.memory.visits[slots].cpu() > 0) & (numbers >= max(oldest, 0))
        numbers[~known] = self.memory.next(int((~known).sum()))
        return numbers

    @torch.no_grad()
    def _votes(self, queries: Tensor, features: Tensor, posteriors: Tensor, numbers: Tensor) -> Tensor:
        """Average the posteriors of each query's nearest samples in the memory, this minibatch's included: `[n, K]`.

        The published memory holds the minibatch from the start or an earlier pass; in one pass it would be empty.
        """
        remembered = queries @ self.memory["features"].mT
        places = self.memory.places(numbers)
        replaced = places[places < len(self.memory)]  # by this minibatch, which stands beside them here
        remembered[:, replaced] = -torch.inf
        similarity = torch.cat([remembered, queries @ features.mT], 1)
        count = min(self.options.neighbours, similarity.shape[1] - len(replaced))
        nearest = similarity.topk(count, 1).indices
        return torch.cat([self.memory["posteriors"], posteriors])[nearest].mean(1)

    def _contrast(self, query: Tensor, key: Tensor, labels: Tensor) -> Tensor:
        """Compute InfoNCE of `query` and `key [n, D]` against past keys, but those of the same pseudo label.

        The published code begins with random keys, and compares labels with those of keys that it has just replaced.
        """
        others = (query @ self.keys["features"].mT).masked_fill(labels[:, None] == self.keys["labels"], -torch.inf)
        scores = torch.cat([(query * key).sum(1, keepdim=True), others], 1) / self.options.temperature
        return F.cross_entropy(scores, torch.zeros_like(labels))

    @torch.no_grad()
    def _slow_view(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Give the momentum encoder's unit features `[n, D]` and posteriors `[n, K]`."""
        features, logits = self.slow.features_and_logits(images)
        return _directions(features), logits.float().softmax(1)

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the momentum encoder; after a step and before the next keys is when the published code does it too."""
        for slow, fast in zip(self.slow.parameters(), self.classifier.parameters(), strict=True):
            slow.lerp_(fast.to(slow.dtype), 1 - self.options.ema)

    def _state(self) -> dict[str, Any]:
        own = {
            "slow": dict(self.slow.state_dict()),
            "memory": self.memory.state(),
            "keys": self.keys.state(),
            "numbers": self.numbers,
            "progress": self.progress,
        }
        return {**super()._state(), **own}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.slow.load_state_dict(state["slow"])
        self.memory.load(state["memory"])
        self.keys.load(state["keys"])
        self.numbers.copy_(state["numbers"])
        self.progress = state["progress"]


def _momentum_encoder(classifier: Classifier) -> Classifier:
    """Copy a classifier without batch-norm statistics: as published, it sees minibatches alone and uses their own."""
    slow = classifier.copy().requires_grad_(False)
    for layer in batch_norms(slow):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    # A thousandth of a difference is less than half precision can add.
    return slow.float() if classifier.head.weight.dtype in HALF else slow


def _directions(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=1)


def _windows(target: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut a stream into full windows; what is left at the end is too few to be normalised by its own statistics."""
    rest: Tensor | None = None
    for images in target:
        rest = images if rest is None else torch.cat([rest, images])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
