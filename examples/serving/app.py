"""The engine of one worker: what to copy into your own."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from examples.serving.flux import ImageRequest, Painter
from hostweights import BERT_ENCODER, Config, HostWeights, LoadedModel
from hostweights.demo.encoder import Encoder, pool, read_config
from hostweights.observe import Endpoint, Instruments, Observer, ask_all
from hostweights.observe.metrics import CONTENT_TYPE, render

MAX_BODY_BYTES = 1 << 20
MAX_WAITING = 64

Asked = TypeVar("Asked", bound=msgspec.Struct)


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /embed``."""

    texts: Annotated[list[Annotated[str, Meta(max_length=8192)]], Meta(min_length=1, max_length=64)]


class EmbedReply(msgspec.Struct):
    """One unit-length vector a text; the worker that computed them; whether its pages are the shared ones."""

    embeddings: list[list[float]]
    worker: str
    shared: bool


class Embedder:
    """Tokens and forwards, in one thread: the event loop stays free, and a forward never meets another."""

    def __init__(self, directory: Path, module: torch.nn.Module, thread: ThreadPoolExecutor) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_padding()
        self._module = module
        self._thread = thread
        self.waiting = 0

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """One batch; bit by bit what the resident model gives for the same texts."""
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.forward, texts)
        finally:
            self.waiting -= 1

    def forward(self, texts: list[str]) -> list[list[float]]:
        """The same, in the calling thread."""
        encoded = self._tokenizer.encode_batch(texts)
        ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        with torch.inference_mode():
            vectors: list[list[float]] = pool(self._module(ids, mask), mask).tolist()
        return vectors


class Engine:
    """The routes of one worker."""

    def __init__(
        self, directory: Path, config: Config, name: str, stream: str | None = None, flux: Path | None = None
    ) -> None:
        self._directory = directory
        self._config = config
        self._name = name
        self._stream = stream
        self._flux = flux
        self._model: LoadedModel
        self._embedder: Embedder
        self._painter: Painter
        self.draining = False
        """Set when the worker is to end: it answers what arrives, says that it is not ready, and closes connections."""

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Everything the worker holds; given back in the opposite order, whatever ends it."""
        shape = read_config(self._directory)
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(HostWeights(self._config, instruments=Instruments()))
            observer = await stack.enter_async_context(Observer(host, name=self._name))
            await stack.enter_async_context(Endpoint(observer.snapshot))
            # Warm: the store's pages. Cold: from the checkpoint; ``load`` returns when the model can serve, and goes on
            # publishing in the background, after which the model is moved to the shared pages between two forwards.
            self._model = await host.load(lambda: Encoder(shape), self._directory, record=BERT_ENCODER)
            if self._stream is not None:
                await host.attach(self._model, device=self._stream)
            thread = stack.enter_context(ThreadPoolExecutor(1, "forward"))
            self._embedder = Embedder(self._directory, self._model.module, thread)
            if self._flux is not None:
                self._painter = await Painter.load(host, self._flux, thread)
            yield

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/embed", self.embed, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
        ]
        if self._flux is not None:
            routes.append(Route("/image", self.image, methods=["POST"]))
        return Starlette(routes=routes, lifespan=self.lifespan)

    async def embed(self, request: Request) -> Response:
        """``POST /embed``: 200, 400 for a body that is none, 413, 503 with Retry-After when too many wait."""
        asked = await self._read(request, EmbedRequest, '{"texts": ["..."]}', self._embedder.waiting)
        if isinstance(asked, Response):
            return asked
        vectors = await self._embedder.embed(asked.texts)
        return self._answer(EmbedReply(vectors, self._name, self._is_shared()))

    async def image(self, request: Request) -> Response:
        """``POST /image``: a PNG, and otherwise as ``/embed``."""
        asked = await self._read(request, ImageRequest, '{"prompt": "..."}', self._painter.waiting)
        if isinstance(asked, Response):
            return asked
        return Response(await self._painter.paint(asked), headers=self._closing(), media_type="image/png")

    async def health(self, _: Request) -> Response:
        """``GET /health``: the process lives and its loop turns."""
        return self._answer({"worker": self._name})

    async def ready(self, _: Request) -> Response:
        """``GET /ready``: 200 if new requests are welcome, 503 while the worker ends."""
        state = {"worker": self._name, "draining": self.draining, "shared": self._is_shared()}
        return self._answer(state, 503 if self.draining else 200)

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``: of all workers of the store, whichever of them is asked."""
        snapshots, _unreachable = await ask_all(root=self._config.root)
        return Response(render(snapshots), headers={"content-type": CONTENT_TYPE})

    async def _read(self, request: Request, kind: type[Asked], example: str, waiting: int) -> Asked | Response:
        """The body as what it should be, or the answer that refuses it."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return self._answer({"error": f"a body has at most {MAX_BODY_BYTES} bytes"}, 413)
        try:
            asked = msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as found:
            return self._answer({"error": f"expected {example}: {found}"}, 400)
        if waiting >= MAX_WAITING:
            return self._answer({"error": "too many requests wait; try again"}, 503, {"retry-after": "1"})
        return asked

    def _is_shared(self) -> bool:
        publication = self._model.publication
        return self._model.warm or (publication is not None and publication.done)

    def _answer(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return Response(msgspec.json.encode(body), status, {**(headers or {}), **self._closing()}, "application/json")

    def _closing(self) -> dict[str, str]:
        """While the worker ends, each answer closes its connection, so that no later request meets a closed one."""
        return {"connection": "close"} if self.draining else {}
