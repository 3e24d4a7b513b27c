"""Does vLLM compute what transformers computes? A checkpoint is loaded in both and compared.

This is the whole condition for sampling with one and training with the other: the log-probs of the
same tokens agree. Runs on vLLM's CPU build and on its GPU wheel; in one process, so that nothing is
left.
"""

import os
from pathlib import Path

import numpy as np

from .. import extras

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def logprob_gap(
    model_path: str | Path, *, prompts: int = 4, new_tokens: int = 32, seed: int = 0
) -> float:
    """Largest |Δ log-prob| between vLLM and transformers on prompt and sampled tokens, in nats.

    Random prompts, temperature 1, float32. About 1e-5 is rounding; 1e-3 is another model.

    Raises:
        extras.MissingExtra: vLLM is not installed.
    """
    if not extras.is_installed("vllm"):
        raise extras.MissingExtra(extras.hint("vllm"))
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    from transformers import AutoModelForCausalLM

    vllm = extras.load("vllm")
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    rng, vocabulary = np.random.default_rng(seed), reference.config.vocab_size
    inputs = [rng.integers(0, vocabulary, size).tolist() for size in rng.integers(4, 100, prompts)]
    engine = vllm.LLM(
        model=str(model_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=reference.config.max_position_embeddings,
        max_num_seqs=8,
        disable_log_stats=True,
    )
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in inputs],
        vllm.SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0,
        ),
        use_tqdm=False,
    )
    return max(_gap(reference, ids, output) for ids, output in zip(inputs, outputs, strict=True))


def _gap(reference, prompt_ids: list[int], output) -> float:
    import torch

    sampled = output.outputs[0]
    ids = prompt_ids + list(sampled.token_ids)
    found = [
        entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], ids[1:], strict=False)
    ]
    found += [
        entry[i].logprob for entry, i in zip(sampled.logprobs, sampled.token_ids, strict=True)
    ]
    with torch.inference_mode():
        logprobs = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()
    return float(np.abs(np.asarray(found) - expected).max())
