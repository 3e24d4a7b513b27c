r"""math-verify in killable processes, with a deadline per answer; callable from any thread.

A worker is a fresh interpreter behind a pipe, started on first need: nothing is forked from threads
and no `__main__` is imported again, so it works under torch, Ray, Jupyter and in plain scripts. One
that exceeds the deadline is killed and replaced; only that answer pays. Both sides are wrapped in
`\boxed{}`, gold goes first. What cannot be decided for our fault raises `ServiceFailure`.

Policy where math-verify 0.9.0 is silent or wrong: 12 % equals 12 and 12/100; an equation counts by
its right side; `1,2` equals `(1,2)`, but two bracketed lists compare item by item; a base on one
side only is dropped; rounding is accepted from the 6th decimal; `x \to 7` is not 7; an ellipsis
and words compare as text; `5e3` and `1e-05` are numbers, `2e-3` is Euler's.
"""

import atexit
import json
import os
import queue
import re
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe

from .rewards import ServiceFailure, Verdict

_MEMORY_BYTES = 4 << 30  # address space of a worker: a blow-up fails in there, not on the host
_ALARM_GRACE_SECONDS = 5.0  # a worker ends itself this late, should its parent have died
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rstar2lab import verifier; verifier._serve(int(sys.argv[1]))"
)


# --- the pool ------------------------------------------------------------------------------------


class Verifier:
    """A pool of math-verify processes.

    workers: how many answers are compared at once, about 90 MB each; started when first needed.
    deadline_seconds: wall time for one answer, waiting for a free worker and starting it excluded.
    start_seconds: how long a worker may take to start before that is a service failure.
    """

    def __init__(
        self, workers: int = 2, deadline_seconds: float = 5.0, start_seconds: float = 120.0
    ):
        if workers < 1 or not deadline_seconds > 0:
            raise ValueError(
                "expected workers >= 1 and deadline_seconds > 0, "
                f"found workers={workers}, deadline_seconds={deadline_seconds}"
            )
        self.workers, self.deadline_seconds = workers, deadline_seconds
        self.start_seconds = start_seconds
        self._slots = threading.BoundedSemaphore(workers)
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._closed = False

    def check(self, prediction: str, gold: str) -> Verdict:
        """Compare bare contents; "verify_timeout" after the deadline.

        Raises: ServiceFailure if the pool is closed, or no worker starts or survives.
        """
        with self._slots:
            for is_last_try in (False, True):
                worker = self._take_worker(must_be_new=is_last_try)
                try:
                    verdict = worker.ask(gold, prediction, self.deadline_seconds)
                except (EOFError, OSError) as error:
                    code = worker.kill()
                    if not is_last_try:
                        continue
                    raise ServiceFailure(
                        f"the answer checker died twice (exit code {code}) on {prediction[:80]!r} "
                        f"against {gold[:80]!r}; check memory and the math-verify installation"
                    ) from error
                except BaseException:  # such as KeyboardInterrupt: the pipe is out of step
                    worker.kill()
                    raise
                return self._give_back(worker, verdict)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the idle workers; busy ones end with their answer. Idempotent."""
        self._closed = True
        try:
            while True:
                self._idle.get_nowait().kill()
        except queue.Empty:
            return

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _take_worker(self, must_be_new: bool) -> "_Worker":
        if self._closed:
            raise ServiceFailure("the answer checker is closed; make a new Verifier")
        while not self._idle.empty():
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:  # another thread was faster
                break
            if worker.process.poll() is None and not must_be_new:
                return worker
            worker.kill()
        return _Worker(self.start_seconds)

    def _give_back(self, worker: "_Worker", verdict: Verdict | None) -> Verdict:
        if verdict is None:
            worker.kill()
            return Verdict(False, "verify_timeout")
        self._idle.put(worker)
        if self._closed:
            self.close()
        return verdict


class _Worker:
    """One interpreter with math-verify loaded, used by one thread at a time."""

    def __init__(self, start_seconds: float):
        self.connection, theirs = Pipe()
        search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), search_path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a notebook is not for the workers
                )
            except OSError as error:
                self.connection.close()
                raise ServiceFailure(f"the answer checker did not start: {error}") from error
        self._wait_until_ready(start_seconds)

    def _wait_until_ready(self, start_seconds: float) -> None:
        try:
            has_spoken = self.connection.poll(start_seconds)
            cause = self.connection.recv() if has_spoken else f"not ready after {start_seconds} s"
        except (EOFError, OSError):
            cause = "the process ended"
        except BaseException:
            self.kill()
            raise
        if cause:
            code = self.kill()
            raise ServiceFailure(f"the answer checker did not start: {cause} (exit code {code})")

    def ask(self, gold: str, prediction: str, deadline_seconds: float) -> Verdict | None:
        """The verdict, or None if there is none by the deadline."""
        self.connection.send((gold, prediction, deadline_seconds))
        if not self.connection.poll(deadline_seconds):
            return None
        return self.connection.recv()

    def kill(self) -> int:
        """End the process and return its exit code, negative for a signal."""
        if self.process.poll() is None:
            self.process.kill()
        self.connection.close()
        return self.process.wait()


_shared: Verifier | None = None
_shared_lock = threading.Lock()


def check(prediction: str, gold: str) -> Verdict:
    """Compare bare contents on the pool shared by this process; see `Verifier.check`."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Verifier()
        verifier = _shared
    return verifier.check(prediction, gold)


def close() -> None:
    """End the shared pool; the next `check` starts a new one."""
    global _shared
    with _shared_lock:
        verifier, _shared = _shared, None
    if verifier is not None:
        verifier.close()


def _forget_shared() -> None:
    """In a forked child the pipes belong to the parent."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


atexit.register(close)
os.register_at_fork(after_in_child=_forget_shared)


# --- inside a worker -----------------------------------------------------------------------------

_UNREADABLE = (
    ArithmeticError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)  # what an absurd expression provokes; any other exception ends the worker, a service failure


def _serve(file_descriptor: int) -> None:
    """Answer (gold, prediction, deadline) until the other end closes."""
    import logging
    import resource
    import signal

    connection = Connection(file_descriptor)
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)  # the deadline bounds long numbers
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection.send("")
    while True:
        try:
            gold, prediction, deadline_seconds = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, deadline_seconds + _ALARM_GRACE_SECONDS)
        try:
            verdict = Verdict(*_decide(gold, prediction))
        except _UNREADABLE:
            verdict = Verdict(False, "parse_failure")
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(verdict)


def _decide(gold: str, prediction: str) -> tuple[bool, str]:
    """Verdict on two bare texts: rules for what math-verify gets wrong, then math-verify."""
    gold, prediction = _normalized(gold), _normalized(prediction)
    for rule in (_by_text, _by_base, _by_items):
        decided = rule(gold, prediction)
        if decided is not None:
            return decided, "equal" if decided else "mismatch"
    return _by_math_verify(gold, prediction)


_LEAD_IN = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s+", re.IGNORECASE)
_BOLD = re.compile(r"\*\*(.+)\*\*")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([0-9]+|[+-][0-9]{2,})(?![\w.])")


def _normalized(text: str) -> str:
    """One spelling for degree signs, minus signs, 5e3, bold print, `\\left` and a final period."""
    text = text.replace("\u2212", "-").replace("\u00b0", r"^\circ").replace("\u2026", r"\ldots")
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)
    text = _LEAD_IN.sub("", text, count=1) if _LEAD_IN.match(text) else text
    bold = _BOLD.fullmatch(text.strip())
    text = bold[1] if bold else text
    text = re.sub(r"(?<!\.)\.$", "", text.strip())
    return _SCIENTIFIC.sub(lambda m: rf"{m[1]} \cdot 10^{{{int(m[2])}}}", text).strip()


_ELLIPSIS = re.compile(r"\\[lc]?dots[cbmio]?(?![a-zA-Z])|\.\.\.")
_WORDS = re.compile(r"(?:\\(?:text|textbf|mathrm|textit)\s*\{)?([A-Za-z][A-Za-z ]*)\}?")


def _by_text(gold: str, prediction: str) -> bool | None:
    r"""An ellipsis (read as a set without it) and words (read as products) are compared as text."""
    sides = gold, prediction
    if any(_ELLIPSIS.search(side) for side in sides):
        spelled = [re.sub(r"\s|[{}]", "", _ELLIPSIS.sub("...", side)) for side in sides]
        return spelled[0] == spelled[1]
    words = [_WORDS.fullmatch(side) for side in sides]
    if not all(words):
        return None
    spelled = [" ".join(word[1].split()) for word in words]
    if any(len(side) == 1 or (len(side) == 2 and side.islower()) for side in spelled):
        return None  # variables, or a product of two
    return spelled[0].casefold() == spelled[1].casefold()


_BASED = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")


def _by_base(gold: str, prediction: str) -> bool | None:
    """1101_2: numerals with a base on both sides; math-verify drops the base."""
    numerals = [_BASED.fullmatch(side) for side in (gold, prediction)]
    if not all(numerals) or not all(numeral[1][0].isdigit() for numeral in numerals):
        return None
    values = [int(numeral[1], int(numeral[2])) for numeral in numerals]
    return values[0] == values[1]


def _by_items(gold: str, prediction: str) -> bool | None:
    """(2,1) and (3,1) are both empty intervals to math-verify: compare bracketed lists by item."""
    lists = _bracketed_items(gold), _bracketed_items(prediction)
    if None in lists:
        return None
    (gold_brackets, gold_items), (brackets, items) = lists
    if brackets != gold_brackets or len(items) != len(gold_items):
        return False
    return all(_decide(*pair)[0] for pair in zip(gold_items, items, strict=True))


def _bracketed_items(text: str) -> tuple[str, list[str]] | None:
    """Brackets and comma-separated items of a text that is one (…) or […], else None."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth, items, start = 0, [], 1
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and i < len(text) - 1:
            return None
        if character == "," and depth == 1:
            items.append(text[start:i].strip())
            start = i + 1
    items.append(text[start:-1].strip())
    return (text[0] + text[-1], items) if len(items) > 1 and all(items) else None


def _by_math_verify(gold: str, prediction: str) -> tuple[bool, str]:
    import math_verify
    import sympy

    target = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [
        math_verify.parse(f"\\boxed{{{side}}}", extraction_config=target, parsing_timeout=None)
        for side in (gold, prediction)
    ]
    is_equal = math_verify.verify(*parsed, timeout_seconds=None)
    if is_equal and not _differ_below_rounding(parsed[0][0], parsed[1][0]):
        return True, "equal"
    is_readable = all(
        side and isinstance(side[0], sympy.Basic | sympy.MatrixBase) for side in parsed
    )
    return False, "mismatch" if is_readable else "parse_failure"


def _differ_below_rounding(gold, prediction) -> bool:
    """True for tiny numbers that only rounding to 6 decimals makes equal: 1/2004! and 1/2006!."""
    import sympy

    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (gold, prediction)):
        return False
    percent = sympy.UnevaluatedExpr  # 12 % is 12 · (1/100), the latter shielded from evaluation
    a, b = (sympy.N(x.replace(percent, lambda inner: inner)) for x in (gold, prediction))
    if not (a.is_Number and b.is_Number):
        return False
    largest = max(abs(a), abs(b))
    return bool(largest < 5e-3 and abs(a - b) > 1e-4 * largest)
