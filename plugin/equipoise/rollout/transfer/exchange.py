"""One exchange: send, reserve room, write caches, agree, and only then forget. An earlier failure moves nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equipoise.errors import EquipoiseError
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import wire
from equipoise.rollout.transfer.caches import CacheStream
from equipoise.rollout.transfer.channel import Channel, OutOfStep, RankLost
from equipoise.rollout.transfer.state import MovableEngine, RequestState
from equipoise.rollout.transfer.tables import check_moves, check_room
from equipoise.rollout.transfer.wire import Row, Table
from equipoise.together import attempt
from equipoise.wire import WireError


class PlanFailed(EquipoiseError, RuntimeError):
    """A rank has no plan. Ranks that have one learn of it at the start of the exchange, and stop too."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The result of an exchange.

    Args:
        num_moved: requests that changed rank, over all ranks.
        kv_bytes: bytes of their caches, over all ranks.
        seconds: duration on this rank.
        refused: why nothing moved, with the first rank that refused; empty on success.
    """

    num_moved: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    refused: str = ""


def exchange(
    engine: MovableEngine, channel: Channel, tables: Sequence[Table], moves: Sequence[Move], *, transfer: str
) -> Exchanged:
    """Carry out a plan that all ranks share; a collective call.

    Requests stay with their sender until all ranks have confirmed arrival. If an engine fails before that, whatever it
    raises, receivers forget what arrived, and nothing has moved.

    Args:
        engine: this rank's engine.
        channel: the group's channel.
        tables: as gathered, the same on all ranks.
        moves: the same on all ranks.
        transfer: "kv" moves caches, "recompute" only tokens.

    Raises:
        InvalidInput: see :func:`check_moves` and :func:`check_room`; nothing has moved.
        OutOfStep: ranks have different moves; nothing has moved.
        PlanFailed: a rank reported it.
        RankLost: a rank did not answer. This rank keeps its requests and forgets what arrived.
        EquipoiseError: a sender could not forget what it sent, so some requests are on two ranks.
    """
    if not moves:
        return Exchanged()
    check_moves(tables, moves, transfer=transfer)
    check_room(tables, moves, transfer=transfer)
    start = time.perf_counter()
    leaving: defaultdict[int, list[str]] = defaultdict(list)
    for move in moves:
        if move.from_rank == channel.rank:
            leaving[move.to_rank].append(str(move.request_id))
    held: list[str] = []
    refused: str | None = None
    try:
        _carry(engine, channel, tables, moves, leaving, held, transfer)
        refused = ""
    except (RankLost, OutOfStep, PlanFailed):
        raise
    except EquipoiseError as error:
        refused = str(error) or type(error).__name__
    finally:
        if refused is None:
            attempt(lambda: engine.abort(held))
    if refused:
        channel.together(lambda: engine.abort(held), "forgetting requests that came")
        return Exchanged(seconds=time.perf_counter() - start, refused=refused)
    sent = [name for names in leaving.values() for name in names]
    channel.together(lambda: engine.abort(sent), "forgetting requests that were sent")
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
    held: list[str],
    transfer: str,
) -> None:
    """Everything up to the agreement; adds the requests with reserved room to ``held``."""
    outgoing: dict[int, list[RequestState]] = {}

    def export() -> list[bytes]:
        for rank, names in leaving.items():
            states = engine.export(names)
            outgoing[rank] = states if transfer == "kv" else [replace(state, kv=None) for state in states]
        found = (outgoing.get(rank) for rank in range(channel.world_size))
        return [wire.pack_states(states) if states else b"" for states in found]

    raw = channel.scatter(export, "sending requests", about=(transfer, list(moves)))

    def hold() -> CacheStream | None:
        incoming = _accept(raw, channel.rank, tables, moves, transfer)
        states = [state for some in incoming.values() for state in some]
        engine.reserve(states)
        held.extend(state.id for state in states)
        return CacheStream(engine, channel, tables[0].facts.layout, outgoing, incoming) if transfer == "kv" else None

    stream = channel.together(hold, "holding room for requests")
    carried = stream.run() if stream is not None else attempt(lambda: None)

    def commit() -> None:
        carried.get()
        engine.commit(held)

    channel.together(commit, "taking requests in")


def _accept(
    raw: Sequence[bytes], rank: int, tables: Sequence[Table], moves: Sequence[Move], transfer: str
) -> dict[int, list[RequestState]]:
    """Requests by sender, after comparing them with plan and tables."""
    found: dict[int, list[RequestState]] = {}
    for sender, message in enumerate(raw):
        states = wire.unpack_states(message) if message else []
        planned = [str(move.request_id) for move in moves if (move.from_rank, move.to_rank) == (sender, rank)]
        if [state.id for state in states] != planned:
            raise WireError(f"rank {sender} sent {[state.id for state in states]} where {planned} were planned")
        rows = {row.id: row for row in tables[sender].rows}
        for state in states:
            if not _same(state, rows[state.id], transfer):
                told = f"{rows[state.id].num_tokens} tokens, {rows[state.id].num_cached} of them cached"
                came = f"{state.num_tokens} and {state.num_cached}"
                raise WireError(f"request {state.id!r} of rank {sender} differs from its table: {told}, not {came}")
        if states:
            found[sender] = states
    return found


def _same(state: RequestState, row: Row, transfer: str) -> bool:
    cached = row.num_cached if transfer == "kv" else 0
    return (state.num_tokens, state.num_cached, state.home) == (row.num_tokens, cached, row.home)
