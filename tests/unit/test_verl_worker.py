"""In a worker: the plan's micro-batches, or verl's own with real rows still counted, and errors that all ranks get."""

# verl is typed in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import equipoise as eq
from equipoise.trainer_hooks.on_verl._patches import TIMES_KEY, WIRE_KEY
from equipoise.trainer_hooks.on_verl.wire import encode, wire_of, wire_of_counts
from equipoise.trainer_hooks.on_verl.worker import micro_batches as hook
from equipoise.training.batch import token_lengths
from equipoise.wire import WireError

LENGTHS = [9, 4, 7, 2, 5, 8, 6, 2]
"""Rows of two mini-batches; the fourth and the last are padding."""
PADDING = np.array(LENGTHS) == 2


@pytest.fixture(autouse=True)
def _nothing_warned_of_yet() -> None:
    hook._warned.clear()  # pyright: ignore[reportPrivateUsage]


def row_columns(length: int) -> dict[str, torch.Tensor]:
    padding = length == 2
    ids = torch.full((2,), 7) if padding else torch.arange(length)
    prompt = 1 if padding else 2
    mask = torch.zeros(1) if padding else torch.ones(length - prompt)
    return {"input_ids": ids, "responses": ids[prompt:], "response_mask": mask}


def batch_of(lengths: list[int], message: object, *, everyones: list[int] | None, **more: Any) -> Any:
    """Rows as verl's engine has them when it asks for micro-batches; an update where ``everyones`` is given."""
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    rows = [row_columns(length) for length in lengths]
    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]
    }
    data = tu.get_tensordict(columns, non_tensor_dict={"max_token_len_per_gpu": 20, WIRE_KEY: message, **more})
    if everyones is not None:
        tu.assign_non_tensor(data, global_token_num=NonTensorData(everyones), global_batch_size=len(lengths))
    return data


def planned(steps: int = 2, *, dp: int = 1, cap: int = 20) -> tuple[eq.StepPlan, bytes]:
    lengths = np.array(LENGTHS)
    spec = eq.StepSpec(dp_size=dp, num_mini_batches=steps, max_token_len_per_gpu=cap)
    plan = eq.plan_step(lengths, spec, is_padding=PADDING)
    return plan, encode(wire_of(plan, lengths))


def prepare(data: Any, **asked: Any) -> tuple[Any, Any, int | None]:
    """Micro-batches, ids and the count that sequence means divide by."""
    from verl.utils import tensordict_utils as tu

    def verls_own(*_: Any, **_named: Any) -> Any:
        return "verl's own", None

    found, ids = hook.prepare_planned(verls_own, data, **asked)
    return found, ids, tu.get_non_tensor_data(data, "global_batch_size", None)


def mini_batch(plan: eq.StepPlan, step: int) -> list[int]:
    return [LENGTHS[row] for rows in plan.micro_batches(0)[step] for row in rows]


@pytest.mark.parametrize("step", [0, 1])
def test_an_update_runs_the_planned_micro_batches(step: int) -> None:
    plan, message = planned()
    lengths = mini_batch(plan, step)
    found, ids, count = prepare(batch_of(lengths, message, everyones=lengths))
    want = [[LENGTHS[row] for row in rows] for rows in plan.micro_batches(0)[step]]
    assert [token_lengths(micro_batch).tolist() for micro_batch in found] == want
    assert [row for rows in ids for row in rows] == list(range(4))
    assert count == plan.num_real_rows[step]


def test_a_pass_runs_the_planned_micro_batches() -> None:
    plan, message = planned(1)
    lengths = mini_batch(plan, 0)
    found, ids, count = prepare(batch_of(lengths, message, everyones=None))
    assert [token_lengths(micro_batch).tolist() for micro_batch in found] == [
        [LENGTHS[row] for row in rows] for rows in plan.micro_batches(0)[0]
    ]
    assert len(ids) == plan.sizes[0].shape[1]
    assert count is None


def test_rows_that_are_not_planned_are_verls_and_real_ones_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [9, 2, 4, 2]
    for _ in range(2):
        found, _, count = prepare(batch_of(lengths, planned()[1], everyones=lengths))
        assert (found, count) == ("verl's own", 2)
    assert len(caplog.messages) == 1
    assert "count padding" not in caplog.messages[0]
    assert "data-parallel" not in caplog.messages[0]


def test_columns_that_do_not_tell_padding_are_named_as_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [9, 2, 4, 2]
    data = batch_of(lengths, planned()[1], everyones=lengths)
    del data["responses"]
    found, _, count = prepare(data)
    assert (found, count) == ("verl's own", 4)
    assert "count padding" in caplog.messages[0]


def test_a_fully_masked_row_is_no_padding() -> None:
    lengths = [9, 3, 4, 5]
    data = batch_of(lengths, planned()[1], everyones=lengths)
    data["response_mask"].values().zero_()
    assert prepare(data)[2] == 4


@pytest.mark.parametrize(
    ("cap", "asked", "more"),
    [
        (20, {"num_batches_divided_by": 7}, {}),
        (20, {"min_num_micro_batch": 9}, {}),
        (20, {}, {"force_group_size": 2}),
        (20, {}, {"max_token_len_per_gpu": 8}),
    ],
)
def test_an_engine_that_wants_other_micro_batches_gets_verls_and_real_rows_are_counted(
    cap: int, asked: dict[str, int], more: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    plan, message = planned(cap=cap)
    lengths = mini_batch(plan, 1)
    found, _, count = prepare(batch_of(lengths, message, everyones=lengths, **more), **asked)
    assert (found, count) == ("verl's own", plan.num_real_rows[1])
    assert len(caplog.messages) == 1


@pytest.mark.filterwarnings("ignore:.*is not available:UserWarning")  # engines of verl that are not installed
@pytest.mark.parametrize("asked", [{}, {"num_batches_divided_by": 3, "same_micro_num_in_dp": False}])
def test_verls_own_gets_what_the_engine_asked_for(asked: dict[str, Any]) -> None:
    from verl.workers.engine.utils import prepare_micro_batches

    got: list[dict[str, Any]] = []

    def verls_own(_data: Any, **named: Any) -> Any:
        got.append(named)
        return [], None

    hook.prepare_planned(verls_own, batch_of([9, 2], planned()[1], everyones=[9, 2]), **asked)
    parameters = list(inspect.signature(inspect.unwrap(prepare_micro_batches)).parameters.values())[1:]
    assert got == [{parameter.name: parameter.default for parameter in parameters} | asked]


@pytest.mark.filterwarnings("ignore:.*is not available:UserWarning")
@pytest.mark.parametrize("timed", [True, False])
def test_an_update_that_is_timed_tells_its_mini_batch_and_seconds(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import device
    from verl.workers.engine.utils import postprocess_batch_func

    postprocess: Any = postprocess_batch_func
    monkeypatch.setattr(device, "get_device_name", lambda: "cpu")
    plan, _ = planned()
    lengths = mini_batch(plan, 1)
    data = batch_of(lengths, encode(wire_of(plan, np.array(LENGTHS), timed=timed)), everyones=lengths)
    micro_batches, ids, _ = prepare(data)
    outputs = [{"loss": 0.0, "metrics": {"mfu": 0.5}} for _ in micro_batches]
    metrics = postprocess(outputs, ids, data)["metrics"]
    step, *seconds = metrics.pop(TIMES_KEY, [None])
    assert metrics == {"mfu": [0.5] * len(outputs)}
    assert step == (1 if timed else None)
    assert len(seconds) == (len(outputs) if timed else 0)


def test_a_cap_of_several_gpus_is_their_sum() -> None:
    plan, message = planned(cap=20)
    lengths = mini_batch(plan, 0)
    found, _, _ = prepare(batch_of(lengths, message, everyones=lengths, max_token_len_per_gpu=5, sp_size=4))
    assert found != "verl's own"


def test_fixed_micro_batches_are_cut_by_verl_and_real_rows_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    plan, message = planned()
    lengths = mini_batch(plan, 0)
    found, _, count = prepare(batch_of(lengths, message, everyones=lengths, use_dynamic_bsz=False))
    assert (found, count) == ("verl's own", plan.num_real_rows[0])
    assert caplog.messages == []


def test_rows_that_the_workers_shuffle_are_counted_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    message = encode(wire_of_counts(np.array(LENGTHS), PADDING, 1, 2))
    for lengths, real in ((LENGTHS[:4], 3), ([2, 9, 2, 4], 2)):
        found, _, count = prepare(batch_of(lengths, message, everyones=lengths))
        assert (found, count) == ("verl's own", real)
    assert caplog.messages == []


def test_a_plan_for_other_ranks_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    found, _, count = prepare(batch_of(LENGTHS[:4], planned(dp=2)[1], everyones=LENGTHS[:4]))
    assert (found, count) == ("verl's own", 3)
    assert "2 data-parallel ranks" in caplog.messages[0]
    assert prepare(batch_of(LENGTHS, planned(1, dp=2)[1], everyones=None))[0] == "verl's own"


@pytest.mark.parametrize("everyones", [None, LENGTHS])
@pytest.mark.parametrize("message", [b"", planned()[1][:-1], "plan"])
def test_a_damaged_plan_is_an_error(message: object, everyones: list[int] | None) -> None:
    with pytest.raises(WireError):
        prepare(batch_of(LENGTHS, message, everyones=everyones))


def _rank(rank: int, folder: str, results: Any) -> None:
    """A pass whose plan is damaged on rank 1, then an update whose rows nobody planned."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    plan, message = planned(1, dp=2)
    lengths = [LENGTHS[row] for rows in plan.micro_batches(rank)[0] for row in rows]
    broken = message if rank == 0 else message[:-1] + bytes([message[-1] ^ 1])
    error = ""
    try:
        prepare(batch_of(lengths, broken, everyones=None), dp_group=dist.group.WORLD)
    except WireError as raised:
        error = str(raised)
    others = [[9, 2, 4, 2], [3, 4, 5, 2]]
    data = batch_of(others[rank], message, everyones=[*others[0], *others[1]])
    found, _, count = prepare(data, dp_group=dist.group.WORLD)
    results.put((rank, error, found, count))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_end_alike_where_one_cannot_read_its_plan_and_count_real_rows_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join(60)
    (_, first, *one), (_, second, *other) = found
    assert first == second
    assert "rank 1" in first
    assert one == other == ["verl's own", 5]
