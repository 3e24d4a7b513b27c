"""A recorded or made-up workload on real engines: each trajectory samples as much as it did.

What is sampled is never looked at; prompts and tool answers are random tokens; a tool is a sleep.
So all policies do identical work, and their times may be compared pair by pair.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from ..engines import EngineError, Sampling
from .dispatcher import Dispatcher
from .workload import TrajectoryTrace


async def replay(
    traces: Sequence[TrajectoryTrace], dispatcher: Dispatcher, vocabulary: int, seed: int = 0
) -> dict[str, EngineError]:
    """Play all trajectories, submitted together; those that failed, by id, with the error."""
    dispatcher.announce([trace.spec for trace in traces])
    found = await asyncio.gather(
        *(_play(trace, number, dispatcher, vocabulary, seed) for number, trace in enumerate(traces))
    )
    return {trace.id: error for trace, error in zip(traces, found, strict=True) if error}


async def _play(
    trace: TrajectoryTrace, number: int, dispatcher: Dispatcher, vocabulary: int, seed: int
) -> EngineError | None:
    rng = np.random.default_rng((seed, number))
    tokens = rng.integers(vocabulary, size=trace.prompt_tokens).tolist()
    try:
        for place, turn in enumerate(trace.turns):
            sampling = Sampling(turn.tokens, seed=number)
            completion = await dispatcher.generate(trace.id, tokens, sampling)
            tokens += completion.token_ids.tolist()
            if place + 1 < len(trace.turns):
                await dispatcher.deliver(asyncio.sleep(turn.tool_seconds))
                tokens += rng.integers(vocabulary, size=turn.tool_tokens).tolist()
    except EngineError as error:
        return error
    finally:
        await dispatcher.abort(trace.id)
    return None
