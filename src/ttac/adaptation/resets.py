"""When an adapter goes back to the source model by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResetEvery:
    """After a number of samples; 0: only when told to, by `Adapter.reset`. Another policy overrides `left`.

    >>> ResetEvery(5).left(since=3), ResetEvery(0).left(since=3)
    (2, None)
    """

    samples: int

    def left(self, since: int) -> int | None:
        """Give the samples until the next reset, `since` the last one; None where none comes."""
        return self.samples - since if self.samples else None
