#!/usr/bin/env bash
# PPO with a critic, a reference model and a KL term, on verl 0.9.1 and vLLM. What turns Equipoise on is the one line
# `+equipoise=default`: it plans the actor, the critic and the passes of both and of the reference.
#
#   MODEL=Qwen/Qwen2.5-7B-Instruct TRAIN=$HOME/data/gsm8k/train.parquet VAL=$HOME/data/gsm8k/test.parquet \
#     bash examples/ppo/run.sh [more Hydra overrides, which win]
#
# The data are the parquet files of verl's own examples (examples/data_preprocess in its repository).
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}  # of the actor and the reference
CRITIC=${CRITIC:-$MODEL}                  # what the critic starts from
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VAL=${VAL:-$HOME/data/gsm8k/test.parquet}
NODES=${NODES:-1}
GPUS=${GPUS:-8}                           # a node
ROLLOUT_TP=${ROLLOUT_TP:-1}               # GPUs that share one copy of the model while it generates
PROMPTS=${PROMPTS:-1024}                  # a step
MINI_BATCH=${MINI_BATCH:-256}             # prompts an optimizer step of the actor, so 4 of them a step
CRITIC_MINI_BATCH=${CRITIC_MINI_BATCH:-$MINI_BATCH}
MAX_PROMPT=${MAX_PROMPT:-1024}            # tokens
MAX_RESPONSE=${MAX_RESPONSE:-4096}
MAX_TOKENS=${MAX_TOKENS:-16384}           # that a micro-batch of one GPU may hold, in the actor
CRITIC_MAX_TOKENS=${CRITIC_MAX_TOKENS:-32768}

exec "$PYTHON" -m verl.trainer.main_ppo \
  +equipoise=default \
  algorithm.adv_estimator=gae \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  data.train_batch_size="$PROMPTS" \
  data.max_prompt_length="$MAX_PROMPT" \
  data.max_response_length="$MAX_RESPONSE" \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH" \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS" \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$MAX_TOKENS" \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$MAX_TOKENS" \
  critic.model.path="$CRITIC" \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=True \
  critic.optim.lr=1e-5 \
  critic.ppo_mini_batch_size="$CRITIC_MINI_BATCH" \
  critic.ppo_max_token_len_per_gpu="$CRITIC_MAX_TOKENS" \
  trainer.project_name=equipoise \
  trainer.experiment_name=ppo \
  trainer.logger='["console","tensorboard"]' \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.total_epochs=1 \
  trainer.save_freq=50 \
  trainer.test_freq=10 \
  "$@"
