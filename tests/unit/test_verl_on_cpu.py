# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false
# transformers is typed in part only.

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from equipoise.rollout.decode import DecodeConfig, DecodeEngine, sampling
from equipoise.rollout.decode import engine as engine_module
from equipoise.rollout.transfer import RequestState, Sampling
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY
from equipoise.trainer_hooks.verl_on_cpu.attention import NAME, register, row_lengths
from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment, cpu_overrides
from equipoise.trainer_hooks.verl_on_cpu.request import Limits, read_request
from equipoise.trainer_hooks.verl_on_cpu.serving import Answer, DecodeLoop

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
        "import sys, equipoise.trainer_hooks.verl_on_cpu, wrapt.importer as hooks;"
        "names = [m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules];"
        "print(len(hooks._post_import_hooks), names)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    if asked:
        environment["VERL_PLATFORM"] = asked
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "0 []"


def test_waits_for_verl_when_asked_for() -> None:
    code = (
        "import sys, equipoise.trainer_hooks.verl_on_cpu, wrapt.importer as hooks;"
        "print(sorted(hooks._post_import_hooks), 'torch' in sys.modules)"
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


LIMITS = Limits(response=40, total=64)


def _engine() -> DecodeEngine:
    torch.set_num_threads(1)
    return DecodeEngine(_model("qwen2", "sdpa"), DecodeConfig(tiers=(4,), num_blocks=24))


def _state(number: int, *, max_tokens: int = 12, name: str | None = None) -> RequestState:
    sampling = Sampling(seed=number, max_tokens=max_tokens)
    return RequestState(id=name or str(number), prompt=(5, 6, 7 + number), sampling=sampling)


def _alone(state: RequestState) -> RequestState:
    return _engine().generate([state])[0]


def _in_time(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_requests_that_come_at_any_time_are_decoded_together_and_as_alone() -> None:
    states = [_state(i, max_tokens=6 + 5 * i) for i in range(6)]

    async def work() -> list[Answer]:
        loop = DecodeLoop(_engine)
        asked: list[asyncio.Task[Answer]] = []
        for state in states:
            asked.append(asyncio.create_task(loop.submit(state)))
            await asyncio.sleep(0.004)
        return await asyncio.gather(*asked)

    for answer, state in zip(_in_time(work()), states, strict=True):
        assert (answer.state.output, answer.state.log_probs) == (_alone(state).output, _alone(state).log_probs)
        assert answer.state.finish_reason == "length"


def test_a_bad_request_fails_alone() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        bad = RequestState(id="bad", prompt=(VOCABULARY,), sampling=Sampling(max_tokens=3))
        good, wrong = await asyncio.gather(loop.submit(_state(1)), loop.submit(bad), return_exceptions=True)
        assert isinstance(good, Answer)
        assert good.state.output == _alone(_state(1)).output
        assert "hold tokens below the vocabulary of 97" in str(wrong)

    _in_time(work())


def test_an_error_reaches_every_request_and_none_of_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)

        def broken() -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(loop.engine, "step", broken)
            results = await asyncio.gather(*(loop.submit(_state(i)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * 3
        assert (await loop.submit(_state(7))).state.output == _alone(_state(7)).output
        assert loop.engine.cache.num_free == 24

    _in_time(work())


def test_an_error_while_requests_are_taken_reaches_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)

        def broken(_states: object) -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(loop.engine, "import_", broken)
            results = await asyncio.gather(*(loop.submit(_state(i)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * 3
        assert (await loop.submit(_state(7))).state.finish_reason == "length"

    _in_time(work())


def test_an_error_in_a_step_in_which_a_request_ends_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        plain = sampling.draw

        def failing(logits: Any, how: Sampling, *tokens: Any) -> Any:
            if how.seed == 2:
                raise MemoryError("no room")
            return plain(logits, how, *tokens)

        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "draw", failing)
            asked = (loop.submit(_state(i, max_tokens=1)) for i in (1, 2))
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(results[1], MemoryError)
        assert (await loop.submit(_state(7))).state.output == _alone(_state(7)).output

    _in_time(work())


@pytest.mark.parametrize("all_of_them", [False, True])
def test_whoever_takes_a_request_out_does_so_even_if_cancelled(all_of_them: bool) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        asked = asyncio.create_task(loop.submit(_state(1, max_tokens=50), "a"))
        await _some_tokens(loop)
        taking = asyncio.create_task(loop.abort("abort") if all_of_them else loop.abort_one("a"))
        while loop.engine.num_unfinished:
            await asyncio.sleep(0)
        taking.cancel()
        assert (await asked).state.finish_reason is None
        await loop.close("sleep")

    _in_time(work())


def test_aborting_answers_a_request_whose_cache_is_on_its_way() -> None:
    async def work() -> None:
        loop, arrived = DecodeLoop(_engine), asyncio.Event()

        async def send(_state: RequestState) -> int:
            await arrived.wait()
            return 1

        asked = asyncio.create_task(loop.submit(_state(1, max_tokens=50), "a"))
        await _some_tokens(loop)
        leaving = asyncio.create_task(loop.hand_over("a", send))
        while loop.engine.num_unfinished:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await loop.abort("abort")
        assert len((await asked).state.output) >= 3
        arrived.set()
        assert await leaving

    _in_time(work())


def test_a_closed_loop_holds_requests_until_all_have_reopened_it() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        await loop.close("sleep")
        await loop.close("weights")
        held = asyncio.create_task(loop.submit(_state(1)))
        loop.reopen("sleep")
        await asyncio.sleep(0.1)
        assert not held.done()
        loop.reopen("weights")
        assert (await held).state.finish_reason == "length"

    _in_time(work())


def test_closing_waits_for_what_is_being_decoded_and_takes_nothing_new() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        running = asyncio.create_task(loop.submit(_state(1, max_tokens=40)))
        await _some_tokens(loop)
        closing = asyncio.create_task(loop.close("sleep"))
        await asyncio.sleep(0)
        late = asyncio.create_task(loop.submit(_state(2, max_tokens=1)))
        await closing
        assert loop.engine.num_unfinished == 0
        assert len((await running).state.output) == 40
        assert not late.done()
        loop.reopen("sleep")
        assert len((await late).state.output) == 1

    _in_time(work())


async def _some_tokens(loop: DecodeLoop, number: int = 3) -> None:
    while not any(len(state.output) >= number for state in loop.engine.list_requests()):
        await asyncio.sleep(0.001)


def test_aborting_hands_back_what_there_is_and_holds_the_rest() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        running = asyncio.create_task(loop.submit(_state(1, max_tokens=50)))
        await _some_tokens(loop)
        await loop.abort("abort")
        part = (await running).state
        assert part.finish_reason is None
        assert 3 <= len(part.output) < 50
        assert part.output == _alone(_state(1, max_tokens=50)).output[: len(part.output)]
        held = asyncio.create_task(loop.submit(_state(2)))
        await asyncio.sleep(0.1)
        assert not held.done()
        await loop.abort("abort", reject=True)
        assert (await held).state.output == ()
        assert (await loop.submit(_state(3))).state.output == ()  # rejected at once
        loop.resume("abort")
        assert len((await loop.submit(_state(4))).state.output) == 12

    _in_time(work())


def test_a_caller_that_is_gone_frees_its_place() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        gone = asyncio.create_task(loop.submit(_state(1, max_tokens=50)))
        await _some_tokens(loop)
        gone.cancel()
        assert (await loop.submit(_state(2, max_tokens=2))).state.finish_reason == "length"
        assert loop.engine.num_unfinished == 0

    _in_time(work())


@pytest.mark.parametrize("with_cache", [False, True])
def test_one_request_goes_on_elsewhere_as_it_would_have_gone_on(with_cache: bool) -> None:
    sent: list[RequestState] = []

    async def send(state: RequestState) -> int:
        assert state.kv is not None
        sent.append(state)
        return sum(layer.nbytes for layer in state.kv)

    async def work() -> None:
        first, second = DecodeLoop(_engine), DecodeLoop(_engine)
        moving = asyncio.create_task(first.submit(_state(1, max_tokens=40), "a"))
        staying = asyncio.create_task(first.submit(_state(2, max_tokens=40), "b"))
        await _some_tokens(first, 20)  # its cache takes two blocks by now
        assert not await first.abort_one("unknown")
        assert await (first.hand_over("a", send) if with_cache else first.abort_one("a"))
        answer = await moving
        part = answer.state
        assert part.finish_reason is None
        assert len(part.output) >= 20
        assert answer.kv_bytes == (2 * 2 * 2 * 2 * 16 * 8 * 4 if with_cache else 0)  # layers, k and v, heads, blocks...
        rest = replace(part, kv=sent[0].kv, num_cached=sent[0].num_cached) if with_cache else part
        whole = (await second.submit(rest)).state
        for state, number in ((whole, 1), ((await staying).state, 2)):
            expected = _alone(_state(number, max_tokens=40))
            assert (state.output, state.log_probs) == (expected.output, expected.log_probs)
        assert not await first.abort_one("a")

    _in_time(work())


def test_a_request_that_waits_is_handed_back_as_it_came() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        await loop.close("sleep")
        waiting = asyncio.create_task(loop.submit(_state(1), "a"))
        await asyncio.sleep(0.01)
        assert await loop.abort_one("a")
        assert (await waiting).state.output == ()

    _in_time(work())


def test_a_cache_without_room_is_computed_again() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        donor = _engine()
        donor.import_([_state(9, max_tokens=30)])
        for _ in range(5):
            donor.step()
        (moving,) = donor.export(["9"])
        assert moving.kv is not None
        moving = replace(moving, kv=list(moving.kv))
        others = [asyncio.create_task(loop.submit(_state(i, max_tokens=20))) for i in range(4)]  # all slots
        await _some_tokens(loop)
        assert (await loop.submit(moving)).state.output == _alone(_state(9, max_tokens=30)).output
        await asyncio.gather(*others)

    _in_time(work())


def test_parameters_of_verl_become_a_request() -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "logprobs": True, "repetition_penalty": 1.1}
    found = read_request([3, 4], params, name="7", seed=1, limits=LIMITS, stream="x", stop_ids={9, 2})
    assert (found.id, found.prompt, found.output) == ("7", (3, 4), ())
    how = found.sampling
    assert (how.temperature, how.top_p, how.top_k, how.repetition_penalty) == (0.5, 0.9, 0, 1.1)
    assert (how.max_tokens, how.stop_token_ids) == (40, (2, 9))
    assert read_request([3] * 60, {}, name="", seed=1, limits=LIMITS, stream="x").sampling.max_tokens == 4
    assert read_request([3], {"max_tokens": 5}, name="", seed=1, limits=LIMITS, stream="x").sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([3], {"top_p": 2}, "top_p must be above 0 and at most 1, got 2"),
        ([3], {"n": 2}, r"sampling_params must be known, got \['n'\]; hf_cpu would ignore these"),
        ([3] * 64, {}, "tokens of the prompt must be below 64, which a response shares, got 64"),
        ([3, 4], {GENERATED_KEY: 2}, "equipoise_generated must leave a prompt, got 2"),
        ([], {}, "prompt of request 'a' must hold at least one token"),
    ],
)
def test_rejects_what_cannot_be_sampled(prompt: list[int], params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        read_request(prompt, params, name="a", seed=0, limits=LIMITS, stream="")


def test_environment_keeps_what_is_set_and_drops_what_stops_ray() -> None:
    environment = cpu_environment({"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "nvidia"})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_overrides_reject_zero_ranks() -> None:
    with pytest.raises(InvalidInput, match="num_ranks must be at least 1"):
        cpu_overrides(0)
