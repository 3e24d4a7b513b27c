"""Models other than ours in the torch engine: each against its own pass over the whole text."""

import asyncio

import numpy as np
import pytest
import torch
import transformers
from tiny import less_uniform
from transformers import AutoModelForCausalLM

from rstar2lab import config as cfg
from rstar2lab.engines import EngineError, Sampling
from rstar2lab.engines.causal import CausalLM
from rstar2lab.engines.qwen3 import Qwen3
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.learner import LocalLearner, Sample
from rstar2lab.types import StopReason, Trajectory

VOCABULARY, MAX_TOKENS = 40, 96
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GROUPED = SIZE | {"num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=MAX_TOKENS),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE, intermediate_size=48),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_TOKENS,
        bos_token_id=None, eos_token_id=None,
    ),
    "qwen3 with biases": lambda: transformers.Qwen3Config(
        **GROUPED, head_dim=8, attention_bias=True
    ),
}  # fmt: skip


def make_net(config, seed: int = 0):
    torch.manual_seed(seed)
    return less_uniform(AutoModelForCausalLM.from_config(config).eval())


@pytest.fixture(scope="module", params=FAMILIES)
def net(request):
    return make_net(FAMILIES[request.param]())


ROPE_AND_TABLE = pytest.mark.parametrize("net", ["llama", "gpt2"], indirect=True)


def make_engine(net, **settings) -> TorchEngine:
    settings = {"kv_tokens": 2048, "max_tokens": MAX_TOKENS, "max_sequences": 8} | settings
    return TorchEngine(net.config, net.state_dict(), **settings)


@torch.no_grad()
def gap(net, tokens, completion, temperature) -> float:
    """Largest |Δ log-prob| against one pass over prompt and completion."""
    ids = torch.tensor([[*tokens, *completion.token_ids.tolist()]])
    logits = net(input_ids=ids).logits[0, len(tokens) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(1, ids[0, len(tokens) :, None])[:, 0]
    return float((expected - torch.from_numpy(completion.logprobs)).abs().max())


async def three_turns(engine, number: int, temperature: float):
    """Each turn appends four tokens of a tool; returns (input, completion) of every turn."""
    rng, found = np.random.default_rng(number), []
    tokens = rng.integers(0, VOCABULARY, 5 + number).tolist()
    for turn in range(3):
        sampling = Sampling(6 + turn, temperature, seed=number, entropies=True)
        found.append((tokens, await engine.generate(f"r{number}", tokens, sampling)))
        tokens = tokens + found[-1][1].token_ids.tolist()
        tokens += rng.integers(0, VOCABULARY, 4).tolist()
    return found


def play(engine, temperatures=(1.0, 0.6, 1.4, 1.0)):
    async def main():
        return await asyncio.gather(
            *(three_turns(engine, i, temperature) for i, temperature in enumerate(temperatures))
        )

    return asyncio.run(main())


def test_logprobs_are_the_model_s_own_over_several_turns_lengths_and_temperatures(net):
    temperatures = (1.0, 0.6, 1.4, 1.0)
    for turns, temperature in zip(play(make_engine(net), temperatures), temperatures, strict=True):
        assert turns[1][1].cached_tokens == len(turns[0][0]) + 6 - 1  # all but the last sampled
        for tokens, completion in turns:
            assert gap(net, tokens, completion, temperature) < 1e-4


@ROPE_AND_TABLE
def test_a_full_cache_preempts_and_samples_the_same_tokens(net):
    roomy, tight = make_engine(net), make_engine(net, kv_tokens=64, max_tokens=64)
    expected, found = play(roomy), play(tight)
    assert tight.load().preemptions > 0 and roomy.load().preemptions == 0
    for a, b in zip(expected, found, strict=True):
        for (_, one), (_, other) in zip(a, b, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()


@ROPE_AND_TABLE
def test_new_weights_give_the_new_model_s_logprobs(net):
    engine, other = make_engine(net), make_net(net.config, seed=1)
    play(engine)
    asyncio.run(engine.update_weights(1, other.state_dict()))
    tokens, completion = play(engine)[0][0]
    assert completion.weight_version == 1
    assert gap(other, tokens, completion, 1.0) < 1e-4


def test_our_own_forward_pass_is_taken_only_where_it_fits():
    assert Qwen3.fits(transformers.Qwen3Config(**GROUPED))
    assert not Qwen3.fits(transformers.Qwen3Config(**GROUPED, attention_bias=True))
    assert not any(Qwen3.fits(make()) for make in FAMILIES.values())


def test_a_recurrent_model_is_refused_by_name():
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(EngineError, match="MambaForCausalLM keeps a state .* use vLLM"):
        make_engine(make_net(config))


@pytest.mark.parametrize("config", [
    transformers.MistralConfig(**GROUPED, sliding_window=32), FAMILIES["gpt2"](),
], ids=["window", "positions"])  # fmt: skip
def test_more_tokens_than_the_model_sees_are_refused(config):
    with pytest.raises(EngineError, match="lower max_tokens"):
        make_engine(make_net(config), max_tokens=MAX_TOKENS + 1)


def test_a_model_whose_cached_pass_differs_from_its_full_pass_is_refused(monkeypatch):
    net = make_net(FAMILIES["llama"]())
    inputs = CausalLM._inputs

    def one_place_late(self, ids_K, places):
        found = inputs(self, ids_K, places)
        return found | {"position_ids": found["position_ids"] * 2}

    monkeypatch.setattr(CausalLM, "_inputs", one_place_late)
    with pytest.raises(EngineError, match="other log-probs than its own full pass"):
        make_engine(net)


def test_weights_of_another_model_are_refused():
    net = make_net(FAMILIES["llama"]())
    tensors = net.state_dict()
    tensors["model.layers.9.extra"] = torch.zeros(1)
    with pytest.raises(EngineError, match=r"unexpected \['model.layers.9.extra'\]"):
        TorchEngine(net.config, tensors, kv_tokens=512, max_tokens=64, max_sequences=2)


def samples_of(engine) -> list[Sample]:
    """The last turn of each trajectory as a sample: prompt, tools and turns before it unmasked."""
    found = []
    for number, turns in enumerate(play(engine)):
        tokens, last = turns[-1]
        found.append(Sample(Trajectory(
            f"p{number}", 0, np.asarray(tokens, np.int32), last.token_ids,
            np.ones(len(last.token_ids), bool), last.logprobs, last.entropies, (),
            StopReason.ANSWERED,
        ), advantage=(-1.0) ** number))  # fmt: skip
    return found


def test_the_learner_updates_what_the_engine_sampled(net):
    """Its log-probs before the update are the engine's; a capped output layer is refused."""
    learn = net.train()
    make = lambda: LocalLearner(  # noqa: E731
        learn, cfg.Optimizer(lr=1e-3), cfg.Loss(minibatches=1), temperature=1.0
    )
    if getattr(net.config, "final_logit_softcapping", None):
        with pytest.raises(cfg.ConfigError, match="Gemma2ForCausalLM does more than one matrix"):
            make()
        return
    engine = make_engine(net.eval())
    samples = [s for s in samples_of(engine) if s.trajectory.problem_id in ("p0", "p3")]
    before = {k: v.clone() for k, v in net.state_dict().items()}
    stats = make().update(samples, np.random.default_rng(0))
    assert stats.parity < 1e-4
    assert stats.trained_tokens == sum(s.num_trained_tokens for s in samples)
    assert any(not torch.equal(v, before[k]) for k, v in net.state_dict().items())
    net.load_state_dict(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_logprobs_are_those_of_the_cpu(net):
    (tokens, completion), *_ = play(make_engine(net, device="cuda"))[0]
    assert gap(net, tokens, completion, 1.0) < 1e-3
