"""A packed row against each sequence run alone, in float64, for tiny models of several families."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from equipoise.errors import InvalidInput
from equipoise.training.engine import _kernels, attention
from equipoise.training.engine.attention import PackedRows, packed

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed in part only.

LENGTHS = (7, 1, 12, 4)
EDGES = (0, 7, 8, 20, 24)
TINY: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 9, "sliding_window": 5, **TINY}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**TINY),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention=False
    ),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=4),
}


def tiny(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(3)
    config = CONFIGS[name]()
    config._attn_implementation = implementation
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # the default init leaves attention almost uniform
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return model


@pytest.fixture(autouse=True)
def _everything_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    attention.register()

    # Gemma's norms sum the gradients of their weights in float32, whatever the model's type.
    def kept(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else x.to(torch.float32)

    monkeypatch.setattr(torch.Tensor, "float", kept)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 31, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])[None]


def slopes(model: PreTrainedModel, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a sum with a weight for each logit."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    model.zero_grad()
    (logits * weights.to(logits.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([model(ids, use_cache=False).logits for ids in tokens()[0].split(LENGTHS, 1)], 1)


def by_context(model: PreTrainedModel) -> torch.Tensor:
    with packed(torch.tensor(EDGES)):
        return model(tokens()[0], position_ids=tokens()[1], use_cache=False).logits


def by_positions(model: PreTrainedModel) -> torch.Tensor:
    return model(tokens()[0], position_ids=tokens()[1], use_cache=False).logits


def by_positions_with_cache(model: PreTrainedModel) -> torch.Tensor:
    return model(tokens()[0], position_ids=tokens()[1], use_cache=True).logits


def by_edges(model: PreTrainedModel) -> torch.Tensor:
    edges = torch.tensor(EDGES)
    return model(tokens()[0], use_cache=False, cu_seq_lens_q=edges, cu_seq_lens_k=edges).logits


def two_rows(model: PreTrainedModel) -> torch.Tensor:
    ids, positions = (x.view(2, 12) for x in tokens())  # the third sequence is cut in two
    whole = model(ids, position_ids=positions, use_cache=False).logits
    return whole.flatten(0, 1)[None]


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(mine[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def check(name: str, packed_run: Callable[[PreTrainedModel], torch.Tensor], tolerance: float = 1e-10) -> None:
    model = tiny(name, attention.NAME)
    expected, got = alone(model), packed_run(model)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    theirs, mine = slopes(model, expected), slopes(model, got)
    equal(mine, theirs, tolerance)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("run", [by_context, by_positions])
def test_a_packed_row_is_each_sequence_alone(name: str, run: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    check(name, run)


@pytest.mark.parametrize("run", [by_edges, by_positions_with_cache])
def test_edges_and_caches_are_understood_as_well(run: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    # Without position_ids, positions run on; rotary embeddings see differences alone, but are computed in float32.
    check("mistral", run, 1e-5 if run is by_edges else 1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_what_transformers_computes(name: str) -> None:
    # The eager formula is the only one there with a cap; it rounds the softmax to float32.
    reference = tiny(name, "eager" if name == "gemma2" else "sdpa")
    model = tiny(name, attention.NAME)
    expected, got = alone(reference), by_context(model)
    tolerance = 1e-5 if name == "gemma2" else 1e-10
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    equal(slopes(model, got), slopes(reference, expected), tolerance * 10)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_several_rows_of_packed_sequences(name: str) -> None:
    model, reference = tiny(name, attention.NAME), tiny(name, "eager")
    torch.testing.assert_close(two_rows(model), two_rows(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [by_context, by_positions])
def test_gradient_checkpointing_outlives_the_context(
    reentrant: bool, run: Callable[[PreTrainedModel], torch.Tensor]
) -> None:
    model = tiny("gemma2", attention.NAME)
    expected = slopes(model, alone(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    calls = 0
    before = attention.packed_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return before(*args, **kwargs)

    AttentionInterface.register(attention.NAME, counted)
    got = slopes(model, run(model))
    assert calls == 4  # two layers, forward and again in backward
    equal(got, expected, 1e-10)


class Largest(TorchDispatchMode):
    """Elements of the largest boolean tensor, and of the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = self.any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.any = max(self.any, leaf.numel())
                self.mask = max(self.mask, leaf.numel() if leaf.dtype == torch.bool else 0)
        return made


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stated", [True, False])
def test_nothing_of_tokens_by_tokens_is_made(name: str, stated: bool) -> None:
    model = tiny(name, attention.NAME)
    length, count = 8, 64
    total = length * count
    ids = torch.ones(1, total, dtype=torch.long)
    positions = torch.arange(length).repeat(count)[None]
    with Largest() as largest, torch.no_grad():
        if stated:
            with packed(range(0, total + 1, length)):
                model.get_decoder()(ids, position_ids=positions, use_cache=False)
        else:
            model.get_decoder()(ids, position_ids=positions, use_cache=False)
    assert largest.mask <= total
    assert largest.any < total * total // 8

    reference = tiny(name, "eager")
    with Largest() as largest, torch.no_grad():
        reference.get_decoder()(ids, position_ids=positions, use_cache=False)
    assert largest.any >= total * total  # the ruler measures what it should


@pytest.mark.parametrize("scaling", [0.9, None])
@pytest.mark.parametrize(("window", "softcap"), [(5, None), (5, 0.7), (None, 0.7), (40, None), (33, None)])
def test_blocks_of_queries_are_one_mask(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, scaling: float | None
) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(heads, 33, 6, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    options = _kernels.Options(scaling=scaling, window=window, softcap=softcap)
    monkeypatch.setattr(_kernels, "BLOCK", 8)
    got = _kernels.varlen(q, k, v, (33,), options)
    for head in range(4):
        for i in range(33):
            first = 0 if window is None else max(0, i - window + 1)
            scores = (scaling or 6**-0.5) * k[head // 2, first : i + 1] @ q[head, i]
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            expected = torch.softmax(scores, 0) @ v[head // 2, first : i + 1]
            torch.testing.assert_close(got[i, head], expected, rtol=1e-12, atol=1e-12)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """What flash_attn documents, query by query; of a window it takes the tokens before and after a query's own."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    edges = cu_seqlens_q.tolist()
    assert cu_seqlens_k.tolist() == edges
    assert max_seqlen_q == max_seqlen_k == max(end - start for start, end in itertools.pairwise(edges))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(edges):
        for i, head in itertools.product(range(start, end), range(q.shape[1])):
            first, last = (start if window_size[0] < 0 else max(start, i - window_size[0])), i + 1
            of = head * k.shape[1] // q.shape[1]
            scores = scale * k[first:last, of] @ q[i, head]
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out[i, head] = torch.softmax(scores, 0) @ v[first:last, of]
    return out


@pytest.mark.parametrize("scaling", [0.9, None])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 0.7), (20, None)])
def test_flash_attn_is_asked_for_what_one_by_one_computes(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, scaling: float | None
) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(heads, 24, 6, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    options = _kernels.Options(scaling=scaling, window=window, softcap=softcap)
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)  # pyright: ignore[reportArgumentType]
    got = _kernels._flash_attn(q, k, v, LENGTHS, options)  # pyright: ignore[reportPrivateUsage]
    torch.testing.assert_close(got, _kernels.one_by_one(q, k, v, LENGTHS, options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_autocast_decides_the_type(softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 9, 4, generator=draw) for heads in (4, 2, 2))
    half = [x.bfloat16() for x in (q, k, v)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = PackedRows.of([0, 4, 9])
        return attention.packed_attention(torch.nn.Module(), q, k, v, rows, softcap=softcap)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = run(q, k, half[2]), run(*half)  # float32 after rotary embeddings, but for the values
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_generates_what_transformers_generates_from_padded_prompts(name: str) -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [1, 2, 3, 4, 5, 6]])
    mask = (ids != 0).long()
    settings: Any = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    models: list[Any] = [tiny(name, way, torch.float32) for way in (attention.NAME, "eager")]
    mine, theirs = (model.generate(ids, attention_mask=mask, **settings) for model in models)
    assert mine.tolist() == theirs.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (None, 5.0)])
def test_kernels_of_the_gpu_agree_with_one_by_one(window: int | None, softcap: float | None) -> None:
    lengths, options = (70, 1, 129), _kernels.Options(scaling=0.3, window=window, softcap=softcap)
    drawn = [torch.randn(h, sum(lengths), 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
    half = [x.clone().requires_grad_() for x in drawn]
    full = [x.double().requires_grad_() for x in drawn]
    got = _kernels.varlen(half[0], half[1], half[2], lengths, options)
    expected = _kernels.one_by_one(full[0], full[1], full[2], lengths, options)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)
    got.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(half, full, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=5e-2, atol=5e-2)


def test_refuses_dropout_in_training_alone() -> None:
    model = tiny("llama", attention.NAME)
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            setattr(layer, "attention_dropout", 0.1)  # noqa: B010
    by_context(model.eval())
    with pytest.raises(InvalidInput, match=r"attention_dropout.*\b0\b"):
        by_context(model.train())


@pytest.mark.parametrize(
    ("edges", "kwargs", "text"),
    [
        ([0, 7, 23], {}, "input_ids must be (1, 23) in this packed context, got (1, 24)"),
        (EDGES, {"attention_mask": torch.ones(1, 24)}, "attention_mask must be None in a packed context"),
        (EDGES, {"cu_seq_lens_q": torch.tensor(EDGES)}, "cu_seq_lens_q must be None in a packed context"),
    ],
)
def test_refuses_what_contradicts_the_context(edges: Any, kwargs: dict[str, Any], text: str) -> None:
    model = tiny("llama", attention.NAME)
    with packed(edges), pytest.raises(InvalidInput) as caught:
        model(tokens()[0], position_ids=tokens()[1], use_cache=False, **kwargs)
    assert text in str(caught.value)


def test_refuses_a_second_call_on_a_filled_cache_in_the_context() -> None:
    model = tiny("llama", attention.NAME)
    with packed([0, 3]):
        cache = model(torch.ones(1, 3, dtype=torch.long)).past_key_values
        with pytest.raises(InvalidInput, match="past_key_values"):
            model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_refuses_terms_of_the_scores_that_it_does_not_compute(name: str) -> None:
    x = torch.zeros(1, 1, 2, 4)
    kwargs: dict[str, Any] = {name: torch.zeros(1)}
    with pytest.raises(InvalidInput, match=rf"{name}"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None, **kwargs)


def test_refuses_packed_rows_of_a_layer_that_looks_ahead() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(InvalidInput, match="is_causal"):
        attention.packed_attention(torch.nn.Module(), x, x, x, PackedRows.of([0, 2]), is_causal=False)


@pytest.mark.parametrize("edges", [[], [0], [1, 3], [0, 2, 2], [0, 3, 2]])
def test_refuses_edges_that_do_not_rise_from_zero(edges: list[int]) -> None:
    with pytest.raises(InvalidInput, match="cu_seqlens must"):
        PackedRows.of(edges)
