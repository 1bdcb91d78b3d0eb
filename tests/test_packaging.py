"""The distribution is what it says: dependencies, versions, start-up, and files that name no machine."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "nitro_cli").rglob("*.py")
)
# Modules that may be imported while a command line is read, before it is known that anything will run.
LIGHT = ("nitro_cli", "nitro_cli.cli.main", "nitro_cli.experiment.base", "nitro_cli.experiment.presets")
# What a file of the project may not hold: folders of a machine, or places to install from.
MACHINE = re.compile(r"/(?:home|root|Users|work|opt|tmp|mnt)/\w|file://|index-url|find-links", re.IGNORECASE)
# pydantic_core is pydantic's engine, pinned by it; annotationlib is in the standard library from Python 3.14 on.
ALLOWED = {"pydantic_core", "annotationlib"}


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names that a file imports anywhere, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno


def declared(*extras: str) -> set[str]:
    """Import names of the distributions that the project declares, in its core and in ``extras``."""
    wanted = [*PROJECT["dependencies"], *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]
    names = {canonicalize_name(Requirement(text).name) for text in wanted} - {"nitro-jax"}
    providers = importlib.metadata.packages_distributions()
    return {package for package, dists in providers.items() if names & {canonicalize_name(dist) for dist in dists}} | {
        "nitro_cli"
    }


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the tests do not run in a git checkout")
    return [ROOT / name for name in listed.decode().split("\0") if name]


def test_code_imports_only_what_is_declared() -> None:
    # Optional things, each behind its extra, are imported where they are used.
    core = declared("parquet", "plot") | set(sys.stdlib_module_names) | ALLOWED
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "nitro_cli").rglob("*.py"))
        for name, line in imported_names(path)
        if name not in core
    ]
    assert not foreign


def test_examples_and_benchmarks_import_only_what_is_declared() -> None:
    # Pictures, behind their own extra, are drawn with what is imported where it is used.
    known = declared("examples", "plot") | set(sys.stdlib_module_names) | {"experiments", "benchmarks"}
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder in ("experiments", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in imported_names(path)
        if name not in known
    ]
    assert not foreign


def test_every_module_imports_in_a_fresh_process() -> None:
    names = [name for name in MODULES if name != "nitro_cli.__main__"]
    run(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)")


def test_every_public_name_can_be_looked_up() -> None:
    run("import nitro_cli\nfor name in nitro_cli.__all__:\n    getattr(nitro_cli, name)")


@pytest.mark.parametrize("module", LIGHT)
def test_reading_a_command_line_imports_no_jax(module: str) -> None:
    code = f"import sys, {module}\nprint(sorted({{'jax', 'flax', 'optax', 'orbax'}} & set(sys.modules)))"
    assert run(code) == "[]\n"


def test_help_imports_no_jax() -> None:
    code = (
        "import sys\nfrom nitro_cli.cli import main\ncode = main.run(['--help'])\n"
        "print(code, sorted({'jax', 'flax', 'optax', 'orbax', 'numpy'} & set(sys.modules)))"
    )
    assert run(code).splitlines()[-1] == "0 []"


def test_versions_agree() -> None:
    import nitro_cli

    assert nitro_cli.__version__ == PROJECT["version"] == importlib.metadata.version("nitro-jax")


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_constraints_are_names_and_exact_versions() -> None:
    for requirement in constraints():
        assert not requirement.url, f"{requirement} names a place"
        assert not requirement.extras, f"{requirement} has extras"
        assert [spec.operator for spec in requirement.specifier] == ["=="], f"{requirement} is not one version"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_constraints_give_each_python_one_version_that_the_project_accepts(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    chosen: dict[str, Version] = {}
    for requirement in constraints():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in chosen, f"{name} has two versions for Python {python}"
            chosen[name] = Version(next(iter(requirement.specifier)).version)
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for wanted in (Requirement(text) for group in groups for text in group):
        name = canonicalize_name(wanted.name)
        if name != "nitro-jax":
            assert name in chosen, f"{name} is not in constraints.txt"
            assert chosen[name] in wanted.specifier, f"{name} {chosen[name]} is not {wanted.specifier}"


def test_no_tracked_file_names_a_machine() -> None:
    found = []
    for path in tracked_files():
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
