"""A model, a tokenizer, prompts and a reward, all made here in seconds: enough for verl to train on a laptop.

Run ``python -m examples.tiny some/folder`` to look at them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# tokenizers, transformers and pandas are typed in part only.

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TRAIN = 64
NUM_VAL = 8

_WORDS = (
    "add",
    "count",
    "eight",
    "four",
    "give",
    "how",
    "is",
    "many",
    "now",
    "one",
    "please",
    "sum",
    "the",
    "two",
    "what",
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
_REWARD = '''"""Share of digits in an answer: dense from the first step, and soon learned."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / max(1, len(solution_str)), "acc": float(ground_truth in solution_str)}
'''


@dataclass(frozen=True, kw_only=True)
class TinyPaths:
    """Where the parts lie."""

    model: Path
    train: Path
    val: Path
    reward: Path

    def overrides(self) -> list[str]:
        """Hydra overrides that name the parts to verl."""
        return [
            f"actor_rollout_ref.model.path={self.model}",
            f"data.train_files={self.train}",
            f"data.val_files={self.val}",
            "data.filter_overlong_prompts=False",
            f"reward.custom_reward_function.path={self.reward}",
            "reward.custom_reward_function.name=compute_score",
        ]


def build_tiny(path: Path) -> TinyPaths:
    """Make a Qwen2 of 127,000 parameters, its tokenizer, 64 + 8 prompts of uneven length and a reward.

    The same files come out each time. Nothing is downloaded.

    Args:
        path: folder to write into; made if need be.
    """
    import pandas as pd

    paths = TinyPaths(
        model=path / "model", train=path / "train.parquet", val=path / "val.parquet", reward=path / "reward.py"
    )
    path.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    tokenizer = _tokenizer([_question(draw, 12) for _ in range(2000)])
    tokenizer.save_pretrained(paths.model)
    _model(tokenizer).save_pretrained(paths.model)
    for file, split, num_rows in ((paths.train, "train", NUM_TRAIN), (paths.val, "val", NUM_VAL)):
        pd.DataFrame([_row(draw, split, index) for index in range(num_rows)]).to_parquet(file)
    paths.reward.write_text(_REWARD)
    return paths


def _question(draw: random.Random, num_words: int) -> str:
    return f"{' '.join(draw.choices(_WORDS, k=num_words))} {draw.randint(0, 99)} + {draw.randint(0, 99)}"


def _row(draw: random.Random, split: str, index: int) -> dict[str, object]:
    question = _question(draw, draw.choice((3, 6, 12, 40)))
    left, _, right = question.split()[-3:]
    return {
        "data_source": "tiny/sum",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(int(left) + int(right))},
        "extra_info": {"split": split, "index": index},
    }


def _tokenizer(corpus: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(_SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    pad, start, end = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=end, pad_token=pad, additional_special_tokens=[start]
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    print(build_tiny(Path(sys.argv[1])))
