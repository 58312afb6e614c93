"""Forward passes over rows of single tokens, in fixed shapes proven to compute each row bitwise equally.

Decoding and prefilling are the same pass: a row is one token of one request at one position, and the rows of a prefill
are consecutive positions of one request. A recomputed cache is therefore bitwise equal to the lost one.

Matrix products of different shapes may sum in different orders: with MKL in float32, one or two rows give other bits
than four or more. :meth:`Passes.prove` therefore compares each shape with the largest, bit for bit: the linear layers
with sums that leave only their rounding (:mod:`equipoise.rollout.decode.proof`), attention before it is rounded, and
the whole model, with rows beside other rows, at other positions and with fewer chunks of context. The order of a sum
depends on shapes, not on values, so shapes that agree there always agree on this machine with this number of threads.
A shape that differs is not used: its rows run in the next larger one that agrees.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's and transformers' modules are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from equipoise.errors import InvalidInput, must
from equipoise.rollout.decode import attention, proof
from equipoise.rollout.decode.cache import SPARE, ZEROS, PagedCache
from equipoise.rollout.decode.hf import HFModel


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One token of one request: its id, its position, and the request's blocks by position."""

    token: int
    position: int
    blocks: Sequence[int]


class Passes:
    """Runs rows through a model in the shapes that agree.

    Args:
        hf: causal language model, on its device.
        cache: the rows' cache.
        sizes: desired shapes, in rows.
        prefill_rows: desired shape for prefills; used if it is larger than the others and agrees with them.
        chunk_tokens: positions per attention chunk; a multiple of the block size.
        cuda_graphs: on a GPU, record a graph per shape.
    """

    def __init__(
        self,
        hf: HFModel,
        cache: PagedCache,
        *,
        sizes: Sequence[int],
        chunk_tokens: int,
        cuda_graphs: bool,
        prefill_rows: int = 0,
    ) -> None:
        self.hf = hf
        self.cache = cache
        self.chunk_tokens = chunk_tokens
        self.device: torch.device = hf.device
        self.cuda_graphs = cuda_graphs and self.device.type == "cuda"
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self.sizes = self.prove(sizes)
        self.prefill_size = largest = self.sizes[-1]
        if prefill_rows > largest and self._agreeing((prefill_rows, largest)) == [largest, prefill_rows]:
            self.prefill_size = prefill_rows

    def size_for(self, num_rows: int) -> int:
        """The smallest shape in use for ``num_rows``, or the one for prefills if they exceed all."""
        return min((size for size in self.sizes if size >= num_rows), default=self.prefill_size)

    @torch.inference_mode()
    def run(self, rows: Sequence[TokenRow], *, size: int, head: bool) -> torch.Tensor | None:
        """Compute rows, and write their keys and values.

        Args:
            rows: at most ``size``.
            size: shape of the pass.
            head: whether to compute logits.

        Returns:
            Logits, (rows, vocabulary), or None.
        """
        tokens, positions, paged = self._tensors(rows, size)
        if self.cuda_graphs:
            key = (size, paged.num_chunks, head)
            if key not in self._graphs:
                self._graphs[key] = _Graph(self, tokens, positions, paged, head)
            out = self._graphs[key].replay(tokens, positions, paged)
        else:
            out = self.forward(tokens, positions, paged, head)
        return out[: len(rows)] if head else None

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: attention.PagedRows, head: bool
    ) -> torch.Tensor:
        """:meth:`HFModel.forward`."""
        return self.hf.forward(tokens, positions, rows, head)

    def _tensors(self, rows: Sequence[TokenRow], size: int) -> tuple[torch.Tensor, torch.Tensor, attention.PagedRows]:
        if not 0 < len(rows) <= size:
            raise InvalidInput(must("rows", f"be 1 to {size}", len(rows), "pass as many as the shape holds"))
        block_size = self.cache.layout.block_size
        chunks = 1 + max(row.position for row in rows) // self.chunk_tokens
        if self.cuda_graphs:
            chunks = 1 << (chunks - 1).bit_length()  # few graphs; chunks past the end change nothing
        numbers = np.zeros((5, size), dtype=np.int64)
        numbers[2], numbers[4] = SPARE, 1
        tables = np.full((size, chunks * self.chunk_tokens // block_size), ZEROS, dtype=np.int64)
        tables[len(rows) :, 0] = SPARE
        for place, row in enumerate(rows):
            block, offset = divmod(row.position, block_size)
            numbers[:, place] = (row.token, row.position, row.blocks[block], offset, row.position + 1)
            tables[place, : block + 1] = row.blocks[: block + 1]
        tokens, positions, blocks, offsets, lengths = torch.from_numpy(numbers).to(self.device)
        paged = attention.PagedRows(
            cache=self.cache,
            blocks=blocks,
            offsets=offsets,
            tables=torch.from_numpy(tables).to(self.device),
            lengths=lengths,
            chunk_tokens=self.chunk_tokens,
        )
        return tokens[:, None], positions[:, None], paged

    def prove(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Shapes that agree with the largest bit for bit, ascending, from :data:`proof.LEAST_ROWS` on.

        Raises:
            InvalidInput: rows affect each other in the largest shape (experts that share a matrix product, say).
        """
        found = self._agreeing(sizes)
        if max(*sizes, proof.LEAST_ROWS) not in found:
            name = type(self.hf.module).__name__
            remedy = "pass a model without experts or batch statistics"
            raise InvalidInput(must(f"{name}", "compute each row by itself", "bits that other rows change", remedy))
        return tuple(found)

    def _agreeing(self, sizes: Sequence[int]) -> list[int]:
        """Shapes that agree with the largest bit for bit, ascending."""
        wished = sorted({max(size, proof.LEAST_ROWS) for size in sizes})
        largest = wished[-1]
        kept, graphs = self.cache, self.cuda_graphs
        self.cache, self.cuda_graphs = _random_cache(self.cache, largest, self.chunk_tokens), False
        try:
            rows = _random_rows(self.cache, largest, self.chunk_tokens, self.hf.vocab_size)
            agreeing = proof.linear_sizes(self.hf.module, wished)
            found = [size for size in wished if size in agreeing and self._attends_alike(rows, size)]
            want = self._bits(rows, largest)
            return [size for size in found if self._agree(rows, want, size)]
        finally:
            self.cache, self.cuda_graphs = kept, graphs

    def _attends_alike(self, rows: Sequence[TokenRow], size: int) -> bool:
        """Whether attention agrees before its result is rounded to the model's dtype."""
        pool = self.cache.pools[0]
        wide = torch.promote_types(pool.dtype, torch.float32)
        draws = torch.Generator().manual_seed(0)
        query = torch.randn(len(rows), self.hf.num_heads, pool.shape[-1], generator=draws).to(pool.device, wide)
        want = attention.attend(query, pool, self._tensors(rows, len(rows))[2], 1.0)
        for places in self._places(rows, size):
            part = attention.attend(query[places], pool, self._tensors([rows[i] for i in places], len(places))[2], 1.0)
            if not torch.equal(part, want[places]):
                return False
        return True

    @staticmethod
    def _places(rows: Sequence[TokenRow], size: int) -> list[list[int]]:
        """``size`` rows of all lengths, and ``size`` short ones (repeated if there are fewer), in other orders."""
        shuffled = np.random.default_rng(size).permutation(len(rows)).tolist()
        positions = np.array([row.position for row in rows])
        short: list[int] = np.argsort(positions, kind="stable").tolist()
        return [shuffled[:size], (short[: -(-len(rows) // 2)] * 2)[:size]]

    def _bits(self, rows: Sequence[TokenRow], size: int) -> torch.Tensor:
        logits = self.run(rows, size=size, head=True)
        assert logits is not None
        return logits.clone()

    def _agree(self, rows: Sequence[TokenRow], want: torch.Tensor, size: int) -> bool:
        """Whether the model's rows keep their bits, also beside padding."""
        whole, short = self._places(rows, size)
        return all(
            torch.equal(self._bits([rows[i] for i in places], size), want[places])
            for places in (whole, short, whole[: size // 2])
        )


def _random_cache(cache: PagedCache, num_rows: int, chunk_tokens: int) -> PagedCache:
    """A cache with two chunks that all rows share, and a block for each row."""
    shared = 2 * chunk_tokens // cache.layout.block_size
    made = PagedCache(cache.layout, num_blocks=shared + num_rows, device=cache.pools[0].device)
    draws = torch.Generator().manual_seed(0)
    for pool in made.pools:
        blocks = made.num_blocks
        noise = torch.randn((*pool.shape[:2], blocks, *pool.shape[3:]), generator=draws)
        pool[:, :, -blocks:] = noise.to(pool)
    return made


def _random_rows(cache: PagedCache, num_rows: int, chunk_tokens: int, vocab_size: int) -> list[TokenRow]:
    """Half of the rows within one chunk, half within two."""
    draws = np.random.default_rng(0)
    first = cache.pools[0].shape[2] - cache.num_blocks
    shared = list(range(first, first + cache.num_blocks - num_rows))
    rows: list[TokenRow] = []
    for index in range(num_rows):
        position = int(draws.integers(chunk_tokens * (index % 2), chunk_tokens * (1 + index % 2)))
        mine = [*shared[: position // cache.layout.block_size], first + len(shared) + index]
        rows.append(TokenRow(token=int(draws.integers(vocab_size)), position=position, blocks=mine))
    return rows


class _Graph:
    """A recorded pass of one shape: copy inputs into it, then replay."""

    def __init__(
        self, passes: Passes, tokens: torch.Tensor, positions: torch.Tensor, rows: attention.PagedRows, head: bool
    ) -> None:
        self.inputs = [x.clone() for x in self._parts(tokens, positions, rows)]
        tokens, positions, blocks, offsets, tables, lengths = self.inputs
        held = replace(rows, blocks=blocks, offsets=offsets, tables=tables, lengths=lengths)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialize themselves in a first pass, which cannot be recorded
            passes.forward(tokens, positions, held, head)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = passes.forward(tokens, positions, held, head)

    @staticmethod
    def _parts(tokens: torch.Tensor, positions: torch.Tensor, rows: attention.PagedRows) -> list[torch.Tensor]:
        return [tokens, positions, rows.blocks, rows.offsets, rows.tables, rows.lengths]

    def replay(self, tokens: torch.Tensor, positions: torch.Tensor, rows: attention.PagedRows) -> torch.Tensor:
        for held, new in zip(self.inputs, self._parts(tokens, positions, rows), strict=True):
            held.copy_(new)
        self.graph.replay()
        return self.out
