"""What ranks know about each other at a check, and which moves are allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from equipoise.errors import InvalidInput, must
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import wire
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.wire import Table

TRANSFERS = ("kv", "recompute")


def gather_tables(channel: Channel, part: Callable[[], Table], doing: str = "gathering requests") -> list[Table]:
    """The tables that all ranks' parts return; the same error on every rank if they conflict.

    Raises:
        InvalidInput: models, caches, tiers, settings or checks differ, or a request id is on two ranks.
        RankLost: a rank did not answer.
        EquipoiseError: a part failed.
    """
    tables = [wire.unpack_table(raw) for raw in channel.gather(lambda: wire.pack_table(part()), doing)]
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
    """Raise if a plan cannot be carried out; the same error on every rank.

    Raises:
        InvalidInput: a rank or request does not exist, or a request moves twice.
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
    """Raise if a rank has no room for what it would receive; the same error on every rank.

    Raises:
        InvalidInput: it has not; names the rank and what is missing.
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
    """The moves for which receivers have room, in the given order."""
    room = _Room(tables, transfer)
    return [move for move in moves if room.fits(move)]


class _Room:
    """Free slots and cache blocks of each rank, if requests leave only after others have arrived."""

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
