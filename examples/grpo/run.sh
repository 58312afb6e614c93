#!/usr/bin/env bash
# GRPO with verl 0.9.1 and vLLM. What turns Equipoise on is the one line `+equipoise=default`.
#
#   MODEL=Qwen/Qwen2.5-7B-Instruct TRAIN=$HOME/data/gsm8k/train.parquet VAL=$HOME/data/gsm8k/test.parquet \
#     bash examples/grpo/run.sh [more Hydra overrides, which win]
#
# The data are the parquet files of verl's own examples (examples/data_preprocess in its repository).
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VAL=${VAL:-$HOME/data/gsm8k/test.parquet}
NODES=${NODES:-1}
GPUS=${GPUS:-8}                  # a node
ROLLOUT_TP=${ROLLOUT_TP:-1}      # GPUs that share one copy of the model while it generates
PROMPTS=${PROMPTS:-256}          # a step
SAMPLES=${SAMPLES:-8}            # responses a prompt, GRPO's group
MINI_BATCH=${MINI_BATCH:-64}     # prompts an optimizer step, so 4 of them a step
MAX_PROMPT=${MAX_PROMPT:-1024}   # tokens
MAX_RESPONSE=${MAX_RESPONSE:-8192}
MAX_TOKENS=${MAX_TOKENS:-16384}  # that a micro-batch of one GPU may hold; at least one row of the longest kind

exec "$PYTHON" -m verl.trainer.main_ppo \
  +equipoise=default \
  algorithm.adv_estimator=grpo \
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
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n="$SAMPLES" \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$MAX_TOKENS" \
  trainer.project_name=equipoise \
  trainer.experiment_name=grpo \
  trainer.logger='["console","tensorboard"]' \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.total_epochs=1 \
  trainer.save_freq=50 \
  trainer.test_freq=10 \
  "$@"
