"""Two CPU servers, verl's router loader and both clients in one Ray: the same samples with and without moves."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.rollout.router import get_router_handle

from equipoise.config import RolloutConfig
from equipoise.rollout.transfer import RequestState
from equipoise.trainer_hooks.on_verl.router.client import MovingAsyncClient, MovingClient
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY
from equipoise.trainer_hooks.on_verl.router.setup import router_file
from equipoise.trainer_hooks.verl_on_cpu.patches import STREAM_KEY
from equipoise.trainer_hooks.verl_on_cpu.server import HFCPUServer

LIMIT = 240
NUM_REQUESTS = 6


class Server(HFCPUServer):
    """The server with a random model in place of a loaded one."""

    def __init__(self) -> None:
        self.prefilled = 0
        limits = {"prompt_length": 32, "response_length": LIMIT, "max_num_seqs": 64}
        self._start(OmegaConf.create({"seed": 3, **limits}), _model, ())
        self.global_steps = 1

    def _with_cache(self, state: RequestState) -> RequestState:
        found = super()._with_cache(state)
        if found.kv is None and found.output:
            self.prefilled += found.num_tokens
        return found

    async def take_prefilled(self) -> int:
        """Tokens of responses that went on without their cache, since the last call."""
        prefilled, self.prefilled = self.prefilled, 0
        return prefilled


def _model() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=97, hidden_size=32, intermediate_size=48, **shape))


async def sample(servers: dict[str, Any], kind: type[MovingClient], *, transfer: str) -> dict[str, Any]:
    router: Any = get_router_handle(servers, router_config_path=router_file())
    rollout = RolloutConfig(enable=True, check_interval=2, tiers=[8, 4, 2, 1], transfer=transfer, profile=False)  # type: ignore[arg-type]
    ray.get(router.configure.remote({**asdict(rollout), "response_length": LIMIT, "max_num_seqs": 64}))
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"name": "hf_cpu", "response_length": LIMIT, "prompt_length": 32}}}
    )
    client = kind(config, router)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 97) for _ in range(5 + i)] for i in range(NUM_REQUESTS)]

    def ask(i: int, limit: int) -> Any:
        params = {"temperature": 1.0, "logprobs": True, "max_tokens": limit, STREAM_KEY: f"x/{i}", GENERATED_KEY: 0}
        return client.generate(f"talk {i}", prompt_ids=prompts[i], sampling_params=params)

    # those that are asked for second, fourth and sixth are on the other server, and short: it is idle soon
    outputs = await asyncio.gather(*(ask(i, 10 if i % 2 else LIMIT) for i in range(NUM_REQUESTS)))
    return {
        "tokens": [output.token_ids for output in outputs],
        "log_probs": [output.log_probs for output in outputs],
        "stop_reasons": [output.stop_reason for output in outputs],
        "figures": ray.get(router.take_metrics.remote()),
        "inflight": ray.get(router.get_total_inflight.remote()),
        "router": ray.get(router.__ray_call__.remote(_kind)),
    }


def _kind(actor: object) -> str:
    return type(actor).__name__


def main(folder: Path) -> None:
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    servers: dict[str, Any] = {f"s{i}": ray.remote(Server).options(max_concurrency=32).remote() for i in range(2)}
    found: dict[str, Any] = {"unmoved": asyncio.run(sample(servers, MovingClient, transfer="none"))}
    found["MovingClient recompute"] = asyncio.run(sample(servers, MovingClient, transfer="recompute"))
    found["MovingAsyncClient recompute"] = asyncio.run(sample(servers, MovingAsyncClient, transfer="recompute"))
    ray.get([server.take_prefilled.remote() for server in servers.values()])
    found["MovingClient kv"] = asyncio.run(sample(servers, MovingClient, transfer="kv"))
    found["prefilled"] = ray.get([server.take_prefilled.remote() for server in servers.values()])
    (folder / "result.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
