"""Latency of `ttac serve` with adaptation off, on, and while an update is under way (Linux).

    python benchmarks/serve.py --model BUNDLE --data cifar10-jpg [--seconds 20] [--connections 8] [--out FILE]

The adapter has a core of its own; predictor and load have one each where there are three cores, and share one where
there are two, which the rows say: what the load takes of it is part of all latencies, and of the capacity. That is
measured by a closed loop. Latencies are those of an open loop at half of it: requests are due at random times that do
not wait for answers, and a latency counts from when its request was due, so that a pause of the server is not hidden by
a load that pauses with it. Both sides take turns with the same times of requests, as a machine is noisy; a side's
percentiles are those of all of its turns together.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from load import Sent, at_once, at_random, drive, for_seconds
from served import ServerProcess, pin, stream_levels
from table import show, write
from timing import Bound, Row

from ttac.serving.learner import SPANS

MOST = 1.5  # p99 with adaptation on, to that with adaptation off
SHARE = 0.5  # of the capacity, in the open loop
WARM_UP, CAPACITY = 3.0, 5.0  # seconds
LOOK_EVERY = 2.0  # seconds; the status has the last updates alone
IMAGES = 1024
SIDES = {"off": False, "on": True}


@dataclass(frozen=True)
class Turn:
    """What a side did in one of its turns."""

    sent: list[Sent]
    spans: list[tuple[float, float]]  # of updates
    versions: int  # that were published meanwhile

    @property
    def latencies(self) -> list[float]:
        """Milliseconds of all answers."""
        return [one.milliseconds for one in self.sent if one.outcome == "answered"]

    @property
    def during_updates(self) -> list[float]:
        """Milliseconds of the answers while an update was under way."""
        return [one.milliseconds for one in self.sent if one.outcome == "answered" and one.overlaps(self.spans)]


class Bench:
    """A server on its cores, and load for it."""

    def __init__(self, server: ServerProcess, data: str, connections: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise ValueError("the adapter is to have a core of its own: this needs two cores or more")
        self.server, self.connections = server, connections
        self._predictor, self._load, self._adapter = {cores[0]}, {cores[1 if len(cores) > 2 else 0]}, {cores[-1]}
        self.where = "the load on a core of its own" if len(cores) > 2 else "the load on the predictor's core"
        self._name, self._images = stream_levels(server, data, IMAGES)

    def drive(self, schedule: Callable[[], Iterator[float]]) -> list[Sent]:
        """Pin all processes, which may have been started again, and send requests."""
        status = self.server.status()
        pin(status["predictor"]["pid"], self._predictor)
        pin(status["adapter"]["pid"], self._adapter)
        pin(os.getpid(), self._load)
        return drive(self.server.client, self._name, self._images, schedule, connections=self.connections)

    def capacity(self, seconds: float) -> float:
        """Measure the requests a second of a closed loop."""
        sent = self.drive(lambda: at_once(for_seconds(seconds)))
        answered = [one for one in sent if one.outcome == "answered"]
        return len(answered) / (max(one.done for one in sent) - min(one.due for one in sent))

    def turn(self, on: bool, rate: float, seconds: float, seed: int) -> Turn:
        """Measure latencies of one side; the adapter then rests, so that all updates have ended and are told."""
        self.server.adapt(on)
        started = time.time()
        with UpdateSpans(self.server) as spans:
            sent = self.drive(partial(at_random, rate, seconds, seed))
            ended = time.time()
            self.server.adapt(False)
        published = [one for one in self.server.events("publish", since=started) if one["time"] <= ended]
        return Turn(sent, sorted(span for span in spans.found if span[1] > started), len(published))


class UpdateSpans:
    """Collects the times of all updates while its block lasts, from a status that has the last ones alone."""

    def __init__(self, server: ServerProcess) -> None:
        self.found: set[tuple[float, float]] = set()
        self._server, self._ended, self._missed = server, threading.Event(), False
        self._thread = threading.Thread(target=self._repeat)

    def __enter__(self) -> UpdateSpans:
        self._look()
        self._missed = False  # those of before are none of this block's
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        if self._missed and error[0] is None:
            raise RuntimeError(f"more than {SPANS} updates within {LOOK_EVERY:g} s: choose options with longer ones")

    def _repeat(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self._look()

    def _look(self) -> None:
        told = {(start, end) for start, end in self._server.status()["adapter"]["update_spans"]}
        self._missed |= len(told) >= SPANS and not told & self.found
        self.found |= told


def rows_of(
    turns: dict[str, list[Turn]], capacities: dict[str, float], rate: float, connections: int, where: str
) -> list[Row]:
    """Sum the turns up; `where` says which core the load had."""
    rows = []
    for side, capacity in capacities.items():
        note = f"closed loop, {connections} connections of one image a request; {where}"
        rows.append(Row(f"most requests, adaptation {side}", capacity, "/s", None, note))
    kinds = {side: [turn.latencies for turn in turns[side]] for side in SIDES}
    kinds["on, during an update"] = [turn.during_updates for turn in turns["on"] if turn.during_updates]
    rows += [row for kind, latencies in kinds.items() for row in _percentiles(kind, latencies, rate)]
    rows += _ratios(kinds, where)
    refused = [one for side in SIDES for turn in turns[side] for one in turn.sent if one.outcome != "answered"]
    reasons = ", ".join(sorted({one.reason for one in refused})[:3])
    rows.append(Row("requests without an answer", len(refused), "requests", ("at most", 0), reasons))
    updates = [span for turn in turns["on"] for span in turn.spans if any(one.overlaps([span]) for one in turn.sent)]
    lasting = statistics.median(end - start for start, end in updates) if updates else 0.0
    rows.append(Row("length of an update", lasting, "s", None, f"median of {len(updates)} that met requests"))
    met, answers = (sum(map(len, latencies)) for latencies in (kinds["on, during an update"], kinds["on"]))
    note = "else the figures with adaptation on say little"
    rows.append(Row("answers with adaptation on, during an update", 100 * met / answers, "%", ("at least", 10), note))
    published = [turn.versions for turn in turns["on"]]
    note = f"by turn {', '.join(map(str, published))}"
    rows.append(Row("versions published during the turns", sum(published), "versions", ("at least", 1), note))
    return rows


def _percentiles(kind: str, latencies: list[list[float]], rate: float) -> list[Row]:
    """Give percentiles of all turns together, with each turn's own in the note."""
    pooled, rows = list(chain.from_iterable(latencies)), []
    for share in (50, 99) if pooled else ():
        by_turn = [float(np.percentile(one, share)) for one in latencies]
        note = f"{len(pooled)} requests at {rate:.0f} /s; by turn {', '.join(f'{one:.1f}' for one in by_turn)}, "
        note += f"the worst {max(by_turn):.1f}"
        rows.append(Row(f"p{share}, adaptation {kind}", float(np.percentile(pooled, share)), "ms", None, note))
    return rows


def _ratios(kinds: dict[str, list[list[float]]], where: str) -> list[Row]:
    """Compare the p99 of all turns together, and the worst turn's, with that of adaptation off."""
    pooled = {
        kind: float(np.percentile(list(chain.from_iterable(found)), 99)) for kind, found in kinds.items() if found
    }
    rows = []
    for kind in list(pooled)[1:]:
        worst = max(float(np.percentile(one, 99)) for one in kinds[kind]) / pooled["off"]
        note = f"all turns together, {where}; the worst turn {worst:.2f} x"
        bound: Bound | None = ("at most", MOST) if kind == "on" else None
        rows.append(Row(f"p99, adaptation {kind} / off ({where})", pooled[kind] / pooled["off"], "x", bound, note))
    return rows


def main(
    model: Path,
    data: str = "cifar10-jpg",
    seconds: float = 20.0,
    connections: int = 8,
    turns: int = 3,
    method: str = "ttac++",
    preset: str | None = None,
    options: list[str] | None = None,
    out: Path | None = None,
) -> None:
    """Measure and print a table.

    Args:
        model: bundle of ttac train.
        data: images, which come under Gaussian noise.
        seconds: of a turn.
        connections: of the load.
        turns: of each side.
        method: that adapts.
        preset: of the method; the server's own choice unless given.
        options: of the method, as name=value.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    flags = ["--method", method, "--threads-predict", "1", "--threads-adapt", "1", "--paused"]
    flags += [] if preset is None else ["--preset", preset]
    flags += [part for option in options or [] for part in ("--set", option)]
    with tempfile.TemporaryDirectory() as folder, ServerProcess(model, Path(folder), flags) as server:
        bench = Bench(server, data, connections)
        bench.capacity(WARM_UP)
        capacities = {}
        for side, on in SIDES.items():
            server.adapt(on)
            capacities[side] = bench.capacity(CAPACITY)
        rate = SHARE * capacities["off"]
        found: dict[str, list[Turn]] = {side: [] for side in SIDES}
        for number in range(turns):
            for side, on in SIDES.items():
                found[side].append(bench.turn(on, rate, seconds, seed=number))
        status = server.status()
    rows = rows_of(found, capacities, rate, connections, bench.where)
    show(rows)
    if out is not None:
        write(rows, out, load=_details(found), adapter=status["adapter"], flags=flags)


def _details(turns: dict[str, list[Turn]]) -> dict[str, list[dict[str, Any]]]:
    """Give percentiles and counts of each turn."""
    return {
        side: [
            {
                "requests": len(turn.sent),
                "updates": len(turn.spans),
                "during_updates": len(turn.during_updates),
                "versions": turn.versions,
                **{f"p{share}_ms": float(np.percentile(turn.latencies, share)) for share in (50, 90, 99, 99.9)},
            }
            for turn in found
        ]
        for side, found in turns.items()
    }


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
