"""``nitro predict``: outputs to a file or a stream, one row per sample, in data order."""

from __future__ import annotations

from typing import Any

from nitro_cli.cli.failures import relative
from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.session import Session
from nitro_cli.cli.weights import prepare
from nitro_cli.cli.writers import columns_of, open_writer, target_of


@with_store
def run(session: Session) -> int:
    """Predict ``--split`` into ``--out``. Nothing is computed before the file is known to be writable."""
    out = session.output
    session.check()
    target = target_of(session.value("out"), session.value("format"), bool(session.value("force")), out.json)
    from nitro_cli.run.evaluating import known_split

    prepared = prepare(session)
    nitro, split = prepared.nitro, session.value("split", "test")
    known_split(nitro, split)
    for message in _not_the_data(nitro.splits[split], split):
        prepared.view.observe("warning", {"message": message})
    rows = 0
    with open_writer(target, out.raw) as writer:
        for outputs in nitro.predict(nitro.splits[split]):
            columns = columns_of(outputs)
            writer.write(rows, columns)
            rows += len(next(iter(columns.values())))
    written = None if target.path is None else relative(target.path)
    out.event("predict", {"split": split, "rows": rows, "out": written, "format": target.format, **prepared.weights})
    out.event("done", {"status": "finished", "exit_code": 0})
    prepared.view.note(f"wrote {rows} rows of {split} to {written or 'stdout'}")
    if written:
        out.result(written)
    return 0


def _not_the_data(source: Any, split: str) -> list[str]:
    """Why a row's number may not be its place in the data, where the loader says so: it is made for training."""
    from nitro_cli.data.source import describe, unwrap

    dropped, shuffled = describe(source).dropped, getattr(unwrap(source), "shuffle", False) is True
    lost = [f"split '{split}' drops {dropped} rows (drop_last), which get no prediction"] if dropped else []
    return lost + (
        [f"split '{split}' is shuffled: index counts in its order, not in that of the data"] if shuffled else []
    )
