"""One exchange: check, send, import, agree, and only then forget. A failure before that leaves all as it was."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import wire
from equipoise.rollout.transfer.channel import Channel, RankLost
from equipoise.rollout.transfer.state import KVLayout, MovableEngine, RequestState
from equipoise.rollout.transfer.wire import Row, Table
from equipoise.wire import WireError

TRANSFERS = ("kv", "recompute")
_IN_FLIGHT = 2
"""Layers on their way at once: one is packed while another is sent."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What an exchange did.

    Args:
        num_moved: requests that changed rank, over all ranks.
        kv_bytes: of their caches, over all ranks.
        seconds: on this rank.
        refused: why nothing moved, by rank; empty if all went well.
    """

    num_moved: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    refused: tuple[tuple[int, str], ...] = ()


def gather_tables(channel: Channel, table: Table) -> list[Table]:
    """The tables of all ranks, checked: the same error on every rank if they do not go together.

    Raises:
        InvalidInput: models, caches, tiers, settings or checks that differ, or a request id on two ranks.
        RankLost: a rank did not answer.
        EquipoiseError: a rank says that it cannot go on.
    """
    tables = [wire.unpack_table(raw) for raw in channel.gather(wire.pack_table(table), "gathering requests")]
    for rank, found in enumerate(tables):
        if found.trouble:
            raise EquipoiseError(f"rank {rank} must decode to go on, got {found.trouble}")
    first = tables[0]
    for rank, found in enumerate(tables):
        for name, mine, want in (
            ("cache layout", found.facts.layout, first.facts.layout),
            ("model", found.facts.model, first.facts.model),
            ("tiers", found.facts.tiers, first.facts.tiers),
            ("settings", found.settings, first.settings),
            ("number of the check", found.check, first.check),
        ):
            if mine != want:
                rule = f"be that of rank 0, {want!r}"
                raise InvalidInput(must(f"{name} of rank {rank}", rule, mine, "start all ranks alike"))
    owner: dict[str, int] = {}
    for rank, found in enumerate(tables):
        for row in found.rows:
            if row.id in owner:
                where = f"ranks {owner[row.id]} and {rank}"
                raise InvalidInput(must(f"request id {row.id!r}", "be on one rank", where, "give each its own id"))
            if not 0 <= row.home < len(tables):
                raise InvalidInput(
                    must(f"home of request {row.id!r}", "be a rank", row.home, f"0 to {len(tables) - 1}")
                )
            owner[row.id] = rank
    return tables


def check_moves(tables: Sequence[Table], moves: Sequence[Move], *, transfer: str) -> None:
    """Raise, from what all ranks know, if a plan cannot be carried out; the same error on every rank.

    Raises:
        InvalidInput: a rank or request that is not there, or a request that moves twice.
    """
    if transfer not in TRANSFERS:
        raise InvalidInput(must("transfer", f"be one of {list(TRANSFERS)}", transfer, "choose one"))
    homes = {row.id: (rank, row) for rank, table in enumerate(tables) for row in table.rows}
    seen: set[Any] = set()
    for move in moves:
        name = f"move of request {move.request_id!r}"
        if move.request_id not in homes or homes[str(move.request_id)][0] != move.from_rank:
            raise InvalidInput(must(name, "start where the request is", move.from_rank, "plan from the same tables"))
        if not 0 <= move.to_rank < len(tables) or move.to_rank == move.from_rank:
            raise InvalidInput(must(name, "end on another rank of the group", move.to_rank, "plan for this group"))
        if move.request_id in seen:
            raise InvalidInput(must(name, "happen once", "twice", "give each request one receiver"))
        seen.add(move.request_id)


def check_room(tables: Sequence[Table], moves: Sequence[Move], *, transfer: str) -> None:
    """Raise if a rank has no room for what it is to receive; the same error on every rank.

    Raises:
        InvalidInput: names the rank, and what is missing.
    """
    room = _Room(tables, transfer)
    for move in moves:
        room.take(move)
    for rank, (slots, blocks) in enumerate(zip(room.slots, room.blocks, strict=True)):
        if slots < 0 or blocks < 0:
            missing = f"{max(-slots, 0)} slots and {max(-blocks, 0)} cache blocks too few"
            remedy = "move fewer requests there, or raise tiers[0] or num_blocks"
            raise InvalidInput(must(f"rank {rank}", "have room for what it receives", missing, remedy))


def fitting(tables: Sequence[Table], moves: Sequence[Move], *, transfer: str) -> list[Move]:
    """The moves for which receivers have room, in their order."""
    room = _Room(tables, transfer)
    return [move for move in moves if room.fits(move)]


class _Room:
    """Slots and cache blocks that ranks keep free, if requests leave only after others have come."""

    def __init__(self, tables: Sequence[Table], transfer: str) -> None:
        self.tables, self.transfer = tables, transfer
        self.rows = {row.id: row for table in tables for row in table.rows}
        self.slots = [table.facts.slots - sum(row.running for row in table.rows) for table in tables]
        self.blocks = [table.facts.free_blocks for table in tables]

    def need(self, move: Move) -> tuple[int, int]:
        row = self.rows[str(move.request_id)]
        if not row.running:
            return 0, 0
        tokens = row.num_cached if self.transfer == "kv" else row.num_tokens
        return 1, self.tables[move.to_rank].facts.layout.blocks(tokens)

    def take(self, move: Move) -> None:
        slots, blocks = self.need(move)
        self.slots[move.to_rank] -= slots
        self.blocks[move.to_rank] -= blocks

    def fits(self, move: Move) -> bool:
        slots, blocks = self.need(move)
        if slots > self.slots[move.to_rank] or blocks > self.blocks[move.to_rank]:
            return False
        self.take(move)
        return True


def exchange(
    engine: MovableEngine, channel: Channel, tables: Sequence[Table], moves: Sequence[Move], *, transfer: str = "kv"
) -> Exchanged:
    """Carry out a plan that all ranks share; a collective call.

    Requests stay with their sender until all ranks have said that theirs arrived. If one refuses, receivers forget what
    came and nothing has moved.

    Args:
        engine: of this rank.
        channel: of the group.
        tables: as gathered, the same on all ranks.
        moves: the same on all ranks.
        transfer: "kv", the cache moves; "recompute", only tokens do.

    Raises:
        InvalidInput: see :func:`check_moves` and :func:`check_room`; nothing has moved.
        RankLost: a rank did not answer. What this rank had before it still has, what came is forgotten.
    """
    check_moves(tables, moves, transfer=transfer)
    check_room(tables, moves, transfer=transfer)
    if not moves:
        return Exchanged()
    start = time.perf_counter()
    leaving: defaultdict[int, list[str]] = defaultdict(list)
    for move in moves:
        if move.from_rank == channel.rank:
            leaving[move.to_rank].append(str(move.request_id))
    arrived: list[str] = []
    try:
        refused = _carry(engine, channel, tables, moves, leaving, arrived, transfer)
    except RankLost:
        engine.abort(arrived)
        raise
    if refused:
        engine.abort(arrived)
        return Exchanged(seconds=time.perf_counter() - start, refused=refused)
    engine.abort([name for names in leaving.values() for name in names])
    rows = {row.id: row for table in tables for row in table.rows}
    layout = tables[0].facts.layout
    moved = [rows[str(move.request_id)] for move in moves]
    kv_bytes = sum(layout.nbytes(row.num_cached) for row in moved) if transfer == "kv" else 0
    return Exchanged(num_moved=len(moves), kv_bytes=kv_bytes, seconds=time.perf_counter() - start)


def _carry(
    engine: MovableEngine,
    channel: Channel,
    tables: Sequence[Table],
    moves: Sequence[Move],
    leaving: dict[int, list[str]],
    arrived: list[str],
    transfer: str,
) -> tuple[tuple[int, str], ...]:
    """Everything up to the agreement; who refuses and why. Names of imported requests go to ``arrived``."""
    outgoing: dict[int, list[RequestState]] = {}
    trouble = ""
    try:
        outgoing = {rank: engine.export(names) for rank, names in leaving.items()}
        if transfer == "recompute":
            outgoing = {rank: [replace(state, kv=None) for state in states] for rank, states in outgoing.items()}
        packed = [wire.pack_states(outgoing.get(rank, [])) for rank in range(channel.world_size)]
    except (EquipoiseError, RuntimeError, ValueError) as error:
        trouble, packed = f"export: {error}", [b""] * channel.world_size
    raw = channel.scatter(packed, "sending requests")
    incoming: dict[int, list[RequestState]] = {}
    if not trouble:
        try:
            incoming = _accept(raw, channel.rank, tables, moves, transfer)
        except WireError as error:
            trouble = f"requests that came: {error}"
    refused = _vote(channel, trouble, "agreeing on what to send")
    if refused:
        return refused
    if transfer == "kv":
        incoming = _caches(channel, tables[0].facts.layout, outgoing, incoming)
    states = [state for rank in sorted(incoming) for state in incoming[rank]]
    try:
        engine.import_(states)
        arrived.extend(state.id for state in states)
    except (EquipoiseError, RuntimeError, ValueError) as error:
        trouble = f"import: {error}"
    return _vote(channel, trouble, "agreeing on what came")


def _vote(channel: Channel, trouble: str, doing: str) -> tuple[tuple[int, str], ...]:
    votes = [wire.unpack_vote(raw) for raw in channel.gather(wire.pack_vote(trouble), doing)]
    return tuple((rank, reason) for rank, reason in enumerate(votes) if reason)


def _accept(
    raw: Sequence[bytes], rank: int, tables: Sequence[Table], moves: Sequence[Move], transfer: str
) -> dict[int, list[RequestState]]:
    """Requests by sender, if they are those that plan and tables name; a sender that refuses is silent."""
    found = {sender: wire.unpack_states(message) for sender, message in enumerate(raw) if message}
    for sender, states in found.items():
        planned = [str(move.request_id) for move in moves if (move.from_rank, move.to_rank) == (sender, rank)]
        if [state.id for state in states] != planned:
            raise WireError(f"rank {sender} must send {planned}, got {[state.id for state in states]}")
        rows = {row.id: row for row in tables[sender].rows}
        for state in states:
            if not _same(state, rows[state.id], transfer):
                raise WireError(f"request {state.id!r} must be as rank {sender} told, got {state.num_tokens} tokens")
    return {sender: states for sender, states in found.items() if states}


def _same(state: RequestState, row: Row, transfer: str) -> bool:
    cached = row.num_cached if transfer == "kv" else 0
    return (state.num_tokens, state.num_cached, state.home) == (row.num_tokens, cached, row.home)


def _caches(
    channel: Channel,
    layout: KVLayout,
    outgoing: dict[int, list[RequestState]],
    incoming: dict[int, list[RequestState]],
) -> dict[int, list[RequestState]]:
    """Send and receive caches, a layer at a time, each peer's requests in one message; the next is packed meanwhile."""
    sent = {rank: [state.kv for state in states if state.kv is not None] for rank, states in outgoing.items()}
    counts = {
        rank: [layout.blocks(state.num_cached) for state in states if state.num_cached]
        for rank, states in incoming.items()
    }
    shape = (2, layout.num_kv_heads)
    came: dict[int, list[torch.Tensor]] = {rank: [] for rank in counts}
    flying: list[tuple[Any, list[tuple[int, torch.Tensor]]]] = []
    for layer in range(layout.num_layers):
        sends = [(rank, torch.cat([kv[layer] for kv in kvs], dim=2)) for rank, kvs in sorted(sent.items()) if kvs]
        receives: list[tuple[int, torch.Tensor]] = []
        for rank, blocks in sorted(counts.items()):
            full = (*shape, sum(blocks), layout.block_size, layout.head_dim)
            room = torch.empty(full, dtype=layout.torch_dtype, device=channel.device)
            came[rank].append(room)
            if blocks:
                receives.append((rank, room))
        flying.append((channel.start([(rank, x.to(channel.device)) for rank, x in sends], receives), sends))
        if len(flying) == _IN_FLIGHT:
            channel.finish(flying.pop(0)[0])
    for works, _ in flying:
        channel.finish(works)
    return {rank: _with_caches(states, counts[rank], came[rank]) for rank, states in incoming.items()}


def _with_caches(
    states: Sequence[RequestState], counts: Sequence[int], layers: Sequence[torch.Tensor]
) -> list[RequestState]:
    parts: list[tuple[torch.Tensor, ...]] = [layer.split(list(counts), dim=2) for layer in layers if counts]
    made: list[RequestState] = []
    place = 0
    for state in states:
        if state.num_cached:
            made.append(replace(state, kv=[part[place] for part in parts]))
            place += 1
        else:
            made.append(state)
    return made
