"""The task (words to spell backward, from ``reasoning-gym``), its characters as tokens, and a model of two layers."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# reasoning-gym and transformers are typed in part only.

from __future__ import annotations

from typing import Any

TASK = "spell_backward"
SETTINGS = {"min_word_len": 3, "max_word_len": 5}
PROMPT_TOKENS = 54
"""Of the longest prompt: one a character, and the end of the line."""
NUM_HEADS = 4
END = 0
"""Token that ends a response; it also fills padding rows."""
_CHARACTERS = "\0\n" + "".join(map(chr, range(32, 127)))
_NUM_ENTRIES = 2**30


def encode(text: str) -> list[int]:
    """Tokens of a text, one a character.

    >>> decode([*encode("sun -> nus"), END])
    'sun -> nus'
    """
    return [_CHARACTERS.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """Text of tokens, without the one that ends it."""
    return "".join(_CHARACTERS[token] for token in tokens if token != END)


class Task:
    """Prompts by number, always the same for a seed, and the score of a response.

    Args:
        seed: of the words.
    """

    def __init__(self, seed: int) -> None:
        import reasoning_gym

        self._data: Any = reasoning_gym.create_dataset(TASK, size=_NUM_ENTRIES, seed=seed, **SETTINGS)

    def prompt(self, number: int) -> list[int]:
        """Tokens of prompt ``number``."""
        return encode(self._data[number]["question"] + "\n")

    def answer(self, number: int) -> list[int]:
        """Tokens of the right response to it."""
        return [*encode(self._data[number]["answer"]), END]

    def score(self, number: int, response: list[int]) -> float:
        """``reasoning-gym``'s own score, from 0 to 1; a response that does not end has none."""
        if not response or response[-1] != END:
            return 0.0
        return float(self._data.score_answer(decode(response), self._data[number]))


def tiny_model() -> Any:
    """Configuration of a Llama of two layers, HF's own class."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(_CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
