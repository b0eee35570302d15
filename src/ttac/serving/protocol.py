"""The Open Inference Protocol v2 with its binary extension, as functions from bytes to tensors and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
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

Body = TypeVar("Body", bound=BaseModel)


def _not_offered(_: Any) -> None:
    raise ValueError("is not offered: send the tensor itself")


class Part(BaseModel):
    """A part of a request. What is null is left out: some clients write what they leave out."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class Parameters(Part):
    """What can be asked of a request, an input or an output beside its fields."""

    shared_memory_region: Annotated[None, BeforeValidator(_not_offered)] = None


class RequestParameters(Parameters):
    """How outputs are sent that say nothing of it."""

    binary_data_output: bool = False


class InputParameters(Parameters):
    """Where the tensor is: behind the JSON, if this says how many bytes it has."""

    binary_data_size: int | None = None


class OutputParameters(Parameters):
    """How an output is sent; rankings of classes are not offered."""

    binary_data: bool | None = None
    classification: Literal[0] = 0


class InputTensor(Part):
    """Images, of which the numbers may follow the JSON."""

    name: Literal["images"]
    datatype: Literal["FP32", "UINT8", "FP64", "FP16"]
    shape: list[int] = Field(min_length=4, max_length=4)
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = Field(
        None, description="raw pixels in [0, 1], or levels in 0..255 where datatype is UINT8; flat or nested"
    )


class WantedOutput(Part):
    """A tensor that is asked for."""

    name: Literal["probabilities", "labels", "logits"]
    parameters: OutputParameters = OutputParameters()


class InferBody(Part):
    """The JSON of a request."""

    id: str | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: list[InputTensor] = Field(min_length=1, max_length=1)
    outputs: list[WantedOutput] = Field([], max_length=3)  # a bound on the errors that are looked for, too


@dataclass(frozen=True)
class ServedModel:
    """What a server tells about its model; `shape` is that of an image, `[C, H, W]`.

    >>> ServedModel("digits", (1, 8, 8), 10).labels[3]
    '3'
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    classes: tuple[str, ...] | None = None
    crop_pct: float = 1.0
    method: str = "source"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of all classes, or their numbers where they have none."""
        return self.classes or tuple(map(str, range(self.num_classes)))


@dataclass(frozen=True)
class InferRequest:
    """Images `[n, C, H, W]` in [0, 1], and how to answer."""

    images: Tensor
    outputs: dict[str, bool]  # tensors of the answer in their order, and whether in binary or as JSON
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
        return cls(logits.numpy(), logits.softmax(1).numpy(), logits.argmax(1).numpy())

    @property
    def confidence(self) -> float:
        """The sum of the probabilities of the most probable classes."""
        return float(self.probabilities.max(1).sum(dtype=np.float64))


def model_metadata(model: ServedModel, version: int) -> dict[str, Any]:
    """Describe the model and the version of its weights.

    >>> model_metadata(ServedModel("digits", (1, 8, 8), 10), 3)["versions"]
    ['3']
    """
    shapes = {"probabilities": [-1, model.num_classes], "labels": [-1], "logits": [-1, model.num_classes]}
    return {
        "name": model.name,
        "versions": [str(version)],
        "platform": PLATFORM,
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
    asked = parse_body(body[:split], InferBody)
    images = _images(asked.inputs[0], memoryview(body)[split:], model, max_images)
    binary = asked.parameters.binary_data_output
    own = {output.name: output.parameters.binary_data for output in asked.outputs}
    if len(own) != len(asked.outputs):
        raise _wrong("an output is asked for twice")
    outputs: dict[str, bool] = {name: binary if one is None else one for name, one in own.items()}
    return InferRequest(images, outputs or dict.fromkeys(DEFAULT_OUTPUTS, binary), asked.id)


def parse_body(text: bytes, kind: type[Body]) -> Body:
    """Read a JSON object as what it must be; NaN and Infinity, which are no JSON, are refused as well."""
    try:
        return kind.model_validate(from_json(text, allow_inf_nan=False))
    except ValidationError as error:
        raise _wrong(first_problem(error.errors())) from error
    except ValueError as error:
        raise _wrong(f"the body is not JSON: {error}") from error


def first_problem(errors: Sequence[Any]) -> str:
    """Say where something is not what it must be, and what it must be."""
    return f"{'.'.join(map(str, errors[0]['loc'])) or 'the body'}: {errors[0]['msg']}"


def format_answer(
    request: InferRequest, prediction: Prediction, model: ServedModel, version: int
) -> tuple[bytes, int | None]:
    """Write an answer: its bytes, and the length of the JSON among them, None where there is nothing else."""
    outputs: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    for name, binary in request.outputs.items():
        values: NDArray[Any] = getattr(prediction, name)
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": list(values.shape)}
        if binary:
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


def _images(tensor: InputTensor, binary: memoryview, model: ServedModel, max_images: int) -> Tensor:
    kind, shape, size = DATATYPES[tensor.datatype], tensor.shape, tensor.parameters.binary_data_size
    if tuple(shape[1:]) != model.shape or shape[0] < 1:
        raise _wrong(f"shape of {INPUT} must be [n, {', '.join(map(str, model.shape))}] with n of at least 1")
    if shape[0] > max_images:
        raise RequestError(413, f"more than the {max_images} images of one request: send fewer")
    if (size is None) == (tensor.data is None):
        raise _wrong(f"{INPUT} must have either data, a list, or binary_data_size")
    if size is not None:
        values = _from_binary(binary, size, shape, kind)
    elif len(binary):
        raise _wrong(f"{len(binary)} bytes follow the JSON, and no input has binary_data_size")
    else:
        values = _from_json(tensor.data or [], shape, kind)
    with np.errstate(over="ignore"):  # infinities are refused below
        pixels = values.astype(np.float32)  # a copy: the body is not aligned, and goes away
    if kind == np.uint8:
        pixels /= np.float32(255)
    try:
        return check_images(torch.from_numpy(pixels), model.shape[0])
    except ValueError as error:
        raise _wrong(str(error)) from error


def _from_binary(binary: memoryview, size: int, shape: Sequence[int], kind: np.dtype[Any]) -> NDArray[Any]:
    expected = math.prod(shape) * kind.itemsize
    if size != expected:
        raise _wrong(f"binary_data_size of {INPUT} must be {expected}, for its shape and datatype")
    if len(binary) != expected:
        raise _wrong(f"{len(binary)} bytes follow the JSON, not the {expected} of {INPUT}: see {HEADER_LENGTH}")
    return np.frombuffer(binary, kind).reshape(shape)


def _from_json(data: list[Any], shape: Sequence[int], kind: np.dtype[Any]) -> NDArray[Any]:
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


def _flattened(data: list[Any], shape: Sequence[int]) -> list[Any]:
    """Give the numbers of a list that is flat or nested as `shape` says; their types are left to the caller."""
    count = math.prod(shape)
    if len(data) == count and not isinstance(data[0], list):
        return data
    level: list[Any] = [data]
    for size in shape:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise _wrong(f"data of {INPUT} must be {count} numbers, flat or nested as its shape says")
        level = list(chain.from_iterable(level))
    return level
