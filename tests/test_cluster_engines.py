"""Engines as actors of a real Ray cluster of three nodes: same samples, losses, new members."""

import asyncio
from functools import partial

import numpy as np
import pytest
from tiny import SlowFirst

from rstar2lab import extras, protocol, scheduler
from rstar2lab import rollout as rollouts
from rstar2lab.engines import EngineError, Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.rollout import Actors, RolloutSettings
from rstar2lab.types import Problem, StopReason

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not extras.is_installed("ray"), reason="needs the extra [cluster]"),
]
KV = {"kv_tokens": 2048, "max_tokens": 256}
LIMITS = RolloutSettings(
    max_turns=3, max_calls_per_turn=1, max_response_tokens=120, temperature=1.0, top_p=1.0,
    seed_key="0/test",
)  # fmt: skip
PROBLEMS = [Problem(f"p{i}", f"What is {i} + {i}?", str(2 * i)) for i in range(6)]


@pytest.fixture
def fleet(ray_cluster, cold_model):
    from rstar2lab.cluster import RayEngines

    build = partial(TorchEngine.from_pretrained, cold_model, **KV)
    with RayEngines(build, 2, scheduler.make_policy("survival_move")) as found:
        yield found


def actors(engine, model_path) -> Actors:
    chat = protocol.chat_format("nano", tools=True, response_chars=60)
    tokenizer = FileTokenizer(model_path / "tokenizer.json", chat.frame.stop_token)
    return Actors(engine, SlowFirst(), tokenizer, chat)


def play(engine, model_path, during=None):
    """All groups, and `during(engine)` beside them."""

    async def both():
        beside = asyncio.ensure_future(during(engine)) if during else None
        groups = await rollouts.rollout_groups(PROBLEMS, 4, actors(engine, model_path), LIMITS)
        if beside is not None:
            await beside
        return [t for group in groups for t in group.trajectories]

    return asyncio.run(both())


def assert_same(found, expected):
    """Rounding may differ with the batch, so a token in a hundred trajectories may as well."""
    pairs = list(zip(found, expected, strict=True))
    same = [np.array_equal(a.response_ids, b.response_ids) for a, b in pairs]
    assert np.mean(same) > 0.9
    for one, other in (pair for pair, equal in zip(pairs, same, strict=True) if equal):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert (one.stop, one.reward) == (other.stop, other.reward)


@pytest.fixture(scope="module")
def local(cold_model):
    engine = TorchEngine.from_pretrained(cold_model, **KV)
    return play(engine, cold_model)


def test_two_engines_on_two_nodes_sample_what_one_here_samples(fleet, cold_model, local):
    import ray

    assert_same(play(fleet, cold_model), local)
    assert {row.engine for row in fleet.events if row.kind == "start"} == {"e0", "e1"}
    assert set(fleet.policy.ledger().values()) == {0}  # all is given back
    homes = ray.util.placement_group_table(fleet._group)["bundles_to_node_id"]
    assert len(set(homes.values())) == 2


def test_an_engine_killed_in_mid_step_costs_no_trajectory_and_is_replaced(fleet, cold_model, local):
    import ray

    async def kill(engine):
        while engine.load().running + engine.load().waiting < 8:
            await asyncio.sleep(0.05)
        ray.kill(engine._engines["e0"].actor)

    found = play(fleet, cold_model, kill)
    assert_same(found, local)
    assert StopReason.VOID not in {t.stop for t in found}
    assert fleet.counts["engines_lost"] == 1 and fleet.counts["restarts"] > 0
    ended = [row.traj for row in fleet.events if row.kind == "finish"]
    assert len(ended) == len(set(ended)) == 24

    net_version = 7
    asyncio.run(fleet.update_weights(net_version, weights_of(cold_model)))
    assert fleet.counts["replaced"] == 1 and set(fleet._engines) == {"e0", "e1"}
    again = play(fleet, cold_model)
    assert_same(again, local)
    assert {t.weight_version for t in again} == {net_version}
    late = fleet.events[len(fleet.events) // 2 :]
    assert {row.engine for row in late if row.kind == "start"} == {"e0", "e1"}


def weights_of(model_path):
    from rstar2lab.nano import model

    return model.load(model_path).state_dict()


def test_a_lost_node_s_engine_comes_back_on_another_node(fleet, ray_cluster, cold_model, local):
    import ray

    home = ray.util.placement_group_table(fleet._group)["bundles_to_node_id"][1]
    lost = next(node for node in ray_cluster.list_all_nodes() if node.node_id == home)

    async def remove(engine):
        while engine.load().running < 4:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(ray_cluster.remove_node, lost, False)

    if lost == ray_cluster.head_node:
        pytest.skip("Ray placed this engine on the head")
    found = play(fleet, cold_model, remove)
    ray_cluster.add_node(num_cpus=2)
    assert_same(found, local)
    assert fleet.counts["engines_lost"] == 1
    asyncio.run(fleet.update_weights(1, weights_of(cold_model)))
    assert set(fleet._engines) == {"e0", "e1"}


def test_new_weights_reach_every_engine(fleet, cold_model):
    changed = {name: tensor * 1.05 for name, tensor in weights_of(cold_model).items()}
    tokens = list(range(5, 25))

    async def both(engine):
        asked = [engine.generate(f"r/{i}", tokens, Sampling(6, seed=1)) for i in range(4)]
        found = await asyncio.gather(*asked)
        for i in range(4):
            await engine.abort(f"r/{i}")
        return found

    old = asyncio.run(both(fleet))
    asyncio.run(fleet.update_weights(3, changed))
    new = asyncio.run(both(fleet))
    here = TorchEngine.from_pretrained(cold_model, **KV)
    asyncio.run(here.update_weights(3, changed))
    (expected, *_) = asyncio.run(both(here))
    assert {c.weight_version for c in new} == {3}
    for completion in new:
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)
    assert not np.allclose(old[0].logprobs, expected.logprobs, atol=1e-3)


def test_a_request_that_fits_nowhere_is_refused_with_numbers(fleet):
    with pytest.raises(EngineError, match="2048"):
        asyncio.run(fleet.generate("r/0", list(range(30)) * 4, Sampling(4000)))


def test_more_engines_than_the_cluster_holds_is_a_clear_error(ray_cluster, cold_model):
    from rstar2lab.cluster import RayEngines

    build = partial(TorchEngine.from_pretrained, cold_model, **KV)
    policy = scheduler.make_policy("least")
    with pytest.raises(EngineError, match="find no room on the Ray cluster"):
        RayEngines(build, 40, policy, start_seconds=2)
