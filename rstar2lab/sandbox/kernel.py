"""Direct system calls: namespaces, mounts, privileges. Each raises OSError with the call's name.

Linux on x86_64 and aarch64; ctypes only. What the calls are combined to is in `jail`.
"""

import ctypes
import os
import platform
import sys
from functools import lru_cache

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
CAP_DAC_READ_SEARCH = 2
MADV_COLLAPSE = 25

MACHINE = platform.machine() if sys.platform == "linux" else ""
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}
_MOUNT_SETATTR = 442  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments, what: str = "syscall") -> int:
    """One raw system call. Raises: OSError with the name in `what`."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *wide), what)


def prctl(option: int, first: int = 0, second: int = 0) -> None:
    """prctl(2); addresses as integers. Raises: OSError."""
    if _libc.prctl(option, first, second, 0, 0) < 0:
        _check(-1, f"prctl({option})")


def unshare(flags: int) -> None:
    """unshare(2). Raises: OSError, EPERM where the kernel or the container forbids it."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2). Raises: OSError that names the target."""
    text = [None if part is None else os.fsencode(part) for part in (source, target, kind, data)]
    done = _libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), text[3])
    _check(done, f"mount({kind or 'bind'} on {target})")


def unmount(target: str) -> None:
    """umount2(2), lazily. Raises: OSError."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount({target})")


def restrict_mount(target: str, attributes: int, recursive: bool = True) -> None:
    """mount_setattr(2): add `attributes` to a mount tree. Raises: OSError (Linux < 5.12)."""
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    name = ctypes.c_char_p(os.fsencode(target))
    syscall(
        _MOUNT_SETATTR,
        AT_FDCWD,
        name,
        flags,
        ctypes.byref(request),
        ctypes.sizeof(request),
        what=f"mount_setattr({target})",
    )


def pivot_root(directory: str) -> None:
    """Make `directory`, a mount point, the root and let go of the old root. Raises: OSError."""
    os.chdir(directory)
    here = ctypes.c_char_p(b".")
    syscall(_NUMBERS[MACHINE]["pivot_root"], here, here, what="pivot_root")
    unmount(".")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """sethostname(2) in the own uts namespace. Raises: OSError."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


@lru_cache
def _capability_request(mask: int) -> tuple[ctypes.Array, ctypes.Array]:
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)


def set_capabilities(mask: int) -> None:
    """Keep exactly the capabilities of `mask` (permitted and effective). Raises: OSError."""
    header, data = _capability_request(mask)
    syscall(_NUMBERS[MACHINE]["capset"], ctypes.byref(header), ctypes.byref(data), what="capset")


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent ends. Must follow every change of user id."""
    prctl(PR_SET_PDEATHSIG, 9)


def collapse_heap(minimum_bytes: int = 4 << 20) -> None:
    """Put large anonymous memory on huge pages: a fork then copies far fewer page tables."""
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps]
    for row in rows:
        start, end = (int(part, 16) for part in row[0].split("-"))
        is_anonymous = row[1].startswith("rw-p") and (len(row) == 5 or row[5] == "[heap]")
        if is_anonymous and end - start >= minimum_bytes:
            size = ctypes.c_size_t(end - start)
            _libc.madvise(ctypes.c_void_p(start), size, ctypes.c_int(MADV_COLLAPSE))
