"""Programs that attack the sandbox, and a runner that tries them at one level, as one user.

`python tests/attacks.py LEVEL` prints JSON: what each did. An attack that got what it wanted prints
"reached". BOUNDED and SEALED are for L3 and L4 only. OPEN names the levels an attack works at; the
weak ones are tried inside namespaces of the runner's own (`enclosed`), with targets made for it.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

LIBC = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def try_to(action: str, before: str = "") -> str:
    """A program that says `reached` when `action` raises nothing."""
    attempt = f"try:\n    {action}\n    print('reached')\n"
    return f"{before}{attempt}except Exception as e: print(repr(e))"


def call(expression: str) -> str:
    """A program that says `reached` when a function of libc does not return -1."""
    test = f"print('reached' if {expression} != -1 else errno.errorcode[ctypes.get_errno()])"
    return LIBC + test


def system_call(x86_64: int, aarch64: int, arguments: str) -> str:
    number = f"({x86_64} if os.uname().machine == 'x86_64' else {aarch64})"
    return call(f"libc.syscall({number}, {arguments})")


IGNORE = (
    "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
)
SPAWN = "import os, subprocess, time\n"

# What may not hang, grow or stay: name -> (program, statuses it may end with).
BOUNDED = {
    "300 forks that leave": (
        "import os, time\nfor _ in range(300):\n    try:\n        if os.fork() == 0:\n"
        "            os.setsid(); time.sleep(99)\n    except OSError: pass", "OK"),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "TIMEOUT"),
    "chain of forks": ("import os\nwhile True:\n    if os.fork(): os._exit(0)", "OK"),
    "thread bomb": (
        "import threading, time\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=[99]).start()\n"
        "except BaseException as e: print(repr(e))", "TIMEOUT MEMORY ERROR"),
    "2 GB": ("bytearray(2 << 30)", "MEMORY"),
    "2 GB bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MEMORY"),
    "2 GB mapped": ("import mmap\nmmap.mmap(-1, 2 << 30)", "ERROR MEMORY"),
    "memory of many children": (
        "import os\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); os._exit(0)\n"
        "for _ in range(8): os.wait()", "OK TIMEOUT MEMORY"),
    "memory in a memfd": (
        "import os\nf = os.memfd_create('x')\nwhile True: os.write(f, bytes(1 << 20))",
        "ERROR MEMORY"),
    "100 MB printed": ("for _ in range(10_000): print('x' * 10_000)", "OUTPUT_LIMIT"),
    "100 MB of errors": (
        "import sys\nfor _ in range(10_000): sys.stderr.write('x' * 10_000)", "OUTPUT_LIMIT"),
    "children print": (
        "import os\nfor _ in range(4): os.fork()\nwhile True: os.write(1, b'x' * 10_000)",
        "OUTPUT_LIMIT"),
    "300 MB file": ("open('big', 'wb').write(bytes(300 << 20))", "ERROR MEMORY"),
    "many large files": (
        "for i in range(100): open(str(i), 'wb').write(bytes(8 << 20))", "ERROR"),
    "20,000 files": ("for i in range(20_000): open(str(i), 'w').close()", "ERROR TIMEOUT"),
    "a deep folder": (
        "import os\nfor _ in range(20_000): os.mkdir('d'); os.chdir('d')", "ERROR TIMEOUT"),
    "descriptors": ("import os\nwhile True: os.dup(0)", "ERROR"),
    "pipes full of data": (
        "import os\nk = []\nwhile True:\n    r, w = os.pipe(); k.append(r)\n"
        "    os.set_blocking(w, False); os.write(w, bytes(1 << 16))", "ERROR MEMORY"),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(99)\n    os._exit(0)", "OK"),
    "new session": (SPAWN + "subprocess.Popen(['sleep', '97'], start_new_session=True);", "OK"),
    "a child keeps the pipe": (SPAWN + "subprocess.Popen(['sleep', '98']);", "OK"),
    "a child stopped": (
        "import os, signal\np = os.fork()\nif p == 0: os.kill(os.getpid(), signal.SIGSTOP)", "OK"),
    "ignored signals, busy": (IGNORE + "while True: pass", "TIMEOUT"),
    "ignored signals, asleep": (IGNORE + "time.sleep(60)", "TIMEOUT"),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "TIMEOUT"),
    "endless thread": (
        "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()",
        "TIMEOUT"),
    "endless exit handler": ("import atexit\n@atexit.register\ndef f():\n    while True: pass",
                             "TIMEOUT"),
    "endless repr": ("class A:\n    def __repr__(self):\n        while True: pass\nA()", "TIMEOUT"),
    "endless error text": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "TIMEOUT"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "ERROR"),
    "os._exit(0)": ("import os\nos._exit(0)", "OK"),
    "descriptors closed, asleep": ("import os, time\nos.closerange(0, 100)\ntime.sleep(60)",
                                   "TIMEOUT"),
    "input without stdin": ("input()", "ERROR"),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
                  "ERROR MEMORY TIMEOUT"),
    "recursion in C": ("x = ()\nfor _ in range(10**6): x = (x,)\nhash(x)", "ERROR"),
    "a number of 100,001 digits": (
        "import sys\nsys.set_int_max_str_digits(0)\nprint(10**100_000)", "OUTPUT_LIMIT"),
    "power": ("9**9**9", "TIMEOUT MEMORY"),
    "sum in C": ("sum(range(10**11))", "TIMEOUT"),
    "regular expression": ("import re\nre.match('(a*)*b', 'a' * 99)", "TIMEOUT"),
    "alarms": ("import signal\nsignal.setitimer(0, 1e-4, 1e-4)\nwhile True: pass",
               "ERROR TIMEOUT"),
    "killed by itself": ("import os\nos.kill(os.getpid(), 9)", "ERROR"),
    "kill the slot": (  # refused, or ignored by process 1: it is there to answer
        "import os, time\nfor n in (9, 15, 2, 19):\n    try: os.kill(1, n)\n"
        "    except PermissionError: pass\ntime.sleep(.05)", "OK"),
    "kill every process": (
        "import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()", "ERROR"),
    "streams destroyed": ("import sys\nsys.stdout = sys.stderr = None\n1 / 0", "ERROR"),
    "builtins destroyed": ("import builtins\nbuiltins.__dict__.clear()", "ERROR OK"),
    "modules destroyed": ("import sys\nsys.modules.clear()", "ERROR OK"),
}  # fmt: skip

# What may not be reached: name -> program.
SEALED = {
    "kernel setting": try_to("open('/proc/sys/kernel/hostname', 'w')"),
    "shadow file": try_to("open('/etc/shadow')"),
    "host's user list": try_to("assert 'daemon' in open('/etc/passwd').read()"),
    "folders of the host": try_to(
        "assert {'boot', 'sys', 'run'} & set(os.listdir('/'))", "import os\n"),
    "write to /usr": try_to("open('/usr/x', 'w')"),
    "write to the root": try_to("open('/x', 'w')"),
    "write to packages": try_to("open(os.path.dirname(os.__file__) + '/x', 'w')", "import os\n"),
    "write to /dev": try_to("open('/dev/x', 'w')"),
    "write to /etc": try_to("open('/etc/passwd', 'a')"),
    "make it writable": try_to("os.chmod('/usr', 0o777)", "import os\n"),
    "slot's environment": try_to("open('/proc/1/environ').read()"),
    "slot's memory": try_to("open('/proc/1/mem', 'rb').read(1)"),
    "slot's maps": try_to("open('/proc/1/maps').read(1)"),
    "slot's root": try_to("os.listdir('/proc/1/root/')", "import os\n"),
    "slot's descriptors": try_to("os.listdir('/proc/1/fd')", "import os\n"),
    "parent's environment": try_to("open(f'/proc/{os.getppid()}/environ').read()", "import os\n"),
    "a socket": try_to("socket.socket()", "import socket\n"),
    "a socket of version 6": try_to("socket.socket(10)", "import socket\n"),
    "a netlink socket": try_to("socket.socket(16, 3)", "import socket\n"),
    "a raw socket": try_to("socket.socket(2, 3, 1)", "import socket\n"),
    "a packet socket": try_to("socket.socket(17, 3)", "import socket\n"),
    "a vsock socket": try_to("socket.socket(40, 1)", "import socket\n"),
    "kernel crypto": try_to("socket.socket(38, 5)", "import socket\n"),
    "the host's abstract socket": try_to(
        "socket.socket(1, 1).connect('\\0rstar2lab-attacked')", "import socket\n"),
    "become root": try_to("os.setuid(0)", "import os\n"),
    "become a group": try_to("os.setgroups([0])", "import os\n"),
    "raise a limit": try_to("r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
                            "import resource as r\n"),
    "limits of the slot": try_to("r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))",
                                 "import resource as r\n"),
    "real-time priority": try_to("os.sched_setscheduler(0, 1, os.sched_param(9))", "import os\n"),
    "negative niceness": try_to("os.nice(-19)", "import os\n"),
    "out of reach of the memory killer": try_to(
        "open('/proc/self/oom_score_adj', 'w').write('-1000')"),
    "leave the cgroup": try_to("open('/sys/fs/cgroup/cgroup.procs', 'w')"),
    "a device file": try_to("os.mknod('d', 0o20666, os.makedev(1, 1))", "import os\n"),
    "physical memory": try_to("open('/dev/mem', 'rb')"),
    "kernel messages": try_to("open('/dev/kmsg')"),
    "a set-user-id file": try_to(
        "open('s', 'w').close(); os.chown('s', 0, 0)", "import os\n"),
    "namespaces": call("libc.unshare(0x10000000)"),
    "clone with namespaces": system_call(56, 220, "0x10000011, 0, 0, 0, 0"),
    "clone3": system_call(435, 435, "0, 0"),
    "enter a namespace": try_to(
        "assert ctypes.CDLL(None).setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0) == 0",
        "import ctypes, os\n"),
    "mount": call("libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)"),
    "unmount": call("libc.umount2(b'/tmp', 2)"),
    "new mount interface": system_call(430, 430, "b'tmpfs', 0"),
    "chroot": call("libc.chroot(b'/tmp')"),
    "pivot_root": system_call(155, 41, "b'.', b'.'"),
    "trace": call("libc.ptrace(16, 1, 0, 0)"),
    "memory of another": system_call(310, 270, "1, 0, 0, 0, 0, 0"),
    "io_uring": system_call(425, 425, "1, 0"),
    "bpf": system_call(321, 280, "0, 0, 0"),
    "performance counters": system_call(298, 241, "0, 0, -1, -1, 0"),
    "userfaultfd": system_call(323, 282, "0"),
    "keys": system_call(250, 219, "0, -3, 0, 0, 0"),
    "handles": system_call(304, 265, "0, 0, 0"),
    "descriptors of another": system_call(438, 438, "0, 0, 0"),
    "shared memory": call("libc.shmget(0, 4096, 0o1600)"),
    "message queue": system_call(240, 180, "b'q', 0o102, 0o600, 0"),
    "host name": call("libc.sethostname(b'x', 1)"),
    "clock": system_call(227, 112, "0, 0"),
    "kernel log": call("libc.klogctl(3, 0, 0)"),
    "personality": call("libc.personality(0x40000)"),
    "a system call of tomorrow": system_call(500, 500, "0"),
}  # fmt: skip
if os.uname().machine == "x86_64":
    SEALED["the other table of system calls"] = system_call(0x40000000 + 165, 0, "0, 0, 0, 0, 0")

# What weaker levels do not stop: name -> (program, levels where root's calls reach it, the same
# for an ordinary user). {folder} and the like are targets of the runner's own.
OPEN = {
    "read a file of the host": (try_to("open({secret!r}).read()"), "L1 L0", "L1 L0"),
    "write where all may write": (try_to("open({folder!r} + '/w', 'w')"), "L1 L0", "L1 L0"),
    "see a process": (
        "import os\ntry: os.kill({victim}, 0); print('reached')\n"
        "except PermissionError: print('reached')\nexcept OSError as e: print(repr(e))",
        "L2 L1 L0", "L2 L1 L0"),
    "signal a process": (try_to("os.kill({victim}, 10)", "import os\n"), "L0", "L1 L0"),
    "read its environment": (try_to("open('/proc/{victim}/environ').read()"), "L0", "L1 L0"),
    "a socket": (try_to("socket.socket()", "import socket\n"), "L0", "L0"),
    "a namespace": (call("libc.unshare(0x10000000)"), "L0", "L0"),
    "mount": (call("libc.mount(b'x', {mount_point!r}.encode(), b'tmpfs', 0, None)"), "L0", ""),
    "leave the session": (
        "import os\nif os.fork() == 0:\n    try: os.setsid(); print('reached')\n"
        "    except OSError as e: print(repr(e))\n    os._exit(0)\nos.wait();",
        "L4 L3 L0", "L4 L3 L0"),
}  # fmt: skip


def enclosed(command: list[str], user: int) -> list[str]:
    """The command inside mount, process and network namespaces of its own, as `user`."""
    namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    outside = ["unshare", *namespaces, "--mount-proc", "--propagation", "private"]
    return [*outside, *as_user(command, user)]


def as_user(command: list[str], user: int) -> list[str]:
    """The command as `user`, without groups and without a way back."""
    if user == os.getuid():
        return command
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


def _mounts_are_private() -> bool:
    return "shared:" not in Path("/proc/self/mountinfo").read_text()


def tree(root: int) -> set[int]:
    """Living processes below `root`."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(name)] = int(parent)
    found, frontier = set(), {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _targets(folder: str) -> dict:
    """A file, an open folder and a process for OPEN to reach for."""
    os.chmod(folder, 0o777)
    mount_point = os.path.join(folder, "mount")
    os.mkdir(mount_point)
    secret = os.path.join(folder, "secret")
    Path(secret).write_text("secret")
    os.chmod(secret, 0o644)
    victim = subprocess.Popen([sys.executable, "-c", "import signal, time\n"
        "signal.signal(10, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"],
        stdout=subprocess.PIPE)  # fmt: skip
    victim.stdout.readline()
    return {"folder": folder, "secret": secret, "victim": victim.pid, "process": victim,
            "mount_point": mount_point}  # fmt: skip


def _run_open(sandbox, folder: str) -> dict:
    targets = _targets(folder)
    names = {key: targets[key] for key in ("folder", "secret", "victim", "mount_point")}
    try:
        results = sandbox.run_many([row[0].format(**names) for row in OPEN.values()])
    finally:
        targets["process"].kill()
        targets["process"].wait()
        if os.path.ismount(targets["mount_point"]):
            subprocess.run(["umount", targets["mount_point"]], check=True)
    return dict(zip(OPEN, results, strict=True))


def _run_caged(sandbox) -> dict:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0rstar2lab-attacked")
        listener.listen()
        programs = {f"bounded: {name}": program for name, (program, _) in BOUNDED.items()}
        programs |= {f"sealed: {name}": program for name, program in SEALED.items()}
        return dict(zip(programs, sandbox.run_many(programs.values()), strict=True))


def main() -> None:
    level = sys.argv[1]
    from rstar2lab.sandbox import Limits, Sandbox

    is_weak = level in ("L0", "L1", "L2")
    if is_weak:
        assert _mounts_are_private() and os.getppid() <= 1, "weak levels are tried enclosed only"
    warnings.simplefilter("ignore")
    limits = Limits(1, 1, 256, output_chars=1000)
    known = None if level == "strongest" else level
    with tempfile.TemporaryDirectory() as folder, Sandbox(4, limits, level=known) as sandbox:
        if sandbox.level in ("L0", "L1", "L2") and not is_weak:
            print(json.dumps({"level": sandbox.level}))
            return
        sandbox.run_many(["1"] * 4)
        time.sleep(0.5)  # the children ahead are forked
        quiet = len(tree(os.getpid()))
        found = _run_open(sandbox, folder)
        if not is_weak:
            found |= _run_caged(sandbox)
        deadline = time.monotonic() + 5
        while len(tree(os.getpid())) != quiet and time.monotonic() < deadline:
            time.sleep(0.05)
        report = {
            "level": sandbox.level,
            "user": os.getuid(),
            "left": len(tree(os.getpid())) - quiet,
            "after": sandbox.run("1 + 1").stdout,
            "results": {name: [r.status.name, r.stdout[:300], r.stderr[:300], r.seconds]
                        for name, r in found.items()},
        }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
