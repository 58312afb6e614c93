"""Before RL: a few steps on right answers, so that some rollouts earn a reward."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from examples.minimal import losses
from examples.minimal.rows import Sample
from examples.minimal.task import tiny_model

if TYPE_CHECKING:
    from examples.minimal.train import Trainer

FIRST_PROMPT = 2**29  # those of RL begin at 0


def first_policy(trainer: Trainer) -> Path:
    """Folder of the HF model that RL begins with: random weights after ``sft_steps``. It is made once in a run."""
    s, folder, draft = trainer.settings, trainer.out / "policy", trainer.out / ".policy"
    if trainer.from_driver(str(folder.exists())) == "True":
        return folder
    trainer.record.back_to("sft", 0)
    engine = trainer.engine(tiny_model(), lr=s.sft_lr)
    for step in range(1, s.sft_steps + 1):
        began = time.perf_counter()
        first = FIRST_PROMPT + step * s.sft_rows
        samples = [Sample(number=n, response=trainer.task.answer(n)) for n in range(first, first + s.sft_rows)]
        job = trainer.plan(samples, 1)
        figures = trainer.update("sft", engine, trainer.mine(job), job, partial(losses.sft, s))
        trainer.record.add("sft", step, s.sft_steps, figures, seconds=time.perf_counter() - began)
    trainer.sampler.load(engine.get_per_tensor_param())

    def save() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        trainer.sampler.model.save_pretrained(draft)
        draft.rename(folder)

    trainer.on_driver(save, doing="saving the first policy")
    return folder
