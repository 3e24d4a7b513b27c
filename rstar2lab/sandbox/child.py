"""Inside the forked child of a slot: confine itself, wait for a program, run it.

A session's child lives on from call to call. Before each call it leaves a copy of itself behind,
asleep: the state to go back to when the program ends the process. `slot` watches from outside.
"""

import os
import signal
import socket
import warnings

from rstar2lab.sandbox import kernel, program, wire
from rstar2lab.sandbox.jail import NamespaceJail, ProcessJail

KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages: a program that writes
CELL, SCRIPT = b"C", b"S"  # whether a last expression is shown
CONFINED, KEPT = b"confined", b"kept"  # nonsense to it cannot make the slot wait for the rest
_CONTROL = 3  # descriptor of the socket to the slot
_fork = os.fork


def live(
    control: socket.socket,
    writers: list[int],
    jail: NamespaceJail | ProcessJail,
    runner: program.Runner,
    is_session: bool,
) -> None:
    """The whole life of a child: run one program, or a session's. Never returns."""
    code = 1
    try:
        _keep_only(control.detach(), writers)
        control = socket.socket(*KIND, fileno=_CONTROL)
        _confine(jail, control)
        program.flush_at_exit()
        program.reseed()
        code = (_run_session if is_session else _run_once)(control, runner)
    except OSError:  # the slot is gone, or the confinement failed: nothing has run
        pass
    finally:
        program.finish(code)


def _keep_only(control: int, writers: list[int]) -> None:
    """Put the pipes on descriptors 1 and 2, the control socket on 3, and close all others."""
    spare = os.dup(control)
    os.dup2(writers[0], 1)
    os.dup2(writers[1], 2)
    if spare != _CONTROL:
        os.dup2(spare, _CONTROL, inheritable=False)
    os.closerange(_CONTROL + 1, 1 << 20)


def _confine(jail: NamespaceJail | ProcessJail, control: socket.socket) -> None:
    """Give up everything that the level forbids, and report. Raises: OSError."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        jail.confine()
    except OSError as error:
        control.send(str(error).encode())
        raise
    control.send(CONFINED)


def _receive(control: socket.socket) -> tuple[bytes, bool, list[int]]:
    """Wait for a program: its text, whether it is a cell, and what else was handed over.

    Raises: Disconnected when the slot is gone.
    """
    message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
    if not message:
        raise wire.Disconnected("the slot is gone")
    return wire.load(descriptors[0]), message == CELL, descriptors[1:]


def _run_once(control: socket.socket, runner: program.Runner) -> int:
    source, echo, rest = _receive(control)
    if rest:
        program.set_input(rest[0])
    control.close()
    return runner.run(source, echo=echo)


def _run_session(control: socket.socket, runner: program.Runner) -> int:
    count = 0
    while True:
        source, echo, (spare, *rest) = _receive(control)
        count += 1
        if _is_kept_copy(spare, control):
            continue
        kernel.die_with_parent()  # a copy was born without
        program.set_input(rest[0] if rest else None)
        program.open_streams()
        code = runner.run(source, f"<cell {count}>", echo)
        control.send(str(code).encode())


def _is_kept_copy(spare: int, control: socket.socket) -> bool:
    """Leave a copy behind that answers on `spare`. True in the copy, once it is needed.

    The copy is nobody's child, so that a program that waits for its children does not meet it.
    """
    with warnings.catch_warnings():  # newer Pythons warn of threads; the copy has none
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            helper = _fork()
        except OSError:  # as many processes as allowed: without a copy
            os.close(spare)
            return False
        if helper:
            os.close(spare)
            os.waitpid(helper, 0)
            return False
        try:
            is_copy = _fork() == 0
        except OSError:
            is_copy = False
    if not is_copy:
        program.leave(0)
    os.dup2(spare, _CONTROL, inheritable=False)
    os.close(spare)
    control.send(KEPT)
    program.flush_at_exit()
    return True
