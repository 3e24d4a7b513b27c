"""A client of the sandbox service with the API of `Sandbox`: rollouts take either.

Each call is sent at once, together with whatever else waits at that moment, and each result is
handed on as it arrives: sharing a request costs nobody time and spares both sides a millisecond
per call. Every call carries an id, so that asking again after a lost connection never runs a
program twice on one server. What cannot be had after all attempts is a SERVICE_FAILURE, never an
error of the program.
"""

import asyncio
import json
import math
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import httpx

from ..rewards import ServiceFailure, Verdict
from ..types import ToolResult, ToolStatus
from .formats import from_our_result
from .levels import SandboxError
from .service import as_pairs

_PATIENCE_SECONDS = 600.0  # for a result whose call waits in a long queue, or for a full queue
_LONGEST_PAUSE_SECONDS = 5.0
_MOST_REQUESTS = 256  # at one time; further calls share the next one that is free
_MOST_CALLS, _MOST_CHARS = 512, 16 << 20  # of one request


@dataclass(frozen=True)
class PaperDispatch:
    """How the paper sends calls (§3.1): `senders` workers, each waits for its whole batch.

    A batch goes when it holds `batch` calls, or `fill_seconds` after its first; the paper leaves
    that time open.
    """

    senders: int = 32
    batch: int = 64
    fill_seconds: float = 0.05


class _Refused(SandboxError):
    """The service will not take this request, however often it is sent."""


@dataclass
class _Call:
    """A call on its way; `row` is its form in the service's format."""

    row: dict
    future: "Future[ToolResult]"


class SandboxClient:
    """Runs programs on one or more services. Usable as a context manager.

    addresses: `http://host:port`; requests go round, and a retry goes to the next. token: if the
    services ask for one. attempts: in all, with growing pauses; the default outlasts the restart
    of a service. queue_seconds: a call that waits longer at the service is not run, and becomes a
    SERVICE_FAILURE. hedge_seconds: calls without a result for so long are also sent to the next
    address, and the first answer counts; off by default, because it runs programs twice.
    dispatch: None sends each call at once; `PaperDispatch()` as the paper does.

    `level` is the weakest of the services that answer, `workers` their sum; limits of a call are
    the service's own. `retries` and `failures` count calls.

    Raises: SandboxError if no service answers.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        token: str | None = None,
        *,
        attempts: int = 8,
        pause_seconds: float = 0.2,
        queue_seconds: float | None = None,
        hedge_seconds: float | None = None,
        dispatch: PaperDispatch | None = None,
    ):
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._attempts, self._pause = attempts, pause_seconds
        self._queue_seconds, self._hedge, self._dispatch = queue_seconds, hedge_seconds, dispatch
        self._outbox: deque[_Call] = deque()
        self._sent, self._requests, self._is_closed = 0, 0, False
        self.retries, self.failures = 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            found = self._do(self._connect())
        except SandboxError:
            self.close()
            raise
        self.level = min(status["level"] for status in found)
        self.workers = sum(status["num_workers"] for status in found)

    # The API of Sandbox

    def run(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Run one program and wait for its result. Raises: SandboxError when closed."""
        return self._send([self._row(code, stdin, seconds, echo)])[0].result()

    def run_many(self, programs: Iterable[str | tuple[str, str]]) -> list[ToolResult]:
        """Run programs, or (program, stdin) pairs. Results in input order."""
        rows = [self._row(*pair) for pair in as_pairs(programs)]
        return [future.result() for future in self._send(rows)]

    async def arun(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Awaitable twin of `run`, from any event loop."""
        return await asyncio.wrap_future(self._send([self._row(code, stdin, seconds, echo)])[0])

    def check(self, prediction: str, gold: str) -> Verdict:
        """`rewards.verify` on the service; takes the place of `check` in `rollout.score`.

        Raises: ServiceFailure when no verdict can be had: never a wrong answer.
        """
        self._check_open()
        return self._do(self._verdict(prediction, gold))

    def close(self) -> None:
        """Close the connections; calls still in flight become SERVICE_FAILURE. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._do(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "SandboxClient":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # From the caller's thread into the client's own event loop

    def _row(
        self, code: str, stdin: str = "", seconds: float | None = None, echo: bool = True
    ) -> dict:
        """A call in the service's format, with an id of its own."""
        if seconds is not None and not 0 < seconds < math.inf:
            raise SandboxError(f"seconds={seconds}, expected a positive number")
        row = {"code": code, "stdin": stdin, "id": uuid.uuid4().hex, "echo": echo}
        chosen = {"seconds": seconds, "queue_seconds": self._queue_seconds}
        return row | {name: value for name, value in chosen.items() if value is not None}

    def _send(self, rows: list[dict]) -> "list[Future[ToolResult]]":
        self._check_open()
        calls = [_Call(row, Future()) for row in rows]
        for call in calls:
            call.future.set_running_or_notify_cancel()  # from here on it ends with a result
        self._loop.call_soon_threadsafe(self._enqueue, calls)
        return [call.future for call in calls]

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("this SandboxClient is closed; create a new one")

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # In the event loop

    async def _connect(self) -> list[dict]:
        """What the services say of themselves. Raises: SandboxError if none answers."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(_PATIENCE_SECONDS, connect=10.0, pool=None)
        self._http = httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)
        self._news = asyncio.Event()
        senders = self._dispatch.senders if self._dispatch else 0
        self._senders = [asyncio.create_task(self._send_batches()) for _ in range(senders)]
        found, troubles = [], []
        for address in self._addresses:
            try:
                answer = await self._http.get(f"{address}/status")
                if answer.status_code == 401:
                    raise SandboxError(f"{address} asks for another token")
                found.append(answer.raise_for_status().json())
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as trouble:
                troubles.append(f"{address}: {trouble or type(trouble).__name__}")
        if not found:
            raise SandboxError(
                f"no sandbox service answers ({'; '.join(troubles)}); start one with "
                "`rstar2lab sandbox serve`"
            )
        return found

    async def _disconnect(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(self._outbox, "the client was closed")
        await self._http.aclose()

    def _enqueue(self, calls: list[_Call]) -> None:
        if self._is_closed:
            return self._fail(calls, "the client was closed")
        self._outbox.extend(calls)
        self._news.set()
        if self._dispatch is None:
            self._loop.call_soon(self._flush)  # what else is on its way joins in

    def _flush(self) -> None:
        """Send all that waits, in as few requests as their bounds allow."""
        while self._outbox and self._requests < _MOST_REQUESTS and not self._is_closed:
            part, chars = [], 0
            while self._outbox and len(part) < _MOST_CALLS and (not part or chars < _MOST_CHARS):
                part.append(self._outbox.popleft())
                chars += len(part[-1].row["code"]) + len(part[-1].row["stdin"])
            self._requests += 1
            self._loop.create_task(self._send_part(part))

    async def _send_part(self, part: list[_Call]) -> None:
        try:
            await self._deliver(part, lambda call, result: call.future.set_result(result))
        finally:
            self._requests -= 1
            self._flush()

    async def _send_batches(self) -> None:
        """One send worker of the paper: results are handed on when the batch is complete."""
        while True:
            batch = await self._filled_batch()
            results: list[tuple[_Call, ToolResult]] = []
            try:
                await self._deliver(batch, lambda *pair, to=results: to.append(pair))
            finally:
                for call, result in results:
                    call.future.set_result(result)

    async def _filled_batch(self) -> list[_Call]:
        batch, until = [], math.inf
        while len(batch) < self._dispatch.batch and self._loop.time() < until:
            if self._outbox:
                batch.append(self._outbox.popleft())
                until = min(until, self._loop.time() + self._dispatch.fill_seconds)
                continue
            self._news.clear()
            try:
                left = None if until == math.inf else max(until - self._loop.time(), 0)
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                break
            except asyncio.CancelledError:
                self._outbox.extendleft(reversed(batch))
                raise
        return batch

    async def _deliver(
        self, calls: list[_Call], settle: Callable[[_Call, ToolResult], None]
    ) -> None:
        """One result per call, whatever happens on the way."""
        missing = {call.row["id"]: call for call in calls}
        reason = "the client was closed in mid-call"
        try:
            for attempt in range(self._attempts):
                if attempt:
                    self.retries += len(missing)
                    pause = min(self._pause * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
                    await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                error = await self._attempt(missing, settle)
                if not missing:
                    return
                reason = f"{type(error).__name__}: {error}, {attempt + 1} attempts"
                if isinstance(error, _Refused):
                    return
        finally:
            self._fail(missing.values(), reason, settle)

    def _fail(self, calls: Iterable[_Call], reason: str, settle=None) -> None:
        for call in calls:
            self.failures += 1
            text = f"sandbox service: {reason}"
            result = ToolResult(ToolStatus.SERVICE_FAILURE, stderr=text)
            settle(call, result) if settle else call.future.set_result(result)

    async def _attempt(self, missing: dict[str, _Call], settle) -> BaseException | None:
        """Ask one service for all that is missing, after a while another one too."""
        tasks = {asyncio.create_task(self._stream(self._next_address(), missing, settle))}
        try:
            done, running = await asyncio.wait(tasks, timeout=self._hedge)
            if not done:
                tasks.add(asyncio.create_task(self._stream(self._next_address(), missing, settle)))
                running = tasks
            while missing and running:
                done, running = await asyncio.wait(running, return_when="FIRST_COMPLETED")
        finally:
            for task in tasks:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        return next((end for end in ends if isinstance(end, Exception)), None)

    def _next_address(self) -> str:
        self._sent += 1
        return self._addresses[(self._sent - 1) % len(self._addresses)]

    async def _stream(self, address: str, missing: dict[str, _Call], settle) -> None:
        """Settle calls as their results come. A full queue is waited for.

        Raises: SandboxError for an answer that is none, httpx.HTTPError for a lost connection.
        """
        rows = [call.row for call in missing.values()]
        body = json.dumps({"calls": rows}).encode()
        until = self._loop.time() + _PATIENCE_SECONDS
        while True:
            async with self._http.stream("POST", f"{address}/v1/calls", content=body) as answer:
                if answer.status_code == 200:
                    async for line in answer.aiter_lines():
                        found = json.loads(line)
                        call = missing.pop(rows[found["index"]]["id"], None)
                        if call is not None:
                            settle(call, from_our_result(found))
                    if any(row["id"] in missing for row in rows):
                        raise SandboxError("the answer ended early")
                    return
                detail = (await answer.aread()).decode(errors="replace")[:300]
            if answer.status_code != 503 or self._loop.time() > until:
                kind = _Refused if answer.status_code < 500 else SandboxError
                raise kind(f"HTTP {answer.status_code}: {detail}")
            await asyncio.sleep(random.uniform(0.5, 1.5))

    async def _verdict(self, prediction: str, gold: str) -> Verdict:
        body = json.dumps({"pairs": [[prediction, gold]]}).encode()
        error: Exception | None = None
        for attempt in range(self._attempts):
            if attempt:
                pause = self._pause * 2 ** (attempt - 1)
                await asyncio.sleep(min(pause, _LONGEST_PAUSE_SECONDS))
            try:
                address = self._next_address()
                answer = await self._http.post(f"{address}/v1/verify", content=body)
                return Verdict(**answer.raise_for_status().json()[0])
            except (httpx.HTTPError, ValueError) as trouble:
                error = trouble
        raise ServiceFailure(f"verification service: {error}")
