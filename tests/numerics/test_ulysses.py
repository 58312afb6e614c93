"""Sequence parallelism over real gloo processes against one process, in float64.

Four processes start once and run every check, as 1 group of 4 ranks and as 2 groups of 2; a test reads what became of
its check.
"""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import ProcessException, start_processes

from equipoise.errors import InvalidInput
from equipoise.training.engine import attention, ulysses
from equipoise.training.engine.attention import packed
from equipoise.training.engine.log_probs import IGNORE, next_token_labels, token_log_probs
from equipoise.training.engine.ulysses import (
    check_heads,
    exchange,
    gather_heads,
    gather_sequence,
    pad_to_multiple,
    shard_sequence,
    sharded,
    sp_size,
)

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed in part only.

WORLD = 4
F64 = torch.float64
LENGTHS = [(7, 1, 12, 5), (3, 16, 2, 9)]  # 25 and 30 tokens; borders lie inside the shards
TINY: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama(heads: int, kv_heads: int) -> Any:
    sizes: dict[str, Any] = TINY | {"hidden_size": 2 * heads}
    return transformers.LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama 8 heads, 4 kv": lambda: llama(8, 4),
    "llama 8 heads, 2 kv": lambda: llama(8, 2),
    "llama 8 heads, 1 kv": lambda: llama(8, 1),
    "llama 12 heads, 6 kv": lambda: llama(12, 6),
    "mistral, window of 4": lambda: transformers.MistralConfig(
        **TINY, num_attention_heads=4, num_key_value_heads=2, sliding_window=4
    ),
    "gemma2, cap and window of 5": lambda: transformers.Gemma2Config(
        **TINY, num_attention_heads=4, num_key_value_heads=2, sliding_window=5, attn_logit_softcapping=0.5
    ),
}


def tiny(name: str) -> Any:
    config = CONFIGS[name]()
    config._attn_implementation = ulysses.register()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=F64)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=F64))
    return model


def row(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Token ids and positions ``(1, tokens)``, and edges."""
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, TINY["vocab_size"], (1, sum(lengths)), generator=draw)
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return ids, torch.cat([torch.arange(n) for n in lengths])[None], edges


def loss_of(model: Any, lengths: tuple[int, ...], group: Any) -> torch.Tensor:
    """Mean log-prob with a weight for each token, and entropy; alike on each rank of the group."""
    ids, positions, edges = row(lengths)
    size = sp_size(group)
    labels = pad_to_multiple(next_token_labels(ids, edges), size, value=IGNORE)
    mine, places, targets = (
        shard_sequence(x, group) for x in (pad_to_multiple(ids, size), pad_to_multiple(positions, size), labels)
    )
    with sharded(edges, group):
        hidden = model.model(mine, position_ids=places, use_cache=False).last_hidden_state[0]
    log_probs, entropy = token_log_probs(hidden, model.lm_head.weight, targets[0], chunk_tokens=4, with_entropy=True)
    assert entropy is not None
    whole, spread = (gather_sequence(x, group, length=ids.shape[1]) for x in (log_probs, entropy))
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    return ((weights * whole).sum() + 0.1 * (weights * spread).sum()) / len(whole)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


def compare(name: str, group: Any, lengths: list[tuple[int, ...]], *, checkpointing: bool = False) -> None:
    """Losses of the groups, and gradients in the mean over all ranks, against one process that has every row."""
    model = tiny(name)
    expected = [loss_of(model, each, None) for each in lengths]
    slopes = gradients(model, torch.stack(expected).mean())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    mine = dist.get_rank() // sp_size(group)
    got = loss_of(model, lengths[mine], group)
    close(got, expected[mine], f"{name} loss")
    means = gradients(model, got)
    assert means.keys() == slopes.keys()
    for parameter, slope in slopes.items():
        assert slope.abs().max() > 0, parameter
        dist.all_reduce(means[parameter])
        close(means[parameter] / WORLD, slope, f"{name} {parameter}")


def rows_for(group: Any) -> list[tuple[int, ...]]:
    return LENGTHS[: WORLD // sp_size(group)]


def check_each_model_equals_one_process(group: Any) -> None:
    for name in CONFIGS:
        compare(name, group, rows_for(group))


def check_rows_shorter_than_the_group(group: Any) -> None:
    compare("llama 8 heads, 2 kv", group, [(2, 1), (1, 4)][: WORLD // sp_size(group)])


def check_rows_that_need_no_padding(group: Any) -> None:
    compare("llama 8 heads, 2 kv", group, [(3, 5, 8), (9, 7)][: WORLD // sp_size(group)])


def check_gradient_checkpointing_after_the_context(group: Any) -> None:
    compare("gemma2, cap and window of 5", group, rows_for(group), checkpointing=True)


def check_exchange_is_its_own_inverse_and_moves_parts(group: Any) -> None:
    size, me = sp_size(group), dist.get_rank(group)
    for dtype in (F64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        sent = (100 * me + 10 * torch.arange(size)[:, None] + torch.arange(3)).to(dtype)
        got = exchange(sent, group)
        expected = (100 * torch.arange(size)[:, None] + 10 * me + torch.arange(3)).to(dtype)
        assert torch.equal(got, expected)
        assert torch.equal(exchange(got, group), sent)
    strided = torch.arange(6 * size, dtype=F64).view(6, size).t() + 100 * me
    assert torch.equal(exchange(exchange(strided, group), group), strided)


def check_gradient_of_exchange_by_finite_differences(group: Any) -> None:
    size, me = sp_size(group), dist.get_rank(group)
    draw = torch.Generator().manual_seed(dist.get_rank())
    x, weights = (torch.randn(size, 2, generator=draw, dtype=F64) for _ in range(2))

    def total(x: torch.Tensor) -> torch.Tensor:
        """Sum over the group of what each rank makes of what it got."""
        mine = (weights * torch.sin(exchange(x, group))).sum()
        return gather_sequence(mine[None], group).sum() / size  # the gradient comes back times sp

    x.requires_grad_()
    (slope,) = torch.autograd.grad(total(x), x)
    step = 1e-6
    for rank in range(size):
        for place in range(x.numel()):
            moved = torch.zeros(x.numel(), dtype=F64)
            moved[place] = step if me == rank else 0.0
            up, down = (total(x.detach() + sign * moved.view_as(x)) * size for sign in (1, -1))
            if me == rank:
                numeric = (up - down) / (2 * step)
                torch.testing.assert_close(slope.flatten()[place], numeric, rtol=1e-7, atol=1e-8)


def check_heads_come_back_where_they_were(group: Any) -> None:
    size, me = sp_size(group), dist.get_rank(group)
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 3 * size, 2 * size, 5, generator=draw, dtype=F64)  # (1, tokens, heads, dim)
    mine = whole[:, :, 2 * me : 2 * me + 2]
    assert torch.equal(gather_heads(mine, group), whole[:, 3 * me : 3 * me + 3])


def check_sharding_and_gathering_keep_gradients(group: Any) -> None:
    size = sp_size(group)
    draw = torch.Generator().manual_seed(0)
    whole, factor, weights = (torch.randn(2, 3 * size, 2, generator=draw, dtype=F64) for _ in range(3))
    x = whole.requires_grad_()
    expected = torch.autograd.grad((weights * torch.sin(factor * x)).sum(), x)[0]
    part = torch.sin(shard_sequence(factor, group, dim=1) * shard_sequence(x, group, dim=1))
    again = gather_sequence(part, group, dim=1)
    close(again, torch.sin(factor * x))
    close(torch.autograd.grad((weights * again).sum(), x)[0], expected)  # on each rank, not only in the mean


def check_two_all_to_alls_a_layer(group: Any) -> None:
    model, calls, real = tiny("llama 8 heads, 2 kv"), 0, dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        loss = loss_of(model, LENGTHS[0], group)
        assert calls == 2 * TINY["num_hidden_layers"]
        loss.backward()
        assert calls == 4 * TINY["num_hidden_layers"]
    finally:
        dist.all_to_all_single = real


def check_heads_that_do_not_divide_are_refused_before_anything_is_sent(group: Any) -> None:
    size = sp_size(group)
    if dist.get_rank(group) == 0:  # the others are not there to answer
        x = torch.zeros(1, size + 1, 1, 4)
        with sharded([0, size], group) as rows, pytest.raises(InvalidInput) as caught:
            ulysses.ulysses_attention(torch.nn.Module(), x, x, x, rows)
        assert f"num_attention_heads must be a multiple of sp_size {size}, got {size + 1}" in str(caught.value)
        with pytest.raises(InvalidInput, match="call pad_to_multiple first"):
            shard_sequence(torch.zeros(1, size + 1), group)
    dist.barrier(group)


CHECKS = {name.removeprefix("check_"): f for name, f in globals().items() if name.startswith("check_")}
CHECKS.pop("heads")  # the function under test
SIZES = (2, 4)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.Tensor.float = kept  # pyright: ignore[reportAttributeAccessIssue]
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timeout)
    for size in SIZES:
        groups = [dist.new_group(list(range(start, start + size)), timeout=timeout) for start in range(0, WORLD, size)]
        for name, check in CHECKS.items():
            result = Path(folder) / f"{name}.{size}.{rank}"
            try:
                check(groups[rank // size])
            except Exception:
                result.write_text(traceback.format_exc())
                raise  # ranks no longer agree on what comes next
            result.write_text("passed")
    dist.barrier()
    dist.destroy_process_group()


def kept(x: torch.Tensor) -> torch.Tensor:
    """``Tensor.float`` that leaves float64: Gemma's norms sum the gradients of their weights in float32."""
    return x if x.dtype == F64 else x.to(torch.float32)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ulysses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            # A server imports this module once and forks: spawn would import transformers once per rank.
            multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
            start_processes(worker, args=(str(folder),), nprocs=WORLD, start_method="forkserver")
        except ProcessException as error:
            (folder / "error").write_text(str(error))
    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_over_gloo(results: Path, name: str, size: int) -> None:
    said = [(results / f"{name}.{size}.{rank}") for rank in range(WORLD)]
    texts = [path.read_text() if path.exists() else "did not end" for path in said]
    error = results / "error"
    assert texts == ["passed"] * WORLD, "\n".join([*texts, error.read_text() if error.exists() else ""])


def test_without_a_group_it_is_packed_attention() -> None:
    model = tiny("llama 8 heads, 2 kv")
    ids, positions, edges = row(LENGTHS[0])
    with sharded(edges, None):
        got = model(ids, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(attention.register())
    with packed(edges):
        expected = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(got, expected)
    assert shard_sequence(ids, None) is ids
    assert gather_sequence(ids, None, length=3).shape == (1, 3)


def test_padding_fills_up_to_a_multiple() -> None:
    x = torch.ones(2, 5, 3)
    assert pad_to_multiple(x, 4, dim=1, value=7)[:, 5:].tolist() == [[[7.0] * 3] * 3] * 2
    assert pad_to_multiple(x, 5, dim=1) is x
    with pytest.raises(InvalidInput, match="multiple"):
        pad_to_multiple(x, 0)


def test_names_heads_sp_size_and_what_is_legal() -> None:
    with pytest.raises(InvalidInput, match=r"num_attention_heads.*\b8\b.*got 12.*\b1\b.*\b2\b.*\b3\b"):
        check_heads(12, 8)
