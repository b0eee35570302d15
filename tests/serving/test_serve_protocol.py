"""The Open Inference Protocol as bytes: what is understood, what is refused, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from fake_service import CLASSES, SHAPE, binary_body, json_body, pixels, tensor
from numpy.typing import NDArray

from ttac.serving.errors import RequestError
from ttac.serving.protocol import (
    HEADER_LENGTH,
    InferRequest,
    Prediction,
    ServedModel,
    format_answer,
    json_length,
    model_metadata,
    parse_request,
)

MODEL = ServedModel("tiny", SHAPE, len(CLASSES), CLASSES)


def parsed(body: bytes, headers: dict[str, str] | None = None) -> InferRequest:
    length = (headers or {}).get(HEADER_LENGTH)
    split = json_length(None if length is None else length.encode(), len(body))
    return parse_request(body, split, MODEL, max_images=4)


def refusal(body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    return caught.value


def test_flat_nested_and_binary_tensors_are_the_same_images() -> None:
    images = pixels(2)
    nested = json.dumps({"inputs": [tensor(images, data=images.tolist())]}).encode()
    for request in (parsed(json_body(images)), parsed(nested), parsed(*binary_body(images))):
        assert request.images.dtype == torch.float32
        assert torch.equal(request.images, torch.from_numpy(images))


@pytest.mark.parametrize(("datatype", "dtype"), [("FP64", "<f8"), ("FP16", "<f2"), ("FP32", "<f4")])
def test_datatypes_of_floating_point(datatype: str, dtype: str) -> None:
    images = pixels(1).astype(dtype)
    exact = torch.from_numpy(images.astype(np.float32))
    assert torch.equal(parsed(*binary_body(images, datatype)).images, exact)
    text = json.dumps({"inputs": [tensor(images, datatype)]}).encode()
    assert torch.equal(parsed(text).images, exact)


def test_levels_become_what_the_rest_of_the_package_makes_of_them() -> None:
    levels = np.arange(48, dtype=np.uint8).reshape(1, *SHAPE) * 5
    exact = torch.from_numpy(levels).float() / 255
    assert torch.equal(parsed(*binary_body(levels, "UINT8")).images, exact)
    assert torch.equal(parsed(json.dumps({"inputs": [tensor(levels, "UINT8")]}).encode()).images, exact)


def test_which_outputs_are_wanted_and_how() -> None:
    def wanted(**fields: Any) -> list[tuple[str, bool]]:
        return list(parsed(json_body(pixels(), **fields)).outputs.items())

    everything = {"binary_data_output": True}
    assert wanted() == wanted(outputs=[]) == [("probabilities", False), ("labels", False)]
    assert wanted(parameters=everything) == [("probabilities", True), ("labels", True)]
    logits = [{"name": "logits", "parameters": {"binary_data": False}}, {"name": "labels"}]
    assert wanted(parameters=everything, outputs=logits) == [("logits", False), ("labels", True)]
    assert parsed(json_body(pixels(), id="seven")).id == "seven"


def test_what_is_null_is_left_out() -> None:
    images = pixels(2)
    plain = parsed(json_body(images))
    empty = json.dumps(
        {"id": None, "parameters": None, "inputs": [tensor(images) | {"parameters": None}], "outputs": None}
    ).encode()
    found = parsed(empty)
    assert torch.equal(found.images, plain.images)
    assert (found.id, found.outputs) == (plain.id, plain.outputs)


def test_answers_in_json_and_in_binary_hold_the_same_numbers() -> None:
    logits = torch.randn(2, len(CLASSES), generator=torch.Generator().manual_seed(3)) * 30
    prediction = Prediction.of(logits)
    torch.testing.assert_close(torch.from_numpy(prediction.probabilities), logits.softmax(1))
    assert prediction.confidence == pytest.approx(logits.softmax(1).max(1).values.sum().item())
    names = ("labels", "probabilities", "logits")
    for binary in ((True, True, True), (False, True, False), (False, False, False)):
        outputs = dict(zip(names, binary, strict=True))
        content, length = format_answer(InferRequest(torch.zeros(0), outputs, "a"), prediction, MODEL, 12)
        assert (length is None) == (not any(binary))
        answer = json.loads(content[:length])
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("tiny", "12", "a")
        found = unpacked(answer, content[length:] if length is not None else b"")
        assert torch.equal(torch.from_numpy(found["logits"]), logits)
        assert found["labels"].tolist() == logits.argmax(1).tolist()
        np.testing.assert_array_equal(found["probabilities"], prediction.probabilities)


def unpacked(answer: dict[str, Any], raw: bytes) -> dict[str, NDArray[Any]]:
    """Read outputs as the protocol says: binary ones follow each other in the order of the JSON."""
    found: dict[str, NDArray[Any]] = {}
    for output in answer["outputs"]:
        dtype = {"FP32": "<f4", "INT64": "<i8"}[output["datatype"]]
        if "data" in output:
            assert "parameters" not in output
            values = np.array(output["data"], dtype)
        else:
            size = output["parameters"]["binary_data_size"]
            values, raw = np.frombuffer(raw[:size], dtype), raw[size:]
        found[output["name"]] = values.reshape(output["shape"]).copy()
    assert raw == b""
    return found


def test_metadata_name_all_tensors() -> None:
    metadata = model_metadata(MODEL, 3)
    assert metadata["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, *SHAPE]}]
    shapes = {output["name"]: (output["datatype"], output["shape"]) for output in metadata["outputs"]}
    assert shapes == {"probabilities": ("FP32", [-1, 7]), "labels": ("INT64", [-1]), "logits": ("FP32", [-1, 7])}


NOT_JSON = {
    "nothing": b"",
    "invalid UTF-8": b'{"id": "\xff"}',
    "UTF-16": json.dumps({"inputs": []}).encode("utf-16"),
    "cut off": json_body(pixels())[:-5],
    "two values": b"{} {}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a huge integer": b'{"id": ' + b"9" * 100_000 + b"}",
    "NaN": json_body(pixels(), parameters={"a": float("nan")}),
    "Infinity": json_body(pixels(), parameters={"a": -float("inf")}),
    "a list": b"[]",
    "null": b"null",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_no_json_object_is_refused(name: str) -> None:
    assert refusal(NOT_JSON[name]).status_code == 400


SHAPES = {
    "three": [3, 4, 4],
    "five": [1, 1, 3, 4, 4],
    "none": [0, 3, 4, 4],
    "negative": [-1, 3, 4, 4],
    "a bool": [True, 3, 4, 4],
    "a float": [1.0, 3, 4, 4],
    "a text": ["1", 3, 4, 4],
    "other channels": [1, 1, 4, 4],
    "transposed": [1, 4, 4, 3],
    "nested": [[1, 3, 4, 4]],
    "an object": {"0": 1},
    "overflow": [2**62, 3, 4, 4],
    "null": None,
    "more than there is": [2, 3, 4, 4],
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_not_the_model_s_are_refused(name: str) -> None:
    status = 413 if name == "overflow" else 400
    assert refusal({"inputs": [{**tensor(pixels()), "shape": SHAPES[name]}]}).status_code == status
    raw = pixels().tobytes()
    described = tensor(pixels(), data=None, parameters={"binary_data_size": len(raw)})
    head = json.dumps({"inputs": [{**described, "shape": SHAPES[name]}]}).encode()
    assert refusal(head + raw, {HEADER_LENGTH: str(len(head))}).status_code == status


DATA: dict[str, Any] = {
    "null": None,
    "a text": "0" * 48,
    "an object": {str(number): 0 for number in range(48)},
    "one short": [0.5] * 47,
    "one over": [0.5] * 49,
    "empty": [],
    "texts": ["0.5"] * 48,
    "a long text": ["9" * 100_000] + ["0"] * 47,
    "objects": [{}] * 48,
    "nulls": [0.5] * 47 + [None],
    "bools": [True] * 48,
    "one list": [0.5] * 47 + [[0.5]],
    "ragged": [[[[0.5] * 4] * 4] * 2 + [[[0.5] * 4] * 3 + [[0.5] * 3]]],
    "too flat": [[[0.5] * 16] * 3],
    "too deep": [[[[[0.5]] * 4] * 4] * 3],
    "a huge number": [1e300] + [0.5] * 47,
    "an infinite number": [0.5] * 47 + [10**400],
    "normalised": [-2.0] + [0.5] * 47,
    "levels as floats": [200.0] * 48,
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_are_not_the_pixels_are_refused(name: str) -> None:
    body = json.dumps({"inputs": [{**tensor(pixels()), "data": DATA[name]}]}).encode()
    assert refusal(body).status_code == 400


@pytest.mark.parametrize("value", [-1, 256, 0.5, 10**30, True, None])
def test_levels_are_integers_of_a_byte(value: object) -> None:
    request = {"inputs": [{**tensor(pixels(), "UINT8"), "data": [0] * 47 + [value]}]}
    assert refusal(request).status_code == 400


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -2.0, 1.5])
@pytest.mark.parametrize(("datatype", "dtype"), [("FP64", "<f8"), ("FP16", "<f2"), ("FP32", "<f4")])
def test_binary_pixels_out_of_range_are_refused(value: float, datatype: str, dtype: str) -> None:
    images = pixels().astype(dtype)
    with np.errstate(over="ignore"):
        images[0, 1, 2, 3] = value
    assert refusal(*binary_body(images, datatype)).status_code == 400


def test_a_little_beyond_zero_and_one_is_overshoot() -> None:
    images = pixels()
    images[0, 0, 0, :2] = -0.2, 1.2
    assert torch.equal(parsed(*binary_body(images)).images, torch.from_numpy(images))


FIELDS: dict[str, dict[str, Any]] = {
    "no input": {"inputs": []},
    "two inputs": {"inputs": [tensor(pixels()), {**tensor(pixels()), "name": "masks"}]},
    "an input twice": {"inputs": [tensor(pixels())] * 2},
    "another name": {"inputs": [{**tensor(pixels()), "name": "pixels"}]},
    "a name that is a list": {"inputs": [{**tensor(pixels()), "name": ["images"]}]},
    "inputs that are no list": {"inputs": tensor(pixels())},
    "an input that is no object": {"inputs": ["images"]},
    "no datatype": {"inputs": [tensor(pixels(), datatype=None)]},
    "another datatype": {"inputs": [{**tensor(pixels()), "datatype": "BYTES"}]},
    "a datatype that is a list": {"inputs": [{**tensor(pixels()), "datatype": ["FP32"]}]},
    "parameters that are no object": {"parameters": [1]},
    "a text for a flag": {"parameters": {"binary_data_output": "true"}},
    "parameters of the input that are no object": {"inputs": [tensor(pixels(), parameters=3)]},
    "shared memory": {"inputs": [tensor(pixels(), parameters={"shared_memory_region": "a"})]},
    "an id that is a number": {"id": 3},
    "an id that is a list": {"id": ["3"]},
    "an unknown output": {"outputs": [{"name": "features"}]},
    "an output without a name": {"outputs": [{}]},
    "an output whose name is an object": {"outputs": [{"name": {}}]},
    "an output twice": {"outputs": [{"name": "labels"}, {"name": "labels"}]},
    "an output that is no object": {"outputs": ["labels"]},
    "outputs that are no list": {"outputs": {"name": "labels"}},
    "an output in shared memory": {"outputs": [{"name": "labels", "parameters": {"shared_memory_region": "a"}}]},
    "classification": {"outputs": [{"name": "labels", "parameters": {"classification": 3}}]},
    "a number for a flag": {"outputs": [{"name": "labels", "parameters": {"binary_data": 1}}]},
    "data and a size": {"inputs": [tensor(pixels(), parameters={"binary_data_size": 192})]},
    "a size and no bytes": {"inputs": [tensor(pixels(), data=None, parameters={"binary_data_size": 192})]},
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_make_no_sense_are_refused(name: str) -> None:
    error = refusal({"inputs": [tensor(pixels())], **FIELDS[name]})
    assert error.status_code == 400
    assert error.detail


@pytest.mark.parametrize("size", [-192, 0, 191, 193, 2**63, 192.0, "192", True, [192]])
def test_binary_sizes_that_are_not_the_tensor_s_are_refused(size: object) -> None:
    assert refusal(*binary_body(pixels(), size=size)).status_code == 400


def test_bytes_that_are_missing_or_too_many_are_refused() -> None:
    body, headers = binary_body(pixels())
    assert refusal(body + b"\0", headers).status_code == 400
    assert refusal(body[:-1], headers).status_code == 400
    assert refusal(json_body(pixels()) + b"    ", {HEADER_LENGTH: str(len(json_body(pixels())))}).status_code == 400


@pytest.mark.parametrize("length", ["", "-1", "+5", "1e2", "0x10", "9" * 30, "100000", " 5", "0", "20", "٣"])
def test_header_lengths_that_lie_are_refused(length: str) -> None:
    body, _ = binary_body(pixels())
    assert refusal(body, {HEADER_LENGTH: length}).status_code == 400


def test_too_many_images_are_refused_with_the_limit() -> None:
    error = refusal(*binary_body(pixels(5)))
    assert error.status_code == 413
    assert "4" in error.detail
