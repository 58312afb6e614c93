"""Attention over packed rows in verl on CPUs, against plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
)

from equipoise.errors import InvalidInput
from equipoise.trainer_hooks.verl_on_cpu.attention import NAME, row_lengths
from tests.unit.cpu_models import FAMILIES, SHAPE, VOCABULARY, model_of, one_stream


@pytest.fixture(autouse=True)
def _one_stream() -> None:
    one_stream()


LENGTHS = (7, 1, 19, 12)


def _rows() -> list[torch.Tensor]:
    return [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]


def _packed(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(list(rows))[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_rows_start_where_a_position_does_not_follow() -> None:
    assert row_lengths(torch.tensor([0, 1, 2, 0, 0, 1, 5, 6])) == [3, 1, 2, 2]
    assert row_lengths(torch.tensor([4, 5, 6])) == [3]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_single_rows(family: str) -> None:
    model, reference = model_of(family, NAME), model_of(family, "sdpa")
    rows = _rows()
    weights = [torch.randn(len(row), 1) for row in rows]

    packed = model(**_packed(rows), use_cache=False).logits[0]
    (
        packed.log_softmax(-1) * torch.cat(weights) if packed.shape[-1] > 1 else packed * torch.cat(weights)
    ).sum().backward()
    single: list[torch.Tensor] = []
    for row, weight in zip(rows, weights, strict=True):
        logits = reference(input_ids=row[None], use_cache=False).logits[0]
        (logits.log_softmax(-1) * weight if logits.shape[-1] > 1 else logits * weight).sum().backward()
        single.append(logits)

    torch.testing.assert_close(packed, torch.cat(single), atol=1e-5, rtol=1e-5)
    expected = _gradients(reference)
    assert expected.keys() == _gradients(model).keys()
    for name, gradient in _gradients(model).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * max(1.0, scale), rtol=1e-5, msg=name)


def test_packed_rows_do_not_see_each_other() -> None:
    model = model_of("qwen2", NAME)
    rows = _rows()
    before = model(**_packed(rows), use_cache=False).logits[0, -LENGTHS[-1] :]
    rows[0] = (rows[0] + 1) % VOCABULARY
    after = model(**_packed(rows), use_cache=False).logits[0, -LENGTHS[-1] :]
    torch.testing.assert_close(before, after, atol=0, rtol=0)


def test_rows_may_come_as_edges() -> None:
    model = model_of("llama", NAME)
    inputs = _packed(_rows())
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    by_edges = model(**inputs, cu_seq_lens_q=edges, cu_seq_lens_k=edges, use_cache=False).logits
    torch.testing.assert_close(by_edges, model(**inputs, use_cache=False).logits, atol=0, rtol=0)
    with pytest.raises(InvalidInput, match="cu_seq_lens_q must cover one sequence"):
        model(**inputs, cu_seq_lens_q=edges[:-1], cu_seq_lens_k=edges[:-1], use_cache=False)


def test_gradient_checkpointing_keeps_the_rows() -> None:
    plain, checkpointed = model_of("qwen2", NAME).train(), model_of("qwen2", NAME).train()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = _packed(_rows())
    for model in (plain, checkpointed):
        model(**inputs, use_cache=False).logits.logsumexp(-1).sum().backward()
    for name, gradient in _gradients(plain).items():
        torch.testing.assert_close(gradient, _gradients(checkpointed)[name])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padded_batches_equal_sdpa(family: str) -> None:
    rows = _rows()
    width = max(LENGTHS)
    input_ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    got = model_of(family, NAME)(**inputs, use_cache=False).logits
    expected = model_of(family, "sdpa")(**inputs, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_cache_equals_sdpa(padded: bool) -> None:
    input_ids = torch.randint(3, VOCABULARY, (2, 9))
    mask = torch.ones_like(input_ids)
    if padded:
        mask[0, :4] = 0
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    outputs = [
        model_of("qwen2", attention).eval().generate(input_ids, attention_mask=mask, generation_config=settings)
        for attention in (NAME, "sdpa")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_a_later_chunk_sees_the_cache() -> None:
    model = model_of("llama", NAME).eval()
    input_ids = torch.randint(3, VOCABULARY, (1, 12))
    whole = model(input_ids=input_ids, use_cache=False).logits
    cache = model(input_ids=input_ids[:, :7], use_cache=True).past_key_values
    later = model(input_ids=input_ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(later, whole[:, 7:], atol=1e-5, rtol=1e-5)


def _scores(monkeypatch: pytest.MonkeyPatch, attention: str) -> int:
    """Scores that one forward over the packed rows computes, in one layer and head, and elements of its masks."""
    counted: list[int] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted.append(query.shape[0] * query.shape[2] * key.shape[2])
        return original(query, key, *args, **kwargs)

    model = model_of("qwen2", attention)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        model(**_packed(_rows()), use_cache=False)
    return sum(counted) // SHAPE["num_hidden_layers"]


def test_packed_rows_cost_the_sum_of_their_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _scores(monkeypatch, NAME) == sum(length**2 for length in LENGTHS)
    assert _scores(monkeypatch, "sdpa") == sum(LENGTHS) ** 2


def test_packed_rows_build_no_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[object] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def looking(*args: Any, attn_mask: object = None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looking)
    model_of("qwen2", NAME)(**_packed(_rows()), use_cache=False)
    assert len(masks) == len(LENGTHS) * SHAPE["num_hidden_layers"]
    assert set(masks) == {None}
