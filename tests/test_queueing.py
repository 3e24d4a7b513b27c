"""The queue model against closed forms and against itself at its edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2lab.queueing import answered, answered_in_batches, servers_needed


def test_three_calls_on_one_server_in_numbers():
    """Work of 2 s each, arriving at 0, 1 and 10: answered at 2, 4 and 12."""
    assert answered([0, 1, 10], [2, 2, 2], 1).tolist() == [2, 4, 12]
    assert answered([0, 1, 10], [2, 2, 2], 2).tolist() == [2, 3, 12]


def erlang_c_wait(rate: float, service: float, servers: int) -> float:
    """Mean wait of the M/M/c queue."""
    load = rate * service
    top = load**servers / math.factorial(servers) * servers / (servers - load)
    below = sum(load**k / math.factorial(k) for k in range(servers))
    return top / (below + top) * service / (servers - load)


@pytest.mark.parametrize(("servers", "rate"), [(1, 0.7), (4, 3.2), (16, 14.0)])
def test_random_arrivals_wait_as_erlang_says(servers, rate):
    rng, count = np.random.default_rng(0), 400_000
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    services = rng.exponential(1.0, count)
    wait = (answered(arrivals, services, servers) - arrivals - services).mean()
    assert wait == pytest.approx(erlang_c_wait(rate, 1.0, servers), rel=0.06)


CALLS = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.01, 2)), min_size=1, max_size=40
).map(lambda pairs: (np.cumsum([a for a, _ in pairs]), np.array([s for _, s in pairs])))


@given(CALLS, st.integers(1, 5))
def test_a_batch_of_one_and_senders_for_all_is_no_batching(calls, servers):
    arrivals, services = calls
    plain = answered(arrivals, services, servers)
    single = answered_in_batches(arrivals, services, servers, senders=len(arrivals), batch=1)
    assert single == pytest.approx(plain)


@given(CALLS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.floats(0, 1))
def test_batching_answers_every_call_never_before_its_work_and_never_more_than_it_may(
    calls, servers, senders, batch, fill
):
    arrivals, services = calls
    answers = answered_in_batches(
        arrivals, services, servers, senders=senders, batch=batch, fill_seconds=fill
    )
    assert (answers >= arrivals + services - 1e-9).all()
    starts = answered_in_batches(  # of work that takes no time: when each batch is sent
        arrivals, np.zeros_like(services), servers, senders=senders, batch=batch, fill_seconds=fill
    )
    assert (starts <= arrivals + fill + 1e-9).all()


def test_a_batch_waits_for_its_slowest_call():
    """Four calls at once, one of 5 s: one sender answers all at 5, four senders each at its own."""
    arrivals, services = np.zeros(4), np.array([1.0, 1.0, 1.0, 5.0])
    assert answered_in_batches(arrivals, services, 4, senders=1).tolist() == [5, 5, 5, 5]
    one_each = answered_in_batches(arrivals, services, 4, senders=4, batch=1)
    assert one_each.tolist() == [1, 1, 1, 5]


def test_the_servers_needed_are_enough_and_one_less_is_not():
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0, 60, 5000))
    services = rng.exponential(0.1, 5000)
    count = servers_needed(arrivals, services, mean_seconds=0.15)
    assert (answered(arrivals, services, count) - arrivals).mean() <= 0.15
    assert (answered(arrivals, services, count - 1) - arrivals).mean() > 0.15
    with pytest.raises(ValueError, match="the work alone takes"):
        servers_needed(arrivals, services, mean_seconds=0.05)


@pytest.mark.parametrize("bad", [([1, 0], [1, 1], 1), ([0], [1, 2], 1), ([0], [1], 0)])
def test_calls_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        answered(*bad)
