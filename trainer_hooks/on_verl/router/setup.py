"""On the driver: put the router and the clients into verl's rollout, and log the router's metrics.

verl takes a custom router through ``rollout.router_config_path``, and a client from ``PPOTrainer.get_llm_client``.
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from equipoise.config import EquipoiseConfig
from equipoise.errors import InvalidConfig, must
from equipoise.trainer_hooks.on_verl._say import say
from equipoise.trainer_hooks.on_verl.router.protocol import LET_GO

logger = logging.getLogger("equipoise")

_WITHOUT_CACHES = ("vllm", "sglang", "trtllm")  # verl 0.9.1's servers


def router_file() -> str:
    """Return the path of the file that names the router, for ``rollout.router_config_path``.

    >>> router_file().endswith("token_aware.yaml")
    True
    """
    import equipoise.conf

    return str(Path(equipoise.conf.__path__[0]).resolve() / "equipoise" / "router" / "token_aware.yaml")


def choose_router(config: Any, settings: EquipoiseConfig) -> None:
    """Before the trainer is built, set the router in its configuration.

    Raises:
        InvalidConfig: the configuration names another router, asks for routing by request id, or moves caches between
            servers that cannot send them.
    """
    if not (settings.enable and settings.rollout.enable):
        return
    from omegaconf import open_dict

    rollout = config.actor_rollout_ref.rollout
    own = router_file()
    named = rollout.get("router_config_path", None)
    if named not in (None, "", own):
        remedy = "remove it, or set equipoise.rollout.enable=false"
        key = "actor_rollout_ref.rollout.router_config_path"
        raise InvalidConfig(must(key, "be unset with equipoise.rollout.enable=true", named, remedy))
    if rollout.get("full_determinism", False):
        key = "actor_rollout_ref.rollout.full_determinism"
        rule = "be False with equipoise.rollout.enable=true: requests go where there is room, not by their ids"
        raise InvalidConfig(must(key, rule, True, "set one of the two to false"))
    name = rollout.get("name", None)
    if settings.rollout.transfer == "kv" and name in _WITHOUT_CACHES:
        key, rule = "equipoise.rollout.transfer", f"be 'recompute' or 'none' with rollout.name={name}"
        remedy = "use 'recompute': verl's servers can neither send nor receive the cache of a request"
        raise InvalidConfig(must(key, rule, "kv", remedy))
    with open_dict(rollout):
        rollout.router_config_path = own


def attach_rollout(trainer: Any, settings: EquipoiseConfig) -> None:
    """Give ``trainer`` clients that report lengths and move requests, and add the router's metrics to its own."""
    if not (settings.enable and settings.rollout.enable):
        return
    hook = RolloutHook(trainer, settings)
    original_client, original_balance = trainer.get_llm_client, trainer._balance_batch

    def get_llm_client() -> Any:
        return hook.client(original_client())

    def balance(batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        metrics.update(hook.metrics())
        return original_balance(batch, metrics, *args, **kwargs)

    trainer.get_llm_client = get_llm_client
    trainer._balance_batch = balance


class RolloutHook:
    """The driver's side of one trainer's router.

    Args:
        trainer: a verl v1 ``PPOTrainer``, constructed.
        settings: the checked node.
    """

    def __init__(self, trainer: Any, settings: EquipoiseConfig) -> None:
        self.trainer = trainer
        self.settings = settings
        self._router: Any = None

    def client(self, given: Any) -> Any:
        """Send the router its settings; return a client of the same kind as verl's, to use in its place."""
        import ray
        from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

        from equipoise.trainer_hooks.on_verl.router.client import MovingAsyncClient, MovingClient

        self._router = given._load_balancer
        rollout = self.trainer.config.actor_rollout_ref.rollout
        sizes = {"response_length": int(rollout.response_length), "max_num_seqs": int(rollout.max_num_seqs)}
        ray.get(self._router.configure.remote({**asdict(self.settings.rollout), **sizes}))
        kind = type(given)
        if kind is LLMServerClient:
            client: Any = MovingClient(given.config, self._router)
        elif kind is FullyAsyncLLMServerClient:
            client = MovingAsyncClient(given.config, self._router, only_hybrid=given._only_hybrid)
        else:
            logger.warning(
                "equipoise: %s is not verl's client: it reports no lengths and moves no requests, so the router counts"
                " all responses the same",
                kind.__name__,
            )
            return given
        self._warn_fixed()
        say(f"routes requests by expected tokens (transfer={self.settings.rollout.transfer})")
        return client

    def _warn_fixed(self) -> None:
        """Warn about servers that cannot release a single request."""
        transfer = self.settings.rollout.transfer
        if transfer == "none":
            return
        managers = [getattr(self.trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager")]
        handles = [handle for manager in managers if manager is not None for handle in manager.server_handles]
        fixed = [handle for handle in handles if not hasattr(handle, LET_GO[transfer])]
        if fixed:
            logger.warning(
                "equipoise: %d of %d rollout servers (%s) have no %s: no request moves away from them",
                len(fixed),
                len(handles),
                self.trainer.config.actor_rollout_ref.rollout.name,
                LET_GO[transfer],
            )

    def metrics(self) -> dict[str, float]:
        """Return the router's metrics since the last step."""
        import ray

        return {} if self._router is None else ray.get(self._router.take_metrics.remote())
