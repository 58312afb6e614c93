"""What every engine of the registry must do, on 1, 2 and 4 gloo processes, against one plain process.

In float64, loss, gradient norm, weights and outputs agree to 1e-12 relative (1e-13 absolute near 0). In float32 the
bounds are 1e-6 for loss and norm (2e-7 seen) and 2e-6 absolute for weights after two AdamW steps at learning rate 1e-2
(2e-7 seen); with bfloat16 in forward and backward 2e-2 for loss and norm (5e-3 seen).
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract import engine_reference as ref
from tests.contract.engine_parts import ALL, BACKENDS, MODELS, TRAINED
from tests.contract.engine_states import STAGES
from tests.contract.engine_training import layouts_of
from tests.integration.family import run_patiently

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SEQUENCE_PARALLEL = [(world, backend, *model) for world in (2, 4) for backend in BACKENDS for model in MODELS[:2]]


class Seen:
    """What each rank of each world wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worlds = {
            world: [torch.load(folder / f"world{world}.{rank}.pt", weights_only=False) for rank in range(world)]
            for world in (1, 2, 4)
        }
        self.deaths: dict[str, int] = torch.load(folder / "deaths.pt", weights_only=False)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("engines")
    command = [sys.executable, "-W", "ignore", "-m", "tests.contract.engine_rig", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run_patiently(command, cwd=ROOT, env=env)
    return Seen(folder)


def holds_words(text: str, kind: str, *words: str) -> bool:
    """Whether it is the text of an error of that kind and has the words, in turn."""
    at = 0
    for word in (kind + ": ", *words):
        at = text.find(word, at)
        if at < 0:
            return False
    return True


def same(got: Any, want: Any, *, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=rtol, atol=atol, check_dtype=False)


def same_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], **bounds: float) -> None:
    assert set(got) == set(want)
    for name in got:
        same(got[name], want[name], **bounds)


def holds(ranks: list[dict[str, Any]], case: str, kind: str, name: str) -> None:
    """Steps, weights and outputs of every rank are those of one plain process; every row came back once."""
    want = ref.reference(kind, name)
    for rank in ranks:
        got = rank[case]
        for step, (loss, norm) in enumerate(zip(want.losses, want.norms, strict=True)):
            same(got["steps"][step]["loss"], loss)
            same(got["steps"][step]["per_token"], loss)
            same(got["steps"][step]["norm"], norm)
            assert got["steps"][step]["stepped"]
        same_weights(got["weights"], want.weights)
        for i, columns in got["outputs"].items():
            assert set(columns) == set(want.outputs[i])
            for column in columns:
                same(columns[column], want.outputs[i][column])
    reported = sorted(i for rank in ranks if rank[case]["reports"] for i in rank[case]["outputs"])
    assert reported == list(ALL)


@pytest.mark.parametrize(("world", "backend", "kind", "name", "cut"), TRAINED)
def test_training_is_that_of_one_process_however_rows_are_cut(
    seen: Seen, world: int, backend: str, kind: str, name: str, cut: str
) -> None:
    """E7, F1, G1: loss, logged loss, gradient norm, weights and the order of outputs."""
    holds(seen.worlds[world], f"train/{backend}/{kind}/{name}/{cut}", kind, name)


@pytest.mark.parametrize(("world", "backend", "kind", "name"), SEQUENCE_PARALLEL)
def test_ranks_that_share_rows_train_alike(seen: Seen, world: int, backend: str, kind: str, name: str) -> None:
    holds(seen.worlds[world], f"sp2/{backend}/{kind}/{name}", kind, name)


@pytest.mark.parametrize(("name", "mode"), ref.POLICY_STEPS)
def test_policy_losses_gradients_and_metrics_do_not_move_with_the_cluster(seen: Seen, name: str, mode: str) -> None:
    """4 ranks with rows of their own, 2 pairs that share rows, 4 that share all: as one process, row by row."""
    want = seen.worlds[1][0][f"losses/fsdp2/1/{name}/{mode}"]
    assert want["norm"] > 0
    assert want["actor/kl_loss"] > 0
    for rank in seen.worlds[4]:
        for backend, dp_size, *_ in layouts_of(ref.POLICY_STEPS.index((name, mode)), 4):
            got = rank[f"losses/{backend}/{dp_size}/{name}/{mode}"]
            assert set(got) == set(want)
            for key in want:
                same(got[key], want[key])


@pytest.mark.parametrize("case", ["offload", "sync at each", "checkpointing", "no reshard", "chunks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_of_memory_change_no_number(seen: Seen, backend: str, case: str) -> None:
    holds(seen.worlds[2], f"variant/{backend}/{case}", "language_model", "llama")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_float32_stays_within_its_bounds(seen: Seen, world: int, backend: str) -> None:
    want = ref.reference("language_model", "llama", dtype="float32")
    for rank in seen.worlds[world]:
        got = rank[f"train/{backend}/float32"]
        for step in range(2):
            same(got["steps"][step]["loss"], want.losses[step], rtol=1e-6)
            same(got["steps"][step]["norm"], want.norms[step], rtol=1e-6)
        same_weights(got["weights"], want.weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_keeps_master_weights_and_is_near(seen: Seen, backend: str) -> None:
    want = ref.reference("language_model", "llama", dtype="float32")
    for rank in seen.worlds[2]:
        got = rank[f"variant/{backend}/bfloat16"]
        assert {value.dtype for value in got["weights"].values()} == {torch.float32}
        for step in range(2):
            same(got["steps"][step]["loss"], want.losses[step], rtol=0.02)
            same(got["steps"][step]["norm"], want.norms[step], rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_moves_in_and_out_what_a_mode_needs(seen: Seen, backend: str) -> None:
    train, evaluate = {"model": True, "optimizer": True}, {"model": True, "optimizer": False}
    assert seen.worlds[1][0][f"moves/{backend}"] == [
        ("cpu", train),
        ("cpu", train),
        ("cpu", evaluate),
        ("cpu", evaluate),
    ]


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_come_out_as_hf_names_them(seen: Seen, world: int, backend: str, kind: str, name: str) -> None:
    want = ref.start(kind, name).state_dict()
    for rank in seen.worlds[world]:
        got = rank[f"train/{backend}/{kind}/{name}/dynamic"]["initial"]
        assert list(got) == list(want)
        assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_on_disk_reaches_every_rank(seen: Seen, backend: str) -> None:
    want = ref.hf_model("llama").state_dict()
    for rank in seen.worlds[2]:
        got = rank[f"folder/{backend}"]
        assert list(got) == list(want)
        assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("rows_of_last", [1, 0])
@pytest.mark.parametrize(("kind", "name"), MODELS[:2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_weight_micro_batches_change_nothing(
    seen: Seen, backend: str, kind: str, name: str, rows_of_last: int
) -> None:
    """C2, C7: a rank with one row or none takes part in every meeting, with gradient 0, no loss call and no output."""
    case = f"zero_weight/{backend}/{kind}/{rows_of_last}"
    first, last = (rank[case] for rank in seen.worlds[2])
    want = ref.reference(kind, name, steps=1, numbers=first["everyone"])
    for rank in (first, last):
        same(rank["loss"], want.losses[0])
        same(rank["norm"], want.norms[0])
        same_weights(rank["weights"], want.weights)
        same(rank["per_token"], want.losses[0])
        assert rank["count"] == ref.num_tokens(first["everyone"])
    assert len(first["asked"]) > 1
    assert (sum(first["asked"]), sum(last["asked"])) == (4, rows_of_last)
    assert (first["rows"], last["rows"]) == (4, rows_of_last)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_a_sound_gradient_is_skipped_and_said_so(seen: Seen, world: int, backend: str) -> None:
    for rank in seen.worlds[world]:
        got = rank[f"skipped/{backend}"]
        assert got["stepped"] == (False, False)
        assert got["norms"][0] != got["norms"][0]
        assert (got["norms"][1], got["loss"]) == (0.0, 0.0)
        assert got["warnings"] == [
            "optimizer step skipped: the gradient norm is nan",
            "optimizer step skipped: no token counts on any rank",
        ]
        assert all(torch.equal(got["before"][name], got["after"][name]) for name in got["before"])


def test_a_rank_without_rows_agrees_that_no_token_counts(seen: Seen) -> None:
    assert [rank["skipped/no rows"] for rank in seen.worlds[2]] == [False, False]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no mode", "WrongState mode 'train' None"),
        ("eval", "WrongState mode 'train' 'eval'"),
        ("nested", "WrongState mode 'eval'"),
        ("frozen", "WrongState optimizer"),
        ("uncut", "InvalidInput max_token_len_per_gpu None"),
        ("cap", "InvalidInput plan 16"),
        ("ranks", "InvalidInput plan 1 2"),
        ("other rows", "InvalidInput data 16"),
        ("detached", "InvalidInput loss"),
        ("bare", "InvalidInput loss_function Tensor"),
        ("number", "InvalidInput metrics['kl'] 1.0"),
        ("no loss", "InvalidInput loss_function None"),
        ("mini_batch", "InvalidInput mini_batch 0"),
        ("temperature", "InvalidInput temperature 0.0"),
        ("sp", "InvalidInput sp_size 1 2"),
    ],
)
def test_what_comes_out_of_turn_is_refused(seen: Seen, case: str, words: str) -> None:
    assert holds_words(seen.worlds[1][0][f"state/{case}"], *words.split())


def test_a_plan_with_lone_rows_above_the_cap_runs_where_the_engine_allows_them(seen: Seen) -> None:
    assert seen.worlds[1][0]["state/alone"]


def test_an_engine_without_an_optimizer_still_infers(seen: Seen) -> None:
    assert seen.worlds[1][0]["state/frozen passes"] == len(ALL)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_goes_on_with_the_same_curve(seen: Seen, world: int, backend: str) -> None:
    kind, name = ("language_model", "llama") if backend == "ddp" else ("value_model", "qwen2")
    want = ref.reference(kind, name, steps=4)
    for rank in seen.worlds[world]:
        got = rank[f"checkpoint/{backend}"]
        for other in BACKENDS:
            run = got["resumed"][other]
            assert run["extra"]["epoch"] == 1
            assert run["extra"]["seen"].tolist() == [3, 1]
            for step in (0, 1):
                same(run["steps"][step]["loss"], got["on"]["steps"][step]["loss"])
                same(run["steps"][step]["loss"], want.losses[2 + step])
            same_weights(run["weights"], want.weights)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_before_the_first_step_counts_no_step(seen: Seen, world: int, backend: str) -> None:
    kind, name = ("language_model", "llama") if backend == "ddp" else ("value_model", "qwen2")
    want = ref.reference(kind, name)
    for rank in seen.worlds[world]:
        got = rank[f"checkpoint/{backend}/again"]
        for step in (0, 1):
            same(got["steps"][step]["loss"], want.losses[step])
        same_weights(got["weights"], want.weights)


@pytest.mark.parametrize("world", [1, 2])
def test_old_checkpoints_go_once_the_new_one_is_named(seen: Seen, world: int) -> None:
    for rank in seen.worlds[world]:
        assert rank["checkpoint/kept"] == (["latest", "step_00000003", "step_00000003.1"], "step_00000003.1")
        there = "['step_00000003', 'step_00000003.1']"
        assert holds_words(rank["checkpoint/errors"], "CheckpointError", "step 9", there)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_save_leaves_the_last_good_checkpoint(seen: Seen, stage: str) -> None:
    root = seen.folder / f"killed-{STAGES.index(stage)}"
    assert seen.deaths[stage] == -9
    got = torch.load(f"{root}.resumed.pt", weights_only=False)
    assert got["extra"] == {"step": 1}
    saved = torch.load(root.with_suffix(".pt"), weights_only=False)
    assert all(torch.equal(got["weights"][name], saved[name]) for name in saved)
    died_late = stage == "before the pointer"
    assert (".draft_step_00000002" in got["there"]) == (not died_late)
    assert got["then"] == {"step": 2}
    assert got["latest"] == ("step_00000002.1" if died_late else "step_00000002")
    assert not [name for name in got["left"] if name.startswith(".draft")]


def test_ranks_agree_on_a_count_in_one_collective(seen: Seen) -> None:
    first, other = (rank["C1"] for rank in seen.worlds[2])
    assert [len(rank["indices"]) for rank in (first, other)] == [5, 5]
    for rank in (first, other):
        assert sorted(i for rows in rank["indices"] for i in rows) == [0, 1, 2, 3, 4]
        assert rank["collectives"] == 1
    for rank in seen.worlds[2]:
        assert holds_words(rank["C1/no group"], "InvalidInput", "group", "2", "None")


def test_a_rank_with_too_few_rows_is_an_error_or_filled(seen: Seen) -> None:
    for rank in seen.worlds[2]:
        assert holds_words(
            rank["C2/error"], "InfeasiblePlan", "rank 1", "4", "enough for 2", 'on_shortage="zero_weight"'
        )
    first, other = (rank["C2/zero_weight"] for rank in seen.worlds[2])
    assert first["indices"] == [[0], [1], [2], [3]]
    assert other == {"indices": [[0], [1], [], []], "rows": [1, 1, 1, 1]}
    assert [rank["empty"] for rank in seen.worlds[2]] == [[[0], [1]], [[], []]]


def test_a_row_above_the_cap_is_the_same_error_on_every_rank(seen: Seen) -> None:
    for rank in seen.worlds[2]:
        assert holds_words(rank["B3/error"], "InfeasiblePlan", "rank 0", "row 0", "4096", "got 4097")
    assert [rank["B3/alone"] for rank in seen.worlds[2]] == [[[0], [1]], [[0], [1]]]


def test_errors_of_one_rank_are_raised_on_all(seen: Seen) -> None:
    """Odd groups, indivisible rows, a batch without tokens, other settings."""
    for rank in seen.worlds[2]:
        assert holds_words(rank["H6/odd"], "InvalidInput", "rank 1", "force_group_size = 2", "got 3")
        assert holds_words(rank["fixed"], "InvalidInput", "rank 1", "micro_batch_size = 2", "got 3", "[1, 3]")
        assert holds_words(rank["malformed"], "InvalidInput", "rank 1", "'input_ids'")
        assert holds_words(rank["settings"], "InvalidInput", "micro-batch settings", "[1]")


def test_a_plan_needs_no_collective(seen: Seen) -> None:
    for rank in seen.worlds[2]:
        assert rank["planned"] == {"indices": [[0], [1]], "collectives": 0}
