"""A rank's rows as micro-batches, on one process; two processes are in ``tests/contract``."""

# tensordict is typed in part only.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import equipoise as eq
from equipoise.errors import InfeasiblePlan, InvalidInput
from equipoise.training.engine import MicroBatches, prepare_micro_batches
from equipoise.training.engine.packing import PackedRow


def rows(lengths: list[int]) -> TensorDict:
    """Rows whose tokens tell their number."""
    ids = torch.nested.as_nested_tensor(
        [torch.full((n,), i, dtype=torch.int64) for i, n in enumerate(lengths)], layout=torch.jagged
    )
    return TensorDict({"input_ids": ids, "number": torch.arange(len(lengths))}, batch_size=[len(lengths)])


def sizes(cut: MicroBatches) -> list[list[int]]:
    return [part.tolist() for part in cut.indices]


def test_every_column_is_cut_by_the_same_rows() -> None:
    cut = prepare_micro_batches(rows([10, 20]), micro_batch_size=1)
    assert sizes(cut) == [[0], [1]]
    for i, one in enumerate(cut.batches):
        assert cast(Any, one["number"]).tolist() == [i]
        assert cast(Any, one["input_ids"]).values().tolist() == [i] * (10, 20)[i]


def test_outputs_come_back_in_order_dense_and_jagged() -> None:
    data = rows([2, 3, 1])
    cut = MicroBatches([eq.reorder(data, [2, 0]), eq.reorder(data, [1])], [np.array([2, 0]), np.array([1])])
    outputs = [
        {"log_probs": cast(Any, one["input_ids"]) * 10, "score": cast(torch.Tensor, one["number"])}
        for one in cut.batches
    ]
    back = cut.restore(outputs)
    assert [row.tolist() for row in cast(Any, back["log_probs"]).unbind()] == [[0, 0], [10, 10, 10], [20]]
    assert cast(Any, back["score"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("number", [1, 3])
def test_restore_wants_all_outputs(number: int) -> None:
    cut = prepare_micro_batches(rows([2, 3, 1]), max_token_len=3)
    outputs = [{"x": torch.zeros(1)}] * number
    with pytest.raises(InvalidInput, match=rf"outputs.*\b2\b.*got {number}"):
        cut.restore(outputs)


def test_restore_wants_all_rows() -> None:
    cut = prepare_micro_batches(rows([2, 3, 1]), max_token_len=3)
    with pytest.raises(InvalidInput, match=r"outputs\[0\]\['x'\].*\b2\b.*got 3"):
        cut.restore([{"x": torch.zeros(3)}, {"x": torch.zeros(1)}])


def test_restore_leaves_zero_weight_micro_batches_out() -> None:
    cut = prepare_micro_batches(rows([2]), max_token_len=3, min_micro_batches=3, on_shortage="zero_weight")
    assert sizes(cut) == [[0], [], []]
    outputs = [{"x": torch.full((1,), float(i))} for i in range(3)]
    assert cast(Any, cut.restore(outputs)["x"]).tolist() == cast(Any, cut.restore(outputs[:1])["x"]).tolist() == [0.0]


@pytest.mark.parametrize("width", [6, 40960])
def test_real_tokens_count_not_the_width(width: int) -> None:
    mask = torch.zeros(2, width, dtype=torch.int64)
    mask[:, :5] = 1
    data = TensorDict({"input_ids": torch.zeros_like(mask), "attention_mask": mask}, batch_size=[2])
    assert sizes(prepare_micro_batches(data, max_token_len=10)) == [[0, 1]]


def test_at_least_as_many_as_asked_and_none_empty() -> None:
    cut = prepare_micro_batches(rows([1000] * 4), max_token_len=4096, min_micro_batches=3)
    assert sorted(len(part) for part in sizes(cut)) == [1, 1, 2]


def test_a_multiple_of_what_is_asked() -> None:
    assert len(prepare_micro_batches(rows([9] * 9), max_token_len=18, multiple=4).indices) == 8
    with pytest.raises(InfeasiblePlan, match=r"rank 0.*\b8\b.*got .*\b5\b"):
        prepare_micro_batches(rows([9] * 5), max_token_len=9, multiple=4)


def test_the_cap_is_that_of_all_ranks_that_share_a_row() -> None:
    assert sizes(prepare_micro_batches(rows([6, 6]), max_token_len=6, sp_size=2)) == [[0, 1]]


def test_pairs_stay_together() -> None:
    cut = prepare_micro_batches(rows([3, 4, 1, 1, 6, 2, 2, 2]), max_token_len=9, force_group_size=2)
    assert sorted(i for part in sizes(cut) for i in part) == list(range(8))
    for part in sizes(cut):
        assert all((i ^ 1) in part for i in part)
    with pytest.raises(InvalidInput, match=r"rows.*force_group_size = 2.*got 3"):
        prepare_micro_batches(rows([1, 1, 1]), max_token_len=9, force_group_size=2)
    with pytest.raises(InvalidInput, match=r"micro_batch_size.*force_group_size = 2.*got 3"):
        prepare_micro_batches(rows([1, 1, 1, 1]), micro_batch_size=3, force_group_size=2)


@settings(deadline=None)  # the first call of a process takes a quarter of a second
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=24),
    cap=st.integers(20, 60),
    least=st.integers(1, 6),
    multiple=st.integers(1, 3),
)
def test_dynamic_micro_batches_hold_every_row_once_within_the_cap(
    lengths: list[int], cap: int, least: int, multiple: int
) -> None:
    cut = prepare_micro_batches(
        rows(lengths), max_token_len=cap, min_micro_batches=least, multiple=multiple, on_shortage="zero_weight"
    )
    parts = sizes(cut)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= cap for part in parts)
    assert len(parts) % multiple == 0
    assert len(parts) >= least
    real = sum(1 for part in parts if part)
    assert real == min(len(parts), len(lengths))


def test_planned_micro_batches_are_the_plans() -> None:
    lengths = [9, 2, 7, 4, 5, 5, 3, 8]
    plan = eq.plan_step(lengths, eq.StepSpec(dp_size=2, num_mini_batches=2, max_token_len_per_gpu=10))
    for rank in range(2):
        mine = plan.rank_rows(rank)
        whole = eq.reorder(rows(lengths), mine)
        steps = plan.micro_batches(rank)
        every = prepare_micro_batches(whole, plan=plan, rank=rank)
        want = [part.tolist() for step in steps for part in step]
        assert [mine[part].tolist() for part in every.indices] == want
        at = 0
        for j, step in enumerate(steps):
            n = sum(part.size for part in step)
            of_whole = prepare_micro_batches(whole, plan=plan, rank=rank, mini_batch=j)
            alone = prepare_micro_batches(eq.reorder(whole, range(at, at + n)), plan=plan, rank=rank, mini_batch=j)
            for cut in (of_whole, alone):
                numbers = [cast(Any, one["number"]).tolist() for one in cut.batches]
                assert numbers == [part.tolist() for part in step]
            at += n


def test_a_plan_refuses_other_rows_and_settings() -> None:
    plan = eq.plan_step([3, 3, 3, 3], eq.StepSpec(dp_size=2, max_token_len_per_gpu=6))
    with pytest.raises(InvalidInput, match=r"data.*\b2\b.*rank 1.*got 3"):
        prepare_micro_batches(rows([3, 3, 3]), plan=plan, rank=1)
    with pytest.raises(InvalidInput, match="settings of micro-batches"):
        prepare_micro_batches(rows([3, 3]), plan=plan, rank=1, max_token_len=8)
    with pytest.raises(InvalidInput, match=r"mini_batch.*got 1"):
        prepare_micro_batches(rows([3, 3]), plan=plan, rank=0, mini_batch=1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "max_token_len, micro_batch_size"),
        ({"max_token_len": 4, "micro_batch_size": 2}, "max_token_len, micro_batch_size.*4.*2"),
        ({"max_token_len": 0}, "max_token_len.*got 0"),
        ({"micro_batch_size": 0}, "micro_batch_size.*got 0"),
        (
            {"micro_batch_size": 2},
            r"rows.*micro_batch_size = 2.*got 3.*\[1, 3",
        ),
        ({"max_token_len": 4, "on_shortage": "zero"}, "on_shortage.*'error', 'zero_weight'.*got 'zero'"),
        ({"max_token_len": 4, "oversize": "drop"}, "oversize.*got 'drop'"),
        ({"max_token_len": 4}, r"row 1.*\b4\b.*got 5"),
    ],
)
def test_what_cannot_be_cut_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        prepare_micro_batches(rows([3, 5, 3]), **settings)


def test_columns_that_cannot_be_cut_are_found_before_ranks_go_on() -> None:
    """Case: nested ids that are not jagged, which raised AttributeError on one rank while the other waited for ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls this layout a prototype
        strided = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    with pytest.raises(InvalidInput, match=r"'input_ids'.*jagged"):
        prepare_micro_batches(TensorDict({"input_ids": strided}, batch_size=[2]), max_token_len=8)
    data = rows([3, 2])
    data._tensordict["number"] = torch.arange(3)  # pyright: ignore[reportPrivateUsage] - as a careless caller would
    with pytest.raises(InvalidInput, match=r"'number'.*\b2\b.*got 3"):
        prepare_micro_batches(data, max_token_len=8)


def test_a_row_without_a_token_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"row 1.*got 0"):
        prepare_micro_batches(rows([3, 0, 3]), max_token_len=8)


def test_a_packed_row_tells_positions_and_the_next_tokens() -> None:
    ids = torch.nested.as_nested_tensor([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], layout=torch.jagged)
    row = PackedRow.of(TensorDict({"input_ids": ids}, batch_size=[2]))
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert row.labels.tolist() == [[6, 7, -100, 9, -100]]
    about = row.unpack(torch.tensor([1.0, 2.0, float("nan"), 4.0, float("nan")]))
    assert [one.tolist() for one in about.unbind()] == [[0.0, 1.0, 2.0], [0.0, 4.0]]


@pytest.mark.parametrize("ids", [torch.zeros(2, 3, dtype=torch.int64), None])
def test_a_row_is_packed_from_jagged_tokens_only(ids: Any) -> None:
    data = TensorDict({} if ids is None else {"input_ids": ids}, batch_size=[2])
    with pytest.raises(InvalidInput, match=r"input_ids.*jagged"):
        PackedRow.of(data)


def test_outputs_of_micro_batches_have_the_same_columns() -> None:
    ids = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    cut = eq.prepare_micro_batches(TensorDict({"input_ids": ids}, batch_size=[2]), micro_batch_size=1)
    one = torch.zeros(1)
    for first, second in (({"y": one}, {"y": one, "z": one}), ({"y": one, "z": one}, {"y": one})):
        with pytest.raises(eq.InvalidInput, match=r"outputs\[1\]"):
            cut.restore([first, second])
