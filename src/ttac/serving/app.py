"""The routes of a service: the Open Inference Protocol v2, image files, the page, and commands to the adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

import ttac
from ttac.serving import schemas
from ttac.serving.errors import RequestError, come_again
from ttac.serving.inference import Inference
from ttac.serving.limits import BodyReader, HttpSettings
from ttac.serving.metrics import Metrics
from ttac.serving.middleware import Gate, error_response, json_response, refusal
from ttac.serving.protocol import PLATFORM, first_problem, model_metadata, parse_body
from ttac.serving.service import PredictorService

MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"
INFER = MODEL + "/infer"
INFER_VERSION = VERSION + "/infer"
PREDICT = "/predict"
PAGE = Path(__file__).with_name("page.html")
# The page is one file that loads nothing; no other page may frame its buttons.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
Command = Literal["pause", "resume", "reset", "rollback", "snapshot"]


def build_app(service: PredictorService, settings: HttpSettings, lifespan: Lifespan | None = None) -> FastAPI:
    """Make the ASGI application of a service, which runs within `lifespan`."""
    app = FastAPI(
        title=f"ttac: {service.description.name}",
        version=ttac.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=schemas.errors(401, 403),
    )
    metrics = Metrics(service.description, service.batcher, service.status)
    predicting = frozenset((INFER, INFER_VERSION, PREDICT))
    app.add_middleware(Gate, settings=settings, metrics=metrics, history=service.history, predicting=predicting)
    _handle_errors(app)
    _add_inference(app, Inference(service, metrics, settings), service)  # first, as routes are tried in turn
    _add_protocol(app, service)
    _add_views(app, service, metrics)
    _add_commands(app, service, BodyReader(2**16, settings.body_seconds))
    return app


def _handle_errors(app: FastAPI) -> None:
    """Give every error the form `{"error": ...}`."""

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(422, first_problem(error.errors()))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(500, "the server failed; its log says why")


def _add_views(app: FastAPI, service: PredictorService, metrics: Metrics) -> None:
    content = PAGE.read_bytes()  # once: there may be no file descriptor left for it later

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/status")
    async def status() -> Response:
        return json_response(service.status())

    @app.get("/history")
    def history() -> Response:
        return json_response(service.history.json())

    @app.get("/events", responses=schemas.errors(422))
    def events(count: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Response:
        return json_response({"events": service.events(count)})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_protocol(app: FastAPI, service: PredictorService) -> None:
    model = service.description
    named, versioned = schemas.of_model(model), schemas.of_version(model)

    @app.get("/v2")
    async def server() -> Response:
        return json_response({"name": PLATFORM, "version": ttac.__version__, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live")
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/v2/health/ready", responses=schemas.errors(503))
    async def ready() -> Response:
        if service.batcher.closed:
            raise come_again(503, "the server is shutting down")
        return json_response({"ready": True})

    @app.get(MODEL, responses=schemas.errors(404), openapi_extra=named)
    @app.get(VERSION, responses=schemas.errors(404), openapi_extra=versioned)
    async def metadata(request: Request) -> Response:
        version = _named_version(request, service)
        return json_response(model_metadata(model, service.version if version is None else version))

    @app.get(MODEL + "/ready", responses=schemas.errors(404, 503), openapi_extra=named)
    @app.get(VERSION + "/ready", responses=schemas.errors(404, 503), openapi_extra=versioned)
    async def model_ready(request: Request) -> Response:
        _named_version(request, service)
        return await ready()


def _named_version(request: Request, service: PredictorService) -> int | None:
    """Check the model that an address names, and give the version if it names one: that which is served, or none."""
    # Not by an argument of the route, which FastAPI takes longer to check than a tensor takes to parse.
    if request.path_params["name"] != service.description.name:
        raise RequestError(404, f"there is no such model; this server has {service.description.name!r}")
    wanted, served = request.path_params.get("version"), service.version
    if wanted not in (None, str(served)):
        raise RequestError(404, f"version {served} alone is served: ask for that one, or without a version")
    return None if wanted is None else served


def _add_inference(app: FastAPI, inference: Inference, service: PredictorService) -> None:
    refusals = (400, 408, 413, 415, 429, 503)
    model, max_images = inference.model, inference.batcher.max_batch
    answers = schemas.answers(schemas.InferAnswer, 404, 409, *refusals)
    answers[200]["content"] = {"application/octet-stream": schemas.BINARY}
    named = schemas.infer_body(schemas.of_model(model), model, max_images)
    versioned = schemas.infer_body(schemas.of_version(model), model, max_images)

    @app.post(INFER, responses=answers, openapi_extra=named)
    @app.post(INFER_VERSION, responses=answers, openapi_extra=versioned)
    async def infer(request: Request) -> Response:
        return await inference.infer(request, _named_version(request, service))

    files = schemas.answers(schemas.PredictAnswer, *refusals)

    @app.post(PREDICT, responses=files, openapi_extra=schemas.PREDICT_BODY)
    async def predict(request: Request) -> Response:
        return await inference.predict(request)


def _add_commands(app: FastAPI, service: PredictorService, bodies: BodyReader) -> None:
    answers = schemas.answers(schemas.Reply, 202, 400, 408, 409, 413, 415, 422, 503)

    @app.post("/admin/{command}", responses=answers, openapi_extra=schemas.ADMIN_BODY)
    async def admin(command: Command, request: Request) -> Response:
        kind = schemas.RollbackArguments if command == "rollback" else schemas.NoArguments
        async with bodies.body(request.receive, dict(request.scope["headers"])) as body:
            arguments = parse_body(body if body.strip() else b"{}", kind)
        status, reply = await service.command(command, arguments.model_dump(exclude_none=True))
        return json_response(reply, status)
