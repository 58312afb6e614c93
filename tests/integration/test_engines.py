"""Engines as a user meets them: torchrun starts a script that plans, trains and saves; engines from outside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.family import run_patiently

pytestmark = pytest.mark.slow
CLUSTERS = ("fsdp2-2-1", "fsdp2-1-2", "ddp-2-1")
"""Backend, data-parallel size, sequence-parallel size."""

GRPO = '''
"""Two GRPO steps on a tiny model: the driver's work on every rank, since all know all lengths."""
import json, sys
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import LlamaConfig
import equipoise as eq

lengths = [7, 12, 4, 9, 15, 6, 8, 11]
draw = torch.Generator().manual_seed(1)
columns = {
    "input_ids": [torch.randint(0, 40, (n,), generator=draw) for n in lengths],
    "loss_mask": [(torch.arange(n) > 1).long() for n in lengths],
    "advantages": [torch.full((n,), float(a), dtype=torch.float64) for n, a in zip(lengths, (1, -1) * 4)],
}
jagged = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
batch = TensorDict(jagged, batch_size=[len(lengths)])
sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
model = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
kl = eq.PolicyConfig(kl_coef=0.1)


def train(backend, dp, sp, folder):
    spec = eq.StepSpec(
        dp_size=dp, num_mini_batches=2, max_token_len_per_gpu=20 // sp, sp_size=sp, composition="stratified"
    )
    plan = eq.plan_step(lengths, spec)
    counts = eq.LossDenominators.from_plan(plan, [n - 2 for n in lengths])
    config = eq.EngineConfig(
        backend=backend, device="cpu", dtype="float64", max_token_len_per_gpu=20 // sp, sp_size=sp,
        optimizer=eq.OptimizerConfig(lr=1e-2),
    )
    torch.manual_seed(0)
    engine = eq.engines.create(config, model)
    engine.initialize()
    mine = eq.reorder(batch, plan.rank_rows(engine.get_data_parallel_rank()))
    with engine.eval_mode():
        mine["old_log_probs"] = engine.infer_batch(mine, plan=plan).model_output["log_probs"]
    said = []
    with engine.train_mode():
        for step in range(plan.num_mini_batches):

            def loss(output, rows, group):
                inputs = eq.PolicyInputs(
                    log_prob=output["log_probs"], old_log_prob=rows["old_log_probs"], advantages=rows["advantages"],
                    loss_mask=rows["loss_mask"], ref_log_prob=rows["old_log_probs"],
                )
                return eq.policy_loss("grpo", inputs, kl, denominators=counts[step], dp_size=dp)

            done = engine.train_batch(mine, loss, plan=plan, mini_batch=step)
            merged = eq.metric_values(eq.reduce_metrics(done.metrics, group=engine.get_data_parallel_group()))
            said.append({"loss": done.loss, "norm": done.grad_norm, **merged})
    engine.save_checkpoint(folder, global_step=2)
    total = sum(float(value.abs().sum()) for _, value in engine.get_per_tensor_param())
    return {"steps": said, "weights": total}


out, found = sys.argv[1], {}
for cluster in sys.argv[2:]:
    backend, dp, sp = cluster.split("-")
    found[cluster] = train(backend, int(dp), int(sp), f"{out}/{cluster}")
if dist.get_rank() == 0:
    with open(f"{out}/said{dist.get_world_size()}.json", "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
'''

THIRD_PARTY = '''
"""An engine from outside the package, of nothing but torch: the next token depends on the last one alone."""
from pathlib import Path
import torch
from torch.nn.utils import parameters_to_vector
import equipoise as eq
from equipoise.training.engine import EngineOutput


class BigramEngine(eq.BaseEngine):
    compute_device = torch.device("cpu")

    def initialize(self):
        self.table = torch.nn.Parameter(torch.zeros(self.source, self.source))
        self.optimizer = torch.optim.SGD([self.table], lr=self.config.optimizer.lr)

    def to(self, device, *, model=True, optimizer=True): ...
    def set_training(self, training): ...

    def forward_backward_batch(self, data, loss_function, forward_only=False, **options):
        cut = eq.prepare_micro_batches(data, max_token_len=self.config.max_token_len_per_gpu)
        total, outputs, metrics = 0.0, [], []
        for rows in cut.batches:
            chosen = []
            for ids in rows["input_ids"].unbind():
                log_p = torch.log_softmax(self.table[ids[:-1]], -1).gather(-1, ids[1:, None])[:, 0]
                chosen.append(torch.cat([log_p.new_zeros(1), log_p]))
            column = {"log_probs": torch.nested.as_nested_tensor(chosen, layout=torch.jagged)}
            if loss_function is not None:
                loss, logged = loss_function(column, rows, None)
                metrics.append(logged)
                total += float(loss.detach())
                if not forward_only:
                    loss.backward()
            outputs.append({"log_probs": column["log_probs"].detach()})
        return EngineOutput(loss=total, metrics=eq.merge_metrics(metrics), model_output=cut.restore(outputs))

    def optimizer_zero_grad(self): self.optimizer.zero_grad()

    def optimizer_step(self):
        norm = float(self.table.grad.norm())
        self.optimizer.step()
        return norm

    def lr_scheduler_step(self): return self.config.optimizer.lr
    def get_data_parallel_size(self): return 1
    def get_data_parallel_rank(self): return 0
    def get_data_parallel_group(self): return None
    def is_mp_src_rank_with_outputs(self): return True
    def get_per_tensor_param(self): yield "table", self.table.detach()

    def save_checkpoint(self, local_path, **settings):
        torch.save(parameters_to_vector([self.table]), Path(local_path) / "table.pt")
        return Path(local_path)

    def load_checkpoint(self, local_path, **settings): return {}
'''

USE_THIRD_PARTY = """
import json
import torch
from tensordict import TensorDict
import equipoise as eq

eq.engines.register(
    "bigram_engine:BigramEngine", model_type="language_model", backend="bigram", device=["cpu", "cuda"]
)
config = eq.EngineConfig(
    backend="bigram", device="cpu", max_token_len_per_gpu=8, optimizer=eq.OptimizerConfig(name="sgd", lr=5.0)
)
engine = eq.engines.create(config, 6)
engine.initialize()
ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 6, 4, 5)], layout=torch.jagged)
batch = TensorDict({"input_ids": ids}, batch_size=[4])


def loss(output, rows, group):
    flat = output["log_probs"].values()
    return -flat.sum() / 14, {"log_prob": eq.Metric(flat.detach().sum(), 14)}


losses = []
with engine.train_mode():
    for _ in range(20):
        done = engine.train_batch(batch, loss)
        losses.append(done.loss)
with engine.eval_mode():
    rows = engine.infer_batch(batch).model_output["log_probs"].unbind()
print(json.dumps({"losses": losses, "shapes": [len(row) for row in rows], "stepped": done.stepped}))
"""


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return run_patiently(command, cwd=folder, env=env).stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script wrote on clusters of several shapes."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "grpo.py").write_text(GRPO)
    python = [sys.executable, "-W", "ignore"]
    torchrun = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*python, "grpo.py", str(folder), "ddp-1-1"], folder)
    run([*torchrun, "grpo.py", str(folder), *CLUSTERS], folder)
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        found |= json.loads((folder / f"said{world}.json").read_text())
    assert all((folder / cluster / "latest").read_text() == "step_00000002" for cluster in found)
    return found


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_cluster_moves_no_number(said: dict[str, dict[str, Any]], cluster: str) -> None:
    """E6, F1, F2: loss, gradient norm and logged metrics of each step, and weights, from a plan."""
    alone, other = said["ddp-1-1"], said[cluster]
    assert len(alone["steps"]) == 2
    for want, got in zip(alone["steps"], other["steps"], strict=True):
        assert got == pytest.approx(want, rel=1e-10, abs=1e-12)
    assert alone["steps"][0]["norm"] > 1e-3
    assert other["weights"] == pytest.approx(alone["weights"], rel=1e-12)


def test_an_engine_from_outside_the_package_is_found_and_trains(tmp_path: Path) -> None:
    (tmp_path / "bigram_engine.py").write_text(THIRD_PARTY)
    (tmp_path / "use.py").write_text(USE_THIRD_PARTY)
    seen = json.loads(run([sys.executable, "-W", "ignore", "use.py"], tmp_path).splitlines()[-1])
    assert seen["losses"][-1] < 0.2 * seen["losses"][0]
    assert seen["shapes"] == [3, 6, 4, 5]
    assert seen["stepped"] is True
