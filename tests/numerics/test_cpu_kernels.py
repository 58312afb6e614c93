"""What is equal to the bit stays so with the kernels of other processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
AVX2 = torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "AVX2"}
SELECTION = "company or null_sums or another_order or computed_again or shape or packed_row or equals or gradients"
wider_only = pytest.mark.skipif(AVX2, reason="the suite itself runs with these kernels on this processor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATEN_CPU_CAPABILITY", "default"),
        pytest.param("ATEN_CPU_CAPABILITY", "avx2", marks=wider_only),
        pytest.param("ONEDNN_MAX_CPU_ISA", "AVX2", marks=wider_only),
    ],
)
def test_bits_agree_with_other_kernels(variable: str, value: str) -> None:
    files = [str(FOLDER / f"test_{name}.py") for name in ("decode", "packed_attention", "log_probs")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", SELECTION, *files],
        env=os.environ | {variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
