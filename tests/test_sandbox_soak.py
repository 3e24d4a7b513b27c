"""Many calls, some hostile: nothing grows. The benchmark itself does 100,000; here are fewer."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rstar2lab.sandbox import detect_level

SCRIPT = Path(__file__).parents[1] / "experiments/benchmarks/sandbox_soak.py"
CALLS = 10_000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_processes_descriptors_and_memory_are_flat(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if detect_level() not in ("L3", "L4"):
            pytest.skip("hostile programs need L3")
    command = [sys.executable, SCRIPT, "--calls", str(CALLS), "--out", tmp_path / "soak.json"]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    report = json.loads((tmp_path / "soak.json").read_text())
    assert sum(report["statuses"].values()) == CALLS
    assert report["tiny_programs_with_a_wrong_result"] == 0
    assert "SERVICE_FAILURE" not in report["statuses"]
    first, last = report["marks"][1], report["marks"][-1]
    assert last["processes"] <= first["processes"] + 1  # a child ahead may just be forked
    assert last["descriptors"] <= first["descriptors"] + 10
    assert last["memory_mb"] < 1.1 * first["memory_mb"] + 5
    assert report["after_close"]["processes"] == 1
