"""What jobs of hours share: they end cleanly on a signal, and never share or mix up the folder they write to."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ttac.common.files import replacing

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
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if wait is None:
                raise ValueError(f"another process is writing to {folder}") from error
            wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file")
    if not out.exists():
        return False
    try:
        found = there()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out} is a file of something else: choose another --out") from error
    check_same_settings(out, found, settings)
    return True


def is_complete(out: Path, result: str, settings: dict[str, Any], there: Callable[[], dict[str, Any]]) -> bool:
    """Tell whether `out` holds the file that a job writes last; raise an error where it is not of these settings.

    `there` reads the settings that the result came from.
    """
    found = _result(out, result, there)
    if found is None:
        return False
    check_same_settings(out, found, settings)
    (out / PROGRESS).unlink(missing_ok=True)
    return True


def read_record(out: Path, record: str, kind: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Read the JSON record in `out` of the format `kind`, None where there is none.

    Raises an error where it is not of these settings. The record vouches for the files that it lists, and whoever
    reads it finds out whether they are whole; other files may be of a job that adds to them, so its progress stays.
    """

    def there() -> dict[str, Any]:
        content = dict(json.loads((out / record).read_text()))
        if content["format"] != kind:
            raise ValueError(f"expected the format {kind}")
        return {**content, "settings": dict(content["settings"])}

    found = _result(out, record, there)
    if found is not None:
        check_same_settings(out, found["settings"], settings)
    return found


def _result(out: Path, result: str, there: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if not (out / result).exists():
        return None
    try:
        return there()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out} holds a {result} of something else: choose another --out") from error


def save_progress(out: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, atomically; `content` has the settings among it."""
    # Through a file of Python's, which says that a disk is full where torch's own raises something else.
    with replacing(out / PROGRESS) as draft, draft.open("wb") as file:
        torch.save(content, file)


def saved_progress(
    out: Path, settings: dict[str, Any], results: Sequence[str], check: Callable[[dict[str, Any]], object]
) -> dict[str, Any] | None:
    """Read the checkpoint in `out`, None where there is none; raise an error where it is not of these settings.

    `results` are names of files that only a finished job leaves, and `check` raises where the content is not whole.
    """
    path = out / PROGRESS
    if not path.exists():
        taken = [name for name in results if (out / name).exists()]
        if taken:
            raise ValueError(f"{out} holds {', '.join(taken)} of something else: choose another --out")
        return None
    try:
        # Each tensor comes back to the device it was on, the memory of an adapter too. Where that device is gone, the
        # settings below are to say so.
        anywhere = None if torch.cuda.is_available() else "cpu"
        saved: dict[str, Any] = torch.load(path, map_location=anywhere, weights_only=True)
        there = dict(saved["settings"])
        check(saved)
    except Exception as error:  # a damaged or forged file fails wherever it likes
        raise ValueError(f"{path} is damaged, delete {out} and start again: {error}") from error
    check_same_settings(out, there, settings)
    return saved


def begin(out: Path, settings: dict[str, Any], results: Sequence[str]) -> None:
    """Note the settings of a job whose files say themselves how far they are; see `saved_progress`."""
    if saved_progress(out, settings, results, lambda content: None) is None:
        save_progress(out, {"settings": settings})


def image_progress(console: Console, note: str) -> Progress:
    """Show how many images are done, a note that the task's fields fill in, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(note),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600.0,  # a batch may take minutes
    )
