"""The doctor: what works here, what a fault looks like, what an optional package needs."""

import pytest

from rstar2lab import doctor, extras


@pytest.fixture(scope="module")
def found():
    return {check.name: check for check in doctor.examine()}


def test_this_machine_can_train(found):
    assert set(found) == set(doctor.CHECKS)
    assert not [check for check in found.values() if check.verdict == "FAIL"]
    assert "level L" in found["sandbox"].found and "calls/s" in found["sandbox"].found
    assert "max |Δ log-prob|" in found["engine"].found


def test_engine_and_transformers_agree_for_every_seed():
    assert all(doctor.engine_gap(seed) < 1e-4 for seed in (1, 2))


def test_a_check_that_raises_is_a_finding_and_the_others_still_run(monkeypatch):
    def broken():
        raise RuntimeError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken, "second": lambda: ("ok", "fine")})
    first, second = doctor.examine()
    assert first == doctor.Check("first", "FAIL", "RuntimeError: no such device")
    assert second == doctor.Check("second", "ok", "fine")


def test_a_missing_optional_package_is_a_note_with_its_extra_and_no_failure(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    for package, extra in (("vllm", "[vllm]"), ("ray", "[cluster]")):
        verdict, text = doctor.CHECKS[f"{package} (optional)"]()
        assert verdict == "note" and extra in text


def test_a_sandbox_that_misjudges_programs_fails_the_check(monkeypatch):
    from rstar2lab import sandbox
    from rstar2lab.types import ToolResult, ToolStatus

    monkeypatch.setattr(
        sandbox.Sandbox, "run_many", lambda self, programs: [ToolResult(ToolStatus.OK)] * 40
    )
    verdict, text = doctor.CHECKS["sandbox"]()
    assert verdict == "FAIL" and "ended as ['OK', 'OK']" in text
