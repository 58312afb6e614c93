"""The main job's parts, each by itself; ``test_main_job_runs`` runs it whole."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# psutil, pandas and reasoning-gym are typed in part only.

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.verl_rule import verl_micro_batches
from equipoise.errors import EquipoiseError, InvalidInput
from examples.main_job import job, smollm2
from examples.main_job.__main__ import main, parser
from examples.main_job.command import verl_command, verl_environment
from examples.main_job.display import View, plain, render
from examples.main_job.picture import draw
from examples.main_job.prepare import Inputs, plan_inputs
from examples.main_job.presets import NUM_RANKS, PRESETS
from examples.main_job.reward import answer, compute_score
from examples.main_job.steps import Ledger, Step
from examples.main_job.table import markdown_table, write_summary
from examples.main_job.watch import Log, StopRequest
from tests.unit.main_job_lines import LENGTHS, append, metrics_line, record_line


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Two steps that are over and a third that has its plan."""
    record, metrics = tmp_path / "plans.jsonl", tmp_path / "metrics.jsonl"
    result = Ledger(record=record, metrics=metrics)
    for number in (1, 2, 3):
        append(record, record_line(number))
        for step in result.look():
            assert step.planned is not None
            step.verl = verl_micro_batches(step.planned.lengths, dp_size=2, num_mini_batches=2, max_token_len=140)
        if number < 3:
            append(metrics, metrics_line(number, 2.0 * number))
    result.look()
    return result


def test_a_step_joins_its_plan_and_its_metrics(ledger: Ledger):
    step = ledger.steps[0]
    assert step.planned is not None
    assert step.planned.real == LENGTHS[:7]
    assert step.planned.max_tokens == 130
    assert step.planned.meetings(step.planned.micro_batches) == [[[50.0, 50.0]], [[130.0, 130.0]]]
    assert (step.reward, step.update_s, step.over_bound) == (0.25, 2.0, 1.0)
    assert step.over_bound_verl is not None
    assert step.over_bound_verl >= 1.0
    assert len(ledger.done) == 2


def test_an_update_is_predicted_from_the_steps_before_it_alone(ledger: Ledger):
    assert [step.predicted_s for step in ledger.steps] == [None, 2.0, 3.0]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path):
    record = tmp_path / "plans.jsonl"
    ledger = Ledger(record=record, metrics=tmp_path / "metrics.jsonl")
    text = json.dumps(record_line(1)) + "\n"
    record.write_text(text[:40])
    assert ledger.look() == []
    record.write_text(text)
    assert [step.number for step in ledger.look()] == [1]
    assert ledger.look() == []


def test_plans_of_other_roles_are_left_out(tmp_path: Path):
    record = tmp_path / "plans.jsonl"
    append(record, {**record_line(1), "role": "critic"})
    assert Ledger(record=record, metrics=tmp_path / "metrics.jsonl").look() == []


def test_the_table_has_a_line_a_step_and_dashes_for_what_is_not_known(ledger: Ledger):
    lines = markdown_table(ledger.steps, title="A run").splitlines()
    assert lines[0] == "# A run"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][:4] == ["step", "reward", "rows", "tokens"]
    assert [row[0] for row in rows[2:]] == ["1", "2", "3"]
    assert rows[2][rows[0].index("update predicted (s)")] == "–"
    assert rows[3][rows[0].index("response min/mean/max")] == "3/10/30"
    assert rows[4][rows[0].index("reward")] == "–"
    assert "earlier steps" in lines[-1]


def test_the_summary_has_its_keys_and_one_entry_a_step(ledger: Ledger, tmp_path: Path):
    path = tmp_path / "summary.json"
    write_summary(path, ledger.done, model="tiny", seconds=12.5, memory_gb=1.0, complete=True)
    summary = json.loads(path.read_text())
    for key in ("model", "steps", "cap", "seconds"):
        assert not isinstance(summary[key], list)
    for key in ("reward", "lockstep_over_bound", "lockstep_over_bound_verl", "max_tokens"):
        assert len(summary[key]) == summary["steps"] == 2
    assert max(summary["max_tokens"]) <= summary["cap"] == 140


def test_an_empty_run_is_summed_up_too(tmp_path: Path):
    write_summary(tmp_path / "s.json", [], model="tiny", seconds=1.0, memory_gb=0.0, complete=False)
    assert json.loads((tmp_path / "s.json").read_text())["steps"] == 0
    assert not draw(tmp_path / "p.png", [], title="")
    assert not (tmp_path / "p.png").exists()


def test_the_picture_is_drawn(ledger: Ledger, tmp_path: Path):
    assert draw(tmp_path / "p.png", ledger.done, title="Who works and who waits")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits_its_terminal(ledger: Ledger, width: int):
    view = View(
        title="title",
        task="task",
        phase="step 3: training as planned",
        steps=ledger.steps,
        num_steps=5,
        fraction=0.4,
        elapsed_s=75.0,
        left_s=62.0,
        memory_gb=3.0,
        peak_gb=4.0,
        log="outputs/latest/verl.log",
    )
    console = Console(width=width, height=40, file=io.StringIO(), record=True)
    console.print(render(view, width=width, height=40))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(line.strip("│ ") for line in lines).split())
    assert "2 of 5 steps · step 3: training as planned · 1:15 gone, about 1:02 left" in text
    assert "1.000" in text
    assert "░" in text
    few = Console(width=width, height=24, file=io.StringIO(), record=True)
    few.print(render(view, width=width, height=24))
    assert len(few.export_text().splitlines()) <= 24


def test_a_plain_line_needs_nothing_but_the_number():
    assert plain(Step(number=4)).startswith("step 4 · reward – · no plan")


@pytest.mark.parametrize(
    ("response", "number"),
    [("4 + 1 = 5.", "5"), ("It is -3", "-3"), ("1,024!", "1024"), ("2.5 each", "2.5"), ("none", ""), ("", "")],
)
def test_the_answer_is_the_last_number(response: str, number: str):
    assert answer(response) == number


def test_the_reward_is_that_of_reasoning_gym():
    arguments: dict[str, Any] = {
        "data_source": "reasoning_gym/basic_arithmetic",
        "ground_truth": "5",
        "extra_info": {"index": 0},
    }
    assert compute_score(solution_str="4 + 1 = 5", **arguments) == {"score": 1.0, "acc": 1.0}
    assert compute_score(solution_str="4 + 1 = 6", **arguments)["acc"] == 0.0
    assert compute_score(solution_str="", **arguments)["acc"] == 0.0


def test_the_same_seed_draws_the_same_prompts(tmp_path: Path):
    import pandas as pd

    from examples.main_job.sums import write

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, size=12, seed=seed)
    a, b, c = ([row[-1]["content"] for row in pd.read_parquet(tmp_path / name)["prompt"]] for name in "abc")
    assert a == b != c
    assert all(re.fullmatch(r"Calculate \d+ \+ \d+\.", question) for question in a)


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EquipoiseError, match=smollm2.PACKAGE):
        smollm2.gguf_folder()
    with pytest.raises(EquipoiseError, match="--model tiny"):
        plan_inputs(PRESETS["smollm2"], tmp_path, steps=1, seed=1)


def test_verl_gets_equipoise_and_the_user_the_last_word(tmp_path: Path):
    inputs = Inputs(model=tmp_path, train=tmp_path, val=tmp_path, reward=tmp_path)
    extra = ["equipoise.algorithm=kk", "trainer.total_epochs=1"]
    command = verl_command(
        PRESETS["tiny"], inputs, steps=3, seed=1, folder=tmp_path, record=tmp_path / "r.jsonl", extra=extra
    )
    assert command[:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    assert command[3] == "+equipoise=default"
    assert command[-2:] == extra
    assert verl_environment(metrics=tmp_path / "m")["VERL_PLATFORM"] == "cpu"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=str)
def test_presets_divide_into_ranks_and_optimizer_steps(preset: Any):
    assert preset.train_batch_size >= 2 * preset.mini_batch_size
    assert preset.train_batch_size % preset.mini_batch_size == 0
    assert preset.mini_batch_size * preset.num_samples % NUM_RANKS == 0
    assert preset.max_token_len >= preset.max_prompt_length + preset.max_response_length


def test_latest_is_a_link_to_the_newest_run(tmp_path: Path):
    first = job.run_folder(tmp_path)
    second = job.run_folder(tmp_path)
    assert first != second
    assert (tmp_path / "latest").resolve() == second.resolve()
    assert not (tmp_path / "latest").readlink().is_absolute()


def test_a_real_folder_called_latest_is_not_replaced(tmp_path: Path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(InvalidInput, match=str(tmp_path / "latest")):
        job.run_folder(tmp_path)


def test_signals_are_noted_and_the_handlers_restored():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


def test_the_log_tells_of_training_and_of_dead_workers(tmp_path: Path):
    log = Log(tmp_path / "verl.log")
    log.look()
    assert log.tail(3) == []
    log.path.write_text("one\n\x1b[36mtwo\x1b[0m\n\nTraining Progress: 0%\n")
    log.look()
    assert (log.training, log.fatal_at) == (True, None)
    assert log.tail(2) == ["two", "Training Progress: 0%"]
    with log.path.open("a") as file:
        file.write("ray.exceptions.ActorDiedError: gone\n")
    log.look()
    assert log.fatal_at is not None


def test_help_names_the_models_and_the_files(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("smollm2", "tiny", "--steps", "summary.json", "OVERRIDE"))


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seed", "-1"], ["--model", "huge"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error" in capsys.readouterr().err


def test_overrides_come_after_two_dashes():
    options = parser().parse_args(["--steps", "3", "--", "equipoise.algorithm=kk", "+a.b=1"])
    assert options.overrides == ["equipoise.algorithm=kk", "+a.b=1"]
