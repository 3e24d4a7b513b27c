"""The system-call filter of a call (seccomp) and the path filter (Landlock), built once per slot.

The seccomp filter refuses by number what no calculation needs and everything newer than the table;
it is a deny list with a ceiling, not a proof. Numbers are (x86_64, aarch64); None: does not exist.
"""

import ctypes
import errno
import os
import struct

from rstar2lab.sandbox import kernel

_CEILING = 462  # the newest system call known here (mseal, Linux 6.10); above it: ENOSYS
_SAME = {  # numbers above 424 are the same on every architecture
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
}  # fmt: skip
_DENIED = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "bpf": (321, 280),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "quotactl": (179, 60),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "personality": (135, 92), "syslog": (103, 116), "vhangup": (153, 58),
    "lookup_dcookie": (212, 18), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "fanotify_init": (300, 262),
    "uselib": (134, None), "sysctl": (156, None),
}  # fmt: skip
_LEAVING = {"setsid": (112, 157), "setpgid": (109, 154)}  # refused where no pid namespace holds
_ARGUMENTS = {"socket": (41, 198), "clone": (56, 220), "prlimit64": (302, 261)}
_CLONE3 = 435
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW: cgroup, uts, ipc, user, pid, net, ns
_AF_UNIX = 1

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int, error: int) -> bytes:
    return _instruction(_EQUAL, number, 0, 1) + _instruction(_RETURN, _ERRNO | error)


def _check_argument(number: int, test: int, value: int, refused_if: bool) -> bytes:
    """Refuse call `number` when `test(first argument, value)` equals `refused_if`."""
    jumps = (0, 1) if refused_if else (1, 0)
    return (
        _instruction(_EQUAL, number, 0, 4)
        + _instruction(_LOAD, _FIRST_ARGUMENT_AT)
        + _instruction(test, value, *jumps)
        + _instruction(_RETURN, _ERRNO | errno.EPERM)
        + _instruction(_RETURN, _ALLOW)
    )


def build_filter(is_namespaced: bool) -> bytes:
    """The filter program for this machine. Without a pid namespace, leaving the session and
    every socket are refused as well.

    Raises: OSError on an architecture without a table.
    """
    if kernel.MACHINE not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp table for {kernel.MACHINE}")
    column = list(_ARCHITECTURES).index(kernel.MACHINE)
    denied = [pair[column] for pair in _DENIED.values()] + list(_SAME.values())
    arguments = {name: pair[column] for name, pair in _ARGUMENTS.items()}
    if not is_namespaced:
        denied += [pair[column] for pair in _LEAVING.values()] + [arguments["socket"]]
    parts = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, _ARCHITECTURES[kernel.MACHINE], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_ABOVE, _CEILING, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _refuse(_CLONE3, errno.ENOSYS),  # its flags are behind a pointer; libc falls back to clone
        *(_refuse(number, errno.EPERM) for number in denied if number is not None),
        _check_argument(arguments["socket"], _EQUAL, _AF_UNIX, refused_if=False),
        _check_argument(arguments["clone"], _ANY_BIT, _NAMESPACE_FLAGS, refused_if=True),
        _check_argument(arguments["prlimit64"], _EQUAL, 0, refused_if=False),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(parts)


class Filter:
    """The filter, laid out in memory once and installed by each call. Raises: OSError."""

    class _Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    def __init__(self, is_namespaced: bool):
        code = build_filter(is_namespaced)
        self._buffer = ctypes.create_string_buffer(code, len(code))
        self._program = self._Program(len(code) // 8, ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._program)

    def apply(self) -> None:
        """Install it on this process and all its children. Raises: OSError."""
        kernel.prctl(kernel.PR_SET_SECCOMP, 2, self._address)


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 0b1101  # execute, read file, read directory
_WRITE_FILE = 0b10
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_FILE_ONLY = 0b111 | 1 << 14 | 1 << 15  # rights that may be given on a plain file


def landlock_abi() -> int:
    """Version of Landlock, 0 where the kernel has none."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, 1, what="landlock")
    except OSError:
        return 0


def build_ruleset(readable: list[str], box: str) -> int:
    """A Landlock ruleset: read `readable`, everything below `box`, nothing else. Returns its fd.

    Raises: OSError where Landlock is missing.
    """
    abi = landlock_abi()
    handled = _RIGHTS_BY_ABI.get(abi, (1 << 16) - 1)
    attributes = [handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0]
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    request = (ctypes.c_uint64 * 3)(*attributes)
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(request), size, 0, what="landlock")
    for path in readable:
        _add_path(ruleset, path, _READ)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _add_path(ruleset, device, _READ | _WRITE_FILE)
    _add_path(ruleset, box, handled)
    return ruleset


def _add_path(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_PATH)
    if not os.path.isdir(path):
        rights &= _FILE_ONLY
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
    kernel.syscall(_ADD_RULE, ruleset, 1, rule, 0, what=f"landlock({path})")
    os.close(descriptor)


def apply_ruleset(ruleset: int) -> None:
    """Confine this process and its children to the ruleset. Raises: OSError."""
    kernel.syscall(_RESTRICT_SELF, ruleset, 0, what="landlock_restrict_self")
