"""What a sandbox promises: limits of a call, levels of isolation, and what each level stops.

Pure words without a system call, read by the owner and by the worker processes alike. The table is
the documentation: `LEVELS[sandbox.level].does_not_stop` is what a reader has to know. None of the
levels is a virtual machine: a bug of the kernel is a way out of all of them.
"""

from dataclasses import dataclass


class SandboxError(RuntimeError):
    """The sandbox cannot be started, reached or isolated as asked; the text says what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits of one call.

    cpu_seconds: processor time of the program, per process. wall_seconds: from the start of the
    program to its end. memory_mb: MiB of address space per process beyond the interpreter's own
    (level L4 adds a cap on the sum). output_chars: characters kept per stream; a program that
    prints 64 times as many is killed. processes: processes and threads alive at one time.
    file_mb: MiB of one file, and of all files of the private directory together.

    Raises: ValueError if a limit is not positive.
    """

    cpu_seconds: float = 4.0
    wall_seconds: float = 4.0
    memory_mb: int = 512
    output_chars: int = 20_000
    processes: int = 64
    file_mb: int = 64

    def __post_init__(self):
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive; raise {name}")


OUTPUT_KILL_FACTOR = 64  # a program is killed after this many times `output_chars` on one stream


@dataclass(frozen=True)
class Level:
    """One rung of the isolation ladder: what it needs, what it stops, what it does not stop."""

    name: str
    summary: str
    needs: str
    stops: tuple[str, ...]
    does_not_stop: tuple[str, ...]


_BASE_STOPS = (
    "endless loops, silent sleeps and ignored signals (killed from outside)",
    "memory, file size and core dumps beyond the limits, per process",
    "a crash or os._exit harming other calls",
)
_FILTER_STOPS = (
    "network sockets, mounts, namespaces, ptrace, io_uring, keyrings, kernel modules",
    "gaining privileges through setuid programs",
    "processes that leave the session of the call",
)
_PATH_STOPS = ("reading or writing host files outside the interpreter and the private directory",)
_NAMESPACE_STOPS = (
    "seeing or signalling any process outside the call",
    "reading the service's environment or memory",
    "leaving a process, a file or a shared-memory segment behind",
)
_KERNEL_BUGS = "bugs of the kernel: this is not a virtual machine"
_TOTAL_MEMORY = "total memory: processes × memory_mb is possible"
_DISK_SPACE = "disk space: any number of files of file_mb each"
_ORPHANS = "a process left behind when the sandbox itself is killed"

LEVELS: dict[str, Level] = {
    "L4": Level(
        "L4",
        "namespaces, private root, seccomp, and a memory and pids cgroup",
        "L3 and a writable memory and pids cgroup",
        _BASE_STOPS + _FILTER_STOPS + _PATH_STOPS + _NAMESPACE_STOPS + ("total memory of a call",),
        (_KERNEL_BUGS, "timing and cache side channels"),
    ),
    "L3": Level(
        "L3",
        "mount, pid, net, ipc and uts namespaces, private root, seccomp",
        "unshare as root or through a user namespace, mount, pivot_root (Linux 5.12 or newer)",
        _BASE_STOPS + _FILTER_STOPS + _PATH_STOPS + _NAMESPACE_STOPS,
        (_TOTAL_MEMORY, _KERNEL_BUGS, "timing and cache side channels"),
    ),
    "L2": Level(
        "L2",
        "seccomp and Landlock, no namespaces",
        "seccomp, and Landlock that scopes signals (ABI 6) or a user id of its own",
        _BASE_STOPS + _FILTER_STOPS + _PATH_STOPS,
        ("seeing other processes", _ORPHANS, _TOTAL_MEMORY, _DISK_SPACE, _KERNEL_BUGS),
    ),
    "L1": Level(
        "L1",
        "seccomp, no-new-privs and rlimits",
        "seccomp",
        _BASE_STOPS + _FILTER_STOPS,
        (
            "reading files of the host, and writing where every user may write, such as /tmp",
            "signals to processes of the same user, and reading their environment",
            _ORPHANS,
            _TOTAL_MEMORY,
            _DISK_SPACE,
            _KERNEL_BUGS,
        ),
    ),
    "L0": Level(
        "L0",
        "a forked process with rlimits; only when asked for by name",
        "fork",
        _BASE_STOPS,
        (
            "reading and writing files of the host",
            "network",
            "signals to processes of the same user, the sandbox's own among them",
            "namespaces, and mounts by root",
            _ORPHANS,
            _TOTAL_MEMORY,
            _DISK_SPACE,
            _KERNEL_BUGS,
        ),
    ),
}

AUTOMATIC_LEVELS = ("L4", "L3", "L2", "L1")  # tried in this order; L0 only by name


def at_least(level: str, required: str) -> bool:
    """True when `level` is `required` or stronger."""
    return int(level[1]) >= int(required[1])


def check_level(level: str) -> str:
    """Return `level` if it names a rung of the ladder.

    Raises: SandboxError for any other text.
    """
    if level not in LEVELS:
        raise SandboxError(f"level {level!r} does not exist; choose one of {', '.join(LEVELS)}")
    return level
