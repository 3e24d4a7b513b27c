"""Does an engine compute what transformers computes? The log-probs of the same tokens, compared.

This is the whole condition for sampling with one and training with the other.
"""

import asyncio

import numpy as np

from . import Engine, Sampling


async def logprob_gap(
    engine: Engine, net, *, prompts: int = 4, new_tokens: int = 32, seed: int = 0
) -> float:
    """Largest |Δ log-prob| between the engine and `net`'s own pass over sampled tokens, in nats.

    Random prompts of 4 to 99 tokens, temperature 1. About 1e-5 is rounding of float32; 1e-3 is
    another model.
    """
    rng, vocabulary = np.random.default_rng(seed), net.config.vocab_size
    inputs = [rng.integers(0, vocabulary, size).tolist() for size in rng.integers(4, 100, prompts)]
    found = await asyncio.gather(*(
        engine.generate(f"parity-{i}", ids, Sampling(new_tokens, seed=seed))
        for i, ids in enumerate(inputs)
    ))  # fmt: skip
    return max(
        float(np.abs(completion.logprobs - _chosen(net, ids, completion.token_ids)).max())
        for ids, completion in zip(inputs, found, strict=True)
    )


def _chosen(net, prompt_ids: list[int], sampled_ids: np.ndarray) -> np.ndarray:
    """The model's log-probs of the sampled tokens."""
    import torch

    ids = torch.tensor([prompt_ids + sampled_ids.tolist()], device=net.device)
    with torch.inference_mode():
        logprobs = net(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].cpu().numpy()
