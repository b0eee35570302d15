"""What `/openapi.json` says about bodies that FastAPI does not read itself."""

from __future__ import annotations

from typing import Any

from ttac.serving.protocol import DATATYPES, INPUT, OUTPUTS, ServedModel

_ERROR = {
    "application/json": {
        "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    }
}
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
_PARAMETERS = {"type": "object", "additionalProperties": {"type": ["boolean", "number", "string"]}}
_ANSWERED_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"enum": list(OUTPUTS)},
        "datatype": {"enum": sorted(set(OUTPUTS.values()))},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer"}}},
        "data": {"type": "array", "items": {"type": "number"}},
    },
}


def answers(*statuses: int, content: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of a route: its own, and errors of the given and of all statuses.

    >>> sorted(answers(404))
    [200, 401, 403, 404]
    """
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": _TEXTS[status], "content": _ERROR if status >= 400 else json_object()}
        for status in sorted({401, 403, *statuses})
    }
    good: dict[str, Any] = {"description": "Done"}
    if content is not None:
        good["content"] = content
    return {200: good, **errors}


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
    channels, height, width = model.shape
    image: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 255}
    nested: dict[str, Any] = image
    for size in (width, height, channels):
        nested = {"type": "array", "minItems": size, "maxItems": size, "items": nested}
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"const": INPUT},
            "datatype": {"enum": list(DATATYPES)},
            "shape": {
                "type": "array",
                "prefixItems": [{"type": "integer", "minimum": 1, "maximum": max_images}]
                + [{"const": size} for size in model.shape],
                "items": False,
                "minItems": 4,
            },
            "parameters": _PARAMETERS,
            "data": {
                "description": "raw pixels in [0, 1], or levels in 0..255 where datatype is UINT8; flat or nested",
                "type": "array",
                "anyOf": [{"items": image}, {"items": nested, "maxItems": max_images}],
            },
        },
    }
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"enum": list(OUTPUTS)}, "parameters": _PARAMETERS},
    }
    request = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            "outputs": {"type": "array", "items": output},
        },
    }
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": request},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "parameters": [
            *address["parameters"],
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "description": "bytes of the JSON, where a tensor follows it in binary",
                "schema": {"type": "integer", "minimum": 0},
            },
        ],
    }


def infer_answer() -> dict[str, Any]:
    """Describe the answer of inference."""
    schema = {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": _ANSWERED_TENSOR},
        },
    }
    return {
        "application/json": {"schema": schema},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }


def predict_body() -> dict[str, Any]:
    """Describe a request with an image file."""
    binary = {"type": "string", "format": "binary"}
    form = {"type": "object", "required": ["file"], "properties": {"file": binary}, "additionalProperties": False}
    kinds = {"image/*": {"schema": binary}, "application/octet-stream": {"schema": binary}}
    return {"requestBody": {"required": True, "content": {**kinds, "multipart/form-data": {"schema": form}}}}


def predict_answer() -> dict[str, Any]:
    """Describe the answer to an image file."""
    label = {"label": {"type": "string"}, "class": {"type": "integer"}}
    top = {
        "type": "object",
        "required": ["label", "class", "probability"],
        "properties": {**label, "probability": {"type": "number"}},
    }
    schema = {
        "type": "object",
        "required": ["label", "class", "confidence", "top", "model_version"],
        "properties": {
            **label,
            "confidence": {"type": "number"},
            "top": {"type": "array", "items": top},
            "model_version": {"type": "string"},
        },
    }
    return {"application/json": {"schema": schema}}


def admin_body() -> dict[str, Any]:
    """Describe the arguments of a command, of which only rollback has one."""
    schema = {
        "type": "object",
        "properties": {"version": {"type": "integer", "minimum": 1, "maximum": 2**53}},
        "additionalProperties": False,
    }
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": schema}}}}


def json_object() -> dict[str, Any]:
    """Describe any JSON object."""
    return {"application/json": {"schema": {"type": "object"}}}
