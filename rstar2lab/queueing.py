"""The queue in front of the code environment, as arrays: when is each call answered? (§3.1, Fig 6)

Arrival times and service times in, answer times out: measured or made-up calls, any number of
servers, answered one by one or in the paper's batches. Not done here: what makes the calls arrive.
"""

import heapq

import numpy as np


def answered(arrivals_N: np.ndarray, services_N: np.ndarray, servers: int) -> np.ndarray:
    """Answer times, seconds: each call goes to the first free server, first come, first served.

    arrivals_N: ascending, seconds. services_N: seconds of work of each call.

    Raises: ValueError if shapes differ, arrivals are not ascending, or there is no server.
    """
    arrivals_N, services_N = _checked(arrivals_N, services_N, servers)
    free = [0.0] * servers
    answers_N = np.empty(len(arrivals_N))
    for i, (arrival, service) in enumerate(zip(arrivals_N, services_N, strict=True)):
        answers_N[i] = max(arrival, free[0]) + service
        heapq.heapreplace(free, answers_N[i])
    return answers_N


def answered_in_batches(
    arrivals_N: np.ndarray,
    services_N: np.ndarray,
    servers: int,
    *,
    senders: int = 32,
    batch: int = 64,
    fill_seconds: float = 0.0,
) -> np.ndarray:
    """Answer times when `senders` workers carry batches, each waiting for its whole batch (§3.1).

    A sender that is free takes the calls that wait, up to `batch`; one that is not full waits
    `fill_seconds` for more. At most senders × batch calls are under way. All answers of a batch
    come with its last. The paper leaves `fill_seconds` open.

    Raises: ValueError as `answered`.
    """
    arrivals_N, services_N = _checked(arrivals_N, services_N, servers)
    free_senders, free_servers = [0.0] * senders, [0.0] * servers
    answers_N, at = np.empty(len(arrivals_N)), 0
    while at < len(arrivals_N):
        closes = max(heapq.heappop(free_senders), arrivals_N[at]) + fill_seconds
        end = min(at + batch, int(np.searchsorted(arrivals_N, closes, side="right")))
        if end == at + batch:  # full before the time is over
            closes = max(closes - fill_seconds, arrivals_N[end - 1])
        last = closes
        for service in services_N[at:end]:
            done = max(closes, free_servers[0]) + service
            heapq.heapreplace(free_servers, done)
            last = max(last, done)
        answers_N[at:end] = last
        heapq.heappush(free_senders, last)
        at = end
    return answers_N


def servers_needed(
    arrivals_N: np.ndarray, services_N: np.ndarray, mean_seconds: float, most: int = 4096
) -> int:
    """The fewest servers with a mean time to the answer of at most `mean_seconds`.

    Raises: ValueError if the calls themselves take longer, or `most` servers are not enough.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        mean = float(np.mean(answered(arrivals_N, services_N, middle) - arrivals_N))
        low, high = (low, middle) if mean <= mean_seconds else (middle + 1, high)
    if np.mean(answered(arrivals_N, services_N, low) - arrivals_N) > mean_seconds:
        raise ValueError(
            f"a mean of {mean_seconds} s is not reached with {most} servers: the work alone takes "
            f"{np.mean(services_N):.3f} s; allow more seconds or more servers"
        )
    return low


def _checked(arrivals_N, services_N, servers: int) -> tuple[np.ndarray, np.ndarray]:
    arrivals_N, services_N = (np.asarray(x, np.float64) for x in (arrivals_N, services_N))
    if arrivals_N.shape != services_N.shape or arrivals_N.ndim != 1:
        raise ValueError(
            f"expected one service time per arrival, found {arrivals_N.shape}, {services_N.shape}"
        )
    if servers < 1 or (np.diff(arrivals_N) < 0).any():
        raise ValueError(f"expected ascending arrivals and a server, found servers={servers}")
    return arrivals_N, services_N
