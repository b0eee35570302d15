"""The routes of a service: the Open Inference Protocol v2, image files, the page, and commands to the adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

import ttac
from ttac.serving import schemas
from ttac.serving.batcher import Batcher
from ttac.serving.errors import RequestError, come_again
from ttac.serving.history import History
from ttac.serving.inference import Inference
from ttac.serving.limits import BodyReader, HttpSettings
from ttac.serving.metrics import Metrics
from ttac.serving.middleware import Gate, error_response, json_response
from ttac.serving.protocol import ServedModel, model_metadata, parse_object, server_metadata

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


@dataclass(frozen=True)
class CommandReply:
    """What became of a command: not `done` means that the adapter has it and is still busy."""

    done: bool
    ok: bool
    message: str
    version: int | None = None


class AdapterAwayError(RuntimeError):
    """The adapter does not run, so it cannot take commands."""


class Service(Protocol):
    """What the routes need of a predictor."""

    @property
    def description(self) -> ServedModel:
        """What is served."""

    @property
    def batcher(self) -> Batcher:
        """Who answers."""

    @property
    def history(self) -> History:
        """What has happened lately."""

    @property
    def version(self) -> int:
        """The version of the next answer."""

    def status(self) -> dict[str, Any]:
        """Give all that is known of the predictor and the adapter."""

    def events(self, count: int) -> list[dict[str, Any]]:
        """Give the last lines of the journal, oldest first."""

    async def command(self, name: str, arguments: dict[str, Any]) -> CommandReply:
        """Ask the adapter for something; AdapterAwayError where it does not run."""


def build_app(service: Service, settings: HttpSettings, lifespan: Lifespan | None = None) -> FastAPI:
    """Make the ASGI application of a service, which runs within `lifespan`."""
    app = FastAPI(
        title=f"ttac: {service.description.name}",
        version=ttac.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    metrics = Metrics(service.description, service.batcher, service.status)
    predicting = frozenset((INFER, INFER_VERSION, PREDICT))
    app.add_middleware(Gate, settings=settings, metrics=metrics, history=service.history, predicting=predicting)
    inference = Inference(service.description, service.batcher, service.history, metrics, settings)
    _handle_errors(app)
    _add_inference(app, inference, service)  # first, as routes are tried in turn
    _add_protocol(app, service)
    _add_views(app, service, metrics)
    _add_commands(app, service, BodyReader(2**16, settings.body_seconds))
    return app


def _handle_errors(app: FastAPI) -> None:
    """Give every error the form `{"error": ...}`."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error.status, error.message, error.headers)

    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail), dict(error.headers or {}))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return error_response(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    async def failed(_: Request, error: Exception) -> Response:
        return error_response(500, "the server failed; its log says why")

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, failed)


def _add_views(app: FastAPI, service: Service, metrics: Metrics) -> None:
    plain = schemas.answers(content=schemas.json_object())
    content = PAGE.read_bytes()  # once: there may be no file descriptor left for it later

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/status", responses=plain)
    async def status() -> Response:
        return json_response(service.status())

    @app.get("/history", responses=plain)
    def history() -> Response:
        return json_response(service.history.json())

    @app.get("/events", responses=schemas.answers(422, content=schemas.json_object()))
    def events(count: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Response:
        return json_response({"events": service.events(count)})

    @app.get("/metrics", responses=schemas.answers(content={"text/plain": {"schema": {"type": "string"}}}))
    async def prometheus() -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_protocol(app: FastAPI, service: Service) -> None:
    model = service.description
    plain = schemas.answers(content=schemas.json_object())

    @app.get("/v2", responses=plain)
    async def server() -> Response:
        return json_response(server_metadata(ttac.__version__))

    @app.get("/v2/health/live", responses=plain)
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/v2/health/ready", responses=schemas.answers(503, content=schemas.json_object()))
    async def ready() -> Response:
        if service.batcher.closed:
            raise come_again(503, "the server is shutting down")
        return json_response({"ready": True})

    described = schemas.answers(404, content=schemas.json_object())
    probed = schemas.answers(404, 503, content=schemas.json_object())

    @app.get(MODEL, responses=described, openapi_extra=schemas.of_model(model))
    async def metadata(request: Request) -> Response:
        _check_name(request, model)
        return json_response(model_metadata(model, service.version))

    @app.get(VERSION, responses=described, openapi_extra=schemas.of_version(model))
    async def version_metadata(request: Request) -> Response:
        return json_response(model_metadata(model, _checked_version(request, service)))

    @app.get(MODEL + "/ready", responses=probed, openapi_extra=schemas.of_model(model))
    async def model_ready(request: Request) -> Response:
        _check_name(request, model)
        return await ready()

    @app.get(VERSION + "/ready", responses=probed, openapi_extra=schemas.of_version(model))
    async def version_ready(request: Request) -> Response:
        _checked_version(request, service)
        return await ready()


def _check_name(request: Request, model: ServedModel) -> None:
    # Not by an argument of the route, which FastAPI takes longer to check than a tensor takes to parse.
    if request.path_params["name"] != model.name:
        raise RequestError(404, f"there is no such model; this server has {model.name!r}")


def _checked_version(request: Request, service: Service) -> int:
    """Give the version that an address names, which must be the one that is served."""
    _check_name(request, service.description)
    served = service.version
    if request.path_params["version"] != str(served):
        raise RequestError(404, f"version {served} alone is served: ask for that one, or without a version")
    return served


def _add_inference(app: FastAPI, inference: Inference, service: Service) -> None:
    refusals = (400, 408, 413, 415, 429, 503)
    model, max_images = inference.model, inference.batcher.max_batch

    @app.post(
        INFER,
        responses=schemas.answers(404, *refusals, content=schemas.infer_answer()),
        openapi_extra=schemas.infer_body(schemas.of_model(model), model, max_images),
    )
    async def infer(request: Request) -> Response:
        _check_name(request, model)
        return await inference.infer(request)

    @app.post(
        INFER_VERSION,
        responses=schemas.answers(404, 409, *refusals, content=schemas.infer_answer()),
        openapi_extra=schemas.infer_body(schemas.of_version(model), model, max_images),
    )
    async def infer_version(request: Request) -> Response:
        return await inference.infer(request, _checked_version(request, service))

    @app.post(
        PREDICT,
        responses=schemas.answers(*refusals, content=schemas.predict_answer()),
        openapi_extra=schemas.predict_body(),
    )
    async def predict(request: Request) -> Response:
        return await inference.predict(request)


def _add_commands(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    @app.post(
        "/admin/{command}",
        responses=schemas.answers(202, 400, 408, 409, 413, 415, 422, 503, content=schemas.json_object()),
        openapi_extra=schemas.admin_body(),
    )
    async def admin(command: Command, request: Request) -> Response:
        body = await bodies.read(request.receive, dict(request.scope["headers"]))
        bodies.release(len(body))
        arguments = _arguments(command, parse_object(body) if body.strip() else {})
        try:
            reply = await service.command(command, arguments)
        except AdapterAwayError as error:
            raise come_again(503, str(error)) from error
        if not reply.done:
            return json_response({"message": reply.message, "version": reply.version}, 202)
        if not reply.ok:
            raise RequestError(409, reply.message)
        return json_response({"message": reply.message, "version": reply.version})


def _arguments(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    unknown = set(arguments) - ({"version"} if command == "rollback" else set())
    if unknown:
        raise RequestError(400, f"{command} takes no such argument")
    version = arguments.get("version", 1)
    if type(version) is not int or not 1 <= version <= 2**53:
        raise RequestError(400, "version must be the number of a version")
    return arguments
