"""What `/openapi.json` says about bodies that FastAPI does not read itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ttac.serving.protocol import HEADER_LENGTH, InferBody, ServedModel

BINARY = {"schema": {"type": "string", "format": "binary"}}
_TEXTS = {
    202: "The adapter has the command and does it when its update ends",
    400: "The request cannot be understood",
    401: "A bearer token is missing or wrong",
    403: "The caller may not do this",
    404: "There is no such model, or no such version of it",
    408: "The body came too slowly",
    409: "The adapter could not do this, or other weights were put in service meanwhile",
    413: "The body, the image or the batch is too large",
    415: "The body is compressed",
    422: "A parameter is not what it must be",
    429: "Too many images wait; Retry-After says when to come again",
    503: "The server cannot answer in time, or shuts down; Retry-After says when to come again",
}


class Problem(BaseModel):
    """The form of all errors."""

    error: str


class AnsweredTensor(BaseModel):
    """An output, whose numbers are in `data` or behind the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[float] = []


class InferAnswer(BaseModel):
    """The JSON of an answer of the protocol."""

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[AnsweredTensor]


class Guess(BaseModel):
    """A class that an image may be of."""

    label: str
    number: int = Field(alias="class")
    probability: float


class PredictAnswer(BaseModel):
    """The answer to an image file: the most probable class, and the next ones."""

    label: str
    number: int = Field(alias="class")
    confidence: float
    top: list[Guess]
    model_version: str


class Reply(BaseModel):
    """What became of a command, and the version that is served."""

    message: str
    version: int


class NoArguments(BaseModel):
    """The body of a command, which may be empty."""

    model_config = ConfigDict(strict=True, extra="forbid")


class RollbackArguments(NoArguments):
    """The version to go back to; without it, that before the served one."""

    version: int | None = Field(None, ge=1, le=2**53)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe what comes in the place of an answer, by its status.

    >>> sorted(errors(404, 401))
    [401, 404]
    """
    return {
        status: {"description": _TEXTS[status], "model": Problem if status >= 400 else Reply} for status in statuses
    }


def answers(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe an answer in JSON, and the errors that may come in its place."""
    return {200: {"description": "Done", "model": model}, **errors(*statuses)}


def of_model(model: ServedModel) -> dict[str, Any]:
    """Describe the name of the model, which is part of an address."""
    return {"parameters": [_part("name", {"type": "string", "enum": [model.name]})]}


def of_version(model: ServedModel) -> dict[str, Any]:
    """Describe the name of the model and the version of its weights, as parts of an address."""
    return {"parameters": [*of_model(model)["parameters"], _part("version", {"type": "string", "pattern": "^[0-9]+$"})]}


def _part(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def infer_body(address: dict[str, Any], model: ServedModel, max_images: int) -> dict[str, Any]:
    """Describe a request of inference, as JSON alone or with the tensor behind it."""
    request = _whole(InferBody)
    sizes = [{"type": "integer", "minimum": 1, "maximum": max_images}, *({"const": size} for size in model.shape)]
    shape = {"type": "array", "prefixItems": sizes, "items": False, "minItems": 4}
    request["properties"]["inputs"]["items"]["properties"]["shape"] = shape
    length = {
        "name": HEADER_LENGTH,
        "in": "header",
        "description": "bytes of the JSON, where a tensor follows it in binary",
        "schema": {"type": "integer", "minimum": 0},
    }
    content = {"application/json": {"schema": request}, "application/octet-stream": BINARY}
    body = {"required": True, "content": content}
    return {"requestBody": body, "parameters": [*address["parameters"], length]}


def _whole(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a body in one piece: what is added to a route by hand has no place for definitions."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def filled(part: Any) -> Any:
        if isinstance(part, list):
            return [filled(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return filled(definitions[part["$ref"].rpartition("/")[2]])
        return {name: filled(item) for name, item in part.items()}

    whole: dict[str, Any] = filled(schema)
    return whole


_FILE = {"file": BINARY["schema"]}
_FORM = {"type": "object", "required": ["file"], "properties": _FILE, "additionalProperties": False}
_KINDS = {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": {"schema": _FORM}}
PREDICT_BODY = {"requestBody": {"required": True, "content": _KINDS}}
# The arguments of a command, of which only rollback has one.
ADMIN_BODY = {"requestBody": {"content": {"application/json": {"schema": _whole(RollbackArguments)}}}}
