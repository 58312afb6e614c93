"""A decode engine without a model: tokens follow from seed and position, caches from tokens; it checks both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from equipoise.rollout.transfer import EngineFacts, KVLayout, RequestState, Sampling, StepReport

TIERS = (8, 4, 2)
LAYOUT = KVLayout(num_layers=5, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 80


def request(name: str, num_tokens: int, *, seed: int) -> RequestState:
    return RequestState(id=name, prompt=(seed % 50, 1, 2), sampling=Sampling(seed=seed, max_tokens=num_tokens))


def answer(asked: RequestState) -> tuple[int, ...]:
    return tuple(_token(asked, position) for position in range(asked.sampling.max_tokens))


def _token(state: RequestState, position: int) -> int:
    return (31 * state.sampling.seed + 7 * position) % 50


def cache_of(tokens: Sequence[int]) -> list[torch.Tensor]:
    """The layers of a cache: the value of each position is its token plus 100 × the number of the layer."""
    blocks = LAYOUT.blocks(len(tokens))
    rows = torch.zeros(blocks * LAYOUT.block_size)
    rows[: len(tokens)] = torch.tensor(tokens)
    rows = rows.reshape(1, 1, blocks, LAYOUT.block_size, 1).expand(2, 1, -1, -1, LAYOUT.head_dim)
    held = (torch.arange(blocks * LAYOUT.block_size) < len(tokens)).reshape(1, 1, blocks, LAYOUT.block_size, 1)
    return [(rows + 100.0 * layer) * held for layer in range(LAYOUT.num_layers)]


class ToyEngine:
    """Implements ``SteppingEngine``; a request that decodes with a wrong cache fails."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.num_blocks = num_blocks
        self.running: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}
        self.reserved: dict[str, RequestState] = {}
        self.finished: list[RequestState] = []

    @property
    def is_empty(self) -> bool:
        return not (self.running or self.waiting or self.reserved or self.finished)

    def facts(self) -> EngineFacts:
        held = [*self.running.values(), *self.reserved.values()]
        free = self.num_blocks - sum(LAYOUT.blocks(state.num_cached) for state in held)
        return EngineFacts(
            layout=LAYOUT, model="toy", tiers=TIERS, slots=TIERS[0], free_blocks=free, num_blocks=self.num_blocks
        )

    def list_requests(self) -> list[RequestState]:
        return [replace(state, kv=None) for state in (*self.running.values(), *self.waiting.values())]

    def export(self, ids: Sequence[str]) -> list[RequestState]:
        return [self.running.get(name) or self.waiting[name] for name in ids]

    def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            assert name in self.running or name in self.waiting or name in self.reserved
            for held in (self.running, self.waiting, self.reserved):
                held.pop(name, None)

    def reserve(self, states: Sequence[RequestState]) -> None:
        assert not {state.id for state in states} & {*self.running, *self.waiting, *self.reserved}
        for state in states:
            kv = [torch.full_like(layer, -1.0) for layer in cache_of(range(state.num_cached))]
            self.reserved[state.id] = replace(state, kv=kv if state.num_cached else None)

    def write(self, layer: int, ids: Sequence[str], content: torch.Tensor) -> None:
        start = 0
        for name in ids:
            kv = self.reserved[name].kv
            assert kv is not None
            kv[layer].copy_(content[:, :, start : start + kv[layer].shape[2]])
            start += kv[layer].shape[2]
        assert start == content.shape[2]

    def commit(self, ids: Sequence[str]) -> None:
        for name in ids:
            state = self.reserved.pop(name)
            (self.running if state.num_cached else self.waiting)[name] = state

    def clear(self) -> None:
        self.running, self.waiting, self.reserved, self.finished = {}, {}, {}, []

    def step(self) -> StepReport | None:
        while self.waiting and len(self.running) < TIERS[0]:
            name, state = next(iter(self.waiting.items()))
            del self.waiting[name]
            kv = cache_of(state.tokens[:-1])
            self.running[name] = replace(state, kv=kv, num_cached=state.num_tokens - 1)
        if not self.running:
            return None
        count, context = len(self.running), sum(state.num_tokens for state in self.running.values())
        for name, state in list(self.running.items()):
            assert state.kv is not None
            for mine, want in zip(state.kv, cache_of(state.tokens[:-1]), strict=True):
                assert torch.equal(mine, want), f"{name} has a wrong cache"
            made = (*state.output, _token(state, len(state.output)))
            state = replace(state, output=made, log_probs=(*state.log_probs, -0.5))
            if len(made) == state.sampling.max_tokens:
                del self.running[name]
                self.finished.append(replace(state, finish_reason="length", kv=None, num_cached=0))
            else:
                self.running[name] = replace(state, kv=cache_of(state.tokens[:-1]), num_cached=state.num_tokens - 1)
        tier = min(tier for tier in TIERS if tier >= count)
        return StepReport(tier=tier, num_running=count, context_tokens=context, seconds=1e-3 * tier)

    def take_finished(self) -> list[RequestState]:
        done, self.finished = self.finished, []
        return done
