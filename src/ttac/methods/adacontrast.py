"""AdaContrast: pseudo labels voted by neighbours, and contrastive learning that leaves their classes together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.losses import diversity
from ttac.adaptation.method import Batch, Capabilities, Method
from ttac.adaptation.options import ViewOptions
from ttac.adaptation.step import HALF, Loss
from ttac.common.options import require, setting
from ttac.common.state import Stateful
from ttac.methods.registry import register
from ttac.model.classifier import Classifier
from ttac.model.norms import batch_norms
from ttac.model.views import StrongView


@dataclass(frozen=True)
class AdaContrastOptions(ViewOptions):
    """The published defaults; strong views are RandAugment's instead of MoCo v2's.

    What is predicted is the image itself, as the published code does after every epoch; weak views serve the pseudo
    labels alone. The one-pass form has no published code ("collect the predictions on the fly", its author says).
    """

    lr: float | None = setting(2e-4, "rate of every step", above=0)
    momentum: float = setting(0.9, "of SGD", least=0, below=1)
    trust: float = setting(0.0, "share of the weights' norm that a step moves them by at most; 0: any", least=0)
    head_rate: float = setting(10.0, "of the head, in rates of the backbone", above=0)
    weight_decay: float = setting(1e-4, "of SGD", least=0)
    memory: int = setting(16384, "samples that may vote, and keys to be told apart from", least=1)
    neighbours: int = setting(10, "that vote on a pseudo label", least=1)
    temperature: float = setting(0.07, "of the contrastive loss", above=0)
    ema: float = setting(0.999, "share of itself that the momentum encoder keeps in a step", least=0, most=1)
    pseudo_weight: float = setting(1.0, "alpha, of cross-entropy with the voted labels", least=0)
    contrast_weight: float = setting(1.0, "beta, of the contrastive loss", least=0)
    diversity_weight: float = setting(1.0, "gamma, of diversity", least=0)
    crop: bool = setting(True, "whether the weak view is shifted as well")
    strong: StrongView = setting("own-range", "kind of strong view; fixmatch: with Cutout, which MoCo v2 has not")

    def check(self) -> None:
        """Refuse a memory that does not hold a window."""
        super().check()
        require(self.memory >= self.window, f"memory must hold a window of {self.window}", self.memory)


class Ring(Stateful):
    """The newest `capacity` rows of some tensors that belong together; each row has the number of its writing.

    >>> ring = Ring(3, values=torch.zeros(1))
    >>> ring.write(ring.next(2), values=torch.tensor([[1.0], [2.0]]))
    >>> ring.write(ring.next(2), values=torch.tensor([[3.0], [4.0]]))
    >>> len(ring), ring["values"].flatten().tolist()
    (3, [4.0, 2.0, 3.0])
    """

    capacity: int
    written: int
    rows: dict[str, Tensor]

    def __init__(self, capacity: int, **like: Tensor) -> None:
        self.declare(
            capacity=lambda: capacity,
            written=lambda: 0,
            rows=lambda: {name: row.new_zeros(capacity, *row.shape) for name, row in like.items()},
        )

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows[name][: len(self)]

    def next(self, count: int) -> Tensor:
        """Give the numbers of `count` rows to be written next: `[count]`."""
        return self.written + torch.arange(count)

    def places(self, numbers: Tensor) -> Tensor:
        """Tell where rows are."""
        return numbers % self.capacity

    def write(self, numbers: Tensor, **values: Tensor) -> None:
        """Write rows under numbers that are held or next, at most `capacity` of them."""
        for name, found in values.items():
            self.rows[name][self.places(numbers)] = found.detach().to(self.rows[name])
        self.written = max(self.written, int(numbers.max()) + 1)

    def close(self) -> None:
        """Take no more rows than there are from now on: new ones replace the oldest."""
        self.capacity = len(self) or self.capacity


@register
class AdaContrast(Method):
    """Teach strong views what the neighbours of a weak view say, and tell samples of different classes apart."""

    capabilities = Capabilities(
        "adacontrast",
        "AdaContrast",
        ("N-O-SF", "N-M-SF"),
        changes="backbone, head, batch-norm statistics",
        citation="Chen et al., Contrastive Test-Time Adaptation, CVPR 2022",
    )
    options_type = AdaContrastOptions
    checked_with: ClassVar[Mapping[str, Any]] = {"memory": 16}
    slow: Classifier
    voters: Ring
    keys: Ring
    progress: float

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.declare(slow=lambda: _momentum_encoder(self.classifier), progress=lambda: 0.0)
        blank = torch.zeros(self.classifier.feature_dim, device=self.classifier.device)
        voters = Ring(adapter.options.memory, features=blank, posteriors=blank.new_zeros(self.classifier.num_classes))
        keys = Ring(adapter.options.memory, features=blank, labels=blank.new_zeros((), dtype=torch.int64))
        self.declare(voters=lambda: voters, keys=lambda: keys)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.classifier.named_parameters())

    def optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        options = self.adapter.options
        backbone = self.classifier.backbone_parameters()
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, value in zip(self.adapter.parameters, values, strict=True):
            groups[name not in backbone].append(value)
        factors = (1.0, options.head_rate)
        return torch.optim.SGD(
            [{"params": group, "rate_factor": factor} for group, factor in zip(groups, factors, strict=True)],
            momentum=options.momentum, weight_decay=options.weight_decay, nesterov=options.momentum > 0,
        )  # fmt: skip

    def columns(self) -> dict[str, Tensor]:
        return {"number": torch.tensor(-1)}  # of a sample among the voters

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Let the target set fill the memory before the first pass; with several passes the rate falls by a cosine.

        A target set that fits leaves no room: as published, the memory then holds every sample about once. Windows are
        normalised by their own statistics as all that comes later is; the published code uses the source's here.
        """
        self.progress = epoch / epochs
        if epoch:
            return
        self.voters.reset_state()
        self.adapter.memory_in_use.columns["number"].fill_(-1)
        for images in _windows(target, self.adapter.options.window):
            features, posteriors = self._slow_view(images)
            self.voters.write(self.voters.next(len(images)), features=features, posteriors=posteriors)
        self.voters.close()

    def rate(self) -> float:
        """Let the rate fall by a cosine over the epochs of a multi-pass protocol."""
        return super().rate() * 0.5 * (1 + math.cos(math.pi * self.progress))

    def losses(self, batch: Batch) -> dict[str, Loss]:
        options = self.adapter.options
        weakened = batch.weakened()
        with torch.no_grad():
            weak = batch.forward(weakened)
        features, posteriors = self._slow_view(weakened)
        numbers = self._numbers(batch.slots)
        labels = self._votes(_directions(weak.features), features, posteriors, numbers).argmax(1)
        strong = batch.strong()
        key, _ = self._slow_view(batch.strengthened())

        def keep() -> None:
            self.voters.write(numbers, features=features, posteriors=posteriors)
            self.adapter.memory_in_use.remember(batch.slots, {"number": numbers})
            self.keys.write(self.keys.next(len(batch)), features=key, labels=labels)
            self._follow()

        batch.when_taken(keep)
        return {
            "pseudo": options.pseudo_weight * F.cross_entropy(strong.logits.float(), labels),
            "contrast": options.contrast_weight * self._contrast(_directions(strong.features), key, labels),
            "diversity": -options.diversity_weight * diversity(strong.logits.float()),
        }

    def _numbers(self, slots: Tensor) -> Tensor:
        """Give each sample its row among the voters: its own if it still has one, else the next.

        Each pass over the queue would otherwise write the same samples again, and soon vote for itself.
        """
        numbers = self.adapter.memory_in_use.columns["number"][slots].cpu()
        oldest = self.voters.written + len(slots) - self.voters.capacity  # that this minibatch cannot drive out
        unknown = numbers < max(oldest, 0)
        numbers[unknown] = self.voters.next(int(unknown.sum()))
        return numbers

    @torch.no_grad()
    def _votes(self, queries: Tensor, features: Tensor, posteriors: Tensor, numbers: Tensor) -> Tensor:
        """Average the posteriors of each query's nearest samples in the memory, this minibatch's included: `[n, K]`.

        The published memory holds the minibatch from the start or an earlier pass; in one pass it would be empty.
        """
        remembered = queries @ self.voters["features"].mT
        places = self.voters.places(numbers)
        replaced = places[places < len(self.voters)]  # by this minibatch, which stands beside them here
        remembered[:, replaced] = -torch.inf
        similarity = torch.cat([remembered, queries @ features.mT], 1)
        count = min(self.adapter.options.neighbours, similarity.shape[1] - len(replaced))
        nearest = similarity.topk(count, 1).indices
        return torch.cat([self.voters["posteriors"], posteriors])[nearest].mean(1)

    def _contrast(self, query: Tensor, key: Tensor, labels: Tensor) -> Tensor:
        """Compute InfoNCE of `query` and `key [n, D]` against past keys, but those of the same pseudo label.

        The published code begins with random keys, and compares labels with those of keys that it has just replaced.
        """
        others = (query @ self.keys["features"].mT).masked_fill(labels[:, None] == self.keys["labels"], -torch.inf)
        scores = torch.cat([(query * key).sum(1, keepdim=True), others], 1) / self.adapter.options.temperature
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
            slow.lerp_(fast.to(slow.dtype), 1 - self.adapter.options.ema)


def _momentum_encoder(classifier: Classifier) -> Classifier:
    """Copy a classifier without batch-norm statistics: as published, it sees minibatches alone and uses their own."""
    slow = classifier.copy().requires_grad_(False)
    for layer in batch_norms(slow):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    # A thousandth of a difference is less than half precision can add.
    return slow.float() if classifier.dtype in HALF else slow


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
