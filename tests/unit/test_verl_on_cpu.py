# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false
# transformers is typed in part only.

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from equipoise.errors import InvalidInput
from equipoise.trainer_hooks.verl_on_cpu.attention import NAME, register, row_lengths
from equipoise.trainer_hooks.verl_on_cpu.generate import Completion, Request, generate
from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment, cpu_overrides
from equipoise.trainer_hooks.verl_on_cpu.serving import BatchQueue

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
HEAD: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2 critic": lambda: Qwen2ForTokenClassification(Qwen2Config(**SHAPE, **HEAD)),
}
LENGTHS = (7, 1, 19, 12)


@pytest.fixture(autouse=True)
def _one_stream() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    register()


def _model(family: str, attention: str) -> Any:
    torch.manual_seed(1)
    model = FAMILIES[family]()
    model.set_attn_implementation(attention)
    for parameter in model.parameters():  # larger than at initialization, so that attention is far from uniform
        parameter.data.mul_(3)
    return model


def _rows() -> list[torch.Tensor]:
    return [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]


def _packed(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(list(rows))[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("asked", [None, "nvidia"])
def test_does_nothing_unless_asked_for(asked: str | None) -> None:
    code = (
        "import sys, equipoise.trainer_hooks.verl_on_cpu, equipoise.trainer_hooks._imports as hooks;"
        "print(len(hooks._FINDER.hooks), [m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    if asked:
        environment["VERL_PLATFORM"] = asked
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "0 []"


def test_waits_for_verl_when_asked_for() -> None:
    code = (
        "import sys, equipoise.trainer_hooks.verl_on_cpu, equipoise.trainer_hooks._imports as hooks;"
        "print(sorted(hooks._FINDER.hooks), 'torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_PLATFORM": " CPU "},
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == "['verl.plugin.platform'] False"


def test_rows_start_where_a_position_does_not_follow() -> None:
    assert row_lengths(torch.tensor([0, 1, 2, 0, 0, 1, 5, 6])) == [3, 1, 2, 2]
    assert row_lengths(torch.tensor([4, 5, 6])) == [3]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_single_rows(family: str) -> None:
    model, reference = _model(family, NAME), _model(family, "sdpa")
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
    model = _model("qwen2", NAME)
    rows = _rows()
    before = model(**_packed(rows), use_cache=False).logits[0, -LENGTHS[-1] :]
    rows[0] = (rows[0] + 1) % VOCABULARY
    after = model(**_packed(rows), use_cache=False).logits[0, -LENGTHS[-1] :]
    torch.testing.assert_close(before, after, atol=0, rtol=0)


def test_rows_may_come_as_edges() -> None:
    model = _model("llama", NAME)
    inputs = _packed(_rows())
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    by_edges = model(**inputs, cu_seq_lens_q=edges, cu_seq_lens_k=edges, use_cache=False).logits
    torch.testing.assert_close(by_edges, model(**inputs, use_cache=False).logits, atol=0, rtol=0)
    with pytest.raises(InvalidInput, match="cu_seq_lens_q must cover one sequence"):
        model(**inputs, cu_seq_lens_q=edges[:-1], cu_seq_lens_k=edges[:-1], use_cache=False)


def test_gradient_checkpointing_keeps_the_rows() -> None:
    plain, checkpointed = _model("qwen2", NAME).train(), _model("qwen2", NAME).train()
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
    got = _model(family, NAME)(**inputs, use_cache=False).logits
    expected = _model(family, "sdpa")(**inputs, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_cache_equals_sdpa(padded: bool) -> None:
    input_ids = torch.randint(3, VOCABULARY, (2, 9))
    mask = torch.ones_like(input_ids)
    if padded:
        mask[0, :4] = 0
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    outputs = [
        _model("qwen2", attention).eval().generate(input_ids, attention_mask=mask, generation_config=settings)
        for attention in (NAME, "sdpa")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_a_later_chunk_sees_the_cache() -> None:
    model = _model("llama", NAME).eval()
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

    model = _model("qwen2", attention)
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
    _model("qwen2", NAME)(**_packed(_rows()), use_cache=False)
    assert len(masks) == len(LENGTHS) * SHAPE["num_hidden_layers"]
    assert set(masks) == {None}


def _requests(**settings: Any) -> list[Request]:
    lengths = (3, 11, 6, 1, 8)
    limits = (24, 5, 9, 2, 15)
    return [
        Request(
            prompt=tuple(torch.randint(3, VOCABULARY, (length,)).tolist()),
            max_new_tokens=limit,
            seed=100 + i,
            **settings,
        )
        for i, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def _generate(model: Any, requests: Sequence[Request], *, stop_ids: frozenset[int] = frozenset(), **kwargs: Any) -> Any:
    return generate(model, requests, stop_ids=stop_ids, pad_id=0, **kwargs)


def test_sampling_repeats_and_depends_on_the_seed() -> None:
    model = _model("qwen2", "sdpa").eval()
    requests = _requests()
    first = [done.token_ids for done in _generate(model, requests)]
    assert first == [done.token_ids for done in _generate(model, requests)]
    assert [len(tokens) for tokens in first] == [request.max_new_tokens for request in requests]
    other = Request(prompt=requests[0].prompt, max_new_tokens=24, seed=7)
    assert _generate(model, [other])[0].token_ids != first[0]


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = _model("qwen2", "sdpa").eval()
    requests = _requests()
    together = [done.token_ids for done in _generate(model, requests)]
    alone = [_generate(model, [request])[0].token_ids for request in requests]
    backwards = [done.token_ids for done in _generate(model, requests[::-1])][::-1]
    assert together == alone == backwards


def test_compaction_changes_the_work_and_not_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("qwen2", "sdpa").eval()
    requests = _requests()
    rows: list[tuple[int, ...]] = []
    forward = model.forward

    def recording(*args: Any, **kwargs: Any) -> Any:
        rows.append(tuple(kwargs["attention_mask"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", recording)
    compacted = _generate(model, requests)
    shapes, rows = rows, []
    plain = _generate(model, requests, compact=False)
    assert [done.token_ids for done in compacted] == [done.token_ids for done in plain]
    for left, right in zip(compacted, plain, strict=True):
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)
    assert {batch for batch, _ in rows} == {len(requests)}
    assert shapes[-1] == (1, len(requests[0].prompt) + requests[0].max_new_tokens - 1)  # its own columns alone


def test_greedy_equals_transformers_generate() -> None:
    model = _model("llama", "sdpa").eval()
    requests = _requests(temperature=0.0)
    stop = _generate(model, requests)[0].token_ids[3]
    for request, done in zip(requests, _generate(model, requests, stop_ids=frozenset({stop})), strict=True):
        settings = GenerationConfig(
            max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
        prompt = torch.tensor([request.prompt])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        assert done.token_ids == expected[0, len(request.prompt) :].tolist()
        assert done.finished


def test_log_probs_are_those_of_the_model() -> None:
    model = _model("qwen2", "sdpa").eval()
    requests = _requests(temperature=0.7)
    for request, done in zip(requests, _generate(model, requests), strict=True):
        tokens = torch.tensor([*request.prompt, *done.token_ids])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, len(request.prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None]).squeeze(-1)
        assert done.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


class _Constant:
    """A model whose next token never depends on anything."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self.logits = torch.tensor(probabilities).log()

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: Any, **_: Any) -> Any:
        batch, length = input_ids.shape
        for layer in range(1):
            past_key_values.update(torch.zeros(batch, 1, length, 1), torch.zeros(batch, 1, length, 1), layer)
        return type("Output", (), {"logits": self.logits.expand(batch, 1, -1).clone()})


def _frequencies(**settings: Any) -> list[float]:
    model = _Constant([0.1, 0.4, 0.2, 0.3])
    requests = [Request(prompt=(1,), max_new_tokens=50, seed=seed, **settings) for seed in range(80)]
    tokens = torch.tensor([token for done in _generate(model, requests) for token in done.token_ids])
    return (tokens.bincount(minlength=4) / len(tokens)).tolist()


def test_samples_follow_the_distribution() -> None:
    assert _frequencies() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert _frequencies(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    assert _frequencies(top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert _frequencies(top_p=0.3) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompt": ()}, "prompt must have a token"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_rejects_what_cannot_be_sampled(settings: dict[str, Any], text: str) -> None:
    valid: dict[str, Any] = {"prompt": (1,), "max_new_tokens": 1, "seed": 0}
    with pytest.raises(InvalidInput, match=text):
        Request(**{**valid, **settings})


REQUEST = Request(prompt=(1,), max_new_tokens=4, seed=0)


def _until_stopped(requests: Sequence[Request], should_stop: Callable[[], bool]) -> list[Completion]:
    deadline = time.monotonic() + 5  # a thread cannot be ended from outside
    while not should_stop() and time.monotonic() < deadline:
        time.sleep(0.001)
    return [Completion(token_ids=[5]) for _ in requests]


def _at_once(requests: Sequence[Request], _should_stop: Callable[[], bool]) -> list[Completion]:
    return [Completion(token_ids=[len(requests)], finished=True) for _ in requests]


def _failing(_requests: Sequence[Request], _should_stop: Callable[[], bool]) -> list[Completion]:
    raise MemoryError("no room")


def _in_time(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def test_siblings_share_a_batch() -> None:
    async def work() -> None:
        queue = BatchQueue(_at_once, max_batch=3)
        sizes = [done.token_ids[0] for done in await asyncio.gather(*(queue.submit(REQUEST) for _ in range(4)))]
        assert sizes == [3, 3, 3, 1]
        assert (await queue.submit(REQUEST)).token_ids == [1]

    _in_time(work())


def test_an_error_reaches_every_request_and_none_of_the_later_ones() -> None:
    async def work() -> None:
        answers = [_failing, _at_once]
        queue = BatchQueue(lambda requests, stop: answers.pop(0)(requests, stop), max_batch=2)
        results = await asyncio.gather(*(queue.submit(REQUEST) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * 3
        assert (await queue.submit(REQUEST)).finished

    _in_time(work())


def test_a_closed_queue_holds_requests_until_all_have_reopened_it() -> None:
    async def work() -> None:
        queue = BatchQueue(_at_once, max_batch=2)
        await queue.close("sleep")
        await queue.close("weights")
        held = asyncio.create_task(queue.submit(REQUEST))
        queue.reopen("sleep")
        await asyncio.sleep(0.1)
        assert not held.done()
        queue.reopen("weights")
        assert (await held).finished

    _in_time(work())


def test_closing_waits_for_the_running_batch() -> None:
    ended: list[int] = []

    def slow(requests: Sequence[Request], _should_stop: Callable[[], bool]) -> list[Completion]:
        time.sleep(0.2)
        ended.append(1)
        return [Completion(finished=True) for _ in requests]

    async def work() -> None:
        queue = BatchQueue(slow, max_batch=2)
        running = asyncio.create_task(queue.submit(REQUEST))
        await asyncio.sleep(0.03)
        await queue.close("sleep")
        assert ended == [1]
        assert (await running).finished

    _in_time(work())


def test_aborting_hands_back_what_there_is_and_holds_the_rest() -> None:
    async def work() -> None:
        queue = BatchQueue(_until_stopped, max_batch=1)
        running, waiting = (asyncio.create_task(queue.submit(REQUEST)) for _ in range(2))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        await queue.abort("abort")
        assert time.monotonic() - begin < 2
        assert (await running).token_ids == [5]
        assert (await waiting).token_ids == []
        assert not running.result().finished
        assert not waiting.result().finished
        held = asyncio.create_task(queue.submit(REQUEST))
        await asyncio.sleep(0.1)
        assert not held.done()
        await queue.abort("abort", reject=True)
        assert (await held).token_ids == []
        assert (await queue.submit(REQUEST)).token_ids == []  # rejected at once
        queue.resume("abort")
        later = asyncio.create_task(queue.submit(REQUEST))
        await asyncio.sleep(0.1)
        assert not later.done()
        await queue.abort("abort")
        assert (await later).token_ids == [5]

    _in_time(work())


def test_generation_stops_between_tokens() -> None:
    model = _model("qwen2", "sdpa").eval()
    asked: list[int] = []

    def after_three() -> bool:
        asked.append(1)
        return len(asked) > 3

    done = _generate(model, _requests(), should_stop=after_three)
    assert [len(each.token_ids) for each in done] == [3, 3, 3, 2, 3]
    assert [each.finished for each in done] == [False, False, False, True, False]


def test_environment_keeps_what_is_set_and_drops_what_stops_ray() -> None:
    environment = cpu_environment({"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "nvidia"})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_overrides_reject_zero_ranks() -> None:
    with pytest.raises(InvalidInput, match="num_ranks must be at least 1"):
        cpu_overrides(0)
