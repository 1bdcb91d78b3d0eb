"""Streams: every batch once, in order, whatever reads it; and no thread left behind, whatever happens."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro_cli.data import stream as stream_room
from nitro_cli.data.loader import ArrayLoader
from nitro_cli.data.prefetch import NoPrefetch, Prefetch, check_indexing, open_stream, prefetch_config
from nitro_cli.data.source import DataError
from nitro_cli.data.stream import Ledger, is_slow
from nitro_cli.data.workers import Workers

WAIT = 60  # seconds until a test that hangs fails; nothing ever takes so long


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("nitro-")]
    for thread in left:
        thread.join(WAIT)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture
def slow(monkeypatch):
    """Every measured source counts as slow."""
    monkeypatch.setattr(stream_room, "is_slow", lambda fetches, steps: True)


class Indexed:
    """Batches by index; ``fetch`` may be replaced to misbehave."""

    def __init__(self, batches: int, fetch=None) -> None:
        self.batches = batches
        self.fetch = fetch or (lambda i: None)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.fetch(index)
        self.fetched.append(index)
        return {"x": np.array([index])}


class Iterable:
    """Batches by iteration only, with a length that may lie."""

    def __init__(self, batches: int, says: int | None = None) -> None:
        self.batches = batches
        self.says = batches if says is None else says
        self.closed = 0

    def __len__(self) -> int:
        return self.says

    def __iter__(self):
        try:
            for index in range(self.batches):
                yield {"x": np.array([index])}
        finally:
            self.closed += 1


def read(source, **options) -> list[tuple[int, int]]:
    with open_stream("train", source, **{"epoch": 0, **options}) as stream:
        return [(index, int(batch["x"][0])) for index, batch in stream]


def working() -> int:
    return sum(thread.name.startswith("nitro-") for thread in threading.enumerate())


SOURCES = {
    "list": lambda n: [{"x": np.array([i])} for i in range(n)],
    "indexed": Indexed,
    "iterable": Iterable,
    "loader": lambda n: ArrayLoader(x=np.arange(n), batch_size=1) if n else [],
}
WRAPS = {
    "default": lambda source: source,
    "inline": NoPrefetch,
    "one worker": lambda source: Prefetch(source, workers=1),
    "three workers": lambda source: Prefetch(source, workers=3),
    "one slot": lambda source: Prefetch(source, workers=1, host_batches=1),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("batches", "skip"), [(30, 0), (30, 11), (30, 29), (30, 30), (3, 0), (1, 0), (0, 0)])
def test_every_way_of_reading_gives_the_same(kind, wrap, batches, skip):
    source = WRAPS[wrap](SOURCES[kind](batches))
    assert read(source, skip=skip) == [(i, i) for i in range(skip, batches)]


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
@pytest.mark.parametrize(("batches", "skip"), [(30, 0), (30, 11), (9, 1), (8, 0), (5, 0)])
def test_a_slow_source_gets_workers_and_loses_nothing(kind, batches, skip, slow):
    source = SOURCES[kind](batches)
    for _ in range(2):  # the second pass has workers from its first batch on
        assert read(source, skip=skip) == [(i, i) for i in range(skip, batches)]


def test_workers_begin_after_the_measured_batches_and_at_once_on_the_next_pass(slow):
    source = Indexed(20)
    for expected in (stream_room.MEASURED, 0):
        with open_stream("train", source, epoch=0) as stream:
            at_work = [stream.workers > 0 for _ in stream]
            assert stream.path == "auto"
        assert at_work.index(True) == expected
        assert stream.workers == 0


def test_a_fast_source_never_gets_a_thread(monkeypatch):
    monkeypatch.setattr(stream_room, "is_slow", lambda fetches, steps: False)
    with open_stream("train", Indexed(20), epoch=0) as stream:
        assert {working() for _ in stream} == {0}


def test_a_source_without_hash_is_measured_on_every_pass(slow):
    class Unhashable(Indexed):
        __hash__ = None

    source = Unhashable(20)
    for _ in range(2):
        with open_stream("train", source, epoch=0) as stream:
            assert [stream.workers > 0 for _ in stream].index(True) == stream_room.MEASURED


def test_one_slow_fetch_is_a_hiccup_that_the_next_pass_forgets(monkeypatch):
    monkeypatch.setattr(stream_room, "is_slow", lambda fetches, steps: max(fetches[1:]) > 0.1)
    source = Indexed(20, lambda i: sleep(0.2 if i == 3 else 0))
    for _ in range(2):
        with open_stream("train", source, epoch=0) as stream:
            assert [stream.workers > 0 for _ in stream].index(True) == stream_room.MEASURED
    source.fetch = lambda i: None
    with open_stream("train", source, epoch=0) as stream:
        assert not any(stream.workers > 0 for _ in stream)


def test_remembering_a_slow_source_does_not_keep_it_alive(slow):
    source = Iterable(12)
    read(source)
    reference = weakref.ref(source)
    del source
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("fetches", "steps", "slow"),
    [
        pytest.param([0.001] * 8, [0.010] * 8, True, id="a tenth of the step"),
        pytest.param([0.0004] * 8, [0.010] * 8, False, id="a small part of the step"),
        pytest.param([0.0001] * 8, [0.00001] * 8, False, id="both tiny"),
        pytest.param([5.0] + [0.00001] * 7, [0.001] * 8, False, id="only the first fetch is slow"),
        pytest.param([0.001] * 8, [30.0] + [0.001] * 7, True, id="the first step compiles"),
        pytest.param([1.0], [1.0], False, id="too little is known"),
        pytest.param([], [], False, id="nothing is known"),
    ],
)
def test_the_verdict(fetches, steps, slow):
    assert is_slow(fetches, steps) is slow


@given(
    batches=st.integers(0, 40),
    workers=st.integers(1, 5),
    spare=st.integers(0, 5),
    ordered=st.booleans(),
    data=st.data(),
)
def test_any_workers_deliver_every_batch_once(batches, workers, spare, ordered, data):
    skip = data.draw(st.integers(0, batches))
    source = Prefetch(Indexed(batches), workers=workers, host_batches=workers + spare, ordered=ordered)
    got = read(source, skip=skip)
    assert sorted(got) == [(i, i) for i in range(skip, batches)]
    assert not ordered or got == sorted(got)


def test_fetches_really_overlap():
    barrier = threading.Barrier(3)
    source = Indexed(6, lambda i: barrier.wait(WAIT))  # breaks unless three fetches run at once
    assert len(read(Prefetch(source, workers=3))) == 6


def test_ordered_delivery_waits_for_the_late_batch_and_unordered_does_not():
    for ordered in (True, False):
        others = threading.Event()

        def hold_back(index, others=others):
            if index == 0:
                others.wait(WAIT)
            elif index == 3:
                others.set()

        source = Prefetch(Indexed(4, hold_back), workers=2, host_batches=4, ordered=ordered)
        order = [index for index, _ in read(source)]
        assert sorted(order) == [0, 1, 2, 3]
        assert order.index(0) == 0 if ordered else order.index(0) >= 2


def test_batches_in_memory_are_bounded():
    source = Indexed(30)
    most = 0
    with open_stream("train", Prefetch(source, workers=2, host_batches=3), epoch=0) as stream:
        for given, _ in enumerate(stream, 1):
            most = max(most, len(source.fetched) - given)
    assert most <= 3
    assert sorted(source.fetched) == list(range(30))


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
def test_prepare_runs_where_the_fetch_runs(kind):
    names = set()

    def prepare(batch):
        names.add(threading.current_thread().name)
        return {"x": batch["x"] + 100}

    assert read(Prefetch(SOURCES[kind](5), workers=1), prepare=prepare) == [(i, i + 100) for i in range(5)]
    assert names == {"nitro-train-0"}
    names.clear()
    assert read(SOURCES[kind](5), prepare=prepare)[0] == (0, 100)
    assert names == {threading.current_thread().name}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_check_knows_the_number_of_the_batch_and_sees_it_unprepared(kind, wrap, slow):
    seen = []
    options = {"skip": 3, "prepare": lambda batch: {"x": batch["x"] + 100}}
    read(WRAPS[wrap](SOURCES[kind](20)), check=lambda index, batch: seen.append((index, int(batch["x"][0]))), **options)
    assert sorted(seen) == [(i, i) for i in range(3, 20)]


def test_what_check_raises_reaches_the_loop():
    def check(index, batch):
        if index == 2:
            raise DataError("batch 2 is wrong")

    for wrap in WRAPS.values():
        with pytest.raises(DataError, match="batch 2 is wrong"):
            read(wrap(Indexed(5)), check=check)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_what_a_fetch_raises_reaches_the_loop_with_its_own_traceback(wrap, error):
    def broken_decoder(index):
        if index == 13:
            raise error("sample 13")

    source = WRAPS[wrap](Indexed(30, broken_decoder))
    got = []
    with open_stream("train", source, epoch=0) as stream, pytest.raises(error, match="sample 13") as caught:
        got.extend(index for index, _ in stream)
    assert got == list(range(13))
    assert "broken_decoder" in "".join(traceback.format_exception(caught.value))
    assert list(stream) == []


def test_what_an_iteration_or_prepare_raises_reaches_the_loop():
    class Broken(Iterable):
        def __iter__(self):
            yield {"x": np.array([0])}
            raise OSError("disk")

    def prepare(batch):
        raise FloatingPointError("prepare")

    for wrap in WRAPS.values():
        with pytest.raises(OSError, match="disk"):
            read(wrap(Broken(3)))
        with pytest.raises(FloatingPointError):
            read(wrap(Indexed(3)), prepare=prepare)


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_leaving_early_ends_everything(kind, wrap, slow):
    source = SOURCES[kind](1000)
    with open_stream("train", WRAPS[wrap](source), epoch=0) as stream:
        for index, _ in stream:
            if index == 20:
                break
    assert working() == 0
    assert next(stream, None) is None
    stream.close()
    assert kind == "indexed" or source.closed == 1


def test_a_stream_that_is_forgotten_ends_its_threads():
    stream = open_stream("train", Prefetch(Indexed(1000), workers=2), epoch=0)
    next(stream)
    assert working() == 2
    del stream
    gc.collect()
    assert working() == 0


def test_closing_lets_go_of_batches_that_wait():
    class Batch:
        pass

    made = []

    def fetch(index):
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    pool = Workers(fetch, 0, 5, 1, 3, True, "train")
    pool.take()
    pool.close()
    gc.collect()
    assert made
    assert [reference() for reference in made] == [None] * len(made)


def test_an_exception_in_the_loop_is_not_hidden_by_a_source_that_fails_on_closing():
    class Nasty(Iterable):
        def __iter__(self):
            try:
                yield {"x": np.array([0])}
                yield {"x": np.array([1])}
            finally:
                raise OSError("closing failed")

    def fail_in_the_loop(stream):
        for _ in stream:
            raise ZeroDivisionError

    for wrap in WRAPS.values():
        with pytest.raises(ZeroDivisionError), open_stream("train", wrap(Nasty(2)), epoch=0) as stream:
            fail_in_the_loop(stream)


def test_close_does_not_wait_for_a_fetch_that_hangs(monkeypatch):
    monkeypatch.setattr("nitro_cli.data.workers._PATIENCE", 0.05)
    release, entered = threading.Event(), threading.Event()

    def hang(index):
        entered.set()
        release.wait(WAIT)

    pool = Workers(hang, 0, 5, 2, 4, True, "train")
    entered.wait(WAIT)
    pool.close()
    assert working() > 0
    release.set()


def test_closing_wakes_a_loop_that_waits():
    release, entered = threading.Event(), threading.Event()

    def hang(index):
        entered.set()
        release.wait(WAIT)

    pool = Workers(hang, 0, 5, 1, 2, True, "train")
    entered.wait(WAIT)
    closer = threading.Timer(0.05, pool.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        pool.take()
    release.set()
    closer.join(WAIT)


def test_a_thread_that_cannot_start_leaves_none_behind(monkeypatch):
    started = []
    start = threading.Thread.start

    def limited(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start"):
        read(Prefetch(Indexed(50), workers=4))
    assert len(started) == 2


def test_the_epoch_is_set_once_before_the_length_is_read():
    calls = []

    class Loader(Indexed):
        def set_epoch(self, epoch):
            calls.append(("epoch", epoch))

        def __len__(self):
            calls.append(("len",))
            return 3

    for wrap in WRAPS.values():
        calls.clear()
        assert len(read(wrap(Loader(3)), epoch=7)) == 3
        assert calls[0] == ("epoch", 7)
        assert calls.count(("epoch", 7)) == 1


def test_waiting_is_measured():
    with open_stream("train", Indexed(5), epoch=0) as stream:
        assert stream.wait_seconds == 0
        next(stream)
        after_one = stream.wait_seconds
        assert after_one > 0
        list(stream)
        assert stream.wait_seconds > after_one


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: Iterable(3, says=5), id="short"),
        pytest.param(lambda: Iterable(4, says=5), id="short by one"),
        pytest.param(lambda: Iterable(0, says=5), id="exhausted"),
        pytest.param(lambda: Iterable(6, says=5), id="long"),
        pytest.param(lambda: Iterable(25, says=20), id="long after workers"),
    ],
)
def test_a_length_that_lies(source, slow, snapshot):
    said = set()
    for wrap in WRAPS.values():
        with pytest.raises(DataError) as caught:
            read(wrap(source()))
        said.add(str(caught.value))
    assert len(said) == 1
    assert said.pop() == snapshot


def test_an_exhausted_source_is_known_after_a_skip_too():
    with pytest.raises(DataError, match="can be read only once"):
        read(Iterable(0, says=5), skip=2)


def test_the_ledger_counts_what_is_missing_and_what_came_twice(snapshot):
    ledger = Ledger("train", 2, 10)
    for index in (4, 2, 9, 7):
        ledger.deliver(index)
    with pytest.raises(DataError) as caught:
        ledger.check()
    assert str(caught.value) == snapshot
    for index in (2, 4):
        with pytest.raises(DataError, match=f"batch {index} came twice"):
            ledger.deliver(index)
    for index in (3, 5, 6, 8):
        ledger.deliver(index)
    ledger.check()


def test_a_pass_cannot_start_beyond_its_end():
    with pytest.raises(DataError, match="cannot start at batch 4: it has 3"):
        open_stream("train", Indexed(3), epoch=0, skip=4)


def test_declarations_pass_through():
    loader = ArrayLoader(x=np.arange(5), batch_size=2)
    for wrap in (Prefetch, NoPrefetch):
        wrapped = wrap(loader)
        assert (len(wrapped), wrapped.rows, wrapped[1]["x"].tolist()) == (3, 5, [2, 3])
        assert [len(batch["x"]) for batch in wrapped] == [2, 2, 1]
        wrapped.set_epoch(3)
        assert loader.epoch == 3


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Prefetch(Indexed(3), workers=0), "workers"),
        (lambda: Prefetch(Indexed(3), workers=True), "workers"),
        (lambda: Prefetch(Indexed(3), host_batches=0), "host_batches"),
        (lambda: Prefetch(Indexed(3), workers=4, host_batches=2), "leaves no room"),
        (lambda: Prefetch(NoPrefetch(Indexed(3))), "one prefetch declaration"),
    ],
)
def test_declarations_are_checked(make, expected):
    with pytest.raises(DataError, match=expected):
        make()


def test_the_report_says_how_a_split_will_be_read():
    assert prefetch_config([{}])["path"] == "materialized"
    assert prefetch_config(Indexed(3))["path"] == "auto"
    assert prefetch_config(NoPrefetch(Indexed(3)))["path"] == "inline"
    assert prefetch_config(Prefetch(Indexed(3), workers=1))["path"] == "single"
    config = prefetch_config(Prefetch(Indexed(3), workers=3))
    assert (config["path"], config["workers"], config["host_batches"], config["ordered"]) == ("fanout", 3, 6, True)
    assert prefetch_config(Prefetch(Indexed(3), workers=3, ordered=False))["path"] == "fanout_unordered"
    alone = prefetch_config(Prefetch(Iterable(3), workers=3, ordered=False))
    assert (alone["path"], alone["workers"], alone["ordered"]) == ("single", 1, True)
    assert "source[i]" in alone["note"]
    assert prefetch_config(Prefetch(Indexed(3), host_batches=1))["workers"] == 1


def test_check_indexing_finds_an_index_that_counts_samples():
    class Offset(ArrayLoader):
        def __getitem__(self, index):
            return {"x": np.arange(index, index + 2)}

    class Renamed(ArrayLoader):
        def __getitem__(self, index):
            return {"y": super().__getitem__(index)["x"]}

    class Cast(ArrayLoader):
        def __getitem__(self, index):
            return {"x": super().__getitem__(index)["x"].astype(np.float32)}

    data = np.arange(6)
    check_indexing(ArrayLoader(x=data, batch_size=2, shuffle=True))
    check_indexing(Prefetch(ArrayLoader(x=data, batch_size=4)))
    check_indexing(Offset(x=data, batch_size=2), values=False)
    for loader, message in ((Offset, "other values"), (Renamed, "has fields"), (Cast, "shape and dtype")):
        with pytest.raises(DataError, match=message):
            check_indexing(loader(x=data, batch_size=2))
