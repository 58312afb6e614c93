"""Which tokens count and which sequence each belongs to, in one form for padded, packed and jagged batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sums over sequences and back; a row is one sequence or holds several.

    Attributes:
        chosen: True where a token counts, shape (rows, width).
        index: sequence of each position, shape (rows, width); None if each row is one sequence.
        num: number of sequences, including those without a token that counts.
    """

    chosen: torch.Tensor
    index: torch.Tensor | None
    num: int

    def select(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``values`` where a token counts, ``fill`` elsewhere; no gradient flows to the values replaced."""
        return torch.where(self.chosen, values, torch.full_like(values, fill))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each sequence, shape (num,), of values that are 0 where no token counts.

        For packed rows on a GPU, the order of additions is fixed only under
        ``torch.use_deterministic_algorithms(True)``.
        """
        if self.index is None:
            return values.sum(-1)
        return values.new_zeros(self.num).index_add(0, self.index.flatten(), values.flatten())

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """The value of each position's sequence, shape (rows, width)."""
        if self.index is None:
            return per_sequence.unsqueeze(-1).expand(self.chosen.shape)
        return per_sequence[self.index]

    def num_tokens(self) -> torch.Tensor:
        """Tokens that count, of each sequence, shape (num,)."""
        return self.sum(self.chosen.long())


def sequences_of(
    loss_mask: torch.Tensor, *, segment_ids: torch.Tensor | None = None, is_padding: Any = None
) -> Sequences:
    """The tokens that count: under the mask, in a segment, and not in a padding row.

    Args:
        loss_mask: shape (rows, width), or jagged (its rows are then the sequences of one packed row); nonzero where a
            token counts.
        segment_ids: shape (rows, width), for rows with several sequences: equal within a sequence, 0 for none. The same
            number in another row is another sequence.
        is_padding: shape (rows,); True for rows that do not count, whatever their mask.

    Raises:
        InvalidInput: shapes do not match, or there are segment ids with a jagged mask.
    """
    of_kind("loss_mask", loss_mask, torch.Tensor, "pass one value per token")
    padding = None if is_padding is None else _as_row_flags(is_padding, loss_mask)
    if loss_mask.is_nested:
        if segment_ids is not None:
            raise InvalidInput(
                must("segment_ids", "be None with a jagged mask", "a tensor", "its rows are sequences already")
            )
        row = row_numbers(loss_mask)
        chosen = flat(loss_mask, loss_mask, "loss_mask") != 0
        if padding is not None:
            chosen = chosen & ~padding[row]
        return Sequences(chosen=chosen, index=row, num=loss_mask.shape[0])
    chosen = loss_mask != 0
    if padding is not None:
        chosen = chosen & ~padding.reshape(-1, *[1] * (loss_mask.dim() - 1))
    if segment_ids is None:
        return Sequences(chosen=chosen, index=None, num=loss_mask.shape[0])
    key, inside = segment_keys(segment_ids, loss_mask)
    numbers, index = cast("tuple[torch.Tensor, torch.Tensor]", torch.unique(key, return_inverse=True))
    return Sequences(chosen=chosen & inside, index=index, num=numbers.numel())


def segment_keys(segment_ids: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each (row, segment), shape (rows, width), and where there is a segment at all."""
    if segment_ids.shape != loss_mask.shape or loss_mask.dim() != 2 or segment_ids.is_floating_point():
        found = f"{segment_ids.dtype} of shape {tuple(segment_ids.shape)}"
        rule = f"be whole numbers of the mask's shape {tuple(loss_mask.shape)}"
        raise InvalidInput(must("segment_ids", rule, found, "give each token the number of its sequence, 0 for none"))
    inside = segment_ids > 0
    within = segment_ids.long().clamp(min=0)
    row = torch.arange(segment_ids.shape[0], device=segment_ids.device).unsqueeze(-1)
    span = int(within.max()) + 1 if within.numel() else 1
    return row * span + within, inside


def flat(column: torch.Tensor, mask: torch.Tensor, field: str) -> torch.Tensor:
    """``column`` in the form of :func:`sequences_of`: jagged rows are concatenated, shape (1, tokens).

    Half precision becomes float32: a sum of thousands of tokens would stop growing, or overflow.

    Raises:
        InvalidInput: the column does not have the mask's shape.
    """
    of_kind(field, column, torch.Tensor, "pass one value per token")
    if column.is_nested != mask.is_nested:
        kinds = ("padded", "jagged")
        rule = f"be {kinds[mask.is_nested]} like the mask"
        raise InvalidInput(must(field, rule, kinds[column.is_nested], "convert one of them"))
    if not column.is_nested:
        if column.shape != mask.shape:
            rule = f"have the mask's shape {tuple(mask.shape)}"
            raise InvalidInput(must(field, rule, tuple(column.shape), "pass one value per token"))
        return _wide(column)
    lengths = _row_lengths(column, field)
    # equal shapes share their offsets, so no values are read
    if column.shape != mask.shape and not torch.equal(lengths, _row_lengths(mask, "loss_mask")):
        found = cast("list[int]", lengths.tolist())
        raise InvalidInput(must(field, "have rows as long as the mask's", found, "pass one value per token"))
    view = cast(Any, column)
    values = cast(torch.Tensor, view.values() if view.lengths() is None else torch.cat(view.unbind()))
    return _wide(values.unsqueeze(0))


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def like(values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Undo :func:`flat`: values in the layout of ``column``."""
    if not column.is_nested:
        return values
    lengths = cast("list[int]", _row_lengths(column, "column").tolist())
    return torch.nested.as_nested_tensor(
        list(cast("tuple[torch.Tensor, ...]", values[0].split(lengths))), layout=torch.jagged
    )


def numbers_of_rows(per_row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A value per row, shape (rows,), repeated at its positions, in the form of :func:`sequences_of`."""
    if mask.is_nested:
        return per_row[row_numbers(mask)]
    return per_row.unsqueeze(-1).expand(mask.shape)


def row_numbers(jagged: torch.Tensor) -> torch.Tensor:
    """Row of each token of a jagged tensor, shape (1, tokens)."""
    lengths = _row_lengths(jagged, "loss_mask")
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths).unsqueeze(0)


def _row_lengths(jagged: torch.Tensor, field: str) -> torch.Tensor:
    view = cast(Any, jagged)
    if jagged.layout != torch.jagged or jagged.dim() != 2 or getattr(view, "_ragged_idx", 1) != 1:
        found = f"{jagged.layout} of {jagged.dim()} dimensions"
        raise InvalidInput(must(field, "be jagged with one value per token", found, "use layout=torch.jagged"))
    lengths = view.lengths()
    return cast(torch.Tensor, view.offsets().diff() if lengths is None else lengths)


def _as_row_flags(is_padding: Any, loss_mask: torch.Tensor) -> torch.Tensor:
    flags = torch.as_tensor(is_padding, device=loss_mask.device).bool()
    if flags.shape != loss_mask.shape[:1]:
        rule = f"have shape {tuple(loss_mask.shape[:1])}"
        raise InvalidInput(must("is_padding", rule, tuple(flags.shape), "pass one per row"))
    return flags
