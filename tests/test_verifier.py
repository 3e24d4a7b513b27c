r"""math-verify in processes: deadlines, threads, deaths; then its verdicts, pinned."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rstar2lab import rewards, verifier
from rstar2lab.rewards import ServiceFailure, Verdict

TOWER = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    verifier.close()


@pytest.fixture(scope="module")
def impatient():
    with verifier.Verifier(workers=2, deadline_seconds=1.0) as pool:
        yield pool


# --- processes -----------------------------------------------------------------------------------


def check_together(pool, pairs) -> list[Verdict]:
    """Ask for all pairs at once, from threads."""
    with ThreadPoolExecutor(len(pairs)) as threads:
        return list(threads.map(lambda pair: pool.check(*pair), pairs))


def test_a_hanging_answer_costs_its_deadline_and_the_next_call_answers(impatient):
    impatient.check("0.5", r"\frac12")  # the start of the process is not part of the deadline
    started = time.perf_counter()
    assert impatient.check(TOWER, r"\frac12") == Verdict(False, "verify_timeout")
    assert 0.9 < time.perf_counter() - started < 2.5
    assert impatient.check("0.5", r"\frac12") == Verdict(True, "equal")


def test_a_hanging_answer_does_not_hold_up_the_others(impatient):
    pairs = [(TOWER, r"\frac12"), *[(f"{i}.50", rf"\frac{{{2 * i + 1}}}{{2}}") for i in range(8)]]
    verdicts = check_together(impatient, pairs)
    assert verdicts[0].reason == "verify_timeout"
    assert all(verdict == Verdict(True, "equal") for verdict in verdicts[1:])


def test_any_thread_may_ask():
    found = {}

    def ask(i):
        found[i] = rewards.verify(f"{i}/7", rf"\frac{{{i}}}{{7}}").correct

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(1, 7), True)


def test_a_running_event_loop_may_ask_inline_or_from_a_thread():
    """No alarm signal is involved, so neither the loop nor a thread of it is in the way."""
    verifier.check("0.5", r"\frac12")

    async def ask():
        other = asyncio.to_thread(rewards.verify, "1/3", r"\frac13")
        inline = rewards.verify("0.5", r"\frac12")
        return inline.reason, (await other).reason

    assert asyncio.run(ask()) == ("equal", "equal")


@pytest.mark.parametrize("absurd", [TOWER, "1000000!", r"10^{10^{10}}"])
def test_absurd_numbers_end_by_the_deadline_off_the_main_thread(impatient, absurd):
    impatient.check("0.5", r"\frac12")
    with ThreadPoolExecutor(1) as threads:
        started = time.perf_counter()
        verdict = threads.submit(impatient.check, absurd, r"\frac12").result()
        assert time.perf_counter() - started < 2.5
        assert not verdict.correct
        assert threads.submit(impatient.check, "0.5", r"\frac12").result().correct


def test_killed_workers_are_replaced():
    with verifier.Verifier(workers=2) as pool:
        check_together(pool, [("0.5", r"\frac12")] * 4)
        workers = list(pool._idle.queue)
        for worker in workers:
            os.kill(worker.process.pid, 9)
        assert pool.check("0.5", r"\frac12").correct
        workers[0].process.wait()


def test_a_checker_that_cannot_start_is_a_service_failure(monkeypatch):
    monkeypatch.setattr(verifier, "_PROGRAM", "raise SystemExit(3)")
    with verifier.Verifier() as pool, pytest.raises(ServiceFailure, match="exit code 3"):
        pool.check("0.5", r"\frac12")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with verifier.Verifier() as pool, pytest.raises(ServiceFailure, match="did not start"):
        pool.check("0.5", r"\frac12")


def test_a_checker_that_dies_on_an_answer_is_a_service_failure(monkeypatch):
    program = (
        "import sys, os; from multiprocessing.connection import Connection; "
        "c = Connection(int(sys.argv[1])); c.send(''); c.recv(); os._exit(7)"
    )
    monkeypatch.setattr(verifier, "_PROGRAM", program)
    with verifier.Verifier() as pool, pytest.raises(ServiceFailure, match="died twice"):
        pool.check("0.5", r"\frac12")


def test_a_closed_pool_says_so_and_leaves_no_process():
    pool = verifier.Verifier(workers=1)
    pool.check("0.5", r"\frac12")
    process = pool._idle.queue[0].process
    pool.close()
    pool.close()
    assert process.returncode is not None
    with pytest.raises(ServiceFailure, match="closed"):
        pool.check("0.5", r"\frac12")


def test_the_shared_pool_starts_again_after_close():
    assert verifier.check("0.5", r"\frac12").correct
    verifier.close()
    assert verifier.check("0.5", r"\frac12").correct


def test_bad_pool_arguments_are_refused():
    for named in ({"workers": 0}, {"deadline_seconds": 0}):
        with pytest.raises(ValueError, match="expected workers"):
            verifier.Verifier(**named)


def test_a_script_without_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(r"""
        import sys
        import rstar2lab.rewards as rewards
        print("started", "torch" in sys.modules)
        print(rewards.verify("0.5", r"\frac12").correct)
        """)
    )
    root = os.path.dirname(os.path.dirname(verifier.__file__))
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        timeout=120,
    )
    assert done.stdout.split() == ["started", "False", "True"], done.stderr


# --- verdicts ------------------------------------------------------------------------------------

RIGHT = [
    (r"2\pi", r"2\pi "),  # A2
    (r"(1, \frac{9}{2})", r"(1,\frac92)"),  # A3
    ("3x-y+13=0", "6x-2y+26=0"),
    ("45", "45\u00b0"),  # A13
    ("45", r"45^\circ"),
    ("5e3", "5000"),  # A14
    ("0.00001", "1e-05"),
    ("Yes", r"\text{Yes}"),  # A15
    (r"\text{Yes}", "yes"),
    ("73", "Final Answer: **73**"),  # A18
    ("25", r"x \approx 25"),
    ("25", "25.0"),
    (r"\frac{7}{2}", r"3\frac{1}{2}"),
    ("-\\frac12", "\u22120.5"),
    (r"\{1,2,3\}", r"\{3,1,2\}"),
    (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}"),
    (r"\left[0,1\right)", "[0,1)"),
    ("1101_2", "13_{10}"),
    ("x^2+1", "1+x^2"),
    ("ab", "ba"),
    (r"\sqrt{50}", r"5\sqrt{2}"),
    ("x>2", r"(2,\infty)"),
    (r"m \geq \sqrt{2}", r"m \in [\sqrt2,\infty)"),  # A16: this order only
    ("0.5", r"\frac12"),
    ("9" * 5000, "9" * 5000 + "+0"),
]
WRONG = [
    (r"2\pi", "2"),  # A1
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),  # A5
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),  # A6
    (r"1,2,\ldots,n", r"1,3,5,\ldots,2n-1"),  # A7
    (r"1,2,\ldots,10", "1,2,10"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),  # A8
    ("7", r"5 \to 7"),  # A12
    ("33.3", r"\frac{100}{3}"),  # A17
    ("2021", r"\pm 2021"),
    ("(2,1)", "(3,1)"),  # both are empty intervals
    ("(1,2)", "(2,1)"),
    ("(0,1)", "[0,1]"),
    ("ABC", "CAB"),  # the same product
    ("1101_2", "1101_3"),
    (r"\text{Yes}", r"\text{No}"),
    ("2^{100}", "2^{100}+1"),
    ("3", "3, 4"),
    ("5", r"\sin(x)"),
]
POLICY = [  # decided, not obvious
    ("12", r"12\%", True),  # A10
    (r"\frac12", r"50\%", True),
    ("1101_2", "1101", True),  # A11
    ("(1,2)", "1,2", True),  # A9
    ("3", "x=3", True),
    ("A", "a", True),
    (r"m \in [\sqrt2,\infty)", r"m \geq \sqrt{2}", False),  # A16, the other order
    (r"[0,1]", r"0 \le x \le 1", False),  # as A16: an inequality is read as a set of the gold only
    ("33.3", "33.3000004", True),  # rounding counts from the 6th decimal
    ("33.3", "33.30001", False),
]


@pytest.mark.parametrize(("gold", "prediction"), RIGHT)
def test_right_answers_are_accepted(gold, prediction):
    verdict = rewards.verify(prediction, gold)
    assert verdict.correct and verdict.reason in ("equal", "exact_integer")


@pytest.mark.parametrize(("gold", "prediction"), WRONG)
def test_wrong_answers_are_refused(gold, prediction):
    verdict = rewards.verify(prediction, gold)
    assert not verdict.correct and verdict.reason in ("mismatch", "parse_failure")


@pytest.mark.parametrize(("gold", "prediction", "correct"), POLICY)
def test_policy_cases_stay_as_decided(gold, prediction, correct):
    assert rewards.verify(prediction, gold).correct is correct


@pytest.mark.parametrize("prediction", [r"\frac{5}", "}{", "$", "+0" * 3000])
def test_unreadable_answers_are_parse_failures(prediction):
    assert rewards.verify(prediction, "5") == Verdict(False, "parse_failure")


def test_a_whole_response_is_scored_through_the_checker():
    text = r"<reason>…</reason><answer>So \boxed{\dfrac{1}{2}}.</answer>"
    assert rewards.answer_reward(text, "0.5") == Verdict(True, "equal")
