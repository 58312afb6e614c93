"""The job from its options to its exit code: prepare, start verl, show what happens, clean up, sum up."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.verl_rule import MicroBatches, verl_micro_batches
from equipoise.errors import EquipoiseError, InvalidInput, must
from examples.main_job.command import verl_command, verl_environment
from examples.main_job.display import View
from examples.main_job.finish import Outcome, finish
from examples.main_job.prepare import ROOT, plan_inputs
from examples.main_job.presets import NUM_RANKS, Preset
from examples.main_job.processes import Family
from examples.main_job.screen import Screen
from examples.main_job.steps import Ledger, Step
from examples.main_job.watch import Log, StopRequest

_POLL_S = 0.2
_FRAME_S = 1.0
_MEMORY_EVERY_S = 4.0
_FATAL_GRACE_S = 20.0
_STALL_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for."""

    preset: Preset
    steps: int
    seed: int
    output_dir: Path
    extra: Sequence[str] = ()
    live: bool = True


def run_folder(output_dir: Path) -> Path:
    """A new folder for one run, with ``latest`` beside it pointing there.

    Raises:
        InvalidInput: ``latest`` is there and is not a link.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    latest = output_dir / "latest"
    if latest.exists() and not latest.is_symlink():
        raise InvalidInput(must(str(latest), "be a link that a run may replace", "a folder or file", "move it away"))
    name = stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(2, 100):
        try:
            (output_dir / name).mkdir()
            break
        except FileExistsError:
            name = f"{stamp}_{attempt}"
    link = output_dir / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(latest)
    return output_dir / name


def run(options: Options, console: Console) -> int:
    """Run the job; returns the exit code: 0, 1 when something failed, 128 + signal when it was stopped."""
    return _Job(options, console).run()


class _Job:
    """One run and all that is known of it."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.console = console
        self.begin = time.monotonic()
        self.folder = run_folder(options.output_dir.absolute())
        self.record, self.metrics = self.folder / "plans.jsonl", self.folder / "metrics.jsonl"
        self.ledger = Ledger(record=self.record, metrics=self.metrics)
        self.log = Log(self.folder / "verl.log")
        self.rule = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verl-rule")
        self.pending: list[tuple[Step, Future[MicroBatches]]] = []
        self.memory_gb = self.peak_gb = 0.0
        self.memory_at = self.progress_at = self.begin
        self.frame_at = 0.0
        self.phase = "starting"

    def run(self) -> int:
        preset, options = self.options.preset, self.options
        self._warn_of_memory()
        with StopRequest() as stop:
            inputs, preparations = plan_inputs(preset, self.folder, steps=options.steps, seed=options.seed)
            environment = verl_environment(metrics=self.metrics)
            with Screen(self.console, live=options.live and self.console.is_terminal) as screen:
                outcome = Outcome()
                for preparation in preparations:
                    self.phase = preparation.text
                    family = Family(preparation.command, log=self.log.path, env=environment, cwd=ROOT)
                    outcome = self._follow(family, screen, stop, what=preparation.text)
                    if not outcome.well:
                        break
                else:
                    self.phase = "starting verl and Ray"
                    command = verl_command(
                        preset,
                        inputs,
                        steps=options.steps,
                        seed=options.seed,
                        folder=self.folder,
                        record=self.record,
                        extra=options.extra,
                    )
                    family = Family(command, log=self.log.path, env=environment, cwd=self.folder)
                    self.rule.submit(verl_micro_batches, [1, 1], dp_size=2, num_mini_batches=1, max_token_len=1)
                    outcome = self._follow(family, screen, stop, what="verl")
            self.rule.shutdown(wait=True)
            self._collect()
            return finish(
                self.console,
                outcome,
                preset,
                self.ledger,
                self.log,
                num_steps=options.steps,
                seconds=time.monotonic() - self.begin,
                peak_gb=self.peak_gb,
            )

    def _follow(self, family: Family, screen: Screen, stop: StopRequest, *, what: str) -> Outcome:
        """Show a command until it ends or has to be ended; leaves none of its processes behind."""
        outcome = Outcome(what=what)
        self.progress_at = time.monotonic()
        try:
            while outcome.returncode is None and outcome.reason is None:
                outcome.returncode = family.poll()
                now = time.monotonic()
                if outcome.returncode is not None or now - self.frame_at >= _FRAME_S:
                    self.frame_at = now
                    self._look(family, now)
                    screen.show(self._view(now))
                if stop.signal is not None:
                    outcome.stopped = stop.signal
                    break
                if self.log.fatal_at is not None and now - self.log.fatal_at > _FATAL_GRACE_S:
                    outcome.reason = "one of its workers died and it did not end by itself"
                elif now - self.progress_at > _STALL_S:
                    outcome.reason = f"nothing happened for {_STALL_S / 60:.0f} minutes"
                time.sleep(_POLL_S)
        finally:
            outcome.ended = len(family.members())
            if outcome.ended:
                self.phase = "cleaning up"
                screen.show(self._view(time.monotonic()))
            outcome.left_behind = [process.pid for process in family.end()]
            self._look(family, time.monotonic())
        return outcome

    def _look(self, family: Family, now: float) -> None:
        self.log.look()
        done = len(self.ledger.done)
        for step in self.ledger.look():
            self.progress_at = now
            plan = step.planned
            if plan is not None and plan.cap is not None:
                future = self.rule.submit(
                    verl_micro_batches,
                    plan.lengths,
                    dp_size=plan.dp_size,
                    num_mini_batches=plan.num_mini_batches,
                    max_token_len=plan.cap,
                )
                self.pending.append((step, future))
        self._collect()
        if len(self.ledger.done) > done:
            self.progress_at = now
        if now - self.memory_at > _MEMORY_EVERY_S:
            self.memory_gb = family.memory_gb() + family.own_memory_gb()
            self.peak_gb = max(self.peak_gb, self.memory_gb)
            self.memory_at = now
        self._name_phase()

    def _collect(self) -> None:
        """Take over what verl's rule has been computed for."""
        for step, future in [entry for entry in self.pending if entry[1].done()]:
            self.pending.remove((step, future))
            try:
                step.verl = future.result()
            except EquipoiseError:
                step.verl = None  # verl would have refused this step

    def _name_phase(self) -> None:
        done = len(self.ledger.done)
        if done >= self.options.steps:
            self.phase = "verl closes down"
        elif self.log.training:
            trains = any(step.number > done and step.planned is not None for step in self.ledger.steps)
            self.phase = f"step {done + 1}: {'training as planned' if trains else 'generating responses'}"

    def _view(self, now: float) -> View:
        preset = self.options.preset
        elapsed = now - self.begin
        left = self._left(elapsed, now)
        return View(
            title=f"Equipoise · GRPO on {preset.title} · verl 0.9.1 on {NUM_RANKS} CPU ranks",
            task=preset.task,
            phase=self.phase,
            steps=self.ledger.steps,
            num_steps=self.options.steps,
            fraction=elapsed / (elapsed + left),
            elapsed_s=elapsed,
            left_s=left,
            memory_gb=self.memory_gb,
            peak_gb=self.peak_gb,
            log=str(self.log.path),
        )

    def _left(self, elapsed: float, now: float) -> float:
        """Seconds left: the preset's guess at first, then the mean of the steps so far."""
        preset, done = self.options.preset, self.ledger.done
        remaining = self.options.steps - len(done)
        if not done:
            return max(preset.startup_s + preset.step_s * remaining - elapsed, preset.step_s * remaining)
        times = [step.metric("timing_s/step") or preset.step_s for step in done]
        return max(sum(times) / len(times) * remaining - (now - self.progress_at), 1.0)

    def _warn_of_memory(self) -> None:
        free, needed = psutil.virtual_memory().available / 1e9, self.options.preset.memory_gb
        if free < needed:
            self.console.print(
                f"[yellow]Only {free:.0f} GB of memory are free and about {needed:.0f} are needed: "
                "end other programs, or choose --model tiny.[/yellow]"
            )
