"""Everything that ranks could differ in goes through the reduction, and one look at a device decides a step."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from references.gaussians import D, gaussians
from ttac import checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.alignment import Alignment
from ttac.adaptation.reduction import Reduction
from ttac.methods.registry import methods

LEARNING = [name for name in methods() if name not in ("test", "bn", "t3a")]
# Of an operation whose answer the host waits for, on a device that is not the host.
WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "equal", "is_nonzero")
# Functions that look at nothing but indices on the host, and one that waits on a CPU alone.
HOST_ONLY = ("_group", "take", "apply_operations", "cholesky")


class Noting(Reduction):
    """Does nothing, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answer = True

    def count(self, samples: int) -> int:
        self.asked["count"] += 1
        return samples

    def gather(self, rows: Tensor) -> Tensor:
        self.asked["gather"] += 1
        return rows

    def own(self, rows: Tensor) -> Tensor:
        self.asked["own"] += 1
        return rows

    def batch_norm(self, layers: Sequence[_BatchNorm]) -> AbstractContextManager[None]:
        self.asked["batch_norm"] += 1
        return nullcontext()

    def gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.asked["gradients"] += 1

    def decide(self, flag: Tensor) -> bool:
        self.asked["decide"] += 1
        return bool(flag) and self.answer


def with_reduction(adapter: Adapter, reduction: Reduction) -> Adapter:
    """The same adapter, but reduced."""
    known = adapter.knowledge.values()
    classifier = adapter.classifier.copy()
    given = [one for one in known if one.level != "objective"]
    return Adapter(classifier, type(adapter.method), adapter.options, given, reduction)


@pytest.mark.parametrize("method", LEARNING)
def test_every_step_is_reduced_and_decided_once(method: str) -> None:
    subject = checks.subject(method, passes=1, queue=0, **({"copies": 1} if method == "ttt-r" else {}))
    plain, noting = subject.make(), Noting()
    reduced = with_reduction(subject.make(), noting)
    assert torch.equal(reduced(subject.images), plain(subject.images))
    steps = plain.counters()["steps"]
    assert steps == 5
    assert noting.asked["gradients"] == steps
    # TTAC++ also takes statistics after an update of one step here, and decides whether to keep them.
    assert noting.asked["decide"] == steps * (2 if method == "ttac++" else 1)
    assert noting.asked["batch_norm"] >= steps
    assert noting.asked["count"] >= steps
    alignments = {"ttac": 2, "ttac++": 2, "ttac+shot": 2, "ttt++": 1}.get(method, 0)
    assert noting.asked["gather"] == 2 * alignments * steps
    assert noting.asked["own"] == alignments * steps


@pytest.mark.parametrize("method", LEARNING)
def test_a_step_that_another_rank_refuses_is_not_taken(method: str) -> None:
    subject = checks.subject(method)
    noting = Noting()
    noting.answer = False
    adapter = with_reduction(subject.make(), noting)
    before = {name: value.clone() for name, value in adapter.classifier.state_dict().items()}
    adapter(subject.images)
    assert adapter.counters()["steps"] == 0
    assert adapter.counters()["skipped_steps"] > 0
    assert all(torch.equal(value, before[name]) for name, value in adapter.classifier.state_dict().items())


class Waits(TorchDispatchMode):
    """Notes where a host would wait for a GPU: operations whose answer it reads, but those on indices that it holds."""

    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._on_host = on_host  # addresses of tensors that stay there

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING and args[0].data_ptr() not in self._on_host:
            frames = [frame for frame in traceback.extract_stack() if "/src/ttac/" in frame.filename]
            if frames[-1].name not in HOST_ONLY:
                self.seen.append(frames[-1].name)
        return func(*args, **(kwargs or {}))


def waits_of(method: str, **options: Any) -> list[str]:
    subject = checks.subject(method, queue=0, passes=1, predict="after", **options)
    adapter = subject.make()
    adapter(subject.images[: checks.WINDOW])
    adapter.memory_in_use.push(subject.images[: checks.WINDOW])
    adapter.steps.told = dict.fromkeys(("anchor", "global", "features"), adapter.steps.taken)  # no costly values now
    optimizer = adapter.steps.optimizer
    counts = {state["step"].data_ptr() for state in optimizer.state.values() if "step" in state}  # Adam's, on the host
    with Waits(counts) as waits:
        adapter._update(adapter.memory_in_use)
    return waits.seen


@pytest.mark.parametrize("method", ["tent", "self-training", "ttt++", "ttac", "ttac++"])
def test_a_step_waits_for_the_device_once_to_be_decided(method: str) -> None:
    """TTAC and TTAC++ wait once more, for the assignment of samples to classes, which `_group` takes to the host.

    An update of TTAC++ has three waits beside its steps: how strong views may be, what is told of it, and whether its
    statistics are finite.
    """
    assert waits_of(method) == (["follow", "decide", "measures", "decide"] if method == "ttac++" else ["decide"])


class OneOfTwo(Noting):
    """A rank that knows the rows of the other one."""

    ranks = 2

    def __init__(self, mine: slice, everything: dict[int, Tensor]) -> None:
        super().__init__()
        self.mine, self.everything = mine, everything

    def gather(self, rows: Tensor) -> Tensor:
        return self.everything[rows.ndim]

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.mine]


def test_two_ranks_pull_as_one_does() -> None:
    anchors = gaussians("full", 0)
    features, labels = torch.randn(8, D, dtype=torch.float64), torch.arange(8) % 3

    def gradient(rows: slice, reduction: Reduction | None) -> Tensor:
        alignment = Alignment(anchors, ridge=0.1, clip=32, means_only=False, reduction=reduction)
        part = features[rows].clone().requires_grad_()
        pull, _ = alignment.pull(part, labels[rows])
        return pull.gradients[0]

    halves = [slice(0, 4), slice(4, 8)]
    ranks = [gradient(half, OneOfTwo(half, {2: features, 1: labels})) for half in halves]
    # By a parameter that all rows share, gradients of the rows add up within a rank, and are averaged over ranks.
    torch.testing.assert_close(torch.cat(ranks) / 2, gradient(slice(None), None))
