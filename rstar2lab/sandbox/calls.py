"""The service's central queue: accepted calls wait here, first come, first served (§3.1).

A call is accepted or refused at once, never blocked: `most_calls` and `most_bytes` bound what may
wait. An accepted call ends in exactly one result. A call that names itself by an id is run once:
who asks again, after a lost connection, gets the same result.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field, replace

from .service import Sandbox, failure

_REMEMBERED_SECONDS = 600.0


class QueueFull(RuntimeError):
    """The service holds as much as it may; the call was not accepted."""


class QueueTimeout(RuntimeError):
    """The call waited longer than it was willing to; it was not run."""


@dataclass
class Call:
    """One program to run.

    seconds: shorter limits of its run. queue_seconds: how long it is willing to wait.
    """

    code: str
    stdin: str = ""
    id: str | None = None
    seconds: float | None = None
    queue_seconds: float | None = None
    echo: bool = True

    @property
    def size(self) -> int:
        return len(self.code) + len(self.stdin)


@dataclass
class Counters:
    """What happened since the start; seconds are sums."""

    accepted: int = 0
    refused: int = 0
    queue_timeouts: int = 0
    repeated: int = 0
    statuses: Counter = field(default_factory=Counter)
    run_seconds: float = 0.0
    queue_seconds: float = 0.0


class CallQueue:
    """Feeds a sandbox from one queue, as many calls at a time as it has workers.

    Lives in one event loop: `start`, then `submit`, then `drain`.
    """

    def __init__(self, sandbox: Sandbox, *, most_calls: int = 100_000, most_bytes: int = 1 << 30):
        self.sandbox, self.most_calls, self.most_bytes = sandbox, most_calls, most_bytes
        self.counters = Counters()
        self.is_draining = False
        self.running, self.held_bytes = 0, 0
        self._waiting: deque[tuple[Call, asyncio.Future, float]] = deque()
        self._known: OrderedDict[str, tuple[asyncio.Future, float]] = OrderedDict()
        self._news = asyncio.Event()
        self._senders: list[asyncio.Task] = []

    def start(self) -> None:
        self._senders = [asyncio.create_task(self._send()) for _ in range(self.sandbox.workers)]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, call: Call) -> asyncio.Future:
        """Accept a call. The future gives its `ToolResult`, or raises QueueTimeout.

        Raises: QueueFull when too much waits, or the service is about to end.
        """
        if call.id is not None and call.id in self._known:
            self.counters.repeated += 1
            return self._known[call.id][0]
        full = self.waiting >= self.most_calls or self.held_bytes + call.size > self.most_bytes
        if self.is_draining or full:
            self.counters.refused += 1
            reason = "is ending" if self.is_draining else f"holds {self.waiting} waiting calls"
            raise QueueFull(f"the service {reason}; try again later")
        future = asyncio.get_running_loop().create_future()
        self.counters.accepted += 1
        self.held_bytes += call.size
        self._waiting.append((call, future, time.monotonic()))
        self._news.set()
        if call.id is not None:
            self._remember(call.id, future)
        return future

    def _remember(self, name: str, future: asyncio.Future) -> None:
        now = time.monotonic()
        while self._known:
            oldest, since = next(iter(self._known.values()))
            if now - since < _REMEMBERED_SECONDS or not oldest.done():
                break
            self._known.popitem(last=False)
        self._known[name] = (future, now)

    async def _send(self) -> None:
        """One of as many loops as there are workers."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            call, future, since = self._waiting.popleft()
            waited = time.monotonic() - since
            self.running += 1
            try:
                await self._run(call, future, waited)
            finally:
                self.running -= 1
                self.held_bytes -= call.size

    async def _run(self, call: Call, future: asyncio.Future, waited: float) -> None:
        if call.queue_seconds is not None and waited > call.queue_seconds:
            self.counters.queue_timeouts += 1
            if not future.done():
                future.set_exception(QueueTimeout(f"waited {waited:.1f} s and was not run"))
                future.exception()  # looked at: a caller that has gone is no warning
            return
        try:
            result = await self.sandbox.arun(
                call.code, call.stdin, seconds=call.seconds, echo=call.echo
            )
        except Exception as error:  # the boundary to the sandbox: nobody's program failed
            result = failure(error, 0.0)
        result = replace(result, queue_seconds=result.queue_seconds + waited)
        self.counters.statuses[result.status.name] += 1
        self.counters.run_seconds += result.seconds
        self.counters.queue_seconds += result.queue_seconds
        if not future.done():
            future.set_result(result)

    async def drain(self) -> None:
        """Accept nothing more, and wait for what was accepted."""
        self.is_draining = True
        while self._waiting or self.running:
            await asyncio.sleep(0.02)
        for sender in self._senders:
            sender.cancel()
