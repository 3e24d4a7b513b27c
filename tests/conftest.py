"""Fixtures that several test modules share: a small tokenizer, a barely trained nano model."""

import os

import pytest
from hypothesis import settings
from tiny import CORPUS, TINY, FakeEnvironment, tiny_config, toml_of

from rstar2lab.nano import tokenizer
from rstar2lab.sandbox import Sandbox
from rstar2lab.types import Problem

pytest.register_assert_rewrite("engine_contract")
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(scope="module")
def one_thread():
    """Steps are small: a second thread costs more than it gives."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    """`tiny.toml` with two arms beside it, as the command line reads them."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "tiny.toml").write_text(toml_of(TINY))
    (folder / "arms").mkdir()
    (folder / "arms" / "grpo_roc.toml").write_text('[selection]\nselector = "roc_paper"\n')
    (folder / "arms" / "grpo_tool.toml").write_text('[selection]\nselector = "uniform"\n')
    return folder / "tiny.toml"


@pytest.fixture(scope="session")
def cold_start_dir(tmp_path_factory):
    """A folder of cold starts that holds the one of `tiny_config`."""
    from rstar2lab import sft

    folder = tmp_path_factory.mktemp("cold_start")
    with Sandbox(workers=2) as sandbox:
        sft.cold_start(tiny_config(), folder, sandbox.run_many, command="test")
    return folder


@pytest.fixture(scope="session")
def cold_model(cold_start_dir):
    """The checkpoint folder of the tiny cold start."""
    from rstar2lab import sft

    return sft.cached(tiny_config(), cold_start_dir)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A nano tokenizer whose words are those of four lines."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.train(CORPUS * 10).to_str())
    return tokenizer.FileTokenizer(path)


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster on this machine: a head with one processor, and two nodes with two each."""
    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # read when ray is imported
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster()
    found.add_node(num_cpus=1, include_dashboard=False)
    for _ in range(2):
        found.add_node(num_cpus=2)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def environment():
    return FakeEnvironment()


@pytest.fixture(scope="session")
def problem():
    return Problem("p1", "What is 6 * 7?", "42")
