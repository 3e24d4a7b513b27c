"""The cold start: batches, the learning rate, the cache, and a killed run that goes on."""

import json

import numpy as np
import pytest
import torch
from tiny import tiny_config

from rstar2lab import config as cfg
from rstar2lab import runs, sft
from rstar2lab.types import ToolResult, ToolStatus


def fast_tool(programs: list[str]) -> list[ToolResult]:
    return [ToolResult(ToolStatus.OK, f"{len(program)}\n") for program in programs]


# --- batches -------------------------------------------------------------------------------------


def take(stream, count: int) -> list[list[int]]:
    return [next(stream).tolist() for _ in range(count)]


def test_an_epoch_shows_no_dialogue_twice_and_nearly_all_of_them():
    lengths = np.random.default_rng(0).integers(20, 200, 1000)
    epoch = take(sft.batches(lengths, 32, seed=0), 31)
    numbers = [i for batch in epoch for i in batch]
    assert len(numbers) == len(set(numbers)) >= 31 * 32 - 32
    assert all(len(batch) == 32 for batch in epoch[:5])


def test_a_stream_started_later_goes_on_as_if_it_had_run_from_the_start():
    lengths = np.random.default_rng(0).integers(20, 200, 100)
    whole = take(sft.batches(lengths, 8, seed=3), 40)
    for first in (1, 11, 12, 13, 30):
        assert take(sft.batches(lengths, 8, seed=3, first_step=first), 40 - first) == whole[first:]
    assert take(sft.batches(lengths, 8, seed=4), 40) != whole


def test_batches_hold_dialogues_of_similar_length():
    lengths = np.random.default_rng(0).integers(20, 200, 2000)
    found = take(sft.batches(lengths, 20, seed=0), 100)
    padded = sum(len(b) * lengths[b].max() for b in found)
    assert padded < 1.25 * sum(lengths[b].sum() for b in found)


def test_fewer_dialogues_than_a_batch_still_train():
    assert take(sft.batches(np.asarray([5, 6, 7]), 8, seed=0), 2) != []


# --- the learning rate ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (39, 1.0), (40, 1.0), (70, 0.525), (100, 0.05)],
)
def test_the_rate_warms_up_holds_and_falls_linearly_to_five_percent(step, factor):
    settings = cfg.ColdStart(steps=100, warmup_steps=10, constant_fraction=0.4)
    assert sft.learning_rate_factor(step, settings) == pytest.approx(factor)


# --- the run -------------------------------------------------------------------------------------


def test_matrices_are_trained_by_muon_and_embeddings_and_norms_by_adamw():
    from rstar2lab.nano import model

    net = model.build(tiny_config().model, 60, 0)
    trainer = sft.ColdStartTrainer(net, tiny_config().cold_start)
    names = {id(p): name for name, p in net.named_parameters()}
    muon, adamw = (
        {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in trainer._optimizers
    )
    assert muon | adamw == set(names.values()) and not muon & adamw
    assert all(name.endswith("_proj.weight") for name in muon)
    assert all("norm" in name or "embed" in name for name in adamw)


def test_the_loss_is_over_assistant_tokens_only_and_padding_leaves_no_trace():
    from rstar2lab.nano import model

    net = model.build(tiny_config().model, 60, 0)
    rng = np.random.default_rng(0)
    dialogues = [sft.Encoded(rng.integers(0, 60, n), rng.random(n) < 0.5) for n in (10, 25, 17)]
    expected = []
    with torch.no_grad():
        for d in dialogues:
            logprobs = net(input_ids=torch.from_numpy(d.ids)[None]).logits[0].log_softmax(-1)
            places = np.flatnonzero(d.trained[1:])
            expected += [-float(logprobs[i, d.ids[i + 1]]) for i in places]
    loss = sft.ColdStartTrainer(net, tiny_config().cold_start).train_step(dialogues, 0)
    assert loss == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_cold_start_is_made_once_and_found_again(cold_start_dir, cold_model):
    def refuse(programs):
        raise AssertionError("the corpus was made again")

    assert sft.cold_start(tiny_config(), cold_start_dir, refuse) == cold_model
    folder = runs.RunFolder(cold_model.parent)
    losses = [row["loss"] for row in folder.rows()]
    assert len(losses) == 120 and losses[-1] < 0.4 * losses[0]
    assert json.loads((folder.path / "DONE.json").read_text())["steps"] == 120
    assert not (folder.path / "checkpoints").exists()


def test_the_cache_knows_what_decides_the_weights_and_nothing_else(tmp_path):
    key = sft.cache_key(tiny_config())
    for change in ({"cold_start__seed": 1}, {"model__width": 32}, {"chat__response_chars": 50}):
        assert sft.cache_key(tiny_config(**change)) != key
    for change in ({"optimizer__lr": 1e-2}, {"run__seed": 5}, {"problems__train": 41}):
        assert sft.cache_key(tiny_config(**change)) == key
    assert sft.cached(tiny_config(), tmp_path) is None


def test_a_stopped_cold_start_goes_on_from_its_checkpoint_and_ends_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "_CHECKPOINT_EVERY", 10)
    config = tiny_config(cold_start__steps=25, cold_start__dialogues=60)

    def stop_at(step):
        def progress(row):
            if row["step"] == step:
                raise KeyboardInterrupt

        return progress

    whole = sft.cold_start(config, tmp_path / "whole", fast_tool)
    for step in (7, 14):
        with pytest.raises(KeyboardInterrupt):
            sft.cold_start(config, tmp_path / "stopped", fast_tool, progress=stop_at(step))
        assert sft.cached(config, tmp_path / "stopped") is None
    resumed = sft.cold_start(config, tmp_path / "stopped", fast_tool)
    rows = [runs.RunFolder(path.parent).rows() for path in (whole, resumed)]
    assert rows[0] == rows[1] and len(rows[0]) == 25
    for name in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()


def test_dialogues_longer_than_the_context_are_left_out_and_counted(tmp_path):
    config = tiny_config(cold_start__steps=2, cold_start__dialogues=40, model__max_tokens=120)
    rows = []
    sft.cold_start(config, tmp_path, fast_tool, progress=rows.append)
    segments = sft.render_corpus(config, fast_tool)
    assert 0 < rows[0]["dialogues_too_long"] < len(segments)
