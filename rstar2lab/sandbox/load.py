"""Offer calls to a code environment at given times, whether or not it keeps up."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def offer(sandbox, programs: Sequence[str], arrivals_N: np.ndarray) -> "pd.DataFrame":
    """Run program i at arrivals_N[i] seconds; one row per call, in the order of the programs.

    `sandbox`: anything with `arun`. Columns arrival, latency (until the answer), queue_seconds,
    seconds (of the run), status. The load is open: a late answer delays no later call.
    """
    import pandas as pd

    async def one(started: float, program: str, arrival: float) -> dict:
        await asyncio.sleep(max(0.0, started + arrival - time.monotonic()))
        result = await sandbox.arun(program)
        return {
            "arrival": arrival,
            "latency": time.monotonic() - started - arrival,
            "queue_seconds": result.queue_seconds,
            "seconds": result.seconds,
            "status": result.status.name,
        }

    async def everything() -> list[dict]:
        started = time.monotonic() + 0.05
        calls = zip(programs, arrivals_N, strict=True)
        return await asyncio.gather(*(one(started, *call) for call in calls))

    return pd.DataFrame(_run(everything()))


def _run(coroutine):
    """Also from inside a notebook's running event loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
