"""The decode engine against transformers' own forward and against itself: bits do not depend on company or moves."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from equipoise.errors import InvalidInput
from equipoise.rollout.decode import DecodeConfig, DecodeEngine, proof
from equipoise.rollout.decode.sampling import draw, uniform
from equipoise.rollout.transfer import RequestState, Sampling

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def model(kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config, cls = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return cls(config(**(SHAPE | changes))).to(dtype).eval()


def engine(made: Any | None = None, **settings: Any) -> DecodeEngine:
    settings = {"tiers": (16, 8, 4), "num_blocks": 128, "block_size": 8, "chunk_tokens": 32} | settings
    return DecodeEngine(model() if made is None else made, DecodeConfig(**settings))


def asks(number: int = 14, *, greedy: bool = False) -> list[RequestState]:
    draws = random.Random(3)
    made: list[RequestState] = []
    for index in range(number):
        sampling = Sampling(
            seed=index,
            temperature=0.0 if greedy or index % 3 == 0 else 1.0,
            top_k=(0, 12)[index % 2],
            top_p=(1.0, 0.9)[index % 5 == 0],
            repetition_penalty=(1.0, 1.3)[not greedy and index % 4 == 0],
            max_tokens=5 + 7 * (index % 6),
        )
        prompt = tuple(draws.randrange(VOCAB) for _ in range(1 + 11 * (index % 7)))
        made.append(RequestState(id=str(index), prompt=prompt, sampling=sampling))
    return made


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_tokens_and_log_probs_are_those_of_the_whole_forward(kind: str) -> None:
    reference = model(kind, torch.float64)
    for asked, done in zip(
        asks(8, greedy=True), engine(copy.deepcopy(reference)).generate(asks(8, greedy=True)), strict=True
    ):
        with torch.no_grad():
            logits = reference(torch.tensor([done.tokens])).logits[0, len(asked.prompt) - 1 : -1]
        want = torch.log_softmax(logits, -1)
        assert done.output == tuple(logits.argmax(-1).tolist())
        picked = want[torch.arange(len(done.output)), list(done.output)]
        assert torch.allclose(torch.tensor(done.log_probs, dtype=torch.float64), picked, atol=1e-10, rtol=0)
        assert (len(done.output), done.finish_reason) == (asked.sampling.max_tokens, "length")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen2", torch.float32), ("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3", torch.float64)],
)
def test_company_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    made = engine(model(kind, dtype), tiers=(16, 8, 4, 2, 1))
    together = made.generate(asks())
    assert [made.generate([asked])[0] for asked in asks()] == together
    assert made.generate(asks()[::-1]) == together[::-1]
    assert len({token for done in together for token in done.output}) > 20, "outputs vary enough to tell"
    assert made.cache.num_free == 128


def test_one_decode_shape_gives_the_same_and_says_its_tier() -> None:
    made, fixed = engine(), engine(multi_graph=False)
    assert fixed.generate(asks()) == made.generate(asks())
    for one, tier in ((made, 4), (fixed, 16)):
        one.import_(asks(2))
        report = one.step()
        assert report is not None
        assert (report.tier, report.num_running) == (tier, 2)


def test_a_step_tells_what_it_prefilled() -> None:
    made = engine()
    made.import_(asks(3))
    first, second = made.step(), made.step()
    assert first is not None
    assert second is not None
    assert first.prefilled_tokens == sum(len(asked.prompt) - 1 for asked in asks(3))
    assert first.prefill_seconds > 0
    assert (second.prefilled_tokens, second.prefill_seconds) == (0, 0.0)


def test_tokens_of_another_kind_are_refused() -> None:
    made = engine()
    for prompt in (("a", 1), (1.5,), (np.int64(3),)):
        with pytest.raises(InvalidInput, match="request 'a'"):
            made.import_([RequestState(id="a", prompt=prompt, sampling=Sampling())])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"model.*.str"):
        DecodeEngine("a/model")


def test_a_cache_of_no_token_is_no_cache() -> None:
    made = engine()
    asked = RequestState(id="a", prompt=(5,), sampling=Sampling(max_tokens=4))
    empty = torch.zeros(2, 2, 0, 8, 12)
    made.import_(asks(16))
    made.step()  # all slots are taken: a cache would have no place
    made.import_([replace(asked, kv=[empty] * 2)])
    while made.num_unfinished:
        made.step()
    assert {done.id: done for done in made.take_finished()}["a"].output == engine().generate([asked])[0].output


def test_prefills_in_a_larger_shape_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wide = engine(), engine(prefill_rows=64)
    assert wide.passes.sizes == plain.passes.sizes == (4, 8, 16)
    assert (plain.passes.prefill_size, wide.passes.prefill_size) == (16, 64)
    shapes: list[tuple[int, bool]] = []
    forward = wide.passes.forward

    def recording(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append((len(tokens), args[-1]))
        return forward(tokens, *args)

    monkeypatch.setattr(wide.passes, "forward", recording)
    assert wide.generate(asks()) == plain.generate(asks())
    assert {head for size, head in shapes if size == 64} == {False}
    assert {size for size, head in shapes if head} <= {4, 8, 16}


def test_a_prefill_shape_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = proof.linear_sizes

    def others(hf: Any, sizes: Sequence[int]) -> set[int]:
        return plain(hf, sizes) - ({16} if 64 in sizes else set())

    monkeypatch.setattr(proof, "linear_sizes", others)
    made = engine(prefill_rows=64)
    assert (made.passes.sizes, made.passes.prefill_size) == ((4, 8, 16), 16)
    assert made.generate(asks(4)) == engine().generate(asks(4))


def test_a_full_pool_makes_the_youngest_wait_and_changes_no_bit() -> None:
    want = engine().generate(asks())
    tight = engine(num_blocks=15)
    seen: list[int] = []
    tight.import_(asks())
    done: dict[str, RequestState] = {}
    while tight.num_unfinished:
        tight.step()
        seen.append(len(tight._running))
        done |= {state.id: state for state in tight.take_finished()}
    assert [done[asked.id] for asked in asks()] == want
    assert min(seen[:-10]) < max(seen) < 8
    assert tight.cache.num_free == 15


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("steps", [1, 9, 16, 30])
def test_a_moved_request_goes_on_bit_for_bit(steps: int, with_kv: bool) -> None:
    want = {done.id: done for done in engine().generate(asks())}
    sender, receiver = engine(), engine()
    sender.import_(asks())
    done: dict[str, RequestState] = {}
    for _ in range(steps):
        sender.step()
    moving = [state.id for state in sender.list_requests()][::2]
    states = sender.export(moving)
    assert [state.id for state in states] == moving
    assert {state.id for state in sender.list_requests()} >= set(moving), "export only reads"
    receiver.import_([state if with_kv else replace(state, kv=None, num_cached=0) for state in states])
    sender.abort(moving)
    for one in (sender, receiver):
        while one.num_unfinished:
            one.step()
        done |= {state.id: state for state in one.take_finished()}
    assert {name: state.output for name, state in done.items()} == {n: s.output for n, s in want.items()}
    assert {name: state.log_probs for name, state in done.items()} == {n: s.log_probs for n, s in want.items()}
    assert sender.cache.num_free == receiver.cache.num_free == 128


def test_caches_written_layer_by_layer_are_those_of_the_sender() -> None:
    want = {done.id: done.output for done in engine().generate(asks())}
    sender, receiver = engine(), engine()
    sender.import_(asks())
    for _ in range(4):
        sender.step()
    states = sender.export([state.id for state in sender.list_requests()][:5])
    receiver.reserve([replace(state, kv=None) for state in states])
    assert (receiver.num_unfinished, receiver.list_requests()) == (0, [])
    assert receiver.facts().free_blocks < 128, "blocks are held before a request runs"
    names, caches = [state.id for state in states], [state.kv for state in states if state.kv is not None]
    for layer in range(2):
        receiver.write(layer, names, torch.cat([kv[layer] for kv in caches], dim=2))
    assert receiver.step() is None
    receiver.commit(names)
    done: dict[str, RequestState] = {}
    while receiver.num_unfinished:
        report = receiver.step()
        assert report is not None
        assert report.prefilled_tokens == 0
        done |= {state.id: state for state in receiver.take_finished()}
    assert {name: state.output for name, state in done.items()} == {name: want[name] for name in names}


def test_reserved_requests_hold_their_slots_and_are_forgotten_on_demand() -> None:
    sender, receiver = engine(), engine(tiers=(4,))
    sender.import_(asks(3))
    sender.step()
    running = [replace(state, kv=None) for state in sender.export(["0", "1", "2"])]
    receiver.import_([replace(asked, id=f"mine {asked.id}") for asked in asks(3)])
    receiver.reserve(running)
    receiver.step()
    assert sum(state.num_cached > 0 for state in receiver.list_requests()) == 1, "three of four slots are held"
    with pytest.raises(InvalidInput, match="'0'"):
        receiver.reserve(running[:1])
    for ids, content in ((["0"], torch.zeros(2, 2, 9, 8, 12)), (["nobody"], torch.zeros(2, 2, 1, 8, 12))):
        with pytest.raises(InvalidInput, match=ids[0]):
            receiver.write(0, ids, content)
    with pytest.raises(InvalidInput, match="nobody"):
        receiver.commit(["0", "nobody"])
    receiver.abort(["0", "1", "2"])
    while receiver.num_unfinished:
        receiver.step()
    assert receiver.cache.num_free == 128
    receiver.reserve(running)
    receiver.clear()
    assert (receiver.cache.num_free, receiver.num_unfinished, receiver.take_finished()) == (128, 0, [])


def test_import_gives_back_what_it_held_when_a_layer_fails() -> None:
    sender, receiver = engine(), engine()
    sender.import_(asks(2))
    sender.step()
    states = sender.export(["0", "1"])
    assert states[1].kv is not None
    broken = [states[1].kv[0], states[1].kv[1][:, :, :, :4]]
    with pytest.raises(InvalidInput, match="'1'"):
        receiver.import_([states[0], replace(states[1], kv=broken)])
    assert (receiver.cache.num_free, receiver.num_unfinished) == (128, 0)
    receiver.import_(states)


def test_a_cache_that_is_computed_again_has_the_bits_of_the_first() -> None:
    made, other = engine(), engine()
    made.import_(asks())
    for _ in range(20):
        made.step()
    states = made.export([state.id for state in made.list_requests() if state.num_cached])
    other.import_([replace(state, kv=None, num_cached=0) for state in states])
    other._admit()
    again = other.export([state.id for state in states])
    compared = 0
    for state, twin in zip(states, again, strict=True):
        assert state.kv is not None
        assert twin.kv is not None
        for layer in range(2):
            mine, theirs = (kv[layer].flatten(2, 3)[:, :, : state.num_cached] for kv in (state.kv, twin.kv))
            assert torch.equal(mine, theirs)
            compared += int(mine.count_nonzero())
    assert compared > 10_000


def test_what_an_earlier_request_left_does_not_reach_a_later_one() -> None:
    want = engine().generate(asks())
    dirty = engine()
    for pool in dirty.cache.pools:
        pool[:, :, 2:] = torch.nan
    assert dirty.generate(asks()) == want


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "0"}, "request '0'"),
        ({"prompt": (VOCAB,)}, "'bad'.*61.*61"),
        ({"sampling": Sampling(max_tokens=300)}, "'bad'.*256.*301"),
        (
            {"kv": [torch.zeros(2, 2, 1, 8, 12)], "num_cached": 1, "output": (1,), "log_probs": (0.0,)},
            "2 layers, got 1",
        ),
        ({"kv": [torch.zeros(2, 2, 1, 8, 12)] * 2, "num_cached": 1}, "'bad'.*1"),
        ({"finish_reason": "stop"}, "'bad'.*'stop'"),
    ],
)
def test_import_takes_all_or_nothing(change: dict[str, Any], words: str) -> None:
    made = engine()
    made.import_(asks(3))
    bad = replace(RequestState(id="bad", prompt=(1,), sampling=Sampling()), **change)
    with pytest.raises(InvalidInput, match=words):
        made.import_([replace(asks(1)[0], id="good"), bad])
    assert [state.id for state in made.list_requests()] == ["0", "1", "2"]
    assert made.cache.num_free == 128


def test_import_needs_slots_and_blocks_for_what_runs() -> None:
    sender, small = engine(), engine(num_blocks=32)
    sender.import_(asks())
    for _ in range(4):
        sender.step()
    states = sender.export([state.id for state in sender.list_requests()])
    with pytest.raises(InvalidInput, match=r"16.*32"):
        small.import_(states)
    assert (small.num_unfinished, small.cache.num_free) == (0, 32)


def test_abort_forgets_all_or_nothing() -> None:
    made = engine()
    made.import_(asks(3))
    made.step()
    with pytest.raises(InvalidInput, match=r"request id.*'nobody'"):
        made.abort(["0", "nobody"])
    assert made.num_unfinished == 3
    made.abort(["0", "1", "2"])
    assert (made.num_unfinished, made.cache.num_free) == (0, 128)


def _plain(logits: list[float], how: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Probabilities that a token is drawn with, in loops."""
    z = list(logits)
    for token in {*prompt, *output}:
        z[token] = z[token] / how.repetition_penalty if z[token] > 0 else z[token] * how.repetition_penalty
    for token, times in Counter(output).items():
        z[token] -= how.presence_penalty + how.frequency_penalty * times
    weights = [float(np.exp(x / how.temperature)) for x in z]
    order = sorted(range(len(z)), key=lambda token: -weights[token])
    if how.top_k:
        order = order[: how.top_k]
    total, kept, share = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if share >= how.top_p * total:
            break
        kept.append(token)
        share += weights[token]
    return [weights[token] / share if token in kept else 0.0 for token in range(len(z))]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(top_k=5, top_p=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    ],
)
def test_tokens_are_drawn_as_often_as_plain_loops_say(how: Sampling) -> None:
    logits = torch.tensor([1.5, -0.5, 0.2, 2.0, -1.0, 0.9, 0.0, 1.1])
    prompt, output = [3, 1], [0, 5, 5]
    want = np.array(_plain(logits.tolist(), how, prompt, output))
    number = 2000
    found = Counter(draw(logits, replace(how, seed=seed), prompt, output)[0] for seed in range(number))
    counts = np.array([found[token] for token in range(8)])
    assert (counts[want == 0] == 0).all()
    kept = want > 0
    chi2 = float((((counts - number * want) ** 2)[kept] / (number * want)[kept]).sum())
    assert chi2 < 27, "0.1 % of draws are as far off with 8 outcomes"


def test_log_probs_are_those_before_the_cuts() -> None:
    logits = torch.tensor([1.5, -0.5, 0.2, 2.0])
    token, log_prob = draw(logits, Sampling(temperature=0.5, top_k=1), [0], [])
    assert token == 3
    assert log_prob == pytest.approx(4 - np.log(np.exp([3.0, -1.0, 0.4, 4.0]).sum()), abs=1e-7)


def test_random_numbers_are_those_of_seed_and_position_and_even() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(40) for position in range(40)])
    assert len(set(numbers.tolist())) == 1600
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / 1600) ** 0.5
    by_seed = numbers.reshape(40, 40)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.1
