"""How rollout servers and their clients may communicate beyond verl's own interface.

A server announces extra abilities by offering them; nothing here names a server.
"""

from __future__ import annotations

from collections.abc import Mapping

LET_GO: Mapping[str, str] = {"recompute": "abort_request", "kv": "hand_over_request"}
"""Server method that releases a single request, by kind of move."""

GENERATED_KEY = "equipoise_generated"
"""Sampling parameter: how many tokens at the end of the prompt were sampled elsewhere. Set only if the request
already has it, since a server may reject unknown parameters."""

KV_BYTES_KEY = "equipoise_kv_bytes"
"""Extra field of an output: bytes of the cache that its server sent to the next one."""
