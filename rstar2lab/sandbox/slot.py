"""A slot: one warm worker process that runs one call at a time in a child forked ahead.

The slot watches the child from outside: wall clock, processor clock, output. It kills by itself
whatever the program does, and answers only when nothing of the call is left alive.
"""

import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass

from rstar2lab.sandbox import child as child_process
from rstar2lab.sandbox import program, wire
from rstar2lab.sandbox.capture import Capture
from rstar2lab.sandbox.jail import NamespaceJail, ProcessJail
from rstar2lab.sandbox.levels import OUTPUT_KILL_FACTOR, Limits

_FIRST_CHECK_SECONDS = 0.02
_CPU_COUNT = os.cpu_count() or 1
_COPY_SECONDS = 1.0  # a session's copy that has not answered until then is done without
_CREDENTIALS = struct.Struct("=3i")  # process, user, group: written by the kernel


@dataclass
class Child:
    """A forked child that waits for a program, or runs one, or is a session's sleeping copy."""

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

    def is_alive(self) -> bool:
        """False when the process has ended."""
        return not select.select([self.pidfd], [], [], 0)[0]

    def end(self) -> None:
        """Kill and reap a copy that is not needed."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # not ours: a process of the program that posed as the copy
            pass
        self.close()

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
        self.copy_control: socket.socket | None = None  # where a session's copy will answer
        self.done = b""

    def prepare(self) -> None:
        """Fork a child ahead and see that its confinement holds. Raises: OSError if not."""
        program.open_streams_ahead()
        self.runner.enter(self.jail.box)
        self.child = self._fork_child()
        self._await_confined()

    def _await_confined(self) -> None:
        """Read the child's report, once. Raises: OSError when it is not confined."""
        if not self.child.is_confined:
            report = self.child.control.recv(1000)
            if report != child_process.CONFINED:
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
        control, child_control = socket.socketpair(*child_process.KIND)
        pipes = [os.pipe(), os.pipe()]
        pid = os.fork()
        if pid == 0:
            writers = [writer for _, writer in pipes]
            child_process.live(child_control, writers, self.jail, self.runner, self.is_session)
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
        copy = self._take_copy() if self.is_session else None
        if cause == "done":
            header = self._session_header(copy)
        else:
            header = self._end_child(self.child, cause, kills_before, copy)
            self.child = copy if header["state"] == "restored" else None
        self._reply(header, seconds)
        if self.child is None:
            self.jail.reset_box()

    def _hand_over(self, descriptors: list[int], echo: bool) -> None:
        """Give the program to the waiting child. Raises: OSError when the child is unfit."""
        self._await_confined()
        if self.is_session:
            self.jail.resume()
            self.copy_control, spare = socket.socketpair(*child_process.KIND)
            self.copy_control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            descriptors.insert(1, spare.detach())
        message = child_process.CELL if echo else child_process.SCRIPT
        socket.send_fds(self.child.control, [message], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.child.cpu_before = 0.0
        self.child.cpu_before = self.child.cpu_seconds()

    def _take_copy(self) -> Child | None:
        """The copy that a session's child left before its call; None where there is none.

        Its process number comes from the kernel, not from its message, which could be forged.
        """
        control, self.copy_control = self.copy_control, None
        try:
            control.settimeout(_COPY_SECONDS)
            message, extra, _, _ = control.recvmsg(100, socket.CMSG_SPACE(_CREDENTIALS.size))
            pid = _CREDENTIALS.unpack(extra[0][2])[0] if message == child_process.KEPT else 0
            if pid in (0, self.child.pid):
                raise wire.Disconnected("no copy")
            control.settimeout(None)
            return Child(pid, os.pidfd_open(pid), control, {}, is_confined=True)
        except OSError:
            control.close()
            return None

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
            if self.is_session and child.control.fileno() in events:
                self.done = child.control.recv(1000)
                return "done" if self.done else "exit"

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

    def _session_header(self, copy: Child | None) -> dict:
        """The reply when a session's program ended: what it left is the new state, and sleeps."""
        if copy:
            copy.end()
        self.jail.pause()
        self._drain(self.child)
        code = int(self.done) if self.done.removeprefix(b"-").isdigit() else 1
        is_memory = code == -program.MEMORY_SIGNAL
        status = "MEMORY" if is_memory else "ERROR" if code else "OK"
        return {"status": status, "code": None if is_memory else code, "signal": None,
                "state": "kept"}  # fmt: skip

    def _end_child(
        self, child: Child, cause: str = "owner", kills_before: int = 0, copy: Child | None = None
    ) -> dict:
        """Kill and reap all that is left of the call, but a copy. Returns the reply's header."""
        self.jail.kill_all(child.pid, copy.pid if copy else 0)
        _, wait_status, usage = os.wait4(child.pid, 0)
        is_restored = bool(copy) and copy.is_alive()
        _reap_orphans(os.WNOHANG if is_restored else 0)
        self._drain(child)
        if is_restored:
            copy.outputs, child.outputs = child.outputs, {}
        elif copy:
            copy.close()
        child.close()
        code = os.waitstatus_to_exitcode(wait_status)
        cpu = usage.ru_utime + usage.ru_stime - child.cpu_before
        was_starved = self.jail.count_memory_kills() > kills_before
        is_signal = code < 0
        return {
            "status": self._status(cause, code, cpu, was_starved),
            "code": None if is_signal else code,
            "signal": -code if is_signal else None,
            "state": "restored" if is_restored else "lost",
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


def _reap_orphans(options: int = 0) -> None:
    """Wait for every remaining child: all of them have been killed. WNOHANG: but the copy."""
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        pass
