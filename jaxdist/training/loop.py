"""The training run: wiring of setup, data, checkpoints and logs around the compiled step.

Dispatch runs one step ahead of the host, which reads a step's metrics while the next one
computes. Before a checkpoint is written all metrics up to it are read, judged and on disk, so no
checkpoint holds a state that has gone bad and no restart loses a step's record.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import jax

import jaxdist
from jaxdist import platform
from jaxdist.config import RunConfig, UsageError
from jaxdist.config.layers import save_config
from jaxdist.data.loader import Loader, make_loader
from jaxdist.data.prefetch import prefetch
from jaxdist.parallel import distributed
from jaxdist.training import dry_run
from jaxdist.training.batches import batch_maker
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.flops import flops_per_token, peak_flops
from jaxdist.training.metrics import MetricsLog, check_installed
from jaxdist.training.model_source import keep_origin
from jaxdist.training.plot import PLOT, plot_loss
from jaxdist.training.progress import Progress
from jaxdist.training.resume import check_record, differences, new_decay, new_learning
from jaxdist.training.run_folder import alone_in, check_place, check_writable
from jaxdist.training.setup import Setup
from jaxdist.training.signals import ABORTED, StopSignals
from jaxdist.training.state import TrainState
from jaxdist.training.step import Metrics, mean_loss
from jaxdist.training.trace import Trace


def run(config: RunConfig) -> int:
    """Train as `config` says; returns the process's exit code.

    0 at the end or after SIGTERM (checkpointed), 130 after Ctrl-C (checkpointed). Raises
    `UsageError` for what cannot work and `NonFinite` where a metric stops the run.
    """
    distributed.start()
    if jax.default_backend() == "cpu":
        platform.keep_freed_memory()
    setup = Setup.of(config)
    if config.dry_run:
        dry_run.report(setup)
        return 0
    check_place(config.run_dir)
    _resume_point(config)
    check_installed(config.log)
    loader = make_loader(config)
    validation = make_loader(config, "validation") if config.eval.every else None
    check_writable(config.run_dir)
    with alone_in(config.run_dir):
        start = _resume_point(config)  # again: another trainer may have saved in the meantime
        with _Run(setup, loader, validation, start) as training:
            return training.run()


class _Run:
    """One process's part of a run, from restored state to closed logs."""

    def __init__(
        self, setup: Setup, loader: Loader, validation: Loader | None, start: int | None
    ) -> None:
        config = setup.config
        self.setup, self.config, self.loader, self.validation = setup, config, loader, validation
        self.checkpoints = Checkpointer(config.run_dir / "checkpoints", config.checkpoint)
        self.start, self.step, self.tokens = start, start or 0, 0
        self.news: list[str] = []
        if start is not None:
            saved = self.checkpoints.extra(start)
            check_record(saved, self.checkpoints.directory / str(start))
            self._refuse_changes(saved)
            setup.check_saved(self.checkpoints, start)
            both = saved["config"], asdict(config)
            self.news = [line for line in (new_decay(*both), new_learning(*both)) if line]
        self.last = min(config.train.steps, config.train.stop_after or config.train.steps)
        self.first_process = distributed.is_first_process()
        self.progress = Progress(config, self.step, self.last)
        self.unread: tuple[int, Metrics] | None = None
        self.trace = Trace(config.profile, config.run_dir)
        self.is_prepared = False

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.close()
        self.trace.close()
        if self.is_prepared:
            self.log.close()
        self.checkpoints.close()

    def run(self) -> int:
        """All steps from the restored one on; returns the exit code."""
        folder = self.config.run_dir
        if self.step >= self.last:
            self.progress.say(f"nothing to do: {folder} is at step {self.step} already")
            self._plot()
            return 0
        since = f", from step {self.step} on" if self.start is not None else ""
        self.progress.say(
            f"training {self.setup.description}, into {folder}{since}; compiling first"
        )
        self.progress.say(f"data: {self.loader.summary}")
        for line in self.news:
            self.progress.say(line)
        self._prepare()
        with StopSignals() as signals, self._batches(self.loader) as batches:
            for step, batch in batches:
                with self.trace.around(step + 1, lambda: self.state):
                    self.state, metrics = self.train_step(self.state, batch)
                self._read_metrics()
                self.step, self.unread = step + 1, (step + 1, metrics)
                stopping = signals.stop_after(self.step)
                if self._due(self.config.eval.every) or (self.validation and self._at_end()):
                    self._evaluate()
                if self._due(self.config.checkpoint.every) or self._at_end() or stopping:
                    self._save()
                if stopping:
                    return self._stopped(signals.received)
            # A signal from here on finds a run that ends anyway, with its last checkpoint whole.
            self.checkpoints.wait()
        self._plot()
        self.progress.say(f"step {self.step} is saved in {folder}")
        return 0

    def _prepare(self) -> None:
        """Make or restore the state, compile the steps, open the logs.

        The state comes first: compiling takes minutes, after which nothing should be found damaged.
        """
        config, setup = self.config, self.setup
        self.state = self._first_state(self.start)
        self.train_step = setup.compile_train_step()
        self.eval_step = setup.compile_eval_step() if self.validation else None
        self.flops = flops_per_token(config.model, config.train.sequence_length)
        self.peak = peak_flops(setup.mesh.devices.size, setup.policy.compute_dtype)
        if self.first_process:
            save_config(config, config.run_dir / "config.yaml")
            if self.start is None:
                keep_origin(config)
        self.log = MetricsLog(config.run_dir, config.log, resume_step=self.step)
        self.is_prepared = True
        self.clock = time.perf_counter()

    def _first_state(self, start: int | None) -> TrainState:
        if start is None:
            return self.setup.initial_state()
        state, extra = self.setup.restore(self.checkpoints, start)
        self.tokens = extra["tokens"]
        return state

    def _refuse_changes(self, saved: dict[str, Any]) -> None:
        changed = differences(saved["config"], asdict(self.config))
        if not changed and saved["data"] != self.loader.fingerprint:
            changed = [f"data: {saved['data']} saved, {self.loader.fingerprint} asked"]
        if changed:
            raise UsageError(
                f"{self.config.run_dir} holds a run with other settings: {'; '.join(changed)}; "
                "give them back their values, or choose another --output-dir"
            )

    @contextmanager
    def _batches(self, loader: Loader) -> Iterator[Any]:
        make = self._maker(loader)
        with prefetch(
            loader, self.step, lambda _, step: make(step), stop_step=self.last
        ) as batches:
            yield batches

    def _maker(self, loader: Loader) -> Any:
        train = self.config.train
        return batch_maker(
            loader,
            self.setup.mesh,
            self.config.parallel.num_microbatches,
            train.global_batch_size,
            train.sequence_length,
        )

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _at_end(self) -> bool:
        return self.step == self.last

    def _read_metrics(self) -> None:
        """Log the step in flight, once it is done."""
        row = self._next_row()
        if row is not None:
            self._record(row)

    def _next_row(self) -> dict[str, float] | None:
        """Wait for the step in flight, if there is one, and give its row of metrics."""
        if self.unread is None:
            return None
        (step, metrics), self.unread = self.unread, None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        rate = values["num_tokens"] / seconds  # padding is no work of the model's
        self.tokens += int(values["num_tokens"])
        row = {
            "step": step,
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "learning_rate": values["learning_rate"],
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "mfu": rate * self.flops / self.peak,
        }
        return row | {name: values[name] for name in ("loss_scale", "skipped") if values.get(name)}

    def _record(self, row: dict[str, float]) -> None:
        """Log a row, and stop the run where it has gone bad."""
        self.log.write(row)
        self.progress.update(row)
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(row[name])]
        if bad and not self._is_skipped(row):
            raise NonFinite(self._bad_step(int(row["step"]), row, bad))

    def _is_skipped(self, row: dict[str, float]) -> bool:
        """Whether the step changed nothing and the run may go on.

        Under fp16 an overflow at the scale's floor is no longer the scale's doing.
        """
        floor = self.config.precision.loss_scale_min
        at_floor = "loss_scale" in row and row["loss_scale"] <= floor
        stops = at_floor and self.config.train.on_nonfinite == "stop"
        return bool(row.get("skipped")) and not stops

    def _bad_step(self, step: int, row: dict[str, float], bad: list[str]) -> str:
        named = ", ".join(f"{name} is {row[name]}" for name in bad)
        kept = self.checkpoints.latest_step()
        good = f"the checkpoint of step {kept} is kept" if kept else "there is no checkpoint yet"
        return (
            f"step {step}: {named}; stopped, {good}. Lower optimizer.learning_rate, or go on "
            "past such steps with --train.on_nonfinite skip"
        )

    def _evaluate(self) -> None:
        assert self.validation is not None and self.eval_step is not None
        row = self._next_row()
        make = self._maker(self.validation)
        # No row counts twice, however little text is held back.
        epoch = -(-self.validation.num_rows // self.config.train.global_batch_size)
        batches = range(min(self.config.eval.batches, epoch))
        sums = [self.eval_step(self.state.params, make(step)) for step in batches]
        loss = mean_loss(sums)
        if row is not None:
            self._record(row | {"val_loss": loss})
        self.clock = time.perf_counter()

    def _save(self) -> None:
        self._read_metrics()
        self.log.flush()
        extra = {
            "config": asdict(self.config),
            "data": self.loader.fingerprint,
            "tokens": self.tokens,
            "version": jaxdist.__version__,
        }
        self.setup.save(self.checkpoints, self.step, self.state, extra)
        self.clock = time.perf_counter()

    def _plot(self) -> None:
        if not self.first_process:
            return
        try:
            plot_loss(self.config.run_dir)
        except OSError as error:  # the run is whole without its picture
            self.progress.say(f"{self.config.run_dir / PLOT} is not drawn: {error.strerror}")

    def _stopped(self, received: int | None) -> int:
        self.checkpoints.wait()
        if self.first_process:
            name = signal.Signals(received or signal.SIGTERM).name
            self.progress.say(
                f"{name}: saved step {self.step} in {self.config.run_dir}; the same command "
                "with --resume auto goes on from there"
            )
        return ABORTED if received == signal.SIGINT else 0


class NonFinite(ArithmeticError):
    """A loss or gradient norm that is NaN or infinite."""


def _resume_point(config: RunConfig) -> int | None:
    """Step to go on from, None for a fresh start. Writes nothing."""
    directory = config.run_dir / "checkpoints"
    latest = None
    if directory.is_dir():
        reader = Checkpointer(directory, None)
        latest = reader.latest_step()
        reader.close()
    if config.resume == "must" and latest is None:
        raise UsageError(
            f"--resume must, but there is no checkpoint in {directory}; "
            "give the run's --output-dir, or --resume auto"
        )
    if config.resume == "never" and latest is not None:
        raise UsageError(
            f"--resume never, but {directory} holds the checkpoint of step {latest}; "
            "choose another --output-dir, or --resume auto"
        )
    return latest
