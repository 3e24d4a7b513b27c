"""Offer calls to a code environment at given times, whether or not it keeps up."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


async def offer(sandbox, programs: Sequence[str], arrivals_N: np.ndarray) -> "pd.DataFrame":
    """Run program i at arrivals_N[i] seconds; one row per call, in the order of the programs.

    `sandbox`: anything with `arun`. Columns arrival, latency (until the answer), queue_seconds,
    seconds (of the run), status. The load is open: a late answer delays no later call.
    """
    import pandas as pd

    started = time.monotonic() + 0.05

    async def one(program: str, arrival: float) -> dict:
        await asyncio.sleep(max(0.0, started + arrival - time.monotonic()))
        result = await sandbox.arun(program)
        return {
            "arrival": arrival,
            "latency": time.monotonic() - started - arrival,
            "queue_seconds": result.queue_seconds,
            "seconds": result.seconds,
            "status": result.status.name,
        }

    calls = zip(programs, arrivals_N, strict=True)
    return pd.DataFrame(await asyncio.gather(*(one(*call) for call in calls)))
