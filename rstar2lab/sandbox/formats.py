"""Wire formats of the service: code-judge's, SandboxFusion's, and our own, as pydantic models.

Requests become `Call`s; results become what the clients of each format read. In the foreign formats
a program is a script: its last expression is not shown.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from ..types import ToolResult, ToolStatus
from .calls import Call, Ended

JUDGE_CHARS = 1000  # code-judge cuts both streams here, after it has compared


class OurCall(BaseModel):
    """A call in our own format; with an id it is run once, however often it is sent."""

    code: str
    stdin: str = ""
    id: str | None = Field(None, max_length=200)
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    queue_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    echo: bool = True

    def to_call(self) -> Call:
        return Call(**self.model_dump())


class OurCalls(BaseModel):
    calls: list[OurCall] = Field(min_length=1)


def our_result(index: int, ended: Ended) -> dict:
    """One line of the answer, with the place of its call in the request."""
    result = ended.result
    return {
        "index": index,
        "was_run": ended.was_run,
        "status": result.status.name,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "seconds": result.seconds,
        "queue_seconds": result.queue_seconds,
        "truncated": result.truncated,
    }


def from_our_result(row: dict) -> ToolResult:
    """The client's side of `our_result`."""
    fields = ("stdout", "stderr", "seconds", "queue_seconds", "truncated")
    return ToolResult(ToolStatus[row["status"]], **{name: row[name] for name in fields})


class Submission(BaseModel):
    """code-judge's request. Only Python programs and math answers are served."""

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"] = "python"
    options: dict[str, Any] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None

    def to_call(self) -> Call:
        return Call(self.solution, self.input or "", echo=False)


class SubmissionBatch(BaseModel):
    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1)


def judged(asked: Submission, ended: Ended) -> dict:
    """code-judge's answer to a program. Outputs are compared before they are cut."""
    result = ended.result
    if not ended.was_run:
        return not_judged(asked, "queue_timeout")
    if result.status is ToolStatus.SERVICE_FAILURE:
        return not_judged(asked, "internal_error")
    has_run = result.status is ToolStatus.OK
    expected = asked.expected_output
    if has_run and result.truncated and expected and len(expected) > len(result.stdout):
        return not_judged(asked, "internal_error")  # what would decide was cut off
    is_right = expected is None or result.stdout.strip() == expected.strip()
    reason = "worker_timeout" if result.status is ToolStatus.TIMEOUT else ""
    streams = (text[:JUDGE_CHARS] for text in (result.stdout, result.stderr))
    return _judged(asked, has_run and is_right, has_run, result.seconds, *streams, reason)


def not_judged(asked: Submission, reason: str) -> dict:
    """code-judge's answer when there is no result."""
    return _judged(asked, False, False, 0.0, None, None, reason)


def _judged(asked, success, run_success, cost, stdout, stderr, reason) -> dict:
    return {
        "sub_id": asked.sub_id, "success": success, "run_success": run_success, "cost": cost,
        "stdout": stdout, "stderr": stderr, "reason": reason,
    }  # fmt: skip


def without_streams(answer: dict) -> dict:
    """What `/judge` answers: `/run` without the output."""
    return {key: value for key, value in answer.items() if key not in ("stdout", "stderr")}


class FusionRequest(BaseModel):
    """SandboxFusion's `/run_code`. Python without extra files is served."""

    code: str
    language: str = "python"
    stdin: str | None = None
    compile_timeout: float = 10.0
    run_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    memory_limit_MB: int = -1
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)

    @property
    def refusal(self) -> str | None:
        """Why it cannot be run here; None if it can."""
        if self.language != "python":
            return f"language {self.language!r} is not served; only python is"
        if self.files or self.fetch_files:
            return "files and fetch_files are not served; print what you need"
        return None

    def to_call(self) -> Call:
        return Call(self.code, self.stdin or "", seconds=self.run_timeout, echo=False)


def fusion_answer(result: ToolResult | None, message: str = "") -> dict:
    """SandboxFusion's answer; `result` None: nothing was run."""
    outcome, run = "SandboxError", None
    if result is not None and result.status is ToolStatus.SERVICE_FAILURE:
        message = result.stderr
    elif result is not None:
        outcome = "Success" if result.status is ToolStatus.OK else "Failed"
        timed_out = result.status is ToolStatus.TIMEOUT
        run = {
            "status": "TimeLimitExceeded" if timed_out else "Finished",
            "execution_time": result.seconds,
            "return_code": None if timed_out else int(outcome == "Failed"),
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
    return {
        "status": outcome, "message": message, "compile_result": None, "run_result": run,
        "executor_pod_name": None, "files": {},
    }  # fmt: skip


class Pairs(BaseModel):
    """Answers to be verified, as (prediction, gold)."""

    pairs: list[tuple[str, str]] = Field(min_length=1, max_length=10_000)
