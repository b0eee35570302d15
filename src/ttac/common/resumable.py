"""What jobs of hours share: they end cleanly on a signal, and never share or mix up the folder they write to."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ttac.common.files import write_pickle

PROGRESS = "progress.pt"


class StoppedError(Exception):
    """A signal ended the job; the message says how to go on."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def signals_noted(console: Console) -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM, for the loop to end after its batch; the second one ends it at once."""
    noted: list[int] = []

    def note(signum: int, _frame: object) -> None:
        if noted:
            raise StoppedError(signum, "stopped at once; the same command goes on from the last checkpoint")
        noted.append(signum)
        console.print("stopping after this batch; interrupt again to stop at once", markup=False)

    with _handling(note):
        yield noted


@contextmanager
def ended_by_signals(message: str) -> Iterator[None]:
    """Raise a `StoppedError` with this message at a SIGINT or SIGTERM, wherever the block is."""

    def stop(signum: int, _frame: object) -> None:
        raise StoppedError(signum, message)

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM, where this is the main thread: Python leaves signals to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, earlier in previous.items():
            signal.signal(signum, earlier)


@contextmanager
def alone_in(folder: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Keep other processes of the same job out of `folder`, which is made if need be.

    Where another one is in it, raise an error; or say so with `wait`, and wait until it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        if not _lock(folder, held, blocking=False):
            if wait is None:
                raise ValueError(f"another process is writing to {folder}")
            wait()
            _lock(folder, held, blocking=True)
        yield


def _lock(folder: Path, held: ExitStack, *, blocking: bool) -> bool:
    """Lock a folder until `held` ends; False says that another process has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows, which locks files alone
        from filelock import FileLock, Timeout

        try:
            held.enter_context(FileLock(folder / ".lock").acquire(blocking=blocking))
        except Timeout:
            return False
        return True
    # The folder itself: a file in it would stay there, and cannot be made on a full disk or without the right to write.
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings as a JSON file keeps them; torch would not load the command line's own number types.

    >>> plain_settings({"size": (32, 32)})
    {'size': [32, 32]}
    """
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def check_same_settings(out: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise an error that names what differs between the settings a folder was begun with and those of now.

    >>> check_same_settings(Path("out"), {"lr": 0.1}, {"lr": 0.2})
    Traceback (most recent call last):
    ValueError: out is of another run (lr: 0.1 there, 0.2 now): choose another --out, or delete it
    """
    differing = differing_settings(there, now)
    if differing:
        raise ValueError(f"{out} is of another run ({differing}): choose another --out, or delete it")


def differing_settings(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name what differs between the settings of a file that is there and those of now.

    >>> differing_settings({"lr": 0.1}, {"lr": 0.2})
    'lr: 0.1 there, 0.2 now'
    """
    return "; ".join(f"{key}: {there.get(key)} there, {now[key]} now" for key in now if there.get(key) != now[key])


def file_is_there(out: Path, settings: dict[str, Any], there: Callable[[], dict[str, Any]]) -> bool:
    """Tell whether a job's only file is there; raise an error where it is not of these settings.

    `there` reads the settings that the file came from.
    """
    if not out.exists():
        return False
    found = _read(lambda: {"settings": there()}, f"{out} is a file")
    check_same_settings(out, found["settings"], settings)
    return True


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a JSON record of the format `kind`, and raise an error where it is something else."""
    content = dict(json.loads(path.read_text()))
    if content["format"] != kind:
        raise ValueError(f"expected the format {kind}")
    return content


def _read(read: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    try:
        found = read()
        return {**found, "settings": dict(found["settings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{what} of something else: choose another --out") from error


class Checkpoints:
    """Has a job's state saved now and then, and ends the job after the step in which a signal came."""

    def __init__(self, every: float, noted: Sequence[int], save: Callable[[], None]) -> None:
        self._every, self._noted, self._save = every, noted, save
        self._last = time.monotonic()

    def after_step(self, done: str, finished: bool = False) -> None:
        """Save where it is time to, and raise an error that says what is `done` where a signal has come."""
        if self._noted or finished or time.monotonic() - self._last >= self._every:
            self._save()
            self._last = time.monotonic()
        if self._noted:
            raise StoppedError(self._noted[0], f"stopped after {done}; the same command goes on from there")


class JobFolder:
    """The folder that a job of some settings writes to, and goes on in from its checkpoint."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out, self.settings = out, plain_settings(settings)

    def record(self, name: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Give what `read` makes of the file `name`, a record with the settings among it; None where there is no file.

        Raises an error where it is not of these settings. The record vouches for the files that it lists, and whoever
        reads it finds out whether they are whole; other files may be of a job that adds to them, so its progress stays.
        """
        if not (self.out / name).exists():
            return None
        found = _read(read, f"{self.out} holds a {name}")
        check_same_settings(self.out, found["settings"], self.settings)
        return found

    def is_complete(self, name: str, read: Callable[[], dict[str, Any]], console: Console) -> bool:
        """Tell, and say, whether the file is there that the job writes last; see `record`."""
        if self.record(name, read) is None:
            return False
        self.finish()
        console.print(f"{self.out} is complete: nothing to do", markup=False)
        return True

    def save(self, **content: Any) -> None:
        """Write a checkpoint, atomically."""
        write_pickle(self.out / PROGRESS, {"settings": self.settings, **content})

    def saved(self, results: Sequence[str], check: Callable[[dict[str, Any]], object]) -> dict[str, Any] | None:
        """Read the checkpoint, None where there is none; raise an error where it is not of these settings.

        `results` are names of files that only a finished job leaves, and `check` raises where the content is not whole.
        """
        path = self.out / PROGRESS
        if not path.exists():
            taken = [name for name in results if (self.out / name).exists()]
            if taken:
                raise ValueError(f"{self.out} holds {', '.join(taken)} of something else: choose another --out")
            return None
        import torch  # not before it is due: the command line waits for this module

        try:
            # Each tensor comes back to the device it was on, the memory of an adapter too. Where that device is gone,
            # the settings below are to say so.
            anywhere = None if torch.cuda.is_available() else "cpu"
            saved: dict[str, Any] = torch.load(path, map_location=anywhere, weights_only=True)
            there = dict(saved["settings"])
            check(saved)
        except Exception as error:  # a damaged or forged file fails wherever it likes
            raise self.damaged(error) from error
        check_same_settings(self.out, there, self.settings)
        return saved

    def damaged(self, error: Exception) -> ValueError:
        """Make the error that says what to do with a checkpoint that cannot be read."""
        return ValueError(f"{self.out / PROGRESS} is damaged, delete {self.out} and start again: {error}")

    def finish(self) -> None:
        """Delete the checkpoint, if there is one."""
        (self.out / PROGRESS).unlink(missing_ok=True)


def image_progress(console: Console, note: str) -> Progress:
    """Show how many images, or steps, are done, a note that the task's fields fill in, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(note),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600.0,  # a batch may take minutes
    )
