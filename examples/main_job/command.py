"""verl's command line for a preset: what a user would type, and the environment to type it in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment, cpu_overrides
from examples.main_job.prepare import Inputs
from examples.main_job.presets import NUM_RANKS, Preset


def verl_command(
    preset: Preset, inputs: Inputs, *, steps: int, seed: int, folder: Path, record: Path, extra: Sequence[str]
) -> list[str]:
    """GRPO in two mini-batches a step, with Equipoise on.

    Args:
        preset: model and sizes.
        inputs: what verl reads.
        steps: training steps.
        seed: of the order of the prompts.
        folder: for what verl and Hydra write.
        record: file for each step's lengths and plan.
        extra: more Hydra overrides; they come last and win.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+equipoise=default",
        f"equipoise.record={record}",
        *cpu_overrides(NUM_RANKS),
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={inputs.model}",
        f"data.train_files={inputs.train}",
        f"data.val_files={inputs.val}",
        "data.filter_overlong_prompts=False",
        f"data.seed={seed}",
        f"data.train_batch_size={preset.train_batch_size}",
        f"data.max_prompt_length={preset.max_prompt_length}",
        f"data.max_response_length={preset.max_response_length}",
        f"reward.custom_reward_function.path={inputs.reward}",
        "reward.custom_reward_function.name=compute_score",
        f"{rollout}.n={preset.num_samples}",
        f"{rollout}.temperature=1.0",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_mini_batch_size={preset.mini_batch_size}",
        f"{actor}.ppo_max_token_len_per_gpu={preset.max_token_len}",
        f"{actor}.fsdp_config.reshard_after_forward=False",  # a small model: gather its weights once a micro-batch
        f"{rollout}.log_prob_max_token_len_per_gpu={3 * preset.max_token_len}",
        f"{actor}.optim.lr={preset.learning_rate}",
        "trainer.project_name=equipoise",
        f"trainer.experiment_name=main_job_{preset.name}",
        'trainer.logger=["console","file"]',
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"hydra.run.dir={folder / 'hydra'}",
        *extra,
    ]


def verl_environment(*, metrics: Path) -> dict[str, str]:
    """Environment of a CPU job whose metrics go to ``metrics``, one JSON line a step."""
    return {
        **cpu_environment(),
        # glibc keeps what is freed, by thread and in pieces; give large blocks back: two GB less for each trainer
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(3 << 20),
        "PYTHONWARNINGS": "ignore",
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
