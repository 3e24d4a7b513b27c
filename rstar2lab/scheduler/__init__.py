"""Which engine runs which trajectory, and when: policies, a simulator, a dispatcher (§3.2, Fig 7).

A policy is a pure state machine with two drivers: `simulate` for engines in closed form, and
`Dispatcher` for real ones. Both log the same rows, so that a real run can be replayed.
"""

from functools import partial

from .cost import CostModel, lower_bound
from .events import EngineSpec, EngineStats, Event, TrajSpec, load_events, save_events
from .lengths import KaplanMeier, LengthPrior
from .policies import Aimd, Gauge, Least, Policy, Reserve, RoundRobin, Static
from .simulated import EnginePool
from .simulator import Fault, SimResult, simulate
from .survival import Survival, SurvivalMove, SurvivalYield
from .workload import Shape, TrajectoryTrace, TurnTrace, Workload

__all__ = [
    "Aimd",
    "CostModel",
    "EnginePool",
    "EngineSpec",
    "EngineStats",
    "Event",
    "Fault",
    "Gauge",
    "KaplanMeier",
    "Least",
    "LengthPrior",
    "POLICIES",
    "Policy",
    "Reserve",
    "RoundRobin",
    "Shape",
    "SimResult",
    "Static",
    "Survival",
    "SurvivalMove",
    "SurvivalYield",
    "TrajSpec",
    "TrajectoryTrace",
    "TurnTrace",
    "Workload",
    "load_events",
    "lower_bound",
    "make_policy",
    "save_events",
    "simulate",
]

# By name, with their defaults; each class says where its rule comes from.
POLICIES = {
    "static_sync": partial(Static, contiguous=True, barrier=True),  # the paper's baseline
    "static_async": partial(Static, contiguous=True),
    "static_async_strided": partial(Static, contiguous=False),
    "round_robin": RoundRobin,
    "least": Least,
    "gauge": Gauge,
    "reserve": Reserve,  # the paper's
    "aimd": Aimd,
    "survival": Survival,
    "survival_move": SurvivalMove,
    "survival_yield": SurvivalYield,  # the best we know
}


def make_policy(name: str) -> Policy:
    """A fresh policy with its defaults. Raises: ValueError if there is none of this name."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; expected one of {', '.join(POLICIES)}")
    return POLICIES[name]()
