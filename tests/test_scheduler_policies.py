"""The policies as state machines: thousands of random histories with failures, a few by hand."""

import time

import numpy as np
import pytest

from rstar2lab import scheduler
from rstar2lab.scheduler import EngineSpec, EngineStats, KaplanMeier, TrajSpec
from rstar2lab.scheduler.events import Cancel, Hold, Resume, Start
from rstar2lab.scheduler.policies import Aimd, Gauge, Reserve, Static
from rstar2lab.scheduler.survival import Outlook, Survival, SurvivalMove, SurvivalYield


class World:
    """Plays engines and tools by chance, and checks what a policy does after every event."""

    def __init__(self, name: str, seed: int):
        self.rng = np.random.default_rng((seed, 7))
        self.policy = scheduler.make_policy(name)
        self.engines = {f"e{i}": self.spec(f"e{i}") for i in range(self.rng.integers(1, 5))}
        lengths = self.rng.integers(1, 400, 200) if self.rng.random() < 0.7 else []
        prior = KaplanMeier(lengths, bin_tokens=32)
        self.policy.bind(list(self.engines.values()), prior, seed)
        self.now, self.count, self.sampled = 0.0, 0, 0
        self.state: dict[str, str] = {}  # queued, running, calling, held
        self.home: dict[str, str] = {}
        self.length: dict[str, int] = {}
        self.specs: dict[str, TrajSpec] = {}
        self.ended: dict[str, str] = {}
        self.lost: list[str] = []
        self.begun: dict[str, None] = {}  # in the order of their first start
        self.log: list = []

    def spec(self, name: str) -> EngineSpec:
        kv, seqs = int(self.rng.integers(300, 2000)), int(self.rng.integers(2, 9))
        return EngineSpec(name, kv, int(self.rng.choice([1, 16])), seqs, 1500)

    def end(self, traj: str, reason: str) -> None:
        assert traj not in self.ended, f"{traj} ended twice: {self.ended[traj]}, {reason}"
        self.ended[traj] = reason
        del self.state[traj]
        self.home.pop(traj, None)

    def act(self, actions) -> None:
        self.log += actions
        for action in actions:
            traj = action.traj
            if isinstance(action, Start):
                assert self.state[traj] == "queued", (action, self.state[traj])
                assert action.engine in self.engines, f"{action} on an engine that is gone"
                stayed = self.home.get(traj) == action.engine
                assert action.expect_hit == stayed
                self.state[traj], self.home[traj] = "running", action.engine
                self.begun.setdefault(traj)
            elif isinstance(action, Cancel):
                assert self.state[traj] == "queued" and "lower max_tokens" in action.reason
                assert not any(self.fits(self.specs[traj], spec) for spec in self.engines.values())
                self.end(traj, "refused")
            elif isinstance(action, Resume):
                assert self.state[traj] == "held"
                self.state[traj] = "calling"
            elif self.state[traj] == "calling":
                self.state[traj] = "held"
            else:
                assert isinstance(action, Hold) and self.state[traj] == "queued"
                self.home.pop(traj, None)
        self.check()

    def fits(self, traj: TrajSpec, spec: EngineSpec) -> bool:
        total = traj.prompt_tokens + traj.max_tokens
        blocks = -(-(total + 1) // spec.block)
        return total <= spec.max_len and blocks <= spec.kv_tokens // spec.block

    def check(self) -> None:
        """The ledger is the sum of the residents' worst cases, so never below the real use.

        Nothing waits while all engines are empty, and starts are in the order of submission.
        """
        ledger = self.policy.ledger()
        assert set(ledger) == set(self.engines)
        for name, spec in self.engines.items():
            mine = [t for t, home in self.home.items() if home == name]
            worst = [self.specs[t].prompt_tokens + self.specs[t].max_tokens + 1 for t in mine]
            assert ledger[name] == sum(-(-w // spec.block) for w in worst) * spec.block
            held = sum(-(-(self.length[t] + 1) // spec.block) for t in mine) * spec.block
            assert ledger[name] >= held
            if isinstance(self.policy, Reserve):
                assert ledger[name] <= spec.kv_tokens, "it may overflow"
            if isinstance(self.policy, Survival):
                assert len(mine) <= spec.max_seqs
                ages = self.policy._ages.get(name)
                assert set(ages.slots if ages else ()) == set(mine)
        assert set(self.policy.seats) == set(self.state)
        assert set(self.policy.queue) == {t for t, state in self.state.items() if state == "queued"}
        if self.policy.queue and self.engines:
            assert self.home, "all engines are empty, and yet there is a queue"
        assert list(self.begun) == sorted(self.begun, key=lambda t: int(t[1:])), "not first come"

    # Events

    def submit(self) -> None:
        specs = []
        for _ in range(self.rng.integers(1, 8)):
            prompt, most = int(self.rng.integers(1, 100)), int(self.rng.integers(1, 700))
            most = 5000 if self.rng.random() < 0.03 else most
            specs.append(TrajSpec(f"t{self.count}", f"g{self.count // 4}", prompt, most))
            self.count += 1
        for spec in specs:
            self.specs[spec.id], self.state[spec.id] = spec, "queued"
            self.length[spec.id] = spec.prompt_tokens
        self.act(self.policy.submit(self.now, specs))

    def pick(self, *states: str) -> str | None:
        found = [t for t, state in self.state.items() if state in states]
        return found[self.rng.integers(len(found))] if found else None

    def grow(self, traj: str) -> int:
        spec = self.specs[traj]
        left = spec.prompt_tokens + spec.max_tokens - self.length[traj]
        grown = int(self.rng.integers(0, left + 1))
        self.length[traj] += grown
        return grown

    def turn(self) -> None:
        traj = self.pick("running")
        if traj:
            grown = self.grow(traj)
            self.sampled += grown
            self.state[traj] = "calling"
            self.act(self.policy.turn_done(self.now, traj, grown, int(self.rng.integers(2))))
            spec = self.specs[traj]
            is_full = self.length[traj] == spec.prompt_tokens + spec.max_tokens
            if is_full or self.rng.random() < 0.4:
                self.finish(traj, "length" if is_full else "success")

    def tool(self) -> None:
        traj = self.pick("calling")
        if traj:
            self.state[traj] = "queued"
            self.act_tool(traj, self.grow(traj))

    def act_tool(self, traj: str, tokens: int) -> None:
        self.act(self.policy.tool_done(self.now, traj, tokens))

    def finish(self, traj: str, reason: str) -> None:
        actions = self.policy.finished(self.now, traj, reason)
        self.end(traj, reason)
        self.act(actions)

    def give_up(self) -> None:
        traj = self.pick("queued", "running", "calling", "held")
        if traj:
            self.finish(traj, "error")

    def lose(self) -> None:
        if self.engines:
            name = list(self.engines)[self.rng.integers(len(self.engines))]
            del self.engines[name]
            for traj in [t for t, home in self.home.items() if home == name]:
                del self.home[traj]
                if self.state[traj] == "running":
                    self.state[traj] = "queued"
            self.lost.append(name)
            self.act(self.policy.engine_down(self.now, name))

    def gain(self) -> None:
        """An engine that was lost comes back, or a new one arrives."""
        name = f"n{self.count}-{self.rng.integers(1 << 30)}"
        if self.lost and self.rng.random() < 0.7:
            name = self.lost.pop(self.rng.integers(len(self.lost)))
        self.engines[name] = self.spec(name)
        self.act(self.policy.engine_up(self.now, self.engines[name]))

    def report(self) -> None:
        for name in self.engines:
            usage, waiting = float(self.rng.random()), int(self.rng.integers(3))
            running = sum(self.home.get(t) == name for t in self.state)
            then = self.now - self.rng.choice([0.0, 0.3, 5.0])
            stats = EngineStats(name, then, usage, None, running, waiting, 0, self.sampled)
            self.act(self.policy.engine_stats(self.now, stats))
        self.act(self.policy.tick(self.now))

    def live(self, events: int) -> None:
        kinds = [self.submit, self.turn, self.tool, self.give_up, self.lose, self.gain, self.report]
        weights = np.array([0.1, 0.4, 0.3, 0.04, 0.03, 0.05, 0.08])
        for kind in self.rng.choice(len(kinds), events, p=weights):
            self.now += float(self.rng.exponential(0.5))
            kinds[kind]()

    def drain(self) -> None:
        """On the engines that are left, or one, all that is unfinished must come to its end."""
        if not self.engines:
            self.gain()
        for _ in range(10_000):
            if not self.state:
                return
            self.now += 0.5
            self.report()
            self.turn()
            self.tool()
        pytest.fail(f"these starve: {self.state}")


@pytest.mark.parametrize("name", scheduler.POLICIES)
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.full)]
)
def test_in_random_histories_with_failures_each_trajectory_ends_once(name, seeds):
    for seed in seeds:
        world = World(name, seed)
        world.live(40)
        world.drain()
        assert len(world.ended) == world.count, "one was lost on the way"
        assert set(world.policy.ledger().values()) == {0}, "a reservation leaked"
        assert not world.policy.queue and not world.policy.seats


@pytest.mark.parametrize("name", scheduler.POLICIES)
def test_chance_comes_from_the_seed_alone(name):
    logs = []
    for _ in range(2):
        world = World(name, 3)
        world.live(80)
        logs.append(world.log)
    assert logs[0] == logs[1] and len(logs[0]) > 50


def engines(count=2, kv=1600, **more) -> list[EngineSpec]:
    return [EngineSpec(f"e{i}", kv, **more) for i in range(count)]


def trajectories(count, prompt=100, most=300) -> list[TrajSpec]:
    return [TrajSpec(f"t{i}", f"g{i // 4}", prompt, most) for i in range(count)]


def started(actions) -> dict[str, str]:
    return {a.traj: a.engine for a in actions if isinstance(a, Start)}


@pytest.mark.parametrize("name", scheduler.POLICIES)
def test_a_request_larger_than_every_engine_is_refused_with_the_numbers(name):
    policy = scheduler.make_policy(name)
    policy.bind(engines())
    (refusal,) = policy.submit(0.0, [TrajSpec("big", "g", 1000, 601)])
    assert isinstance(refusal, Cancel)
    for part in ("1000 prompt + 601", "+ 1 ahead", "holds 1600", "lower max_tokens"):
        assert part in refusal.reason
    assert started(policy.submit(0.0, [TrajSpec("fits", "g", 1000, 599)])) == {
        "fits": policy.seats["fits"].engine
    }


def test_a_request_longer_than_an_engines_sequences_is_refused():
    policy = scheduler.make_policy("reserve")
    policy.bind(engines(max_len=400))
    (refusal,) = policy.submit(0.0, [TrajSpec("long", "g", 100, 301)])
    assert isinstance(refusal, Cancel) and "400 per sequence" in refusal.reason
    assert list(started(policy.submit(0.0, [TrajSpec("fits", "g", 100, 300)]))) == ["fits"]


def test_reserve_starts_as_many_as_fit_in_the_worst_case():
    policy = Reserve()
    policy.bind(engines())  # 100 blocks each; a trajectory may need 26
    assert len(started(policy.submit(0.0, trajectories(20)))) == 2 * (100 // 26)
    assert policy.ledger() == {"e0": 3 * 26 * 16, "e1": 3 * 26 * 16}
    policy.turn_done(1.0, "t0", 10)
    assert len(started(policy.finished(1.0, "t0", "success"))) == 1


def test_an_id_that_is_submitted_twice_is_refused_before_anything_is_queued():
    policy = scheduler.make_policy("least")
    policy.bind(engines())
    with pytest.raises(ValueError, match="'t0' was submitted twice"):
        policy.submit(0.0, [*trajectories(2), *trajectories(1)])
    assert not policy.seats and not policy.queue
    assert len(started(policy.submit(0.0, trajectories(2)))) == 2


def test_when_an_engine_is_lost_its_running_turns_go_first_and_its_tools_go_on():
    policy = Reserve()
    policy.bind(engines(1))
    policy.submit(0.0, trajectories(5))  # three fit
    policy.turn_done(1.0, "t1", 40)
    holds = policy.engine_down(2.0, "e0")
    assert [(hold.traj, hold.reason) for hold in holds] == [
        ("t0", "its engine was lost"), ("t2", "its engine was lost"),
    ]  # fmt: skip
    assert list(policy.queue) == ["t0", "t2", "t3", "t4"] and policy.ledger() == {}
    assert policy.tool_done(3.0, "t1", 7) == [Hold("t1", "its engine was lost")]
    assert policy.seats["t1"].context == 100 + 40 + 7
    assert list(started(policy.engine_up(4.0, engines(1)[0]))) == ["t1", "t0", "t2"]
    with pytest.raises(ValueError, match="'e7' is not up"):
        policy.engine_down(5.0, "e7")


def test_over_committed_reservations_start_twice_as_many():
    policy = Reserve(commit=0.5)
    policy.bind(engines())
    assert len(started(policy.submit(0.0, trajectories(20)))) == 2 * (200 // 26)


def test_contiguous_placement_keeps_groups_together_and_strided_spreads_them():
    for contiguous, expected in ((True, ["e0", "e0", "e1", "e1"]), (False, ["e0", "e1"] * 2)):
        policy = Static(contiguous)
        policy.bind(engines())
        found = started(policy.submit(0.0, trajectories(4)))
        assert [found[f"t{i}"] for i in range(4)] == expected


def test_strided_placement_goes_on_when_trajectories_arrive_one_by_one():
    policy = Static(contiguous=False)
    policy.bind(engines(3, kv=16_000))
    found = [started(policy.submit(0.0, [traj])) for traj in trajectories(5)]
    assert [e for each in found for e in each.values()] == ["e0", "e1", "e2", "e0", "e1"]


def test_round_robin_takes_the_next_engine_for_every_turn():
    policy = scheduler.make_policy("round_robin")
    policy.bind(engines(3, kv=16_000))
    first = started(policy.submit(0.0, trajectories(3)))
    assert set(first.values()) == {"e0", "e1", "e2"}
    policy.turn_done(1.0, "t0", 5)
    (start,) = policy.tool_done(2.0, "t0", 5)
    assert start == Start("t0", first["t0"], True)  # three later: the same again
    policy.turn_done(3.0, "t1", 5)
    (start,) = policy.tool_done(4.0, "t1", 5)
    assert start == Start("t1", first["t1"], True)
    policy.turn_done(5.0, "t1", 5)
    (start,) = policy.tool_done(6.0, "t1", 5)
    assert start == Start("t1", first["t2"], False)


def report(policy, now: float, usage: float, *, engine="e0", waiting=0, preemptions=0) -> None:
    policy.engine_stats(now, EngineStats(engine, now, usage, None, 1, waiting, preemptions, 0))


def test_the_gauge_admits_by_what_is_held_now_and_does_not_look_ahead():
    policy = Gauge(high=0.9)
    policy.bind(engines(1))  # 1600 tokens; each starts with 100 and may come to 400
    assert len(started(policy.submit(0.0, trajectories(30)))) == 14  # 14 · 100 ≤ 0.9 · 1600
    report(policy, 1.0, 0.5)
    assert len(started(policy.tick(1.0))) == 6  # 800 + 6 · 100 ≤ 1440
    report(policy, 2.0, 0.9)
    assert policy.tick(2.0) == []


def test_the_limit_of_residents_grows_by_turnover_and_shrinks_by_congestion():
    policy = Aimd()
    policy.bind(engines(1))
    assert len(started(policy.submit(0.0, trajectories(60)))) == 3  # ⌊1600 / 416⌋
    report(policy, 1.0, 0.3)
    for number in range(4):
        policy.turn_done(2.0, f"t{number}", 10)
        policy.finished(2.0, f"t{number}", "success")
    assert len(policy.desks["e0"].residents) == 3
    report(policy, 3.0, 0.3)
    assert len(started(policy.tick(3.0))) == 1  # 3.8 · 1.25 = 4.8
    report(policy, 4.0, 0.3, preemptions=1)
    assert policy.tick(4.0) == [] and policy._limit["e0"] == pytest.approx(1600 / 416 * 1.25 * 0.8)
    report(policy, 4.5, 0.3, preemptions=1)  # the turnover was used up
    assert policy._limit["e0"] == pytest.approx(1600 / 416 * 1.25 * 0.8)
    report(policy, 5.0, 0.95, preemptions=1)
    assert policy._limit["e0"] == pytest.approx(4 * 0.7 / 0.95)


@pytest.mark.parametrize("name", ["aimd", "gauge", "reserve", "survival", "survival_yield"])
def test_a_full_engine_does_not_hide_one_that_has_room(name):
    policy = scheduler.make_policy(name)
    policy.bind([EngineSpec("s0", 900), EngineSpec("s1", 900), EngineSpec("large", 90_000)])
    found = list(started(policy.submit(0.0, trajectories(250))).values())
    assert found.count("large") >= 90_000 // 416 > found.count("s0") + found.count("s1") > 0


def test_the_barrier_holds_tools_until_the_engines_last_turn_ends():
    policy = Static(contiguous=True, barrier=True)
    policy.bind(engines(1))
    policy.submit(0.0, trajectories(3))
    assert policy.turn_done(1.0, "t0", 5) == [Hold("t0", "the turn's barrier")]
    assert policy.turn_done(2.0, "t1", 5) == [Hold("t1", "the turn's barrier")]
    assert policy.turn_done(3.0, "t2", 5) == [Resume("t0"), Resume("t1")]  # its own starts at once


def test_least_starts_everything_at_once_and_evenly():
    policy = scheduler.make_policy("least")
    policy.bind(engines(4))
    found = list(started(policy.submit(0.0, trajectories(40))).values())
    assert sorted(found) == sorted(["e0", "e1", "e2", "e3"] * 10)


def test_group_mates_are_not_sent_to_the_same_engine_by_their_index():
    policy = scheduler.make_policy("least")
    policy.bind(engines(4))
    found = started(policy.submit(0.0, trajectories(160)))
    fourth = {found[f"t{i}"] for i in range(0, 160, 4)}
    assert fourth == {"e0", "e1", "e2", "e3"}


# -- the survival curve


def test_the_survival_curve_counts_the_cut_as_longer():
    curve = KaplanMeier([100, 100, 300, 300], [False, True, False, True], bin_tokens=100)
    # at 100: one of four ends; at 300: one of the two left
    assert curve.curve(6).tolist() == [1.0, 1.0, 0.75, 0.75, 0.375, 0.375]
    assert curve.survival(200, 200) == pytest.approx(0.5)


def test_without_data_everything_survives():
    assert (KaplanMeier().survival(np.arange(5) * 256, 4096) == 1).all()


def test_the_curve_matches_the_share_of_an_uncensored_sample():
    lengths = np.random.default_rng(0).integers(1, 5000, 4000)
    curve = KaplanMeier(lengths, bin_tokens=256).curve(20)
    shares = [(lengths >= 256 * i).mean() for i in range(20)]
    assert curve == pytest.approx(shares, abs=1e-12)


def test_the_projected_peak_is_the_expected_one():
    """Against the mean and variance of simulated residents."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 1024, 50_000)
    outlook = Outlook(KaplanMeier(lengths, bin_tokens=64), 1023)
    prompts, ages = np.full(3, 100.0), np.array([0.0, 128.0, 512.0])
    totals = [rng.choice(lengths[lengths >= age], 50_000) for age in ages]
    peaks = []
    for h in outlook.horizons_H:
        alive = np.stack([t >= age + h for t, age in zip(totals, ages, strict=True)])
        held = ((prompts + ages + h)[:, None] * alive).sum(0)
        peaks.append(held.mean() + 2 * held.std())
    assert outlook.peak(outlook.moments(prompts, ages), 2.0) == pytest.approx(max(peaks), rel=0.01)


def test_the_projected_peak_is_the_largest_sum_over_residents():
    rng = np.random.default_rng(3)
    curve = KaplanMeier(rng.integers(1, 900, 300), rng.random(300) < 0.2, bin_tokens=50)
    outlook = Outlook(curve, 1000)
    for z in (0.0, 1.0, 3.0):
        prompts, ages = rng.integers(1, 200, 7), rng.integers(0, 1000, 7)
        peak = 0.0
        for h in range(0, 1001, 50):
            mean = variance = 0.0
            for prompt, age in zip(prompts, ages, strict=True):
                start = age // 50 * 50
                p = float(curve.survival(start, h)) if start + h <= 1000 else 0.0
                mean += (prompt + age + h) * p
                variance += (prompt + age + h) ** 2 * p * (1 - p)
            peak = max(peak, mean + z * variance**0.5)
        moments = outlook.moments(prompts.astype(float), ages.astype(float))
        assert outlook.peak(moments, z) == pytest.approx(peak)


def test_trajectories_that_were_given_up_count_as_longer():
    """All that come to 500 tokens are cancelled there: half of lengths that are uniform in 1000."""
    policy = Survival()
    policy.bind(engines(1, kv=100_000), KaplanMeier(bin_tokens=100))
    lengths = np.arange(1, 1000, 5)
    names = [f"t{i}" for i in range(len(lengths))]
    policy.submit(0.0, [TrajSpec(name, "g", 10, 1000) for name in names])
    for name, length in zip(names, lengths, strict=True):
        policy.turn_done(1.0, name, min(int(length), 500))
        policy.finished(1.0, name, "success" if length < 500 else "cancel")
    assert policy.prior.survival(0, 500) == pytest.approx(0.5)
    assert policy.prior.survival(0, 900) == pytest.approx(0.5), "nobody was seen to end later"


def ages_after(policy, start: float, tokens: int, seconds: int, delay: float = 0.0) -> list[float]:
    """Mean estimated age at each second, when every row samples 30 tokens a second."""
    ages = []
    rows = len(policy.desks["e0"].residents)
    for passed in range(1, seconds + 1):
        now = start + passed
        sampled = tokens + int(30 * rows * (passed - delay))
        policy.engine_stats(now, EngineStats("e0", now - delay, 0.5, None, rows, 0, 0, sampled))
        policy.tick(now)
        ages.append(float(policy._ages["e0"].at(now)[1].mean()))
    return ages


def test_ages_grow_with_the_reports_whatever_an_engine_has_sampled_before():
    """Its counter is far from zero when a step begins, and after a pause the rate is unknown."""
    policy = Survival()
    policy.bind(engines(1, kv=16_000))
    for step, start in enumerate((0.0, 600.0)):
        names = [f"s{step}/{i}" for i in range(20)]
        policy.submit(start, [TrajSpec(name, "g", 100, 600) for name in names])
        found = ages_after(policy, start, 1_000_000 * (step + 1), 10)
        assert found == pytest.approx([30.0 * n for n in range(10)])  # one report behind
        for name in names:
            policy.finished(start + 20, name, "error")


def test_a_report_that_is_late_says_how_far_they_were_when_it_was_made():
    policy = Survival()
    policy.bind(engines(1, kv=4000))
    policy.submit(0.0, trajectories(4))
    assert ages_after(policy, 0.0, 0, 10, delay=0.5)[1:] == pytest.approx(
        [30 * (n - 0.5) for n in range(2, 11)]
    )


def test_what_an_engine_sampled_before_it_ran_empty_is_not_given_to_the_next():
    policy = Survival()
    policy.bind(engines(1, kv=4000))
    policy.submit(0.0, trajectories(2))
    ages_after(policy, 0.0, 0, 2)
    policy.engine_stats(3.0, EngineStats("e0", 3.0, 0.0, None, 0, 0, 0, 5000))  # all wait for tools
    assert policy._ages["e0"].at(3.5)[1].tolist() == [30, 30]


def test_the_end_of_a_turn_may_make_room_for_the_head():
    """All end with 100 tokens: one that has 90 is soon gone, and makes room before the others."""
    policy = Survival(z=0.0)
    policy.bind(engines(1, kv=1200, block=1), KaplanMeier([100] * 50, bin_tokens=10))
    found = list(started(policy.submit(0.0, trajectories(9, most=1000))))
    assert len(found) == 1200 // 210 == 5
    assert list(started(policy.turn_done(1.0, "t0", 90))) == ["t5"]


def test_the_curve_is_renewed_when_a_step_begins():
    policy = Survival(z=0.0)
    policy.bind(engines(1, kv=4000))
    assert len(started(policy.submit(0.0, trajectories(40, most=512)))) == 6  # ⌊4000 / 624⌋
    for number in range(40):
        policy.turn_done(1.0, f"t{number}", 30)
        policy.finished(1.0, f"t{number}", "success")
    assert len(started(policy.submit(2.0, trajectories(40, most=512)))) > 20


def test_who_has_come_far_makes_way_and_the_youngest_of_them_goes_first():
    policy = SurvivalYield(share=0.4)
    policy.bind(engines(1, kv=12_800, max_seqs=3))
    policy.submit(0.0, trajectories(6))
    running = list(policy.desks["e0"].residents)
    assert running == ["t0", "t1", "t2"]
    for traj, sampled in (("t0", 100), ("t1", 200), ("t2", 150)):
        policy.turn_done(1.0, traj, sampled)
    (stays,) = policy.tool_done(2.0, "t0", 19)
    assert stays == Start("t0", "e0", True)  # 119 of 300: below the share
    for far, head in (("t1", "t3"), ("t2", "t4")):
        hold, start = policy.tool_done(3.0, far, 10)
        assert (hold.traj, start) == (far, Start(head, "e0", False))
    assert list(policy.queue) == ["t5", "t2", "t1"]
    assert list(started(policy.finished(4.0, "t0", "success"))) == ["t5"]
    assert list(started(policy.finished(5.0, "t5", "success"))) == ["t2"]
    assert policy.seats["t2"].context == 100 + 150 + 10


def test_nobody_makes_way_for_one_that_does_not_fit():
    policy = SurvivalYield(share=0.4)
    policy.bind(engines(1, kv=1280))
    policy.submit(0.0, [*trajectories(3), TrajSpec("large", "g", 100, 800)])
    policy.turn_done(1.0, "t1", 200)
    assert policy.tool_done(2.0, "t1", 10) == [Start("t1", "e0", True)]
    assert list(policy.queue) == ["large"]


def test_survival_starts_more_than_the_worst_case_and_fewer_than_all():
    lengths = np.random.default_rng(2).integers(10, 301, 1000)
    prior = KaplanMeier(lengths, bin_tokens=16)
    policy = Survival(z=2.0)
    policy.bind(engines(1, kv=16_000), prior)
    found = len(started(policy.submit(0.0, trajectories(200, prompt=10, most=300))))
    assert 16_000 // 320 * 2 < found < 200


@pytest.mark.parametrize("most", [20, 100, 255, 500, 8191])
def test_without_a_curve_survival_plans_for_the_worst_case_however_short_budgets_are(most):
    kv = 50 * (10 + most + 1)
    policies = [Survival(z=2.0), Survival(z=2.0), Reserve()]
    counts = []
    for policy, prior in zip(policies, (None, KaplanMeier(), None), strict=True):
        policy.bind(engines(1, kv=kv, block=1), prior)
        found = started(policy.submit(0.0, trajectories(200, prompt=10, most=most)))
        counts.append(len(found))
    assert counts[2] == 50
    assert counts[:2] == pytest.approx([50, 50], rel=0.05)


def test_a_turn_moves_only_with_an_empty_queue_and_a_real_gap():
    policy = SurvivalMove(gap=3)
    policy.bind(engines(2, kv=10_000))
    policy.submit(0.0, trajectories(8))
    crowd = [t for t, seat in policy.seats.items() if seat.engine == "e0"]
    for traj in [t for t in policy.seats if t not in crowd]:
        policy.turn_done(1.0, traj, 10)
        policy.finished(1.0, traj, "success")
    policy.turn_done(2.0, crowd[0], 10)
    (start,) = policy.tool_done(2.5, crowd[0], 5)
    assert (start.engine, start.expect_hit) == ("e1", False)
    policy.turn_done(3.0, crowd[1], 10)
    (start,) = policy.tool_done(3.5, crowd[1], 5)  # 3 against 1: below the gap
    assert (start.engine, start.expect_hit) == ("e0", True)


def test_no_turn_moves_while_a_trajectory_waits():
    policy = SurvivalMove(gap=3)
    policy.bind(engines(2))
    large = [TrajSpec(name, "g", 100, 1400) for name in ("l0", "l1")]
    policy.submit(0.0, [large[0], *trajectories(4, most=200), large[1]])
    own, other = policy.seats["t0"].engine, policy.seats["l0"].engine
    assert own != other and list(policy.queue) == ["l1"]
    policy.turn_done(1.0, "t0", 10)
    assert policy.tool_done(2.0, "t0", 5) == [Start("t0", own, True)]
    policy.finished(3.0, "l1", "cancel")
    policy.turn_done(4.0, "t0", 10)
    assert policy.tool_done(5.0, "t0", 5) == [Start("t0", other, False)]


def test_an_engine_with_a_tenth_of_the_memory_is_full_with_a_tenth_of_the_residents():
    policy = SurvivalMove(gap=6)
    policy.bind([EngineSpec("small", 1600)])
    policy.submit(0.0, trajectories(1))
    policy.engine_up(0.0, EngineSpec("large", 16_000))
    policy.submit(0.0, [TrajSpec(f"l{i}", "g", 100, 1500) for i in range(7)])
    assert started(policy.submit(0.0, [TrajSpec("mover", "g", 100, 300)])) == {"mover": "large"}
    policy.turn_done(1.0, "mover", 10)
    assert policy.tool_done(2.0, "mover", 5) == [Start("mover", "large", True)]  # 8 against 10 · 1


# -- speed


def decisions(policy, events: int) -> list[float]:
    """Processor seconds of each event: 64 engines, 16,384 trajectories, turns, tools, cancels."""
    rng = np.random.default_rng(4)
    prior = KaplanMeier(rng.integers(500, 8193, 4000))
    names = [f"e{i}" for i in range(64)]
    policy.bind([EngineSpec(name, 400_000) for name in names], prior)
    seconds, left, sampled, now = [], {}, 0, 0.0
    running: list[str] = []
    calling: list[str] = []

    def tell(event: str, *arguments) -> None:
        began = time.thread_time()
        actions = getattr(policy, event)(now, *arguments)
        seconds.append(time.thread_time() - began)
        running.extend(a.traj for a in actions if isinstance(a, Start))

    def take(pool: list[str]) -> str:
        place = rng.integers(len(pool))
        pool[place], pool[-1] = pool[-1], pool[place]
        return pool.pop()

    tell("submit", [TrajSpec(f"t{i}", f"g{i // 32}", 300, 8192) for i in range(16_384)])
    while len(seconds) < events:
        now += 0.005
        if len(seconds) % 1000 < 65:
            for name in names:
                rows = len(policy.desks[name].residents)
                tell("engine_stats", EngineStats(name, now, 0.7, None, rows, 0, 0, sampled))
            tell("tick")
        elif policy.queue and rng.random() < 0.1:
            tell("finished", next(reversed(policy.queue)), "cancel")
        elif calling and rng.random() < 0.5:
            tell("tool_done", take(calling), 100)
        elif running:
            traj = take(running)
            new = int(min(left.setdefault(traj, 8192), rng.integers(1, 4000)))
            left[traj] -= new + 100
            sampled += new
            tell("turn_done", traj, new, 0)
            if left[traj] > 0:
                calling.append(traj)
            else:
                tell("finished", traj, "success")
    return seconds


QUICK = ("least", "reserve", "survival_yield")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in scheduler.POLICIES],
)
def test_of_a_hundred_decisions_ninety_nine_take_less_than_a_millisecond(name):
    seconds = decisions(scheduler.make_policy(name), 4000)
    assert np.percentile(seconds, 99) < 1e-3
