"""A tiny model trained one step, its rows laid out over ranks and micro-batches in many ways."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

import equipoise as eq
from equipoise.training.loss.metrics import AnyMetric
from tests.numerics.loss_plain import Plain, Row, Settings, log_probabilities

VOCABULARY = 5
CAP = 24
NAN = float("nan")
JUNK = (NAN, float("inf"), float("-inf"))


def make_table(seed: int = 0) -> list[list[float]]:
    draw = random.Random(seed)
    return [[draw.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]


def make_rows(count: int, seed: int = 1) -> list[Row]:
    """Real rows of 1 to 12 tokens off policy, with holes in their masks; one of them has no token that counts."""
    draw = random.Random(seed)
    table = make_table()
    rows: list[Row] = []
    for i in range(count):
        length = draw.choice([1, 2, 3, 5, 8, 12])
        context = [draw.randrange(VOCABULARY) for _ in range(length)]
        token = [draw.randrange(VOCABULARY) for _ in range(length)]
        own = [log_probabilities(table[c])[t] for c, t in zip(context, token, strict=True)]
        rows.append(
            Row(
                context=context,
                token=token,
                mask=[0 if i == 2 else int(draw.random() < 0.8) for _ in range(length)],
                old=[x + draw.gauss(0, 0.5) for x in own],
                ref=[x + draw.gauss(0, 0.7) for x in own],
                advantage=[draw.gauss(0, 1)] * length,
                weight=[draw.uniform(0.5, 2.0) for _ in range(length)],
            )
        )
    return rows


def padding_row(mask: int) -> Row:
    """Two tokens that must count for nothing, whatever they hold."""
    nothing = [NAN, float("inf")]
    return Row(
        context=[0, 1],
        token=[1, 0],
        mask=[mask, mask],
        old=nothing,
        ref=nothing,
        advantage=nothing,
        weight=nothing,
        is_padding=True,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which cluster the step runs on, and how its rows are cut and stored."""

    dp_size: int = 1
    cut: str = "whole"  # whole, fixed, dynamic or planned
    padding: int = 0  # rows beyond the least
    padding_mask: int = 0
    shuffled: int | None = None
    form: str = "padded"  # padded, packed or jagged
    wider: int = 0


@functools.cache
def _plan(lengths: tuple[int, ...], is_padding: tuple[bool, ...], dp_size: int) -> eq.StepPlan:
    spec = eq.StepSpec(dp_size=dp_size, max_token_len_per_gpu=CAP)
    return eq.plan_step(list(lengths), spec, is_padding=list(is_padding))


def lay_out(rows: Sequence[Row], layout: Layout) -> list[list[list[Row]]]:
    """Rows as [rank][micro-batch][row]; all ranks run as many micro-batches."""
    rows = list(rows)
    missing = -len(rows) % layout.dp_size + layout.padding * layout.dp_size
    rows += [padding_row(layout.padding_mask) for _ in range(missing)]
    if layout.shuffled is not None:
        random.Random(layout.shuffled).shuffle(rows)
    if layout.cut == "planned":
        plan = _plan(tuple(r.length for r in rows), tuple(r.is_padding for r in rows), layout.dp_size)
        return [[[rows[i] for i in micro] for micro in plan.micro_batches(rank)[0]] for rank in range(layout.dp_size)]
    share = len(rows) // layout.dp_size
    ranks = [_cut(rows[rank * share : (rank + 1) * share], layout.cut) for rank in range(layout.dp_size)]
    most = max(len(rank) for rank in ranks)
    for rank in ranks:
        while len(rank) < most:
            rank.append([padding_row(0)])  # a zero-weight micro-batch
    return ranks


def _cut(rows: list[Row], how: str) -> list[list[Row]]:
    if how == "whole":
        return [rows]
    if how == "fixed":
        return [rows[i : i + 2] for i in range(0, len(rows), 2)]
    assert how == "dynamic"
    micro_batches: list[list[Row]] = []
    for row in rows:
        if micro_batches and sum(r.length for r in micro_batches[-1]) + row.length <= CAP:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return micro_batches


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows as tensors in one of the forms."""

    columns: dict[str, torch.Tensor]
    mask: torch.Tensor
    segment_ids: torch.Tensor | None
    is_padding: list[bool] | None


def tensors(rows: Sequence[Row], form: str, wider: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Padded with junk where no token is, packed into one row (padding rows in no segment), or jagged."""
    names = ("context", "token", "old", "ref", "advantage", "weight")

    def column(row: Row, name: str) -> torch.Tensor:
        return torch.tensor(getattr(row, name), dtype=torch.long if name in ("context", "token") else dtype)

    lists = {name: [column(row, name) for row in rows] for name in names}
    masks = [torch.tensor(row.mask) for row in rows]
    is_padding = [row.is_padding for row in rows]
    if form == "packed":
        ids = [torch.full((r.length,), 0 if r.is_padding else i + 1) for i, r in enumerate(rows)]
        packed = {name: torch.cat(parts).unsqueeze(0) for name, parts in lists.items()}
        return Batch(
            columns=packed, mask=torch.cat(masks).unsqueeze(0), segment_ids=torch.cat(ids).unsqueeze(0), is_padding=None
        )
    if form == "jagged":
        return Batch(
            columns={name: jagged(parts) for name, parts in lists.items()},
            mask=jagged(masks),
            segment_ids=None,
            is_padding=is_padding,
        )
    width = max(row.length for row in rows) + wider
    columns: dict[str, torch.Tensor] = {}
    for name, parts in lists.items():
        dense = torch.full((len(rows), width), 0 if parts[0].dtype == torch.long else NAN, dtype=parts[0].dtype)
        for i, part in enumerate(parts):
            dense[i, : part.numel()] = part
            if dense.is_floating_point():
                hidden = ~masks[i].bool().expand(part.numel())
                dense[i, : part.numel()][hidden] = JUNK[i % 3]
        columns[name] = dense
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row_mask in enumerate(masks):
        mask[i, : row_mask.numel()] = row_mask
    return Batch(columns=columns, mask=mask, segment_ids=None, is_padding=is_padding)


def cut(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(cast("tuple[torch.Tensor, ...]", values.split(lengths)))


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def share(
    name: str,
    mode: str,
    batch: Batch,
    table: torch.Tensor,
    settings: Settings,
    counts: eq.LossDenominators,
    dp_size: int,
) -> tuple[torch.Tensor, dict[str, AnyMetric]]:
    """One micro-batch's loss and metrics, through the model."""
    context, token = batch.columns["context"], batch.columns["token"]
    lengths: list[int] | None = None
    if context.is_nested:
        view: Any = context
        lengths = view.offsets().diff().tolist()
        context, token = view.values(), _values(token)
    logits = table[context]
    log_p = logits.log_softmax(-1)
    own = log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    value = logits[..., 0]
    if lengths is not None:
        own, entropy, value = (jagged(cut(x, lengths)) for x in (own, entropy, value))
    common: dict[str, Any] = {"loss_agg_mode": mode, "denominators": counts, "dp_size": dp_size}
    common |= {"loss_scale_factor": settings.horizon, "prefix": ""}
    where: dict[str, Any] = {"segment_ids": batch.segment_ids, "is_padding": batch.is_padding}
    if name == "sft":
        return eq.sft_loss(own, batch.mask, **common, **where)
    if name == "value":
        old, target = batch.columns["old"], batch.columns["ref"]
        return eq.value_loss(value, old, target, batch.mask, clip=settings.clip_low, **common, **where)
    inputs = eq.PolicyInputs(
        log_prob=own,
        old_log_prob=batch.columns["old"],
        advantages=batch.columns["advantage"],
        loss_mask=batch.mask,
        ref_log_prob=batch.columns["ref"],
        entropy=entropy,
        rollout_weights=batch.columns["weight"],
        **where,
    )
    config = eq.PolicyConfig(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        kl_coef=settings.kl_coef,
        entropy_coef=settings.entropy_coef,
    )
    return eq.policy_loss(name, inputs, config, **common)


def _values(column: Any) -> torch.Tensor:
    return column.values()


def count(batch: Batch, group: Any = None) -> eq.LossDenominators:
    return eq.LossDenominators.of(batch.mask, is_padding=batch.is_padding, segment_ids=batch.segment_ids, group=group)


@functools.cache
def _batches(num_rows: int, layout: Layout, dtype: torch.dtype) -> tuple[list[list[Batch]], eq.LossDenominators]:
    batches = [
        [tensors(micro, layout.form, layout.wider, dtype) for micro in rank]
        for rank in lay_out(make_rows(num_rows), layout)
    ]
    each = [count(batch) for rank in batches for batch in rank]
    tokens, rows = sum(c.num_tokens for c in each), sum(c.num_rows for c in each)
    return batches, eq.LossDenominators(num_tokens=tokens, num_rows=rows)


def train_step(
    num_rows: int,
    layout: Layout,
    name: str,
    mode: str,
    settings: Settings,
    dtype: torch.dtype = torch.float64,
) -> Plain:
    """The step on all ranks of ``layout``, one after the other: what the mean over ranks gives."""
    batches, counts = _batches(num_rows, layout, dtype)
    table = torch.tensor(make_table(), dtype=dtype, requires_grad=True)
    loss = 0.0
    parts: list[dict[str, AnyMetric]] = []
    for rank in batches:
        for batch in rank:
            found, metrics = share(name, mode, batch, table, settings, counts, layout.dp_size)
            found.backward()
            loss += found.item() / layout.dp_size
            parts.append(metrics)
    assert table.grad is not None
    gradient = cast("list[list[float]]", (table.grad / layout.dp_size).double().tolist())
    return Plain(loss=loss, gradient=gradient, metrics=eq.metric_values(eq.merge_metrics(parts)))


def distance(a: Plain, b: Plain) -> float:
    """Largest difference of loss, gradient and metrics, relative where they are above 1; inf where names differ."""
    if a.metrics.keys() != b.metrics.keys():
        return float("inf")
    pairs = [(a.loss, b.loss), *((a.metrics[key], b.metrics[key]) for key in a.metrics)]
    pairs += list(zip(np.ravel(a.gradient).tolist(), np.ravel(b.gradient).tolist(), strict=True))
    gaps = [abs(x - y) / max(1.0, abs(y)) for x, y in pairs]
    return float("inf") if any(gap != gap for gap in gaps) else max(gaps)


def masked(row: Row) -> Row:
    """The row with a mask of zeros."""
    return replace(row, mask=[0] * row.length)
