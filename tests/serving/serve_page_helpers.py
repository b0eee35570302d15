"""A server of made-up figures behind the page of `ttac serve`, and a browser that looks at it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from web_server import answering

PAGE = Path(__file__).parents[2] / "src" / "ttac" / "serving" / "page.html"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOSTILE = "<img src=x onerror='window.hacked = 1'>"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", HOSTILE]
SECONDS = 120
GAP = range(60, 62)  # seconds without a request


def made_up_status(now: float) -> dict[str, Any]:
    measures = {
        "entropy": {"adapted": 0.31, "source": 0.62, "limit": 0.125},
        "agreement": {"adapted": 0.84, "source": None, "limit": 0.5},
        "distance": {"adapted": 1.42, "source": 2.75, "limit": 4.6},
    }
    guard = {"enabled": True, "ok": True, "reasons": [], "measures": measures}
    distances = {
        "adapted": [1.0 + 0.1 * index for index in range(9)] + [None],
        "source": [2.0 + 0.2 * index for index in range(10)],
    }
    return {
        "name": "resnet-20", "method": "ttac++", "platform": "ttac", "classes": NAMES, "version": 12,
        "uptime_seconds": 7384.2,
        "predictor": {
            "pid": 11, "device": "cpu", "version": 12, "published": now - 34, "weights_age_seconds": 34.2,
            "requests": 48213, "images": 51234, "refused": 17, "waiting": 3, "per_second": 412.5,
            "p50_ms": 1.84, "p99_ms": 4.27,
        },
        "adapter": {
            "up": True, "seconds_since_heard": 0.4, "restarts": 1, "pid": 12, "time": now, "state": "adapting",
            "updating": False, "version": 12, "samples": 40960, "refused_samples": 64, "updates": 160,
            "update_seconds": 1.93, "update_spans": [[now - 40, now - 36], [now - 12, now - 8]], "lag": 128,
            "dropped": 2048, "losses": {"alignment": 0.4567, HOSTILE: -1.25},
            "snapshot": {"time": now - 95, "version": 11, "samples": 40000},
        },
        "guard": guard, "distances": distances, "admin": {"token_needed": True},
    }  # fmt: skip


def made_up_history(now: float, names: list[str] = NAMES) -> dict[str, Any]:
    idle = [second in GAP for second in range(SECONDS)]
    return {
        "interval": 1.0,
        "times": [now - SECONDS + second for second in range(SECONDS)],
        "requests": [0 if gap else 40 for gap in idle],
        "images": [0 if gap else 80 for gap in idle],
        "refused": [0] * SECONDS,
        "p50_ms": [None if gap else 1.5 + second % 7 / 10 for second, gap in enumerate(idle)],
        "p99_ms": [None if gap else 4.0 + second % 11 / 5 for second, gap in enumerate(idle)],
        "confidence": [None if gap else 0.5 + second / 400 for second, gap in enumerate(idle)],
        "version": [11 + (second > 86) for second in range(SECONDS)],
        "distance": [None if second < 30 else 2.5 - second / 200 for second in range(SECONDS)],
        "classes": {
            "names": names,
            "counts": [[0 if gap else 1 + index for index in range(len(names))] for gap in idle],
        },
    }


def made_up_events(now: float) -> list[dict[str, Any]]:
    kinds = [
        ("start", "begins with the source model", 1, 7000), ("publish", "version 10", 10, 110),
        ("guard", f"entropy fell: {HOSTILE}", 10, 80), ("rollback", "back to version 10", 10, 79),
        ("publish", "version 11", 11, 75), ("snapshot", "at 40,000 samples", 11, 70),
        ("restart", "the adapter was killed", 11, 40), ("publish", "version 12", 12, 30),
    ]  # fmt: skip
    return [
        {"time": now - ago, "event": kind, "message": said, "version": version} for kind, said, version, ago in kinds
    ]


@dataclass
class Stub:
    """A server of made-up figures that does as it is told."""

    address: str = ""
    content: dict[str, Callable[[], Any]] = field(default_factory=dict)
    token: str | None = None  # of the admin calls
    read_token: str | None = None
    fail: int | None = None  # the code of all answers but the page
    troubled: bool = False  # the browser's console may tell of answers that failed
    reply: tuple[int, dict[str, Any]] = (200, {"ok": True, "message": f"done {HOSTILE}", "version": 12})
    asked: list[str] = field(default_factory=list)
    seen: list[str | None] = field(default_factory=list)  # Authorization of reads
    posted: list[tuple[str, str | None, Any]] = field(default_factory=list)  # path, Authorization, body

    def set(self, **changes: Any) -> None:
        """Serve another status."""
        status = made_up_status(time.time())
        for part, value in changes.items():
            status[part] = {**status[part], **value} if isinstance(value, dict) else value
        self.content["/status"] = lambda: status


def answer(stub: Stub, path: str, token: str | None) -> tuple[int, bytes, str]:
    if path == "/":
        return 200, PAGE.read_bytes(), "text/html; charset=utf-8"
    if stub.fail is not None:
        return stub.fail, b'{"error": "too busy"}', "application/json"
    stub.seen.append(token)
    if stub.read_token is not None and token != f"Bearer {stub.read_token}":
        return 401, b'{"error": "a token is needed"}', "application/json"
    if path not in stub.content:
        return 404, b"{}", "application/json"
    return 200, json.dumps(stub.content[path]()).encode(), "application/json"


@contextmanager
def stub_server(port: int = 0, stub: Stub | None = None) -> Iterator[Stub]:
    """Serve the page under the policy of the real server."""
    stub = stub or Stub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Stay silent."""

        def send(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            stub.asked.append(self.path)
            self.send(*answer(stub, self.path.partition("?")[0], self.headers.get("Authorization")))

        def do_POST(self) -> None:
            token = self.headers.get("Authorization")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.posted.append((self.path, token, body))
            allowed = stub.token is None or token == f"Bearer {stub.token}"
            code, reply = stub.reply if allowed else (403, {"error": f"wrong token {HOSTILE}"})
            self.send(code, json.dumps(reply).encode(), "application/json")

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    stub.address = f"http://127.0.0.1:{server.server_address[1]}/"
    if not stub.content:
        stub.content = {
            "/status": lambda: made_up_status(time.time()),
            "/history": lambda: made_up_history(time.time()),
            "/events": lambda: {"events": made_up_events(time.time())},
        }
    with answering(server):
        yield stub


def open_page(page: Any, stub: Stub, fragment: str = "") -> None:
    page.get(stub.address + fragment)
    eventually(lambda: texts(page, "#name") != ["Connecting"])


def eventually(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it does not become true"
        time.sleep(0.03)


def texts(page: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
    return list(page.execute_script(script, selector))


def attributes(page: Any, selector: str, name: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.getAttribute(arguments[1]))"
    return list(page.execute_script(script, selector, name))


def element(page: Any, name: str) -> Any:
    return page.find_element("id", name)


def facts(page: Any, name: str) -> dict[str, str]:
    return dict(zip(texts(page, f"#{name} dt"), texts(page, f"#{name} dd"), strict=True))
