"""A decode engine over a HF causal language model: continuous batching, paged cache, decode sizes in tiers.

Tokens depend on the request alone: not on the batch, the tier, the rank, on moves or on preemption. See
:mod:`equipoise.rollout.decode.passes` for why.

>>> import transformers
>>> config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
...     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
>>> engine = DecodeEngine(transformers.LlamaForCausalLM(config), DecodeConfig(tiers=(4,), num_blocks=8))
>>> ask = [RequestState(id=name, prompt=(1, 2), sampling=Sampling(max_tokens=3)) for name in "ab"]
>>> [(done.id, len(done.output), done.finish_reason) for done in engine.generate(ask)]
[('a', 3, 'length'), ('b', 3, 'length')]
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's and transformers' modules are typed in part only.

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from equipoise._checks import falling, of_kind, positive
from equipoise.errors import InvalidInput, must
from equipoise.rollout.decode import attention
from equipoise.rollout.decode.cache import CachedLayers, OutOfBlocks, PagedCache
from equipoise.rollout.decode.passes import Passes, TokenRow
from equipoise.rollout.decode.sampling import draw
from equipoise.rollout.transfer.state import (
    DTYPES,
    EngineFacts,
    KVLayout,
    RequestState,
    StepReport,
)
from equipoise.rollout.transfer.state import Sampling as Sampling


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How an engine decodes.

    Args:
        tiers: decode sizes in rows, falling; the first is also the most requests that run at once.
        num_blocks: cache blocks that requests can hold.
        block_size: tokens of a block.
        chunk_tokens: positions that attention takes at once; a multiple of ``block_size``.
        prefill_rows: tokens that a prefill takes at once, if that gives the bits of the first tier, which it takes
            otherwise; None for the first tier on a CPU and eight times as many on a GPU.
        multi_graph: whether fewer requests decode at a lower tier; else always at the first.
        cuda_graphs: record a graph per tier, where there is a GPU.

    Raises:
        InvalidInput: a value out of its range.
    """

    tiers: tuple[int, ...] = (64, 32, 16, 8, 4)
    num_blocks: int = 1024
    block_size: int = 16
    chunk_tokens: int = 64
    prefill_rows: int | None = None
    multi_graph: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", falling("tiers", self.tiers, "pass for example (64, 32, 16, 8, 4)"))
        for name in ("num_blocks", "block_size", "chunk_tokens"):
            positive(name, getattr(self, name), "raise it")
        if self.prefill_rows is not None:
            positive("prefill_rows", self.prefill_rows, "pass None for a size that suits the device")
        if self.chunk_tokens % self.block_size:
            rule = f"be a multiple of block_size = {self.block_size}"
            raise InvalidInput(must("chunk_tokens", rule, self.chunk_tokens, "change either"))


@dataclass(kw_only=True)
class _Live:
    """A request within the engine; ``blocks`` is empty while it waits."""

    state: RequestState
    output: list[int]
    log_probs: list[float]
    blocks: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None

    @classmethod
    def of(cls, state: RequestState) -> _Live:
        return cls(state=replace(state, kv=None), output=list(state.output), log_probs=list(state.log_probs))

    @property
    def num_tokens(self) -> int:
        return len(self.state.prompt) + len(self.output)

    def token(self, position: int) -> int:
        prompt = self.state.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    def snapshot(self, kv: Sequence[torch.Tensor] | None = None) -> RequestState:
        """Running, all tokens but the last are in the cache."""
        return replace(
            self.state,
            output=tuple(self.output),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason,
            num_cached=self.num_tokens - 1 if self.blocks and self.finish_reason is None else 0,
            kv=kv,
        )


class DecodeEngine:
    """Decodes requests, one token each a step.

    The model is taken over: its attention is replaced. Weights may change while the engine holds no request.

    Args:
        model: HF causal language model with plain causal attention, in evaluation mode from here on.
        config: see :class:`DecodeConfig`.

    Raises:
        InvalidInput: a model that cannot be decoded exactly.
    """

    def __init__(self, model: Any, config: DecodeConfig | None = None) -> None:
        of_kind("model", model, torch.nn.Module, "load it with transformers' from_pretrained")
        self.config = config or DecodeConfig()
        self.model = model.eval()
        self.model.set_attn_implementation(attention.register())
        text = model.config.get_text_config()
        names = {dtype: name for name, dtype in DTYPES.items()}
        if model.dtype not in names:
            raise InvalidInput(must("dtype of the model", f"be one of {list(DTYPES)}", model.dtype, "convert it"))
        self.layout = KVLayout(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            block_size=self.config.block_size,
            dtype=names[model.dtype],
        )
        self.max_tokens = int(getattr(text, "max_position_embeddings", None) or 2**31)
        self.vocab_size = int(text.vocab_size)
        self.cache = PagedCache(self.layout, num_blocks=self.config.num_blocks, device=model.device)
        self.passes = Passes(
            model,
            self.cache,
            sizes=self.config.tiers if self.config.multi_graph else self.config.tiers[:1],
            chunk_tokens=self.config.chunk_tokens,
            cuda_graphs=self.config.cuda_graphs,
            prefill_rows=self.config.prefill_rows or self.config.tiers[0] * (8 if model.device.type == "cuda" else 1),
        )
        self._running: list[_Live] = []
        self._waiting: deque[_Live] = deque()
        self._finished: list[RequestState] = []
        self._model_id = self._identify()

    def facts(self) -> EngineFacts:
        """What it is, and how much room it has."""
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
        if not self.num_unfinished:  # only then may they have changed
            self._model_id = self._identify()

    def _identify(self) -> str:
        """Class, shape, arithmetic, and a checksum over the first values of each weight."""
        crc = 0
        for _, parameter in sorted(self.model.named_parameters()):
            crc = zlib.crc32(parameter.detach().flatten()[:256].to("cpu", torch.float64).numpy().tobytes(), crc)
        text, device = self.model.config.get_text_config(), self.model.device.type
        threads = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
        shape = f"{text.num_hidden_layers} layers of width {text.hidden_size}, {self.vocab_size} tokens"
        sizes = f"shapes {self.passes.sizes} in chunks of {self.config.chunk_tokens}"
        kind = f"{type(self.model).__name__}, {shape}, weights {crc:08x}"
        return f"{kind}; {self.layout.dtype}, {device}, {threads}, {sizes}"

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def list_requests(self) -> list[RequestState]:
        """Unfinished requests without their cache, those that run first."""
        return [live.snapshot() for live in (*self._running, *self._waiting)]

    def export(self, ids: Sequence[str]) -> list[RequestState]:
        """Unfinished requests, in the order of ``ids``; layers of the cache are copied when they are read.

        Raises:
            InvalidInput: an id that is not here.
        """
        found = self._find(ids)
        return [live.snapshot(self._layers(live)) for live in found]

    def _layers(self, live: _Live) -> CachedLayers | None:
        held = live.blocks[: self.layout.blocks(live.num_tokens - 1)]  # the next token may have its block already
        return CachedLayers(self.cache, held) if held else None

    def abort(self, ids: Sequence[str]) -> None:
        """Forget unfinished requests.

        Raises:
            InvalidInput: an id that is not here; none is forgotten.
        """
        gone = {id(live) for live in self._find(ids)}
        for live in self._running:
            if id(live) in gone:
                self.cache.give_back(live.blocks)
        self._running = [live for live in self._running if id(live) not in gone]
        self._waiting = deque(live for live in self._waiting if id(live) not in gone)

    def import_(self, states: Sequence[RequestState]) -> None:
        """Take requests in: new ones, ones that go on with their cache, ones whose cache is to be computed again.

        Raises:
            InvalidInput: a request that is here already, is finished, can never fit, or has a cache of another shape
                or one for which there is no room; none is taken.
        """
        self._look_at_weights()
        known = {live.state.id for live in (*self._running, *self._waiting)}
        for state in states:
            self._check(state, known)
            known.add(state.id)
        states = [state if state.num_cached else replace(state, kv=None) for state in states]  # no token, no cache
        cached = [state for state in states if state.kv is not None]
        need = sum(self.layout.blocks(state.num_cached) for state in cached)
        room = self.config.tiers[0] - len(self._running)
        if need > self.cache.num_free or len(cached) > room:
            rule = f"fit in {room} free slots and {self.cache.num_free} free blocks"
            raise InvalidInput(must("requests", rule, f"{len(cached)} with {need} blocks", "move fewer"))
        started: list[_Live] = []
        for state in states:
            live = _Live.of(state)
            if state.kv is not None:
                live.blocks = self.cache.take(self.layout.blocks(state.num_cached))
                for layer, content in enumerate(state.kv):
                    self.cache.write(layer, live.blocks, content)
                self._running.append(live)
            elif live.output:
                started.append(live)
            else:
                self._waiting.append(live)
        self._waiting.extendleft(reversed(started))

    def take_finished(self) -> list[RequestState]:
        """Requests that ended since the last call."""
        done, self._finished = self._finished, []
        return done

    def generate(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Decode requests to their ends, on this rank alone; results come in the order asked for."""
        self.import_(states)
        done: dict[str, RequestState] = {}
        while len(done) < len(states):
            self.step()
            done |= {state.id: state for state in self.take_finished()}
        return [done[state.id] for state in states]

    def step(self) -> StepReport | None:
        """Admit what fits, then put out one token for each running request; None where there is none."""
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

    def _put_out(self, live: _Live, logits: torch.Tensor) -> None:
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

    def _row(self, live: _Live, position: int) -> TokenRow:
        return TokenRow(token=live.token(position), position=position, blocks=live.blocks)

    def _admit(self) -> int:
        """Start waiting requests while slots and blocks last, leaving a block for each that runs. Tokens prefilled."""
        started: list[_Live] = []
        while self._waiting and len(self._running) < self.config.tiers[0]:
            live = self._waiting[0]
            need = self.layout.blocks(live.num_tokens)
            if need + len(self._running) > self.cache.num_free and self._running:
                break
            self._waiting.popleft()
            live.blocks = self.cache.take(need)
            self._running.append(live)
            started.append(live)
        return self._prefill(started)

    def _prefill(self, started: Sequence[_Live]) -> int:
        """Fill the caches of requests but for their last token; passes hold tokens of several, as rows are rows."""
        rows = [self._row(live, position) for live in started for position in range(live.num_tokens - 1)]
        for start in range(0, len(rows), self.passes.prefill_size):
            some = rows[start : start + self.passes.prefill_size]
            self.passes.run(some, size=self.passes.size_for(len(some)), head=False)
        if rows and self.passes.device.type == "cuda":
            torch.cuda.synchronize(self.passes.device)  # so that the time of the step that follows is its own
        return len(rows)

    def _grow(self) -> None:
        """Give each running request a block for its next token; the youngest give theirs up where there are too few."""
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

    def _find(self, ids: Sequence[str]) -> list[_Live]:
        here = {live.state.id: live for live in (*self._running, *self._waiting)}
        for name in ids:
            if name not in here:
                raise InvalidInput(must("request id", "be unfinished on this rank", name, "list_requests names those"))
        return [here[name] for name in ids]

    def _check(self, state: RequestState, known: set[str]) -> None:
        field_ = f"request {state.id!r}"
        if state.id in known:
            raise InvalidInput(must(field_, "be new", "one of that id", "give each request its own id"))
        if not {int, float}.issuperset(map(type, state.log_probs)) or not {int}.issuperset(map(type, state.tokens)):
            rule = "hold whole numbers as tokens and numbers as log_probs"
            raise InvalidInput(must(field_, rule, state.tokens[:8], "convert them with tolist()"))
        if state.finish_reason is not None or len(state.output) >= state.sampling.max_tokens:
            raise InvalidInput(must(field_, "be unfinished", state.finish_reason, "keep results where they are"))
        longest = len(state.prompt) + state.sampling.max_tokens
        most = min(self.max_tokens, self.cache.num_blocks * self.config.block_size)
        if longest > most:
            remedy = "shorten it, or raise num_blocks where the model's positions allow it"
            raise InvalidInput(must(field_, f"need at most {most} tokens with its max_tokens", longest, remedy))
        if max(state.tokens) >= self.vocab_size or min(state.tokens) < 0:
            rule = f"hold tokens below the vocabulary of {self.vocab_size}"
            raise InvalidInput(must(field_, rule, max(state.tokens), "use the tokenizer of the model"))
        if state.kv is None:
            return
        layout = self.layout
        want = (2, layout.num_kv_heads, layout.blocks(state.num_cached), layout.block_size, layout.head_dim)
        shapes = {(tuple(layer.shape), layer.dtype) for layer in state.kv}
        if len(state.kv) != layout.num_layers or shapes != {(want, layout.torch_dtype)}:
            rule = f"bring {layout.num_layers} layers of {want}, {layout.dtype}"
            raise InvalidInput(
                must(field_, rule, f"{len(state.kv)} of {shapes}", "move it between engines of one layout")
            )
        if state.num_cached != state.num_tokens - 1:
            rule = f"have all {state.num_tokens} tokens but the last in its cache"
            raise InvalidInput(
                must(field_, rule, state.num_cached, "leave the cache out, so that it is computed again")
            )
