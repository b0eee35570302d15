"""The Open Inference Protocol v2 with its binary extension, as functions from bytes to tensors and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttac.model.inputs import check_images
from ttac.serving.errors import RequestError

HEADER_LENGTH = "Inference-Header-Content-Length"
INPUT = "images"
# The protocol's numbers are little-endian.
DATATYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "UINT8": np.dtype("u1"),
    "FP64": np.dtype("<f8"),
    "FP16": np.dtype("<f2"),
}
DEFAULT_OUTPUTS = ("probabilities", "labels")
OUTPUTS = {"probabilities": "FP32", "labels": "INT64", "logits": "FP32"}
PLATFORM = "ttac"


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True)
class ServedModel:
    """What a server tells about its model; `shape` is that of an image, `[C, H, W]`.

    >>> ServedModel("digits", (1, 8, 8), 10).label(3)
    '3'
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    classes: tuple[str, ...] | None = None
    crop_pct: float = 1.0
    method: str = "source"
    platform: str = PLATFORM

    def label(self, number: int) -> str:
        """Name a class, by its number where it has no name."""
        return str(number) if self.classes is None else self.classes[number]


@dataclass(frozen=True)
class RequestedOutput:
    """A tensor of the answer, in binary or as JSON."""

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """Images `[n, C, H, W]` in [0, 1], and how to answer."""

    images: Tensor
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None


@dataclass(frozen=True)
class Prediction:
    """Logits `[n, K]`, the probabilities that they are, and the most probable classes `[n]`.

    >>> Prediction.of(torch.tensor([[0.0, 0.0, 50.0]])).labels.tolist()
    [2]
    """

    logits: NDArray[np.float32]
    probabilities: NDArray[np.float32]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, logits: Tensor) -> Prediction:
        """Normalise logits that are finite."""
        values = logits.numpy()
        exponentials = np.exp(values - values.max(1, keepdims=True))
        return cls(values, exponentials / exponentials.sum(1, keepdims=True), values.argmax(1))

    @property
    def confidence(self) -> float:
        """The sum of the probabilities of the most probable classes."""
        return float(self.probabilities.max(1).sum(dtype=np.float64))


def server_metadata(version: str) -> dict[str, Any]:
    """Describe the server."""
    return {"name": PLATFORM, "version": version, "extensions": ["binary_tensor_data"]}


def model_metadata(model: ServedModel, version: int) -> dict[str, Any]:
    """Describe the model and the version of its weights.

    >>> model_metadata(ServedModel("digits", (1, 8, 8), 10), 3)["versions"]
    ['3']
    """
    shapes = {"probabilities": [-1, model.num_classes], "labels": [-1], "logits": [-1, model.num_classes]}
    return {
        "name": model.name,
        "versions": [str(version)],
        "platform": model.platform,
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *model.shape]}],
        "outputs": [{"name": name, "datatype": OUTPUTS[name], "shape": shapes[name]} for name in OUTPUTS],
    }


def json_length(header: bytes | None, size: int) -> int:
    """Give how many of the `size` bytes of a body are JSON, by the header that says so; all without it."""
    if header is None:
        return size
    if not header.isdigit() or len(header) > 18 or int(header) > size:
        raise _wrong(f"{HEADER_LENGTH} must be the number of bytes of the JSON, of {size} in all")
    return int(header)


def parse_request(body: bytes, split: int, model: ServedModel, max_images: int) -> InferRequest:
    """Read a request: JSON, and behind its first `split` bytes the tensor if it is in binary.

    >>> content = b'{"inputs": [{"name": "images", "datatype": "FP32", "shape": [1, 1, 1, 2], "data": [0, 1]}]}'
    >>> parse_request(content, len(content), ServedModel("tiny", (1, 1, 2), 2), 64).images
    tensor([[[[0., 1.]]]])
    """
    request = parse_object(body[:split])
    binary = memoryview(body)[split:]
    identifier = request.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise _wrong("id must be a text")
    parameters = _parameters(request, "the request")
    outputs = _outputs(request, _flag(parameters, "binary_data_output", False))
    return InferRequest(_images(_only_input(request), binary, model, max_images), outputs, identifier)


def parse_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object; NaN and Infinity, which are no JSON, are refused as well."""
    try:
        value = _DECODER.decode(text.decode())
    except RecursionError as error:
        raise _wrong("the JSON is nested too deeply") from error
    except ValueError as error:  # of the JSON, its encoding, or an integer of thousands of digits
        raise _wrong(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _wrong("the body must be a JSON object")
    return value


def format_answer(
    request: InferRequest, prediction: Prediction, model: ServedModel, version: int
) -> tuple[bytes, int | None]:
    """Write an answer: its bytes, and the length of the JSON among them, None where there is nothing else."""
    outputs: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    for wanted in request.outputs:
        values: NDArray[Any] = getattr(prediction, wanted.name)
        output: dict[str, Any] = {
            "name": wanted.name,
            "datatype": OUTPUTS[wanted.name],
            "shape": list(values.shape),
        }
        if wanted.binary:
            little_endian = values.astype(values.dtype.newbyteorder("<"), copy=False)
            blocks.append(little_endian.tobytes())
            output["parameters"] = {"binary_data_size": len(blocks[-1])}
        else:
            output["data"] = values.ravel().tolist()
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model.name, "model_version": str(version)}
    if request.id is not None:
        answer["id"] = request.id
    answer["outputs"] = outputs
    text = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
    return (b"".join([text, *blocks]), len(text)) if blocks else (text, None)


def _wrong(message: str) -> RequestError:
    return RequestError(400, message)


def _parameters(holder: Mapping[str, Any], what: str) -> dict[str, Any]:
    parameters = holder.get("parameters")
    if parameters is None:  # some clients write what they leave out
        return {}
    if not isinstance(parameters, dict):
        raise _wrong(f"parameters of {what} must be an object")
    if "shared_memory_region" in parameters:
        raise _wrong("shared memory is not offered: send the tensor itself")
    return parameters


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(f"{name} must be true or false")
    return value


def _objects(request: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = request.get(name)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _wrong(f"{name} must be a list of objects")
    return values


def _outputs(request: Mapping[str, Any], binary: bool) -> tuple[RequestedOutput, ...]:
    wanted = []
    for output in _objects(request, "outputs"):
        name = output.get("name")
        if not isinstance(name, str) or name not in OUTPUTS:
            raise _wrong(f"an output is none of {', '.join(OUTPUTS)}")
        parameters = _parameters(output, "an output")
        if parameters.get("classification", 0) != 0:
            raise _wrong("classification is not offered: ask for labels and probabilities")
        wanted.append(RequestedOutput(name, _flag(parameters, "binary_data", binary)))
    if len({output.name for output in wanted}) != len(wanted):
        raise _wrong("an output is asked for twice")
    return tuple(wanted) or tuple(RequestedOutput(name, binary) for name in DEFAULT_OUTPUTS)


def _only_input(request: Mapping[str, Any]) -> dict[str, Any]:
    inputs = _objects(request, "inputs")
    if len(inputs) != 1 or inputs[0].get("name") != INPUT:
        raise _wrong(f"expected one input, {INPUT!r}")
    return inputs[0]


def _images(tensor: Mapping[str, Any], binary: memoryview, model: ServedModel, max_images: int) -> Tensor:
    datatype = tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise _wrong(f"datatype of {INPUT} must be one of {', '.join(DATATYPES)}")
    kind = DATATYPES[datatype]
    shape = _shape(tensor.get("shape"), model, max_images)
    parameters = _parameters(tensor, INPUT)
    if "binary_data_size" in parameters:
        if "data" in tensor:
            raise _wrong(f"{INPUT} has both data and binary_data_size")
        values = _from_binary(binary, parameters["binary_data_size"], shape, kind)
    elif len(binary):
        raise _wrong(f"{len(binary)} bytes follow the JSON, and no input has binary_data_size")
    else:
        values = _from_json(tensor.get("data"), shape, kind)
    with np.errstate(over="ignore"):  # infinities are refused below
        pixels = values.astype(np.float32)  # a copy: the body is not aligned, and goes away
    if kind == np.uint8:
        pixels /= np.float32(255)
    try:
        return check_images(torch.from_numpy(pixels), model.shape[0])
    except ValueError as error:
        raise _wrong(str(error)) from error


def _shape(shape: object, model: ServedModel, max_images: int) -> tuple[int, ...]:
    # A bool is an int to Python, and equal to one: types are compared as they are.
    if not isinstance(shape, list) or len(shape) != 4 or any(type(size) is not int for size in shape):
        raise _wrong(f"shape of {INPUT} must be a list of 4 integers")
    if tuple(shape[1:]) != model.shape or shape[0] < 1:
        raise _wrong(f"shape of {INPUT} must be [n, {', '.join(map(str, model.shape))}] with n of at least 1")
    if shape[0] > max_images:
        raise RequestError(413, f"more than the {max_images} images of one request: send fewer")
    return tuple(shape)


def _from_binary(binary: memoryview, size: object, shape: Sequence[int], kind: np.dtype[Any]) -> NDArray[Any]:
    expected = math.prod(shape) * kind.itemsize
    if type(size) is not int or size != expected:
        raise _wrong(f"binary_data_size of {INPUT} must be {expected}, for its shape and datatype")
    if len(binary) != expected:
        raise _wrong(f"{len(binary)} bytes follow the JSON, not the {expected} of {INPUT}: see {HEADER_LENGTH}")
    return np.frombuffer(binary, kind).reshape(shape)


def _from_json(data: object, shape: Sequence[int], kind: np.dtype[Any]) -> NDArray[Any]:
    numbers = _flattened(data, shape)
    allowed = {int} if kind == np.uint8 else {int, float}
    if not set(map(type, numbers)) <= allowed:
        raise _wrong(f"data of {INPUT} must be {'integers' if kind == np.uint8 else 'numbers'}")
    if kind == np.uint8 and not (min(numbers) >= 0 and max(numbers) <= 255):
        raise _wrong(f"data of {INPUT} must be in 0..255")
    try:
        return np.array(numbers, np.float64).reshape(shape)
    except OverflowError as error:
        raise _wrong(f"data of {INPUT} holds numbers beyond all floating-point ones") from error


def _flattened(data: object, shape: Sequence[int]) -> list[Any]:
    """Give the numbers of a list that is flat or nested as `shape` says; their types are left to the caller."""
    if not isinstance(data, list):
        raise _wrong(f"{INPUT} must have data, a list")
    count = math.prod(shape)
    if len(data) == count and not isinstance(data[0], list):
        return data
    level: list[Any] = [data]
    for size in shape:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise _wrong(f"data of {INPUT} must be {count} numbers, flat or nested as its shape says")
        level = list(chain.from_iterable(level))
    return level
