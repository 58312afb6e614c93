"""Start a run, or with ``--multirun`` one after the other: Hydra here, torchrun for the ranks of each."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]

from equipoise.errors import EquipoiseError
from examples.minimal.record import claim
from examples.minimal.settings import CONF, Settings


@hydra.main(version_base="1.3", config_path=CONF, config_name="minimal")
def main(config: Any) -> None:
    """Check the settings, then start ``dp · sp`` ranks and wait for them."""
    job = HydraConfig.get()
    out = Path(job.runtime.output_dir)
    try:
        settings = Settings.of(config)
        claim(out, settings)
    except EquipoiseError as error:
        if not any(out.iterdir()):  # Hydra has just made it
            out.rmdir()
        sys.exit(f"error: {error}")
    print(f"{settings.algorithm} on {settings.engine}, dp {settings.dp}, sp {settings.sp}, in {out}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of a model this small cost more than they save
    ranks = ["--standalone", f"--nproc-per-node={settings.dp * settings.sp}", "-m", "examples.minimal.train"]
    given = [word for word in job.overrides.task if not word.startswith("out=")]
    arguments = [f"--config-name={job.job.config_name}", *given, f"out={_quoted(str(out))}"]
    try:
        torchrun([*ranks, *arguments])
    except (ChildFailedError, SignalException) as error:
        sys.exit(f"{error}\nTo go on from the last checkpoint: python -m examples.minimal {shlex.join(arguments)}")


def _quoted(value: str) -> str:
    """For Hydra's grammar, where it would read more into the value than a string."""
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"


if __name__ == "__main__":
    main()
