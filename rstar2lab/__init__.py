"""rstar2lab: an experimentation kit for rStar2-Agent (arXiv 2508.20722).

Importing the package loads nothing heavy: pick a module, e.g. `from rstar2lab import roc`.
Read `types → roc → grpo → rollout → trainer` to know the method.
"""

__version__ = "0.1.0"
