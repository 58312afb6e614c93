"""A router for verl's rollout servers that counts expected tokens, not requests.

It implements ``RequestLoadBalancer`` of verl/workers/rollout/router.py (0.9.1), which runs it as a Ray actor. verl's
clients report when a request arrives and leaves; those of :mod:`~equipoise.trainer_hooks.on_verl.router.client` also
report response lengths and execute moves. Without them no length is known, and all responses count the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equipoise.trainer_hooks.on_verl.router.config import RouterConfig
from equipoise.trainer_hooks.on_verl.router.conversations import Conversation, Conversations
from equipoise.trainer_hooks.on_verl.router.ledger import Held, Ledger
from equipoise.trainer_hooks.on_verl.router.lengths import ExpectedLengths
from equipoise.trainer_hooks.on_verl.router.moves import MovePlanner
from equipoise.trainer_hooks.on_verl.router.protocol import LET_GO
from equipoise.trainer_hooks.on_verl.router.replay import Replay, Stay, StepTimes
from equipoise.trainer_hooks.on_verl.router.watch import Watch

logger = logging.getLogger("equipoise")

METRICS_PREFIX = "equipoise/rollout/"
_CORRECT_EVERY_S = 1.0  # between updates of the expected lengths of running requests, if nobody calls `check`
_UNKNOWN_STEP_S = 0.2  # between checks while no request has finished
_OVERDUE_CHECKS = 10  # checks after which a replica is considered to have kept a request that was to move


class TokenAwareRouter:
    """Sends requests to the replica with the fewest outstanding tokens, keeps siblings apart, moves unfinished ones.

    Args:
        servers: handle of each replica by its id.
        config: the fields of ``RouterConfig`` and of ``equipoise.rollout``; ``router_class``, by which verl finds this
            class, is ignored.
        clock: returns the time in seconds.

    Raises:
        InvalidConfig: an unknown key, or a value that breaks its rule.
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._servers = dict(servers)
        self._ledger = Ledger(servers)
        self._leaving: dict[str, float] = {}
        self._replay = Replay()
        self._step_times = StepTimes()
        self._check_at = self._correct_at = 0.0
        self._warned = False
        self.configure({key: value for key, value in (config or {}).items() if key != "router_class"})
        self._watch = Watch(clock, lambda count: self._planner.tier(count), lambda count: self._planner.share(count))

    def configure(self, config: Mapping[str, Any]) -> None:
        """Apply settings; call it before the first request."""
        settings = RouterConfig.of(config)
        self._config = settings.rollout
        most = self._config.max_prompts
        self._conversations = Conversations(most)
        self._lengths = ExpectedLengths(limit=settings.response_length, max_prompts=most)
        self._planner = MovePlanner(self._config, slots=settings.max_num_seqs)

    # -- verl's interface ----------------------------------------------------------------------------------------------

    def require_acquire_fields(self) -> list[str]:
        """What clients must pass to :meth:`acquire_server`."""
        return ["prompt_ids", "server_request_id"]

    def require_release_fields(self) -> list[str]:
        """What clients must pass to :meth:`release_server`."""
        return ["request_id"]

    def acquire_server(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | None = None,
        server_request_id: str | None = None,
        **_extra: object,
    ) -> tuple[str, Any]:
        """Choose the replica for a request; return its id and handle.

        Args:
            request_id: names the conversation.
            prompt_ids: tokens to continue.
            server_request_id: the replica's name for the request; without one it is never moved.
        """
        self._advance()
        now = self._clock()
        if now >= self._correct_at:
            self._correct(now)
        talk = self._conversations.get(request_id)
        if talk is None:
            talk = Conversation(prompt=request_id if prompt_ids is None else hash(tuple(prompt_ids)))
        if talk.generated:
            expected = self._lengths.remaining([talk.key], [talk.generated])[0]
        else:
            expected = talk.expected = self._lengths.of_new(talk.key)
        prompt_tokens = 0 if prompt_ids is None else len(prompt_ids)
        server = self._target(request_id, talk, prompt_tokens)
        if server is None:
            server = self._ledger.choose(talk.key, prompt_tokens, expected, home=talk.home)
            if talk.home is not None:
                self._watch.counts["stayed" if server == talk.home else "left"] += 1
        talk.home, talk.told_to_leave = server, False
        self._conversations.hold(request_id, talk)
        self._ledger.hold(
            Held(
                request_id=request_id,
                server=server,
                prompt=talk.key,
                prompt_tokens=prompt_tokens,
                expected=expected,
                since=now,
                generated=talk.generated,
                server_request_id=server_request_id,
                request_seconds=self._watch.request_seconds.get(server, 0.0),
                tier_seconds=dict(self._watch.tier_seconds.get(server, {})),
            )
        )
        self._watch.asked(server)
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Note that a request has left a replica, finished or not."""
        self._advance()
        ledger = self._ledger
        held = ledger.drop_any(server_id) if request_id is None else ledger.drop(request_id, server_id)
        if held is None:
            return
        talk = self._conversations.busy[held.request_id]
        talk.left_at = self._clock()
        seconds = talk.left_at - held.since
        beside = self._watch.request_seconds.get(server_id, 0.0) - held.request_seconds
        talk.stay = held, beside / seconds if seconds > 0 else 1.0
        talk.tier_seconds = {
            tier: total - held.tier_seconds.get(tier, 0.0)
            for tier, total in self._watch.tier_seconds.get(server_id, {}).items()
        }
        self._rest(held.request_id)

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add replicas."""
        self._advance()
        self._ledger.add_servers(servers)
        self._servers.update(servers)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Remove replicas that are gone or failed, with their requests."""
        self._advance()
        for held in self._ledger.remove_servers(server_ids):
            self._leaving.pop(held.request_id, None)
            self._rest(held.request_id)
        self._watch.forget(server_ids)
        for server in server_ids:
            self._servers.pop(server, None)
        for talk in self._conversations:
            talk.home = None if talk.home in server_ids else talk.home
            talk.goes_to = None if talk.goes_to in server_ids else talk.goes_to

    def get_all_servers(self) -> list[str]:
        """Return the ids of the replicas."""
        return list(self._ledger.running)

    def get_inflight_count(self, server_id: str) -> int:
        """Return the number of requests on a replica."""
        return self._ledger.running.get(server_id, 0)

    def get_total_inflight(self) -> int:
        """Return the number of requests on all replicas."""
        return sum(self._ledger.running.values())

    def get_status(self) -> dict[str, Any]:
        """Return what verl's router does, and the outstanding tokens of each replica."""
        return {
            "servers": dict(self._ledger.running),
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._ledger.running),
            "registered_handles": list(self._servers),
            "outstanding_tokens": dict(self._ledger.load),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget where conversations were: their next turns go to any replica."""
        cleared = 0
        for talk in self._conversations:
            cleared += talk.home is not None
            talk.home = None
        return {"cleared_entries": cleared, "server_loads": dict(self._ledger.running)}

    # -- for the plugin's own clients and trainer ----------------------------------------------------------------------

    def report(self, request_id: str, num_tokens: int, *, aborted: bool, kv_bytes: int = 0) -> bool:
        """Note what a replica returned for a request; True if the client must ask for the rest at once.

        That holds for every request that the router had aborted, even if the new replica is gone by now.

        Args:
            request_id: names the conversation.
            num_tokens: generated on this replica.
            aborted: whether the response is unfinished.
            kv_bytes: size of its cache, if the replica sent that to the new one.
        """
        self._watch.counts["kv_bytes"] += kv_bytes
        talk = self._conversations.get(request_id)
        if talk is None:
            return False
        if talk.stay is not None:
            held, beside = talk.stay
            self._planner.measured(tokens=num_tokens, seconds=talk.left_at - held.since, beside=beside)
            talk.stays.append(Stay(since=held.since, server=held.server, tokens=num_tokens))
            self._step_times.measured(tokens=num_tokens, tier_seconds=talk.tier_seconds)
            talk.stay = None
        talk.generated += num_tokens
        if aborted and talk.told_to_leave:
            return True
        self._replay.ended(talk.stays, at=talk.left_at)
        talk.stays = []
        if aborted:
            return False
        self._lengths.finish(talk.key, talk.generated)
        counts = self._watch.counts
        counts["judged"] += 1
        counts["length"] += talk.generated
        counts["error"] += round(abs(talk.expected - talk.generated))
        self._leaving.pop(request_id, None)
        talk.turn, talk.generated, talk.moves, talk.goes_to = talk.turn + 1, 0, 0, None
        self._rest(request_id)
        return False

    def check(self) -> float | None:
        """Move requests if a check is due; return the seconds until the next one, None if nothing ever moves."""
        if self._config.transfer == "none":
            return None
        self._advance()
        now = self._clock()
        step_s = self._planner.step_s
        if step_s is None:
            return _UNKNOWN_STEP_S
        if now < self._check_at:
            return self._check_at - now
        interval_s = self._config.check_interval * step_s
        self._check_at = now + interval_s
        generated = self._correct(now)
        if not self._settle(now):
            self._move(generated, overdue_at=now + _OVERDUE_CHECKS * interval_s + _UNKNOWN_STEP_S)
        return interval_s

    def take_metrics(self) -> dict[str, float]:
        """Return the figures since the last call, and start a new rollout."""
        self._advance()
        self._lengths.next_rollout()
        figures = self._watch.take(self._ledger.running)
        if figures:
            figures["predicted_saved_seconds"] = self._planner.predicted_s
            figures["measured_saved_seconds"] = self._measured_saved_s() if figures["moves"] else 0.0
        self._planner.predicted_s = 0.0
        self._replay.clear()
        return {METRICS_PREFIX + key: value for key, value in figures.items()}

    def _measured_saved_s(self) -> float:
        by_tier, planner = self._step_times.fit(), self._planner
        return self._replay.saved_s(lambda count: by_tier[planner.tier(count)] / planner.share(count))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._watch.advance(self._ledger.running, self._ledger.load)

    def _rest(self, request_id: str) -> None:
        """Let a conversation be evicted, unless it has a request in flight."""
        if request_id not in self._leaving and not self._ledger.of(request_id):
            self._conversations.rest(request_id)

    def _target(self, request_id: str, talk: Conversation, prompt_tokens: int) -> str | None:
        """Replica that a moved request was promised; None for any other request."""
        if request_id not in self._leaving or self._ledger.of(request_id):
            return None
        del self._leaving[request_id]
        server, talk.goes_to = talk.goes_to, None
        if server is None:
            return None
        talk.moves += 1
        self._planner.gap(self._clock() - talk.left_at)
        self._watch.counts["moved"] += 1
        self._watch.counts["moved_tokens"] += prompt_tokens
        return server

    def _correct(self, now: float) -> dict[int, int]:
        """Update the expected lengths of running requests; return the tokens each has generated, by its order."""
        self._correct_at = now + _CORRECT_EVERY_S
        step_s = self._planner.step_s
        held = self._ledger.everything()
        most = self._lengths.limit
        done = [h.generated + (0 if step_s is None else min(most, int((now - h.since) / step_s))) for h in held]
        for each, left in zip(held, self._lengths.remaining([h.prompt for h in held], done), strict=True):
            self._ledger.expect(each, left)
        return {each.order: tokens for each, tokens in zip(held, done, strict=True)}

    def _settle(self, now: float) -> bool:
        """Give up on requests that their replica keeps; return whether others are still in transit."""
        for request_id, overdue_at in list(self._leaving.items()):
            if now >= overdue_at:
                del self._leaving[request_id]
                self._watch.counts["kept"] += 1
                self._warn_kept()
                talk = self._conversations.busy[request_id]
                talk.goes_to, talk.moves = None, self._planner.most_moves
                self._rest(request_id)
        return bool(self._leaving)

    def _warn_kept(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "equipoise: a rollout server did not release a request that was to move; with vLLM 0.16 or later set"
                " VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, or turn moves off with equipoise.rollout.transfer=none"
            )

    def _move(self, generated: Mapping[int, int], *, overdue_at: float) -> None:
        requests: dict[str, list[Held]] = {server: [] for server in self._ledger.running}
        moves: dict[int, int] = {}
        for held in self._ledger.everything():
            requests[held.server].append(held)
            alone = len(self._ledger.of(held.request_id)) == 1
            able = alone and hasattr(self._servers[held.server], LET_GO[self._config.transfer])
            talk = self._conversations.busy[held.request_id]
            moves[held.order] = talk.moves if able else self._planner.most_moves
        for held, to in self._planner.plan(requests, generated, moves):
            talk = self._conversations.busy[held.request_id]
            talk.goes_to, talk.told_to_leave = to, True
            self._leaving[held.request_id] = overdue_at
            self._watch.counts["planned"] += 1
            server = self._servers[held.server]
            if self._config.transfer == "kv":
                server.hand_over_request.remote(held.server_request_id, self._servers[to])
            else:
                server.abort_request.remote(held.server_request_id, reset_prefix_cache=False)
