"""The nouns of the kit, all frozen.

Array axes, used in names everywhere: `P` problems, `N` rollouts sampled per problem (the paper's
2G), `G` rollouts kept per problem, `B` sequences, `T` tokens, `V` vocabulary. A *rollout* is the
act, a *trajectory* the record. Status is born in the sandbox and stays an enum up to the selection:
nothing in the kit infers failure from text.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class ToolStatus(Enum):
    """Outcome of one tool call (§2.1). Only `OK` succeeds; `SERVICE_FAILURE` is no one's error."""

    OK = "OK"
    ERROR = "ERROR"  # the program raised, or ended with a nonzero exit code
    TIMEOUT = "TIMEOUT"  # CPU or wall-clock limit
    MEMORY = "MEMORY"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"  # killed for printing 64 times the output cap
    MALFORMED = "MALFORMED"  # the call could not be parsed; nothing ran
    UNKNOWN_TOOL = "UNKNOWN_TOOL"
    SERVICE_FAILURE = "SERVICE_FAILURE"  # the environment failed; the trajectory is void

    @property
    def is_tool_error(self) -> bool:
        """True when the call counts as failed in p_err (Eq 4)."""
        return self not in (ToolStatus.OK, ToolStatus.SERVICE_FAILURE)


class StopReason(Enum):
    """Why a trajectory ended."""

    ANSWERED = "ANSWERED"  # the model ended its turn without a tool call
    LENGTH = "LENGTH"  # the response budget ran out inside a turn
    MAX_TURNS = "MAX_TURNS"  # the turn limit left a call unanswered
    CONTEXT = "CONTEXT"  # a tool response did not fit into the budget
    VOID = "VOID"  # a SERVICE_FAILURE happened: not scored, not trained, counted


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    id: str
    question: str
    answer: str
    source: str = ""
    level: str = ""


@dataclass(frozen=True)
class ToolCall:
    """One call written by the model. `malformed` is the reason, None if the call is well-formed."""

    name: str | None
    code: str | None
    stdin: str = ""
    raw: str = ""
    malformed: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What the environment answered. `seconds` is run time, `queue_seconds` the wait before it."""

    status: ToolStatus
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    queue_seconds: float = 0.0
    truncated: bool = False


@dataclass(frozen=True)
class Turn:
    """One assistant turn: sampled tokens, and the call and result they led to.

    `result_token_ids` are the tokens that the environment appended after the turn (mask 0).
    `more_calls` holds the further calls of the turn beyond the first; a result of None means
    "not executed" (over `max_calls_per_turn`).
    """

    text: str
    token_ids: np.ndarray  # int32 [T_turn]
    logprobs: np.ndarray  # float32 [T_turn]
    entropies: np.ndarray | None = None  # float32 [T_turn], nats
    call: ToolCall | None = None
    result: ToolResult | None = None
    result_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    more_calls: tuple[tuple[ToolCall, ToolResult | None], ...] = ()

    @property
    def outcomes(self) -> list[tuple[ToolCall, ToolResult]]:
        """The calls that were answered by an execution or a refusal, with their results."""
        pairs = [(self.call, self.result), *self.more_calls]
        return [(call, result) for call, result in pairs if call is not None and result is not None]


@dataclass(frozen=True)
class Trajectory:
    """One rollout, recorded. `response_ids, loss_mask, logprobs, entropies` have one length T.

    `loss_mask` is True on sampled tokens and False on tool tokens; `logprobs` are of the sampling
    distribution (0 on tool tokens). `reward` and `reason` are None until the verifier has spoken.
    """

    problem_id: str
    sample: int
    prompt_ids: np.ndarray  # int32 [T_prompt]
    response_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    entropies: np.ndarray | None  # float32 [T], nats
    turns: tuple[Turn, ...]
    stop: StopReason
    reward: float | None = None
    reason: str | None = None
    weight_version: int = 0

    def __post_init__(self):
        lengths = {
            name: len(getattr(self, name)) for name in ("response_ids", "loss_mask", "logprobs")
        }
        if self.entropies is not None:
            lengths["entropies"] = len(self.entropies)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"per-token fields must have one length, found {lengths}")

    @property
    def outcomes(self) -> list[tuple[ToolCall, ToolResult]]:
        """Answered calls of all turns, in order."""
        return [pair for turn in self.turns for pair in turn.outcomes]

    @property
    def num_calls(self) -> int:
        return sum(result.status is not ToolStatus.SERVICE_FAILURE for _, result in self.outcomes)

    @property
    def num_tool_errors(self) -> int:
        """Failed calls: every status but OK and SERVICE_FAILURE."""
        return sum(result.status.is_tool_error for _, result in self.outcomes)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.sum(self.loss_mask))

    @property
    def is_correct(self) -> bool:
        return self.reward is not None and self.reward > 0

    @property
    def is_truncated(self) -> bool:
        """True when the token budget, not the model, ended the trajectory (§4.3.1).

        The turn limit is none: such a trajectory is scored by what it has answered.
        """
        return self.stop in (StopReason.LENGTH, StopReason.CONTEXT)


@dataclass(frozen=True)
class Group:
    """The N trajectories sampled for one problem."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
