"""Imports point down: the layers of the kit, as a table, against the imports in the source."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "rstar2lab"

# From the bottom up. A name is a module, or a package with all its modules.
LAYERS = {
    "words": ["types", "config", "extras"],
    "protocol": ["protocol"],
    "pure": [
        *["rewards", "roc", "grpo", "entropy", "logprobs", "stats", "queueing"],
        *["data", "filters"],
    ],
    "owners": [
        *["sandbox", "engines", "scheduler", "learner", "muon", "verifier", "loaders"],
        *["runs", "nano", "templates"],
    ],
    "loops": [
        *["rollout", "evaluate", "workbench", "sft", "trainer"],
        *["sweep", "ablation", "cluster"],
    ],
    "views": [
        *["plots", "figures", "notebook", "microscope", "live", "doctor"],
        *["reproduction", "cli"],
    ],
}
RANK = {unit: rank for rank, units in enumerate(LAYERS.values()) for unit in units}

# These may import within their layer, as long as no circle arises.
LAYERS_WITH_INNER_IMPORTS = {"loops", "views"}
# Other imports within a layer, each with its reason.
SIDEWAYS = {
    ("scheduler", "engines"): "the dispatcher maps the policy's actions onto the engine protocol",
    ("templates", "nano"): "its FileTokenizer reads any tokenizer.json",
}
# Imports that point up, each with its reason; allowed only inside a function.
UPWARDS = {
    ("rewards", "verifier"): "the default checker; who passes another one never loads it",
}
# Who alone may import a heavy library, at any place in the source.
OWNERS_OF = {"ray": "cluster", "vllm": "engines.vllm"}

PURE_LAYERS = ("words", "protocol", "pure")
IMPURE_IMPORTS = set(
    "asyncio concurrent datetime glob io logging multiprocessing os pathlib random requests "
    "secrets shutil signal socket subprocess sys tempfile threading time urllib".split()
)
PURE_EXCEPTIONS = {
    ("config", "pathlib"): "reads TOML files",
}
OWN_GENERATORS = {"default_rng", "Generator"}  # of numpy.random; the rest is global state


class Import(NamedTuple):
    """One import: who, what (dotted; ours without the package name), where."""

    importer: str
    target: str
    is_ours: bool
    is_inside_function: bool
    line: int

    def __str__(self) -> str:
        return f"rstar2lab/{self.importer.replace('.', '/')}, line {self.line}: {self.target}"


def modules() -> dict[str, Path]:
    """Dotted name below the package → file, without the package's own `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def unit(name: str) -> str:
    """`sandbox.jail` → `sandbox`."""
    return name.split(".")[0]


def _absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The dotted origin of `from … import …`, seen from module `name` of rstar2lab."""
    if not node.level:
        return node.module or ""
    home = ["rstar2lab", *name.split(".")]
    home = home[: len(home) - node.level + is_package]
    return ".".join(home + ([node.module] if node.module else []))


def _targets(node: ast.AST, name: str, is_package: bool) -> list[str]:
    """Absolute dotted names that a node imports; `import_module`, `extras.load` included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = _absolute(node, name, is_package)
        return [f"{origin}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        if re.search(r"\b(import_module|__import__|extras\.load)$", ast.unparse(node.func)):
            return [str(node.args[0].value)]
    return []


def imports_of(source: str, name: str, is_package: bool = False) -> Iterator[Import]:
    """Every import in `source`, the text of module `name`."""

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        for target in _targets(node, name, is_package):
            is_ours = target.split(".")[0] == "rstar2lab"
            short = target.removeprefix("rstar2lab.")
            yield Import(name, short, is_ours, inside, node.lineno)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def all_imports() -> list[Import]:
    return [
        found
        for name, path in modules().items()
        for found in imports_of(path.read_text(), name, path.name == "__init__.py")
    ]


def _crossings() -> list[Import]:
    """Imports of one unit of the kit by another."""
    return [
        i for i in all_imports() if i.is_ours and i.target and unit(i.importer) != unit(i.target)
    ]


def fault(found: Import) -> str | None:
    """What is wrong with an import of one unit by another, or None."""
    pair = unit(found.importer), unit(found.target)
    if any(name not in RANK for name in pair):
        return None  # the package's own names, or a module missing from the table: told elsewhere
    lower, upper = RANK[pair[1]], RANK[pair[0]]
    if lower < upper or pair in SIDEWAYS:
        return None
    if lower == upper:
        layer = list(LAYERS)[upper]
        return None if layer in LAYERS_WITH_INNER_IMPORTS else f"{found}: a sibling in {layer!r}"
    if pair in UPWARDS:
        return None if found.is_inside_function else f"{found}: allowed only inside a function"
    return f"{found}: points up, from {list(LAYERS)[upper]!r} to {list(LAYERS)[lower]!r}"


def test_every_module_has_a_layer():
    missing = sorted({unit(name) for name in modules()} - set(RANK))
    assert not missing, f"{missing}: give each its layer in the table LAYERS of {__file__}"


def test_imports_point_down():
    faults = [text for text in map(fault, _crossings()) if text]
    assert not faults, "\n".join(faults)


def test_imports_make_no_circle():
    graph: dict[str, set[str]] = {}
    for found in _crossings():
        pair = unit(found.importer), unit(found.target)
        if pair not in UPWARDS and pair[1] in RANK:
            graph.setdefault(pair[0], set()).add(pair[1])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(error.args[1])}")


def test_the_listed_exceptions_are_in_use():
    pairs = {(unit(i.importer), unit(i.target)) for i in _crossings()}
    names = {unit(name) for name in modules()}
    listed = [pair for pair in [*UPWARDS, *SIDEWAYS] if set(pair) <= names]
    assert [pair for pair in listed if pair not in pairs] == []


def test_heavy_libraries_have_one_owner():
    faults = [
        str(i)
        for i in all_imports()
        if not i.is_ours
        and (owner := OWNERS_OF.get(unit(i.target)))
        and not i.importer.startswith(owner)
    ]
    assert not faults, "\n".join(faults)


def test_a_late_import_is_seen():
    source = 'def start():\n    ray = extras.load("ray")\n    import_module("vllm.config")'
    assert [i.target for i in imports_of(source, "sandbox.service")] == ["ray", "vllm.config"]


def test_nothing_imports_the_clients():
    clients = {"notebooks", "experiments", "tests"}
    faults = [str(i) for i in all_imports() if not i.is_ours and unit(i.target) in clients]
    assert not faults, "\n".join(faults)


def _pure_modules() -> dict[str, Path]:
    pure = {name for layer in PURE_LAYERS for name in LAYERS[layer]}
    return {name: path for name, path in modules().items() if unit(name) in pure}


def test_pure_layers_import_no_system_clock_or_chance():
    faults = [
        str(i)
        for i in all_imports()
        if i.importer in _pure_modules()
        and not i.is_ours
        and unit(i.target) in IMPURE_IMPORTS
        and (unit(i.importer), unit(i.target)) not in PURE_EXCEPTIONS
    ]
    assert not faults, "\n".join(faults)


def _impure_uses(source: str) -> Iterator[tuple[int, str]]:
    """Lines that open a file, print, or use global random state."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("open", "print", "input"):
                yield node.lineno, f"{node.func.id}()"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            if node.value.attr == "random" and node.attr not in OWN_GENERATORS:
                yield node.lineno, f"random.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr == "manual_seed":
            yield node.lineno, node.attr


def test_pure_layers_do_no_io_and_share_no_chance():
    faults = [
        f"{path.name}, line {line}: {what}"
        for path in _pure_modules().values()
        for line, what in _impure_uses(path.read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "name", "wrong"),
    [
        ("from . import trainer", "roc", "points up"),
        ("from rstar2lab.engines import Engine", "grpo", "points up"),
        ("def late():\n    from ..trainer import train", "nano.model", "points up"),
        ("from . import verifier", "rewards", "only inside a function"),
        ("from . import runs", "learner", "a sibling"),
        ("import rstar2lab.config", "types", "a sibling"),
        ("from . import protocol, types", "roc", None),
        ("from .. import config as cfg", "nano.model", None),
        ("from . import evaluate, rollout", "trainer", None),
        ("def check():\n    from . import verifier", "rewards", None),
    ],
)
def test_the_rule_tells_right_from_wrong(source, name, wrong):
    faults = [text for text in map(fault, imports_of(source, name)) if text]
    assert (wrong in faults[0]) if wrong else not faults
