"""What every engine must do, as test classes that each engine's test module inherits.

`AnyEngine` needs a fixture `engine`. `ModelEngine` also needs `net`, the transformers model that
the engine serves at version 0, with `KV_TOKENS` of KV cache and `MAX_TOKENS` per sequence.
"""

import asyncio

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from tiny import less_uniform

from rstar2lab import config as cfg
from rstar2lab import protocol, rollout, stats
from rstar2lab.engines import Completion, EngineError, Sampling
from rstar2lab.nano import model, tasks
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.sandbox import Sandbox
from rstar2lab.types import StopReason, Trajectory

VOCABULARY, MAX_TOKENS, KV_TOKENS = 40, 128, 256
SETTINGS = cfg.Model(layers=2, width=48, heads=3, kv_heads=1, mlp_width=64, max_tokens=MAX_TOKENS)
SAME = 1e-4  # nats; what float32 leaves between two ways of computing one log-prob


def make_net(seed: int, vocabulary: int = VOCABULARY):
    return less_uniform(model.build(SETTINGS, vocabulary, seed).eval())


def prompt(number: int, length: int = 12) -> list[int]:
    return np.random.default_rng(number).integers(0, VOCABULARY, length).tolist()


def generate(engine, requests) -> list[Completion]:
    """All (request id, tokens, sampling) at once; completions in order."""

    async def main():
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return asyncio.run(main())


def one(engine, tokens, **sampling) -> Completion:
    sampling = {"max_new_tokens": 20, "seed": 1, "entropies": True} | sampling
    return generate(engine, [("r", tokens, Sampling(**sampling))])[0]


def another(net):
    """Other weights for the same configuration."""
    torch.manual_seed(1)
    return less_uniform(type(net)(net.config).eval())


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@torch.no_grad()
def reference(net, tokens, completion, temperature=1.0) -> torch.Tensor:
    """Transformers' scaled logits [T_new, V] at the places where the completion was sampled."""
    ids = torch.tensor([list(tokens) + completion.token_ids.tolist()])
    return net(input_ids=ids).logits[0, len(tokens) - 1 : -1] / temperature


def assert_is_of(net, tokens, found, temperature=1.0, top_p=1.0) -> None:
    """Log-probs are those of `net`'s distribution after temperature and top-p."""
    full_TV = reference(net, tokens, found, temperature).softmax(-1).double().numpy()
    assert len(found.token_ids) == len(found.logprobs) == len(full_TV)
    for probs, token, logprob in zip(full_TV, found.token_ids, found.logprobs, strict=True):
        order = np.argsort(-probs)
        nucleus = order[: int(np.searchsorted(probs[order].cumsum(), top_p)) + 1]
        assert token in nucleus
        assert abs(logprob - np.log(probs[token] / probs[nucleus].sum())) < SAME


class AnyEngine:
    """What holds whatever the tokens are; a scripted engine, too."""

    def test_a_completion_has_one_logprob_and_one_entropy_per_token(self, engine):
        found = one(engine, prompt(1), max_new_tokens=4)
        assert len(found.token_ids) == len(found.logprobs) == len(found.entropies) == 4
        assert found.finish == "length" and found.token_ids.dtype == np.int32
        assert found.logprobs.dtype == found.entropies.dtype == np.float32
        assert one(engine, prompt(1), max_new_tokens=4, entropies=False).entropies is None

    def test_no_completion_is_longer_than_asked_and_the_stop_token_is_included(self, engine):
        free = one(engine, prompt(1), max_new_tokens=6).token_ids.tolist()
        asyncio.run(engine.abort("r"))
        found = one(engine, prompt(1), max_new_tokens=6, stop_ids=(free[-1],))
        first = free.index(free[-1]) + 1
        assert found.finish == "stop" and found.token_ids.tolist() == free[:first]
        assert len(found.logprobs) == len(found.entropies) == first

    def test_completions_carry_the_version_of_the_weights(self, engine, net):
        assert one(engine, prompt(1)).weight_version == 0
        asyncio.run(engine.update_weights(3, net.state_dict()))
        assert one(engine, prompt(1)).weight_version == 3

    def test_a_tool_s_result_is_delivered_and_an_idle_engine_has_no_load(self, engine):
        async def tool():
            await asyncio.sleep(0.001)
            return "42"

        async def main():
            return await engine.deliver(tool())

        assert asyncio.run(main()) == "42"
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert engine.capacity().tokens >= engine.capacity().block > 0

    def test_a_tool_that_raises_does_so_at_its_own_caller(self, engine):
        async def tool():
            raise ValueError("bad tool")

        async def main():
            generated = engine.generate("a", prompt(1), Sampling(5, seed=1))
            return await asyncio.gather(generated, engine.deliver(tool()), return_exceptions=True)

        completion, error = asyncio.run(main())
        assert len(completion.token_ids) == 5 and isinstance(error, ValueError)

    def test_aborting_what_is_unknown_is_harmless(self, engine):
        asyncio.run(engine.abort("nobody"))


class ModelEngine(AnyEngine):
    """What holds for an engine that runs a model."""

    GIVES_ENTROPIES_WITH_TOP_P = True

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
    @pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
    def test_logprobs_are_those_of_transformers_after_temperature_and_top_p(
        self, engine, net, temperature, top_p
    ):
        tokens = prompt(2)
        found = one(engine, tokens, temperature=temperature, top_p=top_p)
        assert_is_of(net, tokens, found, temperature, top_p)
        if top_p == 1 or self.GIVES_ENTROPIES_WITH_TOP_P:  # of the full distribution
            full = reference(net, tokens, found, temperature).softmax(-1)
            expected = torch.special.entr(full).sum(-1)
            np.testing.assert_allclose(found.entropies, expected, atol=SAME)
        else:
            assert found.entropies is None

    def test_greedy_takes_the_maximum_and_its_logprobs_are_zero(self, engine, net):
        tokens = prompt(3)
        found = one(engine, tokens, temperature=0.0)
        assert found.token_ids.tolist() == reference(net, tokens, found).argmax(-1).tolist()
        assert np.all(found.logprobs == 0) and np.all(found.entropies == 0)

    def test_requests_of_all_kinds_at_once_are_each_right(self, engine, net):
        kinds = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (1.3, 0.5)]
        requests = [
            (f"r{i}", prompt(i, length), Sampling(15, *kinds[i], seed=i, entropies=i % 2 == 0))
            for i, length in enumerate((1, 3, 40, 17))
        ]
        for (_, tokens, sampling), found in zip(requests, generate(engine, requests), strict=True):
            assert_is_of(net, tokens, found, sampling.temperature, sampling.top_p)

    def test_a_seed_repeats_its_tokens_and_seeds_differ(self, engine):
        first, again, other = (
            generate(engine, [("r", prompt(1), Sampling(20, seed=seed))])[0].token_ids.tolist()
            for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_the_budget_is_used_exactly(self, engine):
        for budget in (1, 2, MAX_TOKENS - 12):
            found = one(engine, prompt(6), max_new_tokens=budget)
            assert (found.finish, len(found.token_ids)) == ("length", budget)

    def test_a_stop_token_on_the_last_place_of_the_budget_is_a_stop(self, engine):
        free = one(engine, prompt(5)).token_ids.tolist()
        found = one(engine, prompt(5), max_new_tokens=1, stop_ids=(free[0],))
        assert found.finish == "stop"

    @pytest.mark.parametrize(("tokens", "new"), [(12, MAX_TOKENS - 11), (0, 5), (5, 0)])
    def test_a_request_that_can_never_fit_is_refused_with_what_to_change(self, engine, tokens, new):
        with pytest.raises(EngineError, match="max_new_tokens"):
            one(engine, prompt(1, tokens), max_new_tokens=new)
        assert engine.load().running == engine.load().waiting == 0

    def test_an_aborted_request_returns_what_it_has(self, engine, net):
        async def main():
            task = asyncio.ensure_future(
                engine.generate("r", prompt(1), Sampling(110, seed=1, entropies=True))
            )
            await until(lambda: engine.load().running == 1)
            await engine.abort("r")
            return await task

        found = asyncio.run(main())
        assert found.finish == "abort" and len(found.token_ids) < 110
        assert len(found.entropies) == len(found.token_ids)
        assert_is_of(net, prompt(1), found)
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)

    def test_load_counts_every_request_once_and_stays_within_the_capacity(self, engine, net):
        """Twelve requests of 80 tokens in room for 256: some must wait or be preempted."""
        wanted = [(f"r{i}", prompt(i), Sampling(68, seed=i)) for i in range(12)]
        before, seen = engine.load(), []

        async def main():
            tasks = [asyncio.ensure_future(engine.generate(*request)) for request in wanted]
            await until(lambda: engine.load().running > 1)
            while not all(task.done() for task in tasks):
                seen.append(engine.load())
                await asyncio.sleep(0.001)
            return [task.result() for task in tasks]

        found = asyncio.run(main())
        assert all(load.running + load.waiting <= 12 for load in seen)
        assert max(load.waiting for load in seen) > 0
        assert max(load.used_tokens for load in seen) > 68
        assert max(load.used_tokens for load in seen) <= engine.capacity().tokens == KV_TOKENS
        after = engine.load()
        assert after.preemptions > before.preemptions
        assert after.sampled_tokens - before.sampled_tokens == 12 * 68
        for (_, tokens, _), completion in zip(wanted, found, strict=True):
            assert_is_of(net, tokens, completion)

    def test_the_second_turn_reuses_the_first(self, engine, net):
        tokens = prompt(7, 40)

        async def main():
            first = await engine.generate("r", tokens, Sampling(30, seed=3))
            longer = tokens + first.token_ids.tolist() + [1, 2, 3, 4, 5]
            return first, longer, await engine.generate("r", longer, Sampling(30, seed=3))

        first, longer, second = asyncio.run(main())
        block = engine.capacity().block
        assert first.cached_tokens == 0
        assert (len(longer) - 6) // block * block <= second.cached_tokens < len(longer)
        assert second.cached_tokens > 0
        assert_is_of(net, longer, second)

    def test_new_weights_drop_the_prefixes_and_give_the_new_logprobs(self, engine, net):
        other, tokens = another(net), prompt(8, 70)

        async def main():
            await engine.generate("r", tokens, Sampling(5, seed=3))
            await engine.update_weights(7, other.state_dict())
            return await engine.generate("r", tokens, Sampling(20, seed=3))

        found = asyncio.run(main())
        assert (found.weight_version, found.cached_tokens) == (7, 0)
        assert_is_of(other, tokens, found)
        with pytest.raises(AssertionError):  # the two models can be told apart
            assert_is_of(net, tokens, found)

    def test_an_update_waits_for_running_requests_which_keep_their_version(self, engine, net):
        other = another(net)

        async def main():
            running = asyncio.ensure_future(engine.generate("a", prompt(1), Sampling(60, seed=1)))
            await until(lambda: engine.load().running == 1)
            update = asyncio.ensure_future(engine.update_weights(1, other.state_dict()))
            await asyncio.sleep(0)
            late = asyncio.ensure_future(engine.generate("b", prompt(2), Sampling(20, seed=1)))
            await asyncio.wait_for(update, 60)
            return running.done(), await running, await late

        done, old, new = asyncio.run(main())
        assert done and (old.weight_version, new.weight_version) == (0, 1)
        assert_is_of(net, prompt(1), old)
        assert_is_of(other, prompt(2), new)


def nano_rollouts(engine, model_path, count: int) -> list[Trajectory]:
    """One scored trajectory of the nano model per problem, its programs run by the sandbox."""
    tokens = FileTokenizer(model_path / "tokenizer.json")
    chat = protocol.chat_format("nano", tools=True, response_chars=200)
    limits = rollout.RolloutSettings(10, 1, 320, 1.0, 1.0, "same distribution")
    with Sandbox(workers=2) as sandbox:
        actors = rollout.Actors(engine, sandbox, tokens, chat)
        problems = tasks.problems(count, seed=5, held_out=True)
        groups = asyncio.run(rollout.rollout_groups(problems, 1, actors, limits))
    return [trajectory for group in groups for trajectory in group.trajectories]


def assert_same_distribution(net, ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    """Two engines' rollouts of one model, problem by problem; neither is the other's copy.

    Each log-prob is the model's. Lengths and numbers of calls pass a two-sample test, and the
    interval of the paired difference in reward holds 0, at levels that a right engine fails once in
    a thousand times.
    """
    for t in ours + theirs:
        assert t.stop is not StopReason.VOID
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids])).long()
        with torch.inference_mode():
            logprobs = net(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found = logprobs.gather(1, ids[1:, None])[len(t.prompt_ids) - 1 :, 0].numpy()
        assert np.abs(found - t.logprobs)[t.loss_mask].max() < SAME
    pairs = zip(ours, theirs, strict=True)
    assert np.mean([a.response_ids.tolist() == b.response_ids.tolist() for a, b in pairs]) < 0.5
    for value in (lambda t: len(t.response_ids), lambda t: t.num_calls):
        assert ks_2samp([value(t) for t in ours], [value(t) for t in theirs]).pvalue > 1e-3
    rewards = [[t.reward for t in trajectories] for trajectories in (ours, theirs)]
    difference = np.subtract(*rewards)
    interval = stats.t_interval(difference, level=0.999)
    assert interval.low <= 0 <= interval.high, interval
    assert 0.1 < np.mean(rewards) < 0.9  # a test of rewards that are all alike tests nothing
