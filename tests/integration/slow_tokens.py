"""Attention under which an update's forward takes three milliseconds per token and layer, for verl's ``external_lib``.

The tiny model's own time is nearly all overhead, and no cost model can be fitted to that.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
# transformers' attention interface is typed in part only.

from __future__ import annotations

import time
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from equipoise.trainer_hooks.verl_on_cpu.attention import varlen_attention, varlen_mask

NAME = "slow_tokens"
_TOKEN_S = 3e-3


def slow_attention(
    module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The attention of CPU runs; slow where gradients are recorded, so that rollouts are as fast as ever."""
    if torch.is_grad_enabled():
        time.sleep(_TOKEN_S * query.shape[2])
    return varlen_attention(module, query, *args, **kwargs)


AttentionInterface.register(NAME, slow_attention)
AttentionMaskInterface.register(NAME, varlen_mask)
