"""The losses a second time: loops over rows and tokens, ``math`` alone, derivatives by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Table = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One response: what the tiny model reads at each position, what it drew, and what the loss needs to know."""

    context: list[int]
    token: list[int]
    mask: list[int]
    old: list[float]
    ref: list[float]
    advantage: list[float]
    weight: list[float]
    is_padding: bool = False

    @property
    def length(self) -> int:
        return len(self.token)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the losses are computed with."""

    clip_low: float = 0.2
    clip_high: float = 0.3
    dual_clip: float = 1.6
    kl_coef: float = 0.05
    entropy_coef: float = 0.02
    horizon: float = 11.0


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Loss, its gradient, and what is logged."""

    loss: float
    gradient: Table
    metrics: dict[str, float]


@dataclass
class _Token:
    loss: float
    slope: float  # of the loss over the token's log-probability
    means: dict[str, float] = field(default_factory=lambda: {})
    ratio: float | None = None


def log_probabilities(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def plain_step(rows: Sequence[Row], table: Table, name: str, mode: str, settings: Settings) -> Plain:
    """One optimizer step on one machine in one piece."""
    rows = [row for row in rows if not row.is_padding]
    num_tokens = sum(sum(row.mask) for row in rows)
    total = pg = kl = entropy = 0.0
    gradient = [[0.0] * len(line) for line in table]
    sums: dict[str, float] = {}
    ratios: list[float] = []
    for row in rows:
        weight = _weight(mode, num_tokens, len(rows), sum(row.mask), settings.horizon)
        log_p = [log_probabilities(table[c]) for c in row.context]
        drift = [log_p[t][row.token[t]] - row.old[t] for t in range(row.length)]
        mean_drift = sum(d for d, m in zip(drift, row.mask, strict=True) if m) / max(sum(row.mask), 1)
        for t in range(row.length):
            if not row.mask[t]:
                continue
            own = log_p[t][row.token[t]]
            value = table[row.context[t]][0]
            if name == "value":
                found = _value_token(value, row.old[t], row.ref[t], settings)
            elif name == "sft":
                found = _Token(loss=-own, slope=-1.0)
            else:
                found = _policy_token(name, own, row.old[t], mean_drift, row.advantage[t], settings)
                found.loss, found.slope = found.loss * row.weight[t], found.slope * row.weight[t]
            pg += weight * found.loss
            share, slope = found.loss, found.slope
            for key, number in found.means.items():
                sums[key] = sums.get(key, 0.0) + number
            if found.ratio is not None:
                ratios.append(found.ratio)
            line = gradient[row.context[t]]
            if name == "value":
                line[0] += weight * slope
                total += weight * share
                continue
            p = [math.exp(x) for x in log_p[t]]
            if name != "sft":
                apart = own - row.ref[t]
                token_kl = math.exp(-apart) + apart - 1
                token_entropy = -sum(a * b for a, b in zip(p, log_p[t], strict=True))
                kl += weight * token_kl
                entropy += weight * token_entropy
                share += settings.kl_coef * token_kl - settings.entropy_coef * token_entropy
                slope += settings.kl_coef * (1 - math.exp(-apart))
                for k in range(len(p)):
                    line[k] += weight * settings.entropy_coef * p[k] * (log_p[t][k] + token_entropy)
            total += weight * share
            for k in range(len(p)):
                line[k] += weight * slope * ((k == row.token[t]) - p[k])
    metrics = {key: number / num_tokens for key, number in sums.items()}
    if name == "value":
        metrics["vf_loss"] = total
    elif name == "sft":
        metrics["loss"] = total
    else:
        metrics |= {"loss": total, "pg_loss": pg, "kl_loss": kl, "entropy_loss": entropy}
        metrics |= {"ratio_max": max(ratios), "ratio_min": min(ratios)}
    return Plain(loss=total, gradient=gradient, metrics=metrics)


def _weight(mode: str, num_tokens: int, num_rows: int, own_tokens: int, horizon: float) -> float:
    """What one token of a row weighs in the loss."""
    if mode == "token-mean":
        return 1 / num_tokens
    if mode == "token-sum":
        return 1.0
    if mode == "seq-mean-token-sum":
        return 1 / num_rows
    if mode == "seq-mean-token-mean":
        return 1 / num_rows / max(own_tokens, 1)
    assert mode == "seq-mean-token-sum-norm"
    return 1 / num_rows / horizon


def _value_token(value: float, old: float, target: float, settings: Settings) -> _Token:
    bound = settings.clip_low
    moved = min(max(value, old - bound), old + bound)
    plain, bounded = (value - target) ** 2, (moved - target) ** 2
    means = {"vf_clipfrac": float(bounded > plain), "vpred_mean": value}
    if bounded > plain:
        return _Token(loss=bounded / 2, slope=0.0, means=means)
    return _Token(loss=plain / 2, slope=value - target, means=means)


def _policy_token(name: str, own: float, old: float, mean_drift: float, advantage: float, settings: Settings) -> _Token:
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    drift = own - old
    if name == "cispo":
        ratio = math.exp(drift)
        weight = min(max(ratio, low), high)
        found = _Token(loss=-weight * advantage * own, slope=-weight * advantage, ratio=ratio)
        found.means = {"pg_clipfrac": float(not low <= ratio <= high), "ppo_kl": -drift}
        return found
    ratio = math.exp(mean_drift if name == "gspo" else drift)
    clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    cut = name != "gspo" and advantage < 0 and ratio > settings.dual_clip
    used = min(max(ratio, low), high) if clipped else settings.dual_clip if cut else ratio
    found = _Token(loss=-advantage * used, slope=0.0 if clipped or cut else -advantage * ratio, ratio=ratio)
    found.means = {"pg_clipfrac": float(clipped), "ppo_kl": -drift}
    if name != "gspo":
        found.means["pg_clipfrac_lower"] = float(cut)
    return found
