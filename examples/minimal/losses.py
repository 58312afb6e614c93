"""The losses as an engine calls them: one micro-batch in, its share of the loss of the optimizer step out."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# tensordict is typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

import equipoise as eq
from examples.minimal.settings import Settings

Outputs = dict[str, torch.Tensor]
Share = tuple[torch.Tensor, Mapping[str, Any]]


def policy(s: Settings, counts: eq.LossDenominators, output: Outputs, rows: TensorDict, group: Any) -> Share:
    """Clipped surrogate, and the KL term if there is a weight for it."""
    inputs = eq.PolicyInputs(
        log_prob=output["log_probs"],
        old_log_prob=rows["old_log_probs"],
        advantages=rows["advantages"],
        loss_mask=rows["loss_mask"],
        ref_log_prob=rows.get("ref_log_probs", None),
        is_padding=rows["is_padding"],
    )
    config = eq.PolicyConfig(kl_coef=s.kl_coef)
    return eq.policy_loss("ppo", inputs, config, denominators=counts, dp_size=s.dp)


def value(s: Settings, counts: eq.LossDenominators, output: Outputs, rows: TensorDict, group: Any) -> Share:
    """Clipped squared error of the critic."""
    columns = (output["values"], rows["old_values"], rows["returns"], rows["loss_mask"])
    return eq.value_loss(*columns, denominators=counts, dp_size=s.dp, is_padding=rows["is_padding"])


def sft(s: Settings, counts: eq.LossDenominators, output: Outputs, rows: TensorDict, group: Any) -> Share:
    """Negative log-likelihood of right answers."""
    columns = (output["log_probs"], rows["loss_mask"])
    return eq.sft_loss(*columns, denominators=counts, dp_size=s.dp, is_padding=rows["is_padding"])
