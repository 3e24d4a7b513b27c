"""A slot: one warm worker process that runs one call at a time in a child forked ahead.

The slot watches the child from outside: wall clock, processor clock, output. It kills by itself
whatever the program does, and answers only when nothing of the call is left alive.
"""

import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from rstar2lab.sandbox import program, wire
from rstar2lab.sandbox.capture import Capture
from rstar2lab.sandbox.jail import NamespaceJail, ProcessJail
from rstar2lab.sandbox.levels import OUTPUT_KILL_FACTOR, Limits

_FIRST_CHECK_SECONDS = 0.02
_CPU_COUNT = os.cpu_count() or 1
_CONTROL_KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages: a program that writes
_CELL, _SCRIPT = b"C", b"S"  # whether a last expression is shown
_CONFINED = b"confined"  # nonsense to it cannot make the slot wait for the rest


@dataclass
class Child:
    """A forked child that waits for a program, or runs one."""

    pid: int
    pidfd: int
    control: socket.socket
    outputs: dict[int, Capture]
    is_confined: bool = False
    cpu_before: float = 0.0

    def cpu_seconds(self) -> float:
        """Processor time since the call began; 0 once the process is dead."""
        try:  # the kernel's number for the processor clock of a whole process
            return time.clock_gettime((~self.pid << 3) | 2) - self.cpu_before
        except OSError:
            return 0.0

    def close(self) -> None:
        """Close the slot's ends."""
        os.close(self.pidfd)
        self.control.close()
        for descriptor in self.outputs:
            os.close(descriptor)


class Slot:
    """The loop of one slot. `is_session`: the child lives on from call to call."""

    def __init__(
        self,
        owner: socket.socket,
        jail: NamespaceJail | ProcessJail,
        limits: Limits,
        errors: str,
        is_session: bool,
    ):
        self.owner, self.jail, self.limits = owner, jail, limits
        self.seconds = (limits.wall_seconds, limits.cpu_seconds)  # of the call that runs
        self.runner, self.is_session = program.Runner(errors), is_session
        self.captures = [Capture(limits.output_chars, tail) for tail in (False, True)]
        self.child: Child | None = None
        self.done = b""

    def prepare(self) -> None:
        """Fork a child ahead and see that its confinement holds. Raises: OSError if not."""
        self.child = self._fork_child()
        self._await_confined()

    def _await_confined(self) -> None:
        """Read the child's report, once. Raises: OSError when it is not confined."""
        if not self.child.is_confined:
            report = self.child.control.recv(1000)
            if report != _CONFINED:
                raise OSError(report.decode() or "the child died before it was confined")
            self.child.is_confined = True

    def serve(self) -> None:
        """Answer calls until the owner is gone.

        On a failure of its own the slot ends: the owner repeats the call on a new one.
        """
        try:
            while True:
                self.child = self.child or self._fork_child()
                options, descriptors = wire.receive(self.owner)
                self._answer(options, descriptors)
        except OSError:
            pass
        finally:
            if self.child:
                self._end_child(self.child)
            self.jail.close()

    def _fork_child(self) -> Child:
        control, child_control = socket.socketpair(*_CONTROL_KIND)
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork()
        if pid == 0:
            _be_child(self, child_control, [writer for _, writer in pipes])
        child_control.close()
        for reader, writer in pipes:
            os.close(writer)
            os.set_blocking(reader, False)
        outputs = dict(zip((reader for reader, _ in pipes), self.captures, strict=True))
        return Child(pid, os.pidfd_open(pid), control, outputs)

    def _answer(self, options: dict, descriptors: list[int]) -> None:
        most = options.get("seconds", self.limits.wall_seconds)
        self.seconds = (min(self.limits.wall_seconds, most), min(self.limits.cpu_seconds, most))
        self._hand_over(descriptors, options.get("echo", True))
        kills_before = self.jail.count_memory_kills()
        started = time.monotonic()
        cause = self._watch(started)
        seconds = time.monotonic() - started
        if cause == "done":
            header = self._session_header()
        else:
            header = self._end_child(self.child, cause, kills_before)
            self.child = None
        self._reply(header, seconds)
        if self.child is None:
            self.jail.reset_box()

    def _hand_over(self, descriptors: list[int], echo: bool) -> None:
        """Give the program to the waiting child. Raises: OSError when the child is unfit."""
        self._await_confined()
        socket.send_fds(self.child.control, [_CELL if echo else _SCRIPT], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.child.cpu_before = 0.0
        self.child.cpu_before = self.child.cpu_seconds()

    def _watch(self, started: float) -> str:
        """Wait for the end of the call. Returns why it ended: exit, done, timeout or output."""
        child, poller = self.child, select.poll()
        for descriptor in (child.pidfd, self.owner.fileno(), *child.outputs):
            poller.register(descriptor, select.POLLIN)
        if self.is_session:
            poller.register(child.control.fileno(), select.POLLIN)
        while True:
            left = self._seconds_left(started)
            if left <= 0:
                return "timeout"
            events = [descriptor for descriptor, _ in poller.poll(left * 1000)]
            for descriptor in child.outputs:
                if descriptor in events and not self._read(descriptor):
                    poller.unregister(descriptor)
            if any(self._is_flooded(capture) for capture in self.captures):
                return "output"
            if self.owner.fileno() in events:
                raise wire.Disconnected("the owner left during a call")
            if child.pidfd in events:
                return "exit"
            if self.is_session and child.control.fileno() in events and self._is_done():
                return "done"

    def _is_done(self) -> bool:
        """True when the session's child says that its program ended; false when it is dying."""
        self.done = self.child.control.recv(1000)
        if not self.done:
            self.jail.kill_all(self.child.pid)
        return bool(self.done)

    def _seconds_left(self, started: float) -> float:
        """Until the next look at the clocks; ≤ 0 when a limit is reached.

        A program with threads may use several processors, so its clock may run faster than ours.
        """
        wall = self.seconds[0] - (time.monotonic() - started)
        cpu = self.seconds[1] - self.child.cpu_seconds()
        if wall <= 0 or cpu <= 0:
            return 0.0
        return min(wall, max(cpu / _CPU_COUNT, _FIRST_CHECK_SECONDS)) + 0.0005

    def _read(self, descriptor: int) -> bool:
        try:
            return self.child.outputs[descriptor].read(descriptor)
        except BlockingIOError:
            return True

    def _is_flooded(self, capture: Capture) -> bool:
        return capture.chars > OUTPUT_KILL_FACTOR * self.limits.output_chars

    def _drain(self, child: Child) -> None:
        """Read what the dead, or a session's child, left in the pipes."""
        for descriptor, capture in child.outputs.items():
            try:
                while capture.read(descriptor) and not self._is_flooded(capture):
                    pass
            except BlockingIOError:
                pass

    def _session_header(self) -> dict:
        self._drain(self.child)
        code = int(self.done) if self.done.removeprefix(b"-").isdigit() else 1
        if code == -program.MEMORY_SIGNAL:
            return {"status": "MEMORY", "code": None, "signal": None, "alive": True}
        return {"status": "ERROR" if code else "OK", "code": code, "signal": None, "alive": True}

    def _end_child(self, child: Child, cause: str = "owner", kills_before: int = 0) -> dict:
        """Kill and reap all that is left of the call. Returns the header of the reply."""
        self.jail.kill_all(child.pid)
        _, wait_status, usage = os.wait4(child.pid, 0)
        _reap_orphans()
        self._drain(child)
        child.close()
        code = os.waitstatus_to_exitcode(wait_status)
        cpu = usage.ru_utime + usage.ru_stime - child.cpu_before
        was_starved = self.jail.count_memory_kills() > kills_before
        status = self._status(cause, code, cpu, was_starved)
        is_signal = code < 0
        return {
            "status": status,
            "code": None if is_signal else code,
            "signal": -code if is_signal else None,
            "alive": False,
        }

    def _status(self, cause: str, code: int, cpu: float, was_starved: bool) -> str:
        if cause == "timeout":
            return "TIMEOUT"
        if cause == "output" or any(self._is_flooded(capture) for capture in self.captures):
            return "OUTPUT_LIMIT"
        if code == -program.MEMORY_SIGNAL or (was_starved and code == -signal.SIGKILL):
            return "MEMORY"
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu >= self.seconds[1]:
            return "TIMEOUT"
        return "ERROR" if code else "OK"

    def _reply(self, header: dict, seconds: float) -> None:
        views = [capture.view() for capture in self.captures]
        header |= {
            "seconds": seconds,
            "sizes": [len(view) for view in views],
            "cut": [capture.is_cut for capture in self.captures],
        }
        wire.send(self.owner, header, views)
        for view in views:
            view.release()
        for capture in self.captures:
            capture.clear()


def _reap_orphans() -> None:
    """Wait for every remaining child: all of them have been killed."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _be_child(slot: Slot, control: socket.socket, writers: list[int]) -> None:
    """In the forked child: confine, wait for a program, run it. Never returns."""
    code = 1
    try:
        control = _keep_only(control, writers)
        _confine(slot, control)
        run = _run_session if slot.is_session else _run_once
        code = run(control, slot.runner)
    except OSError:  # the slot is gone, or the confinement failed: nothing has run
        pass
    finally:
        program.finish(code)


def _confine(slot: Slot, control: socket.socket) -> None:
    """Give up everything that the level forbids, and report. Raises: OSError."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        slot.jail.confine()
    except OSError as error:
        control.send(str(error).encode())
        raise
    control.send(_CONFINED)


def _keep_only(control: socket.socket, writers: list[int]) -> socket.socket:
    """Put the pipes on descriptors 1 and 2, the control socket on 3, and close all others."""
    spare = os.dup(control.detach())
    os.dup2(writers[0], 1)
    os.dup2(writers[1], 2)
    if spare != 3:
        os.dup2(spare, 3, inheritable=False)
    os.closerange(4, 1 << 20)
    return socket.socket(*_CONTROL_KIND, fileno=3)


def _receive_program(control: socket.socket) -> tuple[bytes, bool]:
    """Wait for the program and whether it is a cell; its standard input becomes descriptor 0.

    Raises: Disconnected when the slot is gone.
    """
    message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
    if not message:
        raise wire.Disconnected("the slot is gone")
    source = wire.load(descriptors[0])
    program.open_streams(descriptors[1] if len(descriptors) > 1 else None)
    return source, message == _CELL


def _run_once(control: socket.socket, runner: program.Runner) -> int:
    program.reseed()
    source, echo = _receive_program(control)
    control.close()
    runner.enter()
    return runner.run(source, echo=echo)


def _run_session(control: socket.socket, runner: program.Runner) -> int:
    program.reseed()
    runner.enter()
    count = 0
    while True:
        (source, echo), count = _receive_program(control), count + 1
        code = runner.run(source, f"<cell {count}>", echo)
        control.send(str(code).encode())
