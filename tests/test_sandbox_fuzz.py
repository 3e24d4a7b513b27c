"""Programs at random: every one ends in a typed result, and the sandbox goes on."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rstar2lab.sandbox import Limits, Sandbox
from rstar2lab.types import ToolStatus

PIECES = [
    "x = 1", "x", "print(x)", "1 / 0", "def f():", "    return f()", "f()", "while True: pass",
    "for i in range(9):", "    print(i)", "import os", "os._exit(3)", "os.fork()", "os.close(1)",
    "os.closerange(0, 99)", "os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 9)",
    "import sys",
    "sys.stdout.close()", "sys.stdout = None", "sys.stderr = 3", "sys.modules.clear()",
    "sys.exit('é')", "sys.exit([1])", "input()", "raise SystemExit(2**70)",
    "raise KeyboardInterrupt",
    "x = [0] * 10**9", "'\\ud800'", "print('\\ud800é𝛼')", "del __builtins__", "class A: pass",
    "import ctypes", "ctypes.string_at(0)", "os.write(3, b'kept')", "os.write(2, b'\\xff')",
    "import builtins", "builtins.compile = builtins.eval = builtins.print = None", "try:",
    "except: pass", "finally: raise", "async def g(): await g()", "lambda: (yield)",
    "%%time", "!ls",
    "\\", "'''", "\0", "\t", "}", "é = 2", "# -*- coding: latin-9 -*-",
    "from __future__ import nothing",
    "import threading", "threading.Thread(target=print, args=[1]).start()", "import atexit",
    "atexit.register(lambda: 1 / 0)", "raise ExceptionGroup('e', [ValueError(1)])", "return 5",
]  # fmt: skip
PROGRAMS = st.one_of(
    st.text(max_size=200),
    st.text(st.characters(exclude_categories=[]), max_size=60),  # with lone surrogates
    st.lists(st.sampled_from(PIECES), max_size=12).map("\n".join),
)
SHORT = Limits(cpu_seconds=0.3, wall_seconds=0.3, memory_mb=128, output_chars=200)
TIMES = settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with Sandbox(2, SHORT) as found:
            if found.level not in ("L3", "L4"):
                pytest.skip(f"programs at random need L3, this machine reaches {found.level}")
            yield found


def check(result) -> None:
    programs_own = {"OK", "ERROR", "TIMEOUT", "MEMORY", "OUTPUT_LIMIT"}
    assert isinstance(result.status, ToolStatus) and result.status.name in programs_own, result
    assert max(len(result.stdout), len(result.stderr)) <= SHORT.output_chars
    assert 0 <= result.seconds < 2
    assert result.stderr or result.status is ToolStatus.OK
    (result.stdout + result.stderr).encode()


@TIMES
@given(PROGRAMS, st.text(max_size=20), st.booleans())
def test_every_program_ends_in_a_typed_result(sandbox, code, stdin, echo):
    check(sandbox.run(code, stdin, echo=echo))


@TIMES
@given(st.lists(PROGRAMS, min_size=1, max_size=4))
def test_every_cell_of_a_session_ends_in_a_typed_result(sandbox, cells):
    with sandbox.session() as session:
        for cell in cells:
            check(session.run(cell))


def test_the_sandbox_goes_on_after_all_of_them(sandbox):
    assert sandbox.run("1 + 1").stdout == "2\n"
