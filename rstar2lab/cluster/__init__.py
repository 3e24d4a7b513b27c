"""Ray: where the parts of a run live, and what happens when a node is lost.

The only package that imports ray, and only when something of it is built.
"""

from .engines import RayEngine, RayEngines
from .sandboxes import RaySandbox

__all__ = ["RayEngine", "RayEngines", "RaySandbox"]
