"""The settings of a decode engine."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise._checks import falling, positive
from equipoise.config import TIERS, RolloutConfig
from equipoise.errors import InvalidInput, must


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The settings of a decode engine.

    Args:
        tiers: decode sizes in rows, descending; the first is also the most requests that run at once.
        num_blocks: cache blocks for requests.
        block_size: tokens per block.
        chunk_tokens: positions per attention chunk; a multiple of ``block_size``.
        prefill_rows: tokens per prefill pass, if that is bitwise equal to the first tier, which is used otherwise; None
            for the first tier on a CPU and eight times as many on a GPU.
        multi_graph: whether fewer requests decode at a lower tier; if not, always at the first.
        cuda_graphs: on a GPU, record a graph per tier.

    Raises:
        InvalidInput: a value is out of range.
    """

    tiers: tuple[int, ...] = TIERS
    num_blocks: int = 1024
    block_size: int = 16
    chunk_tokens: int = 64
    prefill_rows: int | None = None
    multi_graph: bool = RolloutConfig.multi_graph
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", falling("tiers", self.tiers, "pass for example (64, 32, 16, 8, 4)"))
        for name in ("num_blocks", "block_size", "chunk_tokens"):
            positive(name, getattr(self, name), "raise it")
        if self.prefill_rows is not None:
            positive("prefill_rows", self.prefill_rows, "pass None for a size that suits the device")
        if self.chunk_tokens % self.block_size:
            rule = f"be a multiple of block_size = {self.block_size}"
            raise InvalidInput(must("chunk_tokens", rule, self.chunk_tokens, "change either"))
