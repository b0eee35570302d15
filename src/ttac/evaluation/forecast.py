"""What a stream of so many images will lead to, said before anything runs; and that nothing came of it, said after."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ttac.adaptation.adapter import LEAST, Adapter

TRIED = 16  # images of the first batch that the time is measured on
BESIDE = 3  # forward passes an image beside the adapter: of the frozen model, of BN, and of BN's update


def count_updates(images: int, window: int, reset_every: int = 0) -> int:
    """Count the updates of a stream, the one at its end among them; a reset forgets what is left of a window.

    >>> count_updates(1500, 256), count_updates(24, 256), count_updates(257, 256), count_updates(30, 8, reset_every=20)
    (6, 1, 1, 4)
    """
    period = reset_every or max(images, 1)
    rest = (images - 1) % period + 1 if images else 0  # since the last reset
    return (images - rest) // period * (period // window) + rest // window + (rest % window >= LEAST)


def counted(number: int, noun: str) -> str:
    """Count things.

    >>> counted(1, "image"), counted(1500, "image")
    ('1 image', '1,500 images')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe(images: int, adapter: Adapter) -> str:
    """Say how many updates so many images lead to.

    >>> from ttac.evaluation.checks import subject
    >>> describe(1500, subject("tent").make())
    '1,500 images, 188 updates of 8'
    """
    if adapter.memory is None:
        return f"{counted(images, 'image')}, no updates: {adapter.capabilities.title} does not learn"
    window = adapter.options.window
    updates = count_updates(images, window, adapter.options.reset_every)
    return f"{counted(images, 'image')}, {counted(updates, 'update')} of {min(window, images):,}"


def foretell(images: int, adapter: Adapter, few: Iterable[tuple[Tensor, object]], *, beside: bool) -> str:
    """Say what so many images lead to, and how long it takes where that is worth trying it on the first of a `few`."""
    said = describe(images, adapter)
    window = getattr(adapter.options, "window", TRIED)
    if images <= window:
        return said
    started = time.perf_counter()
    first = next(iter(few), None)
    if first is None or len(first[0]) < LEAST:  # those at the beginning cannot be read
        return said
    pace = Pace.measure(adapter, first[0][: min(window, TRIED)], (time.perf_counter() - started) / len(first[0]))
    return f"{said}, {in_words(pace.of_stream(images, adapter, beside=beside))}"


def nothing_learned(adapter: Adapter, updates: int) -> str | None:
    """Say why a method that learns has not, and what to do; None where it has, or never does."""
    title = adapter.capabilities.title
    if adapter.memory is None:
        return None
    if not updates:
        return (
            f"no update was made, and {title} has learned nothing: an update takes at least {LEAST} images that may be "
            "learned from; give more"
        )
    if adapter.parameters and not adapter.steps.taken:
        return (
            f"all steps of {updates} updates were refused, as losses or gradients were not finite, and {title} has "
            "learned nothing: check --mean and --std, or take smaller steps"
        )
    return None


def in_words(seconds: float) -> str:
    """Round a time to what an estimate is good for.

    >>> in_words(0.3), in_words(41), in_words(700), in_words(20000)
    ('about 1 s', 'about 40 s', 'about 12 min', 'about 6 h')
    """
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        amount = seconds / size
        if amount < 90 or unit == "h":
            break
    rounded = math.ceil(amount) if amount < 10 else round(amount) if unit != "s" else 5 * round(amount / 5)
    return f"about {rounded:,} {unit}"


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds, as measured on a copy of an adapter with a few images."""

    read: float  # an image
    predict: float  # an image
    minibatch: float  # of an update, whatever its size
    learn: float  # an image of a minibatch

    @classmethod
    def measure(cls, adapter: Adapter, images: Tensor, read: float) -> Pace:
        """Learn from two short streams, of which the difference tells what an image costs."""
        probe = copy.deepcopy(adapter)
        sizes = sorted({max(LEAST, len(images) // 4), len(images)})
        probe(images[: sizes[0]], last=True)  # the first pass through a network takes longer
        spent = []
        for size in sizes:
            probe.reset()
            probe(images[:size], last=True)
            updates = probe.last_step.update_seconds  # one of one minibatch a pass, or none
            spent.append(updates[0] / max(1, probe.method.passes()) if updates else 0.0)
        learn = max(0.0, spent[-1] - spent[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
        predict = probe.last_step.predict_seconds / sizes[-1]
        return cls(read, predict, max(0.0, spent[-1] - learn * sizes[-1]), learn)

    def of_stream(self, images: int, adapter: Adapter, *, beside: bool) -> float:
        """Estimate the time of a stream; an update walks what has come, as far as the memory keeps it."""
        forward = images * (self.read + self.predict * (1 + BESIDE * beside))
        return forward + sum(
            self.minibatch * minibatches + self.learn * walked for minibatches, walked in _walks(images, adapter)
        )


def _walks(images: int, adapter: Adapter) -> Iterator[tuple[int, int]]:
    """Yield for each update how many minibatches, and images in them, it learns from."""
    if adapter.memory is None:
        return
    options = adapter.options
    for number in range(count_updates(images, options.window, options.reset_every)):
        since_reset = number % (options.reset_every // options.window) if options.reset_every else number
        come = (since_reset + 1) * options.window
        walked = min(come, images, options.walk or come, adapter.memory.capacity)
        yield options.passes * math.ceil(walked / options.window), options.passes * walked
