"""From the rows of a micro-batch to one packed row, and from predictions back to rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict

from equipoise.errors import InvalidInput, must
from equipoise.training.engine.log_probs import next_token_labels


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """The concatenated rows of a micro-batch, without padding.

    Attributes:
        input_ids: shape (1, tokens).
        position_ids: shape (1, tokens), from 0 in each row.
        labels: the next token of the row, shape (1, tokens).
        offsets: boundaries of the rows, shape (rows + 1,).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, micro_batch: TensorDict) -> PackedRow:
        """Pack jagged ``input_ids``, with the batch's ``position_ids`` if there are any.

        Raises:
            InvalidInput: ``input_ids`` are not jagged, a row is empty, or positions have another shape.
        """
        ids = cast(Any, micro_batch.get("input_ids", None))
        if not isinstance(ids, torch.Tensor) or ids.layout is not torch.jagged:
            got = "none" if ids is None else f"a {type(ids).__name__} that is not jagged"
            remedy = "make them with torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
            raise InvalidInput(must("input_ids", "be jagged rows of token ids", got, remedy))
        offsets = cast(Any, ids).offsets()
        flat: torch.Tensor = cast(Any, ids).values()
        lengths = offsets.diff()
        if int(lengths.min()) < 1:
            raise InvalidInput(must("input_ids", "have a token in each row", lengths.tolist(), "drop empty rows"))
        given = cast(Any, micro_batch.get("position_ids", None))
        if given is None:
            positions = torch.arange(flat.numel(), device=flat.device)
            positions = positions - offsets[:-1].repeat_interleave(lengths)
        else:
            positions = given.values() if given.is_nested else given.flatten()
            if positions.shape != flat.shape:
                got = tuple(positions.shape)
                raise InvalidInput(must("position_ids", "be jagged like input_ids", got, "leave them out"))
        return cls(
            input_ids=flat[None],
            position_ids=positions[None],
            labels=next_token_labels(flat, offsets)[None],
            offsets=offsets,
        )

    def unpack(self, predictions: torch.Tensor) -> torch.Tensor:
        """Shift predictions from positions to the tokens that they predict: jagged, 0 at the first token of a row.

        Args:
            predictions: shape (tokens,).
        """
        about = torch.roll(predictions, 1)
        first = torch.zeros_like(about, dtype=torch.bool)
        first[self.offsets[:-1]] = True
        about = torch.where(first, torch.zeros_like(about), about)
        return torch.nested.nested_tensor_from_jagged(about, offsets=self.offsets)
