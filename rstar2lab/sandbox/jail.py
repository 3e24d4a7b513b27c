"""How a slot (one warm worker process) confines its calls at each level.

`NamespaceJail` (L3, L4): the slot is process 1 of its own pid namespace and lives on a private root
of read-only binds; `ProcessJail` (L0-L2): filters and limits only. Both offer the same verbs:
`set_up` once, `confine` in each forked child, `kill_all` and `reset_box` after each call, `pause`
and `resume` around a session's calls, `close`.
"""

import errno
import os
import resource
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

from rstar2lab.sandbox import kernel, seccomp
from rstar2lab.sandbox.cgroup import Cgroup
from rstar2lab.sandbox.levels import Limits

_OWN_USER_BASE = 1_000_000  # user ids of slots that root starts; the slot's pid is added
_MAPPED_USER = 1000  # the name of the owner inside a user namespace; not 0: exec must not regain
_BOX_INODES = 8192
_REPORT_BYTES = 16 * 2**20
_SWEEPS = 200  # a millisecond apart: so often the living are looked for before all are killed
_MOST_DESCRIPTORS = 256
_SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache",
                 "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PASSWD = "root:x:0:0:root:/:/bin/false\nsandbox:x:{user}:{user}:sandbox:/tmp:/bin/false\n"


@dataclass(frozen=True)
class Plan:
    """What a slot is asked to be. `temporary`: a host directory for boxes below L3."""

    level: str
    limits: Limits
    readable: tuple[str, ...] = ()
    temporary: str = "/tmp"
    has_user_namespace: bool = False
    is_session: bool = False


def interpreter_paths() -> list[str]:
    """Directories that the interpreter and its packages are read from."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)]
    paths += [os.path.dirname(os.path.realpath(sys.executable))]
    paths += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return paths


def outermost(paths: list[str]) -> list[str]:
    """The existing paths, made absolute, without those below another or below the system's."""
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths if os.path.exists(path)}):
        if path != "/" and not any(path == top or path.startswith(top + "/") for top in kept):
            kept.append(path)
    return kept


def resource_limits(plan: Plan) -> list[tuple[int, tuple[int, int]]]:
    """The rlimits of a call as (kind, (soft, hard)), none above the one in force.

    The soft memory limit leaves room to report a MemoryError. The processor limit is only a second
    fence: the slot watches the clock itself.
    """
    limits = plan.limits
    memory = own_address_space() + limits.memory_mb * 2**20
    wanted = {
        resource.RLIMIT_AS: (memory, memory + _REPORT_BYTES),
        resource.RLIMIT_FSIZE: (limits.file_mb * 2**20,) * 2,
        resource.RLIMIT_NPROC: (limits.processes,) * 2,
        resource.RLIMIT_NOFILE: (_MOST_DESCRIPTORS,) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    if not plan.is_session:
        wanted[resource.RLIMIT_CPU] = (int(limits.cpu_seconds) + 1,) * 2
    return [(kind, _below_ceiling(kind, pair)) for kind, pair in wanted.items()]


def _below_ceiling(kind: int, pair: tuple[int, int]) -> tuple[int, int]:
    ceiling = resource.getrlimit(kind)[1]
    if ceiling == resource.RLIM_INFINITY:
        return pair
    return min(pair[0], ceiling), min(pair[1], ceiling)


def own_address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


@dataclass
class ProcessJail:
    """Levels L0 to L2: no namespaces. The slot adopts orphans and kills by session and descent."""

    plan: Plan
    box: str = ""
    user: int | None = None
    capabilities: int = 0
    limits: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    filter: seccomp.Filter | None = None

    def set_up(self) -> None:
        """Prepare the slot. Raises: OSError when the level cannot be reached."""
        self.limits = resource_limits(self.plan)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if os.getuid() == 0 and self.plan.level != "L0":
            self.user = _OWN_USER_BASE + os.getpid()
            if not _is_readable_by_others(os.__file__):
                self.capabilities = 1 << kernel.CAP_DAC_READ_SEARCH
        token = os.urandom(6).hex()
        self.box = os.path.join(self.plan.temporary, f"rstar2lab-{os.getpid()}-{token}")
        self._make_box()
        if self.plan.level != "L0":
            self.filter = seccomp.Filter(is_namespaced=False)
        if self.plan.level == "L2":
            self._require_scoped_signals()

    def _require_scoped_signals(self) -> None:
        abi = seccomp.landlock_abi()
        if abi < 1 or (abi < 6 and self.user is None):
            raise OSError(errno.ENOSYS, f"Landlock version {abi} does not scope signals")

    def _make_box(self) -> None:
        os.mkdir(self.box, 0o700)
        if self.user is not None:
            os.chown(self.box, self.user, self.user)

    def confine(self) -> None:
        """In the forked child: limits, own user, filters. There is no way back."""
        os.chdir(self.box)
        ruleset = self._build_ruleset() if self.plan.level == "L2" else None
        for kind, pair in self.limits:
            resource.setrlimit(kind, pair)
        if self.user is not None:
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
            become_user(self.user)
            kernel.set_capabilities(self.capabilities)
        kernel.die_with_parent()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if ruleset is not None:
            seccomp.apply_ruleset(ruleset)
            os.close(ruleset)
        if self.filter is not None:
            self.filter.apply()

    def _build_ruleset(self) -> int:
        """Opened while still privileged, anew for each call: rules are bound to the directory."""
        paths = [*_SYSTEM_PATHS, *interpreter_paths(), *self.plan.readable]
        return seccomp.build_ruleset(paths, self.box)

    def kill_all(self, child: int, spared: int = 0) -> None:
        """Kill the child's session, and what left it, until no descendant but `spared` is left."""
        for _ in range(_SWEEPS):
            if not spared:
                _kill_group(child)
            alive = [pid for pid in descendants(os.getpid()) if not _is_reaped(pid, child)]
            alive = [pid for pid in alive if pid != spared]
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            if not alive or alive == [child] and _is_zombie(child):
                return
            time.sleep(0.001)

    def pause(self) -> None:
        """Stop every process of the session until `resume`."""
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGCONT)

    def reset_box(self) -> None:
        """Delete what the call wrote; the directory itself is made anew."""
        if os.listdir(self.box) or self.user is None:
            shutil.rmtree(self.box, ignore_errors=True)
            self._make_box()

    def count_memory_kills(self) -> int:
        """Kills by the kernel for memory: unknown without a cgroup."""
        return 0

    def close(self) -> None:
        """Remove the private directory."""
        shutil.rmtree(self.box, ignore_errors=True)


def _is_readable_by_others(path: str) -> bool:
    """True when every directory above `path` can be searched, and `path` read, by any user."""
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & 0o004:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def become_user(user: int) -> None:
    """Take the user and group id for good; no supplementary groups."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone, or that may not be reached, is no error."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _stat_fields(pid: int | str) -> list[str] | None:
    """State, parent, … of a process, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return None


def _is_zombie(pid: int | str) -> bool:
    fields = _stat_fields(pid)
    return fields is None or fields[0] in "ZX"


def _is_reaped(pid: int, main_child: int) -> bool:
    """Reap a dead orphan; the call's main process is left for its status to be read."""
    if pid == main_child:
        return False
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return _stat_fields(pid) is None


def _living() -> list[int]:
    """Processes that /proc shows, zombies left out."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and not _is_zombie(name)]


def _parents() -> dict[int, int]:
    """Parent of each process that /proc shows."""
    parents = {}
    for name in os.listdir("/proc"):
        fields = _stat_fields(name) if name.isdigit() else None
        if fields:
            parents[int(name)] = int(fields[1])
    return parents


def children(parent: int) -> list[int]:
    """Processes whose parent is `parent`."""
    return [pid for pid, its_parent in _parents().items() if its_parent == parent]


def descendants(root: int) -> list[int]:
    """Process ids below `root`, itself excluded, from /proc."""
    parents = _parents()
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


@dataclass
class NamespaceJail:
    """Levels L3 and L4: the slot is process 1 of private namespaces on a private root."""

    plan: Plan
    box: str = "/tmp"
    user: int = _MAPPED_USER
    is_own_user: bool = True  # the user of the call is not the slot's
    limits: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    filter: seccomp.Filter | None = None
    cgroup: Cgroup | None = None
    links: dict[str, str] = field(default_factory=dict)  # in the box, to sources it would cover
    untouched: tuple = ()  # state of the box before a call

    def leave_host(self) -> None:
        """In the helper: cgroup and namespaces; the next forked process is process 1.

        Raises: OSError when the kernel or the container refuses.
        """
        if self.plan.level == "L4":
            self.cgroup = Cgroup.create(self.plan.limits, states=2 if self.plan.is_session else 1)
        flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
        flags |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        if self.plan.has_user_namespace:
            self.is_own_user = os.getuid() == 0
            enter_user_namespace(flags)
        else:
            kernel.unshare(flags)

    def set_up(self) -> None:
        """As process 1: private root, box, host name. Raises: OSError."""
        self.limits = resource_limits(self.plan)
        self.filter = seccomp.Filter(is_namespaced=True)
        if not self.plan.has_user_namespace:  # the host's number of this process: unique
            self.user = _OWN_USER_BASE + int(os.readlink("/proc/self"))
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        sources = outermost([*interpreter_paths(), *self.plan.readable])
        self.links = build_root(sources, self.user)
        self._mount_box()
        kernel.restrict_mount("/", kernel.MOUNT_ATTR_RDONLY, recursive=False)
        kernel.set_host_name("sandbox")

    def _mount_box(self) -> None:
        options = f"size={self.plan.limits.file_mb}m,nr_inodes={_BOX_INODES},mode=700"
        options += f",uid={self.user},gid={self.user}"
        kernel.mount("box", self.box, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        for path, target in self.links.items():
            os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
            os.symlink(target, path)
        self.untouched = self._box_state()

    def confine(self) -> None:
        """In the forked child: limits, no privileges, filter. There is no way back."""
        os.chdir(self.box)
        for kind, pair in self.limits:
            resource.setrlimit(kind, pair)
        if self.is_own_user:
            become_user(self.user)
        kernel.set_capabilities(0)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.die_with_parent()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        self.filter.apply()

    def kill_all(self, child: int, spared: int = 0) -> None:
        """Kill every process of the namespace but the slot and `spared`.

        Without one to spare: at one stroke. Else all are stopped, so that none can escape by
        forking, and killed one by one; if that does not end, the spared dies with the rest.
        """
        for _ in range(_SWEEPS if spared else 0):
            self.pause()
            alive = set(_living())
            if spared not in alive:  # dead, or /proc could not be mounted
                break
            others = alive - {os.getpid(), spared}
            if not others:
                return self.resume()
            for pid in others:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.001)
        _signal(-1, signal.SIGKILL)

    def pause(self) -> None:
        """Stop every process of the session until `resume`."""
        _signal(-1, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        _signal(-1, signal.SIGCONT)

    def reset_box(self) -> None:
        """A fresh private directory: nothing of the call is left. An untouched one is kept."""
        if self.links or os.listdir(self.box) or self._box_state() != self.untouched:
            kernel.unmount(self.box)
            self._mount_box()

    def _box_state(self) -> tuple:
        """What a program can change of the directory itself, beside what it holds."""
        stat = os.stat(self.box)
        names = os.listxattr(self.box)
        return stat.st_mode, stat.st_uid, stat.st_gid, stat.st_mtime_ns, stat.st_ctime_ns, *names

    def count_memory_kills(self) -> int:
        """Processes that the kernel killed at the cgroup's memory limit so far."""
        return self.cgroup.count_kills() if self.cgroup else 0

    def close(self) -> None:
        """Nothing: the namespaces end with the slot."""


def enter_user_namespace(flags: int) -> None:
    """Enter a new user namespace together with the namespaces of `flags`.

    An ordinary user is mapped to a user that is not 0. Root without the right to unshare alone is
    mapped to itself, beside a user of its own for the calls, by a process that stays outside.
    Raises: OSError.
    """
    if os.getuid() != 0:
        user, group = os.getuid(), os.getgid()
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_MAPPED_USER} {user} 1")
        _write("/proc/self/gid_map", f"{_MAPPED_USER} {group} 1")
        return
    inside, mapper = _fork_mapper(os.getpid())
    try:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        inside.sendall(b"1")
        if inside.recv(1) != b"1":
            raise OSError(errno.EPERM, "uid_map could not be written from outside")
    finally:
        inside.close()
        os.waitpid(mapper, 0)


def _fork_mapper(target: int) -> tuple[socket.socket, int]:
    """Fork a process that maps the users of process `target` on demand. Returns (socket, pid)."""
    inside, outside = socket.socketpair()
    pid = os.fork()
    if pid:
        outside.close()
        return inside, pid
    try:
        inside.close()
        if outside.recv(1):
            text = f"0 0 1\n{_MAPPED_USER} {_OWN_USER_BASE + target} 1"
            _write(f"/proc/{target}/uid_map", text)
            _write(f"/proc/{target}/gid_map", text)
            outside.sendall(b"1")
    finally:
        os._exit(0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(sources: list[str], user: int) -> dict[str, str]:
    """Mount a private root: read-only binds of the system and `sources`, few devices, /proc.

    Sources are opened first, because the new root covers /tmp, where they may lie. Those that do
    would be covered again by the box: they are bound below /mnt, and returned as links to make.
    Raises: OSError.
    """
    binds = {path: os.open(path, os.O_PATH) for path in _bindable(_SYSTEM_PATHS)}
    binds |= {path: os.open(path, os.O_PATH) for path in sources if not _is_below(path, binds)}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    root = "/tmp"
    covered = [path for path in binds if path.startswith("/tmp/")]
    links = {path: f"/mnt/{number}" for number, path in enumerate(covered)}
    kernel.mount("root", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    read_only = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
    for path, descriptor in binds.items():
        place = root + links.get(path, path)
        _bind(place, descriptor)
        kernel.restrict_mount(place, read_only)
    for path, descriptor in devices.items():
        _bind(root + path, descriptor)
    _add_links(root)
    _add_etc(root, user)
    for name in ("proc", "tmp"):
        os.mkdir(f"{root}/{name}", 0o755)
    _mount_proc(root + "/proc")
    for descriptor in (*binds.values(), *devices.values()):
        os.close(descriptor)
    kernel.pivot_root(root)
    return links


def _bindable(paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if os.path.exists(path) and not os.path.islink(path)]


def _is_below(path: str, tops: dict[str, int]) -> bool:
    return any(path == top or path.startswith(top + "/") for top in tops)


def _bind(target: str, descriptor: int) -> None:
    is_directory = os.path.isdir(f"/proc/self/fd/{descriptor}")
    os.makedirs(target if is_directory else os.path.dirname(target), 0o755, exist_ok=True)
    if not is_directory:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    flags = kernel.MS_BIND | kernel.MS_REC
    kernel.mount(f"/proc/self/fd/{descriptor}", target, None, flags)


def _add_links(root: str) -> None:
    """Symbolic links of the host such as /lib → usr/lib, and the usual ones below /dev."""
    for path in _SYSTEM_PATHS:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
    links = {"shm": "/tmp", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0",
             "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}  # fmt: skip
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def _add_etc(root: str, user: int) -> None:
    os.makedirs(f"{root}/etc", 0o755, exist_ok=True)
    _write(f"{root}/etc/passwd", _PASSWD.format(user=user))
    _write(f"{root}/etc/group", f"root:x:0:\nsandbox:x:{user}:\n")


def _mount_proc(target: str) -> None:
    """A /proc of the own pid namespace; containers with a masked /proc forbid it: then none.

    Read-only: kernel settings below /proc/sys belong to the host.
    """
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    try:
        kernel.mount("proc", target, "proc", flags, "hidepid=2")
        kernel.restrict_mount(target, kernel.MOUNT_ATTR_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise
