"""Versions: a number that names weights once and for all, on disk and in the predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ttac.serving.journal import Faults, Journal
from ttac.serving.shared import Slots
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout


class Publisher:
    """Publishes weights under the next number: on disk first, then to the predictor.

    A process that is killed between the two leaves a version that nobody has seen; its successor publishes it as it is.
    So whatever was answered under a number is on disk under it, and no number is given twice.
    """

    def __init__(
        self, slots: Slots, layout: WeightsLayout, folder: StateFolder, journal: Journal, faults: Faults, keep: int
    ) -> None:
        self._slots, self._layout, self._folder, self._journal, self._faults = slots, layout, folder, journal, faults
        self._keep = keep
        self._last = 0  # number that was given last

    @property
    def served(self) -> int:
        """The version that the predictor has or gets next, 0 for none."""
        return self._slots.version

    def begin(self, known: int) -> None:
        """Number on from `known` and all that is found; publish the newest version again if it is not served."""
        self._last = max(self._folder.last_number(), self.served, known)
        if self._folder.newest() <= self.served:
            return
        found = self.newest()
        if found is not None and found[0] > self.served:
            version, weights = found
            self._slots.publish(version, self._layout.pack(weights))
            self._journal.note("publish", f"version {version} of the state folder, again", version=version)

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """Give the newest version that can be read, and put damaged ones aside."""
        for version in reversed(self._folder.versions()):
            try:
                weights = self._folder.load_version(version)
                self._layout.pack(weights)
            except ValueError as error:
                self._folder.set_version_aside(version)
                self._journal.note("fault", f"version {version} was put aside: {error}", version=version)
            except OSError as error:
                self._journal.note("fault", f"version {version} cannot be read: {error}", version=version)
            else:
                return version, weights
        return None

    def publish(self, weights: Mapping[str, Tensor], message: str, **fields: Any) -> int:
        """Publish weights as a new version and give it, or the served version if it has these very weights.

        Raises an OSError where they cannot be written; then the served version stays.
        """
        content = self._layout.pack(weights)
        there = self._slots.read()
        if there is not None and there[1] == content:
            return there[0]
        # A number counts as given even if the rest fails: its file may be there.
        self._last = version = self._last + 1
        self._folder.save_version(version, weights)
        self._slots.publish(version, content)
        self._journal.note("publish", f"version {version}: {message}", version=version, **fields)
        try:
            self._folder.prune(self._keep, {version})
        except OSError as error:
            self._faults.note("versions", f"old versions cannot be deleted: {error}")
        return version
