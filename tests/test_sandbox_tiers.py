"""Warm workers by what a program imports: faster, and nothing else."""

import base64
import time

import pytest

from rstar2lab.sandbox import Sandbox
from rstar2lab.sandbox.imports import imported
from rstar2lab.types import ToolStatus


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import numpy as np", {"numpy"}),
        ("import os, scipy.stats as s , re", {"os", "scipy", "re"}),
        ("from sympy.abc import x", {"sympy"}),
        ("if True:\n    import numpy", {"numpy"}),
        ("print('import numpy')", set()),
        ("important = 1", set()),
        ("from . import x", set()),
    ],
)
def test_imports_are_read_from_the_text(code, names):
    assert imported(code) == names


def test_imports_inside_base64_are_seen_and_other_literals_are_harmless():
    hidden = base64.b64encode(b"import sympy\nprint(sympy.pi)").decode()
    assert imported(f"import base64\nexec(base64.b64decode('{hidden}'))") == {"base64", "sympy"}
    assert imported("x = 'AAAAAAAAAAAAAAAAAAAAAAAAAAAAA'; y = '" + "=" * 40 + "'") == set()


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as found:
        found.run("import sympy")  # the tier starts
        yield found


def test_a_warm_import_takes_a_fraction_of_a_cold_one(sandbox):
    program = "from sympy import *\nx = symbols('x')\nprint(integrate(x**2, x))"
    with Sandbox(workers=1, tiers=()) as cold:
        started = time.monotonic()
        assert cold.run(program).stdout == "x**3/3\n"
        slow = time.monotonic() - started
    started = time.monotonic()
    assert sandbox.run(program).stdout == "x**3/3\n"
    assert time.monotonic() - started < slow / 2


def test_what_is_warm_is_invisible_until_it_is_imported(sandbox):
    code = "import sympy\nprint('scipy.stats' in globals(), 'numpy' in globals())\nnumpy"
    result = sandbox.run(code)
    assert result.stdout == "False False\n"
    assert result.stderr.startswith("NameError: name 'numpy' is not defined")
    assert sandbox.run("import sys; print('numpy' in sys.modules)").stdout == "False\n"


def test_warm_programs_have_their_own_random_numbers_and_limits(sandbox):
    draws = {sandbox.run("import numpy; print(numpy.random.rand())").stdout for _ in range(3)}
    assert len(draws) == 3
    result = sandbox.run("import numpy as np\nnp.ones(2**31)")
    assert result.status is ToolStatus.MEMORY


def test_a_warm_worker_is_as_isolated_as_any(sandbox):
    program = "import numpy, socket\nsocket.socket().connect(('127.0.0.1', 1))"
    assert sandbox.run(program).status is ToolStatus.ERROR
    assert "Permission" in sandbox.run(program).stderr or "denied" in sandbox.run(program).stderr


def test_a_module_that_is_not_installed_is_left_out_of_its_tier():
    with Sandbox(workers=1, tiers=[("numpy", "no_such_module_at_all")]) as found:
        assert found.run("import numpy; print(numpy.arange(2).sum())").stdout == "1\n"
