"""The loop: samples arrive, are predicted and remembered, and a full window is learned from.

arrive(images)   check; cut at window borders; answer before, during or after; remember; update when a window is full,
                 or when the stream ends
update()         for each pass, for each minibatch of the memory: losses = method.losses(batch); step; commit or undo;
                 then the guard, if there is one, lets it pass or undoes all of it
step(losses)     backward, reduce over ranks, decide once for all ranks, descend
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttac.adaptation.answers import Answers
from ttac.adaptation.guard import GuardOptions, GuardReport
from ttac.adaptation.memory import SampleQueue
from ttac.adaptation.method import Batch, Capabilities, Method, View
from ttac.adaptation.normalisation import FollowingNorms
from ttac.adaptation.reduction import Reduction
from ttac.adaptation.step import GradientSteps
from ttac.adaptation.stream_guard import StreamGuard
from ttac.common.state import Stateful, cloned, tensor_bytes
from ttac.model.classifier import Classifier
from ttac.model.weights import misfit
from ttac.source.knowledge import Knowledge, TrainedBranch, how_to_get, known_of
from ttac.source.statistics import SourceStatistics

FORMAT = "ttac.adapter/2"
LEAST = 2  # samples of the window that ends a stream: one has no batch statistics
# What goes on where an adapter goes back to an earlier state by itself.
STREAM = ("samples_seen", "several_passes", "generator")


@dataclass
class Step:
    """What the last call did: how long it took, the losses of its last steps, and what its updates have noticed."""

    predict_seconds: float = 0.0
    update_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # on the device of the model
    measures: dict[str, Tensor | float] = dataclasses.field(default_factory=dict)
    judgements: list[GuardReport] = dataclasses.field(default_factory=list)  # of each update, by the guard


class Adapter(Stateful):
    """A classifier that predicts every arrival batch and may learn from it. Nobody subclasses this: see `Method`.

    `adapter(images)` predicts and learns, `predict` never changes anything, `reset` goes back to the source model, and
    `state_dict` holds all that a stream goes on from, bit for bit. The classifier given is copied, never changed.
    """

    samples_seen: int
    several_passes: bool
    since_reset: int
    generator: torch.Generator
    memory: SampleQueue | None
    norms: FollowingNorms
    steps: GradientSteps
    answers: Answers
    method: Method

    def __init__(
        self,
        classifier: Classifier,
        method: type[Method],
        options: Any,
        knowledge: Iterable[Knowledge] = (),
        reduction: Reduction | None = None,
        guard: GuardOptions | None = None,
    ) -> None:
        self.options = options
        self.reduction = reduction or Reduction()
        self.capabilities: Capabilities = method.capabilities
        self.uses = method.uses(options)  # kinds of knowledge
        self.source_fingerprint = classifier.fingerprint()
        self.last_step = Step()
        self.before_step: Callable[[], None] | None = None  # called before each step, to wait while others compute
        known = known_of(classifier, knowledge)
        self._check_knowledge(known)
        self.brings = tuple(known)  # kinds, also those that the method leaves unused
        self.knowledge = {kind: known[kind] for kind in self.uses}
        self.classifier = classifier.copy().eval()
        if not any(kind.endswith(" branch") for kind in self.uses):
            self.classifier.branch = None  # a plain classifier to a method that does not say it uses one
        self.source = {name: tensor.clone() for name, tensor in self.classifier.state_dict().items()}
        self.declare(
            samples_seen=lambda: 0,
            several_passes=lambda: False,  # whether `learn` or `begin_epoch` was called, which ends one-pass protocols
            since_reset=lambda: 0,  # samples
            generator=lambda: torch.Generator().manual_seed(options.seed),
        )
        made = method(self)
        self.parameters = made.parameters()
        self.classifier.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._resets = made.resets()
        memory, norms, steps, answers = made.memory(), made.norms(), made.steps(self.parameters), made.answers()
        self.declare(memory=lambda: memory, norms=lambda: norms, steps=lambda: steps, answers=lambda: answers)
        self.declare(method=lambda: made)  # last, as it knows the others
        self.guard = None if guard is None else self._guarded_by(guard, classifier, known)
        self._prints = {kind: one.fingerprint() for kind, one in self.knowledge.items()}

    def _check_knowledge(self, known: Mapping[str, Knowledge]) -> None:
        for kind in self.uses:
            if kind not in known:
                given = ", ".join(known) or "nothing"
                raise ValueError(
                    f"{self.capabilities.title} with these options needs to know the {kind} of the source, and is "
                    f"given {given}: {how_to_get(kind)}"
                )

    def _guarded_by(
        self, options: GuardOptions, source: Classifier, known: Mapping[str, Knowledge]
    ) -> StreamGuard | None:
        """Make the guard, which sees the source model as it came; None for a method that learns nothing."""
        if not self.method.guardable:
            raise ValueError(f"{self.capabilities.title} has confidences of its own, which a guard cannot compare")
        if self.reduction.ranks > 1:
            raise ValueError("a guard judges what one process learns, and cannot be used on several ranks")
        if self.memory is None:
            return None
        if "statistics" in known:  # used from now on, which protocols and records go by
            self.knowledge["statistics"] = known["statistics"]
        return StreamGuard(source, self.stats, options)

    def __repr__(self) -> str:
        knowledge = f", {', '.join(self.uses)}" if self.uses else ""
        return f"Adapter({self.name} on {self.classifier!r}{knowledge}: {self.samples_seen} samples seen)"

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.capabilities.name

    @property
    def stats(self) -> SourceStatistics | None:
        """The statistics of the source that the method uses, if any."""
        found = self.knowledge.get("statistics")
        return found if isinstance(found, SourceStatistics) else None

    @property
    def exempt(self) -> dict[str, str]:
        """The checks of `ttac.checks` that the options make impossible, with the reason of each."""
        resets = {
            "memory_plateaus": "what is kept falls with every reset",
            "partial_window_is_predicted": "a reset may fall into a window",
        }
        return {**(resets if self.options.reset_every else {}), **self.method.exempt}

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """Make an adapter of its own, in the same state: parts know each other, and those of a copy its own."""
        classifier = self.classifier.copy()
        classifier.load_state_dict(self.source)
        known = [one for one in self.knowledge.values() if not isinstance(one, TrainedBranch)]
        guard = None if self.guard is None else self.guard.options
        made = Adapter(classifier, type(self.method), self.options, known, self.reduction, guard)
        made.brings = self.brings
        made.load_state_dict(self.state_dict())
        return made

    @property
    def memory_in_use(self) -> SampleQueue:
        """The memory, of a method that has one."""
        assert self.memory is not None, "the method keeps no samples"
        return self.memory

    # Arrivals

    def __call__(self, images: Tensor, *, last: bool = False) -> Tensor:
        """Predict one arrival batch and learn from it: raw images `[N, C, H, W]` in [0, 1] to logits `[N, K]`.

        `last` says that the stream ends with this batch: what is left of a window is learned from as a smaller one.
        """
        with self._begun(images) as checked:
            logits, left = [], len(checked)
            for piece in self._pieces(checked):
                left -= len(piece)
                logits.append(self._arrive(piece, ends=last and not left))
            return torch.cat(logits)

    def learn(self, images: Tensor) -> None:
        """Learn from one batch of a multi-pass protocol, whose predictions come after all passes."""
        self._check_unguarded()
        with self._begun(images) as checked:
            self.several_passes = True
            for piece in self._pieces(checked):
                self._take(piece, of_epoch=True)

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Say that pass `epoch` (from 0) of `epochs` over the images of `target` begins, in multi-pass protocols."""
        self._check_unguarded()
        with learning_mode():
            self.several_passes = True
            self.method.begin_epoch(epoch, epochs, (self.classifier.check(_usable(images)) for images in target))

    def _check_unguarded(self) -> None:
        if self.guard is not None:
            raise ValueError("a guard watches a stream that comes once: learn in several passes without it")

    @contextmanager
    def _begun(self, images: Tensor) -> Iterator[Tensor]:
        with learning_mode():
            checked = self._checked(_usable(images))
            self.last_step = Step()
            self.samples_seen += len(checked)  # first: an interrupted call must not leave an adapter that looks fresh
            yield checked

    def _checked(self, images: Tensor) -> Tensor:
        images = self.classifier.check(images)
        self.method.check_images(images)
        if self.memory is not None:
            self.memory.check(images)
            if not len(self.memory):  # a size that the model cannot take must not enter the memory
                try:
                    self.predict(images[:1])
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, AssertionError) as error:
                    size = " x ".join(map(str, images.shape[1:]))
                    raise ValueError(f"the model does not take images of {size}: {error}") from error
        return images

    def _pieces(self, images: Tensor) -> Iterator[Tensor]:
        """Cut an arrival where a window is full or a reset is due, so that arrival batches of any size are alike."""
        while len(images):
            left = self._resets.left(self.since_reset)
            if left == 0:
                self._start(self.source, keep=STREAM)
                left = self._resets.left(0)
            room = len(images) if self.memory is None else self.options.window - self.memory.fresh
            size = min(room, len(images), len(images) if left is None else left)
            self.since_reset += size
            yield images[:size]
            images = images[size:]

    def _arrive(self, images: Tensor, *, ends: bool) -> Tensor:
        """Predict and learn from images that lie within a window, and with which the stream `ends` or not."""
        moment = getattr(self.options, "predict", "before")
        logits = self._answer(images) if moment == "before" else None
        window = self._take(images, ends=ends)
        if moment == "during" and window is not None and bool(window.isfinite().all()):
            logits = window[-len(images) :]
        return self._answer(images) if logits is None else logits

    def _answer(self, images: Tensor) -> Tensor:
        started = self._now()
        logits = self.predict(images)
        self.last_step.predict_seconds += self._now() - started
        return logits

    def _now(self) -> float:
        """Read the clock, when the device has done what it was given."""
        if self.classifier.device.type == "cuda":
            torch.cuda.synchronize(self.classifier.device)
        return time.perf_counter()

    # Learning

    def _take(self, images: Tensor, *, ends: bool = False, of_epoch: bool = False) -> Tensor | None:
        """Remember images and learn if they fill the window, or end the stream.

        Gives the window's logits `[N_B, K]` if there was an update, NaN where it was refused; None also where the last
        ones are not those of `images`, as the guard has kept some away or undone the update.
        """
        if self.memory is None:
            return None
        admitted = images if self.guard is None else self.guard.admit(images, self.samples_seen)
        if len(admitted):
            self.memory.push(admitted, of_epoch=of_epoch)
        if self.memory.fresh < (LEAST if ends else self.options.window):
            return None
        started = self._now()
        try:
            window = self._learn(self.memory)
        finally:
            self.last_step.update_seconds.append(self._now() - started)
        return window if len(admitted) == len(images) else None

    def _learn(self, memory: SampleQueue) -> Tensor | None:
        """Update, now that a window is full: its logits `[N_B, K]`, None where the guard has undone it."""
        try:
            window = self._update(memory)
        finally:
            memory.settle()
        return window if self.guard is None or self._passed(self.guard) else None

    def _passed(self, guard: StreamGuard) -> bool:
        """Let the guard judge an update, and undo it where it says so: whether it stays."""
        predicting = self.adapted()
        report = guard.judge(predicting, self.samples_seen)
        self.last_step.judgements.append(report)
        if report.action == "publish":
            guard.let_pass(predicting.model.state_dict(), self._good())
        elif report.action == "reset":
            self._start(self.source, keep=STREAM)
        elif report.action == "rollback":
            assert guard.good is not None, "what is gone back to was let pass"
            self._go_back_to(cloned(guard.good))
        return report.action in ("publish", "wait")

    def _good(self) -> dict[str, Any]:
        """Give what an undone update goes back to: all but the stream's course, and the samples, which led astray."""
        going_on = (*STREAM, "since_reset", "memory")
        state = {name: value for name, value in self.state().items() if name not in going_on}
        return {"classifier": dict(self.classifier.state_dict()), "state": state}

    def _go_back_to(self, good: dict[str, Any]) -> None:
        with self._keeping(*STREAM, "since_reset"):
            self.classifier.load_state_dict(good["classifier"])
            self.reset_state()
            self.load_state({**self.state(), **good["state"]})

    def _update(self, memory: SampleQueue) -> Tensor:
        """Walk the memory now that a window is complete: its logits `[N_B, K]` before their last steps."""
        options, method = self.options, self.method
        method.before_update()
        if self.parameters:
            self.steps.set_rate(method.rate())
        newest = memory.newest(memory.fresh)
        shape = (len(memory), self.classifier.num_classes)
        logits = torch.full(shape, torch.nan, dtype=self.classifier.dtype, device=self.classifier.device)
        for number in range(method.passes()):
            for slots in memory.minibatches(options.window, self.generator, options.walk):
                if self.before_step is not None:
                    self.before_step()
                found = self._step(Batch(self, slots, number))
                logits[slots] = torch.nan if found is None else found.detach().to(logits)
        self.last_step.measures |= method.measures()
        return method.after_update(newest, logits[newest])

    def _step(self, batch: Batch) -> Tensor | None:
        """Learn from a minibatch: its logits, None where the step was refused and has left no trace."""
        before, taken = self.norms.snapshot(), False
        try:
            losses = self.method.losses(batch)
            sound = self.norms.finite()
            if not losses and batch.logits is not None:  # no gradient tells that something overflowed
                flag = batch.logits.detach().isfinite().all()
                sound = flag if sound is None else flag & sound
            taken = self.steps.take(losses, sound)
        finally:
            if not taken:  # refused, or interrupted
                self.norms.restore(before)
        if not taken:
            return None  # what the step was refused for is no prediction either
        batch.commit()
        self.answers.after_step()
        self.steps.sample_costly_values()
        self.last_step.losses |= self.steps.values
        return batch.logits

    def view(self, images: Tensor) -> View:
        """Run the network on images: features and logits, logits alone where it has no linear head."""
        if self.classifier.has_linear_head:
            return View(*self.classifier.features_and_logits(images))
        logits = self.classifier(images)
        return View(logits[:, :0], logits)

    # What a user calls

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the model as it is and change nothing: `[N, C, H, W] -> [N, K]`."""
        return self.answers.predict(self.classifier.check(images))

    def adapted(self) -> Classifier:
        """Give a classifier that predicts as the adapter does now, for its weights to be kept; do not change it."""
        return self.answers.adapted()

    def reset(self) -> None:
        """Go back to the source model and forget the stream."""
        self._start(self.source)

    def restart_from(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights of `adapted().model` and forget the stream; else raise and change nothing."""
        problem = misfit(self.classifier.model, weights)
        if problem is not None:
            raise ValueError(f"the weights are not of this adapter's model: {problem}")
        self._start(self.source | {f"model.{name}": tensor for name, tensor in weights.items()})
        if self.guard is not None:
            self.guard.let_pass(self.adapted().model.state_dict(), self._good())

    def _start(self, weights: Mapping[str, Tensor], keep: tuple[str, ...] = ()) -> None:
        with self._keeping(*keep):
            self.classifier.load_state_dict(weights)
            self.reset_state()
        if self.guard is not None and keep:
            self.guard.let_pass(None, None)  # what it knows of the stream stays true
        elif self.guard is not None:
            self.guard.reset_state()

    @contextmanager
    def _keeping(self, *names: str) -> Iterator[None]:
        """Keep attributes, and counts of steps, through a block that loads another state; nothing if none is named."""
        kept = {name: getattr(self, name) for name in names}
        steps = (self.steps.taken, self.steps.skipped) if names else (0, 0)
        yield
        vars(self).update(kept)
        self.steps.taken, self.steps.skipped = steps

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last `reset`; one that comes by itself leaves samples and steps."""
        counts = {"samples": self.samples_seen}
        if self.memory is not None:
            counts |= {"steps": self.steps.taken, "skipped_steps": self.steps.skipped}
        guarded = {} if self.guard is None else self.guard.counts
        return {**counts, **self.method.counters(), **guarded}

    def memory_parts(self) -> dict[str, int]:
        """Count the bytes of the tensors that the adapter keeps between calls, by the attribute that keeps them.

        `classifier` is the network as it is now, `source` as it came, `steps` the optimizer's state, `knowledge` what
        is known of the source, `memory` the samples, `method` what the method keeps, such as the target's Gaussians.
        What two share counts for the first.
        """
        counted: set[int] = set()
        parts = {name.lstrip("_"): tensor_bytes(value, counted) for name, value in vars(self).items()}
        return {name: size for name, size in parts.items() if size}

    def memory_bytes(self) -> int:
        """Count the bytes of all that the adapter keeps between calls."""
        return sum(self.memory_parts().values())

    # Saving

    def _identity(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "method": f"{self.name}, {type(self.method).__qualname__}",
            "options": dataclasses.asdict(self.options),
            "fingerprint": self.source_fingerprint,
            "knowledge": self._prints,
            "guard": None if self.guard is None else dataclasses.asdict(self.guard.options),
        }

    def state_dict(self) -> dict[str, Any]:
        """Give a copy of everything that the stream has made; plain tensors, numbers and text."""
        state = {**self._identity(), "classifier": dict(self.classifier.state_dict()), "state": self.state()}
        if self.guard is not None:
            state["guard_state"] = self.guard.state()
        copied: dict[str, Any] = cloned(state)
        return copied

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same method, options and source model; else raise and change nothing."""
        found = state.get("format") if isinstance(state, dict) else None
        if found != FORMAT:
            raise ValueError(
                f"the state is of the format {found!r}, this version reads {FORMAT!r}: start the stream "
                "again, or go on with the version that saved it"
            )
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise ValueError(f"the state is of another {key}: it has {state.get(key)!r}, this adapter {value!r}")
        before = self.state_dict()
        try:
            self._restore(cloned(state))
        except Exception as error:
            self._restore(before)
            raise ValueError(f"the state is damaged and was not loaded: {error!r}") from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.classifier.load_state_dict(state["classifier"])
        self.reset_state()
        self.load_state(state["state"])
        if self.guard is not None:
            self.guard.reset_state()
            self.guard.load_state(state["guard_state"])


@contextmanager
def learning_mode() -> Iterator[None]:
    """Keep a caller's no_grad or inference_mode from stopping the adapter's learning."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _usable(images: Any) -> Any:
    """Copy tensors made in inference mode, which autograd refuses."""
    return images.clone() if isinstance(images, Tensor) and images.is_inference() else images
