"""Run verl's own command in processes of its own, and leave none of them behind."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment, cpu_overrides
from examples.tiny import TinyPaths, build_tiny
from tests.integration.family import Family

_AT_START = Path(__file__).parent / "at_start"
# verl waits for ever for a worker that is gone, so a log that says so ends the run.
_FATAL = re.compile(r"ActorDiedError|WorkerCrashedError|A worker died or was killed|running low on memory")
# verl looks for a free port and listens on it seconds later, when another process may have taken it.
_PORT_TAKEN = re.compile(r"server socket has failed to listen.*EADDRINUSE")


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What a run has left."""

    returncode: int | None
    """None where the run was killed after a fatal line in its log."""
    wall_s: float
    log: Path
    metrics: tuple[Mapping[str, Any], ...]
    """One mapping a step that verl logged, with the step under ``step``."""

    def checked(self) -> Completed:
        """Raise with the tail of the log unless the run ended well."""
        if self.returncode != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
            raise RuntimeError(f"verl ended with {self.returncode} after {self.wall_s:.0f} s; {self.log} ends\n{tail}")
        return self

    def series(self, name: str) -> list[float]:
        """Values of one metric, step by step, where it was logged."""
        return [float(row[name]) for row in self.metrics if name in row]


def lighter(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with a lighter start of every Python process; see ``at_start``."""
    return {**env, "PYTHONPATH": os.pathsep.join([str(_AT_START), *filter(None, [env.get("PYTHONPATH")])])}


@functools.cache
def tiny() -> TinyPaths:
    """The tiny model and its data, made once a session."""
    folder = tempfile.mkdtemp(prefix="equipoise-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_tiny(Path(folder))


def tiny_overrides(*, steps: int) -> list[str]:
    """GRPO on the tiny model: 8 prompts a step, 4 samples each, up to 32 tokens, two mini-batches."""
    return [
        *tiny().overrides(),
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "data.max_prompt_length=128",
        "data.max_response_length=32",
        "data.seed=1",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "trainer.total_epochs=4",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def run_verl(
    overrides: list[str],
    *,
    dp: int,
    cwd: Path,
    script: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """``python -m verl.trainer.main_ppo`` on ``dp`` CPU ranks, started again once if its port was taken.

    Args:
        overrides: Hydra overrides; they come after, and so win over, those that a CPU needs.
        dp: data-parallel ranks.
        cwd: folder to run in; gets ``verl.log`` and ``metrics.jsonl``.
        script: a shell script that starts verl with the overrides that it is given, instead of verl's own command.
        env: more environment variables.

    Raises:
        Stalled: nothing happened in the run any more.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    start = [sys.executable, "-m", "verl.trainer.main_ppo"] if script is None else ["bash", str(script)]
    command = [*start, *cpu_overrides(dp), 'trainer.logger=["console","file"]', *overrides]
    run = _run(command, cwd=cwd, env=env or {})
    taken = run.returncode != 0 and _PORT_TAKEN.search(run.log.read_text(errors="replace"))
    return _run(command, cwd=cwd, env=env or {}) if taken else run


def _run(command: list[str], *, cwd: Path, env: Mapping[str, str]) -> Completed:
    log, metrics = cwd / "verl.log", cwd / "metrics.jsonl"
    ray_dir = Path(tempfile.mkdtemp(prefix="eq", dir="/tmp"))  # short: Ray puts Unix sockets below it
    environment = lighter(
        {
            **cpu_environment(),
            "PYTHONWARNINGS": "ignore",
            "RAY_TMPDIR": str(ray_dir),
            "SPT_NOENV": "1",  # Ray renames its processes; so its new names leave the mark readable
            "VERL_FILE_LOGGER_PATH": str(metrics),
            **env,
        }
    )
    metrics.unlink(missing_ok=True)
    begin = time.monotonic()
    family = Family(command, log=log, cwd=cwd, env=environment)
    try:
        returncode = family.wait(fatal=_FATAL)
    finally:
        family.kill()
        shutil.rmtree(ray_dir, ignore_errors=True)
    return Completed(returncode=returncode, wall_s=time.monotonic() - begin, log=log, metrics=_read(metrics))


def _read(path: Path) -> tuple[Mapping[str, Any], ...]:
    if not path.exists():
        return ()
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {"step": row["step"]}).update(row["data"])
    return tuple(steps[step] for step in sorted(steps))
