"""Sandbox pools on a real Ray cluster of two nodes on this machine."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from rstar2lab import extras
from rstar2lab.sandbox import Limits, Sandbox, SandboxError
from rstar2lab.types import ToolStatus

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not extras.is_installed("ray"), reason="needs the extra [cluster]"),
]


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    return ray_cluster


@pytest.fixture(scope="module")
def sandbox(cluster):
    from rstar2lab.cluster import RaySandbox

    with RaySandbox(Limits(cpu_seconds=2, wall_seconds=2), workers_per_cpu=2) as found:
        yield found


def test_one_pool_runs_on_every_node_with_processors_to_spare(sandbox, cluster):
    assert len(set(sandbox.nodes)) == 2 and sandbox.workers == 4
    with Sandbox(workers=1) as local:
        assert sandbox.level == local.level


def test_results_are_those_of_a_local_sandbox_in_order(sandbox):
    programs = ["6*7", "print(input())", "1/0", "while True: pass"]
    with Sandbox(workers=1, limits=Limits(cpu_seconds=2, wall_seconds=2)) as local:
        for program in programs:
            far, near = sandbox.run(program, "in"), local.run(program, "in")
            assert (far.status, far.stdout, far.stderr) == (near.status, near.stdout, near.stderr)
    results = sandbox.run_many([f"print({i})" for i in range(100)])
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(100)]
    assert sandbox.run("6*7", echo=False).stdout == ""


def test_a_lost_node_s_calls_are_repeated_elsewhere_and_a_new_node_is_used(sandbox, cluster):
    lost = next(n for n in cluster.worker_nodes if n.node_id in sandbox.nodes)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(sandbox.run_many, [f"print({i})" for i in range(400)])
        time.sleep(0.5)
        cluster.remove_node(lost, allow_graceful=False)
        results = found.result(120)
    assert Counter(r.status for r in results) == {ToolStatus.OK: 400}
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(400)]
    assert sandbox.retries > 0 and sandbox.pools_lost == 1 and sandbox.failures == 0
    assert lost.node_id not in sandbox.nodes
    cluster.add_node(num_cpus=2)
    import ray

    ray.kill(sandbox._pools[0].actor)  # the other pool dies too: both nodes get one again
    until = time.monotonic() + 60
    while len(sandbox.nodes) < 2 and time.monotonic() < until:
        assert sandbox.run("6*7").stdout == "42\n"
    assert len(sandbox.nodes) == 2


def test_a_cluster_without_processors_to_spare_is_a_clear_error(cluster):
    from rstar2lab.cluster import RaySandbox

    with pytest.raises(SandboxError, match="lower spare_cpus or add a node"):
        RaySandbox(spare_cpus=64)
