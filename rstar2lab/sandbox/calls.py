"""The service's central queue: accepted calls wait here, first come, first served (§3.1).

Calls are accepted or refused at once, never blocked: `most_calls` and `most_bytes` bound what may
wait. An accepted call ends in exactly one result. A call that names itself by an id is run once:
who asks again, after a lost connection, gets the same result. One without an id, whose caller has
gone before it started, is not run.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..types import ToolResult, ToolStatus
from .service import Sandbox, failure

_REMEMBERED_SECONDS = 600.0


class QueueFull(RuntimeError):
    """The service holds as much as it may; none of the calls was accepted."""


@dataclass(frozen=True)
class Ended:
    """How an accepted call ended. One that was not run is a SERVICE_FAILURE that says why."""

    result: ToolResult
    was_run: bool = True


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
    repeated: int = 0
    not_run: Counter = field(default_factory=Counter)  # by reason: overdue, abandoned
    statuses: Counter = field(default_factory=Counter)
    run_seconds: float = 0.0
    queue_seconds: float = 0.0


class CallQueue:
    """Feeds a sandbox from one queue, as many calls at a time as it has workers.

    Lives in one event loop: `start`, then `submit`, then `drain`. most_kept_chars: output of ended
    calls that is kept, for ten minutes at most, for those who ask again by id.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        most_calls: int = 100_000,
        most_bytes: int = 1 << 30,
        most_kept_chars: int = 256 << 20,
    ):
        self.sandbox, self.most_calls, self.most_bytes = sandbox, most_calls, most_bytes
        self.most_kept_chars, self._kept_chars = most_kept_chars, 0
        self.counters = Counters()
        self.is_draining = False
        self.running, self.held_bytes = 0, 0
        self._waiting: deque[tuple[Call, asyncio.Future[Ended], float]] = deque()
        self._known: OrderedDict[str, tuple[asyncio.Future[Ended], float]] = OrderedDict()
        self._news = asyncio.Event()
        self._senders: list[asyncio.Task] = []

    def start(self) -> None:
        self._senders = [asyncio.create_task(self._send()) for _ in range(self.sandbox.workers)]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, calls: Sequence[Call]) -> list["asyncio.Future[Ended]"]:
        """Accept calls, all or none. The futures never raise.

        Raises: QueueFull when they do not fit, or the service is about to end; ValueError when
        they are more than an empty queue takes.
        """
        size = sum(call.size for call in calls)
        if len(calls) > self.most_calls or size > self.most_bytes:
            raise ValueError(
                f"found {len(calls)} calls of {size} bytes in one request, expected at most "
                f"{self.most_calls} and {self.most_bytes}; send them in parts"
            )
        is_full = (
            self.waiting + len(calls) > self.most_calls
            or self.held_bytes + size > self.most_bytes
        )  # fmt: skip
        if self.is_draining or is_full:
            self.counters.refused += len(calls)
            reason = "is ending" if self.is_draining else f"holds {self.waiting} waiting calls"
            raise QueueFull(f"the service {reason}; try again later")
        return [self._accept(call) for call in calls]

    def _accept(self, call: Call) -> "asyncio.Future[Ended]":
        if call.id is not None and call.id in self._known:
            self.counters.repeated += 1
            return self._known[call.id][0]
        future = asyncio.get_running_loop().create_future()
        self.counters.accepted += 1
        self.held_bytes += call.size
        self._waiting.append((call, future, time.monotonic()))
        self._news.set()
        if call.id is not None:
            self._remember(call.id, future)
        return future

    def abandon(self, calls: Sequence[Call], futures: Sequence["asyncio.Future[Ended]"]) -> None:
        """Their caller has gone. What has not started will not be, unless an id can ask again."""
        for call, future in zip(calls, futures, strict=True):
            if call.id is None and not future.done():
                future.set_result(_not_run("its caller has gone", 0.0))

    def _remember(self, name: str, future: "asyncio.Future[Ended]") -> None:
        self._known[name] = future, math.inf

        def ended(_) -> None:
            self._known[name] = future, time.monotonic()
            self._kept_chars += _chars(future)
            self._forget()

        future.add_done_callback(ended)

    def _forget(self) -> None:
        """Let old results go, and more of them when they are large."""
        while self._known:
            oldest, since = next(iter(self._known.values()))
            is_kept = self._kept_chars <= self.most_kept_chars
            if not oldest.done() or (is_kept and time.monotonic() - since < _REMEMBERED_SECONDS):
                break
            self._known.popitem(last=False)
            self._kept_chars -= _chars(oldest)

    async def _send(self) -> None:
        """One of as many loops as there are workers."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            call, future, since = self._waiting.popleft()
            self.running += 1
            try:
                await self._run(call, future, time.monotonic() - since)
            finally:
                self.running -= 1
                self.held_bytes -= call.size

    async def _run(self, call: Call, future: "asyncio.Future[Ended]", waited: float) -> None:
        if future.done():
            self.counters.not_run["abandoned"] += 1
            return
        if call.queue_seconds is not None and waited > call.queue_seconds:
            self.counters.not_run["overdue"] += 1
            future.set_result(_not_run(f"it waited longer than {call.queue_seconds:g} s", waited))
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
            future.set_result(Ended(result))

    async def drain(self) -> None:
        """Accept nothing more, and wait for what was accepted."""
        self.is_draining = True
        while self._waiting or self.running:
            await asyncio.sleep(0.02)
        for sender in self._senders:
            sender.cancel()


def _chars(future: "asyncio.Future[Ended]") -> int:
    result = future.result().result
    return len(result.stdout) + len(result.stderr)


def _not_run(reason: str, waited: float) -> Ended:
    text = f"sandbox failure: the call was not run: {reason}."
    result = ToolResult(ToolStatus.SERVICE_FAILURE, stderr=text, queue_seconds=waited)
    return Ended(result, was_run=False)
