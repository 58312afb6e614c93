"""The minimal trainer: the same curve on every cluster, after a kill too, and no hang where a rank dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.minimal.record import read
from tests.integration.family import LIMIT_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-W", "ignore"]
LAUNCHER = [*PYTHON, "-m", "examples.minimal", "--config-name", "quick"]
PPO = {"algorithm": "ppo", "seed": 1}
GRPO = {"algorithm": "grpo", "sft_steps": 25, "steps": 2, "rollout": "decode"}
CLUSTERS = {
    2: [("ddp", 2, 1), ("ddp", 1, 2), ("fsdp2", 2, 1), ("fsdp2", 1, 2)],
    4: [("ddp", 2, 2), ("fsdp2", 2, 2)],
}
"""Backend, data-parallel and sequence-parallel size, by the number of processes."""

RUNS = """
import json, multiprocessing, sys
import matplotlib.backends.backend_agg, matplotlib.figure, reasoning_gym
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from transformers import LlamaForCausalLM
from equipoise.training.engine import ddp, fsdp2
from examples.minimal.processes import end_with_parent, quiet
from examples.minimal.settings import CONF, Settings
from examples.minimal.train import Trainer

def rank(number, world, runs):
    end_with_parent()
    quiet()
    store = f"file://{sys.argv[2]}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=world)
    with initialize_config_dir(CONF, version_base="1.3"):
        for run in runs:
            Trainer(Settings.of(compose("quick", overrides=run))).run()
    dist.destroy_process_group()

fork = multiprocessing.get_context("fork")  # everything is imported once
for world, runs in json.loads(sys.argv[1]).items():
    ranks = [fork.Process(target=rank, args=(number, int(world), runs)) for number in range(int(world))]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        sys.exit(1)
"""

DEATH = """
import os, signal, sys, time
from pathlib import Path
from examples.minimal import losses, train

def luckless(*arguments):
    Path(os.environ["DIED"]).write_text(repr(time.time()))
    if os.environ["HOW"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("rank 1 is out of luck")

if os.environ["RANK"] == "1":
    losses.policy = luckless
train.main()
"""


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(ranks: int, *command: str) -> list[str]:
    return [*PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


def said(*processes: subprocess.Popen[str], seconds: float = LIMIT_S) -> list[str]:
    """What they printed, once all have ended; none is left running."""
    deadline = time.monotonic() + seconds
    try:
        return [process.communicate(timeout=deadline - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def overrides(**settings: Any) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """What runs on one, two and four processes wrote; those on one process came from ``--multirun``."""
    folder = tmp_path_factory.mktemp("minimal")
    (folder / "runs.py").write_text(RUNS)
    alone = start([*LAUNCHER, "--multirun", "engine=ddp,fsdp2", *overrides(**PPO, out=folder / "alone")])
    places = {cluster: folder / "-".join(map(str, cluster)) for clusters in CLUSTERS.values() for cluster in clusters}
    runs = {
        world: [
            overrides(engine=engine, dp=dp, sp=sp, out=places[engine, dp, sp], **PPO) for engine, dp, sp in clusters
        ]
        for world, clusters in CLUSTERS.items()
    }
    for world, settings in ((1, {"engine": "ddp"}), (2, {"engine": "fsdp2", "dp": 2})):
        places["grpo", world, 1] = folder / f"grpo-{world}"
        runs.setdefault(world, []).append(overrides(**settings, **GRPO, out=places["grpo", world, 1]))
    ranks = start([*PYTHON, str(folder / "runs.py"), json.dumps(runs), str(folder)])
    texts = said(ranks, alone)
    assert ranks.returncode == 0, texts[0][-4000:]
    assert alone.returncode == 0, texts[1][-4000:]
    assert texts[1].count("curve.png") == 2
    found = {cluster: read(place) for cluster, place in places.items()}
    for number, engine in enumerate(("ddp", "fsdp2")):
        found[engine, 1, 1] = read(folder / "alone" / f"{number}_ppo_{engine}_dp1_sp1")
    return found


def same(curve: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """All but the time and the tokens (they count padding rows too)."""
    for line, other in zip(curve, want, strict=True):
        assert line["phase"] == other["phase"]
        apart = {"seconds", "tokens", "phase"}
        left, right = ({name: x for name, x in each.items() if name not in apart} for each in (line, other))
        assert left == pytest.approx(right, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("cluster", [*CLUSTERS[2], *CLUSTERS[4], ("ddp", 1, 1)])
def test_the_curve_is_the_same_on_every_cluster(
    curves: dict[tuple[str, int, int], list[dict[str, Any]]], cluster: tuple[str, int, int]
) -> None:
    """Losses, norms and rewards of each step of SFT and PPO with a reference; D2: with padding rows where dp is 2."""
    want = curves["fsdp2", 1, 1]
    same(curves[cluster], want)
    steps = [line for line in want if line["phase"] == "rl"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert len(want) == 4 + 3
    assert all(line["actor/grad_norm"] > 1e-3 and line["critic/grad_norm"] > 1e-3 for line in steps)
    assert any(line["reward"] > 0 for line in steps)
    assert len({line["actor/loss"] for line in steps}) == 3
    if cluster[1] == 2:
        assert curves[cluster][-1]["tokens"] > steps[-1]["tokens"]


def test_the_curve_of_grpo_is_the_same_on_two_ranks(curves: dict[tuple[str, int, int], list[dict[str, Any]]]) -> None:
    """D1 and D2: ten rows a mini-batch, one of them padding, on fsdp2; nine on ddp alone."""
    want = curves["grpo", 1, 1]
    same(curves["grpo", 2, 1], want)
    assert any(line["reward"] > 0 and line["actor/pg_loss"] != 0 for line in want if line["phase"] == "rl")


def test_a_killed_run_leaves_no_rank_behind_and_goes_on_elsewhere_with_the_same_curve(
    curves: dict[tuple[str, int, int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Killed after a step on two ranks of fsdp2; resumed on one of ddp."""
    out = tmp_path / "run"
    first = start([*LAUNCHER, *overrides(**PPO, dp=2, save_every=1, out=out)])
    deadline = time.monotonic() + LIMIT_S
    while not any(line["phase"] == "rl" and line["step"] >= 2 for line in read(out)):
        assert time.monotonic() < deadline
        assert first.poll() is None, said(first)[0][-4000:]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    began = time.monotonic()
    (text,) = said(first)  # ends once the ranks, which hold the pipe too, have ended
    assert time.monotonic() - began < 10
    assert "curve.png" not in text
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "st')  # as a kill in the middle of a write
    second = start([*LAUNCHER, *overrides(**PPO, engine="ddp", out=out)])
    (text,) = said(second)
    assert second.returncode == 0, text[-4000:]
    assert "sft" not in text.split("\n", 1)[1]
    same(read(out), curves["fsdp2", 1, 1])
    assert (out / "curve.png").stat().st_size > 1000


def test_a_rank_that_dies_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    """By an error, and by a signal: within 30 seconds, whatever the other rank waits for."""
    (tmp_path / "death.py").write_text(DEATH)
    settings = {how: overrides(dp=2, sft_steps=1, out=tmp_path / how) for how in ("raise", "kill")}
    runs = {
        how: start(
            torchrun(2, str(tmp_path / "death.py"), "--config-name=quick", *words),
            DIED=str(tmp_path / f"{how}.died"),
            HOW=how,
        )
        for how, words in settings.items()
    }
    ended = dict[str, float]()
    deadline = time.monotonic() + LIMIT_S
    while len(ended) < len(runs) and time.monotonic() < deadline:
        ended |= {how: time.time() for how, run in runs.items() if how not in ended and run.poll() is not None}
        time.sleep(0.1)
    texts = dict(zip(runs, said(*runs.values()), strict=True))
    for how, run in runs.items():
        assert ended[how] - float((tmp_path / f"{how}.died").read_text()) < 30
        assert run.returncode != 0
    assert "in luckless" in texts["raise"]
    assert "RuntimeError: rank 1 is out of luck" in texts["raise"]
    assert "Signal 9 (SIGKILL)" in texts["kill"]


def test_the_launcher_helps_and_refuses_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "run"
    runs = {
        name: start([*LAUNCHER, *arguments])
        for name, arguments in {
            "help": ["--help"],
            "unknown": ["lerning_rate=1"],
            "bad": ["sp=3", f"out={out}"],
        }.items()
    }
    texts = dict(zip(runs, said(*runs.values()), strict=True))
    assert [run.returncode == 0 for run in runs.values()] == [True, False, False]
    assert "--multirun" in texts["help"]
    assert "max_token_len_per_gpu: 200" in texts["help"]
    assert "Key 'lerning_rate' not in 'Settings'" in texts["unknown"]
    assert texts["bad"] == "error: sp must divide the model's 4 heads, got 3; legal values: [1, 2, 4]\n"
    assert not out.exists()
