"""The process that starts the other two, holds what they share, and starts them again when they die."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

# Both children are forks of this process: what is imported here is at hand when one is started again. Nothing may be
# computed with torch here, as its threads do not outlive a fork.
from ttac.common.resumable import alone_in
from ttac.serving.adapter import run_adapter
from ttac.serving.channels import Channels
from ttac.serving.journal import Journal
from ttac.serving.logs import write_logs
from ttac.serving.predictor import run_predictor
from ttac.serving.prepare import Facts, prepare
from ttac.serving.server import Server
from ttac.serving.settings import ServeJob
from ttac.serving.state_folder import StateFolder

TOKEN = "token"
PAUSE = 0.1  # seconds before the first new start; each end without progress doubles it
LONGEST_PAUSE = 30.0
STEADY = 600.0  # seconds after which a process that did nothing at all may have been sound
LAST_WORK = 30.0  # seconds that the adapter has to end an update and write its state
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """A process that is to run, whatever happens to it."""

    def __init__(self, name: str, main: Callable[[int], int], progress: Callable[[], int]) -> None:
        self.name = name
        self.pid: int | None = None
        self.failures = 0  # ends in a row before which nothing was got done
        self.due = 0.0
        self._main = main  # takes `failures`
        self._progress = progress  # a number that grows with what the process gets done
        self._done = -1  # that number when the process ended last
        self._started = time.monotonic()

    def start(self, prepared: Callable[[], None]) -> None:
        """Fork; `prepared` is what the child does first."""

        def main() -> int:
            prepared()
            return self._main(self.failures)

        self._started = time.monotonic()
        self.pid = forked(main)

    def ended(self) -> str | None:
        """Say how the process ended, None while it runs."""
        if self.pid is None:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.pid = None
        code = os.waitstatus_to_exitcode(status)
        return f"by signal {-code}" if code < 0 else f"with code {code}"

    def plan_restart(self) -> float:
        """Choose when to start again, and give the seconds until then.

        Time alone tells little: what a process dies of may come after a long load, or a long update.
        """
        now, done = time.monotonic(), self._progress()
        self.failures = 0 if done > self._done or now - self._started > STEADY else self.failures + 1
        self._done = done
        pause = min(PAUSE * 2 ** min(self.failures, 16), LONGEST_PAUSE)
        self.due = now + pause
        return pause

    def kill(self, signum: int) -> None:
        """Send a signal, if the process runs."""
        if self.pid is not None:
            os.kill(self.pid, signum)


def run_serve(job: ServeJob, console: Console) -> None:
    """Serve until a signal ends it."""
    if job.state.exists() and not job.state.is_dir():
        raise ValueError(f"--state {job.state} is a file; name a folder")
    job.state.mkdir(0o700, parents=True, exist_ok=True)  # it keeps images of clients
    with alone_in(job.state), _bound(job) as listening:
        facts = _prepared(job)
        admin_token = job.token or _own_token(job.state)
        restarts = np.frombuffer(mmap.mmap(-1, 16), np.int64)
        channels = Channels.make(facts.shape, facts.weights_size, job.buffer)
        server = Server(job, facts, channels, listening, admin_token, restarts)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        console.print(f"{job.name} at {address}/v2/models/{job.name}/infer", markup=False)
        # A secret is for the eyes of whoever sits there, not for files that keep what was printed.
        secret = f"#token={admin_token}" if console.is_terminal and not job.token else ""
        console.print(f"page at {address}/{secret}", markup=False)
        if not (job.token or secret):
            console.print(f"token of its buttons in {job.state / TOKEN}", markup=False)
        write_logs("supervisor")
        _Supervisor(server, Journal(StateFolder(job.state).events)).run()


class _Supervisor:
    def __init__(self, server: Server, journal: Journal) -> None:
        channels = server.channels
        self._listening = server.listening
        self._journal = journal
        self._predictor = Child("predictor", partial(run_predictor, server), lambda: channels.ring.pushed)
        # Not by the ring's position: the predictor moves that on too, by writing over what is old.
        self._adapter = Child("adapter", partial(run_adapter, server), lambda: int(channels.progress.sum()))
        self._restarts = server.restarts
        self._read_end, self._write_end = os.pipe()  # closed by the death of this process, which ends the children too
        self._signals: list[int] = []
        self._grace = server.job.timeout

    def run(self) -> None:
        """Keep both processes running until the first signal, then let them end."""
        for signum in SIGNALS:
            signal.signal(signum, lambda number, _frame: self._signals.append(number))
        children = (self._predictor, self._adapter)
        for child in children:
            self._start(child)
        while not self._signals:
            for number, child in enumerate(children):
                self._look_after(number, child)
            time.sleep(0.02)
        self._listening.close()  # who comes now is refused at once, and not when all has ended
        # One after the other, so that what is answered last is handed on still.
        self._end(self._predictor, self._grace + 2)
        self._end(self._adapter, LAST_WORK)

    def _look_after(self, number: int, child: Child) -> None:
        if (how := child.ended()) is not None:
            pause = child.plan_restart()
            self._journal.note("exit", f"the {child.name} ended {how}, and starts again in {pause:.1f} s")
        if child.pid is None and time.monotonic() >= child.due:
            self._restarts[number] += 1
            self._journal.note("restart", f"the {child.name} starts again", restarts=int(self._restarts[number]))
            self._start(child)

    def _start(self, child: Child) -> None:
        try:
            child.start(self._in_child)
        except OSError as error:  # no memory or no process left, which may be why it has to be started
            pause = child.plan_restart()
            self._journal.note("fault", f"the {child.name} cannot be started ({error}): again in {pause:.1f} s")

    def _end(self, child: Child, grace: float) -> None:
        """Let a process finish what it has begun; a second signal, or too long a time, ends it at once."""
        child.kill(signal.SIGTERM)
        until = time.monotonic() + grace
        while child.pid is not None and child.ended() is None:
            if len(self._signals) > 1 or time.monotonic() > until:
                child.kill(signal.SIGKILL)
            time.sleep(0.02)

    def _in_child(self) -> None:
        """Leave the signals to the child, which ends when this process does."""
        os.close(self._write_end)
        for signum in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; this process passes them on
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

        _when_closed(self._read_end, lambda: os.kill(os.getpid(), signal.SIGTERM))


def _when_closed(read_end: int, act: Callable[[], None]) -> None:
    """Act when the other end of a pipe is closed, as it is by the death of the process that has it."""

    def watch() -> None:
        os.read(read_end, 1)
        act()

    threading.Thread(target=watch, daemon=True).start()


def forked(main: Callable[[], int]) -> int:
    """Run `main` in a fork of this process, which ends with the code that it gives, and return the process number.

    Signals wait until the child has handlers of its own: those of this process would swallow them there.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepared(job: ServeJob) -> Facts:
    """Prepare in a process of its own, which ends with this one: this one must not compute."""
    read_end, write_end = os.pipe()
    parent_read_end, parent_write_end = os.pipe()

    def main() -> int:
        os.close(parent_write_end)
        _when_closed(parent_read_end, lambda: os._exit(1))
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            answer = {"facts": dataclasses.asdict(prepare(job))}
        except (ValueError, TypeError, OSError, ImportError) as error:
            answer = {"error": {"message": str(error)}}
        os.write(write_end, json.dumps(answer).encode())
        return 0

    pid = forked(main)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    os.close(parent_read_end)
    os.close(parent_write_end)
    if not text:
        raise ValueError("the model could not be prepared; what it printed says why")
    answer = json.loads(text)
    if "error" in answer:
        raise ValueError(answer["error"]["message"])
    facts = answer["facts"]
    return Facts(tuple(facts["shape"]), facts["weights_size"], facts["identity"])


@contextmanager
def _bound(job: ServeJob) -> Iterator[socket.socket]:
    """Listen before there is a process that answers, and as long as none does: requests wait for it meanwhile."""
    family = socket.AF_INET6 if ":" in job.host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((job.host, job.port))
        except OSError as error:
            reason = f"{error.strerror}: choose another --host or --port"
            raise OSError(f"cannot listen at {job.host}:{job.port}: {reason}") from error
        listening.listen(1024)
        yield listening


def _own_token(state: Path) -> str:
    """Give the token of the calls that change something, made with the state folder."""
    path = state / TOKEN
    token = path.read_text().strip() if path.exists() else ""
    if token:
        return token
    token = secrets.token_urlsafe(24)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft.touch(0o600)
    try:
        draft.write_text(token + "\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return token
