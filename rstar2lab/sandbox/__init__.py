"""The code environment: run programs written by a model, isolated, many per second (§2.1, §3.1).

`from rstar2lab.sandbox import Sandbox, Limits, detect_level, LEVELS`. Names are loaded on first
use, so that the worker processes, which import this package too, stay small and cheap to fork.
Reading order: `levels` (promises), `service` (owner), `template` and `slot` (workers), `program`
(the child), `jail`, `seccomp`, `cgroup`, `kernel` (confinement), `wire` and `capture` (transport).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rstar2lab.sandbox.levels import LEVELS, Level, Limits, SandboxError
    from rstar2lab.sandbox.service import Sandbox, Session, detect_level

_HOMES = {
    "LEVELS": "levels",
    "Level": "levels",
    "Limits": "levels",
    "SandboxError": "levels",
    "Sandbox": "service",
    "Session": "service",
    "detect_level": "service",
}
__all__ = ["LEVELS", "Level", "Limits", "Sandbox", "SandboxError", "Session", "detect_level"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
