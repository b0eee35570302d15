"""The method that a command names, with the options and the anchors that its model's bundle knows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ttac.methods.base import Adapter
from ttac.methods.registry import adapt, methods
from ttac.model.weights import LoadedModel
from ttac.source.bundle import Bundle, source_loss_options
from ttac.source.statistics import SourceStatistics


@dataclass(frozen=True)
class MethodChoice:
    """A method on a model: its preset and options, and where its statistics come from."""

    model: LoadedModel
    method: str = "ttac++"
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stats: Path | None = None  # None: the bundle's, or inferred, if the method needs some
    source_free: bool = False  # a bundle's statistics that were collected from source images are left alone
    told: Mapping[str, Any] = field(default_factory=dict)  # those of the options that `completed` has added

    def completed(self) -> MethodChoice:
        """Add the options that the model's bundle knows and nobody has set."""
        known = methods().get(self.method)
        if known is None or not isinstance(self.model, Bundle):
            return self
        names = [option.name for option in dataclasses.fields(known.options_type)]
        told = source_loss_options(self.model, names, {**known.presets.get(self.preset or "", {}), **self.options})
        return dataclasses.replace(self, options={**self.options, **told}, told=told)

    def settings(self) -> dict[str, Any]:
        """Name all that the adapter depends on."""
        return {
            "model": self.model.classifier.fingerprint(),
            "statistics": self._statistics_hash(),
            "method": self.method,
            "preset": self.preset,
            "options": dict(self.options),
            "device": str(self.model.classifier.mean.device),
        }

    def adapter(self, console: Console, infer: Callable[[], SourceStatistics]) -> Adapter:
        """Make the adapter, and say which options and statistics it has that nobody has named.

        `infer` gives the statistics where there are no others, by calling the method `infer` in the end.
        """
        if self.told:
            named = ", ".join(f"{name} is {value}" for name, value in self.told.items())
            console.print(f"{named}, as the bundle was trained", markup=False)
        return self._adapter(self._statistics(console, infer))

    def infer(self, console: Console, check: Callable[[Adapter], None] | None = None) -> SourceStatistics:
        """Infer statistics from the head's weights, once the options are known to be right and `check` has passed."""
        classifier = self.model.classifier
        # Anchors that cost nothing, so that a mistake in the options shows before minutes go into better ones.
        if bool(classifier.head.weight.any(1).all()):  # others cannot be rescaled, such as those that T3A leaves
            cheap = self._adapter(SourceStatistics.rescale_weights(classifier))
            if check is not None:
                check(cheap)
        console.print("no --stats: anchors are inferred from the head's weights (source-free)", markup=False)
        return SourceStatistics.infer(classifier)

    def _adapter(self, stats: SourceStatistics | None) -> Adapter:
        return adapt(self.model.classifier, self.method, stats=stats, preset=self.preset, **self.options)

    def _statistics(self, console: Console, infer: Callable[[], SourceStatistics]) -> SourceStatistics | None:
        """Read the statistics, take those of the bundle or infer them; None where none are needed."""
        if self.stats is not None:
            return SourceStatistics.load(self.stats, self.model.classifier)
        if not self._needs_statistics():
            return None
        bundled = self._bundled_statistics()
        if bundled is None:
            return infer()
        how = (
            "inferred from the head's weights (source-free)"
            if bundled.source_free
            else f"collected from {bundled.origin.samples} source images (source-light)"
        )
        console.print(f"no --stats: anchors are those of the bundle, {how}", markup=False)
        return bundled

    def _needs_statistics(self) -> bool:
        known = methods().get(self.method)
        return known is not None and "statistics" in known.capabilities.needs

    def _bundled_statistics(self) -> SourceStatistics | None:
        """Give the statistics in the model's bundle, where the method needs some and may use them."""
        if not isinstance(self.model, Bundle) or self.model.statistics is None or not self._needs_statistics():
            return None
        return None if self.source_free and not self.model.statistics.source_free else self.model.statistics

    def _statistics_hash(self) -> str | None:
        if self.stats is None:
            bundled = self._bundled_statistics()
            return None if bundled is None else bundled.fingerprint()
        if not self.stats.is_file():
            raise FileNotFoundError(f"no statistics file {self.stats}")
        return hashlib.sha256(self.stats.read_bytes()).hexdigest()[:16]
