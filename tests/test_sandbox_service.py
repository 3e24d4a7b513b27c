"""The sandbox service: real servers, real HTTP, the request shapes of other trainers' clients."""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config

from rstar2lab import cli, protocol, rollout
from rstar2lab import config as cfg
from rstar2lab import sandbox as sandboxes
from rstar2lab.engines.scripted import ScriptedEngine
from rstar2lab.protocol import render_call
from rstar2lab.rewards import ServiceFailure
from rstar2lab.sandbox import Sandbox, SandboxError
from rstar2lab.sandbox.calls import Call, CallQueue, QueueFull
from rstar2lab.sandbox.client import PaperDispatch, SandboxClient
from rstar2lab.sandbox.server import Service, check_address
from rstar2lab.types import Problem, ToolStatus
from rstar2lab.workbench import Workbench, code_environment


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(port: int, *options: str) -> subprocess.Popen:
    """A server process that answers."""
    words = ("sandbox", "serve", "--port", str(port), "--workers", "3", *options)
    server = subprocess.Popen((sys.executable, "-m", "rstar2lab.cli", *words))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return server
        except httpx.HTTPError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@contextmanager
def running(*options: str):
    port = free_port()
    server = start(port, *options)
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def address():
    with running("--wall-seconds", "2", "--cpu-seconds", "2") as (found, _):
        yield found


@pytest.fixture(scope="module")
def client(address):
    with SandboxClient(address) as found:
        yield found


def post(address: str, path: str, body, **options) -> httpx.Response:
    return httpx.post(address + path, json=body, timeout=60, **options)


# --- code-judge -----------------------------------------------------------------------------------


def test_the_answer_of_run_has_code_judge_s_fields(address):
    body = {"sub_id": "a", "type": "python", "solution": "print(input())", "input": "7"}
    found = post(address, "/run", body).json()
    assert found.pop("cost") > 0
    assert found == {"sub_id": "a", "success": True, "run_success": True, "stdout": "7\n",
                     "stderr": "", "reason": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("solution", "expected", "success", "run_success", "reason"),
    [
        ("print(1)", "1", True, True, ""),
        ("print(' 1 ')", "1\n", True, True, ""),  # both sides are stripped
        ("print(2)", "1", False, True, ""),
        ("1", "1", False, True, ""),  # a script: its last expression is not shown
        ("1/0", "1", False, False, ""),
        ("while True: pass", None, False, False, "worker_timeout"),
        ("import os; os._exit(1)", None, False, False, ""),
        ("print('x' * 1500 + '!')", "x" * 1500 + "!", True, True, ""),  # compared before the cut
    ],
)  # fmt: skip
def test_code_judge_s_verdicts(address, solution, expected, success, run_success, reason):
    body = {"type": "python", "solution": solution, "expected_output": expected}
    found = post(address, "/run", body).json()
    assert (found["success"], found["run_success"]) == (success, run_success)
    assert found["reason"] == reason
    assert len(found["stdout"]) <= 1000
    judged = post(address, "/judge", body).json()
    assert judged.keys() == found.keys() - {"stdout", "stderr"}
    assert judged["success"] is success


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch", "/judge/batch"])
def test_a_batch_is_answered_in_the_order_of_its_submissions(address, path):
    """As a released client sends it: `{type, solution, input}`, slow ones first."""
    programs = [f"import time; time.sleep({0.3 - i / 10}); print({i})" for i in range(4)]
    submissions = [
        {"type": "python", "solution": program, "input": None, "expected_output": str(i)}
        for i, program in enumerate(programs)
    ]
    found = post(address, path, {"type": "batch", "sub_id": "b", "submissions": submissions}).json()
    assert found["sub_id"] == "b"
    assert [r["success"] for r in found["results"]] == [True] * 4


def test_a_program_that_hides_in_base64_and_leaves_by_exit_has_its_error_seen(address):
    """The shape of the released tool program: exec of encoded code, stderr, then os._exit(1)."""
    code = base64.b64encode(b"import math\nprint(math.gcd(12, 18))\nundefined").decode()
    program = (
        "import base64, os, sys, traceback\n"
        f"code = base64.b64decode('{code}').decode()\n"
        "try:\n    exec(code, {})\n"
        "except BaseException as error:\n"
        "    sys.stderr.write(traceback.format_exc())\n    os._exit(1)\n"
    )
    found = post(address, "/run/long-batch", {
        "type": "batch", "submissions": [{"type": "python", "solution": program, "input": None}],
    }).json()["results"][0]  # fmt: skip
    assert found["stdout"] == "6\n" and "NameError: name 'undefined'" in found["stderr"]
    assert found["run_success"] is False and found["reason"] == ""


def test_math_is_verified_and_other_languages_are_told_apart_from_failures(address):
    body = {"type": "math", "solution": "0.5", "expected_output": r"\frac{1}{2}"}
    assert post(address, "/judge", body).json()["success"] is True
    assert post(address, "/judge", body | {"solution": "0.6"}).json()["success"] is False
    found = post(address, "/run", {"type": "cpp", "solution": "int main(){}"}).json()
    assert found["reason"] == "invalid_input" and found["stdout"] is None


@pytest.mark.parametrize("body", [
    {}, [], {"type": "python"}, {"type": "ada", "solution": "x"}, {"solution": 7},
])  # fmt: skip
def test_a_bad_body_is_422(address, body):
    assert post(address, "/run", body).status_code == 422
    assert post(address, "/run/batch", {"submissions": [body]}).status_code == 422
    assert post(address, "/run/batch", {"submissions": []}).status_code == 422


# --- SandboxFusion --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "run_status", "return_code"),
    [("print(6*7)", "Success", "Finished", 0), ("1/0", "Failed", "Finished", 1),
     ("while True: pass", "Failed", "TimeLimitExceeded", None)],
)  # fmt: skip
def test_sandbox_fusion_s_answers(address, code, status, run_status, return_code):
    """As verl sends it: no files, nothing fetched."""
    body = {"compile_timeout": 1, "run_timeout": 1, "code": code, "stdin": None,
            "memory_limit_MB": 1024, "language": "python", "files": {},
            "fetch_files": []}  # fmt: skip
    found = post(address, "/run_code", body).json()
    assert (found["status"], found["run_result"]["status"]) == (status, run_status)
    assert found["run_result"]["return_code"] == return_code
    assert found["compile_result"] is None and found["files"] == {}
    if status == "Success":
        assert found["run_result"]["stdout"] == "42\n"
    assert found["run_result"]["execution_time"] < 1.5


@pytest.mark.parametrize("body", [
    {"code": "x", "language": "rust"}, {"code": "x", "files": {"a": "eA=="}},
])  # fmt: skip
def test_what_sandbox_fusion_can_and_we_cannot_is_an_error_of_the_sandbox(address, body):
    found = post(address, "/run_code", body).json()
    assert found["status"] == "SandboxError" and "not served" in found["message"]
    assert found["run_result"] is None


# --- status ---------------------------------------------------------------------------------------


def test_the_service_says_what_it_is_and_what_it_did(address, client):
    assert httpx.get(f"{address}/ping").json() == httpx.get(f"{address}/v1/ping").json() == "pong"
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    before = httpx.get(f"{address}/metrics").text
    client.run_many(["1", "1/0", "2"])
    status, after = httpx.get(f"{address}/status").json(), httpx.get(f"{address}/metrics").text
    assert status["num_workers"] == 3 and status["queue"] == 0
    assert status["level"] == client.level and status["does_not_stop"]

    def count(text: str, name: str) -> float:
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))

    ended = 'sandbox_ended_calls_total{status="%s"}'
    assert count(after, ended % "OK") - count(before, ended % "OK") == 2
    assert count(after, ended % "ERROR") - count(before, ended % "ERROR") == 1
    assert count(after, "sandbox_accepted_calls_total") - count(
        before, "sandbox_accepted_calls_total"
    ) == 3  # fmt: skip


def test_outside_the_loopback_a_token_is_required(tmp_path):
    for host in ("0.0.0.0", "10.1.2.3", "example.org", "::"):
        with pytest.raises(SandboxError, match="--token-file"):
            check_address(host, None)
        check_address(host, "secret")
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, None)


def test_a_token_is_checked_everywhere_but_at_the_door(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with running("--token-file", str(tmp_path / "token")) as (address, _):
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.get(f"{address}/status").status_code == 401
        assert post(address, "/run", {"solution": "1"}).status_code == 401
        wrong = {"Authorization": "Bearer secre"}
        assert post(address, "/run", {"solution": "1"}, headers=wrong).status_code == 401
        with pytest.raises(SandboxError, match="another token"):
            SandboxClient(address)
        with SandboxClient(address, "secret") as client:
            assert client.run("6*7").stdout == "42\n"


# --- our own client -------------------------------------------------------------------------------


def test_the_client_gives_what_a_local_sandbox_gives(client):
    programs = ["6*7", "print(input())", "1/0", "x = 1;", "import sys; sys.exit(3)", "'é' * 3"]
    programs += ["print('\ud83d')", "print(len('\ud83d'))"]  # as JSON escapes of models may say
    with Sandbox(workers=1) as local:
        for program in programs:
            far, near = client.run(program, "in"), local.run(program, "in")
            assert (far.status, far.stdout, far.stderr) == (near.status, near.stdout, near.stderr)
        far, near = (s.run("6*7", echo=False) for s in (client, local))
        assert far.stdout == near.stdout == ""


def test_shorter_limits_hold_for_one_call(client):
    started = time.monotonic()
    result = client.run("while True: pass", seconds=0.3)
    assert result.status is ToolStatus.TIMEOUT and "0.3 seconds" in result.stderr
    assert time.monotonic() - started < 1.5
    assert client.run("6*7").stdout == "42\n"


def test_results_come_as_they_end_and_not_with_the_slowest(address):
    calls = [{"code": "import time; time.sleep(1)"}, {"code": "1"}, {"code": "2"}]
    seen, started = [], time.monotonic()
    with httpx.stream("POST", f"{address}/v1/calls", json={"calls": calls}, timeout=30) as answer:
        for line in answer.iter_lines():
            seen.append((json.loads(line)["index"], time.monotonic() - started))
    assert {index for index, _ in seen[:2]} == {1, 2} and seen[2][0] == 0
    assert seen[1][1] < 0.8 < seen[2][1]


def test_many_calls_keep_their_order_and_wait_is_told_apart_from_work(client):
    results = client.run_many([f"import time; time.sleep(0.05); {i}" for i in range(60)])
    assert [int(r.stdout) for r in results] == list(range(60))
    assert max(r.queue_seconds for r in results) > 0.5  # 60 × 0.05 s on 3 workers
    assert max(r.seconds for r in results) < 0.5


def test_a_call_with_an_id_is_run_once(address):
    call = {"code": "import uuid; print(uuid.uuid4())", "id": "one"}
    texts = [post(address, "/v1/calls", {"calls": [call]}).text for _ in range(2)]
    assert json.loads(texts[0])["stdout"] == json.loads(texts[1])["stdout"]
    other = post(address, "/v1/calls", {"calls": [call | {"id": "two"}]}).text
    assert json.loads(other)["stdout"] != json.loads(texts[0])["stdout"]


def test_the_paper_s_dispatch_waits_for_the_slowest_of_a_batch_and_loses_nothing(address):
    dispatch = PaperDispatch(senders=2, batch=8, fill_seconds=0.05)
    with SandboxClient(address, dispatch=dispatch) as client:
        results = client.run_many([str(i) for i in range(40)])
        assert [int(r.stdout) for r in results] == list(range(40))
        started = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            quick, slow = pool.map(client.run, ["1", "import time; time.sleep(0.8)"])
        assert quick.status is slow.status is ToolStatus.OK
        assert time.monotonic() - started >= 0.8


def test_answers_are_verified_by_the_service(client):
    assert client.check("0.5", r"\frac{1}{2}").correct
    assert client.check("42", "42").reason == "exact_integer"
    assert not client.check("41", "42").correct


def test_a_rollout_takes_programs_and_answers_to_the_service(address, tokens):
    line = "<reason>x</reason>" + render_call("print(2 + 0.5)") + "<|im_end|>"
    answer = r"<answer>\boxed{5/2}</answer><|im_end|>"
    with code_environment(cfg.SandboxLimits(address=address)) as services:
        assert isinstance(services, SandboxClient)
        engine = ScriptedEngine(lambda request_id: [tokens.encode(line), tokens.encode(answer)])
        chat = protocol.chat_format("nano", tools=True, response_chars=60)
        actors = rollout.Actors(engine, services, tokens, chat, services.check)
        limits = rollout.RolloutSettings(5, 1, 400, 1.0, 1.0, "0/test")
        before = httpx.get(f"{address}/status").json()["accepted"]
        problems = [Problem("p", "?", "2.5"), Problem("q", "?", "2.6")]
        groups = asyncio.run(rollout.rollout_groups(problems, 3, actors, limits))
        assert httpx.get(f"{address}/status").json()["accepted"] - before == 6
    found = [[(t.reward, t.reason, t.turns[0].result.stdout) for t in g.trajectories]
             for g in groups]  # fmt: skip
    assert found == [[(1.0, "equal", "2.5\n")] * 3, [(0.0, "mismatch", "2.5\n")] * 3]


def test_the_isolation_that_counts_is_that_of_the_service(address, capsys, monkeypatch):
    monkeypatch.setattr(sandboxes, "detect_level", lambda: pytest.fail("this machine was asked"))
    level = httpx.get(f"{address}/status").json()["level"]
    cli.check_isolation(level, cfg.SandboxLimits(address=address))
    assert level in "".join(capsys.readouterr())
    with pytest.raises(SandboxError, match="no sandbox service answers"):
        nobody = f"http://127.0.0.1:{free_port()}"
        cli.check_isolation(None, cfg.SandboxLimits(address=nobody))


def test_no_service_is_a_clear_error_and_a_lost_one_never_a_program_s_error():
    with pytest.raises(SandboxError, match="rstar2lab sandbox serve"):
        SandboxClient(f"http://127.0.0.1:{free_port()}")
    with running() as (address, server):
        with SandboxClient(address, attempts=2, pause_seconds=0.01) as client:
            server.kill()
            server.wait()
            result = client.run("6*7")
            assert result.status is ToolStatus.SERVICE_FAILURE and "2 attempts" in result.stderr
            with pytest.raises(ServiceFailure):
                client.check("0.5", "1/2")
            assert (client.retries, client.failures) == (1, 1)


# --- ends -----------------------------------------------------------------------------------------


def test_sigterm_answers_what_was_accepted_and_nothing_is_left():
    with running() as (address, server), SandboxClient(address, attempts=1) as client:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(client.run_many, ["import time; time.sleep(0.2); 7"] * 12)
            time.sleep(0.4)
            server.send_signal(signal.SIGTERM)
            results = found.result(30)
        assert Counter(r.status for r in results) == {ToolStatus.OK: 12}
        assert server.wait(20) is not None


def workers_of(pid: int) -> list[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_often(pid: int, until: threading.Event, seconds: float) -> int:
    """SIGKILL one process below `pid` after another; how many."""
    count = 0
    while not until.wait(seconds):
        for worker in workers_of(pid)[-1:]:
            try:
                os.kill(worker, signal.SIGKILL)
                count += 1
            except ProcessLookupError:
                pass
    return count


@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_killed_workers_lose_no_call(calls):
    """Every call ends in one typed result; a killed program is an error or a service failure."""
    with running() as (address, server), SandboxClient(address) as client:
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            killer = pool.submit(kill_often, server.pid, over, 0.1)
            results = client.run_many([f"print({i})" for i in range(calls)])
            over.set()
        assert killer.result() > 0
        assert len(results) == calls
        ended = Counter(r.status for r in results)
        assert ended[ToolStatus.OK] >= 0.9 * calls
        assert ended.keys() <= {ToolStatus.OK, ToolStatus.ERROR, ToolStatus.SERVICE_FAILURE}
        for number, result in enumerate(results):
            assert result.status is not ToolStatus.OK or result.stdout == f"{number}\n"


@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_killed_server_that_comes_back_answers_every_call(calls):
    port = free_port()
    server = start(port)
    try:
        with SandboxClient(f"http://127.0.0.1:{port}", attempts=8, pause_seconds=0.5) as client:
            with ThreadPoolExecutor(1) as pool:
                slow = "import time; time.sleep(0.02)"  # some are still to come at the kill
                found = pool.submit(client.run_many, [f"{slow}; print({i})" for i in range(calls)])
                time.sleep(0.5)
                server.kill()
                server.wait()
                server = start(port)
                results = found.result(300)
            assert [r.stdout for r in results] == [f"{i}\n" for i in range(calls)]
            assert client.retries > 0 and client.failures == 0
    finally:
        server.kill()
        server.wait()


# --- the queue ------------------------------------------------------------------------------------


def test_the_queue_is_bounded_in_calls_and_bytes_and_counts_what_it_refuses():
    async def main(sandbox):
        queue = CallQueue(sandbox, most_calls=3, most_bytes=1000)
        futures = queue.submit([Call("1"), Call("2")])
        with pytest.raises(QueueFull, match="holds 2 waiting calls"):
            queue.submit([Call("3")] * 2)  # all or none
        with pytest.raises(ValueError, match="send them in parts"):
            queue.submit([Call("3")] * 4)
        futures += queue.submit([Call("3")])
        queue.start()
        assert [(await f).result.stdout for f in futures] == ["1\n", "2\n", "3\n"]
        with pytest.raises(ValueError, match="1001 bytes"):
            queue.submit([Call("#" * 1001)])
        assert (queue.counters.accepted, queue.counters.refused) == (3, 2)
        await queue.drain()
        assert queue.held_bytes == 0
        with pytest.raises(QueueFull, match="is ending"):
            queue.submit([Call("1")])

    with Sandbox(workers=1) as sandbox:
        asyncio.run(main(sandbox))


def test_a_call_that_waited_too_long_is_not_run_and_nor_is_one_whose_caller_has_gone():
    async def main(sandbox):
        queue = CallQueue(sandbox)
        slow = Call("import time; time.sleep(0.4)")
        calls = [slow, Call("1", queue_seconds=0.1), Call("2"), Call("3", id="three")]
        futures = queue.submit(calls)
        queue.start()
        queue.abandon(calls[1:], futures[1:])
        queue.abandon(calls[2:], futures[2:])
        more = queue.submit([Call("4", queue_seconds=0.1)])
        ended = [await f for f in futures + more]
        assert [e.was_run for e in ended] == [True, False, False, True, False]
        assert ended[4].result.status is ToolStatus.SERVICE_FAILURE
        assert "waited longer than 0.1 s" in ended[4].result.stderr
        assert ended[4].result.queue_seconds > 0.3
        assert queue.counters.not_run == {"abandoned": 2, "overdue": 1}
        assert queue.counters.statuses == {"OK": 2}  # an id can be asked for again
        await queue.drain()
        assert queue.held_bytes == 0

    with Sandbox(workers=1) as sandbox:
        asyncio.run(main(sandbox))


def test_results_are_kept_for_those_who_ask_again_within_a_bound():
    async def main(sandbox):
        queue = CallQueue(sandbox, most_kept_chars=2500)
        queue.start()
        calls = [Call(f"print('{i}' * 999)", id=str(i)) for i in range(3)]
        first = [await f for f in queue.submit(calls)]
        again = [await f for f in queue.submit(calls[::-1])]
        await queue.drain()
        assert [e.result.stdout for e in again[::-1]] == [e.result.stdout for e in first]
        assert (queue.counters.accepted, queue.counters.repeated) == (4, 2)  # "0" had gone

    with Sandbox(workers=1) as sandbox:
        asyncio.run(main(sandbox))


def test_a_service_that_is_full_is_waited_for():
    """Back-pressure: a refused call is sent again until it fits; it is nobody's failure."""

    async def main(sandbox):
        service = Service(CallQueue(sandbox, most_calls=8))
        server = uvicorn.Server(uvicorn.Config(service, port=port, log_level="warning"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        results = await asyncio.to_thread(calls, f"http://127.0.0.1:{port}")
        server.should_exit = True
        await task
        return results, service.queue.counters

    def calls(address):
        parts = [[f"import time; time.sleep(0.1); {i}" for i in range(k, k + 6)] for k in (0, 6)]
        with SandboxClient(address) as client, ThreadPoolExecutor(2) as pool:
            assert "send them in parts" in client.run_many(["1"] * 9)[0].stderr
            assert client.retries == 0
            with SandboxClient(address) as other:
                found = pool.map(SandboxClient.run_many, (client, other), parts)
                return [result for part in found for result in part]

    port = free_port()
    with Sandbox(workers=1) as sandbox:
        results, counters = asyncio.run(main(sandbox))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(12)], results
    assert counters.refused > 0 and counters.accepted == 12


def test_a_program_whose_caller_hung_up_is_not_started():
    """A trainer's client that gives up and asks again must not find the queue full of its past."""
    with running() as (address, _):
        batch = [{"type": "python", "solution": "import time; time.sleep(0.3)"}] * 60
        body = {"type": "batch", "submissions": batch}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/run/long-batch", json=body, timeout=0.5)
        assert post(address, "/run", {"solution": "1"}).json()["success"]
        text = httpx.get(f"{address}/metrics").text
        (line,) = [x for x in text.splitlines() if x.startswith("sandbox_not_run_calls_total{")]
        assert line.startswith('sandbox_not_run_calls_total{reason="abandoned"}')
        assert float(line.split()[1]) >= 40  # 3 workers, half a second


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_45_000_calls_at_once_are_all_answered_in_order_within_bounded_memory():
    """The paper's calls of one training step (§3.1), all accepted before the first is missed."""
    work = "import time; time.sleep(0.01)"
    with running("--workers", "8") as (address, server), SandboxClient(address) as client:
        before, most = resident_mb(server.pid), 0
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(client.run_many, [f"{work}\n{i}" for i in range(45_000)])
            while not found.done():
                status = httpx.get(f"{address}/status", timeout=60).json()
                most = max(most, status["queue"])
                time.sleep(0.1)
        results = found.result()
        after = resident_mb(server.pid)
    assert [int(r.stdout.split()[-1]) for r in results] == list(range(45_000))
    assert status["accepted"] == 45_000 and status["refused"] == 0
    assert most > 40_000
    assert after - before < 400, f"{before:.0f} MB before, {after:.0f} MB after"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_benchmark_runs_and_finds_ours_faster_and_right(tmp_path):
    script = Path(__file__).parents[1] / "experiments" / "benchmarks" / "sandbox.py"
    words = [sys.executable, script, "--count", "40", "--rounds", "2", "--out", tmp_path / "b.json"]
    subprocess.run(words, check=True)
    report = json.loads((tmp_path / "b.json").read_text())
    for mix, rows in report["mixes"].items():
        assert [len(rows[name]) for name in ("ours", "peer")] == [2, 2]
        assert not any(row["correct_reported_failed"] for row in rows["ours"]), mix
        assert min(row["correct"] for row in rows["ours"]) >= 28
    assert report["ratio_median_min_max"]["tiny, batches"][0] > 2
    assert report["ratio_median_min_max"]["no loops"][0] > 4


# --- nonsense -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("code", "solution", "calls", "submissions", "type", "stdin", "input", "seconds", "pairs")
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5)
PATHS = ("/run", "/run/batch", "/judge/long-batch", "/run_code", "/v1/calls", "/v1/verify")


@pytest.mark.parametrize(("path", "content", "status"), [
    ("/run", '{"solution": NaN}', 422),
    ("/run", '{"solution": ["\\ud800"]}', 422),
    ("/run", '{"solution": "1", "sub_id": "\\ud800", "options": {"a": NaN}}', 200),
    ("/run", "[" * 100_000, 422),
    ("/run", '{"solution": %s}' % ("9" * 5000), 422),
    ("/run", "", 422),
    ("/run", '{"type": "math", "solution": "1", "expected_output": ""}', 200),
    ("/v1/verify", '{"pairs": [["1", ""]]}', 422),
    ("/v1/calls", '{"calls": [{"code": "1", "seconds": 1e999}]}', 422),
])  # fmt: skip
def test_bodies_that_have_felled_servers(address, path, content, status):
    answer = httpx.post(address + path, content=content, timeout=60)
    assert answer.status_code == status, answer.text
    answer.json()


def test_a_path_or_a_method_that_is_not_there_is_told(address):
    assert httpx.get(f"{address}/runs").status_code == 404
    assert httpx.get(f"{address}/run").status_code == 405


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=BODIES, raw=st.none() | st.binary(max_size=60))
def test_no_body_makes_the_service_fail(address, path, body, raw):
    content = raw if raw is not None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(address + path, content=content, headers=headers, timeout=60)
    assert answer.status_code in (200, 400, 422), answer.text


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(code=st.text(max_size=60), stdin=st.text(max_size=20))
def test_no_program_ends_without_a_type(client, code, stdin):
    assert client.run(code, stdin, seconds=1).status in set(ToolStatus) - {
        ToolStatus.SERVICE_FAILURE
    }


def test_a_workbench_rolls_out_against_a_service(address, cold_model):
    """Same seeds, same model: the programs' results do not depend on where they run."""
    found = []
    for where in ("", address):
        config = tiny_config(sandbox__address=where)
        with Workbench(config, cold_model) as bench:
            groups = bench.rollout(bench.train_problems[:2], 3, "key")
            found.append([
                (t.response_ids.tolist(), t.reward, [r.stdout for _, r in t.outcomes])
                for g in groups for t in g.trajectories
            ])  # fmt: skip
    assert found[0] == found[1]
    assert any(outcomes for *_, outcomes in found[0])
