"""The template: one process per sandbox that imports the preload once and forks the slots.

It is started by exec with a clean environment and a single thread, finds the strongest level by
trying, and cleans up after dead slots. It ends, and every slot with it, when its owner ends.
"""

import dataclasses
import gc
import importlib
import os
import select
import shutil
import signal
import socket
from dataclasses import dataclass

from rstar2lab.sandbox import cgroup, kernel, program, wire
from rstar2lab.sandbox.jail import NamespaceJail, Plan, ProcessJail, children
from rstar2lab.sandbox.levels import Limits
from rstar2lab.sandbox.slot import Slot


@dataclass
class Settings:
    """What the owner asked for, as sent in the first message."""

    levels: tuple[str, ...]
    limits: Limits
    preload: tuple[str, ...]
    readable: tuple[str, ...]
    temporary: str
    errors: str


@dataclass
class Record:
    """One living slot: what has to be removed when it is gone."""

    pid: int
    pidfd: int
    leftovers: dict


class SlotFailure(OSError):
    """A slot could not be set up at the level asked for."""


def main(descriptor: int) -> None:
    """Entry point of the template process; `descriptor` is the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    with open("/proc/self/comm", "w") as name:
        name.write("rstar2lab-sbx")
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    try:
        request, _ = wire.receive(control)
    except wire.Disconnected:
        return
    request["limits"] = Limits(**request["limits"])
    Template(control, Settings(**request)).serve()


# Much of sympy is imported and cached by its first use: half a second in a program of its own.
_WARM_UP = {
    "numpy": "from numpy import *; linalg.solve(eye(2), ones(2)); str(arange(3)); random.rand()",
    "sympy": (
        "from sympy import *; x, y = symbols('x y'); n = symbols('n', integer=True);"
        "integrate(x**2 * sin(x), x); solve(x**2 - 2, x); solve([x + y - 1, x - y], [x, y]);"
        "simplify(sin(x)**2 + cos(x)**2); factor(x**2 - 1); expand((x + 1)**3);"
        "limit(sin(x)/x, x, 0);"
        "summation(n, (n, 1, 9)); diff(x**x, x); factorint(360); Matrix([[1, 2], [3, 4]]).det();"
        "N(pi); str(x + y); latex(x/y); series(exp(x), x); nsimplify(0.5); Rational(1, 3) + 1"
    ),
}


def preload(names: tuple[str, ...]) -> list[str]:
    """Import and warm up modules before the first fork. Returns a line for each that failed."""
    failures = []
    for name in names:
        try:
            importlib.import_module(name)
            exec(_WARM_UP.get(name, ""), {})
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()
    kernel.collapse_heap()
    return failures


class Template:
    """Serves the owner's requests for slots."""

    def __init__(self, control: socket.socket, settings: Settings):
        self.control, self.settings = control, settings
        self.owner_pidfd = os.pidfd_open(os.getppid())
        self.records: dict[int, Record] = {}
        self.plan: Plan | None = None

    def serve(self) -> None:
        """Start, then answer until the owner is gone; then leave nothing behind."""
        try:
            cgroup.sweep()
            failures = preload(self.settings.preload)
            wire.send(self.control, self._find_level() | {"preload_failures": failures})
            while self._wait():
                request, descriptors = wire.receive(self.control)
                wire.send(self.control, self._start(request, descriptors))
        except (wire.Disconnected, ConnectionError):
            pass
        finally:
            self._end_slots()

    def _wait(self) -> bool:
        """Wait for a request, burying dead slots meanwhile. False when the owner is gone."""
        while True:
            poller = select.poll()
            for descriptor in (self.control.fileno(), self.owner_pidfd, *self.records):
                poller.register(descriptor, select.POLLIN)
            events = [descriptor for descriptor, _ in poller.poll()]
            for descriptor in events:
                if descriptor in self.records:
                    self._bury(self.records.pop(descriptor))
            if self.owner_pidfd in events:
                return False
            if self.control.fileno() in events:
                return True

    def _find_level(self) -> dict:
        """Try the levels in order with a slot that is thrown away. Returns level and refusals."""
        refusals = {}
        for plan in self._plans():
            try:
                self._try(plan)
            except OSError as error:
                how = " (user namespace)" if plan.has_user_namespace else ""
                refusals[plan.level + how] = str(error)
                continue
            self.plan, tasks = plan, len(os.listdir("/proc/self/task"))
            return {"level": plan.level, "refusals": refusals, "tasks": tasks}
        return {"level": None, "refusals": refusals}

    def _plans(self) -> list[Plan]:
        settings = self.settings
        plans = []
        for level in settings.levels:
            ways = (False, True) if level in ("L3", "L4") else (False,)
            for way in ways:
                plan = Plan(level, settings.limits, settings.readable, settings.temporary, way)
                plans.append(plan)
        return plans

    def _try(self, plan: Plan) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            self._bury(self._fork_slot(plan, theirs, is_session=False))

    def _start(self, request: dict, descriptors: list[int]) -> dict:
        """Fork a slot for the owner's socket. Returns its pid or the reason of the failure."""
        sock = socket.socket(fileno=descriptors[0])
        try:
            record = self._fork_slot(self.plan, sock, request["is_session"])
        except OSError as error:
            return {"error": str(error)}
        self.records[record.pidfd] = record
        return {"pid": record.pid}

    def _fork_slot(self, plan: Plan, sock: socket.socket, is_session: bool) -> Record:
        """Fork and set up one slot; `sock` is closed here. Raises: SlotFailure."""
        ready, ready_writer = socket.socketpair()
        helper = os.fork()
        if helper == 0:
            ready.close()
            _be_helper(self, plan, sock, ready_writer, is_session)
        ready_writer.close()
        sock.close()
        with ready:
            return self._await_slot(ready, helper)

    def _await_slot(self, ready: socket.socket, helper: int) -> Record:
        """Read the slot's pid, let it go on once its helper is gone, read how set-up went."""
        try:
            pid = wire.receive(ready)[0]["pid"]
            if pid != helper:
                os.waitpid(helper, 0)
            wire.send(ready, {"go": True})
            report, _ = wire.receive(ready)
        except (wire.Disconnected, OSError) as error:
            _reap(helper)
            raise SlotFailure(f"slot died during set-up: {error}") from None
        except KeyError:
            _reap(helper)
            raise SlotFailure("slot could not leave the host") from None
        if "error" in report:
            _reap(pid)
            remove_leftovers(report)
            raise SlotFailure(report["error"])
        return Record(pid, os.pidfd_open(pid), report)

    def _bury(self, record: Record) -> None:
        """Make sure that a slot is dead, and remove what it left."""
        signal.pidfd_send_signal(record.pidfd, signal.SIGKILL)
        os.close(record.pidfd)
        _reap(record.pid)
        if self.plan and self.plan.level not in ("L3", "L4"):
            self._end_orphans()
        remove_leftovers(record.leftovers)

    def _end_orphans(self) -> None:
        """Kill what a slot without a namespace left: it has become ours, beside the other slots."""
        slots = {record.pid for record in self.records.values()}
        while orphans := set(children(os.getpid())) - slots:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                _reap(pid)

    def _end_slots(self) -> None:
        while self.records:
            self._bury(self.records.popitem()[1])
        cgroup.sweep()


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def remove_leftovers(report: dict) -> None:
    """Remove what a dead slot may have left on the host."""
    if report.get("box"):
        shutil.rmtree(report["box"], ignore_errors=True)
    cgroup.remove(report.get("cgroups", []))


def _be_helper(
    template: Template, plan: Plan, sock: socket.socket, ready: socket.socket, is_session: bool
) -> None:
    """In the forked helper: leave the host if the level asks for it, then become the slot."""
    code = 1
    try:
        plan = dataclasses.replace(plan, is_session=is_session)
        jail = NamespaceJail(plan) if plan.level in ("L3", "L4") else ProcessJail(plan)
        if isinstance(jail, NamespaceJail):
            pid = _leave_and_fork(jail, ready)
        else:
            pid = 0
            wire.send(ready, {"pid": os.getpid()})
        if pid == 0:
            _be_slot(template, jail, sock, ready, is_session)
        code = 0
    finally:
        os._exit(code)


def _leave_and_fork(jail: NamespaceJail, ready: socket.socket) -> int:
    """Enter the namespaces and fork process 1. Returns 0 in it, its pid in the helper."""
    try:
        jail.leave_host()
        pid = os.fork()
    except OSError as error:
        groups = jail.cgroup.directories if jail.cgroup else ()
        wire.send(ready, {"pid": os.getpid()})
        wire.receive(ready)
        wire.send(ready, {"error": str(error), "cgroups": groups})
        raise
    if pid:
        wire.send(ready, {"pid": pid})
    return pid


def _be_slot(
    template: Template,
    jail: NamespaceJail | ProcessJail,
    sock: socket.socket,
    ready: socket.socket,
    is_session: bool,
) -> None:
    """In the slot: set up, report, serve until the owner leaves."""
    wire.receive(ready)  # the helper is gone: from here the template is our parent
    kernel.die_with_parent()
    template.control.close()
    os.close(template.owner_pidfd)
    for descriptor in template.records:
        os.close(descriptor)
    try:
        jail.set_up()
        slot = Slot(sock, jail, template.settings.limits, template.settings.errors, is_session)
        program.forget_worker()
        slot.prepare()
    except OSError as error:
        wire.send(ready, {"error": str(error)} | _leftovers(jail))
        return
    wire.send(ready, _leftovers(jail))
    ready.close()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    slot.serve()


def _leftovers(jail: NamespaceJail | ProcessJail) -> dict:
    """What the template has to remove when the slot is gone."""
    if isinstance(jail, ProcessJail):
        return {"box": jail.box}
    return {"cgroups": jail.cgroup.directories if jail.cgroup else ()}
