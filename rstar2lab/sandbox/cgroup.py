"""The memory and pids cgroup of a slot (level L4): a cap on what all processes of a call use.

Version 1 hierarchies (one directory per controller) and version 2 (one directory). The slot and its
calls enter once; the directories are removed by the template when the slot is gone.
"""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from rstar2lab.sandbox.levels import Limits

_ROOT = "/sys/fs/cgroup"
_PREFIX = "rstar2lab-"
_SLACK_MB = 64  # the slot's own pages and page tables, beyond the limit and the private directory


@dataclass
class Cgroup:
    """One slot's directories and the open file that counts the kernel's memory kills."""

    directories: tuple[str, ...]
    kill_counter: int

    @classmethod
    def create(cls, limits: Limits, states: int) -> "Cgroup":
        """Make the directories, set the limits, move this process in.

        states: 2 for a session, whose sleeping copy may come to share nothing with the program.

        Raises: OSError when the hierarchy is not writable, leaving nothing behind.
        """
        memory = (states * limits.memory_mb + limits.file_mb + _SLACK_MB) * 2**20
        made: list[str] = []
        try:
            counter = _create(made, memory, limits.processes + 4)
        except OSError:
            remove(made)
            raise
        return cls(tuple(made), counter)

    def count_kills(self) -> int:
        """Processes killed so far because the memory cap was reached."""
        text = os.pread(self.kill_counter, 4096, 0).decode()
        counts = dict(line.split()[:2] for line in text.splitlines() if " " in line)
        return int(counts.get("oom_kill", 0))


def _create(made: list[str], memory: int, tasks: int) -> int:
    own = _own_groups()
    name = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    if "memory" in own and "pids" in own:
        return _create_v1(own, name, made, memory, tasks)
    if "" in own:
        return _create_v2(own[""], name, made, memory, tasks)
    raise OSError(errno.ENOENT, "no memory and pids cgroup")


def _own_groups() -> dict[str, str]:
    """Controller → directory of this process; the empty name is the version 2 hierarchy."""
    groups = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                folder = f"{_ROOT}/{controller}" if controller else _ROOT
                groups[controller] = folder + path.rstrip("/")
    return groups


def _create_v1(own: dict[str, str], name: str, made: list[str], memory: int, tasks: int) -> int:
    for controller in ("memory", "pids"):
        os.mkdir(f"{own[controller]}/{name}")
        made.append(f"{own[controller]}/{name}")
    _write(f"{made[0]}/memory.limit_in_bytes", memory)
    _write(f"{made[1]}/pids.max", tasks)
    for directory in made:
        _write(f"{directory}/cgroup.procs", os.getpid())
    return os.open(f"{made[0]}/memory.oom_control", os.O_RDONLY)


def _create_v2(parent: str, name: str, made: list[str], memory: int, tasks: int) -> int:
    with open(f"{parent}/cgroup.subtree_control") as file:
        if not {"memory", "pids"} <= set(file.read().split()):
            raise OSError(errno.EACCES, "memory and pids are not delegated to this cgroup")
    os.mkdir(f"{parent}/{name}")
    made.append(f"{parent}/{name}")
    _write(f"{made[0]}/memory.max", memory)
    _write(f"{made[0]}/memory.swap.max", 0)
    _write(f"{made[0]}/pids.max", tasks)
    _write(f"{made[0]}/cgroup.procs", os.getpid())
    return os.open(f"{made[0]}/memory.events", os.O_RDONLY)


def _write(path: str, value: int) -> None:
    with open(path, "w") as file:
        file.write(str(value))


def sweep() -> None:
    """Remove what a template killed without warning left: empty directories of dead processes."""
    for parent in set(_own_groups().values()):
        try:
            names = [name for name in os.listdir(parent) if name.startswith(_PREFIX)]
        except OSError:
            continue
        dead = [name for name in names if not os.path.exists(f"/proc/{name.split('-')[1]}")]
        remove([f"{parent}/{name}" for name in dead])


def remove(directories: Iterable[str]) -> None:
    """Remove empty cgroup directories; one still in use is left."""
    for directory in directories:
        try:
            os.rmdir(directory)
        except OSError:
            pass
