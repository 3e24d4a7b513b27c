"""The torch engine against itself; its contract, and that of the scripted and watched engines."""

import asyncio
import random

import numpy as np
import pytest
import torch
from engine_contract import (
    KV_TOKENS,
    MAX_TOKENS,
    VOCABULARY,
    AnyEngine,
    ModelEngine,
    generate,
    make_net,
    one,
    prompt,
)
from scipy.stats import chisquare

from rstar2lab.engines import EngineError, Sampling
from rstar2lab.engines.scripted import ScriptedEngine
from rstar2lab.engines.torch_engine import TorchEngine, draw, sampling_logprobs, uniforms
from rstar2lab.engines.watched import WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net():
    return make_net(0)


def make_engine(net, **settings) -> TorchEngine:
    settings = {"kv_tokens": 4096, "max_tokens": MAX_TOKENS} | settings
    return TorchEngine(net.config, net.state_dict(), **settings)


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8)])
def test_many_seeds_draw_the_distribution_that_the_logprobs_claim(temperature, top_p):
    small = make_net(4, vocabulary=8)
    engine = make_engine(small, max_tokens=16, max_sequences=512, kv_tokens=512 * 16)
    settings = {"temperature": temperature, "top_p": top_p}
    found = generate(
        engine, [(f"r{s}", [1, 2, 3], Sampling(1, seed=s, **settings)) for s in range(4000)]
    )
    with torch.no_grad():
        logits = small(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    probs = (logits / temperature).softmax(-1).double().numpy()
    order = np.argsort(-probs)
    outside = order[int(np.searchsorted(probs[order].cumsum(), top_p)) + 1 :]
    probs[outside] = 0
    counts = np.bincount([c.token_ids[0] for c in found], minlength=8)
    assert counts[outside].sum() == 0
    inside = probs > 0
    expected = 4000 * probs[inside] / probs.sum()
    enough = expected > 5
    observed = np.append(counts[inside][enough], counts[inside][~enough].sum())
    expected = np.append(expected[enough], expected[~enough].sum())
    keep = expected > 0
    assert chisquare(observed[keep], expected[keep]).pvalue > 1e-4


def test_the_random_stream_is_uniform_over_seeds_and_over_positions():
    numbers = np.arange(20_000)
    for stream in (uniforms(numbers, np.full(20_000, 7)), uniforms(np.full(20_000, 7), numbers)):
        assert stream.min() >= 0 and stream.max() < 1
        assert chisquare(np.histogram(stream, 50, (0, 1))[0]).pvalue > 1e-4
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.03


def test_drawing_never_returns_an_impossible_token():
    impossible = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        assert int(draw(impossible, np.asarray([u]))) in (1, 3)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1.0, 4)):
        found = sampling_logprobs(logits, torch.ones(1), torch.tensor([top_p]))
        assert int(torch.isfinite(found).sum()) == kept
        assert float(found.exp().sum()) == pytest.approx(1.0)


def test_rows_with_and_without_top_p_do_not_disturb_each_other():
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    temperatures, top_ps = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 0.5, 0.3])
    together = sampling_logprobs(logits, temperatures, top_ps)
    for row in range(3):
        alone = sampling_logprobs(logits[[row]], temperatures[[row]], top_ps[[row]])
        torch.testing.assert_close(together[[row]], alone)


# --- ends ----------------------------------------------------------------------------------------


def test_a_stop_id_of_one_request_does_not_stop_another(net):
    tokens = prompt(5)
    free = one(make_engine(net), tokens).token_ids.tolist()
    settings = {"max_new_tokens": 20, "seed": 1}
    stopped, other = generate(
        make_engine(net),
        [
            ("a", tokens, Sampling(**settings, stop_ids=(free[0],))),
            ("b", tokens, Sampling(**settings)),
        ],
    )
    assert (stopped.finish, len(stopped.token_ids)) == ("stop", 1)
    assert (other.finish, other.token_ids.tolist()) == ("length", free)


@pytest.mark.parametrize(
    ("settings", "tokens", "new"),
    [
        ({"max_tokens": 32}, 12, 21),
        ({"kv_tokens": 64}, 50, 15),
        ({"kv_tokens": 70}, 50, 18),  # 70 tokens are 4 whole blocks of 16
        ({}, 0, 5),
        ({}, 5, 0),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_what_to_change(net, settings, tokens, new):
    engine = make_engine(net, **settings)
    with pytest.raises(EngineError, match="max_new_tokens"):
        one(engine, prompt(1, tokens), max_new_tokens=new)
    assert engine.load().running == engine.load().waiting == 0


@pytest.mark.parametrize("kv_tokens", [64, 70])
def test_a_request_that_fits_exactly_completes(net, kv_tokens):
    found = one(make_engine(net, kv_tokens=kv_tokens), prompt(1, 50), max_new_tokens=14)
    assert len(found.token_ids) == 14


# --- batches, memory, order ----------------------------------------------------------------------


def assert_same(first, second, exact=False):
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=0 if exact else 2e-5)


def requests(count: int, new: int = 30):
    rng = np.random.default_rng(9)
    return [
        (f"r{i}", prompt(i, int(rng.integers(4, 30))), Sampling(new, seed=i)) for i in range(count)
    ]


def test_the_company_of_a_request_does_not_change_its_tokens(net):
    wanted = requests(12)
    alone = [generate(make_engine(net), [request])[0] for request in wanted]
    assert_same(alone, generate(make_engine(net), wanted))
    assert_same(alone[::-1], generate(make_engine(net), wanted[::-1]))
    assert_same(alone, generate(make_engine(net, max_sequences=5), wanted))


def test_a_full_cache_preempts_and_recomputes_the_same_tokens(net):
    wanted = requests(12)
    roomy, tight = make_engine(net), make_engine(net, kv_tokens=160)
    assert_same(generate(roomy, wanted), generate(tight, wanted))
    assert roomy.load().preemptions == 0 and tight.load().preemptions > 0


def test_the_newest_request_is_preempted_and_the_oldest_finishes_first(net):
    """Four equal requests in room for two and a half: they finish in order of arrival."""
    engine, finished = make_engine(net, kv_tokens=160), []
    preempted = []
    original = engine._preempt_newest

    def spy():
        before = [r.id for r in engine._running]
        original()
        preempted.append((before, {r.id for r in engine._running}))

    engine._preempt_newest = spy

    async def ask(name, length, new):
        await engine.generate(name, prompt(1, length), Sampling(new, seed=1))
        finished.append(name)

    async def main():
        # r0 ends early, so that the packed rows are no longer in order of arrival
        await asyncio.gather(ask("r0", 12, 8), *(ask(f"r{i}", 12, 60) for i in range(1, 5)))

    asyncio.run(main())
    assert finished == [f"r{i}" for i in range(5)]
    assert preempted and all(set(before) - after == {max(before)} for before, after in preempted)


def saved_tokens(engine) -> int:
    """Room, in tokens, that prefixes of ended turns take until it is needed."""
    return 16 * sum(-(-len(prefix.tokens) // 16) for prefix in engine._saved.values())


def test_used_tokens_stay_within_the_capacity_and_return_to_zero(net):
    engine, seen = make_engine(net, kv_tokens=160), []

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(*request)) for request in requests(10)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            seen.append(engine.load())
            assert engine.load().used_tokens + saved_tokens(engine) <= 160
        for i in range(10):
            await engine.abort(f"r{i}")

    asyncio.run(main())
    assert max(load.running for load in seen) > 1
    load = engine.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)


# --- prefixes and weights ------------------------------------------------------------------------


async def two_turns(engine, name="r", seed=3):
    """A turn, five tool tokens, another turn."""
    sampling = Sampling(10, seed=seed)
    first = await engine.generate(name, prompt(7), sampling)
    tokens = prompt(7) + first.token_ids.tolist() + [1, 2, 3, 4, 5]
    return tokens, first, await engine.generate(name, tokens, sampling)


def test_the_second_turn_reuses_the_first_and_samples_the_same(net):
    engine = make_engine(net)
    tokens, first, second = asyncio.run(two_turns(engine))
    assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt(7)) + 10 - 1)
    fresh = one(make_engine(net), tokens, max_new_tokens=10, seed=3)
    assert fresh.cached_tokens == 0
    assert_same([second], [fresh])


def test_only_the_common_prefix_is_reused(net):
    engine = make_engine(net)
    one(engine, prompt(7), max_new_tokens=10)
    other = prompt(7)[:6] + [(t + 1) % VOCABULARY for t in prompt(7)[6:]]
    found = one(engine, other, max_new_tokens=10)
    assert found.cached_tokens == 6
    assert_same([found], [one(make_engine(net), other, max_new_tokens=10)])


def test_a_prefix_of_another_trajectory_is_not_reused(net):
    engine = make_engine(net)
    generate(engine, [("a", prompt(7), Sampling(10, seed=1))])
    assert generate(engine, [("b", prompt(7), Sampling(10, seed=1))])[0].cached_tokens == 0


def test_saved_prefixes_give_way_before_a_request_is_preempted(net):
    engine = make_engine(net, kv_tokens=128)
    for i in range(5):
        generate(engine, [(f"r{i}", prompt(i, 30), Sampling(20, seed=i))])
    assert engine.load().preemptions == 0 and engine.load().used_tokens == 0
    assert 0 < saved_tokens(engine) <= 128


def test_later_changes_of_the_learner_s_tensors_do_not_reach_the_engine(net):
    own = make_net(2)
    engine = make_engine(own)
    before = one(engine, prompt(1))
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    asyncio.run(engine.abort("r"))
    assert_same([before], [one(engine, prompt(1))], exact=True)


def test_an_update_with_nothing_waiting_behind_it_ends(net):
    engine = make_engine(net)

    async def main():
        running = asyncio.ensure_future(engine.generate("a", prompt(1), Sampling(20, seed=1)))
        while not engine.load().running:
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.update_weights(1, make_net(1).state_dict()), 20)
        return await running

    assert asyncio.run(main()).weight_version == 0
    assert one(engine, prompt(1)).weight_version == 1


# --- abort, loops, faults ------------------------------------------------------------------------


def test_an_aborted_request_returns_what_it_has(net):
    engine = make_engine(net)
    free = one(engine, prompt(1), max_new_tokens=100).token_ids.tolist()

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(i, prompt(1), Sampling(100, seed=1)))
                 for i in ("a", "b")]  # fmt: skip
        while engine.step < 140:
            await asyncio.sleep(0)
        await engine.abort("a")
        return await asyncio.gather(*tasks)

    aborted, other = asyncio.run(main())
    assert aborted.finish == "abort" and 0 < len(aborted.token_ids) < 100
    assert aborted.token_ids.tolist() == free[: len(aborted.token_ids)]
    assert len(aborted.logprobs) == len(aborted.token_ids)
    assert other.finish == "length" and other.token_ids.tolist() == free


def test_a_waiting_request_can_be_aborted(net):
    engine = make_engine(net, max_sequences=1)

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(i, prompt(1), Sampling(20, seed=1)))
                 for i in ("a", "b")]  # fmt: skip
        while not engine.load().running:
            await asyncio.sleep(0)
        await engine.abort("b")
        return await asyncio.gather(*tasks)

    first, second = asyncio.run(main())
    assert (first.finish, second.finish, len(second.token_ids)) == ("length", "abort", 0)


def test_one_engine_serves_one_event_loop_after_another(net):
    engine = make_engine(net)
    first = asyncio.run(two_turns(engine, "a"))
    second = asyncio.run(two_turns(engine, "b"))
    assert_same(first[1:], second[1:])


def test_a_cancelled_batch_leaves_an_engine_that_works_in_the_next_loop(net):
    engine = make_engine(net)

    async def interrupted():
        async def tool():
            await asyncio.sleep(60)

        tasks = [asyncio.ensure_future(engine.generate("a", prompt(1), Sampling(100, seed=1))),
                 asyncio.ensure_future(engine.deliver(tool()))]  # fmt: skip
        while engine.step < 3:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(interrupted())
    load = engine.load()
    assert (load.running, load.waiting) == (0, 0)
    assert_same(asyncio.run(two_turns(engine))[1:], asyncio.run(two_turns(make_engine(net)))[1:])


def test_a_fault_inside_a_step_reaches_every_caller_and_the_engine_goes_on(net):
    engine, calls = make_engine(net), []
    logits = engine._model.logits

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise MemoryError("out of memory")
        return logits(*arguments)

    engine._model.logits = failing

    async def main():
        async def tool():
            await asyncio.sleep(0.01)

        asked = [engine.generate(i, prompt(1), Sampling(20, seed=1)) for i in ("a", "b")]
        return await asyncio.gather(*asked, engine.deliver(tool()), return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [MemoryError] * 3
    load = engine.load()
    assert (load.running, load.waiting) == (0, 0)
    assert_same([one(engine, prompt(1))], [one(make_engine(net), prompt(1))])


# --- tools ---------------------------------------------------------------------------------------


def trajectories_with_tools(net, delay_of, **settings):
    """Eight trajectories of three turns whose tools take the time that `delay_of()` says."""
    engine = make_engine(net, **settings)

    async def tool(number):
        await asyncio.sleep(delay_of())
        return [number % VOCABULARY] * 3

    async def trajectory(number):
        tokens, found = prompt(number, 5 + number), []
        for _ in range(3):
            new = 4 + number if len(found) < 2 else 9
            found.append(await engine.generate(f"r{number}", tokens, Sampling(new, seed=number)))
            tokens = tokens + found[-1].token_ids.tolist()
            tokens += await engine.deliver(tool(number))
        return found

    async def main():
        return await asyncio.gather(*(trajectory(i) for i in range(8)))

    return [c for found in asyncio.run(main()) for c in found]


@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 160}, {"tool_steps": 0}])
def test_every_bit_is_the_same_whether_tools_are_fast_or_slow(net, settings):
    instant = trajectories_with_tools(net, lambda: 0.0, **settings)
    for seed in range(3):
        rng = random.Random(seed)
        slow = trajectories_with_tools(net, lambda rng=rng: rng.random() * 0.02, **settings)
        assert_same(instant, slow, exact=True)
        assert [c.cached_tokens for c in slow] == [c.cached_tokens for c in instant]


def test_every_bit_is_the_same_after_the_engine_has_served_something_else(net):
    """What a resumed run relies on: a batch does not depend on the steps that came before it."""
    engine = make_engine(net)

    async def batch():
        async def one_of(number):
            first = await engine.generate(
                f"r{number}", prompt(number), Sampling(5 + number, seed=1)
            )
            await engine.deliver(asyncio.sleep(0))
            tokens = prompt(number) + first.token_ids.tolist() + [1]
            second = await engine.generate(f"r{number}", tokens, Sampling(20, seed=1))
            await engine.abort(f"r{number}")
            return [first, second]

        found = await asyncio.gather(*(one_of(i) for i in range(6)))
        return [c for pair in found for c in pair]

    first = asyncio.run(batch())
    for offset in (1, 3, 6):
        one(engine, prompt(1), max_new_tokens=offset)
        asyncio.run(engine.abort("r"))
        assert_same(first, asyncio.run(batch()), exact=True)


def test_decoding_goes_on_while_a_tool_runs(net):
    engine = make_engine(net, tool_steps=8)

    async def main():
        async def tool():
            while engine.step < 3:  # ends only if others are decoded meanwhile
                await asyncio.sleep(0)
            return engine.step

        _, step = await asyncio.gather(
            engine.generate("a", prompt(1), Sampling(40, seed=1)), engine.deliver(tool())
        )
        return step

    assert 3 <= asyncio.run(main()) <= 8


# --- the protocol, for every engine --------------------------------------------------------------

LINE = [3, 1, 4, 1, 5, 9]


class TestTorch(ModelEngine):
    @pytest.fixture
    def engine(self, net):
        made = make_engine(net, kv_tokens=KV_TOKENS)
        yield made
        made.close()


class TestScripted(AnyEngine):
    @pytest.fixture(params=[lambda engine: engine, WatchedEngine])
    def engine(self, request):
        return request.param(ScriptedEngine(lambda rid: [LINE] * 9))


def test_a_watched_engine_says_what_each_trajectory_did_and_changes_nothing(net):
    async def tool(seconds):
        await asyncio.sleep(seconds)

    async def rollout(engine, name, seconds):
        first = await engine.generate(name, prompt(1), Sampling(5, seed=1))
        await engine.deliver(tool(seconds))
        tokens = prompt(1) + first.token_ids.tolist()
        return await engine.generate(name, [*tokens, 7], Sampling(3, seed=1))

    async def main(engine, seconds):
        return await asyncio.gather(*(rollout(engine, name, seconds) for name in "ab"))

    spans = []
    for seconds in (0, 0.01):
        engine = WatchedEngine(make_engine(net))
        found = asyncio.run(main(engine, seconds))
        expected = asyncio.run(main(make_engine(net), seconds))
        assert [c.logprobs.tolist() for c in found] == [c.logprobs.tolist() for c in expected]
        spans.append([s for s in engine.spans if s.request_id == "b"])
    steps = [[(s.kind, s.first_step, s.last_step) for s in each] for each in spans]
    assert steps[0] == steps[1] and [kind for kind, *_ in steps[0]] == ["sampling", "tool"] + [
        "sampling"
    ]
    first, waited, second = spans[1]
    assert (first.tokens, first.input_tokens, first.cached_tokens) == (5, 12, 0)
    assert (second.tokens, second.input_tokens, second.cached_tokens) == (3, 18, 16)
    assert waited.end - waited.start >= 0.01 and waited.tokens == 0
    assert first.last_step - first.first_step == 5
