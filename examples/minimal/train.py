"""GRPO or PPO from rollout to update. ``Trainer.train_step`` is the place to start reading.

``python -m examples.minimal --help`` tells the settings and starts the ranks; torchrun does too:
``torchrun --nproc-per-node 2 -m examples.minimal.train engine=fsdp2 dp=2 out=outputs/minimal/mine``.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch.distributed, tensordict and transformers are typed in part only.

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import equipoise as eq
from equipoise.together import gather_texts, together
from equipoise.training.engine.device import device_name, ensure_process_group, local_device
from examples.minimal import losses
from examples.minimal.processes import end_with_parent, quiet
from examples.minimal.record import Record, claim
from examples.minimal.rows import Job, Sample, batch_of, jagged, row_lengths
from examples.minimal.sampling import SAMPLERS
from examples.minimal.settings import CONF, Settings
from examples.minimal.sft import first_policy
from examples.minimal.task import END, Task, tiny_model


class Trainer:
    """One rank of a run; rank 0 writes down what comes out."""

    def __init__(self, settings: Settings) -> None:
        ensure_process_group(device_name())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.settings = s = replace(settings, out=self.from_driver(settings.out))
        s.check_world(self.world)
        self.dp_rank = self.rank // s.sp
        self.out = Path(s.out)
        self.on_driver(lambda: claim(self.out, s), doing="claiming the folder")
        self.record = Record(self.out, writes=self.rank == 0)
        self.task = Task(s.seed)
        rollout_model = AutoModelForCausalLM.from_config(tiny_model(), dtype=getattr(torch, s.dtype))
        rollout_model.to(local_device(device_name()))
        self.sampler = SAMPLERS[s.rollout](rollout_model, max_new_tokens=s.max_new_tokens)
        policy = first_policy(self)
        self.actor = self.engine(policy, lr=s.lr)
        self.reference = self.engine(policy) if s.kl_coef > 0 else None
        self.critic = self.engine(policy, lr=s.critic_lr, model_type="value_model") if s.algorithm == "ppo" else None

    def run(self) -> None:
        """All steps that are not done yet, and the picture."""
        s = self.settings
        for step in range(self.resume() + 1, s.steps + 1):
            began = time.perf_counter()
            figures = self.train_step(step)
            self.record.add("rl", step, s.steps, figures, seconds=time.perf_counter() - began)
            if step % s.save_every == 0 or step == s.steps:
                self.save(step)
        if self.rank == 0:
            path = self.record.draw(f"{s.algorithm} on {s.engine}, dp {s.dp}, sp {s.sp}")
            print(f"reward and loss of each step: {path}", flush=True)

    def train_step(self, step: int) -> dict[str, float]:
        """Sample, score, plan, get the numbers of before the update, update."""
        s = self.settings
        self.sampler.load(self.actor.get_per_tensor_param())
        samples = self.rollouts(step)
        job = self.plan(samples, s.mini_batches)
        mine = self.mine(job)
        self.infer("old_log_probs", self.actor, "log_probs", mine, job)
        self.infer("ref_log_probs", self.reference, "log_probs", mine, job)
        self.infer("old_values", self.critic, "values", mine, job)
        self.add_advantages(mine, job)
        figures = self.update("critic", self.critic, mine, job, partial(losses.value, s)) if self.critic else {}
        figures |= self.update("actor", self.actor, mine, job, partial(losses.policy, s))
        rewards = torch.tensor([sample.reward for sample in samples])
        exact = (rewards == 1).double().mean()
        tokens = job.batch["input_ids"].values().numel()
        return {"reward": float(rewards.mean()), "exact": float(exact), "tokens": tokens} | figures

    def rollouts(self, step: int) -> list[Sample]:
        """Each rank samples its part of the rows, then all ranks exchange the responses and score them."""
        s = self.settings
        rows = self.rows_of(self.rank)
        number = [(step - 1) * s.prompts + row // s.rollouts for row in range(s.num_rows)]
        seeds = [(s.seed * 2**20 + step) * 2**20 + row for row in rows]
        responses = self.sampler.sample([self.task.prompt(number[row]) for row in rows], seeds)
        parts = [json.loads(text) for text in self.exchange(lambda: json.dumps(responses))]
        found = {
            row: response
            for rank, part in enumerate(parts)
            for row, response in zip(self.rows_of(rank), part, strict=True)
        }
        return [
            Sample(number=number[row], response=found[row], reward=self.task.score(number[row], found[row]))
            for row in range(s.num_rows)
        ]

    def rows_of(self, rank: int) -> range:
        """Numbers of the rows that a rank samples."""
        return range(rank, self.settings.num_rows, self.world)

    def plan(self, samples: list[Sample], mini_batches: int) -> Job:
        """Rows padded to a multiple of the ranks, then planned by their lengths: the same on every rank."""
        batch = batch_of(samples, self.task)
        rows, padding = len(batch), -(len(batch) // mini_batches) % self.settings.dp * mini_batches
        batch = eq.pad_batch(batch, padding, eos_token_id=END)
        # Each mini-batch with its own padding, so that its real rows do not depend on the number of ranks.
        blocks = (np.arange(rows).reshape(mini_batches, -1), rows + np.arange(padding).reshape(mini_batches, -1))
        batch = eq.reorder(batch, np.concatenate(blocks, axis=1).ravel())
        spec = self.settings.step_spec(mini_batches)
        plan = eq.plan_step(row_lengths(batch["input_ids"]), spec, is_padding=batch["is_padding"])
        loss_tokens = [int(mask.sum()) for mask in batch["loss_mask"].unbind()]
        counts = eq.LossDenominators.from_plan(plan, loss_tokens, is_padding=batch["is_padding"])
        return Job(batch=batch, plan=plan, counts=counts)

    def mine(self, job: Job) -> TensorDict:
        """Rows of the rank, in the plan's order."""
        return eq.reorder(job.batch, job.plan.rank_rows(self.dp_rank))

    def infer(self, column: str, engine: eq.BaseEngine | None, output: str, mine: TensorDict, job: Job) -> None:
        """Add what an engine says of this rank's rows as a column, if there is the engine."""
        if engine is not None:
            with engine.eval_mode():
                mine[column] = engine.infer_batch(mine, plan=job.plan).model_output[output].cpu()

    def add_advantages(self, mine: TensorDict, job: Job) -> None:
        """Of the whole step, the same on every rank; each keeps those of its rows."""
        values = None
        if self.critic is not None:
            own = [row.tolist() for row in mine["old_values"].unbind()]
            parts = self.exchange(lambda: json.dumps(own), group=self.critic.get_data_parallel_group())
            dtype = mine["old_values"].dtype
            in_plan_order = [torch.tensor(row, dtype=dtype) for part in parts for row in json.loads(part)]
            values = pad_sequence([in_plan_order[place] for place in job.plan.inverse], batch_first=True)
        inputs = eq.AdvantageInputs(
            rewards=job.batch["reward"],
            loss_mask=pad_sequence(list(job.batch["loss_mask"].unbind()), batch_first=True),
            uids=job.batch["uid"],
            values=values,
            is_padding=job.batch["is_padding"],
        )
        found = eq.compute_advantages("grpo" if values is None else "gae", inputs)
        rows = job.plan.rank_rows(self.dp_rank)
        lengths = [len(ids) for ids in mine["input_ids"].unbind()]
        for name, whole in (("advantages", found.advantages), ("returns", found.returns)):
            mine[name] = jagged([whole[row, :length] for row, length in zip(rows, lengths, strict=True)])

    def update(
        self, name: str, engine: eq.BaseEngine, mine: TensorDict, job: Job, loss: Callable[..., Any]
    ) -> dict[str, float]:
        """One optimizer step for each mini-batch of the plan; what they logged, over all ranks."""
        parts: list[dict[str, Any]] = []
        with engine.train_mode():
            for mini_batch, counts in enumerate(job.counts):
                done = engine.train_batch(mine, partial(loss, counts), plan=job.plan, mini_batch=mini_batch)
                engine.lr_scheduler_step()
                parts.append({**done.metrics, f"{name}/grad_norm": eq.Metric(done.grad_norm or 0.0, 1)})
        merged = eq.reduce_metrics(eq.merge_metrics(parts), group=engine.get_data_parallel_group())
        return eq.metric_values(merged)

    def engine(self, model: Any, *, lr: float | None = None, model_type: str = "language_model") -> eq.BaseEngine:
        """An engine from the registry; without a learning rate it never trains."""
        torch.manual_seed(self.settings.seed)
        engine = eq.engines.create(self.settings.engine_config(model_type, lr), model)
        engine.initialize()
        return engine

    def save(self, step: int) -> None:
        """The actor's checkpoint, written last, says which step the run is at; only then do older critics go."""
        if self.critic is not None:
            self.critic.save_checkpoint(self.out / f"critic-{step}", global_step=step, max_ckpt_to_keep=1)
        extra = {"step": step, "rng": torch.get_rng_state()}
        self.actor.save_checkpoint(self.out / "actor", global_step=step, max_ckpt_to_keep=1, extra=extra)
        for old in self.out.glob("critic-*") if self.rank == 0 else ():
            if old.name != f"critic-{step}":
                shutil.rmtree(old)

    def resume(self) -> int:
        """Go back to the last checkpoint; returns its step, 0 if there is none."""
        step = 0
        if self.from_driver(str((self.out / "actor" / "latest").exists())) == "True":
            extra = self.actor.load_checkpoint(self.out / "actor")
            step = int(extra["step"])
            torch.set_rng_state(extra["rng"])
            if self.critic is not None:
                self.critic.load_checkpoint(self.out / f"critic-{step}")
        self.record.back_to("rl", step)
        return step

    def from_driver(self, text: str) -> str:
        """What rank 0 passed, on every rank."""
        return self.exchange(lambda: text)[0]

    def on_driver(self, part: Callable[[], Any], *, doing: str) -> None:
        """Rank 0 does it while the others wait; if it fails there, all ranks raise the error."""
        together(lambda: part() if self.rank == 0 else None, group=dist.group.WORLD, doing=doing)

    def exchange(self, text: Callable[[], str], group: Any = None) -> list[str]:
        """A text of each rank, by rank; what goes wrong on one is raised on all."""
        return gather_texts(text, group=group or dist.group.WORLD, doing="exchanging what each rank has")


@hydra.main(version_base="1.3", config_path=CONF, config_name="minimal")
@record
def main(config: Any) -> None:
    """One rank, started by torchrun."""
    end_with_parent()
    quiet()
    try:
        settings = Settings.of(config)
    except eq.EquipoiseError as error:
        sys.exit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else 1)
    Trainer(settings).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
