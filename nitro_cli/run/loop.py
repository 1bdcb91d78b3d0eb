"""The training loop: per step, the calls to the programs and nothing else.

Losses and train metrics stay on the device as one small row per step. Rows that are ready are fetched together about
ten times a second, written to the log, and checked; the loop waits for the device only at the end of an epoch, or when
it has run far ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nitro_cli.data.prefetch import Stream, open_stream
from nitro_cli.data.source import check_batch, check_width
from nitro_cli.errors import DivergenceError
from nitro_cli.programs.cache import Program
from nitro_cli.run.programs import as_inputs, batch_plan, specs_of

if TYPE_CHECKING:
    from nitro_cli.run.nitro import Nitro

FETCH_SECONDS = 0.1
# Steps that the host may be ahead of the device: enough to hide any hiccup, few enough to bound the batches in memory.
AHEAD = 64
# Records to write at once, at least, while the device is still busy with the steps after them.
CHUNK = 8


class EpochLoop:
    """Trains one epoch (or what is left of it) and keeps the handle's state current.

    ``write`` takes log records in bulk; ``stopping`` says whether to end after the current step.
    """

    def __init__(
        self, nitro: Nitro, write: Callable[[list[dict[str, Any]]], None], stopping: Callable[[], bool]
    ) -> None:
        self.nitro = nitro
        self.write = write
        self.stopping = stopping
        setup = nitro.setup
        self.recipe = setup.recipe
        self.schema = setup.schema["train"]
        self.host_metrics = setup.recipe.host_metrics
        self.fields = setup.recipe.routed(*self.trained_hooks())
        self.metric_fields = setup.recipe.routes["train_metrics"].fields if self.host_metrics else ()
        self.plan = batch_plan(self.schema, self.fields)
        self.constants = nitro.constants()
        nitro.state.reset_clock()
        self.program = self._program_for([self.schema[name] for name in self.fields])
        self.calls = self.calls_earlier = 0  # of the current program, and of those before it in this epoch
        self.rows: list[Any] = []
        self.next_fetch = 0.0
        self.host_rows: list[dict[str, float]] = []
        self.host_rows_per_step = 1
        self.data_wait_frac = self.data_wait_seconds = 0.0
        self.began = False

    def trained_hooks(self) -> Sequence[str]:
        """The hooks inside the program that a batch goes into first."""
        raise NotImplementedError

    def program_for(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program:
        """The program that a batch of these shapes goes into first."""
        raise NotImplementedError

    def steps(self, stream: Stream) -> bool:
        """Train on what the stream gives. False where a stop was asked for before its last batch."""
        raise NotImplementedError

    def prepare(self, batch: Any) -> Any:
        """From a batch as the loader gives it to the arrays that the program takes."""
        arrays = as_inputs(batch, self.plan)
        return (arrays, [np.asarray(batch[f]) for f in self.metric_fields]) if self.host_metrics else (arrays, None)

    def check(self, index: int, batch: Any) -> None:
        check_batch("train", index, batch, self.schema, self.fields)

    def run(self) -> bool:
        """Train to the end of the epoch. False where a stop was asked for before its last batch.

        Raises DivergenceError where a loss is not finite, with the state of the last good step in the handle.
        """
        state = self.nitro.state
        source = self.nitro.setup.splits["train"]
        started = time.perf_counter()
        self.next_fetch = 0.0  # the first step is looked at once it is called
        try:
            with open_stream(
                "train", source, epoch=state.epoch, skip=state.position, prepare=self.prepare, check=self.check
            ) as stream:
                complete = self.steps(stream)
                wait = stream.wait_seconds
        except DivergenceError:
            raise
        except BaseException:  # a loader or a hook that fails: the steps done until then are done, and must be counted
            self.fetch(everything=True)
            raise
        self.fetch(everything=True)
        elapsed = time.perf_counter() - started
        self.data_wait_seconds = wait
        self.data_wait_frac = wait / elapsed if elapsed > 0 else 0.0
        return complete

    def keep_up(self, *held: Any) -> None:
        """After a step that left the state ``held``: from time to time look at the rows that are ready, and wait where
        the device is far behind."""
        rows = self.rows
        if time.perf_counter() >= self.next_fetch:
            self.nitro.state.hold(*held)
            self.fetch()
            self.next_fetch = time.perf_counter() + FETCH_SECONDS
        elif len(rows) % AHEAD == 0:
            rows[-AHEAD // 2].block_until_ready()

    def fetch(self, everything: bool = False) -> None:
        """Take the rows that are ready (or wait for all): log them, add them up, and look for a loss that is no number.

        A row belongs to the step after those already counted in the handle.
        """
        ready = len(self.rows)
        if self.rows and not self.began:
            self.began = True
            self.rows[0].block_until_ready()  # once: who is told of the first step is told that it is over
            self.nitro.notify("first_step", step=self.nitro.state.step + 1)
        if not everything:
            ready = next((i for i, row in enumerate(self.rows) if not row.is_ready()), ready)
        state, columns = self.nitro.state, self.program.found["columns"]
        records: list[dict[str, Any]] = []
        loss, done = math.nan, 0
        try:
            for row in self.rows[:ready]:
                if len(records) >= CHUNK and not row.is_ready():  # better to write than to wait
                    self.write(records)
                    records = []
                values: dict[str, float] = dict(zip(columns, np.asarray(row).tolist(), strict=True))
                if self.host_rows:
                    values.update(_mean([self.host_rows.pop(0) for _ in range(self.host_rows_per_step)]))
                loss = values["loss"]
                if not math.isfinite(loss) and self.nitro.setup.knobs.check_divergence:
                    self.write(records)
                    done = len(self.rows)
                    raise self._diverged(loss)
                if self.nitro.setup.schedules:
                    values.update(self.nitro.setup.schedules.shown(state.step))
                state.step += 1
                state.position += self.recipe.accum
                state.loss_sum += loss
                state.loss_count += 1
                records.append(_record(state.step, state.epoch + 1, values))
                done += 1
        finally:
            del self.rows[:done]
        if records:
            self.write(records)
            self.nitro.notify_progress(loss)

    def _diverged(self, loss: float) -> DivergenceError:
        state = self.nitro.state
        epoch = state.epoch + 1
        return DivergenceError(
            f"the loss is {loss} at step {state.step + 1}, in epoch {epoch}",
            f"the handle holds the state of the last good step, {state.step}",
            "try a lower learning rate (--learning-rate), or clip the gradient (--gradient-clip-norm 1.0)",
            "if the data itself holds nan or infinity, neither helps: look at the batches with np.isfinite",
            "to train on in spite of it: --no-check-divergence",
            value=repr(loss),
            step=state.step + 1,
            epoch=epoch,
        )

    def _program_for(self, arrays: Sequence[Any]) -> Program:
        return self.program_for(specs_of(self.fields, arrays))

    def other_shapes(self, index: int, arrays: Sequence[Any]) -> Callable[..., Any]:
        """The program for a batch that the current one refused. A batch of another width is an error; another shape
        beyond the batch axis is another program, which the cache will count and explain."""
        named = dict(zip(self.fields, arrays, strict=True))
        check_width("train", index, named, self.fields, self.nitro.setup.train_width or 0)
        other = self._program_for(arrays)
        if other is self.program:
            raise
        self.program.used(self.calls)
        self.calls_earlier += self.calls
        self.calls = 0
        self.program = other
        return other.run

    def on_host(self, outputs: Any, fields: Sequence[Any]) -> None:
        """``train_metrics`` under host residency: it waits for the device, which is what asking for it means."""
        hook = self.recipe.hooks["train_metrics"]
        named = dict(zip(self.metric_fields, fields, strict=True))
        values = hook(self.nitro.setup.experiment, jax.device_get(outputs), **named)
        checked = self.recipe.checked_scalars("train_metrics", values)
        self.host_rows.append({name: float(value) for name, value in checked.items()})


class AutomaticLoop(EpochLoop):
    """``forward`` and ``loss`` give the gradient of each micro-batch, and the update follows the last of a group."""

    def __init__(
        self, nitro: Nitro, write: Callable[[list[dict[str, Any]]], None], stopping: Callable[[], bool]
    ) -> None:
        super().__init__(nitro, write, stopping)
        self.update = nitro.programs.update(nitro.optimizer_layout(), self.program.found["columns"])
        self.calls_update = 0
        self.host_rows_per_step = self.recipe.accum

    def trained_hooks(self) -> Sequence[str]:
        return ("forward", "loss", *(() if self.host_metrics else ("train_metrics",)))

    def program_for(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program:
        return self.nitro.programs.gradient(batch)

    def steps(self, stream: Stream) -> bool:
        try:
            return self._accumulated(stream) if self.recipe.accum > 1 else self._single(stream)
        finally:
            self.program.used(self.calls)
            self.update.used(self.calls_update)

    def _single(self, stream: Stream) -> bool:
        """One micro-batch a step."""
        state = self.nitro.state
        seed, hyper, check, anchors, _ = self.constants
        device = self.nitro.device  # looked up for each epoch: set_device may have changed a value
        update, clock, average = self.update.run, state.clock, state.average
        params, model_state, opt_state = state.params, state.state, state.opt_state
        schedules, step = self.nitro.setup.schedules, state.step
        self.calls = self.calls_update = self.calls_earlier = 0
        rows, gradient = self.rows, self.program.run
        last = len(self.nitro.setup.splits["train"]) - 1
        try:
            for index, (arrays, fields) in stream:
                if schedules:
                    hyper = schedules.vector(step)
                    device = self.nitro.scheduled_device(step) if schedules.driven else device
                    step += 1
                try:
                    pending = gradient(params, model_state, clock, seed, device, arrays)
                except TypeError:
                    gradient = self.other_shapes(index, arrays)
                    pending = gradient(params, model_state, clock, seed, device, arrays)
                if fields is not None:
                    pending, outputs = pending
                    self.on_host(outputs, fields)
                params, model_state, opt_state, clock, average, row = update(
                    params, model_state, opt_state, clock, average, pending, hyper, check, anchors
                )
                rows.append(row)
                self.calls += 1
                self.keep_up(params, model_state, opt_state, clock, average)
                if self.stopping():
                    return index == last
        finally:
            self.calls_update = self.calls_earlier + self.calls
            state.hold(params, model_state, opt_state, clock, average)
        return True

    def _accumulated(self, stream: Stream) -> bool:
        """``accum`` micro-batches a step; the update is called after the last."""
        state, accum = self.nitro.state, self.recipe.accum
        seed, hyper, check, anchors, scale = self.constants
        device = self.nitro.device
        schedules, step = self.nitro.setup.schedules, state.step
        update = self.update.run
        self.calls = self.calls_update = 0
        pending = self.nitro.empty_pending(len(self.program.found["columns"]))
        micro, last = 0, len(self.nitro.setup.splits["train"]) - 1
        for index, (arrays, fields) in stream:
            if schedules and micro == 0:
                hyper = schedules.vector(step)
                device = self.nitro.scheduled_device(step) if schedules.driven else device
                step += 1
            arguments = (state.params, state.state, seed, device, arrays, scale)
            try:
                returned = self.program.run(pending, state.clock, *arguments)
            except TypeError:
                self.other_shapes(index, arrays)
                returned = self.program.run(pending, state.clock, *arguments)
            if fields is not None:
                pending, state.clock, outputs = returned
                self.on_host(outputs, fields)
            else:
                pending, state.clock = returned
            self.calls += 1
            micro += 1
            if micro < accum:
                continue
            micro = 0
            *held, row = update(
                state.params, state.state, state.opt_state, state.clock, state.average, pending, hyper, check, anchors
            )
            state.hold(*held)
            self.calls_update += 1
            self.rows.append(row)
            self.keep_up(*held)
            if self.stopping():
                return index == last
        return True


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _record(step: int, epoch: int, values: dict[str, float]) -> dict[str, Any]:
    return {"type": "metrics", "context": "train", "step": step, "epoch": epoch, "values": values}
