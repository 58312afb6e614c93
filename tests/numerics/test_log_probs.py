"""Chunked log-probabilities against log_softmax of whole logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise.errors import InvalidInput
from equipoise.training.engine.log_probs import IGNORE, default_chunk_tokens, next_token_labels, token_log_probs

TOKENS, VOCAB, WIDTH = 23, 37, 5
MIB = 2**20
F64 = torch.float64


def inputs(*, dtype: torch.dtype = F64, bias: bool = True, scale: float = 3.0) -> dict[str, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(7)
    made = {
        "hidden": scale * torch.randn(TOKENS, WIDTH, generator=draw, dtype=F64),
        "weight": torch.randn(VOCAB, WIDTH, generator=draw, dtype=F64),
        "bias": torch.randn(VOCAB, generator=draw, dtype=F64) if bias else None,
    }
    return {name: None if x is None else x.to(dtype).requires_grad_() for name, x in made.items()}


def drawn_labels() -> torch.Tensor:
    labels = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(8))
    labels[[3, TOKENS - 1]] = IGNORE
    return labels


def upstream() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    return torch.randn(TOKENS, generator=draw, dtype=F64), torch.randn(TOKENS, generator=draw, dtype=F64)


def whole(
    x: dict[str, Any], labels: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results from logits of all tokens at once, through autograd."""
    logits = x["hidden"] @ x["weight"].T
    if x["bias"] is not None:
        logits = logits + x["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    kept = labels != IGNORE
    log_probs = torch.zeros(TOKENS, dtype=log_p.dtype)
    log_probs[kept] = log_p[kept, labels[kept]]
    return log_probs, torch.distributions.Categorical(logits=logits / temperature, validate_args=False).entropy()


def gradients(results: tuple[torch.Tensor, torch.Tensor | None], x: dict[str, Any]) -> list[torch.Tensor]:
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, upstream(), strict=True) if r is not None]
    total = torch.stack([(r * g).sum() for r, g in pairs]).sum()
    return list(torch.autograd.grad(total, [v for v in x.values() if v is not None]))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 23, 1024])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.5)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_whole_logits_in_float64(
    chunk_tokens: int, temperature: float, softcap: float | None, bias: bool
) -> None:
    x, labels = inputs(bias=bias), drawn_labels()
    expected = whole(x, labels, temperature, softcap)
    got = token_log_probs(
        **x,  # pyright: ignore[reportArgumentType]
        labels=labels,
        temperature=temperature,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    for mine, theirs in zip((*got, *gradients(got, x)), (*expected, *gradients(expected, x)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_without_entropy_gradients_are_those_of_the_log_probabilities_alone() -> None:
    x, labels = inputs(), drawn_labels()
    log_probs, entropy = token_log_probs(**x, labels=labels, chunk_tokens=4)  # pyright: ignore[reportArgumentType]
    assert entropy is None
    expected = whole(x, labels, 1.0, None)[0]
    for mine, theirs in zip(gradients((log_probs, None), x), gradients((expected, None), x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, generator=draw, dtype=F64).requires_grad_() for shape in ((4, 3), (5, 3), (5,))
    )
    labels = torch.tensor([0, IGNORE, 4, 2])

    def both(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = token_log_probs(
            h, w, labels, bias=b, temperature=0.8, softcap=softcap, chunk_tokens=3, with_entropy=True
        )
        assert entropy is not None
        return log_probs, entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("learned", ["hidden", "weight", "bias"])
def test_only_what_is_learned_gets_a_gradient(learned: str) -> None:
    x, labels = inputs(), drawn_labels()
    for name, tensor in x.items():
        assert tensor is not None
        tensor.requires_grad_(name == learned)
    token_log_probs(**x, labels=labels, chunk_tokens=4)[0].sum().backward()  # pyright: ignore[reportArgumentType]
    assert {name for name, tensor in x.items() if tensor is not None and tensor.grad is not None} == {learned}


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made


@pytest.mark.parametrize(("dtype", "softcap"), [(F64, None), (torch.bfloat16, 2.0)])
def test_logits_of_the_whole_row_are_never_made_nor_saved(dtype: torch.dtype, softcap: float | None) -> None:
    tokens, vocab, width, chunk = 64, 97, 4, 8
    hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab, dtype=dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,))
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        log_probs, entropy = token_log_probs(
            hidden, weight, labels, bias=bias, softcap=softcap, chunk_tokens=chunk, with_entropy=True
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.numel == chunk * vocab
    assert saved
    assert max(saved) <= max(tokens * width, vocab * width)

    with Largest() as largest:
        torch.log_softmax(hidden @ weight.T, -1)
    assert largest.numel == tokens * vocab  # the ruler measures what it should


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that torch holds during the call above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    profiler: Any = seen.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(held))


@pytest.mark.parametrize(
    ("with_entropy", "learns", "softcap"),
    [(False, False, None), (True, False, 2.0), (False, True, None), (True, True, None), (True, True, 2.0)],
)
def test_holds_logits_of_one_chunk_and_no_copy_of_them(with_entropy: bool, learns: bool, softcap: float | None) -> None:
    tokens, vocab, chunk = 1024, 8000, 256
    hidden, weight = (torch.randn(n, 4, requires_grad=learns) for n in (tokens, vocab))
    labels = torch.randint(0, vocab, (tokens,))

    def call() -> None:
        log_probs, entropy = token_log_probs(
            hidden, weight, labels, softcap=softcap, chunk_tokens=chunk, with_entropy=with_entropy
        )
        if learns:
            (log_probs.sum() if entropy is None else log_probs.sum() + entropy.sum()).backward()

    call()
    logits = chunk * vocab * 4
    assert logits <= peak_bytes(call) < 1.5 * logits  # what is reduced at once is 1 MiB


def test_without_a_setting_chunks_are_even_and_take_32_mib_on_a_cpu() -> None:
    tokens, vocab = 300, 49152
    chunk = default_chunk_tokens(vocab, torch.float32, torch.device("cpu"))
    assert chunk * vocab * 4 <= 32 * MIB < (chunk + 1) * vocab * 4
    hidden, weight = torch.randn(tokens, 2), torch.randn(vocab, 2)
    labels = torch.randint(0, vocab, (tokens,))
    logits = tokens // 2 * vocab * 4  # two chunks, as one of 170 tokens would leave 130
    assert logits <= peak_bytes(lambda: token_log_probs(hidden, weight, labels)) < logits + 1.5 * MIB


@pytest.mark.parametrize(
    ("vocab", "dtype", "device", "tokens"),
    [
        (2**17, torch.float64, "cpu", 32),
        (2**17, torch.bfloat16, "cpu", 64),
        (2**17, torch.bfloat16, "cuda", 1024),
        (2**25, torch.float32, "cpu", 1),
    ],
)
def test_default_chunk_follows_vocabulary_type_and_device(
    vocab: int, dtype: torch.dtype, device: str, tokens: int
) -> None:
    assert default_chunk_tokens(vocab, dtype, torch.device(device)) == tokens


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_second_backward_gives_the_same_gradients(with_entropy: bool) -> None:
    """The first one overwrites the logits that forward kept."""
    x: dict[str, Any] = inputs()
    result = token_log_probs(
        x["hidden"], x["weight"], drawn_labels(), bias=x["bias"], chunk_tokens=8, softcap=2.0, with_entropy=with_entropy
    )
    total = sum((part * up).sum() for part, up in zip(result, upstream(), strict=True) if part is not None)
    assert isinstance(total, torch.Tensor)
    leaves = list(x.values())
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    again = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_backward_computes_all_logits_but_those_of_the_last_chunk_again() -> None:
    x: dict[str, Any] = inputs()
    rows: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and out.shape[-1] == VOCAB:
                rows.append(len(out))
            return out

    with Products():
        log_probs, _ = token_log_probs(x["hidden"], x["weight"], drawn_labels(), chunk_tokens=8)
        assert rows == [7, 8, 8]
        log_probs.sum().backward()
    assert rows == [7, 8, 8, 8, 7]


def test_half_precision_is_summed_in_float32() -> None:
    half, labels = inputs(dtype=torch.bfloat16), drawn_labels()
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in half.items()}
    got = token_log_probs(**half, labels=labels, chunk_tokens=2, with_entropy=True)  # pyright: ignore[reportArgumentType]
    expected = whole(exact, labels, 1.0, None)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(got, half), gradients(expected, exact), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs.bfloat16(), rtol=2**-7, atol=1e-5)  # one rounding, at the end


def test_autocast_changes_nothing() -> None:
    x, labels = inputs(dtype=torch.float32), drawn_labels()
    plain = token_log_probs(**x, labels=labels)[0]  # pyright: ignore[reportArgumentType]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_log_probs(**x, labels=labels)[0]  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_a_banned_token_has_no_part_in_entropy_or_gradient() -> None:
    x, labels = inputs(), drawn_labels()
    labels = torch.where(labels == 5, 6, labels)
    bias = x["bias"]
    assert bias is not None
    banned = bias.detach().clone()
    banned[5] = -torch.inf
    x["bias"] = banned.requires_grad_()
    got = token_log_probs(**x, labels=labels, with_entropy=True)  # pyright: ignore[reportArgumentType]
    grads = gradients(got, x)
    assert all(t is not None and bool(torch.isfinite(t).all()) for t in (*got, *grads))
    assert float(grads[2][5]) == 0
    assert not bool(grads[1][5].any())


def test_no_tokens_at_all_stay_in_the_graph() -> None:
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    weight = torch.ones(VOCAB, WIDTH, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long))
    log_probs.sum().backward()
    assert weight.grad is not None
    assert not bool(weight.grad.any())


def test_next_token_labels_end_with_each_sequence() -> None:
    ids = torch.arange(10, 17)[None]
    assert next_token_labels(ids, torch.tensor([0, 1, 4, 7])).tolist() == [[IGNORE, 12, 13, IGNORE, 15, 16, IGNORE]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": torch.zeros(1, 3, 2)}, "hidden must be (tokens, width), got (1, 3, 2)"),
        ({"weight": torch.zeros(4, 3)}, "weight must be (vocab, 2), got (4, 3)"),
        ({"labels": torch.zeros(2, dtype=torch.long)}, "labels must be (3,), got (2,)"),
        ({"labels": torch.tensor([0, 4, 1])}, "labels must be -100 or in 0..3, got 4"),
        ({"bias": torch.zeros(3)}, "bias must be (4,), got (3,)"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"softcap": -1.0}, "softcap must be above 0, got -1.0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "hidden": torch.zeros(3, 2),
        "weight": torch.zeros(4, 2),
        "labels": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(InvalidInput) as caught:
        token_log_probs(**(good | change))
    assert text in str(caught.value)
