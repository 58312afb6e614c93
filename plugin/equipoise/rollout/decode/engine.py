"""A decode engine over an HF causal language model: continuous batching, paged cache, decode sizes in tiers.

Tokens depend only on the request, not on the batch, the tier, the rank, moves or preemption;
:mod:`equipoise.rollout.decode.passes` explains why.

>>> import transformers
>>> config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
...     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
>>> engine = DecodeEngine(transformers.LlamaForCausalLM(config), DecodeConfig(tiers=(4,), num_blocks=8))
>>> ask = [RequestState(id=name, prompt=(1, 2), sampling=Sampling(max_tokens=3)) for name in "ab"]
>>> [(done.id, len(done.output), done.finish_reason) for done in engine.generate(ask)]
[('a', 3, 'length'), ('b', 3, 'length')]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from equipoise.errors import InvalidInput, must
from equipoise.rollout.decode.cache import CachedLayers, OutOfBlocks, PagedCache
from equipoise.rollout.decode.config import DecodeConfig as DecodeConfig
from equipoise.rollout.decode.hf import HFModel
from equipoise.rollout.decode.live import Live, check_request
from equipoise.rollout.decode.passes import Passes, TokenRow
from equipoise.rollout.decode.sampling import draw
from equipoise.rollout.transfer.caches import take_in
from equipoise.rollout.transfer.state import EngineFacts, RequestState, StepReport
from equipoise.rollout.transfer.state import Sampling as Sampling


class DecodeEngine:
    """Decodes requests, one token per request and step.

    The engine replaces the model's attention. Weights may change while the engine holds no request.

    Args:
        model: HF causal language model with plain causal attention; it is put into evaluation mode.
        config: see :class:`DecodeConfig`.

    Raises:
        InvalidInput: the model cannot be decoded exactly.
    """

    def __init__(self, model: Any, config: DecodeConfig | None = None) -> None:
        self.config = config or DecodeConfig()
        self._hf = HFModel(model, block_size=self.config.block_size)
        self.model: Any = self._hf.module
        self.layout = self._hf.layout
        self.max_tokens = self._hf.max_tokens
        self.vocab_size = self._hf.vocab_size
        self.cache = PagedCache(self.layout, num_blocks=self.config.num_blocks, device=self._hf.device)
        default_rows = self.config.tiers[0] * (8 if self._hf.device.type == "cuda" else 1)
        self.passes = Passes(
            self._hf,
            self.cache,
            sizes=self.config.tiers if self.config.multi_graph else self.config.tiers[:1],
            chunk_tokens=self.config.chunk_tokens,
            cuda_graphs=self.config.cuda_graphs,
            prefill_rows=self.config.prefill_rows or default_rows,
        )
        self._running: list[Live] = []
        self._waiting: deque[Live] = deque()
        self._reserved: dict[str, Live] = {}
        self._finished: list[RequestState] = []
        self._model_id = self._identify()

    def facts(self) -> EngineFacts:
        """Identity and free room of the engine."""
        self._look_at_weights()
        return EngineFacts(
            layout=self.layout,
            model=self._model_id,
            tiers=self.config.tiers,
            slots=self.config.tiers[0],
            free_blocks=self.cache.num_free,
            num_blocks=self.cache.num_blocks,
        )

    def _look_at_weights(self) -> None:
        if not (self.num_unfinished or self._reserved):  # weights can only have changed then
            self._model_id = self._identify()

    def _identify(self) -> str:
        return f"{self._hf.identity()}, shapes {self.passes.sizes} in chunks of {self.config.chunk_tokens}"

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return len(self._running) + len(self._waiting)

    def list_requests(self) -> list[RequestState]:
        """Unfinished requests without their cache, running ones first."""
        return [live.snapshot() for live in (*self._running, *self._waiting)]

    def export(self, ids: Sequence[str]) -> list[RequestState]:
        """Unfinished requests, in the order of ``ids``; layers of the cache are copied on access.

        Raises:
            InvalidInput: an id is unknown.
        """
        found = self._find(ids)
        return [live.snapshot(self._layers(live)) for live in found]

    def _layers(self, live: Live) -> CachedLayers | None:
        held = live.blocks[: self.layout.blocks(live.num_tokens - 1)]  # the next token may have its block already
        return CachedLayers(self.cache, held) if held else None

    def abort(self, ids: Sequence[str]) -> None:
        """Forget unfinished and reserved requests.

        Raises:
            InvalidInput: an id is unknown; none is forgotten.
        """
        gone = {id(live) for live in self._find(ids, reserved=True)}
        for live in (*self._running, *self._reserved.values()):
            if id(live) in gone:
                self.cache.give_back(live.blocks)
        self._running = [live for live in self._running if id(live) not in gone]
        self._waiting = deque(live for live in self._waiting if id(live) not in gone)
        self._reserved = {name: live for name, live in self._reserved.items() if id(live) not in gone}

    def clear(self) -> None:
        """Forget all requests, including results that were not taken."""
        for live in (*self._running, *self._reserved.values()):
            self.cache.give_back(live.blocks)
        self._running, self._waiting, self._reserved, self._finished = [], deque(), {}, []

    def reserve(self, states: Sequence[RequestState]) -> None:
        """Reserve room for incoming requests: a slot and blocks for each whose ``num_cached`` is above 0.

        They neither run nor appear in :meth:`list_requests` before :meth:`commit`; :meth:`abort` forgets them.

        Raises:
            InvalidInput: a request is already here, is finished or can never fit, or there is no room for the caches;
                nothing is reserved.
        """
        self._look_at_weights()
        known = {live.state.id for live in (*self._running, *self._waiting, *self._reserved.values())}
        most = min(self.max_tokens, self.cache.num_blocks * self.config.block_size)
        for state in states:
            check_request(state, known, most_tokens=most, vocab_size=self.vocab_size)
            known.add(state.id)
        needs = [self.layout.blocks(state.num_cached) for state in states]
        num_cached = sum(map(bool, needs))
        room = self.config.tiers[0] - self._num_slots_held
        if sum(needs) > self.cache.num_free or num_cached > room:
            rule = f"fit in {room} free slots and {self.cache.num_free} free blocks"
            raise InvalidInput(must("requests", rule, f"{num_cached} with {sum(needs)} blocks", "move fewer"))
        blocks = iter(self.cache.take(sum(needs)))
        for state, need in zip(states, needs, strict=True):
            live = Live.of(state)
            live.blocks = [next(blocks) for _ in range(need)]
            self._reserved[state.id] = live

    @property
    def _num_slots_held(self) -> int:
        return len(self._running) + sum(bool(live.blocks) for live in self._reserved.values())

    def write(self, layer: int, ids: Sequence[str], content: torch.Tensor) -> None:
        """Write one layer of reserved requests' caches.

        Args:
            layer: index of the layer.
            ids: the requests.
            content: their concatenated blocks, ``(2, num_kv_heads, blocks, block_size, head_dim)``.

        Raises:
            InvalidInput: a request was not reserved, or the content has another shape or dtype.
        """
        blocks = [block for live in self._find_reserved(ids) for block in live.blocks]
        layout = self.layout
        want = (2, layout.num_kv_heads, len(blocks), layout.block_size, layout.head_dim)
        if tuple(content.shape) != want or content.dtype != layout.torch_dtype or not 0 <= layer < layout.num_layers:
            got = f"layer {layer} of {tuple(content.shape)}, {content.dtype}"
            rule = f"be one of {layout.num_layers} layers of {want}, {layout.dtype}"
            raise InvalidInput(
                must(f"cache of requests {list(ids)}", rule, got, "move it between engines of one layout")
            )
        self.cache.write(layer, blocks, content)

    def commit(self, ids: Sequence[str]) -> None:
        """Continue reserved requests at the next step: those with a cache run, the others wait for their prefill.

        Raises:
            InvalidInput: an id was not reserved; none continues.
        """
        arrived = self._find_reserved(ids)
        self._reserved = {name: live for name, live in self._reserved.items() if name not in ids}
        self._running += [live for live in arrived if live.blocks]
        waiting = [live for live in arrived if not live.blocks]
        self._waiting.extendleft(live for live in reversed(waiting) if live.output)
        self._waiting.extend(live for live in waiting if not live.output)

    def import_(self, states: Sequence[RequestState]) -> None:
        """Accept requests: new ones, and ones to continue with or without their cache.

        Raises:
            InvalidInput: see :meth:`reserve`, or a cache has another shape; none is accepted.
        """
        take_in(self, states)

    def take_finished(self) -> list[RequestState]:
        """Requests that finished since the last call."""
        done, self._finished = self._finished, []
        return done

    def generate(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Decode requests until they finish, on this rank alone; results are in the order of the requests."""
        self.import_(states)
        done: dict[str, RequestState] = {}
        while len(done) < len(states):
            self.step()
            done |= {state.id: state for state in self.take_finished()}
        return [done[state.id] for state in states]

    def step(self) -> StepReport | None:
        """Admit requests that fit, then generate one token for each running request; None if there is none."""
        start = time.perf_counter()
        prefilled = self._admit()
        prefill_s = time.perf_counter() - start if prefilled else 0.0
        self._grow()
        if not self._running:
            return None
        running = self._running
        tier = min((tier for tier in self.config.tiers if tier >= len(running)), default=self.config.tiers[0])
        tier = tier if self.config.multi_graph else self.config.tiers[0]
        rows = [self._row(live, live.num_tokens - 1) for live in running]
        context_tokens = sum(live.num_tokens for live in running)
        start = time.perf_counter()
        logits = self.passes.run(rows, size=self.passes.size_for(tier), head=True)
        assert logits is not None
        for live, row in zip(running, logits.cpu(), strict=True):
            self._put_out(live, row)
        self._running = [live for live in running if live.finish_reason is None]
        seconds = time.perf_counter() - start
        return StepReport(
            tier=tier,
            num_running=len(running),
            context_tokens=context_tokens,
            seconds=seconds,
            prefilled_tokens=prefilled,
            prefill_seconds=prefill_s,
        )

    def _put_out(self, live: Live, logits: torch.Tensor) -> None:
        how = live.state.sampling
        token, log_prob = draw(logits, how, live.state.prompt, live.output)
        live.output.append(token)
        live.log_probs.append(log_prob)
        if token in how.stop_token_ids:
            live.finish_reason = "stop"
        elif len(live.output) >= how.max_tokens:
            live.finish_reason = "length"
        if live.finish_reason is not None:
            self._finished.append(live.snapshot())
            self.cache.give_back(live.blocks)
            live.blocks = []

    def _row(self, live: Live, position: int) -> TokenRow:
        return TokenRow(token=live.token(position), position=position, blocks=live.blocks)

    def _admit(self) -> int:
        """Start waiting requests while slots and blocks last, keeping a block per running one; tokens prefilled."""
        started: list[Live] = []
        while self._waiting and self._num_slots_held < self.config.tiers[0]:
            live = self._waiting[0]
            need = self.layout.blocks(live.num_tokens)
            if need + len(self._running) > self.cache.num_free and self._running:
                break
            self._waiting.popleft()
            live.blocks = self.cache.take(need)
            self._running.append(live)
            started.append(live)
        return self._prefill(started)

    def _prefill(self, started: Sequence[Live]) -> int:
        """Fill the caches of requests except for their last token; a pass may mix tokens of several requests."""
        rows = [self._row(live, position) for live in started for position in range(live.num_tokens - 1)]
        for start in range(0, len(rows), self.passes.prefill_size):
            some = rows[start : start + self.passes.prefill_size]
            self.passes.run(some, size=self.passes.size_for(len(some)), head=False)
        if rows and self.passes.device.type == "cuda":
            torch.cuda.synchronize(self.passes.device)  # so that the next step's time does not include it
        return len(rows)

    def _grow(self) -> None:
        """Give each running request a block for its next token; if there are too few, the youngest are preempted."""
        for live in list(self._running):
            missing = self.layout.blocks(live.num_tokens) - len(live.blocks)
            while live.blocks and missing > 0:
                try:
                    live.blocks += self.cache.take(missing)
                    missing = 0
                except OutOfBlocks:
                    youngest = self._running.pop()
                    self.cache.give_back(youngest.blocks)
                    youngest.blocks = []
                    self._waiting.appendleft(youngest)

    def _find(self, ids: Sequence[str], *, reserved: bool = False) -> list[Live]:
        here = {live.state.id: live for live in (*self._running, *self._waiting)}
        if reserved:
            here |= self._reserved
        for name in ids:
            if name not in here:
                raise InvalidInput(must("request id", "be unfinished on this rank", name, "list_requests names those"))
        return [here[name] for name in ids]

    def _find_reserved(self, ids: Sequence[str]) -> list[Live]:
        for name in ids:
            if name not in self._reserved:
                raise InvalidInput(must("request id", "be reserved on this rank", name, "reserve it first"))
        return [self._reserved[name] for name in ids]
