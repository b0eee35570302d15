"""The process that starts the other two, holds what they share, and starts them again when they die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.context import ForkProcess
from pathlib import Path

from rich.console import Console

# Both children are forks of this process: what is imported here is at hand when one is started again. Nothing may be
# computed with torch here, as its threads do not outlive a fork.
from ttac.common.files import check_space, writing
from ttac.common.resumable import alone_in
from ttac.serving.adapter import run_adapter
from ttac.serving.channels import Channels, Server
from ttac.serving.journal import Journal
from ttac.serving.logs import write_logs
from ttac.serving.predictor import run_predictor
from ttac.serving.prepare import Facts, prepare
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

    def __init__(self, name: str, main: Callable[[int], None], progress: Callable[[], int]) -> None:
        self.name = name
        self.process: ForkProcess | None = None
        self.failures = 0  # ends in a row before which nothing was got done
        self.due = 0.0
        self._main = main  # takes `failures`
        self._progress = progress  # a number that grows with what the process gets done
        self._done = -1  # that number when the process ended last
        self._started = time.monotonic()

    def start(self) -> None:
        """Fork."""
        self._started = time.monotonic()
        self.process = forked(partial(self._main, self.failures))

    def ended(self) -> str | None:
        """Say how the process ended, None while it runs."""
        if self.process is None or (code := self.process.exitcode) is None:
            return None
        self.process = None
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


def run_serve(job: ServeJob, console: Console) -> None:
    """Serve until a signal ends it."""
    job.state.mkdir(0o700, parents=True, exist_ok=True)  # it keeps images of clients
    with alone_in(job.state), _bound(job) as listening:
        facts = _prepared(job)
        check_space(job.state, 2 * facts.weights_size)  # a version, and a snapshot, which is larger
        admin_token = job.token or _own_token(job.state)
        channels = Channels(facts.shape, facts.weights_size, job.buffer)
        server = Server(job, facts, channels, listening, admin_token)
        write_logs("supervisor")
        supervisor = _Supervisor(server, Journal(StateFolder(job.state).events))
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        console.print(f"{job.served_name} at {address}/v2/models/{job.served_name}/infer", markup=False)
        # A secret is for the eyes of whoever sits there, not for files that keep what was printed.
        secret = f"#token={admin_token}" if console.is_terminal and not job.token else ""
        console.print(f"page at {address}/{secret}", markup=False)
        if not (job.token or secret):
            console.print(f"token of its buttons in {job.state / TOKEN}", markup=False)
        supervisor.run()


class _Supervisor:
    def __init__(self, server: Server, journal: Journal) -> None:
        channels = server.channels
        self._server, self._journal = server, journal
        self._predictor = Child("predictor", partial(run_predictor, server), lambda: channels.ring.pushed)
        # Not by the ring's position: the predictor moves that on too, by writing over what is old.
        self._adapter = Child("adapter", partial(run_adapter, server), lambda: int(channels.progress.sum()))
        self._signals: list[int] = []
        for signum in SIGNALS:
            signal.signal(signum, lambda number, _frame: self._signals.append(number))

    def run(self) -> None:
        """Keep both processes running until the first signal, then let them end."""
        children = (self._predictor, self._adapter)
        for child in children:
            self._start(child)
        while not self._signals:
            for number, child in enumerate(children):
                self._look_after(number, child)
            time.sleep(0.02)
        self._server.listening.close()  # who comes now is refused at once, and not when all has ended
        # One after the other, so that what is answered last is handed on still.
        self._end(self._predictor, self._server.job.timeout + 2)
        self._end(self._adapter, LAST_WORK)

    def _look_after(self, number: int, child: Child) -> None:
        if (how := child.ended()) is not None:
            pause = child.plan_restart()
            self._journal.note("exit", f"the {child.name} ended {how}, and starts again in {pause:.1f} s")
        if child.process is None and time.monotonic() >= child.due:
            restarts = self._server.channels.restarts
            restarts[number] += 1
            self._journal.note("restart", f"the {child.name} starts again", restarts=int(restarts[number]))
            self._start(child)

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:  # no memory or no process left, which may be why it has to be started
            pause = child.plan_restart()
            self._journal.note("fault", f"the {child.name} cannot be started ({error}): again in {pause:.1f} s")

    def _end(self, child: Child, grace: float) -> None:
        """Let a process finish what it has begun; a second signal, or too long a time, ends it at once."""
        if child.process is not None:
            child.process.terminate()
        until = time.monotonic() + grace
        while child.process is not None and child.ended() is None:
            if len(self._signals) > 1 or time.monotonic() > until:
                child.process.kill()
            time.sleep(0.02)


@cache
def _lifeline() -> tuple[int, int]:
    """Make a pipe whose one end this process has, and its children watch: its death closes it, which ends them too."""
    return os.pipe()


def forked(main: Callable[[], None]) -> ForkProcess:
    """Run `main` in a fork of this process, which ends when this one does.

    Signals wait until the child has handlers of its own: those of this process would swallow them there.
    """
    read_end, write_end = _lifeline()

    def end_with_parent() -> None:
        os.read(read_end, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    def begin() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; this process passes them on
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(write_end)
        threading.Thread(target=end_with_parent, daemon=True).start()
        main()

    process = multiprocessing.get_context("fork").Process(target=begin, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _prepared(job: ServeJob) -> Facts:
    """Prepare in a process of its own: this one must not compute."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def main() -> None:
        try:
            sending.send(prepare(job))
        except (ValueError, TypeError, OSError, ImportError) as error:
            sending.send(str(error))

    process = forked(main)
    sending.close()
    found: Facts | str = "the model could not be prepared; what it printed says why"
    with receiving, contextlib.suppress(EOFError):
        found = receiving.recv()
    process.join()
    if isinstance(found, str):
        raise ValueError(found)
    return found


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
    if not token:
        token = secrets.token_urlsafe(24)
        with writing(path):
            path.touch(0o600)  # a kill before the next line leaves an empty file, which is filled next time
            path.chmod(0o600)
            path.write_text(token + "\n")
    return token
