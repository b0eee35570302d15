"""The pull of an alignment and its commit, D = 2048 and 256 samples, against torch.distributions with autograd.

    python benchmarks/alignment.py [--threads 2] [--out FILE]

Source and target have the spectrum `i^-p` in a random rotation, class means around it, and the target is scaled and
shifted. Both sides start from a target that one minibatch has moved. The ridge is a thirtieth of the largest variance.
The reference, which does not validate its arguments, takes so long that it is timed once in each of two turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from memory import in_own_process
from table import run
from timing import Row, median_seconds
from torch import Tensor

from ttac.adaptation.alignment import Alignment
from ttac.evaluation.metrics import PeakMemory
from ttac.gaussian import FAMILIES, Gaussians, LowRank, RunningGaussians, choose_family
from ttac.gaussian.families import MAX_RANK

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from references.alignment import Written

DIM, BATCH, CLASSES, RANK = 2048, 256, 10, 256
SOURCE, PORTION = 6000, 500  # samples of the source, and how many its statistics take at a time
CLIP_CLASS, CLIP_GLOBAL = 128, 1280
STEEP, FLAT = 1.5, 1.0  # p
TIMED = 4  # classes that the dense way is timed on
TURNS, ROUNDS = 2, 5  # of the reference, and of our sides in each turn

Pair = tuple[Alignment, Alignment]  # class-wise and global


@dataclass(frozen=True)
class Case:
    """Features of a source by class, and two minibatches of a target."""

    source: Tensor  # [SOURCE, D]
    first: Tensor  # [B, D]
    second: Tensor  # [B, D]

    @classmethod
    def draw(cls, power: float) -> Case:
        """Draw features with the spectrum `i^-power`."""
        generator = torch.Generator().manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
        root = torch.arange(1, DIM + 1) ** (-power / 2)
        means = 0.05 * torch.randn(CLASSES, DIM, generator=generator)

        def features(count: int, scale: float, shift: float) -> Tensor:
            white = torch.randn(count, DIM, generator=generator)
            return scale * (white * root) @ rotation.mT + means[torch.arange(count) % CLASSES] + shift

        return cls(features(SOURCE, 1.0, 0.0), features(BATCH, 1.1, 0.02), features(BATCH, 1.1, 0.02))

    def anchors(self, family: str, rank: int = RANK) -> tuple[Gaussians, Gaussians]:
        """Collect the source in a family."""
        found = []
        for count in (CLASSES, 1):
            source = RunningGaussians.empty(count, DIM, family=family, rank=rank)
            for portion in self.source.split(PORTION):
                source.commit(source.blend(portion, torch.arange(PORTION) % CLASSES % count))
            found.append(source.gaussians)
        return found[0], found[1]

    def aligned(self, anchors: tuple[Gaussians, Gaussians]) -> Pair:
        """Align with anchors and move the target by the first minibatch."""
        ridge = float(self.source.var(0).max()) / 30
        clips = (CLIP_CLASS, CLIP_GLOBAL)
        classes, overall = (
            Alignment(each, ridge=ridge, clip=clip, means_only=False) for each, clip in zip(anchors, clips, strict=True)
        )
        for alignment in (classes, overall):
            blend = alignment.running.blend(self.first, assignment(len(alignment.anchors.mean)))
            alignment.running.commit(blend)
        return classes, overall

    def low_rank(self) -> dict[int, Pair]:
        """Align in the low-rank family, by rank."""
        return {rank: self.aligned(self.anchors("low-rank", rank)) for rank in (RANK, MAX_RANK)}


def assignment(count: int) -> Tensor:
    """Assign the minibatch to the classes in turn, or to the only Gaussian."""
    return torch.arange(BATCH) % CLASSES % count


def written_gradient(equations: list[Written], features: Tensor) -> Tensor:
    """Differentiate the reference's loss."""
    return sum((each.gradient(features, assignment(len(each.means))) for each in equations), torch.zeros(()))


def in_turns(reference: Callable[[], object], *ours: Callable[[], object]) -> tuple[float, list[float]]:
    """Time the reference and then our sides, in turns, in seconds."""
    slow, quick = [], []
    for _ in range(TURNS):
        started = time.perf_counter()
        reference()
        slow.append(time.perf_counter() - started)
        quick.append(median_seconds(*ours, rounds=ROUNDS))
    return statistics.mean(slow), [statistics.mean(taken) for taken in zip(*quick, strict=True)]


def pulled_gradient(pair: Pair, features: Tensor, *, commit: bool) -> Tensor:
    """Differentiate the pull and store what the features make of the target."""
    features = features.clone().requires_grad_()
    pulls = [each.pull(features, assignment(len(each.anchors.mean))) for each in pair]
    gradient = pulls[0][0].gradients[0] + pulls[1][0].gradients[0]
    if commit:
        for each, (_, blend) in zip(pair, pulls, strict=True):
            each.running.commit(blend)
    return gradient


def cosine(first: Tensor, second: Tensor) -> float:
    """Compare the directions of two gradients."""
    return float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), 0))


def ten_classes() -> list[Row]:
    """Compare the exact and the low-rank family with the reference."""
    steep = Case.draw(STEEP)
    given = steep.anchors("full")
    exact, low_rank = steep.aligned(given), steep.low_rank()
    equations = [Written(each, anchors) for each, anchors in zip(exact, given, strict=True)]
    found, *low = (pulled_gradient(pair, steep.second, commit=False) for pair in (exact, *low_rank.values()))
    jobs = [partial(pulled_gradient, pair, steep.second, commit=True) for pair in (exact, *low_rank.values())]
    written: list[Tensor] = []
    reference, (exact_time, *low_times) = in_turns(
        lambda: written.append(written_gradient(equations, steep.second)), *jobs
    )
    expected = written[0]  # of the first turn, which the reference begins: no commit has moved the target yet
    error = float((found - expected).norm() / expected.norm())
    what, times = "alignment, K = 10", f"{{:.2f}} s against {reference:.1f} s of torch.distributions, with commit"
    spectrum = "spectrum i^-{}, random rotation"
    rows = [
        Row(f"{what}, exact", reference / exact_time, "x", ("at least", 10), times.format(exact_time)),
        Row(f"{what}, exact, gradient error", error, "relative", ("at most", 1e-3), spectrum.format(STEEP)),
    ]
    for rank, taken, gradient, flat in zip(low_rank, low_times, low, flat_cosines(), strict=True):
        bounded = rank == RANK
        name, alike = f"{what}, rank {rank}", cosine(gradient, expected)
        chosen = f", rank={rank}" if bounded else ""  # the other is the default
        note = f'{times.format(taken)}; SourceStatistics.collect(..., family="low-rank"{chosen})'
        rows += [
            Row(name, reference / taken, "x", ("at least", 30) if bounded else None, note),
            Row(f"{name}, gradient", alike, "cosine", ("at least", 0.99) if bounded else None, spectrum.format(STEEP)),
            Row(f"{name}, gradient", flat, "cosine", None, spectrum.format(FLAT)),
        ]
    return rows


def flat_cosines() -> list[float]:
    """Compare the low-rank gradients with the exact one where the spectrum falls slowly, by rank."""
    flat = Case.draw(FLAT)
    exact = pulled_gradient(flat.aligned(flat.anchors("full")), flat.second, commit=False)
    return [cosine(pulled_gradient(pair, flat.second, commit=False), exact) for pair in flat.low_rank().values()]


def anchors(count: int, family: str, rank: int) -> Gaussians:
    """Make Gaussians out of nothing, with unit variances."""
    mean = torch.randn(count, DIM)
    covariance = FAMILIES[family].zeros(count, DIM, rank, mean).plus(1.0)
    if isinstance(covariance, LowRank):
        covariance.factor.normal_(std=0.1)
    return Gaussians(mean, covariance)


def align(given: Gaussians) -> Alignment:
    """Align with Gaussians out of nothing."""
    return Alignment(given, ridge=0.03, clip=CLIP_CLASS, means_only=False)


def thousand_diagonals() -> list[Row]:
    """Compare the diagonal family with dense matrices made from diagonals."""
    given = anchors(1000, "diagonal", 0)
    alignment = align(given)
    features, labels = torch.randn(BATCH, DIM), torch.randint(1000, (BATCH,))
    touched = labels.unique()
    few = given.rows(touched[:TIMED])
    equations, own = Written(align(few), few), torch.isin(labels, touched[:TIMED])

    def pull() -> None:
        given = features.clone().requires_grad_()
        _, blend = alignment.pull(given, labels)
        alignment.running.commit(blend)

    dense = partial(equations.gradient, features[own], torch.searchsorted(touched, labels[own]))
    theirs, (ours,) = in_turns(dense, pull)
    theirs *= len(touched) / TIMED
    note = f"{1000 * ours:.0f} ms against {theirs:.0f} s of dense matrices for {len(touched)} classes, timed on {TIMED}"
    return [Row("alignment, K = 1000, diagonal", theirs / ours, "x", ("at least", 100), note)]


def peak_of(count: int, threads: int) -> float:
    """Measure the peak memory of two steps with `count` classes and the global Gaussian, in MiB; 0: of nothing."""
    torch.set_num_threads(threads)
    peak = PeakMemory(torch.device("cpu"))
    if count:
        classes, overall = (align(anchors(number, *choose_family(number, DIM))) for number in (count, 1))
        # One class has 100 samples, the others have one each or two.
        labels = torch.cat([torch.zeros(100, dtype=torch.int64), torch.arange(BATCH - 100) % count])
        for _ in range(2):
            features = torch.randn(BATCH, DIM, requires_grad=True)
            pulls = [classes.pull(features, labels), overall.pull(features, torch.zeros_like(labels))]
            for pull, _ in pulls:
                torch.autograd.backward(pull.tensors, pull.gradients)
            for alignment, (_, blend) in zip((classes, overall), pulls, strict=True):
                alignment.running.commit(blend)
    return peak.compute()


def memory(threads: int) -> list[Row]:
    """Measure what many classes take, beside the libraries themselves."""
    nothing = in_own_process(partial(peak_of, 0), threads)
    rows = []
    for count, limit in ((100, 3), (1000, 2)):
        family, rank = choose_family(count, DIM)
        job: Callable[[int], float] = partial(peak_of, count)
        taken = in_own_process(job, threads) - nothing
        note = (
            f"{family}, rank {rank}, and the global Gaussian, full; anchors, target and two steps, one class with 100 "
            f"of {BATCH} samples; {nothing:.0f} MiB of the libraries themselves are subtracted"
        )
        rows.append(Row(f"alignment, K = {count}, peak memory", taken, "MiB", ("at most", limit * 1024), note))
    return rows


def measure(*, threads: int = 2) -> list[Row]:
    """Compare alignments with the reference, and measure what many classes take."""
    return [*ten_classes(), *thousand_diagonals(), *memory(threads)]


if __name__ == "__main__":
    run(measure)
