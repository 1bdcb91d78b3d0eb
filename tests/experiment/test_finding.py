"""Finding and loading experiments, and what is said when that fails."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nitro_cli.errors import ExperimentError, NitroError, UsageError
from nitro_cli.experiment.discovery import (
    experiment_name,
    find_experiment,
    list_experiments,
    load_experiment_module,
)

from .conftest import MYEXP


@pytest.mark.parametrize(
    "spec",
    [
        "myexp",
        "experiments.myexp",
        "experiments/myexp.py",
        "./experiments/myexp.py",
        "myexp:MyExp",
        "experiments/myexp",
    ],
)
def test_every_way_to_name_an_experiment(spec: str, project: Any) -> None:
    found = find_experiment(spec)
    assert (found.cls.__name__, found.name, found.qualname, found.spec) == ("MyExp", "myexp", "myexp:MyExp", spec)
    assert found.path == project.root / "experiments/myexp.py"
    assert find_experiment("myexp").cls is found.cls
    assert experiment_name(found.cls) == "myexp"
    assert str(project.root / "experiments") not in sys.path


def test_packages_absolute_paths_and_other_folders(project: Any) -> None:
    project.write("experiments/big/__init__.py", MYEXP)
    project.write("pkg/__init__.py", "")
    project.write("pkg/sub/__init__.py", "")
    project.write("pkg/sub/mod.py", "from . import other\n" + MYEXP.replace("from __future__ import annotations", ""))
    project.write("pkg/sub/other.py", "")
    project.write("my lab/exp.py", MYEXP)
    assert find_experiment("big").name == "big"
    assert find_experiment("pkg.sub.mod").cls.__module__ == "pkg.sub.mod"
    assert find_experiment("pkg/sub/mod.py").cls is find_experiment("pkg.sub.mod").cls
    assert find_experiment(str(project.root / "my lab/exp.py")).name == "exp"


def test_two_projects_with_the_same_names(project: Any, tmp_path: Path) -> None:
    first = find_experiment("myexp").cls
    other = tmp_path / "second"
    project.write(
        "second/experiments/myexp.py",
        "from . import helper\n" + MYEXP.replace("from __future__ import annotations", ""),
    )
    project.write("second/experiments/helper.py", "")
    second = find_experiment("myexp", other).cls
    assert second is not first
    assert find_experiment("myexp").cls is first
    assert find_experiment("myexp", other).cls is second


def test_a_changed_file_is_loaded_again(project: Any) -> None:
    first = find_experiment("myexp").cls
    project.write("experiments/myexp.py", MYEXP.replace("width: GraphConst[int] = 128", "width: GraphConst[int] = 256"))
    second: Any = find_experiment("myexp").cls
    assert second is not first
    assert second().width == 256


def test_relative_imports_dataclasses_and_late_annotations(project: Any) -> None:
    project.write("experiments/helper.py", "WIDTH = 7\n")
    project.write(
        "experiments/plain.py",
        """
        from __future__ import annotations

        from dataclasses import dataclass

        from nitro_cli.experiment.markers import Device, GraphConst

        from . import helper


        @dataclass(frozen=True)
        class Plain:
            width: GraphConst[int] = helper.WIDTH
            rate: Device[float] = 0.5

            def build_data(self, dist): ...
            def build_model(self, rng): ...
            def forward(self, model, ps, st): ...
            def loss(self, outputs): ...
        """,
    )
    found: Any = find_experiment("plain")
    assert found.cls().width == 7


def test_instances_unpickle_in_a_fresh_process(project: Any) -> None:
    cls: Any = find_experiment("myexp").cls
    data = pickle.dumps(cls(width=9))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).width)"
    path = str(project.root / "experiments/myexp.py")
    told = f"import nitro_cli.experiment.discovery as d; d.load_experiment_module({path!r});"
    for start in ("", told):
        done = subprocess.run(
            [sys.executable, "-c", start + code], input=data, capture_output=True, cwd="/", check=True
        )
        assert done.stdout.split() == [b"9"]


def test_output_at_import_goes_to_stderr(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    project.write("experiments/loud.py", "print('loud')\n" + MYEXP.replace("from __future__ import annotations", ""))
    find_experiment("loud")
    assert capsys.readouterr() == ("", "loud\n")


def test_finding_and_resolving_imports_no_jax(project: Any) -> None:
    code = """
import sys
from nitro_cli.experiment.discovery import find_experiment, list_experiments
from nitro_cli.experiment.presets import dump_config, resolve
from nitro_cli.experiment.view import compile_view
list_experiments()
print(compile_view(resolve(find_experiment("myexp").cls, "current").experiment))
assert not {"jax", "flax", "optax", "orbax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


TWO = MYEXP + "\n\nclass Other(MyExp):\n    pass\n\n\nclass _Hidden(MyExp):\n    pass\n"


def test_several_candidates(project: Any, snapshot: Any) -> None:
    project.write("experiments/two.py", TWO)
    with pytest.raises(UsageError) as error:
        find_experiment("two")
    assert project.says(error.value) == snapshot
    assert find_experiment("two:Other").name == "two-Other"
    assert experiment_name(find_experiment("two:MyExp").cls) == "two-MyExp"
    with pytest.raises(UsageError, match="did you mean 'two:Other'"):
        find_experiment("two:Othr")


def test_imported_and_incomplete_classes_are_no_candidates(project: Any, snapshot: Any) -> None:
    project.write("experiments/child.py", "from .myexp import MyExp\n\n\nclass Child(MyExp):\n    pass\n")
    assert find_experiment("child").cls.__name__ == "Child"
    project.write("experiments/only.py", "from .myexp import MyExp\n")
    with pytest.raises(NitroError) as error:
        find_experiment("only")
    assert project.says(error.value) == snapshot
    base = "\n\nclass Base(Experiment):\n    depth: int = 1\n"
    project.write("experiments/based.py", MYEXP.replace("\n\nclass MyExp(Experiment)", base + "\n\nclass MyExp(Base)"))
    assert find_experiment("based").qualname == "based:MyExp"


@pytest.mark.parametrize("spec", ["myexpp", "experiments/nope.py", "experiments.nope", "nope.deep"])
def test_what_is_not_there(spec: str, project: Any, snapshot: Any) -> None:
    with pytest.raises(UsageError) as error:
        find_experiment(spec)
    assert project.says(error.value) == snapshot


def test_from_inside_the_folder_the_message_says_where_to_stand(
    project: Any, monkeypatch: pytest.MonkeyPatch, snapshot: Any
) -> None:
    monkeypatch.chdir(project.root / "experiments")
    with pytest.raises(UsageError) as error:
        find_experiment("myexp")
    assert project.says(error.value) == snapshot


FAILING = {
    "missing module": "import os\nimport batrachomyomachy\n",
    "through a helper": "from . import helper\n",
    "missing name": "from . import other_helper\nfrom .other_helper import nothing\n",
    "raised": "try:\n    {}['a']\nexcept KeyError as error:\n    raise RuntimeError('cannot') from error\n",
    "exit": "import sys\nsys.exit('bye')\n",
    "syntax": "x = 1\ndef f(:\n    pass\n",
    "library": "import json\njson.loads('{')\n",
    "wrong declaration": "from nitro_cli.experiment.base import Experiment\nclass A(Experiment):\n    width = 3\n",
}


@pytest.mark.parametrize("case", FAILING)
def test_a_module_that_cannot_be_imported(case: str, project: Any, snapshot: Any) -> None:
    project.write("experiments/helper.py", "import os\n\nimport batrachomyomachy\n")
    project.write("experiments/other_helper.py", "")
    project.write("experiments/failing.py", FAILING[case])
    with pytest.raises(ExperimentError) as error:
        find_experiment("failing")
    assert project.says(error.value) == snapshot
    assert error.value.exit_code == 3
    assert "experiments.failing" not in sys.modules
    assert "nitro_cli" not in str(error.value).replace("nitro_cli.Experiment", "")


def test_a_circular_import_shows_its_text(project: Any) -> None:
    project.write("experiments/failing.py", "from .circle import a\nb = 1\n")
    project.write("experiments/circle.py", "from .failing import b\na = 1\n")
    with pytest.raises(ExperimentError, match="cannot import name 'b' from partially initialized module"):
        find_experiment("failing")


def test_listing_reads_without_importing(project: Any) -> None:
    project.write("experiments/two.py", "raise SystemExit\n" + TWO.replace("from __future__ import annotations", ""))
    project.write("experiments/helper.py", "def f(): ...\n")
    project.write("experiments/broken.py", "def f(:\n")
    project.write("experiments/_private.py", MYEXP)
    project.write("experiments/badpreset.py", MYEXP)
    project.write("presets/badpreset.toml", "[a\n")
    listing = {item.name: item for item in list_experiments()}
    assert list(listing) == ["badpreset", "broken", "myexp", "two:MyExp", "two:Other"]
    assert listing["myexp"].presets == ("current", "reference_v1")
    assert listing["myexp"].doc == "Handwritten digits, a small MLP."
    assert "broken.py:1" in (listing["broken"].error or "")
    assert "not valid TOML" in (listing["badpreset"].error or "")
    assert list_experiments(project.root / "nowhere") == []


def test_a_class_from_elsewhere_is_named_by_itself(project: Any) -> None:
    class Elsewhere: ...

    assert experiment_name(Elsewhere) == "Elsewhere"
    module = load_experiment_module(project.root / "experiments/myexp.py")
    assert experiment_name(module.MyExp) == "myexp"


def test_the_list_knows_bases_in_other_files_and_hooks_by_assignment(project):
    project.write("experiments/child.py", "from experiments.myexp import MyExp\n\n\nclass Child(MyExp):\n    pass\n")
    project.write("experiments/grand.py", "from . import child\n\n\nclass A(child.Child): ...\n\n\nclass B(A): ...\n")
    hooks = "".join(f"    {name} = MyExp.{name}\n" for name in ("build_data", "build_model", "forward", "loss"))
    project.write("experiments/plain.py", f"from .myexp import MyExp as M\n\n\nclass Plain:\n{hooks}")
    project.write("experiments/helper.py", "from .myexp import MyExp\n\n\nclass Net:\n    of = MyExp\n")
    names = [item.name for item in list_experiments()]
    assert names == ["child", "grand:A", "grand:B", "myexp", "plain"]
    project.write("experiments/null.py", b"\0")
    broken = next(item for item in list_experiments() if item.name == "null")
    assert broken.error is not None
    assert "None" not in broken.error
