"""A client of the sandbox service with the API of `Sandbox`: rollouts take either.

Every call carries an id, so that asking again after a lost connection never runs a program twice
on one server. What cannot be had after all attempts is a SERVICE_FAILURE, never an error of the
program.
"""

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import httpx

from ..rewards import ServiceFailure, Verdict
from ..types import ToolResult, ToolStatus
from .formats import from_our_result
from .levels import SandboxError

_PATIENCE_SECONDS = 600.0  # for a result whose call waits in a long queue


@dataclass(frozen=True)
class PaperDispatch:
    """How the paper sends calls (§3.1): `senders` workers, each waits for its whole batch.

    A batch goes when it holds `batch` calls, or `fill_seconds` after its first; the paper leaves
    that time open.
    """

    senders: int = 32
    batch: int = 64
    fill_seconds: float = 0.05


class SandboxClient:
    """Runs programs on one or more services.

    addresses: `http://host:port`, calls go round. token: if the service asks for one. attempts: in
    all, with growing pauses. hedge_seconds: after so long without a result the call is also sent
    to the next address, and the first answer counts; off by default, because it runs programs
    twice. dispatch: None sends each call at once; `PaperDispatch()` as the paper does.

    Raises: SandboxError if no service answers.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        token: str | None = None,
        *,
        attempts: int = 4,
        pause_seconds: float = 0.2,
        hedge_seconds: float | None = None,
        dispatch: PaperDispatch | None = None,
    ):
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._attempts, self._pause, self._hedge = attempts, pause_seconds, hedge_seconds
        self._dispatch, self._sent = dispatch, 0
        self._waiting: asyncio.Queue | None = None
        self.retries, self.failures = 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._http = self._call(self._connect()).result()
            status = self._call(self._status()).result()
        except (httpx.HTTPError, SandboxError) as error:
            self.close()
            raise SandboxError(
                f"no sandbox service answers at {', '.join(self._addresses)}: {error}; start one "
                "with `rstar2lab sandbox serve`"
            ) from error
        self.level, self.workers = status["level"], status["num_workers"]

    # The API of Sandbox

    def run(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Run one program and wait for its result."""
        return self._call(self._run(_row(code, stdin, seconds, echo))).result()

    def run_many(self, programs: Iterable[str | tuple[str, str]]) -> list[ToolResult]:
        """Run programs, or (program, stdin) pairs. Results in input order."""
        pairs = [(item, "") if isinstance(item, str) else item for item in programs]
        found = [self._call(self._run(_row(code, stdin, None, True))) for code, stdin in pairs]
        return [future.result() for future in found]

    async def arun(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Awaitable twin of `run`, from any event loop."""
        return await asyncio.wrap_future(self._call(self._run(_row(code, stdin, seconds, echo))))

    def verify(self, prediction: str, gold: str) -> Verdict:
        """`rewards.verify` on the service; usable as `check` in `rollout.score`.

        Raises: ServiceFailure when no verdict can be had: never a wrong answer.
        """
        return self._call(self._verify(prediction, gold)).result()

    def close(self) -> None:
        """Close the connections; calls still in flight become SERVICE_FAILURE. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._disconnect()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> "SandboxClient":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # In the client's own event loop

    def _call(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=64)
        timeout = httpx.Timeout(_PATIENCE_SECONDS, connect=10.0, pool=None)
        client = httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)
        if self._dispatch:
            self._waiting = asyncio.Queue()
            self._senders = [
                asyncio.create_task(self._send_batches()) for _ in range(self._dispatch.senders)
            ]
        return client

    async def _disconnect(self) -> None:
        if getattr(self, "_http", None) is not None:
            await self._http.aclose()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _status(self) -> dict:
        answer = await self._http.get(f"{self._addresses[0]}/status")
        if answer.status_code == 401:
            raise SandboxError("the service asks for another token")
        answer.raise_for_status()
        return answer.json()

    async def _run(self, row: dict) -> ToolResult:
        if self._waiting is None:
            return (await self._results([row]))[0]
        future = self._loop.create_future()
        await self._waiting.put((row, future))
        return await future

    async def _send_batches(self) -> None:
        """One send worker of the paper."""
        while True:
            batch = [await self._waiting.get()]
            until = self._loop.time() + self._dispatch.fill_seconds
            while len(batch) < self._dispatch.batch:
                try:
                    left = until - self._loop.time()
                    batch.append(await asyncio.wait_for(self._waiting.get(), max(left, 0)))
                except TimeoutError:
                    break
            results = await self._results([row for row, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _results(self, rows: list[dict]) -> list[ToolResult]:
        """One result per row, whatever happens on the way."""
        found: dict[int, ToolResult] = {}
        error: Exception | str = "no attempt"
        for attempt in range(self._attempts):
            missing = [i for i in range(len(rows)) if i not in found]
            if not missing:
                break
            if attempt:
                self.retries += len(missing)
                await asyncio.sleep(self._pause * 2 ** (attempt - 1))
            try:
                async for index, result in self._ask([rows[i] for i in missing]):
                    found[missing[index]] = result
            except (httpx.HTTPError, SandboxError, ValueError) as trouble:  # also half a line
                error = trouble
        self.failures += len(rows) - len(found)
        lost = ToolResult(
            ToolStatus.SERVICE_FAILURE,
            stderr=f"sandbox service: {type(error).__name__}: {error}, {self._attempts} attempts",
        )
        return [found.get(i, lost) for i in range(len(rows))]

    async def _ask(self, rows: list[dict]) -> AsyncIterator[tuple[int, ToolResult]]:
        if self._hedge is None or len(rows) > 1 or len(self._addresses) < 2:
            async for item in self._stream(self._next_address(), rows):
                yield item
            return
        yield 0, await self._hedged(rows)

    async def _hedged(self, rows: list[dict]) -> ToolResult:
        """The first answer of two addresses, the second asked only after a while."""

        async def one(address: str) -> ToolResult:
            async for _, result in self._stream(address, rows):
                return result
            raise SandboxError("the service sent no result")

        tasks = [asyncio.create_task(one(self._next_address()))]
        done, _ = await asyncio.wait(tasks, timeout=self._hedge)
        if not done:
            tasks.append(asyncio.create_task(one(self._next_address())))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finished = [task for task in tasks if task.done() and not task.exception()]
        try:
            return finished[0].result() if finished else await tasks[-1]
        finally:
            for task in tasks:
                task.cancel()

    def _next_address(self) -> str:
        self._sent += 1
        return self._addresses[(self._sent - 1) % len(self._addresses)]

    async def _stream(self, address: str, rows: list[dict]):
        """(place, result) as the service sends them.

        Raises: SandboxError for an answer that is none, httpx.HTTPError for a lost connection.
        """
        async with self._http.stream("POST", f"{address}/v1/calls", json={"calls": rows}) as answer:
            if answer.status_code != 200:
                detail = (await answer.aread()).decode(errors="replace")[:300]
                raise SandboxError(f"HTTP {answer.status_code}: {detail}")
            async for line in answer.aiter_lines():
                row = json.loads(line)
                if "error" in row:
                    raise SandboxError(row["error"])
                yield row["index"], from_our_result(row)

    async def _verify(self, prediction: str, gold: str) -> Verdict:
        error: Exception | None = None
        for attempt in range(self._attempts):
            await asyncio.sleep(self._pause * (2**attempt - 1))
            try:
                answer = await self._http.post(
                    f"{self._next_address()}/v1/verify", json={"pairs": [[prediction, gold]]}
                )
                answer.raise_for_status()
                return Verdict(**answer.json()[0])
            except (httpx.HTTPError, ValueError) as trouble:
                error = trouble
        raise ServiceFailure(f"verification service: {error}")


def _row(code: str, stdin: str, seconds: float | None, echo: bool) -> dict:
    """A call in the service's format, with an id of its own; odd surrogates travel as they are."""
    row = {"code": code, "stdin": stdin, "id": uuid.uuid4().hex, "echo": echo}
    return row if seconds is None else row | {"seconds": seconds}
