"""The conformance suite: what every method promises, as functions that raise where a promise is broken.

A new method is checked with one line, on a tiny network and random images made here:

>>> run_all("bn")
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.method import Batch, Method
from ttac.data.labelled import from_tensors
from ttac.data.streams import Domain, Scenario, Stream
from ttac.evaluation.engine import StreamWalk, evaluate
from ttac.evaluation.protocols import PROTOCOLS, Protocol, ProtocolError, check_protocol
from ttac.methods.registry import adapt, find_method
from ttac.model.branches import BRANCHES
from ttac.model.classifier import Classifier
from ttac.model.networks import ResNet
from ttac.source.knowledge import Knowledge
from ttac.source.statistics import SourceStatistics

WINDOW = 8
SMALL: dict[str, Any] = {"window": WINDOW, "queue": 2 * WINDOW, "passes": 2}  # of the methods that have them


class CheckError(AssertionError):
    """A method breaks a promise."""


@dataclass(frozen=True)
class Subject:
    """A method on a network: `make()` gives a fresh adapter, `images` a stream of five windows and a half."""

    make: Callable[[], Adapter]
    images: Tensor

    def batches(self, size: int = WINDOW) -> list[Tensor]:
        """Cut the stream into arrival batches."""
        return list(self.images.split(size))


def subject(
    method: str | type[Method],
    classifier: Classifier | None = None,
    *,
    side: int = 16,
    source_free: bool = False,
    knowledge: Sequence[Knowledge] = (),
    **options: Any,
) -> Subject:
    """Build the subject of a method, by name or class, by default on a tiny residual network with random weights.

    `options` come over those that the method declares for its checks (`checked_with`). Statistics and branches that it
    uses are made here; other kinds of knowledge are given.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = classifier or Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval()
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(5 * WINDOW + WINDOW // 2, classifier.channels, side, side, generator=generator)
    found = find_method(method) if isinstance(method, str) else method
    known = {field.name for field in fields(found.options_type)}
    options = {**{name: value for name, value in SMALL.items() if name in known}, **found.checked_with, **options}
    uses = found.uses(found.options_type(**options))
    classifier = _with_branch(classifier, uses)
    stats = None
    if "statistics" in uses:
        labels = torch.arange(len(images)) % classifier.num_classes
        free, light = SourceStatistics.rescale_weights, SourceStatistics.collect
        stats = free(classifier) if source_free else light(classifier, [(images, labels)])
    return Subject(lambda: adapt(classifier, found, stats=stats, knowledge=knowledge, **options), images)


def run_all(method: str | type[Method], classifier: Classifier | None = None, **given: Any) -> None:
    """Run every check that a method is not exempt from; the first broken promise raises. `given`: see `subject`."""
    for check in CHECKS:
        fresh = subject(method, classifier, **given)
        if check.__name__ not in fresh.make().exempt:
            check(fresh)


def predict_is_pure(subject: Subject) -> None:
    """`predict` changes nothing and repeats itself."""
    adapter = subject.make()
    first, *rest = subject.batches()
    adapter(first)
    before = adapter.state_dict()
    outputs = [adapter.predict(rest[0]) for _ in range(2)]
    _require(_same(before, adapter.state_dict()), "predict changed the state")
    _require(torch.equal(*outputs), "predict gave two answers to one question")


def reset_equals_fresh(subject: Subject) -> None:
    """After `reset`, the same stream gives what a new adapter gives."""
    adapter = subject.make()
    fresh = _drive(subject.make(), subject.batches())
    _drive(adapter, subject.batches())
    adapter.reset()
    _require(_same(adapter.state_dict(), subject.make().state_dict()), "the state after reset is not the first one")
    _require(adapter.counters() == subject.make().counters(), "counters after reset are not the first ones")
    _require(
        torch.equal(_drive(adapter, subject.batches()), fresh), "predictions after reset differ from a fresh run's"
    )


def state_round_trips(subject: Subject) -> None:
    """A state saved mid-stream and mid-window, loaded elsewhere, goes on bit for bit the same."""
    batches = subject.batches(WINDOW // 2 + 1)
    middle = len(batches) // 2
    whole, resumed = subject.make(), subject.make()
    _drive(whole, batches[:middle])
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    ends = [_drive(adapter, batches[middle:]) for adapter in (whole, resumed)]
    _require(torch.equal(*ends), "predictions after a round trip differ")
    _require(_same(whole.state_dict(), resumed.state_dict()), "states after a round trip differ")
    _require(whole.counters() == resumed.counters(), "counters after a round trip differ")


def seeds_repeat(subject: Subject) -> None:
    """Two adapters with one seed agree, whatever the global generator does."""
    first = _drive(subject.make(), subject.batches())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        second = _drive(subject.make(), subject.batches())
    _require(torch.equal(first, second), "the same seed gave different predictions")


def memory_plateaus(subject: Subject) -> None:
    """What the adapter keeps stops growing."""
    adapter = subject.make()
    sizes = []
    for _ in range(4):
        _drive(adapter, subject.batches())
        sizes.append(adapter.memory_bytes())
    _require(sizes[1] == sizes[2] == sizes[3], f"memory grows with the stream: {sizes} bytes")


def batches_do_not_matter(subject: Subject) -> None:
    """Single images lead to the same updates as batches of any size."""
    adapters = [subject.make() for _ in range(3)]
    for adapter, size in zip(adapters, (1, WINDOW, len(subject.images)), strict=True):
        logits = _drive(adapter, subject.batches(size))
        _require(bool(logits.isfinite().all()), f"predictions in batches of {size} are not finite")
    states = [adapter.state_dict() for adapter in adapters]
    _require(_same(states[0], states[1]) and _same(states[1], states[2]), "arrival batches change the updates")


def several_passes_round_trip(subject: Subject) -> None:
    """Where a multi-pass protocol is defined: a state saved within an epoch goes on the same, and reset is fresh."""
    adapters = [subject.make() for _ in range(3)]
    if not any(PROTOCOLS[name].passes == "multi" for name in adapters[0].capabilities.protocols):
        return
    whole, resumed, fresh = adapters
    batches = subject.batches(WINDOW // 2 + 1)
    for epoch in range(2):
        whole.begin_epoch(epoch, 2, iter(batches))
        for number, images in enumerate(batches):
            if (epoch, number) == (1, len(batches) // 2):
                resumed.load_state_dict(whole.state_dict())
            whole.learn(images)
            if epoch and number >= len(batches) // 2:
                resumed.learn(images)
    _require(_same(whole.state_dict(), resumed.state_dict()), "a state saved within an epoch goes on differently")
    whole.reset()
    _require(_same(whole.state_dict(), fresh.state_dict()), "the state after several passes and reset is not the first")


def one_class_survives(subject: Subject) -> None:
    """A long run of one and the same image neither fails nor leaves anything that is not finite."""
    adapter = subject.make()
    logits = _drive(adapter, list(subject.images[:1].repeat(6 * WINDOW, 1, 1, 1).split(WINDOW)))
    _require(bool(logits.isfinite().all()), "predictions are not finite")
    _require(bool(adapter.predict(subject.images).isfinite().all()), "later predictions are not finite")


def partial_window_is_predicted(subject: Subject) -> None:
    """Samples after the last full window get their predictions, and wait for the rest of it."""
    adapter = subject.make()
    logits = _drive(adapter, subject.batches())
    _require(len(logits) == len(subject.images), "some samples were not predicted")
    weights = adapter.classifier.state_dict()
    reference = subject.make()
    _drive(reference, subject.batches()[:-1])
    _require(_same(dict(weights), dict(reference.classifier.state_dict())), "a partial window changed the weights")


def the_end_is_learned_from(subject: Subject) -> None:
    """What a stream's last batch leaves of a window is learned from, and so is a stream that is shorter than one."""
    for batches in ([subject.images[: WINDOW - 3]], subject.batches()[-2:]):
        adapter, waits = subject.make(), subject.make()
        for images in batches[:-1]:
            _require(torch.equal(adapter(images), waits(images)), "an end that is to come changes predictions")
        logits = adapter(batches[-1], last=True)
        waits(batches[-1])
        _require(logits.shape == (len(batches[-1]), adapter.classifier.num_classes), "some samples were not predicted")
        _require(bool(logits.isfinite().all()), "predictions at the end are not finite")
        if adapter.memory is None:
            continue
        _require(len(adapter.last_step.update_seconds) == 1, "the end of the stream was not learned from")
        _require(adapter.memory.fresh == 0, "what was learned from still waits for a window")
        moved = any(not torch.equal(value, waits.parameters[name]) for name, value in adapter.parameters.items())
        _require(moved or not adapter.parameters, "the end of the stream has moved none of the declared parameters")
        if getattr(adapter.options, "predict", "before") == "after":
            _require(torch.equal(adapter.predict(batches[-1]), logits), "the last batch was not predicted after it")


def only_declared_parameters_move(subject: Subject) -> None:
    """Parameters that the method does not name stay as they were, the head's above all."""
    adapter = subject.make()
    before = {name: value.detach().clone() for name, value in adapter.classifier.named_parameters()}
    _drive(adapter, subject.batches())
    moved = {name for name, value in adapter.classifier.named_parameters() if not torch.equal(value, before[name])}
    undeclared = sorted(moved - adapter.parameters.keys())
    _require(not undeclared, f"parameters moved without being declared: {', '.join(undeclared)}")


def declared_parameters_move(subject: Subject) -> None:
    """A method that names parameters to learn does move some of them."""
    adapter = subject.make()
    before = {name: value.detach().clone() for name, value in adapter.parameters.items()}
    _drive(adapter, subject.batches())
    moved = [name for name, value in adapter.parameters.items() if not torch.equal(value, before[name])]
    _require(
        not before or bool(moved),
        "none of the declared parameters has moved: if the method learns nothing on random images under these options, "
        "declare others in checked_with",
    )


def losses_are_alive(subject: Subject) -> None:
    """A method that names parameters to learn has losses, which are finite and not all zero."""
    adapter = subject.make()
    found: dict[str, float] = {}
    for images in subject.batches():
        adapter(images)
        now = {name: abs(float(value)) for name, value in adapter.last_step.losses.items()}
        _require(all(map(math.isfinite, now.values())), f"losses are not finite: {now}")
        found |= {name: max(found.get(name, 0.0), value) for name, value in now.items()}
    if adapter.parameters:
        _require(bool(found), "the method learns without any loss")
        _require(not adapter.counters()["skipped_steps"], "steps were refused on images that are all in order")
        _require(any(found.values()), f"all losses are zero: {', '.join(found)}")


def refused_steps_leave_no_trace(subject: Subject) -> None:
    """A step that is refused changes neither weights nor statistics nor what the method keeps."""
    adapter = subject.make()
    first, second, *_ = subject.batches()
    adapter(first)
    if adapter.memory is None:
        return
    adapter.memory.push(second)
    adapter.method.before_update()
    before, take = adapter.state_dict(), adapter.steps.take
    vars(adapter.steps)["take"] = lambda losses, sound=None: take(losses, torch.tensor(False))
    adapter._step(Batch(adapter, adapter.memory.newest(WINDOW), 0))
    after = adapter.state_dict()
    _require(_same(before["classifier"], after["classifier"]), "a refused step changed weights or statistics")
    for part in ("norms", "answers", "method", "memory"):
        _require(_same(before["state"][part], after["state"][part]), f"a refused step changed the {part}")


def no_grad_does_not_matter(subject: Subject) -> None:
    """A caller's `no_grad` or `inference_mode` changes nothing."""
    reference = _drive(subject.make(), subject.batches())
    for mode in (torch.no_grad, torch.inference_mode):
        adapter = subject.make()
        with mode():
            batches = [images.clone() for images in subject.batches()]
            _require(torch.equal(_drive(adapter, batches), reference), f"{mode.__name__} changes predictions")


def labels_are_out_of_reach(subject: Subject) -> None:
    """Other labels and other domains give the same predictions."""
    pixels = (255 * subject.images).round().byte()
    curves = []
    for shift in (0, 1):
        adapter = subject.make()
        classes = adapter.classifier.num_classes
        data = from_tensors(pixels, (torch.arange(len(pixels)) + shift) % classes, classes)
        parts = torch.arange(len(pixels)).split(WINDOW + 5 * shift)
        domains = [Domain(str(number), data.subset(rows)) for number, rows in enumerate(parts)]
        stream = Stream(domains, Scenario("continual", order="given", batch=WINDOW))
        evaluate(adapter, stream, protocol=_admitting(adapter))
        curves.append(adapter.predict(subject.images))
    _require(torch.equal(*curves), "labels or domains reach the method")


def the_future_is_out_of_reach(subject: Subject) -> None:
    """A batch is read only when the ones before it are predicted, and later samples change no earlier prediction."""
    batches = subject.batches()
    read = 0

    def stream(tail: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, None]]:
        nonlocal read
        for number, images in enumerate(batches):
            read = number + 1
            yield (images if number < 3 else tail(images)), None

    outputs = []
    for tail in (torch.clone, lambda images: 1 - images):
        predictions = []
        for number, (outcome, _) in enumerate(StreamWalk(subject.make()).walk(stream(tail))):
            _require(read == number + 1, "the stream was read ahead")
            predictions.append(outcome.logits)
        outputs.append(torch.cat(predictions[:3]))
    _require(torch.equal(*outputs), "later samples changed earlier predictions")


def bad_input_changes_nothing(subject: Subject) -> None:
    """Images that are refused leave the adapter exactly as it was."""
    adapter = subject.make()
    first, second, *_ = subject.batches()
    adapter(first)
    before = adapter.state_dict()
    nan = second.clone()
    nan[-1, 0, 0, 0] = torch.nan
    seven = second[:, :1].repeat(1, 7, 1, 1)
    for bad in (nan, second[0], second[:0], seven, second * 255, second.to(torch.int64), second.flatten(2)):
        try:
            adapter(bad)
        except (TypeError, ValueError):
            pass
        else:
            raise CheckError(f"bad input was taken: {bad.dtype} {tuple(bad.shape)}")
        _require(_same(before, adapter.state_dict()), "refused input changed the state")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    predict_is_pure,
    reset_equals_fresh,
    state_round_trips,
    seeds_repeat,
    memory_plateaus,
    batches_do_not_matter,
    several_passes_round_trip,
    one_class_survives,
    partial_window_is_predicted,
    only_declared_parameters_move,
    declared_parameters_move,
    losses_are_alive,
    the_end_is_learned_from,
    refused_steps_leave_no_trace,
    no_grad_does_not_matter,
    labels_are_out_of_reach,
    the_future_is_out_of_reach,
    bad_input_changes_nothing,
)


def _with_branch(classifier: Classifier, uses: Iterable[str]) -> Classifier:
    """Give a copy the branch that is used, if it has none."""
    wanted = [kind.removesuffix(" branch") for kind in uses if kind.endswith(" branch")]
    if not wanted or classifier.branch is not None:
        return classifier
    classifier = classifier.copy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        classifier.branch = BRANCHES[wanted[0]](classifier.feature_dim)
    return classifier


def _admitting(adapter: Adapter) -> Protocol:
    """Find the first of the method's protocols that admits its statistics and its branch."""
    for name in adapter.capabilities.protocols:
        try:
            check_protocol(adapter, PROTOCOLS[name])
        except ProtocolError:
            continue
        return PROTOCOLS[name]
    raise CheckError("none of the method's protocols admits it with this model, these statistics and options")


def _drive(adapter: Adapter, batches: list[Tensor]) -> Tensor:
    return torch.cat([outcome.logits for outcome, _ in StreamWalk(adapter).walk((images, None) for images in batches)])


def _require(condition: bool, broken: str) -> None:
    if not condition:
        raise CheckError(broken)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
