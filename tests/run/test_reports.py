"""What a handle says of itself before it runs: values with their origin, bindings, splits, and all of it as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from toys import FEATURES, Line, Measured, OnDevice, arrays, splits

from nitro_cli import ArrayLoader, Device, GraphConst, Nitro, NoPrefetch, Prefetch, cache_stats
from nitro_cli.experiment.presets import resolve


def test_every_field_has_its_value_its_marker_and_where_it_came_from(handle):
    report = handle(Measured(scale=2.0), max_epochs=3).report
    rows = {row.name: row for row in report.fields}
    assert (rows["power"].value, rows["power"].marker, rows["power"].kind) == (2, "const", "default")
    assert (rows["scale"].value, rows["scale"].marker, rows["scale"].type) == (2.0, "device", "float")
    assert (rows["max_epochs"].value, rows["max_epochs"].marker, rows["max_epochs"].kind) == (3, "host", "python")
    assert rows["max_epochs"].shadowed == (("before", 1),)


def test_preset_and_command_line_values_keep_what_they_won_over(tmp_path):
    class Preset(Measured):
        @classmethod
        def presets(cls):
            return {"quick": {"max_epochs": 2, "scale": 0.5}}

    resolved = resolve(Preset, "quick", overrides={"max_epochs": (9, "--max-epochs")})
    report = Nitro(resolved.experiment, resolved=resolved, run_dir=tmp_path / "run").report
    rows = {row.name: row for row in report.fields}
    assert report.preset == "quick"
    assert (rows["max_epochs"].kind, rows["max_epochs"].source) == ("command line", "--max-epochs")
    assert ("preset", 2) in rows["max_epochs"].shadowed
    assert rows["scale"].kind == "preset"


def test_the_run_line_counts_optimizer_steps(handle):
    run = handle(Measured(max_epochs=5, accum=2, gradient_clip_norm=0.5, seed=3)).report.run
    assert {name: run[name] for name in ("seed", "accum", "max_epochs", "total_steps", "gradient_clip_norm")} == {
        "seed": 3,
        "accum": 2,
        "max_epochs": 5,
        "total_steps": 10,
        "gradient_clip_norm": 0.5,
    }
    assert handle(Measured(), data={"val": splits()["val"]}).report.run["total_steps"] == 0


def test_splits_say_rows_batches_padding_and_prefetch(handle):
    data = {
        "train": ArrayLoader(arrays(18), batch_size=4, drop_last=True),
        "val": NoPrefetch(ArrayLoader(arrays(10), batch_size=4)),
        "test": Prefetch(ArrayLoader(arrays(8), batch_size=4), workers=2),
        "list": list(ArrayLoader(arrays(8), batch_size=4)),
    }
    rows = {row.split: row for row in handle(Measured(), data=data).report.splits}
    train, val, test, plain = rows["train"], rows["val"], rows["test"], rows["list"]
    assert (train.rows, train.batches, train.batch_size, train.dropped) == (18, 4, 4, 2)
    assert (val.rows, val.batches, val.padded) == (10, 3, 2)
    assert test.prefetch.endswith("2 workers")
    assert (plain.rows, plain.batches, plain.padded) == (None, 2, None)


def test_hooks_say_which_fields_they_get_and_where_they_run(handle):
    rows = {row.hook: row for row in handle(OnDevice()).report.hooks}
    assert rows["forward"].fields == ("x",)
    assert rows["loss"].fields == ("y",)
    assert (rows["metrics"].fields, rows["metrics"].residency) == (("y",), "device")
    assert handle(Measured()).report.hooks[-1].residency == "host"


def test_the_model_and_the_optimizer_are_summed_up(handle):
    report = handle(Line()).report
    assert report.model == {"parameters": FEATURES + 1, "leaves": 2, "state_leaves": 0}
    assert report.optimizer["rule"] == "radam"
    assert report.optimizer["learning_rate"] == 1e-3
    assert report.optimizer["hyperparameters"]["b1"] == 0.9
    assert "cpu" in report.devices or "gpu" in report.devices


class Odd(Measured):
    """Fields that JSON has no word for."""

    table: Device[np.ndarray] = np.ones((2, 3), np.float32)
    folder: Path = Path("some/where")
    sizes: GraphConst[tuple[int, ...]] = (1, 2)
    maybe: float | None = None
    anything: dict = {}  # noqa: RUF012


def test_the_report_is_json_whatever_the_fields_hold(handle):
    report = handle(Odd(anything={"a": {1, 2}, "b": [Path("x")]})).report
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    values = {row["name"]: row["value"] for row in data["fields"]}
    assert values["folder"] == "some/where"
    assert values["sizes"] == [1, 2]
    assert values["maybe"] is None
    assert isinstance(values["table"], str)
    assert values["anything"]["b"] == ["x"]
    assert data["title"] == "Odd:Odd"


def test_a_handle_with_odd_fields_trains_and_writes_its_configuration(handle):
    outcome = handle(Odd()).train()
    assert outcome.status == "finished"
    assert "folder" in outcome.run.config_path.read_text()


def test_a_report_compiles_nothing(handle):
    before = cache_stats()
    handle(Measured()).report.to_json()
    assert cache_stats() == before


def test_the_report_stands_in_the_log_before_the_first_compile(handle, empty_cache):
    outcome = handle(Measured()).train()
    lines = outcome.run.log_path.read_text().splitlines()
    kinds = [json.loads(line).get("key", json.loads(line)["type"]) for line in lines]
    assert kinds.index("params") < kinds.index("binding_report") < kinds.index("compile")
