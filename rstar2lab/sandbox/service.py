"""`Sandbox`: run programs written by a model, isolated, on warm worker processes.

The status of a call is born here, from clocks and exit codes, never from text. Not done here: HTTP
(`server`), parsing of calls (`protocol`). It is not a virtual machine; see `LEVELS`.
"""

import asyncio
import dataclasses
import os
import queue
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from rstar2lab.sandbox.imports import imported
from rstar2lab.sandbox.levels import (
    AUTOMATIC_LEVELS,
    LEVELS,
    OUTPUT_KILL_FACTOR,
    Limits,
    SandboxError,
    at_least,
    check_level,
)
from rstar2lab.sandbox.workers import (
    RawResult,
    TemplateProcess,
    TemplateSettings,
    Worker,
    WorkerDied,
    path_pattern,
)
from rstar2lab.types import ToolResult, ToolStatus

DEFAULT_PRELOAD = (
    "math", "cmath", "itertools", "functools", "operator", "collections", "fractions", "decimal",
    "statistics", "random", "re", "string", "datetime", "time", "heapq", "bisect", "copy", "json",
    "typing", "dataclasses", "enum",
)  # fmt: skip
DEFAULT_TIERS = (("numpy",), ("numpy", "scipy", "sympy"))
_ATTEMPTS = 2  # a call whose worker died is repeated once


class Sandbox:
    """Isolated execution of programs, `workers` at a time. Usable as a context manager.

    workers: slots; for programs that may loop, about four per processor.
    limits: of each call. require_level: the weakest acceptable level. level: exactly this level
    ("L0" only by name); None takes the strongest that works. preload: modules imported once,
    before the first call; invisible to programs except in speed. errors: "line" reports an
    exception in one line, "traceback" with the program's own frames. readable: more paths that
    programs may read. tiers: for programs that import these modules, workers that hold them
    already; the first tier that has all that a program imports takes it. A tier starts with its
    first program (about a second, once). most_sessions: sessions open at one time.

    Output is cut to `limits.output_chars` characters per stream, never inside one: standard
    output keeps its head, standard error its tail. Safe to use from several threads and inside a
    running event loop; another process needs its own Sandbox.

    Raises: SandboxError if the level is not reached or the workers do not start.
    """

    def __init__(
        self,
        workers: int = 2,
        limits: Limits | None = None,
        *,
        require_level: str | None = None,
        level: str | None = None,
        preload: Iterable[str] = DEFAULT_PRELOAD,
        errors: str = "line",
        readable: Iterable[str] = (),
        tiers: Iterable[Iterable[str]] = DEFAULT_TIERS,
        most_sessions: int = 64,
    ):
        if workers < 1:
            raise SandboxError(f"workers={workers}, expected at least 1; raise workers")
        if errors not in ("line", "traceback"):
            raise SandboxError(f"errors={errors!r}, expected 'line' or 'traceback'; choose one")
        self.limits = limits or Limits()
        self.workers, self.most_sessions = workers, most_sessions
        levels = AUTOMATIC_LEVELS if level is None else (check_level(level),)
        settings = TemplateSettings(levels, self.limits, tuple(preload), tuple(readable), errors)
        self._state = _State(settings, workers)
        self._tiers = _Tiers(self._state, tiers)
        self._finalizer = weakref.finalize(self, self._tiers.close)
        try:
            self.level = _accept_level(self._state.template.report, require_level, level)
            _check_preload(self._state.template.report)
            self._state.fill()
        except BaseException:
            self.close()
            raise

    def run(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Run one program and wait for its result; the status says how it ended.

        seconds: shorter limits of processor and wall time for this call. echo: show the last
        expression, as a notebook cell does; without it the program is a script.

        Raises: SandboxError when the sandbox is closed or belongs to another process.
        """
        return self._run(code, stdin, time.monotonic(), seconds, echo)

    def run_many(self, programs: Iterable[str | tuple[str, str]]) -> list[ToolResult]:
        """Run programs, or (program, stdin) pairs, over all workers. Results in input order."""
        pairs = as_pairs(programs)
        submitted = time.monotonic()
        futures = [self._state.submit(self._run, *pair, submitted) for pair in pairs]
        return [future.result() for future in futures]

    async def arun(
        self, code: str, stdin: str = "", *, seconds: float | None = None, echo: bool = True
    ) -> ToolResult:
        """Awaitable twin of `run`; a cancelled call ends in the background, at its limit."""
        future = self._state.submit(self._run, code, stdin, time.monotonic(), seconds, echo)
        return await asyncio.wrap_future(future)

    def session(self, idle_seconds: float = 600.0) -> "Session":
        """A stateful session with a worker of its own; use it as a context manager.

        After `idle_seconds` without a call its process ends; the next call says so.

        Raises: SandboxError when `most_sessions` are open.
        """
        self._state.check_usable()
        if len(self._state.sessions) >= self.most_sessions:
            raise SandboxError(
                f"found {len(self._state.sessions)} open sessions, expected fewer than"
                f" {self.most_sessions}; close one, or raise most_sessions"
            )
        return Session(self, self._state, idle_seconds)

    def close(self) -> None:
        """End all workers and wait for them; calls in progress become SERVICE_FAILURE."""
        self._finalizer()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _run(
        self,
        code: str,
        stdin: str,
        submitted: float,
        seconds: float | None = None,
        echo: bool = True,
    ) -> ToolResult:
        options, limits = _options(self.limits, seconds, echo)
        state = self._tiers.state_for(code)
        worker = state.take()
        waited = time.monotonic() - submitted
        for _ in range(_ATTEMPTS):
            try:
                worker = worker or state.replace()
                raw = worker.call(code, stdin, options)
            except (WorkerDied, SandboxError) as error:
                worker, reason = _discard(worker), error
                continue
            except BaseException:  # an interrupt in mid-call: the worker's answer is still to come
                state.give(_discard(worker))
                raise
            state.give(worker)
            return to_result(raw, limits, waited)
        state.give(worker)
        return failure(reason, waited)


def as_pairs(programs: Iterable[str | tuple[str, str]]) -> list[tuple[str, str]]:
    """Programs, or (program, stdin) pairs, as pairs."""
    return [(item, "") if isinstance(item, str) else item for item in programs]


def _options(limits: Limits, seconds: float | None, echo: bool) -> tuple[dict, Limits]:
    """What a slot is told of a call, and the limits that then hold. Raises: SandboxError."""
    options = {} if echo else {"echo": False}
    if seconds is None:
        return options, limits
    if not 0 < seconds < float("inf"):
        raise SandboxError(f"seconds={seconds}, expected a positive number")
    return options | {"seconds": seconds}, dataclasses.replace(
        limits,
        cpu_seconds=min(limits.cpu_seconds, seconds),
        wall_seconds=min(limits.wall_seconds, seconds),
    )


def _discard(worker: Worker | None) -> None:
    if worker is not None:
        worker.close()


class _State:
    """Template, idle workers and threads of a sandbox; closed when the sandbox is collected.

    An idle place holds a worker, or None where a dead one has to be replaced.
    """

    def __init__(self, settings: TemplateSettings, workers: int):
        self.settings, self.count = settings, workers
        self.lock = threading.Lock()
        self.idle: queue.Queue[Worker | None] = queue.Queue()
        self.process_id = os.getpid()
        self.executor: ThreadPoolExecutor | None = None
        self.is_closed = False
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.template = TemplateProcess(settings)

    def fill(self) -> None:
        """Start all workers. Raises: SandboxError."""
        for _ in range(self.count):
            self.idle.put(self.template.new_worker())

    def check_usable(self) -> None:
        """Raises: SandboxError when closed, or in a forked copy of the owner."""
        if os.getpid() != self.process_id:
            raise SandboxError(
                f"this Sandbox belongs to process {self.process_id}, found process {os.getpid()};"
                " create one Sandbox in each process"
            )
        if self.is_closed:
            raise SandboxError("this Sandbox is closed; create a new one")

    def take(self) -> Worker | None:
        """Wait for an idle worker, first come, first served."""
        self.check_usable()
        worker = self.idle.get()
        if self.is_closed:
            self.idle.put(None)
            raise SandboxError("this Sandbox was closed while the call waited; create a new one")
        return worker

    def give(self, worker: Worker | None) -> None:
        """Put a worker back."""
        if self.is_closed and worker is not None:
            worker.close()
        self.idle.put(worker)

    def replace(self, is_session: bool = False) -> Worker:
        """A new worker, from a new template if the old one is gone. Raises: SandboxError."""
        with self.lock:
            self.check_usable()
            if self.template.process.poll() is not None:
                self.template.close()
                self.template = TemplateProcess(self.settings)
            return self.template.new_worker(is_session)

    def submit(self, function, *arguments):
        """Run in a thread. Returns its future."""
        self.check_usable()
        with self.lock:
            if self.executor is None:
                self.executor = ThreadPoolExecutor(self.count, "rstar2lab-sandbox")
        return self.executor.submit(function, *arguments)

    def close(self) -> None:
        """End everything; harmless a second time and in a forked copy."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
        while not self.idle.empty():
            _discard(self.idle.get())
        self.idle.put(None)  # wakes a call that still waits
        for session in list(self.sessions):
            session.close()
        if os.getpid() != self.process_id:
            self.template.control.close()
            return
        self.template.close()
        if self.executor is not None:
            self.executor.shutdown(wait=False)


class _Tiers:
    """The base state, and one for each set of modules worth keeping loaded.

    Each has its own template, so that a program without imports forks from a small process.
    """

    def __init__(self, base: _State, tiers: Iterable[Iterable[str]]):
        self.base, self.lock = base, threading.Lock()
        self.wanted = [frozenset(tier) for tier in tiers]
        self.known = frozenset().union(*self.wanted)
        self.states: dict[frozenset[str], _State] = {}

    def state_for(self, code: str) -> _State:
        """The first tier with all known modules that the program imports."""
        needed = imported(code) & self.known
        tier = next((tier for tier in self.wanted if needed <= tier), frozenset())
        if not needed or not tier:
            return self.base
        with self.lock:
            if tier not in self.states:
                self.states[tier] = self._start(tier)
        return self.states[tier]

    def _start(self, tier: frozenset[str]) -> _State:
        """A state at the base's level; the base itself where that fails, said once."""
        self.base.check_usable()
        settings, level = self.base.settings, self.base.template.report["level"]
        modules = settings.preload + tuple(sorted(m for m in tier if find_spec(m)))
        try:
            replaced = dataclasses.replace(settings, levels=(level,), preload=modules)
            state = _State(replaced, self.base.count)
            _check_preload(state.template.report)
            if state.template.report["level"] != level:
                raise SandboxError(f"a tier reached {state.template.report['level']}, not {level}")
            state.fill()
        except SandboxError as error:
            text = f"no warm workers for {', '.join(sorted(tier))}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return self.base
        return state

    def close(self) -> None:
        for state in {self.base, *self.states.values()}:
            state.close()


_NOTES = {
    "kept": "",
    "restored": "The session went back to its state before this call; files stay as they are.",
    "lost": "The session ended; its state is lost.",
}
_EXPIRED = "The session had expired; its state was lost, and this call started clean."


class Session:
    """A stateful interpreter, like a notebook kernel: names, files and threads stay.

    Limits hold per call; between calls nothing of the session runs. An exception keeps what the
    call did before it. A call that ends the process (time-out, crash, flood of output) is undone:
    names are as they were before it, threads are gone, files stay. Where that fails the state is
    lost and the next call starts clean, as it does after a long pause. The result's stderr says
    which of these happened. One call at a time.
    """

    def __init__(self, sandbox: Sandbox, state: _State, idle_seconds: float):
        self._sandbox = sandbox  # an open session keeps its sandbox alive
        self._idle_seconds, self._has_expired = idle_seconds, False
        self._timer: threading.Timer | None = None
        self._state = state
        self._lock = threading.Lock()
        self._is_closed = False
        self._worker: Worker | None = state.replace(is_session=True)
        state.sessions.add(self)
        self._start_timer()

    def run(self, code: str, stdin: str = "") -> ToolResult:
        """Run one cell in the session's namespace. Raises: SandboxError when closed."""
        submitted = time.monotonic()
        with self._lock:
            self._stop_timer()
            if self._is_closed:
                raise SandboxError("this session is closed; open a new one with sandbox.session()")
            self._state.check_usable()
            waited = time.monotonic() - submitted
            try:
                self._worker = self._worker or self._state.replace(is_session=True)
                raw = self._worker.call(code, stdin)
            except (WorkerDied, SandboxError) as error:
                self._worker = _discard(self._worker)
                return failure(error, waited, " The session's state is lost.")
            except BaseException:
                self._worker = _discard(self._worker)
                raise
            notes = [_EXPIRED] * self._has_expired + [_NOTES[raw.state]]
            self._has_expired = False
            self._start_timer()
        return to_result(raw, self._state.settings.limits, waited, " ".join(notes).strip())

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._idle_seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():  # no call came in between
                self._worker, self._has_expired = _discard(self._worker), True

    async def arun(self, code: str, stdin: str = "") -> ToolResult:
        """Awaitable twin of `run`."""
        return await asyncio.to_thread(self.run, code, stdin)

    def close(self) -> None:
        """End the session's process and whatever it started."""
        self._is_closed = True
        self._state.sessions.discard(self)
        self._stop_timer()
        self._worker = _discard(self._worker)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def detect_level() -> str:
    """The strongest isolation level that works here, found by trying. Raises: SandboxError."""
    settings = TemplateSettings(AUTOMATIC_LEVELS, Limits(), ())
    template = TemplateProcess(settings)
    template.close()
    return template.report["level"] or "L0"


def _accept_level(report: dict, require_level: str | None, asked: str | None) -> str:
    """The level reached, with a warning below L3. Raises: SandboxError if it is not enough."""
    found = report["level"]
    reasons = "; ".join(f"{name}: {why}" for name, why in report["refusals"].items())
    if found is None:
        raise SandboxError(
            f"found no isolation level that works, expected {asked or 'L1 or stronger'}"
            f" ({reasons}); pass level='L0' to run without isolation, in a machine to throw away"
        )
    if require_level and not at_least(found, check_level(require_level)):
        raise SandboxError(
            f"found isolation level {found}, expected {require_level} or stronger"
            f" ({reasons or 'level asked for by name'}); run as root or allow user namespaces"
            f" (a container needs unshare and mount), or lower require_level"
        )
    if not at_least(found, "L3"):
        missing = ", ".join(LEVELS[found].does_not_stop)
        text = f"sandbox level {found} ({LEVELS[found].summary}) does not stop: {missing}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return found


def _check_preload(report: dict) -> None:
    """Warn about modules that did not load. Raises: SandboxError if one started a thread."""
    if report["preload_failures"]:
        text = f"sandbox preload failed for {'; '.join(report['preload_failures'])}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if report["tasks"] > 1:
        raise SandboxError(
            f"found {report['tasks']} threads after the preload, expected 1: a fork would inherit"
            " their locks; leave the module that starts threads out of preload"
        )


def failure(reason: Exception, waited: float, note: str = "") -> ToolResult:
    """The result of a call that the service could not run: nobody's error."""
    text = f"sandbox failure: {reason}.{note}"
    return ToolResult(ToolStatus.SERVICE_FAILURE, stderr=text, queue_seconds=waited)


def to_result(raw: RawResult, limits: Limits, waited: float, note: str = "") -> ToolResult:
    """Decode, cut to `output_chars`, and say in stderr how the call ended if it did not say so."""
    status = ToolStatus[raw.status]
    stdout, stderr = _clean(raw.stdout, True), _clean(raw.stderr, False)
    is_cut = any(raw.is_cut) or max(len(stdout), len(stderr)) > limits.output_chars
    explained = [_explain(raw, status, limits, stderr), note]
    for text in filter(None, explained):
        stderr += ("" if not stderr or stderr.endswith("\n") else "\n") + text + "\n"
    return ToolResult(
        status,
        stdout[: limits.output_chars],
        stderr[-limits.output_chars :],
        raw.seconds,
        waited,
        is_cut,
    )


_PATHS = path_pattern()


def _clean(content: bytes, is_head: bool) -> str:
    """Text without the server's paths; a character cut at the edge of the buffer is dropped."""
    if not is_head:
        while content and 0x80 <= content[0] < 0xC0:
            content = content[1:]
    text = content.decode("utf-8", "replace")
    if is_head and text.endswith("\ufffd"):
        text = content.decode("utf-8", "ignore") if _ends_inside(content) else text
    return _PATHS.sub("<python>", text)


def _ends_inside(content: bytes) -> bool:
    """True when the last bytes begin a character that does not end."""
    tail = content[-4:]
    start = max((i for i, byte in enumerate(tail) if byte >= 0xC0), default=None)
    if start is None:
        return False
    width = 2 if tail[start] < 0xE0 else 3 if tail[start] < 0xF0 else 4
    return len(tail) - start < width


def _explain(raw: RawResult, status: ToolStatus, limits: Limits, stderr: str) -> str:
    """One line for an end that left no message of its own. The same call gives the same text."""
    if status is ToolStatus.TIMEOUT:
        cpu, wall = limits.cpu_seconds, limits.wall_seconds
        most = f"{wall:g} seconds" if cpu == wall else f"{cpu:g} s of CPU or {wall:g} s in all"
        return f"Timeout: the program was stopped at its time limit of {most}"
    if status is ToolStatus.MEMORY and "MemoryError" not in stderr:
        return f"MemoryError: the program needs more than {limits.memory_mb} MB"
    if status is ToolStatus.OUTPUT_LIMIT:
        most = OUTPUT_KILL_FACTOR * limits.output_chars
        return f"Output limit: the program printed more than {most} characters"
    if raw.signal is not None and status is ToolStatus.ERROR:
        return f"The program was ended by signal {signal.Signals(raw.signal).name}"
    if status is ToolStatus.ERROR and not stderr:
        return f"The program ended with exit code {raw.code}"
    return ""
