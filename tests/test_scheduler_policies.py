"""The policies as state machines: thousands of random histories with failures, a few by hand."""

import numpy as np
import pytest

from rstar2lab import scheduler
from rstar2lab.scheduler import EngineSpec, EngineStats, KaplanMeier, TrajSpec
from rstar2lab.scheduler.events import Cancel, Hold, Resume, Start
from rstar2lab.scheduler.policies import Reserve, Static
from rstar2lab.scheduler.survival import Outlook, Survival, SurvivalMove


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

    def spec(self, name: str) -> EngineSpec:
        kv, seqs = int(self.rng.integers(300, 2000)), int(self.rng.integers(2, 9))
        return EngineSpec(name, kv, int(self.rng.choice([1, 16])), seqs, 1500)

    def end(self, traj: str, reason: str) -> None:
        assert traj not in self.ended, f"{traj} ended twice: {self.ended[traj]}, {reason}"
        self.ended[traj] = reason
        del self.state[traj]
        self.home.pop(traj, None)

    def act(self, actions) -> None:
        for action in actions:
            traj = action.traj
            if isinstance(action, Start):
                assert self.state[traj] == "queued", (action, self.state[traj])
                assert action.engine in self.engines, f"{action} on an engine that is gone"
                stayed = self.home.get(traj) == action.engine
                assert action.expect_hit == stayed
                self.state[traj], self.home[traj] = "running", action.engine
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
        """The ledger is the sum of the residents' worst cases, so never below the real use."""
        ledger = self.policy.ledger()
        assert set(ledger) == set(self.engines)
        for name, spec in self.engines.items():
            mine = [t for t, home in self.home.items() if home == name]
            worst = [self.specs[t].prompt_tokens + self.specs[t].max_tokens + 1 for t in mine]
            assert ledger[name] == sum(-(-w // spec.block) for w in worst) * spec.block
            assert ledger[name] >= sum(self.length[t] + 1 for t in mine)
        assert set(self.policy.seats) == set(self.state)

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
            self.act(self.policy.engine_down(self.now, name))

    def gain(self) -> None:
        name = f"n{self.count}-{self.rng.integers(1 << 30)}"
        self.engines[name] = self.spec(name)
        self.act(self.policy.engine_up(self.now, self.engines[name]))

    def report(self) -> None:
        for name in self.engines:
            usage, waiting = float(self.rng.random()), int(self.rng.integers(3))
            running = sum(self.home.get(t) == name for t in self.state)
            stats = EngineStats(name, self.now, usage, None, running, waiting, 0, self.sampled)
            self.act(self.policy.engine_stats(self.now, stats))
        self.act(self.policy.tick(self.now))

    def live(self, events: int) -> None:
        kinds = [self.submit, self.turn, self.tool, self.give_up, self.lose, self.gain, self.report]
        weights = np.array([0.1, 0.4, 0.3, 0.04, 0.03, 0.05, 0.08])
        for kind in self.rng.choice(len(kinds), events, p=weights):
            self.now += float(self.rng.exponential(0.5))
            kinds[kind]()

    def drain(self) -> None:
        """With an engine for everything, all that is unfinished must come to its end."""
        self.engines["last"] = EngineSpec("last", 100_000, 16, 256, 1 << 20)
        self.act(self.policy.engine_up(self.now, self.engines["last"]))
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
    for part in ("1000 prompt + 601", "holds 1600", "lower max_tokens"):
        assert part in refusal.reason
    assert started(policy.submit(0.0, [TrajSpec("fits", "g", 1000, 599)])) == {
        "fits": policy.seats["fits"].engine
    }


def test_reserve_starts_as_many_as_fit_in_the_worst_case():
    policy = Reserve()
    policy.bind(engines())  # 100 blocks each; a trajectory may need 26
    assert len(started(policy.submit(0.0, trajectories(20)))) == 2 * (100 // 26)
    assert policy.ledger() == {"e0": 3 * 26 * 16, "e1": 3 * 26 * 16}
    policy.turn_done(1.0, "t0", 10)
    assert len(started(policy.finished(1.0, "t0", "success"))) == 1


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


def test_survival_starts_more_than_the_worst_case_and_fewer_than_all():
    lengths = np.random.default_rng(2).integers(10, 301, 1000)
    prior = KaplanMeier(lengths, bin_tokens=16)
    policy = Survival(z=2.0)
    policy.bind(engines(1, kv=16_000), prior)
    found = len(started(policy.submit(0.0, trajectories(200, prompt=10, most=300))))
    assert 16_000 // 320 * 2 < found < 200


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
