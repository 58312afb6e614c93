"""What is measured: length sets, sizes, caps and seeds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from benchmarks.lengths import draw


@dataclass(frozen=True, order=True)
class Size:
    """Rows of a step, data-parallel ranks, optimizer steps; written ``rows x ranks x steps``."""

    rows: int
    dp_size: int
    num_mini_batches: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.dp_size}x{self.num_mini_batches}"

    @classmethod
    def parse(cls, text: str) -> Size:
        """Size from its written form.

        >>> Size.parse("256x8x1")
        Size(rows=256, dp_size=8, num_mini_batches=1)
        """
        parts = text.replace("×", "x").split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"size must be rows x ranks x steps, got {text!r}; write for example 256x8x1")
        rows, dp_size, steps = (int(part) for part in parts)
        if rows % (dp_size * steps):
            raise ValueError(f"size must have rows that divide by ranks * steps, got {text!r}; peers need equal shares")
        return cls(rows, dp_size, steps)


SIZES = tuple(
    Size.parse(text)
    for text in ("256x8x1", "512x8x2", "512x32x1", "1024x16x4", "2048x32x4", "8192x64x4", "8192x128x16")
)
QUICK_SIZES = tuple(Size.parse(text) for text in ("256x8x1", "512x32x1", "1024x16x4"))
CAPS = ("loose", "tight")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to plan.

    Attributes:
        length_set: where the lengths come from.
        size: rows, ranks and optimizer steps.
        cap: "loose" (32768 tokens, or twice the longest row where that is more) or "tight" (the longest row, rounded up
            to a multiple of 256).
        seed: of the draw.
        lengths: tokens of each row.
        max_token_len: the cap in tokens.

    """

    length_set: str
    size: Size
    cap: str
    seed: int
    lengths: list[int]
    max_token_len: int

    @property
    def cell(self) -> str:
        """Name of the cell of the table that the seeds of this case share."""
        return f"{self.length_set}/{self.size}/{self.cap}"


def cases(sets: Sequence[str], sizes: Sequence[Size], seeds: Sequence[int]) -> Generator[Case]:
    """Cases of one length set after the other, small sizes first."""
    for length_set in sets:
        for size in sizes:
            for seed in seeds:
                lengths = draw(length_set, size.rows, seed).tolist()
                for cap in CAPS:
                    yield Case(
                        length_set=length_set,
                        size=size,
                        cap=cap,
                        seed=seed,
                        lengths=lengths,
                        max_token_len=_tokens(cap, max(lengths)),
                    )


def _tokens(cap: str, longest: int) -> int:
    return max(32768, 2 * longest) if cap == "loose" else -(-longest // 256) * 256
