"""The multi-turn loop of one trajectory, and a batch of groups over one engine (§2.1, Fig 2).

A turn ends; its calls run in the sandbox; their responses are appended with mask 0; the next turn
starts. All trajectories of a batch run at once: each sends its tool calls the moment its own turn
ends. The response budget counts model and tool tokens together.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np

from . import protocol, rewards
from .engines import Completion, Engine, EngineLost, Result, Sampling
from .types import Group, Problem, StopReason, ToolCall, ToolResult, ToolStatus, Trajectory, Turn


class CodeEnvironment(Protocol):
    """What a rollout needs of a sandbox."""

    async def arun(self, code: str, stdin: str = "") -> ToolResult: ...


@dataclass(frozen=True)
class RolloutSettings:
    """Limits of one rollout; `seed_key` names the random stream (run seed, step, purpose)."""

    max_turns: int
    max_calls_per_turn: int
    max_response_tokens: int
    temperature: float
    top_p: float
    seed_key: str


@dataclass(frozen=True)
class Actors:
    """Those who take part in a rollout. Without a sandbox no call is executed.

    check: compares answers that are no integers; None takes the verifier of this process.
    """

    engine: Engine
    sandbox: CodeEnvironment | None
    tokenizer: protocol.Tokenizer
    chat: protocol.ChatFormat
    check: rewards.Check | None = None


def trajectory_seed(seed_key: str, problem_id: str, sample: int) -> int:
    """63 bits that depend on nothing but their arguments: not on the process, order or batch."""
    text = f"{seed_key}/{problem_id}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class _Tape:
    """The growing response: ids, mask, log-probs and entropies, always of one length.

    Entropies are None as soon as the engine gives none for a turn.
    """

    def __init__(self):
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self._entropies: list[float] | None = []

    @property
    def entropies(self) -> np.ndarray | None:
        return None if self._entropies is None else np.asarray(self._entropies, np.float32)

    def add_sampled(self, completion: Completion) -> None:
        self.ids += completion.token_ids.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        if completion.entropies is None or self._entropies is None:
            self._entropies = None
        else:
            self._entropies += completion.entropies.tolist()

    def add_tool(self, token_ids: list[int]) -> None:
        self.ids += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        if self._entropies is not None:
            self._entropies += [0.0] * len(token_ids)


async def rollout(
    problem: Problem, sample: int, actors: Actors, settings: RolloutSettings
) -> Trajectory:
    """One trajectory, unscored. Every end has a `StopReason`; nothing is dropped.

    A service that fails (a dead sandbox, an engine that is lost) voids this trajectory only.

    Raises:
        engines.EngineError: the request cannot fit, however often it is tried.
    """
    request_id = f"{settings.seed_key}/{problem.id}/{sample}"
    prompt_ids = actors.tokenizer.encode(actors.chat.prompt(problem.question))
    tape, turns, version, reason = _Tape(), [], 0, None
    seed = trajectory_seed(settings.seed_key, problem.id, sample)
    stop = None
    try:
        while stop is None:
            budget = settings.max_response_tokens - len(tape.ids)
            if budget < 1:
                stop = StopReason.LENGTH  # a tool response filled the budget exactly: it is kept
                break
            completion = await actors.engine.generate(
                request_id,
                prompt_ids + tape.ids,
                Sampling(
                    max_new_tokens=budget,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    seed=seed,
                    entropies=True,
                    stop_ids=(actors.tokenizer.stop_id,),
                ),
            )
            version = completion.weight_version
            tape.add_sampled(completion)
            turn, stop = await _finish_turn(completion, len(turns), actors, settings)
            left = settings.max_response_tokens - len(tape.ids)
            if stop is None and len(turn.result_token_ids) > left:
                turn = replace(turn, result_token_ids=np.zeros(0, np.int32))
                stop = StopReason.CONTEXT
            turns.append(turn)
            tape.add_tool(turn.result_token_ids.tolist())
    except (OSError, EngineLost) as failure:  # timeouts, losses; anything else is a bug, and raises
        stop, reason = StopReason.VOID, f"void: {failure!r}"
    finally:
        await actors.engine.abort(request_id)  # frees the trajectory's cache
    return Trajectory(
        problem_id=problem.id,
        sample=sample,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        response_ids=np.asarray(tape.ids, np.int32),
        loss_mask=np.asarray(tape.mask, bool),
        logprobs=np.asarray(tape.logprobs, np.float32),
        entropies=tape.entropies,
        turns=tuple(turns),
        stop=stop,
        reason=reason,
        weight_version=version,
    )


async def _finish_turn(
    completion: Completion, turn_index: int, actors: Actors, settings: RolloutSettings
) -> tuple[Turn, StopReason | None]:
    """Parse the turn, run its calls, encode their responses. `None` means the rollout goes on."""
    ids = completion.token_ids
    stopped = completion.finish == "stop"
    text = actors.tokenizer.decode(ids[:-1] if stopped else ids)
    turn = Turn(text, ids, completion.logprobs, completion.entropies)
    if not stopped:
        return turn, StopReason.LENGTH
    prefix = actors.chat.first_prefix if turn_index == 0 else actors.chat.next_prefix
    calls = protocol.parse_turn(prefix + text).calls if actors.sandbox is not None else []
    if not calls:
        return turn, StopReason.ANSWERED
    allowed = calls[: settings.max_calls_per_turn]
    refused = tuple((call, None) for call in calls[settings.max_calls_per_turn :])
    if turn_index + 1 >= settings.max_turns:
        return replace(turn, call=calls[0], more_calls=tuple((c, None) for c in calls[1:])), (
            StopReason.MAX_TURNS
        )
    results = await actors.engine.deliver(_execute(allowed, actors))
    turn = replace(
        turn,
        call=calls[0],
        result=results[0],
        more_calls=tuple(zip(allowed[1:], results[1:], strict=True)) + refused,
    )
    if any(result.status is ToolStatus.SERVICE_FAILURE for result in results):
        return turn, StopReason.VOID
    limit = actors.chat.response_chars
    texts = [
        protocol.response_text(call, result, limit)
        for call, result in zip(allowed, results, strict=True)
    ]
    texts += ["not executed: too many calls in one turn"] * len(refused)
    tokens = protocol.encode_response("\n".join(texts), actors.chat, actors.tokenizer)
    return replace(turn, result_token_ids=np.asarray(tokens, np.int32)), None


async def _execute(calls: list[ToolCall], actors: Actors) -> list[ToolResult]:
    """Run the calls in order. What cannot run gets its own status."""
    results = []
    for call in calls:
        if call.malformed is not None:
            results.append(ToolResult(ToolStatus.MALFORMED, stderr=call.malformed))
        elif call.name not in actors.chat.tool_names:
            results.append(ToolResult(ToolStatus.UNKNOWN_TOOL, stderr=f"unknown tool: {call.name}"))
        else:
            results.append(await _run(actors.sandbox, call))
    return results


async def _run(sandbox: CodeEnvironment, call: ToolCall) -> ToolResult:
    """One execution. An environment that raises has failed; that is never the program's error."""
    try:
        return await sandbox.arun(call.code, call.stdin)
    except Exception as error:  # the boundary to the environment: recorded, and the rollout is void
        logging.getLogger(__name__).warning("the code environment raised", exc_info=True)
        return ToolResult(ToolStatus.SERVICE_FAILURE, stderr=f"{type(error).__name__}: {error}")


def score(trajectory: Trajectory, problem: Problem, check=None) -> Trajectory:
    """Answer-only reward (Eq 3): 1 if the model's own last answer is right, else 0.

    A trajectory cut by the token budget scores 0 and is kept (§4.3.1); a void one is not scored.

    Raises:
        rewards.ServiceFailure: the verifier could not answer; the caller voids the trajectory.
    """
    if trajectory.stop is StopReason.VOID:
        return replace(trajectory, reward=None, reason=trajectory.reason or "void")
    if trajectory.is_truncated:
        return replace(trajectory, reward=0.0, reason="truncated")
    written = [turn.text for turn in trajectory.turns]
    verdict = rewards.turns_reward(written, problem.answer, check)
    return replace(trajectory, reward=float(verdict.correct), reason=verdict.reason)


def score_or_void(trajectory: Trajectory, problem: Problem, check=None) -> Trajectory:
    """`score`, with a dead verifier turned into a void trajectory: never into a reward of 0."""
    try:
        return score(trajectory, problem, check)
    except rewards.ServiceFailure as failure:
        return replace(trajectory, stop=StopReason.VOID, reward=None, reason=f"void: {failure}")


class _NeedsChecker(Exception):
    """The answer is no integer: the slow path is needed."""


def _not_here(prediction: str, gold: str) -> rewards.Verdict:
    raise _NeedsChecker


async def scored(
    trajectory: Trajectory, problem: Problem, check: rewards.Check | None = None
) -> Trajectory:
    """`score_or_void` that does not hold up the event loop: only integers are compared in it.

    Other answers may take the verifier's whole deadline; they wait for it in a thread.
    """
    try:
        return score_or_void(trajectory, problem, _not_here)
    except _NeedsChecker:
        return await asyncio.to_thread(score_or_void, trajectory, problem, check)


async def stream_groups(
    problems: Iterable[Problem],
    samples: int,
    actors: Actors,
    settings: RolloutSettings,
    on_done: Callable[[Trajectory], None] | None = None,
) -> AsyncIterator[tuple[int, Group]]:
    """Groups of `samples` scored trajectories as they complete, each with its problem's place.

    All trajectories start at once; each is verified when it ends, while others are sampled.
    A problem that comes twice gets two groups, each with its own random streams. Who stops
    listening ends what still runs.
    """

    async def one(problem: Problem, sample: int, own: RolloutSettings) -> Trajectory:
        finished = await rollout(problem, sample, actors, own)
        trajectory = await scored(finished, problem, actors.check)
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    problems, seen, tasks = list(problems), Counter(), []
    for problem in problems:
        copy = f"#{seen[problem.id]}" if seen[problem.id] else ""
        own = replace(settings, seed_key=settings.seed_key + copy)
        tasks.append([asyncio.ensure_future(one(problem, s, own)) for s in range(samples)])
        seen[problem.id] += 1

    async def group(place: int) -> tuple[int, Group]:
        return place, Group(problems[place], tuple(await asyncio.gather(*tasks[place])))

    try:
        for complete in asyncio.as_completed([group(place) for place in range(len(problems))]):
            yield await complete
    finally:
        for task in chain.from_iterable(tasks):
            task.cancel()


async def rollout_groups(
    problems: Iterable[Problem],
    samples: int,
    actors: Actors,
    settings: RolloutSettings,
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[Group]:
    """All groups of `stream_groups`, in the order of the problems."""
    stream = stream_groups(problems, samples, actors, settings, on_done)
    found = {place: group async for place, group in stream}
    return [found[place] for place in sorted(found)]


def run_to_end(coroutine: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine from synchronous code, also inside a running event loop (Jupyter)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
