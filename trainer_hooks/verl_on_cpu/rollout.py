"""The rollout ``hf_cpu``: one server actor per training rank, which samples with transformers on a CPU.

A run can be repeated. Each sample has a random stream of its own, seeded by ``rollout.seed``, the prompt, and the name
of the sample: training or validation, step, row of the data and sibling, which
:func:`~equipoise.trainer_hooks.verl_on_cpu.patches.attach` adds to the sampling parameters. Whichever replica answers,
in whichever order, a sample is the same. A request without a name counts how often its server was asked for that prompt
since the last weights, which repeats with one replica only. What is left to chance is rounding: the tokens that share a
batch are those that happened to arrive together, and that moves logits by about 1e-6.

Environment:
    EQUIPOISE_CPU_SERVER_THREADS: torch threads of a server; 1 if unset.
    EQUIPOISE_CPU_LEN_SKEW: a number ``a`` > 0 gives each sample a limit of ``max(1, max_tokens * u**a)`` tokens, with
        ``u`` uniform from the sample's own stream: a long tail of lengths for models that never emit a stop token. With
        3, half of the samples are shorter than an eighth of the limit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# verl and ray ship no types for what is subclassed and called here.

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from equipoise.errors import InvalidConfig, InvalidInput, must
from equipoise.trainer_hooks.verl_on_cpu.generate import Completion, Request, generate
from equipoise.trainer_hooks.verl_on_cpu.patches import STREAM_KEY
from numpy.typing import NDArray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

GATHER_S = 0.02
"""How long the first request of a batch waits for its siblings."""

Weights = dict[str, NDArray[np.float32]]


def server_name(rank: int) -> str:
    """Name in Ray of the server that belongs to a training rank."""
    return f"equipoise_hf_cpu_server_{rank}"


def stream_seed(seed: int, prompt: Sequence[int], stream: str) -> int:
    """Seed of one sample.

    >>> stream_seed(42, [1, 2], "False/1/0/0") == stream_seed(42, [1, 2], "False/1/0/1")
    False
    """
    text = f"{seed}|{stream}|{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def skewed_limit(max_new_tokens: int, seed: int, skew: str | None) -> int:
    """Limit of one sample under ``EQUIPOISE_CPU_LEN_SKEW``."""
    if not skew:
        return max_new_tokens
    try:
        exponent = float(skew)
    except ValueError:
        exponent = 0.0
    if exponent <= 0:
        raise InvalidConfig(must("EQUIPOISE_CPU_LEN_SKEW", "be a number above 0", skew, "unset it for plain lengths"))
    return max(1, int(max_new_tokens * random.Random(seed).random() ** exponent))


class HFCPUServer:
    """A model, a queue of requests, and one thread that answers the queue batch by batch."""

    def __init__(self, config: Any, model_config: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("EQUIPOISE_CPU_SERVER_THREADS", "1")))
        self.config = config
        model_config = omega_conf_to_dataclass(model_config)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.stop_ids, self.pad_id = _special_tokens(model_config, ignore_eos=config.ignore_eos)
        self.global_steps: int | None = None
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._task: asyncio.Task[None] | None = None
        self._model_free = asyncio.Lock()
        self._stop = threading.Event()
        self._closed_by: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False

    async def ready(self) -> None:
        """Return once the model is loaded."""

    def _close(self, reason: str) -> None:
        self._closed_by.add(reason)
        self._open.clear()

    def _reopen(self, reason: str) -> None:
        self._closed_by.discard(reason)
        if not self._closed_by:
            self._open.set()

    async def sleep(self) -> None:
        """Finish the running batch, then start none until :meth:`wake_up`."""
        self._close("sleep")
        async with self._model_free:
            pass

    async def wake_up(self) -> None:
        """Serve again."""
        self._reopen("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Hand back what every request has got so far; hold (or reject) later ones until :meth:`resume_generation`."""
        self._close("abort")
        self._rejecting = reject_request
        self._stop.set()
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            _resolve(future, Completion())
        async with self._model_free:
            pass

    async def resume_generation(self) -> None:
        """Undo :meth:`abort_all_requests`."""
        self._rejecting = False
        self._reopen("abort")

    async def release_kv_cache(self) -> None:
        """Do nothing: a cache lives as long as its batch."""

    async def resume_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def clear_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def start_profile(self, **_kwargs: object) -> None:
        """Do nothing: there is no device to profile."""

    async def stop_profile(self) -> None:
        """Do nothing: there is no device to profile."""

    async def update_weights(self, weights: Weights, *, last: bool, global_steps: int | None) -> None:
        """Take a part of the weights; serve nothing from the first part until the last is in."""
        self._close("weights")
        async with self._model_free:
            state = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
            unknown = self.model.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise InvalidInput(must("weights", "belong to the model", unknown, "serve the model that is trained"))
        if last:
            self.model.tie_weights()
            self.global_steps = global_steps
            self._asked.clear()
            self._reopen("weights")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **extra: object
    ) -> TokenOutput:
        """Sample one continuation. ``request_id`` is random in verl and so has no say in what is sampled."""
        if media := sorted(name for name, value in extra.items() if value):
            raise InvalidInput(must("request", "be text only", media, "hf_cpu serves language models"))
        request = self._request(prompt_ids, sampling_params)
        if self._rejecting:
            return self._output(Completion())
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
            self._task.add_done_callback(self._served)
        return self._output(await future)

    def _request(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Request:
        params = dict(sampling_params)
        prompt = tuple(int(token) for token in prompt_ids)
        stream = params.pop(STREAM_KEY, None)
        if stream is None:
            stream = f"{self.global_steps}/{self._asked[prompt]}"
            self._asked[prompt] += 1
        seed = stream_seed(self.config.seed, prompt, stream)
        limits = [params.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        limit = min([self.config.response_length, *(int(given) for given in limits if given is not None)])
        params.pop("logprobs", None)  # they are always returned
        if params.pop("repetition_penalty", 1.0) != 1.0:
            raise InvalidInput(must("repetition_penalty", "be 1", sampling_params, "hf_cpu has none"))
        known = {name: params.pop(name) for name in ("temperature", "top_k", "top_p") if name in params}
        if params:
            raise InvalidInput(must("sampling_params", "be known", sorted(params), "hf_cpu would ignore them"))
        limit = skewed_limit(limit, seed, os.environ.get("EQUIPOISE_CPU_LEN_SKEW"))
        return Request(prompt=prompt, max_new_tokens=limit, seed=seed, **known)

    def _output(self, completion: Completion) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            stop_reason="completed" if completion.finished else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps},
        )

    async def _serve(self) -> None:
        """Answer batches while requests wait."""
        while self._waiting:
            await self._open.wait()
            await asyncio.sleep(GATHER_S)
            async with self._model_free:
                if not self._open.is_set():
                    continue
                size = self.config.max_num_seqs
                self._running, self._waiting = self._waiting[:size], self._waiting[size:]
                self._stop.clear()
                completions = await asyncio.to_thread(
                    generate,
                    self.model,
                    [request for request, _ in self._running],
                    stop_ids=self.stop_ids,
                    pad_id=self.pad_id,
                    should_stop=self._stop.is_set,
                )
            for (_, future), completion in zip(self._running, completions, strict=True):
                _resolve(future, completion)
            self._running = []

    def _served(self, task: asyncio.Task[None]) -> None:
        """Let every request learn of an error: verl would wait for an answer for ever."""
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        for _, future in self._running + self._waiting:
            if not future.done():
                future.set_exception(error)
        self._running, self._waiting = [], []


def _resolve(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


def _special_tokens(model_config: Any, *, ignore_eos: bool) -> tuple[set[int], int]:
    """Stop tokens of the tokenizer and of the generation settings, and a token to pad with."""
    eos = model_config.tokenizer.eos_token_id
    more = getattr(model_config.generation_config, "eos_token_id", None)
    stop_ids = {token for token in (eos, *(more if isinstance(more, list) else [more])) if token is not None}
    pad_id = model_config.tokenizer.pad_token_id
    return set() if ignore_eos else stop_ids, next(
        token for token in (pad_id, *sorted(stop_ids), 0) if token is not None
    )


def _refuse_sharding(config: Any) -> None:
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size = getattr(config, name)
        if size != 1:
            raise InvalidConfig(must(f"rollout.{name}", "be 1", size, "hf_cpu keeps a whole model in each server"))


class HFCPUReplica(RolloutReplica):
    """The driver's view of a server: starts it, and passes verl's calls on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_sharding(self.config)

    async def launch_servers(self) -> None:
        """Start the server actor."""
        if self.rollout_mode != RolloutMode.HYBRID:
            raise InvalidConfig(must("rollout mode", "be hybrid", self.rollout_mode, "train and sample on one pool"))
        name = server_name(self.replica_rank)
        actor: Any = ray.remote(HFCPUServer).options(name=name, num_cpus=1, max_concurrency=self.max_concurrency)
        server = actor.remote(self.config, self.model_config)
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name


class HFCPUAdapter(BaseRollout):
    """The training worker's end: sends this rank's weights to this rank's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        _refuse_sharding(self.config)
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20

    @property
    def _server(self) -> Any:
        return ray.get_actor(server_name(torch.distributed.get_rank()))

    async def resume(self, tags: list[str]) -> None:
        """Serve again once both weights and cache are wanted."""
        if "kv_cache" in tags:
            await self._server.wake_up.remote()

    async def release(self) -> None:
        """Stop serving."""
        await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        peft_config: object = None,
        global_steps: int | None = None,
        **_kwargs: object,
    ) -> None:
        """Send all weights, in buckets. Each item is a collective, so that all ranks must draw all of them."""
        if wire_format != "named_tensors":
            raise InvalidConfig(
                must("wire_format", "be 'named_tensors'", wire_format, "use the naive checkpoint engine")
            )
        if peft_config is not None:
            raise InvalidConfig(must("model.lora.merge", "be True", False, "hf_cpu takes whole weights"))
        bucket: Weights = {}
        size = 0
        for name, tensor in weights:
            array = tensor.detach().to(device="cpu", dtype=torch.float32).numpy()
            if bucket and size + array.nbytes > self._bucket_bytes:
                await self._server.update_weights.remote(bucket, last=False, global_steps=None)
                bucket, size = {}, 0
            bucket[name] = array
            size += array.nbytes
        await self._server.update_weights.remote(bucket, last=True, global_steps=global_steps)
