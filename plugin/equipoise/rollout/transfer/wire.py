"""Messages about requests, in the framing of :mod:`equipoise.wire`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from equipoise.errors import InvalidInput
from equipoise.rollout.transfer.state import DTYPES, FINISH_REASONS, EngineFacts, KVLayout, RequestState, Sampling
from equipoise.wire import Kind, Reader, WireError, Writer

_VERSION = 3
_STATE = struct.Struct("<IIBQdIddddIIIIII")
_ROW = struct.Struct("<IIIIIBI")
_TABLE = struct.Struct("<IIIIIIIQQdQdIIII")
_SAMPLE = struct.Struct("<IQd")
_ENDED = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One unfinished request in a rank's table; ``prompt`` is a checksum of its prompt, equal for siblings."""

    id: str
    home: int
    prompt: int
    num_tokens: int
    num_output: int
    num_cached: int
    running: bool
    max_remaining: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a rank tells all others at a check.

    Args:
        facts: those of its engine.
        check: number of this check; must agree.
        settings: checksum of the configuration; must agree.
        rows: its unfinished requests.
        samples: (tier, context tokens, seconds) of decode steps measured since the last check.
        finished: (checksum of the prompt, output tokens) of requests finished since the last check.
        exchange_s: seconds of the last exchange on this rank; 0 if there was none.
        prefilled: (tokens, seconds) of prefills since the last check.
    """

    facts: EngineFacts
    check: int
    settings: int
    rows: tuple[Row, ...]
    samples: tuple[tuple[int, int, float], ...] = ()
    finished: tuple[tuple[int, int], ...] = ()
    exchange_s: float = 0.0
    prefilled: tuple[int, float] = (0, 0.0)


def pack_states(states: Sequence[RequestState]) -> bytes:
    """Requests without the contents of their cache.

    >>> state = RequestState(id="a", prompt=(5, 6), sampling=Sampling(seed=3))
    >>> unpack_states(pack_states([state])) == [state]
    True
    """
    out = Writer()
    out.count(len(states))
    for state in states:
        how = state.sampling
        reason = 0 if state.finish_reason is None else 1 + FINISH_REASONS.index(state.finish_reason)
        sizes = (len(how.stop_token_ids), len(state.prompt), len(state.output), state.num_cached)
        penalties = (how.repetition_penalty, how.presence_penalty, how.frequency_penalty)
        numbers = (how.seed, how.temperature, how.top_k, how.top_p, *penalties, how.max_tokens)
        out.text(state.id)
        out.pack(_STATE, state.home, state.index, reason, *numbers, *sizes, int(state.kv is not None))
        for tokens in (how.stop_token_ids, state.prompt, state.output):
            out.array(tokens, "<i4")
        out.array(state.log_probs, "<f8")
    return out.message(Kind.STATES, version=_VERSION)


def unpack_states(raw: bytes) -> list[RequestState]:
    """Undo :func:`pack_states`; ``num_cached`` is 0 for requests without a cache.

    Raises:
        WireError: the message is truncated, damaged or of another version, or has values that are illegal in a request.
    """
    read = Reader(raw, Kind.STATES, version=_VERSION)
    found = [_state(read) for _ in range(read.count(_STATE.size))]
    read.end()
    return found


def _state(read: Reader) -> RequestState:
    name = read.text()
    home, index, reason, seed, temperature, top_k, top_p, *rest = read.unpack(_STATE)
    repetition, presence, frequency, max_tokens, num_stop, num_prompt, num_output, num_cached, with_kv = rest
    stop, prompt, output = (read.array(number, "<i4") for number in (num_stop, num_prompt, num_output))
    if any(tokens.size and tokens.min() < 0 for tokens in (stop, prompt, output)) or reason > len(FINISH_REASONS):
        raise WireError(f"request {name!r} must hold token ids and a known finish reason, got others")
    log_probs = tuple(read.array(num_output, "<f8").tolist())
    try:
        sampling = Sampling(
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            stop_token_ids=tuple(stop.tolist()),
            max_tokens=max_tokens,
        )
        return RequestState(
            id=name,
            prompt=tuple(prompt.tolist()),
            sampling=sampling,
            home=home,
            index=index,
            output=tuple(output.tolist()),
            log_probs=log_probs,
            finish_reason=(None, *FINISH_REASONS)[int(reason)],
            num_cached=num_cached if with_kv else 0,
        )
    except InvalidInput as error:
        raise WireError(f"request {name!r} must keep the rules of requests; {error}") from error


def pack_table(table: Table) -> bytes:
    """A rank's table."""
    out = Writer()
    facts, layout = table.facts, table.facts.layout
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
    room = (facts.free_blocks, facts.num_blocks)
    counts = (len(facts.tiers), len(table.samples), len(table.finished), len(table.rows))
    out.pack(
        _TABLE, table.check, table.settings, facts.slots, *sizes, *room, table.exchange_s, *table.prefilled, *counts
    )
    for text in (layout.dtype, facts.model):
        out.text(text)
    out.array(facts.tiers, "<i4")
    for sample in table.samples:
        out.pack(_SAMPLE, *sample)
    for ended in table.finished:
        out.pack(_ENDED, *ended)
    for row in table.rows:
        out.text(row.id)
        sizes = (row.num_tokens, row.num_output, row.num_cached)
        out.pack(_ROW, row.home, row.prompt, *sizes, row.running, row.max_remaining)
    return out.message(Kind.TABLE, version=_VERSION)


def unpack_table(raw: bytes) -> Table:
    """Undo :func:`pack_table`.

    Raises:
        WireError: see :func:`unpack_states`.
    """
    read = Reader(raw, Kind.TABLE, version=_VERSION)
    check, settings, slots, layers, heads, dim, block, free, blocks, exchange_s, *others = read.unpack(_TABLE)
    prefilled_tokens, prefill_s, *counts = others
    num_tiers, num_samples, num_finished, num_rows = counts
    dtype, model = (read.text() for _ in range(2))
    tiers = tuple(read.array(num_tiers, "<i4").tolist())
    samples = tuple(read.unpack(_SAMPLE) for _ in range(num_samples))
    finished = tuple(read.unpack(_ENDED) for _ in range(num_finished))
    rows = tuple(_row(read) for _ in range(num_rows))
    read.end()
    if dtype not in DTYPES or block < 1:
        raise WireError(f"a table must tell a known cache layout, got blocks of {block} × {dtype!r}")
    layout = KVLayout(num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=block, dtype=dtype)
    facts = EngineFacts(layout=layout, model=model, tiers=tiers, slots=slots, free_blocks=free, num_blocks=blocks)
    return Table(
        facts=facts,
        check=check,
        settings=settings,
        rows=rows,
        samples=cast("tuple[tuple[int, int, float], ...]", samples),
        finished=cast("tuple[tuple[int, int], ...]", finished),
        exchange_s=exchange_s,
        prefilled=(prefilled_tokens, prefill_s),
    )


def _row(read: Reader) -> Row:
    name = read.text()
    home, prompt, num_tokens, num_output, num_cached, running, max_remaining = read.unpack(_ROW)
    if num_output > num_tokens or num_cached > num_tokens:
        raise WireError(f"request {name!r} must hold no more output or cache than tokens, got {num_tokens} tokens")
    return Row(
        id=name,
        home=home,
        prompt=prompt,
        num_tokens=num_tokens,
        num_output=num_output,
        num_cached=num_cached,
        running=bool(running),
        max_remaining=max_remaining,
    )
