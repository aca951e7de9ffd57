"""The routes: which request is answered by what."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from jaxdist import __version__
from jaxdist.inference.errors import EngineError
from jaxdist.server import embeddings, engine_view, responses, tokenization
from jaxdist.server.chat_completions import ChatJob
from jaxdist.server.completions import CompletionJob
from jaxdist.server.errors import APIError
from jaxdist.server.gate import Gate
from jaxdist.server.http import EventStream, LongAnswer, error_answer, json_answer, read_body
from jaxdist.server.metrics import CONTENT_TYPE, Metrics
from jaxdist.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from jaxdist.server.requests import Job, engine_failure
from jaxdist.server.responses import Answer
from jaxdist.server.service import Service

PAGE = Path(__file__).with_name("page")
_MEANINGS = {
    "/v1/completions": "Texts that are continued. Streamed, each event is such an answer.",
    "/v1/chat/completions": "Chats that are answered. Streamed, each event is a ChatChunk.",
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": responses.ErrorAnswer},
    503: {"model": responses.ErrorAnswer},
}
_SECURITY = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(service: Service) -> FastAPI:
    """The ASGI application; what `service` serves may come later."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if service.model is not None:
            await service.model.chat.close()

    app = FastAPI(
        title="jaxdist",
        version=__version__,
        description="OpenAI's API, served by jaxdist.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads its parts from the network
        redoc_url=None,
    )
    metrics = Metrics(service)
    _add_generation(app, service, metrics)
    _add_texts(app, service, metrics)
    _add_models(app, service)
    _add_state(app, service, metrics)
    app.mount("/", _Page(list(app.routes)))
    app.add_exception_handler(APIError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_http)
    app.add_exception_handler(RequestValidationError, _refuse_query)
    app.add_middleware(Gate, service=service)
    if service.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's own client sends a dozen about itself
            expose_headers=["retry-after", "x-request-id"],
        )
    app.openapi = lambda: _openapi(app)
    return app


def _takes(kind: type[BaseModel], answer: type[Answer], **more: Any) -> dict[str, Any]:
    """What a route says of itself: the body is read by `read_body`, which FastAPI cannot see."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}, **more},
        "responses": {200: {"model": answer}} | _REFUSALS,
        "response_model": None,
    }


def _add_generation(app: FastAPI, service: Service, metrics: Metrics) -> None:
    kinds: dict[str, tuple[Any, Any, str, type[Answer]]] = {
        "/v1/completions": (CompletionRequest, CompletionJob, "cmpl", responses.Completion),
        "/v1/chat/completions": (ChatRequest, ChatJob, "chatcmpl", responses.ChatCompletion),
    }
    for path, (kind, job_kind, prefix, answer) in kinds.items():

        def make(
            kind: Any = kind, job_kind: Any = job_kind, prefix: str = prefix
        ) -> Callable[[Request], Awaitable[Response]]:
            async def generate(request: Request) -> Response:
                body = await read_body(request, kind, service.options.limits.max_body_bytes)
                model = service.ready_model(body.model)
                job = _job(request, service, metrics, prefix)
                work = job_kind(body, job, model)
                await work.prepare()
                if body.stream:
                    return EventStream(work.stream(), _failure)
                return LongAnswer(work.whole())

            return generate

        name = kind.__name__.removesuffix("Request").lower()
        about = {"name": name, "description": _MEANINGS[path]}
        app.add_api_route(path, make(), methods=["POST"], **about, **_takes(kind, answer))


def _add_texts(app: FastAPI, service: Service, metrics: Metrics) -> None:
    most = service.options.limits.max_body_bytes

    @app.post("/v1/embeddings", **_takes(EmbeddingRequest, responses.Embeddings))
    async def embed(request: Request) -> Response:
        """Texts as vectors of length 1."""
        body = await read_body(request, EmbeddingRequest, most)
        model = service.ready_model(body.model)
        job = _job(request, service, metrics, "embd")
        await embeddings.prepare(body, job, model)
        return LongAnswer(embeddings.whole(body, job))

    @app.post("/tokenize", **_takes(TokenizeRequest, responses.Tokens))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a chat's prompt."""
        body = await read_body(request, TokenizeRequest, most)
        model = service.ready_model(body.model)
        return json_answer(await tokenization.tokenize(body, model, service.options))

    @app.post("/detokenize", **_takes(DetokenizeRequest, responses.Text))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest, most)
        return json_answer(await tokenization.detokenize(body, service.ready_model(body.model)))


def _add_models(app: FastAPI, service: Service) -> None:
    def about(name: str) -> responses.Model:
        model = service.ready_model(name)
        more: dict[str, Any] = {"default_sampling_params": model.defaults} if model.defaults else {}
        return responses.Model(
            id=name,
            object="model",
            created=model.created,
            owned_by="jaxdist",
            max_model_len=model.max_model_len,
            **more,
        )

    @app.get("/v1/models", response_model=responses.Models, responses=_REFUSALS)
    async def models() -> Response:
        """The names that the model has."""
        data = [about(name) for name in service.options.names]
        return json_answer(responses.Models(object="list", data=data))

    @app.get("/v1/models/{name:path}", response_model=responses.Model, responses=_REFUSALS)
    async def one_model(name: str) -> Response:
        """One of them."""
        return json_answer(about(name))


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(PAGE / "docs.html", headers=_SECURITY)

    @app.get("/health", response_class=Response, responses={503: {"description": "Failed"}})
    async def health() -> Response:
        """Whether the process should live: 503 where the engine has failed."""
        failed = service.model is not None and service.model.engine.errored
        return Response(status_code=503 if failed else 200)

    @app.get("/ready", response_class=Response, responses={503: _REFUSALS[503]})
    async def ready() -> Response:
        """Whether requests are served: 503 while loading and while shutting down."""
        service.ready_model()
        return Response(status_code=200)

    @app.get("/version", response_model=responses.Version)
    async def version() -> Response:
        """Of jaxdist."""
        return json_answer(responses.Version(version=__version__))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/engine", response_model=engine_view.EngineView, responses=_REFUSALS)
    async def engine(stream: bool = False) -> Response:
        """The engine now, or as events for as long as the client stays."""
        if stream:
            return EventStream(engine_view.views(service), _failure, done=False)
        return json_answer(engine_view.view(service))


def _job(request: Request, service: Service, metrics: Metrics, prefix: str) -> Job:
    job = Job(service, metrics, prefix, salt=request.scope["state"]["salt"])
    request.scope["state"]["job"] = job
    return job


def _failure(error: Exception) -> APIError:
    """What a client is told of an error in the midst of a stream."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineError):
        return engine_failure(error)
    raise error


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_answer(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Routes that do not exist, and methods that they do not have."""
    assert isinstance(error, HTTPException)
    missing = {404: "there is no such path; /docs lists them", 405: "this path has another method"}
    message = missing.get(error.status_code, str(error.detail)[:200])
    refusal = APIError(message, status=error.status_code, headers=error.headers)
    return error_answer(refusal)


async def _refuse_query(request: Request, error: Exception) -> Response:
    """A parameter of the address that is wrong."""
    assert isinstance(error, RequestValidationError)
    name = str(error.errors()[0]["loc"][-1])
    return error_answer(APIError(f"{name}: {error.errors()[0]['msg']}", param=name))


class _Page(StaticFiles):
    """The page's files; nothing from elsewhere is loaded by them.

    What no route takes ends here: also the right path with the wrong method, for which `routes`
    are asked.
    """

    def __init__(self, routes: Sequence[BaseRoute]):
        super().__init__(directory=PAGE, html=True)
        self.routes = routes

    async def get_response(self, path: str, scope: Scope) -> Response:
        known = [route for route in self.routes if route.matches(scope)[0] is Match.PARTIAL]
        methods = {m for route in known for m in getattr(route, "methods", None) or ()}
        reads = scope["method"] in ("GET", "HEAD")
        if not known and not reads and self._has(path):
            methods = {"GET", "HEAD"}
        if methods:
            raise HTTPException(405, headers={"allow": ", ".join(sorted(methods))})
        if not reads:
            raise HTTPException(404)
        return await super().get_response(path, scope)

    def _has(self, path: str) -> bool:
        try:
            return self.lookup_path(path)[1] is not None
        except (OSError, ValueError):  # a name that no file can have
            return False

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_SECURITY | {"cache-control": "no-cache"})
        return response


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description with the requests' shapes, and without the 422 that is never sent."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for methods in schema["paths"].values():
            for about in methods.values():
                about["responses"].pop("422", None)
        shapes = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            shapes.pop(name, None)
        kinds = (ChatRequest, CompletionRequest, EmbeddingRequest)
        for kind in (*kinds, TokenizeRequest, DetokenizeRequest):
            shape = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            shapes.update(shape.pop("$defs", {}))
            shapes[kind.__name__] = shape
        app.openapi_schema = schema
    return app.openapi_schema
