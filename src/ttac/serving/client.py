"""A client of the Open Inference Protocol v2, which needs no torch."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

try:
    import httpx
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: install what a client needs with pip install 'ttac[serve]'") from error

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {"UINT8": np.uint8, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
LARGEST_ANSWER = 64 * 2**20  # bytes; whatever answers at an address need not be a server of models
REFUSALS = (429, 503)  # of a server that is there, and busy or about to be ready
PAUSES = (0.05, 2.0)  # seconds between two tries where nothing answers: at first, and at most
# Seconds that a connection stays open unused: less than the five after which the server cuts it, as a request that is
# sent in that moment is lost.
IDLE = 3.0

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


class InferenceClient(AbstractContextManager["InferenceClient"]):
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
        self.url, self.patience, self.note = url.rstrip("/"), patience, note
        self.resent = 0  # requests that were sent again as their answer was lost
        self.refused = 0  # answers 429 and 503
        self._token, self._timeout = token, timeout
        self._http = httpx.Client(
            base_url=_checked(self.url),
            headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})},
            timeout=timeout,
            limits=httpx.Limits(keepalive_expiry=IDLE),
            trust_env=False,  # what is asked is near, and not behind the proxy that the environment may name
            verify=ssl.create_default_context(),
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection for good."""
        self._http.close()

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
        return self._patiently(lambda: _object(self._ask("POST", path, json=content or {})[1]))

    def infer(self, model: str, images: NDArray[Any], outputs: Sequence[str] = ("labels",)) -> InferAnswer:
        """Ask for outputs of images `[n, C, H, W]`: levels (uint8), or pixels in [0, 1] of floating point."""
        body, header_length = _infer_request(images, outputs)
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(header_length)}
        path = f"{path_of(model)}/infer"

        def attempt() -> InferAnswer:
            found, content = self._ask("POST", path, content=body, headers=headers)
            return _infer_answer(content, found.get(HEADER_LENGTH), outputs, len(images))

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

    def _ask(self, method: str, path: str, **request: Any) -> tuple[httpx.Headers, bytes]:
        """Send one request, and give the headers and the content of its answer."""
        content = bytearray()
        try:
            with self._http.stream(method, path, **request) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        raise ValueError(
                            f"{self.url}{path} answers with more than {LARGEST_ANSWER} bytes: is it a model server?"
                        )
        except httpx.TimeoutException as error:
            raise ConnectionError(f"{self.url} did not answer within {self._timeout:g} s: is it overloaded?") from error
        except httpx.HTTPError as error:
            raise ConnectionError(f"{self.url} does not answer ({error}): is the server running?") from error
        if not response.is_success:
            raise self._refusal(path, response, bytes(content))
        return response.headers, bytes(content)

    def _refusal(self, path: str, response: httpx.Response, content: bytes) -> Exception:
        status, said = response.status_code, _said(content)
        if status in REFUSALS:
            after = response.headers.get("Retry-After", "")
            seconds = float(after) if after.isdecimal() else 1.0  # it may be missing, or a date
            return RefusedError(f"{self.url} refuses requests ({status}{said})", status, seconds)
        if status in (401, 403):
            hint = "it wants another token" if self._token else "name the file of its token with --token-file"
            return ValueError(f"{self.url} does not let us in ({status}{said}): {hint}")
        hint = ": is this the address of ttac serve?" if status == 404 or 300 <= status < 400 else ""
        return ValueError(f"{self.url}{path} answers {status}{said}{hint}")


def _checked(url: str) -> httpx.URL:
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        found = httpx.URL()
    if found.scheme not in ("http", "https") or not found.host or found.userinfo or found.query or found.fragment:
        example = url if "://" not in url and url.count(":") < 2 and url else "127.0.0.1:8000"
        raise ValueError(f"{url!r} is no address of a server: write it as http://{example}")
    return found


def path_of(model: str) -> str:
    """Give the path that a model is described at."""
    return f"/v2/models/{quote(model, safe='')}"


def _infer_request(images: NDArray[Any], outputs: Sequence[str]) -> tuple[bytes, int]:
    """Write the images behind a JSON header, and give the length of that."""
    datatype = next((name for name, kind in DATATYPES.items() if images.dtype == kind), None)
    if datatype is None or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}; expected uint8 or floats [N, C, H, W]")
    pixels = np.ascontiguousarray(images).astype(images.dtype.newbyteorder("<"), copy=False).tobytes()
    size = {"binary_data_size": len(pixels)}
    tensor = {"name": "images", "shape": list(images.shape), "datatype": datatype, "parameters": size}
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    text = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
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
