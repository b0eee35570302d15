"""The adapter process's loop: learn from samples, ask the guard, publish, and lose nothing when it is killed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttac.adaptation.adapter import Adapter, Step
from ttac.adaptation.guard import Guard
from ttac.serving.admin import Admin
from ttac.serving.channels import Channels
from ttac.serving.releases import Releases
from ttac.serving.snapshot import RETRY, Snapshot, state_digest
from ttac.serving.state_folder import StateFolder, lacks_memory
from ttac.serving.status import StatusBoard

IDLE = 0.02  # seconds between two looks for samples
SPANS = 64  # updates whose times are told


@dataclass(frozen=True)
class LearnerSettings:
    """How often a learner does what, and whose state it goes on from."""

    snapshot_every: float = 60.0  # seconds
    publish_every: float = 1.0  # seconds between two versions, at least
    keep: int = 16  # versions on disk
    chunk: int = 64  # samples between two looks for commands
    paused: bool = False  # at the start of a server; a process that is started again stays as it was
    skip_waiting: bool = False  # leave the samples at hand, which may be what the process died of
    identity: Mapping[str, Any] = field(default_factory=dict)  # settings that a state must match


class Learner:
    """Learns from the ring's samples with an adapter and publishes what the guard lets pass.

    `run` is `start`, then `turn` until it is to stop, then `finish`. A snapshot has the ring's position of its moment:
    after a kill, samples that came later and are still held are learned again, and the result is as if nothing was.
    """

    def __init__(
        self, adapter: Adapter, guard: Guard | None, channels: Channels, folder: StateFolder, settings: LearnerSettings
    ) -> None:
        self.adapter, self.guard, self.folder, self.settings = adapter, guard, folder, settings
        self.paused = settings.paused
        self._life, self._ring, self._progress = channels.life, channels.ring, channels.progress
        every, keep = settings.publish_every, settings.keep
        self.releases = Releases(adapter, guard, channels.weights, folder, every, keep)
        self.journal, self.tally = self.releases.journal, self.releases.tally
        self._snapshot_due = time.monotonic() + settings.snapshot_every
        self._saved: dict[str, Any] | None = None  # what the status says of the newest snapshot
        self._admin = Admin(self, channels.adapter_end)
        self._board = StatusBoard(channels)
        self._board.set(updating=False)
        self._found: dict[str, int] = {}  # counts of earlier processes
        self._saved_at: tuple[object, ...] = ()  # the moment of the snapshot, see `_moment`
        self._told: tuple[object, ...] = ()  # what was published last
        self._refused: str | None = None  # why the guard lets no samples through
        self._update_seconds: float | None = None
        self._losses: dict[str, float] = {}  # of the last step that had any
        self._spans: list[tuple[float, float]] = []
        self._wait_for_others = adapter.before_step
        adapter.before_step = self._before_step

    def run(self, stopping: Callable[[], bool]) -> None:
        """Learn until `stopping` says so."""
        self.start()
        with self._board.published():
            while not stopping():
                if not self.turn():
                    self._admin.wait(IDLE)
            self.finish()

    # Beginning and end

    def start(self) -> None:
        """Go on from the snapshot, else from the newest version, else from the source model, and have it served."""
        try:
            self.folder.claim(self.settings.identity)
        except OSError as error:
            self.journal.faults.note("folder", f"the state folder cannot be written: {error}")
        saved = self._restored()
        if saved is None:
            event, past, restored = "start", "", {}
            has = self._newest_loaded()
            self.releases.begin(has, origin=has, pending=False)
        else:
            event, past = "restore", f" and the snapshot after {self.tally.samples} samples"
            # Of what runs, which is that of the snapshot's file if all of it has got here.
            restored = {"state": state_digest(self.adapter.state_dict(), self._guard_state())}
            has = saved.version
            self.releases.begin(has, saved.origin, saved.pending)
        source = f"version {has}" if has else "the source model"
        fields = {"version": self.releases.served, "samples": self.tally.samples, **restored}
        self.journal.note(event, f"the adapter goes on from {source}{past}", **fields)
        if saved is not None and (self.releases.served != has or saved.guard is None):
            self.releases.tell_guard()
        if saved is not None and saved.life == self._life:
            self._ring.seek(saved.position)
            self.paused = saved.paused
            self._saved_at = self._moment()
        elif saved is not None and saved.paused:
            self.paused = True
            message = "the adapter is still paused, as it was when the server ended, until it is resumed"
            self.journal.note("pause", message, version=self.releases.served)
        if self.settings.skip_waiting:
            self._ring.seek(self._ring.pushed)
            self._saved_at = ()  # a successor must not go back to these samples
        if not self._saved_at:
            self.save()
        self.tell()

    def _restored(self) -> Snapshot | None:
        """Go on from the snapshot and give it, None where there is none that can be gone on from.

        A snapshot that only cannot be read now is no reason to forget what was learned: the process ends, and another
        one tries again.
        """
        try:
            content = self.folder.load_snapshot()
            if content is None:
                return None
            saved = Snapshot(**content)
            if self.guard is not None and saved.guard is not None:
                self.guard.load_state(saved.guard)
            self.adapter.load_state_dict(saved.adapter)
        except Exception as error:  # a damaged snapshot fails wherever it likes
            if isinstance(error, OSError) or lacks_memory(error):
                raise
            if self.guard is not None:
                self.guard.reset_state()
            self.journal.note("fault", f"the snapshot {self.folder.set_snapshot_aside()}: {error}")
            return None
        self._saved = saved.summary
        self._refused = None if self.guard is None else self.guard.refused
        vars(self.tally).update(saved.tally)
        self._found = saved.tally
        return saved

    def _guard_state(self) -> dict[str, Any] | None:
        return None if self.guard is None else self.guard.state()

    def _newest_loaded(self) -> int:
        """Go on from the newest version that can be read, with a memory that is new; 0 where there is none."""
        found = self.releases.newest()
        if found is None:
            return 0
        version, weights = found
        self.adapter.restart_from(weights)
        if self.guard is not None:
            self.guard.published(weights)
        return version

    def finish(self) -> None:
        """Publish what is pending, and save all."""
        if self.releases.pending:
            self.releases.settle()
        if self._moment() != self._saved_at:
            self.save()
        self.tell()
        self._board.publish()

    # Learning

    def turn(self) -> bool:
        """Answer commands, learn from a chunk, publish and save if it is time: whether there were samples."""
        self._admin.answer()
        updates = self.tally.updates
        taken = self._ring.take(0 if self.paused else self.settings.chunk)
        if len(taken):
            self._learn(torch.from_numpy(taken))
        if self.releases.is_due:
            self.releases.settle()
        if time.monotonic() >= self._snapshot_due and self._moment() != self._saved_at:
            self.save()
        self.tell()
        # How far updates have ever got in the stream, and how often all of it was learned: a successor that learns
        # again, and dies of the same samples, gets no further by this.
        if self.tally.updates > updates:
            self._progress[0] = max(self._progress.item(0), self._ring.position)
        self._progress[1] += not len(taken)
        return len(taken) > 0

    def _learn(self, images: Tensor) -> None:
        """Learn from images `[n, C, H, W]`; those that raise an error are passed over and leave no trace."""
        before, started = self.adapter.samples_seen, time.time()
        try:
            images = self._sound(images)
            admitted = self._admitted(images) if len(images) else images
            if not len(admitted):
                return
            self.adapter(admitted)
        except Exception as error:  # methods and networks raise what they like
            self._pass_over(len(images), error)
            if self.adapter.samples_seen != before:  # it is somewhere within an update
                self.releases.undo()
        else:
            self.tally.samples += len(admitted)
            self._note_updates(started, self.adapter.last_step)
        finally:
            self._board.set(updating=False)

    def _sound(self, images: Tensor) -> Tensor:
        """Leave out the images that the model does not take."""
        try:
            self.adapter.classifier.check(images)
        except (ValueError, TypeError) as error:
            if len(images) > 1:
                return torch.cat([self._sound(image) for image in images.split(1)])
            self._pass_over(1, error)
            return images[:0]
        return images

    def _pass_over(self, count: int, error: Exception) -> None:
        self.tally.bad_samples += count
        self.journal.faults.note("samples", f"samples were passed over ({count}): {error}")

    def _admitted(self, images: Tensor) -> Tensor:
        if self.guard is None:
            return images
        admitted = self.guard.admit(images)
        self.tally.refused_samples += len(images) - len(admitted)
        before, self._refused = self._refused, self.guard.refused
        if bool(before) != bool(self._refused):
            message = f"samples are not learned from: {self._refused}" if self._refused else "samples are learned from"
            self.journal.note("guard", message, version=self.releases.served)
        return admitted

    def _note_updates(self, started: float, step: Step) -> None:
        if step.update_seconds:
            self.releases.pending = True
            self.tally.updates += len(step.update_seconds)
            self._update_seconds = step.update_seconds[-1]
            found = {name: float(loss) for name, loss in step.losses.items()}
            self._losses = {name: loss for name, loss in found.items() if math.isfinite(loss)} or self._losses
            self._spans = [*self._spans, (started, time.time())][-SPANS:]

    def _before_step(self) -> None:
        self._board.set(updating=True)
        if self._wait_for_others is not None:
            self._wait_for_others()

    # What others see

    def save(self) -> str | None:
        """Write the snapshot, and give what went wrong, which is journalled and tried again."""
        moment, version, samples = self._moment(), self.releases.served, self.tally.samples
        snapshot = Snapshot(
            time=time.time(),
            version=version,
            origin=self.releases.origin,
            life=self._life,
            position=self._ring.position,
            paused=self.paused,
            pending=self.releases.pending,
            tally=dataclasses.asdict(self.tally),
            adapter=self.adapter.state_dict(),
            guard=self._guard_state(),
        )
        every = self.settings.snapshot_every
        try:
            self.folder.save_snapshot(dict(vars(snapshot)))
        except OSError as error:
            self._snapshot_due = time.monotonic() + min(RETRY, every)
            self.journal.faults.note("snapshot", f"the snapshot could not be written, and is tried again: {error}")
            return str(error)
        self._snapshot_due = time.monotonic() + every
        self._saved, self._saved_at = snapshot.summary, moment
        self.journal.note("snapshot", f"after {samples} samples", version=version, samples=samples)
        return None

    def _moment(self) -> tuple[object, ...]:
        """Give numbers that differ whenever a snapshot would."""
        return (self._ring.position, self.releases.served, self.paused, *dataclasses.astuple(self.tally))

    def tell(self) -> None:
        """Bring the status up to date."""
        tally, report = self.tally, self.releases.report
        reasons = [*(report.reasons if report else ()), *([self._refused] if self._refused else [])]
        state = "paused" if self.paused else "guarded" if reasons else "adapting"
        self._board.set(
            state=state,
            version=self.releases.served,
            samples=tally.samples,
            refused_samples=tally.refused_samples,
            updates=tally.updates,
            update_seconds=self._update_seconds,
            update_spans=self._spans,
            losses=self._losses,
            snapshot=self._saved,
            guard={
                "enabled": self.guard is not None,
                "ok": not reasons,
                "reasons": reasons,
                "measures": report.measures if report else {},
            },
            distances=report.distances if report else {},
            counters={**self.adapter.counters(), **dataclasses.asdict(tally)},
            since_start=tally.since(self._found),
        )
        told, self._told = self._told, (state, self.releases.served, tuple(reasons))
        if told != self._told:  # what people wait for is said at once
            self._board.publish()
