"""The routes: answers, tokens, hosts, commands and metrics."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fake_service import (
    CLASSES,
    INFER,
    binary_body,
    expected,
    json_body,
    pixels,
    serving,
)
from PIL import Image

from ttac.data.folder import read_image
from ttac.serving.batcher import Answer
from ttac.serving.errors import RequestError, come_again
from ttac.serving.limits import HttpSettings
from ttac.serving.protocol import HEADER_LENGTH

ADMIN = {"Authorization": "Bearer admin"}


def picture(height: int = 9, width: int = 7, kind: str = "PNG", **options: Any) -> bytes:
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind, **options)
    return file.getvalue()


def test_an_image_is_answered_in_json_and_in_binary() -> None:
    images = pixels(3)
    probabilities, labels = expected(images)
    with serving() as (service, client):
        answer = client.post(INFER, content=json_body(images, id="a")).json()
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("a", "tiny", "5")
        first, second = answer["outputs"]
        np.testing.assert_allclose(np.reshape(first["data"], first["shape"]), probabilities, rtol=1e-5)
        assert second == {"name": "labels", "datatype": "INT64", "shape": [3], "data": labels.tolist()}
        body, headers = binary_body(images, parameters={"binary_data_output": True})
        response = client.post(INFER, content=body, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    split = int(response.headers[HEADER_LENGTH])
    raw = response.content[split:]
    np.testing.assert_allclose(np.frombuffer(raw[:-24], "<f4").reshape(3, -1), probabilities, rtol=1e-5)
    assert np.frombuffer(raw[-24:], "<i8").tolist() == labels.tolist()
    assert torch.equal(torch.cat(service.taken), torch.from_numpy(np.concatenate([images, images])))
    assert service.history.summary()["images"] == 6


def test_large_requests_are_decoded_beside_the_loop() -> None:
    images = pixels(64)
    with serving() as (service, client):
        assert len(json_body(images)) > 2**13
        assert client.post(INFER, content=json_body(images)).status_code == 200
    assert torch.equal(service.taken[0], torch.from_numpy(images))


def test_an_image_file_is_read_as_the_folder_reader_does(tmp_path: Any) -> None:
    content = picture()
    (tmp_path / "a.png").write_bytes(content)
    image = read_image(tmp_path / "a.png", (4, 4), 3)
    probabilities, labels = expected(image[None].numpy())
    with serving() as (service, client):
        raw = client.post("/predict", content=content, headers={"Content-Type": "image/png"}).json()
        form = client.post("/predict", files={"file": ("../a.png", content, "image/png")}).json()
    assert raw == form
    assert (raw["class"], raw["label"]) == (labels[0], CLASSES[labels[0]])
    assert raw["confidence"] == pytest.approx(probabilities.max(), rel=1e-5)
    assert [entry["class"] for entry in raw["top"]] == np.argsort(-probabilities[0])[:5].tolist()
    assert raw["top"][0] == {"label": raw["label"], "class": raw["class"], "probability": raw["confidence"]}
    assert raw["model_version"] == "5"
    assert torch.equal(service.taken[0], image[None])


def test_a_camera_s_file_of_several_pictures_is_one_image() -> None:
    content = picture(kind="MPO", save_all=True, append_images=[Image.new("RGB", (7, 9))])
    with serving() as (_, client):
        assert client.post("/predict", content=content).status_code == 200


def test_health_metadata_and_views() -> None:
    with serving() as (service, client):
        assert client.get("/v2/health/live").json() == {"live": True}
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get("/v2/models/tiny/ready").status_code == 200
        assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
        assert client.get("/v2/models/tiny").json()["versions"] == ["5"]
        assert client.get("/status").json() == service.status()
        assert client.get("/events?count=1").json()["events"][0]["event"] == "start"
        assert client.get("/history").json()["interval"] == 1.0
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        service.batcher.close()
        closing = client.get("/v2/health/ready")
        assert (closing.status_code, closing.headers["retry-after"]) == (503, "1")
        refused = client.post(INFER, content=json_body(pixels()))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("path", ["/", "/status", "/v2", "/v2/health/ready", "/v2/models/tiny", "/metrics", "/nowhere"])
def test_probes_that_want_no_body_get_what_others_get(path: str) -> None:
    with serving() as (_, client):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path != "/metrics":  # which counts the requests before
            assert head.headers["content-length"] == str(len(whole.content))
        assert client.head(INFER).status_code == 405
        assert client.options(path).status_code in (404, 405)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v2/models/%00/ready", 404),
        ("GET", "/v2/models/tiny/versions/4", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("GET", INFER, 405),
        ("DELETE", "/status", 405),
        ("GET", "/events?count=0", 422),
        ("GET", "/events?count=many", 422),
        ("GET", "/docs", 404),
    ],
)
def test_errors_of_the_router_have_the_form_of_all_errors(method: str, path: str, status: int) -> None:
    with serving() as (_, client):
        response = client.request(method, path)
    assert response.status_code == status
    assert list(response.json()) == ["error"]


def test_an_error_of_the_server_itself_has_the_form_of_all_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (service, client):
        monkeypatch.setattr(service, "status", lambda: 1 / 0)
        response = client.get("/status")
        assert (response.status_code, list(response.json())) == (500, ["error"])
        monkeypatch.setattr(service.batcher, "_predict", lambda images: Answer(torch.full((1, 7), torch.nan), 5))
        response = client.post(INFER, content=json_body(pixels()))
        assert (response.status_code, list(response.json())) == (500, ["error"])
    assert service.taken == []


TOKENS = HttpSettings(token="user", admin_token="admin")


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/v2/health/live", None, 200),
        ("/", None, 200),
        ("/status", None, 401),
        ("/openapi.json", None, 401),
        ("/nowhere", None, 401),
        ("/status", "Bearer user", 200),
        ("/status", "bearer admin", 200),
        ("/status", "Bearer use", 401),
        ("/status", "Bearer", 401),
        ("/status", "Basic user", 401),
        ("/status", "Bearer \xfc", 401),
        ("/admin/pause", None, 401),
        ("/admin/pause", "Bearer user", 403),
        ("/admin/pause", "Bearer wrong", 401),
        ("/admin/pause", "Bearer admin", 200),
    ],
)
def test_tokens(path: str, given: str | None, status: int) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    with serving(TOKENS) as (service, client):
        response = client.request("POST" if path.startswith("/admin") else "GET", path, headers=headers)
    assert response.status_code == status
    assert bool(service.commands) == (path.startswith("/admin") and status == 200)
    if status in (401, 403):
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert "admin" not in response.text.replace("administrator", "")
        assert "user" not in response.text


def test_without_a_token_nobody_may_change_the_server() -> None:
    with serving(HttpSettings()) as (service, client):
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            assert client.post("/admin/reset", headers=headers).status_code == 403
    assert service.commands == []
    with pytest.raises(ValueError, match="empty token"):
        HttpSettings(admin_token="")


@pytest.mark.parametrize(
    ("host", "hosts", "status"),
    [
        ("localhost:8000", (), 200),
        ("[::1]:8000", (), 200),
        ("127.0.0.9", (), 200),
        ("evil.example", (), 403),
        ("127.0.0.1.evil.example", (), 403),
        ("[bad", (), 403),
        ("models.example:80", ("models.example",), 200),
        ("MODELS.example.", ("Models.Example",), 200),
        ("models.example", ("models.EXAMPLE.",), 200),
        ("LocalHost", (), 200),
        ("other.example", ("models.example",), 403),
        ("anything.example", None, 200),
    ],
)
def test_names_under_which_the_server_is_asked(host: str, hosts: tuple[str, ...] | None, status: int) -> None:
    with serving(HttpSettings(hosts=hosts)) as (_, client):
        assert client.get("/v2", headers={"Host": host}).status_code == status
        assert client.get("/v2/health/ready", headers={"Host": host}).status_code == 200, "probes ask by any address"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("https://127.0.0.1:8000", 200),
        ("http://127.0.0.1:9000", 403),
        ("http://127.0.0.1", 403),
        ("http://localhost:8000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_places_are_refused(origin: str, status: int) -> None:
    headers = {"Host": "127.0.0.1:8000", "Origin": origin}
    with serving() as (service, client):
        assert client.post("/admin/pause", headers={**headers, **ADMIN}).status_code == status
        assert client.post(INFER, content=json_body(pixels()), headers=headers).status_code == status
    assert len(service.commands) == len(service.taken) == (status == 200)


def test_commands_and_what_becomes_of_them() -> None:
    with serving() as (service, client):

        def ask(command: str, body: bytes = b"") -> httpx.Response:
            return client.post(f"/admin/{command}", content=body, headers=ADMIN)

        done = ask("rollback", b'{"version": 3}')
        assert (done.status_code, done.json()) == (200, {"message": "done", "version": 6})
        assert ask("snapshot").status_code == 200
        assert service.commands == [("rollback", {"version": 3}), ("snapshot", {})]
        for command, body in (
            ("rollback", b'{"version": true}'),
            ("rollback", b'{"version": -1}'),
            ("rollback", b'{"version": 1e3}'),
            ("rollback", b'{"id": 3}'),
            ("pause", b'{"version": 3}'),
            ("pause", b"[]"),
            ("pause", b"["),
        ):
            assert ask(command, body).status_code == 400
        assert ask("pause", b" " * 2**17).status_code == 413
        assert ask("shutdown").status_code == 422
        assert len(service.commands) == 2
        service.reply = RequestError(409, "no version 3")
        assert (ask("rollback").status_code, ask("rollback").json()) == (409, {"error": "no version 3"})
        service.reply = (202, {"message": "later", "version": 5})
        assert ask("reset").status_code == 202
        service.reply = come_again(503, "the adapter is not running")
        assert (ask("pause").status_code, ask("pause").headers["retry-after"]) == (503, "1")


def test_metrics_count_what_happened() -> None:
    images = pixels(3)
    labels = expected(images)[1]
    with serving() as (_, client):
        client.post(INFER, content=json_body(images))
        client.post(INFER, content=b"{}")
        client.get("/secret-path")
        text = client.get("/metrics").text
    for line in (
        'ttac_requests_total{route="/v2/models/{name}/infer",status="200"} 1.0',
        'ttac_requests_total{route="/v2/models/{name}/infer",status="400"} 1.0',
        'ttac_requests_total{route="other",status="404"} 1.0',
        'ttac_request_seconds_count{route="/v2/models/{name}/infer"} 2.0',
        "ttac_images_total 3.0",
        f'ttac_predicted_total{{class="{CLASSES[labels[0]]}"}} {float((labels == labels[0]).sum())}',
        'ttac_batch_images_bucket{le="2.0"} 0.0',
        'ttac_batch_images_bucket{le="4.0"} 1.0',
        "ttac_batch_images_sum 3.0",
        "ttac_waiting_images 0.0",
        "ttac_weights_version 5.0",
        "ttac_weights_age_seconds 1.5",
        "ttac_adapter_up 1.0",
        "ttac_adapter_lag_samples 3.0",
        "ttac_samples_dropped_total 2.0",
        "ttac_updates_total 9.0",
        "ttac_guard_trips_total 4.0",
        "ttac_rollbacks_total 1.0",
        "ttac_resets_total 2.0",
        "ttac_bad_samples_total 6.0",
        "ttac_guard_ok 0.0",
        'ttac_guard_measure{measure="entropy",of="adapted"} 0.5',
    ):
        assert f"\n{line}\n" in text, line
    confidence = re.search(r"\nttac_confidence_total (\S+)\n", text)
    assert confidence is not None
    assert float(confidence[1]) == pytest.approx(expected(images)[0].max(1).sum(), rel=1e-5)
    assert "secret" not in text


def test_the_description_of_the_api_is_there_and_names_the_model_s_shape() -> None:
    with serving() as (_, client):
        described = client.get("/openapi.json").json()
    infer = described["paths"]["/v2/models/{name}/infer"]["post"]
    assert {parameter["name"] for parameter in infer["parameters"]} == {"name", HEADER_LENGTH}
    schema = infer["requestBody"]["content"]["application/json"]["schema"]
    assert json.dumps(schema).count('{"const": 4}') == 2
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "503"} <= set(infer["responses"])
