"""The attack matrix: contained at the strongest level, as root and as an ordinary user.

At weaker levels the table in `attacks` says what is reached; both directions are tried, inside
namespaces of the test's own.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import attacks
import pytest

ROOT, NOBODY = 0, 65534
HERE = Path(__file__).parent
SLACK_SECONDS = 1.5  # on a shared machine; the limit is one second


def interpreter(user: int) -> list[str]:
    """A Python that `user` may run, with the packages of this one."""
    paths = f"{HERE.parent}:{sysconfig.get_paths()['purelib']}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in filter(None, (sys.executable, shutil.which(version, path="/usr/bin"))):
        command = ["env", f"PYTHONPATH={paths}", python]
        probe = attacks.as_user([*command, "-c", "import rstar2lab.sandbox.service"], user)
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    pytest.skip(f"no Python here that user {user} may run")


@functools.cache
def report(level: str, user: int) -> dict:
    """What the attacks did at one level, as one user."""
    if user != os.getuid() and (os.getuid() != ROOT or not shutil.which("setpriv")):
        pytest.skip(f"needs root and setpriv, to act as user {user}")
    command = [*interpreter(user), str(HERE / "attacks.py"), level]
    if level == "strongest":
        command = attacks.as_user(command, user)
    elif os.getuid() != ROOT or not shutil.which("unshare"):
        pytest.skip("weak levels are attacked only in namespaces that root makes")
    else:
        command = attacks.enclosed(command, user)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd="/")
    if "SandboxError" in done.stderr:
        pytest.skip(f"{level} is not available here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    if "results" not in found:
        pytest.skip(f"attacks need L3, user {user} reaches {found['level']} here")
    assert found["user"] == user
    return found


@pytest.mark.parametrize("user", [ROOT, NOBODY])
@pytest.mark.parametrize("name", attacks.BOUNDED)
def test_what_would_hang_grow_or_stay_is_bounded_and_typed(name, user):
    status, stdout, stderr, seconds = report("strongest", user)["results"][f"bounded: {name}"]
    assert status in attacks.BOUNDED[name][1].split(), (status, stdout, stderr)
    assert seconds < 1 + SLACK_SECONDS


@pytest.mark.parametrize("user", [ROOT, NOBODY])
@pytest.mark.parametrize("name", attacks.SEALED)
def test_what_is_forbidden_is_not_reached(name, user):
    status, stdout, stderr, _ = report("strongest", user)["results"][f"sealed: {name}"]
    assert "reached" not in stdout and stdout.strip(), (status, stdout, stderr)


@pytest.mark.parametrize("user", [ROOT, NOBODY])
@pytest.mark.parametrize("level", ["strongest", "L2", "L1", "L0"])
def test_each_level_stops_what_it_says_and_no_more(level, user):
    found = report(level, user)
    reached = {name for name in attacks.OPEN if "reached" in found["results"][name][1]}
    column = 1 if user == ROOT else 2
    expected = {name for name, row in attacks.OPEN.items() if found["level"] in row[column].split()}
    assert reached == expected, found["results"]
    assert found["left"] == 0 and found["after"] == "2\n"
