"""Addresses that name a version of the weights: only that version answers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import torch
from fake_service import LOCAL, FakeService, binary_body, expected, json_body, listening, pixels, serving
from waiting import until

from ttac.serving.app import build_app
from ttac.serving.limits import HttpSettings

VERSION = "/v2/models/tiny/versions/5"


def test_the_version_that_is_served_is_described_and_answers() -> None:
    images = pixels(2)
    with serving() as (service, client):
        assert client.get(VERSION).json() == client.get("/v2/models/tiny").json()
        assert client.get(f"{VERSION}/ready").json() == {"ready": True}
        answer = client.post(f"{VERSION}/infer", content=json_body(images)).json()
        assert answer["model_version"] == "5"
        assert answer["outputs"][1]["data"] == expected(images)[1].tolist()
        text = client.get("/metrics").text
    assert torch.equal(service.taken[0], torch.from_numpy(images))
    assert 'ttac_requests_total{route="/v2/models/{name}/versions/{version}/infer",status="200"} 1.0' in text


@pytest.mark.parametrize("version", ["4", "6", "05", "5.0", "+5", "-5", "latest", "%35%00", "9" * 5000])
def test_other_versions_are_not_there(version: str) -> None:
    address = f"/v2/models/tiny/versions/{version}"
    with serving() as (service, client):
        answers = [client.get(address), client.get(f"{address}/ready")]
        answers.append(client.post(f"{address}/infer", content=json_body(pixels())))
        assert [answer.status_code for answer in answers] == [404] * 3
        assert all("version 5 alone is served" in answer.json()["error"] for answer in answers)
        assert client.get("/v2/models/other/versions/5").status_code == 404
    assert service.taken == []


def test_a_version_that_is_replaced_while_a_request_waits_does_not_answer() -> None:
    async def main(service: FakeService) -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(service, HttpSettings()))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            service.gate.clear()
            body, headers = binary_body(pixels())
            requests = [
                asyncio.ensure_future(client.post(address, content=body, headers=headers))
                for address in (f"{VERSION}/infer", "/v2/models/tiny/infer")
            ]
            await asyncio.to_thread(until, lambda: service.entered == 1 and service.batcher.waiting == 1)
            service.version = 6
            service.gate.set()
            return list(await asyncio.gather(*requests))

    with FakeService(max_batch=1) as service:
        named, unnamed = asyncio.run(main(service))
    assert (named.status_code, named.json()) == (409, {"error": "version 6 took the place of 5 meanwhile: ask again"})
    assert (unnamed.status_code, unnamed.json()["model_version"]) == (200, "6")
    assert len(service.taken) == 1


def test_the_client_of_triton_asks_for_a_version() -> None:
    triton = pytest.importorskip("tritonclient.http")
    errors = pytest.importorskip("tritonclient.utils").InferenceServerException
    images = pixels(2)
    with FakeService() as service, listening(build_app(service, HttpSettings())) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        tensor = triton.InferInput("images", list(images.shape), "FP32")
        tensor.set_data_from_numpy(images)
        assert client.is_model_ready("tiny", "5")
        assert not client.is_model_ready("tiny", "4")
        assert client.get_model_metadata("tiny", "5")["versions"] == ["5"]
        answer = client.infer("tiny", [tensor], model_version="5")
        assert answer.as_numpy("labels").tolist() == expected(images)[1].tolist()
        with pytest.raises(errors, match="version 5 alone is served"):
            client.infer("tiny", [tensor], model_version="4")
        client.close()
