"""The proof that shapes compute each row bitwise equally, and what it rejects."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from equipoise.errors import InvalidInput
from equipoise.rollout.decode import proof
from tests.numerics.decode_models import SHAPE, asks, engine, model


def _add_up(terms: torch.Tensor) -> torch.Tensor:
    """In float32, one after the other; ``cumsum`` would add in float64."""
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


def test_null_sums_show_an_order_that_half_precision_hides() -> None:
    x, weight = proof.null_sums(8, 64, 50, torch.float32)
    plain = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    differing: list[float] = []
    for inputs in (x, plain):
        terms = inputs[:, None] * weight
        forward, backward = (_add_up(order).bfloat16() for order in (terms, terms.flip(-1)))
        differing.append(float((forward != backward).float().mean()))
    assert differing[0] > 0.8
    assert differing[1] < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [48, 576])
def test_null_sums_show_in_every_output_that_one_term_moved(inputs: int, dtype: torch.dtype) -> None:
    x, weight = proof.null_sums(proof.LEAST_ROWS * proof.DRAWS, inputs, 50, dtype)
    terms = x.float()[:, None] * weight.float()
    differs = _add_up(terms).to(dtype) != _add_up(terms.roll(1, -1)).to(dtype)
    assert differs.any(0).all()


def _shuffled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Reversed terms would not do: kernels that add lanes up pairwise give them the same bits."""
    places = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0))
    return torch.matmul(x[..., places], weight[:, places].T)


def _halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two partial sums, added at the end, as kernels do that split a long sum."""
    half = x.shape[-1] // 2
    first = torch.matmul(x[..., :half].float(), weight[:, :half].float().T)
    return (first + torch.matmul(x[..., half:].float(), weight[:, half:].float().T)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [48, 64, 576])
@pytest.mark.parametrize("other", [_shuffled, _halves])
def test_a_size_at_which_one_output_sums_in_another_order_is_found(
    other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, 32, bias=False, dtype=dtype))
    real = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = real(x, weight, bias)
        if len(x) == 6:
            out[..., -1] = other(x, weight[-1:])[..., 0]
        return out

    assert proof.linear_sizes(layer, (4, 6, 8)) == {4, 6, 8}
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert proof.linear_sizes(layer, (4, 6, 8)) == {4, 8}


class _MixesRows(torch.nn.Module):
    """A layer norm that also sees the other rows, as experts with a common capacity do."""

    def __init__(self, norm: Any, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.sizes = sizes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.norm(hidden)
        return out + 1e-3 * out.mean(0, keepdim=True) if len(out) in self.sizes else out


def test_a_shape_that_gives_other_bits_is_not_used() -> None:
    mixed = model()
    mixed.model.norm = _MixesRows(mixed.model.norm, (8,))
    made = engine(mixed)
    assert made.passes.sizes == (4, 16)
    assert made.passes.size_for(5) == 16
    assert made.generate(asks()) == engine().generate(asks())


def test_a_model_whose_rows_mix_is_refused() -> None:
    mixed = model()
    mixed.model.norm = _MixesRows(mixed.model.norm, (4, 8, 16))
    with pytest.raises(InvalidInput, match="Qwen2ForCausalLM"):
        engine(mixed)


def test_windows_are_refused() -> None:
    config = transformers.MistralConfig(**SHAPE, sliding_window=16)
    with pytest.raises(InvalidInput, match=r"sliding_window.*16"):
        engine(transformers.MistralForCausalLM(config))
