"""A client of the Open Inference Protocol v2 that needs no more than the standard library and numpy."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {"UINT8": np.uint8, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
LARGEST_ANSWER = 64 * 2**20  # bytes; whatever answers at an address need not be a server of models
REFUSALS = (429, 503)  # of a server that is there, and busy or about to be ready
PAUSES = (0.05, 2.0)  # seconds between two tries where nothing answers: at first, and at most

Result = TypeVar("Result")


class RefusedError(ConnectionError):
    """The server takes no request now; `retry_after` are the seconds that it asks to be left alone for."""

    def __init__(self, message: str, status: int, retry_after: float) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class InferAnswer:
    """What the server made of some images, and the version of the weights that made it."""

    version: str
    outputs: dict[str, NDArray[Any]]


class InferenceClient:
    """Asks one server over one connection, which is kept open; not for several threads.

    A request that is lost or refused (429, 503) is sent again for up to `patience` seconds, and counted; then, or at
    once without patience, it raises a ConnectionError. Whatever else is wrong raises a ValueError. `note` is told what
    happened before the first pause of a request. A connection that was cut while nothing was asked is opened again
    without a word, as no answer is lost with it.

    >>> InferenceClient("127.0.0.1:8000")
    Traceback (most recent call last):
    ValueError: '127.0.0.1:8000' is no address of a server: write it as http://127.0.0.1:8000
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        patience: float = 0.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.url, self.token, self.patience, self.note = url.rstrip("/"), token, patience, note
        self.resent = 0  # requests that were sent again as their answer was lost
        self.refused = 0  # answers 429 and 503
        self.cut = 0  # connections that ended while they were idle
        self._prefix, self._connection = _connection(self.url, timeout)

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next request opens another one."""
        self._connection.close()

    def ready(self) -> bool:
        """Tell, without patience, whether the server would answer."""
        try:
            self._ask("GET", "/v2/health/ready")
        except ConnectionError:
            return False
        return True

    def get(self, path: str) -> dict[str, Any]:
        """Get a JSON object."""
        return self._patiently(lambda: _object(self._ask("GET", path)[1]))

    def post(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a JSON object, and give the one that comes back."""
        body = json.dumps(content or {}).encode()
        return self._patiently(lambda: _object(self._ask("POST", path, body, {"Content-Type": "application/json"})[1]))

    def describe(self, model: str) -> dict[str, Any]:
        """Ask for the inputs and outputs of a model."""
        return self.get(_path_of(model))

    def infer(self, model: str, images: NDArray[Any], outputs: Sequence[str] = ("labels",)) -> InferAnswer:
        """Ask for outputs of images `[n, C, H, W]`: levels (uint8), or pixels in [0, 1] of floating point."""
        body, header_length = _infer_request(images, outputs)
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(header_length)}
        path = f"{_path_of(model)}/infer"

        def attempt() -> InferAnswer:
            response, content = self._ask("POST", path, body, headers)
            return _infer_answer(content, response.getheader(HEADER_LENGTH), outputs, len(images))

        return self._patiently(attempt)

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        deadline: float | None = None  # which counts from the first failure, as an answer itself may take long
        pause, told = PAUSES[0], False
        while True:
            try:
                return attempt()
            except ConnectionError as error:
                refused = isinstance(error, RefusedError)
                wait = error.retry_after if isinstance(error, RefusedError) else pause
                deadline = time.monotonic() + self.patience if deadline is None else deadline
                if time.monotonic() + wait > deadline:
                    raise
                if self.note is not None and not refused and not told:
                    self.note(f"{error} Trying again for {self.patience:g} s")
                    told = True
                self.refused += refused
                self.resent += not refused
                time.sleep(wait)
                pause = min(2 * pause, PAUSES[1])

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[HTTPResponse, bytes]:
        """Send one request and read its answer."""
        given = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            self._send(method, self._prefix + path, body, {**given, **(headers or {})})
            response = self._connection.getresponse()
            content = response.read(LARGEST_ANSWER + 1)
        except TimeoutError as error:
            self._connection.close()
            raise ConnectionError(
                f"{self.url} did not answer within {self._connection.timeout:g} s: is it overloaded?"
            ) from error
        except (OSError, HTTPException) as error:
            self._connection.close()
            raise ConnectionError(f"{self.url} does not answer ({_reason(error)}): is the server running?") from error
        if len(content) > LARGEST_ANSWER:
            self._connection.close()
            raise ValueError(f"{self.url}{path} answers with more than {LARGEST_ANSWER} bytes: is it a model server?")
        if response.length:  # what a reader of some bytes is not told
            self._connection.close()
            raise ConnectionError(f"{self.url} broke off in the middle of an answer: is the server running?")
        if not 200 <= response.status < 300:
            raise self._refusal(path, response, content)
        return response, content

    def _send(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> None:
        """Send a request over the connection, or over a new one where that was cut while it was idle."""
        if _ended(self._connection):
            self._connection.close()
            self.cut += 1
        was_idle = self._connection.sock is not None
        try:
            self._connection.request(method, target, body, headers)
        except ConnectionError:
            if not was_idle:
                raise
            # It broke before all of the request was out, so nobody has it.
            self._connection.close()
            self.cut += 1
            self._connection.request(method, target, body, headers)

    def _refusal(self, path: str, response: HTTPResponse, content: bytes) -> Exception:
        status, said = response.status, _said(content)
        if status in REFUSALS:
            return RefusedError(f"{self.url} refuses requests ({status}{said})", status, _seconds(response))
        if status in (401, 403):
            hint = "it wants another token" if self.token else "name the file of its token with --token-file"
            return ValueError(f"{self.url} does not let us in ({status}{said}): {hint}")
        hint = ": is this the address of ttac serve?" if status == 404 or 300 <= status < 400 else ""
        return ValueError(f"{self.url}{path} answers {status}{said}{hint}")


def _connection(url: str, timeout: float) -> tuple[str, HTTPConnection]:
    """Give the path that all requests begin with, and a connection that is not opened yet."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        example = url if "://" not in url and url.count(":") < 2 and url else "127.0.0.1:8000"
        raise ValueError(f"{url!r} is no address of a server: write it as http://{example}")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return parts.path, kind(host, port, timeout=timeout)


def _path_of(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def _ended(connection: HTTPConnection) -> bool:
    """Tell whether the other side has closed an idle connection, which it may: then nothing is lost by a new one."""
    if connection.sock is None or isinstance(connection, HTTPSConnection):  # where more than an end can be read
        return False
    return bool(select.select([connection.sock], [], [], 0)[0])


def _infer_request(images: NDArray[Any], outputs: Sequence[str]) -> tuple[bytes, int]:
    """Write the images behind a JSON header, and give the length of that."""
    datatype = next((name for name, kind in DATATYPES.items() if images.dtype == kind), None)
    if datatype is None or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}; expected uint8 or floats [N, C, H, W]")
    pixels = np.ascontiguousarray(images).astype(images.dtype.newbyteorder("<"), copy=False).tobytes()
    header = {
        "inputs": [
            {
                "name": "images",
                "shape": list(images.shape),
                "datatype": datatype,
                "parameters": {"binary_data_size": len(pixels)},
            }
        ],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
    }
    text = json.dumps(header).encode()
    return text + pixels, len(text)


def _infer_answer(content: bytes, header_length: str | None, outputs: Sequence[str], count: int) -> InferAnswer:
    """Read tensors from JSON and from what follows it, or raise an error where the answer is not whole."""
    try:
        end = len(content) if header_length is None else int(header_length)
        header, rest = json.loads(content[:end]), memoryview(content)[end:]
        found: dict[str, NDArray[Any]] = {}
        for output in header["outputs"]:
            kind = np.dtype(DATATYPES[output["datatype"]]).newbyteorder("<")
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = np.asarray(output["data"], dtype=kind)
            else:
                array, rest = np.frombuffer(rest[:size], dtype=kind), rest[size:]
            found[output["name"]] = array.reshape(output["shape"])
        missing = [name for name in outputs if name not in found or found[name].shape[:1] != (count,)]
        if missing:
            raise ValueError(f"no {missing[0]} of {count} images")
        return InferAnswer(str(header["model_version"]), found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the server's answer is not of the Open Inference Protocol: {error!r}") from error


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError("the server's answer is not JSON: is it a model server?") from error
    if not isinstance(value, dict):
        raise ValueError("the server's answer is not a JSON object: is it a model server?")
    return value


def _said(content: bytes) -> str:
    """Give what an answer says of an error, as part of a message."""
    try:
        said = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f", {str(said)[:500]}"


def _seconds(response: HTTPResponse) -> float:
    """Read Retry-After; a second where it is missing or, as it may be, a date."""
    said = response.getheader("Retry-After", "")
    return float(said) if said.isdecimal() else 1.0


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
