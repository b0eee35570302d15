"""Streams of images: one iterable for every scenario, whose pixels are read when their turn comes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttac.common.resumable import plain_settings
from ttac.data.corruptions import Corruption
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.labelled import LabelledImages
from ttac.data.streams.prefetch import prefetched
from ttac.data.streams.scenarios import CLEAN, Domain, Scenario, make_plan

__all__ = ["Arrival", "Domain", "Scenario", "Stream", "corrupted_domains"]


class Arrival(NamedTuple):
    """What arrives at a time; the engine alone sees what is beside the images."""

    images: Tensor  # [n, C, H, W] in [0, 1]
    labels: Tensor  # [n]
    domains: Tensor  # [n], places in `Stream.domains`


class Stream:
    """Arrivals of a scenario over some domains, the same ones each time that it is walked.

    `clean` is what the interludes show. A background thread reads `prefetch` arrivals ahead.

    >>> from ttac.data.labelled import from_tensors
    >>> images = from_tensors(torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.arange(6) % 2, 2)
    >>> stream = Stream([Domain("day", images), Domain("night", images)], Scenario("continual", batch=4))
    >>> len(stream), [arrival.domains.tolist() for arrival in stream]
    (12, [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        scenario: Scenario,
        *,
        clean: LabelledImages | None = None,
        prefetch: int = 2,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative: {prefetch}")
        if scenario.interlude and clean is None:
            raise ValueError("interludes show clean images: give them as clean=")
        between = Domain(CLEAN, clean) if scenario.interlude and clean is not None else None
        self._sources = (*domains, *([] if between is None else [between]))
        _check_domains(self._sources)
        self.scenario = scenario
        self.prefetch = prefetch
        self._plan = make_plan(scenario, domains, between)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._plan.rows)

    def __iter__(self) -> Iterator[Arrival]:
        """Read and yield the arrivals in order."""
        return prefetched(self._read, range(0, len(self), self.scenario.batch), self.prefetch)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        images = self._sources[0].images
        return (images.channels, *images.size)

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the domains, by number."""
        return tuple(source.mark for source in self._sources)

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """The stretches that follow one another: their names and samples."""
        return self._plan.segments

    def describe(self) -> dict[str, Any]:
        """Say all that the stream depends on, as plain values for a record."""
        counts = self._plan.domains.bincount(minlength=len(self._sources)).tolist()
        order = hashlib.sha256(torch.stack(self._plan[:2]).numpy().tobytes()).hexdigest()[:16]
        return {
            "scenario": plain_settings(asdict(self.scenario)),
            "samples": len(self),
            "order": order,
            "between_domains": "nothing is reset",
            "prefetch": self.prefetch,  # a thread of its own, whose work shows in latencies
            "domains": [
                {**source.notes, "name": source.mark, "samples": count, "data": source.images.fingerprint}
                for source, count in zip(self._sources, counts, strict=True)
            ],
        }

    def _read(self, start: int) -> Arrival:
        part = slice(start, start + self.scenario.batch)
        domains, rows = self._plan.domains[part], self._plan.rows[part]
        pixels = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        labels = torch.empty(len(rows), dtype=torch.int64)
        for number in domains.unique().tolist():
            mine = domains == number
            source = self._sources[number]
            try:
                pixels[mine] = source.images.read(rows[mine])
            except Exception as error:
                some = ", ".join(map(str, rows[mine][:3].tolist())) + (", ..." if int(mine.sum()) > 3 else "")
                raise ValueError(
                    f"samples {start + 1} to {start + len(rows)} of the stream cannot be read (rows {some} of "
                    f"{source.mark}): {str(error) or type(error).__name__}"
                ) from error
            labels[mine] = source.images.labels[rows[mine]]
        return Arrival(pixels.float() / 255, labels, domains)


def corrupted_domains(
    clean: LabelledImages,
    names: Sequence[str],
    severities: Sequence[int] = (5,),
    seed: int = 0,
    photographs: FrostPhotographs | None = None,
    strength: tuple[float, ...] | None = None,
) -> list[Domain]:
    """Make a domain of each corruption at each severity; what happens to an image goes by its row in `clean`.

    With `strength`, constants of one's own, there are no severities: each corruption makes one domain.

    >>> from ttac.data.labelled import from_tensors
    >>> images = from_tensors(torch.zeros(6, 3, 32, 32, dtype=torch.uint8), torch.arange(6) % 2, 2)
    >>> [domain.mark for domain in corrupted_domains(images, ["fog", "snow"], severities=(1, 5))]
    ['fog 1', 'fog 5', 'snow 1', 'snow 5']
    >>> [domain.mark for domain in corrupted_domains(images, ["jpeg_compression"], strength=(30,))]
    ['jpeg_compression']
    """
    if strength is not None:
        own = [Corruption(name, seed=seed, photographs=photographs, strength=strength) for name in names]
        return [Domain(one.name, one.of(clean), notes=one.notes(min(clean.size))) for one in own]
    made = [Corruption(name, severity, seed, photographs) for name in names for severity in severities]
    return [Domain(one.name, one.of(clean), one.severity, one.notes(min(clean.size))) for one in made]


def _check_domains(sources: Sequence[Domain]) -> None:
    if not sources:
        raise ValueError("a stream needs a domain")
    twice = [mark for mark, count in Counter(source.mark for source in sources).items() if count > 1]
    if twice:
        raise ValueError(f"two domains of the stream are called {twice[0]}: their errors could not be told apart")
    kinds = {source.mark: source.images.kind for source in sources}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{mark} is {kind}" for mark, kind in kinds.items())
        raise ValueError(f"all domains of a stream must be alike: {said}")
