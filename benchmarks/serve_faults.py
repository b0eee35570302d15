"""Kills of the processes of `ttac serve` under load: whether any answer is wrong or old, and what comes back (Linux).

    python benchmarks/serve_faults.py --model BUNDLE --data cifar10-jpg [--kills 20] [--rate 50] [--out FILE]

Predictor, adapter or both are ended by SIGKILL at random times. Of every answer,

- the logits are computed again with the weights of the version that it names, and with the versions before and after,
  which must not fit;
- the version is at least the newest that was published a second before the request, and at least that of every answer
  that had come before the request.

A request is lost only with a predictor that may have had it: one that began when that was gone waits at the listening
socket. The adapter is stopped for a moment before it is killed, so that the snapshot on disk is surely the one that it
leaves; the state that its successor has in memory must have the same check sum.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answers import LATEST, check_logits, logits_by_version, older_than_answered, older_than_published
from jsonargparse import auto_cli
from load import Sent, at_random, drive
from numpy.typing import NDArray
from served import ServerProcess, stream_levels
from table import show, write
from timing import Row

from ttac.serving.snapshot import state_digest
from ttac.serving.state_folder import StateFolder

TARGETS = (("predictor",), ("adapter",), ("predictor", "adapter"))
PAUSE = (0.5, 9.0)  # seconds between two kills; the next start waits longer where one came within ten of the last
IMAGES = 64
SMALL = ("window=64", "queue=256", "walk=64", "passes=1")  # updates that end between two kills
LONGEST_WAIT = 30.0  # seconds for the next version, before every other kill: a busy machine is to learn something too
DYING = 0.1  # seconds of a kill, in which a request may still reach the one that is killed


@dataclass(frozen=True)
class Left:
    """What a killed adapter left on disk."""

    samples: int  # of the snapshot
    state: str  # check sum of the snapshot's adapter and guard
    version: int  # the newest one


@dataclass(frozen=True)
class Fault:
    """A kill, and what came after it."""

    killed: tuple[str, ...]
    time: float
    gone: float  # when the predictor was, with its connections
    seconds: dict[str, float]  # until each of them was back
    left: Left | None = None  # None: the adapter was not killed, or had no snapshot
    restart: dict[str, Any] = field(default_factory=dict)  # the next adapter's event of its start

    def explains(self, lost: Sent) -> bool:
        """Tell whether a request may have been in the predictor that was killed."""
        return "predictor" in self.killed and lost.began <= max(self.time + DYING, self.gone) and lost.done >= self.time

    @property
    def restored(self) -> bool:
        """Whether the next adapter went on with what the killed one had left, if that had left any snapshot."""
        if self.left is None:
            return self.restart["event"] == "start"
        found = self.restart
        return found["event"] == "restore" and asdict(self.left).items() <= found.items()


def strike(server: ServerProcess, killed: tuple[str, ...], folder: Path) -> Fault:
    """Kill processes of the server, and wait until new ones are there."""
    status = server.status()
    pids = {name: int(status[name]["pid"]) for name in killed}
    state, copy, newest = StateFolder(server.state), folder / "left.pt", 0
    copy.unlink(missing_ok=True)
    if "adapter" in killed:
        os.kill(pids["adapter"], signal.SIGSTOP)
        _wait_for_state(pids["adapter"], "T")
        newest = state.newest()
        with suppress(FileNotFoundError):
            shutil.copy(state.snapshot, copy)
    when = time.time()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    if "predictor" in killed:
        _wait_for_state(pids["predictor"], "gone")
    gone = time.time()
    seconds: dict[str, float] = {}

    def back() -> bool:
        now = server.status()
        for name in killed:
            if now[name]["pid"] != pids[name] and now[name].get("up", True):
                seconds.setdefault(name, time.time() - when)
        return len(seconds) == len(killed)

    server.wait(back)
    if "adapter" not in killed:
        return Fault(killed, when, gone, seconds)
    restart = server.events("start", "restore", since=when)[0]
    return Fault(killed, when, gone, seconds, _left(copy, newest), restart)


def wait_for_version(server: ServerProcess, since: float) -> None:
    """Wait until a version is published, but not for ever: the adapter may be kept from it."""
    until = time.monotonic() + LONGEST_WAIT
    while not server.events("publish", since=since) and time.monotonic() < until:
        time.sleep(0.2)


def _wait_for_state(pid: int, wanted: str) -> None:
    """Wait until a process is in a state; it is gone when its parent knows, and all of its threads have ended."""
    found = ""
    while found != wanted:
        try:
            found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            found = "gone"
        time.sleep(0.001)


def _left(snapshot: Path, newest: int) -> Left | None:
    if not snapshot.exists():
        return None
    content = torch.load(snapshot, map_location="cpu", weights_only=True)
    return Left(int(content["tally"]["samples"]), state_digest(content["adapter"], content["guard"]), newest)


def rows_of(
    sent: list[Sent],
    faults: list[Fault],
    logits: dict[int, NDArray[np.float32]],
    published: list[tuple[float, int]],
) -> list[Row]:
    """Sum up what the kills did."""
    answered = [one for one in sent if one.outcome == "answered"]
    named = Counter(" and ".join(fault.killed) for fault in faults)
    kills = ", ".join(f"{count} of {name}" for name, count in named.items())
    wrong, unclear, largest = check_logits(answered, logits)
    share = 100 * unclear / max(len(answered), 1)
    old, fallen = older_than_published(answered, published), older_than_answered(answered)
    of_all = f"published {LATEST:g} s or more before the request; {len(published)} were published"
    return [
        Row("answers that were checked", len(answered), "requests", None, f"under {len(faults)} kills: {kills}"),
        Row("wrong answers", wrong, "requests", ("at most", 0), f"logits of the others within {largest:.1e}"),
        Row("answers that a neighbouring version fits too", share, "%", ("at most", 1), "else the check means little"),
        Row("versions that answered", len({one.version for one in answered}), "versions", ("at least", 5), ""),
        Row("answers of a version before the newest", len(old), "requests", ("at most", 0), of_all),
        Row("answers of a version before one seen", len(fallen), "requests", ("at most", 0), "when the request began"),
        *_losses(sent, faults),
        *_returns(faults),
    ]


def _losses(sent: list[Sent], faults: list[Fault]) -> list[Row]:
    """Count requests without an answer, by their reasons."""
    refused = [one for one in sent if one.outcome == "refused"]
    lost = [one for one in sent if one.outcome == "lost" and any(fault.explains(one) for fault in faults)]
    rest = [one for one in sent if one.outcome in ("lost", "failed") and one not in lost]
    longest = max((fault.gone - fault.time for fault in faults if "predictor" in fault.killed), default=0.0)
    known = f"began within {DYING:g} s of its kill, or before it was gone ({longest:.2f} s at most)"
    reasons = "; ".join(sorted({one.reason for one in rest})[:3])
    return [
        Row("requests refused", len(refused), "requests", None, "429 or 503"),
        Row("requests lost with their predictor", len(lost), "requests", None, known),
        Row("requests lost without a reason", len(rest), "requests", ("at most", 0), reasons),
    ]


def _returns(faults: list[Fault]) -> list[Row]:
    """Tell how long processes were away, and what they came back with."""
    rows = []
    for name in ("predictor", "adapter"):
        times = [fault.seconds[name] for fault in faults if name in fault.killed]
        if times:
            note = f"{max(times):.1f} at most; pauses grow where it dies soon after a start"
            rows.append(Row(f"until the {name} is back", statistics.median(times), "s", None, note))
    restarts = [fault for fault in faults if "adapter" in fault.killed]
    other = [fault for fault in restarts if not fault.restored]
    note = f"of {len(restarts)}; check sums of the file and of what runs"
    note += f"; {other[0].left} on disk, then: {other[0].restart}" if other else ""
    rows.append(Row("restarts with another state than the snapshot", len(other), "restarts", ("at most", 0), note))
    return rows


def main(
    model: Path,
    data: str = "cifar10-jpg",
    kills: int = 20,
    connections: int = 4,
    rate: float = 50.0,
    method: str = "ttac++",
    options: list[str] | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Kill, check and print a table.

    Args:
        model: bundle of ttac train.
        data: images, which come under Gaussian noise.
        kills: how many.
        connections: of the load.
        rate: requests a second, which are to leave the adapter something of the processor.
        method: that adapts.
        options: of the method, as name=value; small windows and one pass unless given.
        seed: of times and targets.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    flags = ["--method", method, "--threads-predict", "1", "--threads-adapt", "1"]
    flags += ["--keep", "1000000", "--publish-every", "0.5", "--snapshot-every", "2"]
    flags += [part for option in options or SMALL for part in ("--set", option)]
    choose, ended = random.Random(seed), threading.Event()
    faults: list[Fault] = []
    targets = list(islice(cycle(TARGETS), kills))  # each as often as the others
    choose.shuffle(targets)
    found: list[list[Sent]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with ServerProcess(model, folder, flags) as server:
            name, images = stream_levels(server, data, IMAGES)

            def send() -> None:
                def schedule() -> Iterator[float]:
                    return takewhile(lambda _: not ended.is_set(), at_random(rate, math.inf, seed))

                found.append(drive(server.client, name, images, schedule, connections=connections, logits=True))

            load = threading.Thread(target=send)
            load.start()
            try:
                for number, target in enumerate(targets):
                    if number % 2:
                        wait_for_version(server, since=faults[-1].time)
                    time.sleep(choose.uniform(*PAUSE))
                    faults.append(strike(server, target, folder))
                wait_for_version(server, since=faults[-1].time)
                time.sleep(LATEST)
            finally:
                ended.set()
                load.join()
        published = [(one["time"], one["version"]) for one in server.events("publish")]
        logits = logits_by_version(model, server.state, images)
    (sent,) = found
    rows = rows_of(sent, faults, logits, published)
    show(rows)
    if out is not None:
        write(rows, out, faults=[asdict(fault) for fault in faults], flags=flags)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
