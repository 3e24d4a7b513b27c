"""An event loop whose clock jumps: what sleeps costs no time, and the order of events is exact.

For engines in one process that are to be timed as if each had a processor of its own: an engine
works for real, then sleeps for as long as its work has taken on the processor.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting it moves the clock."""

    loop: "VirtualLoop"

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("every task waits for another one, and no timer is set")
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when all tasks sleep. No threads, no sockets."""

    def __init__(self):
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(coroutine: Coroutine[None, None, Result]) -> Result:
    """`asyncio.run` on a clock that jumps, also from inside a running loop (Jupyter).

    Raises: RuntimeError on a deadlock.
    """

    def run() -> Result:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
