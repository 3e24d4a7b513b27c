"""The sandbox as an HTTP service: our own format, code-judge's and SandboxFusion's (§3.1).

Our own endpoint streams one line per call, so that no result waits for the slowest of its batch.
SIGTERM drains: nothing new is accepted, what was accepted is answered. It listens on the loopback
interface; anywhere else it asks for a token. A body that cannot be read is 422, a full queue 503.

A plain ASGI application: less work per call than under a framework, and what is refused, and what
the loss of a caller means, is decided here alone.
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from .. import rewards
from . import formats, metrics
from .calls import Call, CallQueue, Ended, QueueFull
from .levels import LEVELS, SandboxError
from .service import Sandbox

_OPEN_PATHS = ("/health", "/ping", "/v1/ping")
_MOST_BODY_BYTES = 256 << 20
_MOST_RECEIVED_BYTES = 1 << 30  # of all bodies together
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep an idle connection


@dataclass
class Answer:
    """A response; `content` is sent as JSON unless it is bytes or a stream of bytes."""

    content: object
    status: int = 200
    media: str = "application/json"


class Refusal(Exception):
    """A request that gets a status of its own, and no call accepted."""

    def __init__(self, status: int, detail: object):
        super().__init__(detail)
        self.answer = Answer({"detail": detail}, status)


class Service:
    """The ASGI application over a queue whose sandbox is running."""

    def __init__(self, queue: CallQueue, token: str | None = None):
        self.queue, self._token, self._received_bytes = queue, token, 0
        self._gets = {
            "/health": self._health,
            "/ping": lambda: Answer("pong"),
            "/v1/ping": lambda: Answer("pong"),
            "/status": self._status,
            "/metrics": self._metrics,
        }
        self._posts = {
            "/v1/calls": (formats.OurCalls, self._calls),
            "/v1/verify": (formats.Pairs, self._verify),
            "/run_code": (formats.FusionRequest, self._run_code),
        }
        for path, with_streams in (("/run", True), ("/judge", False)):
            one, many = self._judge(with_streams)
            self._posts[path] = (formats.Submission, one)
            self._posts[f"{path}/batch"] = (formats.SubmissionBatch, many)
            self._posts[f"{path}/long-batch"] = (formats.SubmissionBatch, many)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        try:
            answer = await self._answer(scope, receive)
        except Refusal as refusal:
            answer = refusal.answer
        except QueueFull as full:
            answer = Answer({"detail": str(full)}, 503)
        await _respond(send, answer)

    async def _live(self, receive, send) -> None:
        await receive()
        self.queue.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.queue.drain()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope, receive) -> Answer:
        """Raises: Refusal, QueueFull."""
        path, headers = scope["path"], dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self._token and path not in _OPEN_PATHS:
            if not hmac.compare_digest(given, self._token.encode()):
                raise Refusal(401, "a bearer token is required")
        table = {"GET": self._gets, "POST": self._posts}.get(scope["method"], {})
        if path not in table:
            is_known = path in self._gets or path in self._posts
            raise Refusal(405 if is_known else 404, f"found no {scope['method']} {path}")
        if scope["method"] == "GET":
            return self._gets[path]()
        model, handle = self._posts[path]
        async with self._body(receive) as body:
            asked = _parsed(body, model)
        return await handle(asked, receive)

    @asynccontextmanager
    async def _body(self, receive) -> AsyncIterator[bytes]:
        """Raises: Refusal if it is too large, alone or with those of other requests."""
        parts, size, is_more = [], 0, True
        try:
            while is_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the body ended early")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._received_bytes += len(parts[-1])
                if size > _MOST_BODY_BYTES:
                    raise Refusal(413, f"expected at most {_MOST_BODY_BYTES} bytes; send parts")
                if self._received_bytes > _MOST_RECEIVED_BYTES:
                    raise Refusal(503, "too many large requests at once; try again later")
                is_more = message.get("more_body", False)
            yield b"".join(parts)
        finally:
            self._received_bytes -= size

    def _submit(self, calls: Sequence[Call]) -> list["asyncio.Future[Ended]"]:
        """Raises: QueueFull; Refusal if they can never fit."""
        try:
            return self.queue.submit(calls)
        except ValueError as error:
            raise Refusal(413, str(error)) from None

    async def _ended(self, calls: Sequence[Call], receive) -> list[Ended]:
        """The calls' results in order. Those of a caller that goes away are not started."""
        futures = self._submit(calls)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.queue.abandon(calls, futures)

        watcher = asyncio.create_task(watch())
        try:
            return [await future for future in futures]
        finally:
            watcher.cancel()

    # Status

    def _health(self) -> Answer:
        is_draining = self.queue.is_draining
        return Answer({"status": "draining" if is_draining else "ok"}, 503 if is_draining else 200)

    def _status(self) -> Answer:
        sandbox, level = self.queue.sandbox, LEVELS[self.queue.sandbox.level]
        return Answer({
            "queue": self.queue.waiting,
            "num_workers": sandbox.workers,
            "running": self.queue.running,
            "level": level.name,
            "stops": level.stops,
            "does_not_stop": level.does_not_stop,
            "limits": vars(sandbox.limits),
            "accepted": self.queue.counters.accepted,
            "refused": self.queue.counters.refused,
        })  # fmt: skip

    def _metrics(self) -> Answer:
        return Answer(metrics.text(self.queue).encode(), media="text/plain; version=0.0.4")

    # Our own format

    async def _calls(self, asked: formats.OurCalls, receive) -> Answer:
        """One JSON line per call, in the order in which they end."""
        futures = self._submit([call.to_call() for call in asked.calls])
        return Answer(_lines(futures), media="application/x-ndjson")

    async def _verify(self, asked: formats.Pairs, receive) -> Answer:
        """Verdicts in order; 503 when the verifier could not answer: never a wrong answer."""
        verdicts = await asyncio.gather(*(_verdict(*pair) for pair in asked.pairs))
        return Answer([vars(verdict) for verdict in verdicts])

    # code-judge

    def _judge(self, with_streams: bool):
        """The handlers of /run and /run/batch, or of /judge and /judge/batch."""

        async def many(asked: formats.SubmissionBatch, receive) -> Answer:
            results = await self._judged(asked.submissions, receive)
            rows = results if with_streams else map(formats.without_streams, results)
            return Answer({"sub_id": asked.sub_id, "results": list(rows)})

        async def one(asked: formats.Submission, receive) -> Answer:
            (result,) = await self._judged([asked], receive)
            return Answer(result if with_streams else formats.without_streams(result))

        return one, many

    async def _judged(self, asked: Sequence[formats.Submission], receive) -> list[dict]:
        programs = [one for one in asked if one.type == "python"]
        others = [one for one in asked if one.type != "python"]
        ended = await self._ended([one.to_call() for one in programs], receive)
        compared = await asyncio.gather(*map(_without_running, others))
        answers = {id(one): formats.judged(one, e) for one, e in zip(programs, ended, strict=True)}
        answers |= {id(one): answer for one, answer in zip(others, compared, strict=True)}
        return [answers[id(one)] for one in asked]

    # SandboxFusion

    async def _run_code(self, asked: formats.FusionRequest, receive) -> Answer:
        if asked.refusal:
            return Answer(formats.fusion_answer(None, asked.refusal))
        (ended,) = await self._ended([asked.to_call()], receive)
        return Answer(formats.fusion_answer(ended.result))


def _parsed(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Raises: Refusal with what is wrong, and where."""
    try:
        return model.model_validate(json.loads(body))
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False, include_context=False)
        raise Refusal(422, detail) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"expected JSON: {error}") from None


async def _lines(futures: list["asyncio.Future[Ended]"]) -> AsyncIterator[bytes]:
    """Results as they come, each with the place of its call in the request."""
    done: asyncio.Queue[int] = asyncio.Queue()
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: done.put_nowait(index))
    for _ in futures:
        index = await done.get()
        yield json.dumps(formats.our_result(index, futures[index].result())).encode() + b"\n"


async def _respond(send, answer: Answer) -> None:
    headers, content = [(b"content-type", answer.media.encode())], answer.content
    if not isinstance(content, AsyncIterator):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers.append((b"content-length", b"%d" % len(content)))
    if answer.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if isinstance(content, bytes):
        return await send({"type": "http.response.body", "body": content})
    async for line in content:
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# --- verification ---------------------------------------------------------------------------------


async def _verdict(prediction: str, gold: str) -> rewards.Verdict:
    """Raises: Refusal: 422 for an empty reference, 503 when the verifier could not answer."""
    try:
        return await asyncio.to_thread(rewards.verify, prediction, gold)
    except rewards.ServiceFailure as error:
        raise Refusal(503, str(error)) from None
    except ValueError as error:
        raise Refusal(422, str(error)) from None


async def _without_running(asked: formats.Submission) -> dict:
    """code-judge's answer for what is no Python program: a math answer is compared."""
    if asked.type != "math":
        return formats.not_judged(asked, "invalid_input")
    try:
        verdict = await _verdict(asked.solution, asked.expected_output or "")
    except Refusal as refusal:
        is_ours = refusal.answer.status == 503
        return formats.not_judged(asked, "internal_error" if is_ours else "invalid_input")
    answer = formats.not_judged(asked, "")
    return answer | {"success": verdict.correct, "run_success": True, "stdout": "", "stderr": ""}


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
    uvicorn.run(
        Service(CallQueue(sandbox), token),
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=None,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        backlog=65_535,
        ws="none",
    )
