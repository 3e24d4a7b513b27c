"""The sandbox as an HTTP service: our own format, code-judge's and SandboxFusion's (§3.1).

Results are answered as they come: our own endpoint streams one line per call, so that no result
waits for the slowest of its batch. SIGTERM drains: nothing new is accepted, what was accepted is
answered. It listens on the loopback interface; anywhere else it asks for a token.
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from .. import rewards
from . import formats
from .calls import CallQueue, QueueFull, QueueTimeout
from .levels import LEVELS, SandboxError
from .service import Sandbox

_OPEN_PATHS = ("/health", "/ping", "/v1/ping")
_MOST_BODY_BYTES = 256 << 20


class Gate:
    """In front of the application: the token, and the size of a body."""

    def __init__(self, app, token: str | None, most_bytes: int = _MOST_BODY_BYTES):
        self._app, self._token, self._most_bytes = app, token, most_bytes

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self._token and scope["path"] not in _OPEN_PATHS:
            if not hmac.compare_digest(given, self._token.encode()):
                answer = JSONResponse({"detail": "a bearer token is required"}, 401)
                return await answer(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most_bytes:
            answer = JSONResponse({"detail": f"more than {self._most_bytes} bytes"}, 413)
            return await answer(scope, receive, send)
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive):
        """A body without a length may not grow beyond the bound either."""
        seen = 0

        async def counted():
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most_bytes:
                return {"type": "http.disconnect"}
            return message

        return counted


def make_app(queue: CallQueue, token: str | None = None) -> FastAPI:
    """The application over a queue whose sandbox is running."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        queue.start()
        yield
        await queue.drain()

    app = FastAPI(title="rstar2lab sandbox", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})

    _add_status(app, queue)
    _add_ours(app, queue)
    _add_code_judge(app, queue)
    _add_sandbox_fusion(app, queue)
    app.add_middleware(Gate, token=token)
    return app


# --- status ---------------------------------------------------------------------------------------


def _add_status(app: FastAPI, queue: CallQueue) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        state = "draining" if queue.is_draining else "ok"
        return JSONResponse({"status": state}, 503 if queue.is_draining else 200)

    @app.get("/ping")
    @app.get("/v1/ping")
    async def ping() -> str:
        return "pong"

    @app.get("/status")
    async def status() -> dict:
        sandbox, level = queue.sandbox, LEVELS[queue.sandbox.level]
        return {
            "queue": queue.waiting,
            "num_workers": sandbox.workers,
            "running": queue.running,
            "level": level.name,
            "stops": level.stops,
            "does_not_stop": level.does_not_stop,
            "limits": vars(sandbox.limits),
            "accepted": queue.counters.accepted,
            "refused": queue.counters.refused,
        }

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(queue), media_type="text/plain; version=0.0.4")


def metrics_text(queue: CallQueue) -> str:
    """Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Now:
        def collect(self):
            c = queue.counters
            yield GaugeMetricFamily("sandbox_waiting_calls", "in the queue", queue.waiting)
            yield GaugeMetricFamily("sandbox_running_calls", "in a worker", queue.running)
            yield GaugeMetricFamily("sandbox_held_bytes", "programs and inputs", queue.held_bytes)
            yield CounterMetricFamily("sandbox_accepted_calls", "since the start", c.accepted)
            yield CounterMetricFamily("sandbox_refused_calls", "the queue was full", c.refused)
            yield CounterMetricFamily("sandbox_queue_timeouts", "not run", c.queue_timeouts)
            yield CounterMetricFamily("sandbox_repeated_calls", "an id came again", c.repeated)
            yield CounterMetricFamily("sandbox_run_seconds", "sum over calls", c.run_seconds)
            yield CounterMetricFamily("sandbox_queue_seconds", "sum over calls", c.queue_seconds)
            ended = CounterMetricFamily("sandbox_ended_calls", "by status", labels=["status"])
            for name, count in c.statuses.items():
                ended.add_metric([name], count)
            yield ended

    registry = CollectorRegistry()
    registry.register(Now())
    return generate_latest(registry).decode()


# --- our own format -------------------------------------------------------------------------------


def _add_ours(app: FastAPI, queue: CallQueue) -> None:
    @app.post("/v1/calls")
    async def calls(asked: formats.OurCalls) -> StreamingResponse:
        """One JSON line per call, in the order in which they end."""
        futures = [queue.submit(call.to_call()) for call in asked.calls]
        return StreamingResponse(_lines(futures), media_type="application/x-ndjson")

    @app.post("/v1/verify")
    async def verify(asked: formats.Pairs) -> JSONResponse:
        """Verdicts in order; 503 when the verifier could not answer: never a wrong answer."""
        try:
            verdicts = await asyncio.gather(
                *(asyncio.to_thread(rewards.verify, *pair) for pair in asked.pairs)
            )
        except rewards.ServiceFailure as error:
            return JSONResponse({"detail": str(error)}, 503)
        return JSONResponse([{"correct": v.correct, "reason": v.reason} for v in verdicts])


async def _lines(futures: list[asyncio.Future]) -> AsyncIterator[str]:
    """Results as they come; what waits is told apart by its place in the request."""
    done: asyncio.Queue[int] = asyncio.Queue()
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: done.put_nowait(index))
    for _ in futures:
        index = await done.get()
        error = futures[index].exception()
        row = {"index": index, "error": str(error)} if error else None
        row = row or formats.our_result(index, futures[index].result())
        yield json.dumps(row) + "\n"


# --- code-judge -----------------------------------------------------------------------------------


def _add_code_judge(app: FastAPI, queue: CallQueue) -> None:
    async def run(asked: formats.Submission) -> dict:
        return await _answer(queue, asked)

    async def run_batch(asked: formats.SubmissionBatch) -> dict:
        results = await asyncio.gather(*(_answer(queue, one) for one in asked.submissions))
        return {"sub_id": asked.sub_id, "results": results}

    async def judge(asked: formats.Submission) -> dict:
        return formats.without_streams(await run(asked))

    async def judge_batch(asked: formats.SubmissionBatch) -> dict:
        found = await run_batch(asked)
        return found | {"results": [formats.without_streams(r) for r in found["results"]]}

    for path, one, many in (("/run", run, run_batch), ("/judge", judge, judge_batch)):
        app.post(path)(one)
        app.post(f"{path}/batch")(many)
        app.post(f"{path}/long-batch")(many)


async def _answer(queue: CallQueue, asked: formats.Submission) -> dict:
    if asked.type == "cpp":
        return formats.judged(asked, None, "invalid_input")
    if asked.type == "math":
        return await _judge_math(asked)
    try:
        return formats.judged(asked, await queue.submit(asked.to_call()))
    except QueueTimeout:
        return formats.judged(asked, None, "queue_timeout")


async def _judge_math(asked: formats.Submission) -> dict:
    if asked.expected_output is None:
        return formats.judged(asked, None, "invalid_input")
    try:
        pair = (asked.solution, asked.expected_output)
        verdict = await asyncio.to_thread(rewards.verify, *pair)
    except rewards.ServiceFailure:
        return formats.judged(asked, None, "internal_error")
    answer = formats.judged(asked, None)
    return answer | {"success": verdict.correct, "run_success": True, "stdout": "", "stderr": ""}


# --- SandboxFusion --------------------------------------------------------------------------------


def _add_sandbox_fusion(app: FastAPI, queue: CallQueue) -> None:
    @app.post("/run_code")
    async def run_code(asked: formats.FusionRequest) -> dict:
        if asked.refusal:
            return formats.fusion_answer(None, asked.refusal)
        return formats.fusion_answer(await queue.submit(asked.to_call()))


# --- running it -----------------------------------------------------------------------------------


def check_address(host: str, token: str | None) -> None:
    """Raises: SandboxError if anyone on the network could run programs here."""
    is_local = host == "localhost" or _is_loopback(host)
    if not is_local and not token:
        raise SandboxError(
            f"host {host} can be reached from other machines: give --token-file, or stay on "
            "127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(sandbox: Sandbox, *, host: str, port: int, token: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends it at once.

    Raises: SandboxError without a token on an address that others reach.
    """
    import uvicorn

    check_address(host, token)
    app = make_app(CallQueue(sandbox), token)
    settings = {"log_level": "warning", "timeout_graceful_shutdown": None, "backlog": 65_535}
    uvicorn.run(app, host=host, port=port, **settings)
