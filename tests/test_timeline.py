"""What an engine held over time, from a log by hand, a simulation, and real engines; its prices."""

import numpy as np
import pytest

from rstar2lab import config, plots, scheduler
from rstar2lab.nano import model
from rstar2lab.scheduler import CostModel, EnginePool, Event, Shape, Workload, simulate
from rstar2lab.scheduler.clock import run_virtually
from rstar2lab.scheduler.dispatcher import Dispatcher
from rstar2lab.scheduler.paced import PacedEngine, Step, exercise, fit
from rstar2lab.scheduler.replay import replay
from rstar2lab.scheduler.timeline import timeline

COST = CostModel("test", False, "", 1e-3, 1e-3, 0.0, 1e-5, 1e-7, 1e-5)
WORK = Workload.synthetic(
    6, 4, mean_tokens=60, cap=120, seed=0,
    shape=Shape(prompt_tokens=20, tool_tokens=5, tool_seconds=0.02, slow_seconds=0.1),
)  # fmt: skip


def test_turns_tools_and_marks_of_a_log_written_by_hand():
    log = [
        Event(0.0, "submit", "a"),
        Event(0.0, "submit", "b"),
        Event(0.0, "start", "a", "e0", gauge=32, ledger=96),
        Event(0.0, "start", "b", "e0", gauge=64, ledger=192),
        Event(1.0, "turn", "a", "e0", gauge=32, ledger=192),
        Event(2.0, "turn", "b", "e0", gauge=0, ledger=192),
        Event(2.0, "call", "a"),  # held back for a second
        Event(2.0, "call", "b"),
        Event(2.5, "tool", "a"),
        Event(2.5, "start", "a", "e1", gauge=48, ledger=96),  # it moves
        Event(3.0, "preempt", "", "e1", gauge=0, ledger=96),
        Event(4.0, "finish", "a"),
        Event(4.0, "finish", "b"),
    ]
    found = timeline(log)
    e0, e1 = found[found.engine == "e0"], found[found.engine == "e1"]
    assert e0.turns.tolist() == [1, 2, 1, 0, 0, 0, 0]
    assert e0.tools.tolist() == [0, 0, 1, 2, 2, 2, 0]
    assert e0.kv_tokens.tolist() == [32, 64, 32, 0, 0, 0, 0]
    assert e0["mark"].tolist() == ["", "", "", "", "barrier", "", ""]
    assert e1.turns.tolist() == [1, 1, 0] and e1["mark"].tolist() == ["", "preempt", ""]
    assert e1.ledger_tokens.tolist() == [96, 96, 96]


@pytest.mark.parametrize("policy", ["static_sync", "reserve", "survival_move"])
def test_in_a_simulation_all_that_starts_ends_and_no_engine_holds_more_than_it_has(policy):
    pool = EnginePool(2, 480, max_seqs=8)
    found = timeline(simulate(policy, WORK, pool, COST, tick_seconds=0.02).events)
    last = found.groupby("engine").last()
    assert (last.turns == 0).all() and (last.tools == 0).all()
    assert found.kv_tokens.max() <= 480
    assert (found.turns >= 0).all() and found.turns.max() > 1
    is_held = (found["mark"] == "barrier").any()
    assert is_held == (policy == "static_sync")


@pytest.fixture(scope="module")
def small_engine():
    size = config.Model(layers=1, width=64, heads=2, kv_heads=1, mlp_width=64, max_tokens=256)
    net = model.build(size, 64, seed=0).eval()

    def build(kv_tokens=480):
        return PacedEngine(net.config, net.state_dict(), kv_tokens=kv_tokens, max_tokens=256,
                           max_sequences=64)  # fmt: skip

    return build


def test_a_real_log_is_drawn_by_the_function_that_draws_a_simulated_one(small_engine):
    async def played():
        engines = {"e0": small_engine(), "e1": small_engine()}
        dispatcher = Dispatcher(engines, scheduler.make_policy("static_sync"), tick_seconds=0.02)
        assert not await replay(WORK.trajectories, dispatcher, 64)
        dispatcher.close()
        return dispatcher.events

    logs = {"static_sync": {
        "real": timeline(run_virtually(played())),
        "simulated": timeline(simulate("static_sync", WORK, EnginePool(2, 480), COST).events),
    }}  # fmt: skip
    axes = plots.engine_timelines(logs, 480)
    assert axes.shape == (1, 2)
    for ax in axes[0]:
        assert {"engine e0", "engine e1"} <= {line.get_label() for line in ax.lines}
    assert (logs["static_sync"]["real"]["mark"] == "barrier").any()


def test_prices_fitted_to_steps_with_known_prices_are_those_prices():
    rng, steps = np.random.default_rng(0), []
    for _ in range(400):
        rows, prefill = int(rng.integers(1, 65)), int(rng.integers(0, 2) * rng.integers(0, 500))
        context, pairs = int(rng.integers(rows, 300 * rows)), prefill * 100.0
        seconds = 2e-3 + 1e-4 * rows + 1e-7 * context + 2e-5 * prefill + 1e-8 * pairs
        steps.append(Step(rows, context, prefill, pairs, 0, 0, seconds))
    cost, quality = fit(steps, "known", "made up")
    for rows in (1, 5, 33, 64):
        assert cost.fixed(rows) == pytest.approx(2e-3 + 1e-4 * rows, rel=0.01)
    assert cost.kv_seconds_per_token == pytest.approx(1e-7, rel=0.01)
    assert cost.prefill(100, 50) == pytest.approx(100 * (2e-5 + 1e-8 * 100), rel=0.01)
    assert quality["r_squared"] > 0.999


@pytest.mark.full
def test_the_prices_of_an_engine_add_up_to_what_it_took(small_engine):
    engine = small_engine(1 << 15)
    cost, quality = fit(exercise([engine], 64, most_turns=2), "here", "a test")
    assert cost.is_calibrated and quality["steps"] == len(engine.steps) > 100
    told = sum(
        cost.decode(s.rows, s.context, 1) + cost.prefill_seconds_per_token * s.prefill
        + cost.prefill_attention_seconds * s.pairs + cost.prefill_call_seconds * s.calls
        + cost.prefill_context_seconds * s.after
        for s in engine.steps
    )  # fmt: skip
    assert told == pytest.approx(sum(s.seconds for s in engine.steps), rel=0.3)
