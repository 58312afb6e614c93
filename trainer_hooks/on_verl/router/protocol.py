"""What rollout servers and their clients may say to each other beyond verl's own interface.

A server that can do more than verl's says so by what it offers; nothing here names one.
"""

from __future__ import annotations

from collections.abc import Mapping

LET_GO: Mapping[str, str] = {"recompute": "abort_request", "kv": "hand_over_request"}
"""Method by which a server lets a single request go, by how it moves."""

GENERATED_KEY = "equipoise_generated"
"""Sampling parameter: how many tokens at the end of the prompt were sampled elsewhere. Set only where the request
already has it, since a server may refuse parameters that it does not know."""

KV_BYTES_KEY = "equipoise_kv_bytes"
"""Extra field of an output: bytes of the cache that its server sent to the next one."""
