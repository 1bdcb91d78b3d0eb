"""The loop of manual mode: one call of the ``step`` program per step, and nothing else.

Data, log rows, divergence, stops and everything around an epoch are those of the automatic loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nitro_cli.data.prefetch import Stream
from nitro_cli.errors import ExperimentError
from nitro_cli.programs.cache import Program
from nitro_cli.run.loop import EpochLoop
from nitro_cli.suggest import listed


class ManualLoop(EpochLoop):
    """Gathers ``accum`` micro-batches, unless it is 1, and hands them to ``train_step`` in one call."""

    def trained_hooks(self) -> Sequence[str]:
        return ("train_step",)

    def program_for(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program:
        self.nitro.optimizer_layout()
        return self.nitro.programs.step(batch)

    def steps(self, stream: Stream) -> bool:
        nitro, state = self.nitro, self.nitro.state
        seed, vector, check, *_ = self.constants
        device = nitro.device  # looked up for each epoch: set_device may have changed a value
        params, model_state, opt_state, clock = state.params, state.state, state.opt_state, state.clock
        schedules, step = nitro.setup.schedules, state.step
        last = len(nitro.setup.splits["train"]) - 1
        self.calls = 0
        rows, program = self.rows, self.program.run
        try:
            for index, batches, fields in self._groups(stream):
                if schedules:
                    vector = schedules.vector(step)
                    device = nitro.scheduled_device(step) if schedules.driven else device
                    step += 1
                try:
                    made = program(params, model_state, opt_state, clock, seed, device, vector, check, batches)
                except TypeError:
                    program = self.other_shapes(index, batches[0])
                    made = program(params, model_state, opt_state, clock, seed, device, vector, check, batches)
                params, model_state, opt_state, clock, row, *stats = made
                rows.append(row)
                self.calls += 1
                if self.host_metrics:
                    self.on_host(stats[0], fields)
                self.keep_up(params, model_state, opt_state, clock, [])
                if self.stopping():
                    return index == last
        finally:
            state.hold(params, model_state, opt_state, clock, [])
            self.program.used(self.calls)
        return True

    def _groups(self, stream: Stream) -> Iterator[tuple[int, list[Any], list[Any]]]:
        """``(index of the last batch, its micro-batches, fields of train_metrics)`` of every step."""
        group: list[Any] = []
        for index, item in stream:
            group.append(item)
            if len(group) == self.recipe.accum:
                yield index, [arrays for arrays, _ in group], self._metric_fields(group)
                group = []

    def _metric_fields(self, group: Sequence[Any]) -> list[Any]:
        if not self.metric_fields:
            return []
        fields = [fields for _, fields in group]
        if not self.recipe.routes["train_step"].accum:
            return fields[0]
        return [np.stack(parts) for parts in zip(*fields, strict=True)]

    def on_host(self, outputs: Any, fields: Sequence[Any]) -> None:
        super().on_host(outputs, fields)
        twice = [name for name in self.host_rows[-1] if name in self.program.found["columns"]]
        if twice:
            raise ExperimentError(
                f"train_metrics returns {listed(twice)}, which the step's stats log already",
                "give one of the two another name",
            )
