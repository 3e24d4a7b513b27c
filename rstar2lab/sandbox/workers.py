"""The owner's side of the worker processes: start a template, get slots from it, make calls.

Thread-safe. Nothing is forked from the owner's own memory: the template is started by exec, and
ends when this process ends, however it ends.
"""

import dataclasses
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rstar2lab.sandbox import wire
from rstar2lab.sandbox.levels import Limits, SandboxError

_GRACE_SECONDS = 10.0  # a slot that is silent for so long after the limit is given up
_START_SECONDS = 120.0
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "MPLBACKEND": "Agg",
    "PYTHONHASHSEED": "0",  # the same call prints the same text
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
}
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from rstar2lab.sandbox import template as t;"
    " sys.path.remove(sys.argv[1]); t.main(int(sys.argv[2]))"
)


class WorkerDied(Exception):
    """A slot ended, or fell silent, during a call."""


@dataclass(frozen=True)
class RawResult:
    """What a slot reports about a call, before it becomes a `ToolResult`."""

    status: str
    code: int | None
    signal: int | None
    state: str  # of a session: kept, restored or lost
    seconds: float
    stdout: bytes
    stderr: bytes
    is_cut: tuple[bool, bool]


@dataclass
class Worker:
    """The owner's end of one slot."""

    sock: socket.socket
    pid: int
    wall_seconds: float

    def call(self, code: str, stdin: str, options: dict | None = None) -> RawResult:
        """Run one program; options: `seconds` (shorter limits) and `echo`, see `Sandbox.run`.

        Raises: WorkerDied; any exception leaves the worker unusable.
        """
        descriptors = [wire.store(_encode(code), "program")]
        try:
            if stdin:
                descriptors.append(wire.store(_encode(stdin), "stdin"))
            self.sock.settimeout(self.wall_seconds + _GRACE_SECONDS)
            wire.send(self.sock, options or {}, (), descriptors)
            return self._receive()
        except OSError as error:  # includes the end of the stream and the time-out
            raise WorkerDied(f"{type(error).__name__}: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> RawResult:
        header, _ = wire.receive(self.sock)
        stdout, stderr = (wire.receive_bytes(self.sock, size) for size in header["sizes"])
        return RawResult(
            header["status"],
            header["code"],
            header["signal"],
            header["state"],
            header["seconds"],
            stdout,
            stderr,
            tuple(header["cut"]),
        )

    def close(self) -> None:
        """Let the slot go: it kills what it runs and ends."""
        self.sock.close()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass
class TemplateSettings:
    """What a template is started with; see `Sandbox` for the fields."""

    levels: tuple[str, ...]
    limits: Limits
    preload: tuple[str, ...]
    readable: tuple[str, ...] = ()
    errors: str = "line"
    temporary: str = field(default_factory=tempfile.gettempdir)


class TemplateProcess:
    """A running template. `report` holds its level and why stronger ones were refused."""

    def __init__(self, settings: TemplateSettings):
        self.settings = settings
        self.lock = threading.Lock()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = _start(theirs)
        try:
            self.control.settimeout(_START_SECONDS)
            wire.send(self.control, dataclasses.asdict(settings))
            self.report, _ = wire.receive(self.control)
        except OSError as error:
            self.close()
            raise SandboxError(
                f"the sandbox's worker process did not start ({error}); expected a Python that can"
                f" run {sys.executable} -c …; check memory and process limits of this machine"
            ) from None

    def new_worker(self, is_session: bool = False) -> Worker:
        """Ask for one more slot. Raises: SandboxError."""
        ours, theirs = socket.socketpair()
        try:
            with self.lock, theirs:
                wire.send(self.control, {"is_session": is_session}, (), [theirs.fileno()])
                reply, _ = wire.receive(self.control)
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's worker process is gone: {error}") from None
        if "error" in reply:
            ours.close()
            raise SandboxError(f"a new slot could not be set up: {reply['error']}")
        return Worker(ours, reply["pid"], self.settings.limits.wall_seconds)

    def close(self) -> None:
        """End the template and all its slots, and wait for it."""
        self.control.close()
        try:
            self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _start(control: socket.socket) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-s", "-P", "-c", _BOOT, root, str(control.fileno())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )


def path_pattern() -> re.Pattern:
    """Matches the server's own directories in tool text; /usr and the like reveal nothing."""
    package = Path(__file__).resolve().parents[1]
    paths = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    paths |= {os.path.realpath(path) for path in paths} | {str(package)}
    telling = [path for path in paths if not path.startswith("/usr") and path.count("/") > 1]
    ordered = sorted(telling, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
