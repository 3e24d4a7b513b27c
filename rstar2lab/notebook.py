"""What every notebook needs: the repository's folder, and library source on the page.

A notebook shows the code it talks about and never types it again; and it runs from any working
directory without an absolute path in it.
"""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from IPython.display import Markdown

_MARKS = ("rstar2lab/roc.py", "notebooks")


def repository(start: str | Path = ".") -> Path:
    """The root of the repository that `start` lies in; of the installed sources otherwise.

    Raises: FileNotFoundError if neither has notebooks beside the package.
    """
    here = Path(start).resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if all((folder / mark).exists() for mark in _MARKS):
            return folder
    raise FileNotFoundError(
        f"expected the rstar2lab repository at or above {here}; start Jupyter inside it"
    )


def show_source(shown: Callable | type) -> Markdown:
    """The source of a function or class of the library, highlighted by the notebook's front end."""
    source = textwrap.dedent(inspect.getsource(shown))
    return Markdown(f"*`{shown.__module__}.{shown.__qualname__}`*\n\n```python\n{source}```")
