"""Statistics of the source at every depth of a network, and how far a window of it is from them by chance."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from ttac.gaussian import RIDGE, Gaussians, Moments, RunningGaussians, divergence
from ttac.model.classifier import Classifier
from ttac.model.depths import channel_vectors, depth_names, watched
from ttac.model.heads import evaluating
from ttac.model.norms import batch_norms, own_statistics

WIDEST_FULL = 512  # channels; a matrix of more is too large to store and to invert at every step
WINDOW = 256  # images that floors are told for
WINDOWS = 8  # from which they are measured
USUAL_CLIPS = {"classes": 128, "overall": 1280}  # samples that running Gaussians remember, for which floors are told
PIXELS = 2**22  # in one window at most: what a forward pass takes grows with them


def depth_divergence(source: Gaussians, target: Gaussians) -> Tensor:
    """Compute the symmetric KL by channel of one Gaussian from another, both with a ridge by the source's: a scalar.

    >>> from ttac.gaussian import Diagonal
    >>> unit = Gaussians(torch.zeros(1, 2), Diagonal(torch.ones(1, 2)))
    >>> depth_divergence(unit, Gaussians(torch.ones(1, 2), unit.covariance))
    tensor(0.9677)
    """
    ridge = RIDGE * float(source.covariance.diagonal().max())
    return divergence(source.plus(ridge), target.plus(ridge), "symmetric")[0] / source.mean.shape[1]


class DepthMoments:
    """Moments of the channel vectors at each depth, taken while passes run: no output is kept."""

    def __init__(self, classifier: Classifier, names: tuple[str, ...], dtype: torch.dtype) -> None:
        self._classifier, self._names, self._dtype = classifier, names, dtype
        self._moments: dict[str, Moments] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Take in the passes that are run meanwhile."""
        return watched(self._classifier, self._names, self._receive)

    def _receive(self, name: str, output: Tensor) -> None:
        vectors = channel_vectors(output.detach().to(self._dtype))
        channels = vectors.shape[1]
        if name not in self._moments:
            self._moments[name] = Moments(channels, diagonal=channels > WIDEST_FULL)
        self._moments[name].add(vectors)

    def gaussians(self) -> dict[str, Gaussians]:
        """Give one Gaussian for each depth, in the order of the network."""
        return {name: self._moments[name].gaussian(self._dtype, self._classifier.device) for name in self._names}


class Reservoir:
    """An even choice of the images of a stream, in random order: loaders may come sorted by class.

    The choice does not depend on how the stream is cut into batches.
    """

    def __init__(self, classifier: Classifier, image: Tensor) -> None:
        height, width = image.shape[-2:]
        self.window = max(1, min(WINDOW, PIXELS // (height * width)))
        self._capacity = WINDOWS * self.window
        self._shape = image.shape
        self._images = classifier.input.storage(self._capacity)
        self._random = random.Random(0)
        self._seen = 0

    def add(self, images: Tensor) -> None:
        """Take images `[N, C, H, W]`; those of another size than the first are left out."""
        if images.shape[1:] != self._shape:
            return
        chosen: dict[int, int] = {}  # where to put which: the last that is drawn for a place stays
        for number in range(len(images)):
            place = self._seen if self._seen < self._capacity else self._random.randrange(self._seen + 1)
            if place < self._capacity:
                chosen[place] = number
            self._seen += 1
        if chosen:
            device = images.device
            places, numbers = (torch.tensor(list(part), device=device) for part in (chosen, chosen.values()))
            self._images.write(places, images[numbers])

    def windows(self) -> Iterator[Tensor]:
        """Give the full windows that there are, or one of all images."""
        count = min(self._seen, self._capacity)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        windows = order.split(self.window)
        for places in windows[: max(1, count // self.window)]:
            yield self._images.read(places)


class AnchorFloors:
    """How far running Gaussians of the source itself are from its anchors, estimated as an adapter estimates them."""

    def __init__(self, anchors: Mapping[str, Gaussians]) -> None:
        self._anchors = anchors
        self._ridge = RIDGE * float(anchors["overall"].covariance.diagonal().max())
        self._running = {}
        for name, one in anchors.items():
            clip = USUAL_CLIPS[name]
            self._running[name] = RunningGaussians(one, one.mean.new_full((len(one.mean),), float(clip)), clip=clip)

    def add(self, features: Tensor, logits: Tensor) -> None:
        """Let the Gaussians follow a window by the model's own answers."""
        for name, running in self._running.items():
            rows = logits.argmax(1) if name == "classes" else torch.zeros(len(logits), dtype=torch.int64)
            running.commit(running.blend(features, rows))

    def finish(self) -> dict[str, float]:
        """Give the mean symmetric KL of each set of anchors."""
        return {
            name: float(torch.cat([
                divergence(there.plus(self._ridge), here.plus(self._ridge), "symmetric")
                for there, here in zip(self._anchors[name].pieces(), running.gaussians.pieces(), strict=True)
            ]).mean())
            for name, running in self._running.items()
        }  # fmt: skip


def measure_floors(
    classifier: Classifier,
    depths: Mapping[str, Gaussians],
    windows: Iterator[Tensor],
    anchors: Mapping[str, Gaussians] | None = None,
) -> dict[str, float]:
    """Tell the mean divergence by depth of a window of `WINDOW` source images that is run as an adapter runs it.

    That is with batch-norm by its own statistics. Smaller windows are noisier by as much as they are smaller. The
    `anchors` "classes" and "overall" are told beside them, of running Gaussians of the usual lengths. Empty where the
    network cannot be run so.
    """
    totals, count = dict.fromkeys(depths, 0.0), 0
    norms = batch_norms(classifier.model)
    dtype = next(iter(depths.values())).mean.dtype if depths else torch.float32
    running = None if anchors is None else AnchorFloors(anchors)
    for images in windows:
        moments = DepthMoments(classifier, tuple(depths), dtype)
        try:
            with evaluating(classifier), torch.no_grad(), own_statistics(norms), moments.watching():
                features, logits = classifier.features_and_logits(images)
        # One image has no statistics in a layer that sees one position, a network may take other batches alone, or the
        # memory is too small for the window.
        except (ValueError, RuntimeError, MemoryError):
            return {}
        count += 1
        if running is not None:
            running.add(features, logits)
        for name, found in moments.gaussians().items():
            totals[name] += float(depth_divergence(depths[name], found)) * len(images) / WINDOW
    if not count:
        return {}
    return {name: total / count for name, total in totals.items()} | ({} if running is None else running.finish())


def _tells_something(depth: Gaussians) -> bool:
    """Say whether a depth has numbers, and they vary: a layer may be dead."""
    numbers = (depth.mean, *depth.covariance.tensors().values())
    return all(bool(part.isfinite().all()) for part in numbers) and bool((depth.covariance.diagonal() > 0).any())


class DepthCollection:
    """What `SourceStatistics.collect` gathers of depths beside the features, in the same passes."""

    def __init__(self, classifier: Classifier, images: Tensor, dtype: torch.dtype) -> None:
        self._classifier = classifier
        self._moments = DepthMoments(classifier, depth_names(classifier, images[:2]), dtype)
        self._kept = Reservoir(classifier, images[0])

    @contextmanager
    def taking(self, images: Tensor) -> Iterator[None]:
        """Take in the pass over `images` that is run meanwhile."""
        self._kept.add(images)
        with self._moments.watching():
            yield

    def finish(self, anchors: Mapping[str, Gaussians]) -> tuple[dict[str, Gaussians], dict[str, float]]:
        """Give the Gaussians by depth, and the floors of these and of the `anchors`."""
        depths = {name: one for name, one in self._moments.gaussians().items() if _tells_something(one)}
        floors = measure_floors(self._classifier, depths, self._kept.windows(), anchors)
        return depths, {name: max(floor, 0.0) for name, floor in floors.items() if math.isfinite(floor)}
