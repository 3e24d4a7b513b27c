"""The dispatcher over real engines: same samples, losses, cancellations; nothing leaks or hangs.

All on a clock that jumps, where a deadlock is an error at once.
"""

import asyncio
import gc

import numpy as np
import pytest
from tiny import less_uniform
from token_engine import TokenEngine

from rstar2lab import config as cfg
from rstar2lab import scheduler
from rstar2lab.engines import EngineError, EngineLost, Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.nano import model
from rstar2lab.scheduler import (
    CostModel,
    EnginePool,
    Shape,
    TrajSpec,
    Workload,
    make_policy,
    save_events,
    simulate,
)
from rstar2lab.scheduler.clock import run_virtually
from rstar2lab.scheduler.dispatcher import Dispatcher, Limits

POLICIES = list(scheduler.POLICIES)
DISTINCT = ["static_sync", "reserve", "survival_yield"]  # with a barrier, a queue, moves
VOCABULARY, LONGEST = 40, 128
SETTINGS = cfg.Model(layers=2, width=48, heads=3, kv_heads=1, mlp_width=64, max_tokens=LONGEST)
ONE_SECOND = CostModel("one second", False, "made up", 0.5, 0.5, 0.0, 0.0, 0.0, 0.0)
WORK = Workload.synthetic(
    4, 4, mean_tokens=30, cap=48, seed=2, calls=1.5,
    shape=Shape(prompt_tokens=12, max_turns=3, tool_tokens=4, tool_seconds=3.3, slow_share=0.0),
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net():
    return less_uniform(model.build(SETTINGS, VOCABULARY, 0).eval())


class Clocked(TorchEngine):
    """A torch engine on which a step takes one second of the loop's clock, and can go wrong.

    fails_at: the time of the step at which it raises, or hangs for ever.
    """

    fails_at, hangs, ready = float("inf"), False, 0.0

    async def _take_step(self):
        now = asyncio.get_running_loop().time()
        if now >= self.fails_at:
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            raise RuntimeError("out of memory")
        await super()._take_step()
        self.ready = now + 1
        await asyncio.sleep(1)

    async def generate(self, request_id, token_ids, sampling):
        completion = await super().generate(request_id, token_ids, sampling)
        await asyncio.sleep(max(0, self.ready - asyncio.get_running_loop().time()))
        return completion


KV = {"kv_tokens": 240, "max_tokens": LONGEST, "max_sequences": 16}


def engine(net, kv_tokens=KV["kv_tokens"]) -> Clocked:
    return Clocked(net.config, net.state_dict(), **KV | {"kv_tokens": kv_tokens})


def dispatcher(engines, policy="survival_move", **more) -> Dispatcher:
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    names = engines if isinstance(engines, dict) else {f"e{i}": e for i, e in enumerate(engines)}
    return Dispatcher(names, chosen, limits=Limits(16, LONGEST, stall_seconds=20), **more)


async def rollout(trace, number: int, target: Dispatcher) -> list[int]:
    """All tokens of a trajectory, its tools' included."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(VOCABULARY, size=trace.prompt_tokens).tolist()
    try:
        for place, turn in enumerate(trace.turns):
            found = await target.generate(trace.id, tokens, Sampling(turn.tokens, seed=number))
            tokens += found.token_ids.tolist()
            if place + 1 < len(trace.turns):
                await target.deliver(asyncio.sleep(turn.tool_seconds))
                tokens += rng.integers(VOCABULARY, size=turn.tool_tokens).tolist()
    finally:
        await target.abort(trace.id)
    return tokens


def run(target: Dispatcher, beside=None, work=WORK) -> list:
    """Every trajectory's tokens or error, with `beside(tasks)` going on at the same time."""

    complaints = []

    async def everything():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        target.announce([trace.spec for trace in work.trajectories])
        tasks = [
            asyncio.ensure_future(rollout(trace, number, target))
            for number, trace in enumerate(work.trajectories)
        ]
        trouble = asyncio.ensure_future(beside(tasks)) if beside else None
        found = await asyncio.gather(*tasks, return_exceptions=True)
        if trouble is not None:
            await trouble
        for _ in range(20):
            await asyncio.sleep(0)
        names = {task.get_coro().__name__ for task in asyncio.all_tasks()}
        assert names <= {"everything", "in_time", "_serve", "serve"}, "tasks are left behind"
        return found

    async def in_time():
        return await asyncio.wait_for(everything(), 100_000)

    found = run_virtually(in_time())
    assert not complaints
    return found


def assert_all_given_back(target: Dispatcher, work=WORK) -> None:
    """Every trajectory has ended once, nobody holds a seat, a reservation, a row or a prefix."""
    ended = [event.traj for event in target.events if event.kind == "finish"]
    assert sorted(ended) == sorted(trace.id for trace in work.trajectories)
    assert not target.policy.seats and not target.policy.queue
    assert not any(target.policy.ledger().values())
    assert target.load().running == target.load().waiting == 0
    assert not any(e._saved for e in target._engines.values() if isinstance(e, TorchEngine))


@pytest.fixture(scope="module")
def alone(net):
    """What one engine with room for all samples."""
    return run(dispatcher([engine(net, 1 << 14)], "least"))


# -- the same samples


@pytest.mark.parametrize("policy", POLICIES)
def test_many_engines_sample_what_one_samples(net, alone, policy):
    target = dispatcher([engine(net), engine(net), engine(net)], policy)
    assert run(target) == alone
    assert_all_given_back(target)
    starts = {e.traj: e.engine for e in target.events if e.kind == "start"}
    assert len(set(starts.values())) > 1
    assert target.counts["success"] + target.counts["length"] == len(alone)
    rows = [e for e in target.events if e.kind in ("start", "turn", "preempt")]
    assert rows and all(row.ledger >= row.gauge for row in rows)


def test_a_first_request_speaks_for_itself(net):
    target = dispatcher([engine(net)])

    async def ask():
        await target.generate("p7/3", [1, 2, 3], Sampling(5, seed=1))
        seat = target.policy.seats["p7/3"]
        await target.abort("p7/3")
        return seat.spec

    assert run_virtually(ask()) == TrajSpec("p7/3", "p7", 3, 5)


# -- losses


@pytest.mark.parametrize("how", ["closed", "raises", "hangs"])
@pytest.mark.parametrize("policy", DISTINCT)
def test_an_engine_lost_in_mid_step_costs_no_trajectory(net, alone, policy, how):
    engines = [engine(net), engine(net), engine(net)]
    if how != "closed":
        engines[1].fails_at, engines[1].hangs = 7.5, how == "hangs"

    async def pull(tasks):
        await asyncio.sleep(7.5)  # half of a step
        assert engines[1].load().running
        if how == "closed":
            engines[1].close()

    target = dispatcher(engines, policy)
    assert run(target, pull) == alone
    assert_all_given_back(target)
    assert target.counts["engines_lost"] == 1 and set(target.policy.desks) == {"e0", "e2"}
    lost = [e for e in target.events if e.kind == "lost"]
    assert len(lost) == target.counts["restarts"] > 0
    late = [e.engine for e in target.events if e.kind == "start" and e.time > lost[0].time]
    assert "e1" not in late
    if how == "hangs":
        assert lost[0].time > 20 and "no token for" in lost[0].reason


class Departing(Clocked):
    """It is lost between its first answer and the moment at which somebody looks at it."""

    leave = None

    async def generate(self, request_id, token_ids, sampling):
        completion = await super().generate(request_id, token_ids, sampling)
        if self.leave is not None:
            asyncio.get_running_loop().call_soon(self.leave)
            self.leave = None
        return completion


@pytest.mark.parametrize("policy", DISTINCT)
def test_an_answer_that_comes_as_its_engine_is_lost_is_sampled_again(net, alone, policy):
    """The policy has sent the trajectory elsewhere, and waits for that."""
    engines = [Departing(net.config, net.state_dict(), **KV), engine(net)]
    target = dispatcher(engines, policy)
    engines[0].leave = lambda: target.engine_down("e0", "pulled")
    assert run(target) == alone
    assert_all_given_back(target)
    assert set(target._engines) == {"e1"}


def test_an_engine_that_joins_again_takes_its_part(net, alone):
    engines = {"e0": engine(net), "e1": engine(net)}

    async def pull_and_plug(tasks):
        await asyncio.sleep(5.5)
        engines["e1"].close()
        await asyncio.sleep(10)
        with pytest.raises(EngineError, match="is up already"):
            target.engine_up("e0", engine(net))
        target.engine_up("e1", engine(net))

    target = dispatcher(engines, "reserve")
    assert run(target, pull_and_plug) == alone
    assert_all_given_back(target)
    again = [e for e in target.events if e.kind == "start" and e.engine == "e1" and e.time > 15]
    assert again


@pytest.mark.parametrize("policy", DISTINCT)
def test_when_no_engine_is_left_everyone_hears_of_it(net, policy):
    engines = [engine(net), engine(net)]

    async def pull(tasks):
        for lost in engines:
            await asyncio.sleep(4.5)
            lost.close()

    target = dispatcher(engines, policy)
    found = run(target, pull)
    assert all(isinstance(error, EngineLost) for error in found)
    assert "no engine is left; add one" in str(found[0])
    assert not target.policy.seats and not target.policy.queue


def test_a_trajectory_under_which_engine_after_engine_dies_is_given_up(net):
    engines = [engine(net) for _ in range(5)]
    for number, one in enumerate(engines):
        one.fails_at = number  # whoever takes it, dies
    target = dispatcher(engines, "least")
    work = Workload(WORK.trajectories[:1])
    (error,) = run(target, work=work)
    assert isinstance(error, EngineLost) and "has lost 3 engines; giving up" in str(error)
    assert_all_given_back(target, work)
    assert len(target._engines) == 2


# -- cancellations and errors


@pytest.mark.parametrize("seconds", [0.0, 0.5, 14.5, 30.0])
@pytest.mark.parametrize("policy", DISTINCT)
def test_whoever_is_cancelled_gives_everything_back(net, alone, policy, seconds):
    """Queued, sampling, before a barrier or in a tool: a third of all, at once."""
    target = dispatcher([engine(net), engine(net)], policy)

    async def cancel(tasks):
        await asyncio.sleep(seconds)
        for task in tasks[::3]:
            task.cancel()

    found = run(target, cancel)
    for number, (tokens, expected) in enumerate(zip(found, alone, strict=True)):
        was_cancelled = isinstance(tokens, asyncio.CancelledError)
        assert was_cancelled or tokens == expected
        assert not was_cancelled or number % 3 == 0
    assert sum(isinstance(tokens, asyncio.CancelledError) for tokens in found) > 0
    assert_all_given_back(target)
    assert target.counts["cancel"] > 0


def test_room_that_is_given_back_goes_to_the_next_in_line_at_once(net):
    """One trajectory at a time, first come first served."""
    work = Workload(WORK.trajectories[:3])
    need = max(t.spec.blocks(16) for t in work.trajectories) * 16
    target = dispatcher([engine(net, need)], "reserve")

    async def cancel(tasks):
        await asyncio.sleep(2.5)
        tasks[0].cancel()

    run(target, cancel, work)
    assert_all_given_back(target, work)
    first = {}
    for event in target.events:
        if event.kind in ("start", "finish"):
            first.setdefault((event.kind, event.traj), event.time)
    names = [trace.id for trace in work.trajectories]
    assert first["start", names[1]] == first["finish", names[0]] == 2.5
    assert first["start", names[2]] == first["finish", names[1]]


def test_a_start_that_nobody_waits_for_any_more_is_no_error(net):
    """Its engine is lost, and its client is cancelled in the same moment."""
    target, complaints = dispatcher([engine(net, 112), engine(net, 112)], "reserve"), []

    async def everything():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        rollouts = enumerate(WORK.trajectories[:2])
        tasks = [asyncio.ensure_future(rollout(trace, n, target)) for n, trace in rollouts]
        await asyncio.sleep(2.5)
        lost = next(iter(target.policy.desks["e0"].residents))
        target.engine_down("e0", "pulled")
        assert not target._trips[lost].gate.done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gc.collect()

    run_virtually(everything())
    assert not complaints and not target.policy.seats


def test_a_client_that_fails_between_two_turns_gives_everything_back(net):
    target = dispatcher([engine(net), engine(net)], "reserve")

    async def fail():
        raise OSError("the sandbox is gone")

    async def client(number):
        trace = WORK.trajectories[number]
        try:
            await target.generate(trace.id, [1, 2, 3], Sampling(4, seed=number))
            await target.deliver(fail())
        finally:
            await target.abort(trace.id)

    async def everything():
        clients = (client(number) for number in range(6))
        return await asyncio.gather(*clients, return_exceptions=True)

    assert {type(error) for error in run_virtually(everything())} == {OSError}
    assert not target.policy.seats and not any(target.policy.ledger().values())


def test_a_request_that_fits_nowhere_is_refused_and_the_others_go_on(net, alone):
    target = dispatcher([engine(net, 64), engine(net, 64)], "least")
    found = run(target)
    assert {type(x) for x in found} == {EngineError, list}
    for trace, tokens, expected in zip(WORK.trajectories, found, alone, strict=True):
        if isinstance(tokens, EngineError):
            assert trace.spec.blocks(16) > 4 and "lower max_tokens" in str(tokens)
        else:
            assert tokens == expected
    assert_all_given_back(target)


@pytest.mark.parametrize("policy", DISTINCT)
def test_closing_wakes_whoever_waits(net, policy):
    target = dispatcher([engine(net, 112)], policy)

    async def close(tasks):
        await asyncio.sleep(6.5)
        target.close()

    found = run(target, close)
    assert {type(error) for error in found} == {EngineLost}
    assert not target.policy.seats and not any(target.policy.ledger().values())


class Confused(scheduler.Least):
    def turn_done(self, now, traj, new_tokens, preempted=0):
        raise KeyError(traj)


def test_a_policy_that_fails_keeps_nobody_waiting(net):
    found = run(dispatcher([engine(net)], Confused()))
    assert all(isinstance(error, (KeyError, EngineError)) for error in found)


# -- waking


def test_nothing_is_polled(net):
    """With a clock that never ticks all goes on, and the policy is asked once per event."""
    target = dispatcher([engine(net), engine(net)], "reserve", tick_seconds=1e9)
    run(target)
    turns = sum(len(trace.turns) for trace in WORK.trajectories)
    tools, ends, submitted = turns - len(WORK.trajectories), len(WORK.trajectories), 1
    assert len(target.decision_seconds) == submitted + turns + tools + ends
    assert target.events[-1].time < 1e6
    assert target.decision_p99() < 1e-2


def test_tools_wait_for_the_barrier_and_only_there(net):
    def calls(policy):
        target = dispatcher([engine(net, 1 << 14)], policy)
        run(target)
        ends = {}
        for event in target.events:
            if event.kind == "turn":
                ends[event.traj] = event.time
            elif event.kind == "call":
                yield event.time, event.time - ends[event.traj]

    assert all(waited == 0 for _, waited in calls("static_async"))
    found = list(calls("static_sync"))
    assert sum(waited > 0 for _, waited in found) > len(found) / 2
    assert len({time for time, _ in found}) <= 2  # together, once per turn


def test_new_weights_reach_all_engines(net):
    engines = [engine(net), engine(net)]
    target = dispatcher(engines, "least")

    async def update(tasks):
        await asyncio.sleep(4.5)
        await target.update_weights(3, net.state_dict())

    versions = set()

    async def ask(number):
        found = await target.generate(f"p{number}/0", [1, 2], Sampling(2, seed=number))
        await target.abort(f"p{number}/0")
        versions.add(found.weight_version)

    async def everything():
        await target.update_weights(3, net.state_dict())
        await asyncio.gather(*(ask(number) for number in range(4)))

    run_virtually(everything())
    assert versions == {3}


# -- logs


@pytest.mark.parametrize("policy", ["least", *DISTINCT])
def test_a_log_of_real_engines_replays_in_the_simulator(net, tmp_path, policy):
    target = dispatcher([engine(net), engine(net)], policy, tick_seconds=1.0)
    run(target)
    save_events(target.events, tmp_path / "log.jsonl")
    logged = Workload.from_log(tmp_path / "log.jsonl")
    for before, after in zip(WORK.trajectories, logged.trajectories, strict=True):
        assert before.spec.prompt_tokens == after.prompt_tokens
        assert [turn.tokens for turn in before.turns] == [turn.tokens for turn in after.turns]
        tools = [turn.tool_tokens for turn in before.turns]
        assert tools == [turn.tool_tokens for turn in after.turns]
    pool = EnginePool(2, KV["kv_tokens"], max_seqs=16, max_len=LONGEST, prefixes="whole")
    told = simulate(policy, logged, pool, ONE_SECOND, tick_seconds=1.0)
    assert told.makespan == pytest.approx(target.events[-1].time, rel=0.005)
    real = sum(one.load().preemptions for one in target._engines.values())
    assert told.preemptions == real
    assert (real > 0) == (policy in ("least", "static_sync"))


# -- by chance


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_each_trajectory_ends_once(policy):
    """Engines lost and joining, clients cancelled, at random times; token by token."""
    for seed in range(6):
        chaos(policy, seed)


def chaos(policy: str, seed: int) -> None:
    rng = np.random.default_rng((seed, 11))
    work = Workload.synthetic(
        6, 6, mean_tokens=50, cap=80, seed=seed,
        shape=Shape(prompt_tokens=20, max_turns=4, tool_tokens=5, tool_seconds=4.0),
    )  # fmt: skip
    pool = EnginePool(3, int(rng.integers(200, 900)), block=int(rng.choice([1, 16])), max_seqs=16)
    engines = [TokenEngine(pool, ONE_SECOND) for _ in range(3)]
    target = dispatcher(engines, policy, seed=seed)

    async def trouble(tasks):
        for count in range(12):
            await asyncio.sleep(float(rng.exponential(10)))
            kind = rng.choice(["lose", "join", "cancel", "close"])
            names = sorted(target._engines)
            if kind == "join":
                target.engine_up(f"n{count}", TokenEngine(pool, ONE_SECOND))
            elif kind == "cancel":
                tasks[rng.integers(len(tasks))].cancel()
            elif len(names) > 1:
                name = names[rng.integers(len(names))]
                lost = target._engines[name]
                if kind == "lose":
                    target.engine_down(name, "pulled")
                lost.close()

    found = run(target, trouble, work)
    assert all(isinstance(x, (list, asyncio.CancelledError, EngineLost)) for x in found)
    assert_all_given_back(target, work)
    assert not any(isinstance(x, EngineLost) and "giving up" not in str(x) for x in found)
