"""Log-probs of given tokens from hidden states, without holding the logits of a whole row in memory."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's autograd context is typed in part only.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from equipoise._checks import positive
from equipoise.errors import InvalidInput, must

IGNORE = -100
"""The label of a position without a target: its log-prob is 0 and has no gradient."""

_MIB = 2**20
_LOGITS_BYTES = {"cpu": 32 * _MIB}  # elsewhere 512 MiB: accelerators need more tokens at once
_BLOCK, _BLOCK_BYTES = 64, {"cpu": _MIB}  # per reduction, because reductions copy their input


def next_token_labels(input_ids: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """The token that each position predicts: the next one of its sequence, or :data:`IGNORE` at the end of a sequence.

    With sequence parallelism, call it before the row is split: the label of a shard's last token is in the next shard.

    Args:
        input_ids: ``(tokens,)`` or ``(1, tokens)``, concatenated sequences.
        cu_seqlens: ``(sequences + 1,)`` boundaries in tokens, from 0 to ``tokens``.

    Returns:
        Labels in the shape of ``input_ids``.

    >>> next_token_labels(torch.tensor([5, 6, 7, 8, 9]), [0, 3, 5])
    tensor([   6,    7, -100,    9, -100])

    """
    labels = torch.roll(input_ids, -1, dims=-1)
    ends = torch.as_tensor(cu_seqlens, device=input_ids.device)[1:] - 1
    labels[..., ends] = IGNORE
    return labels


def default_chunk_tokens(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens whose logits take 32 MiB on a CPU and 512 MiB elsewhere; at least 1.

    Args:
        vocab: logits per token.
        dtype: dtype of the inputs; half-precision inputs have float32 logits.
        device: where the logits are.

    >>> default_chunk_tokens(49152, torch.bfloat16, torch.device("cpu"))
    170

    """
    return max(1, _LOGITS_BYTES.get(device.type, 512 * _MIB) // (vocab * _accumulator(dtype).itemsize))


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Log-prob of each label, and the entropy of each distribution.

    .. math:: z_t = \operatorname{cap}(W h_t + b) / \tau, \quad
        \log p_t = z_{t, y_t} - \operatorname{logsumexp}(z_t), \quad
        H_t = -\sum_v p_{tv} \log p_{tv}, \quad
        \operatorname{cap}(x) = c \tanh(x / c)

    Logits exist for one chunk of tokens at a time, in chunks of even size. Those of the last chunk are kept for
    backward, which starts with it and recomputes the others. ``hidden``, ``weight`` and ``bias`` are differentiable
    once, through both results. Half-precision inputs are accumulated in float32, including the gradient of ``weight``
    over all chunks. Autocast does not apply: the inputs' dtypes determine the computation.

    Args:
        hidden: ``(tokens, width)``.
        weight: ``(vocab, width)``, a plain tensor.
        labels: ``(tokens,)`` token ids; :data:`IGNORE` for positions without a target.
        bias: ``(vocab,)``.
        temperature: :math:`\tau > 0`.
        softcap: :math:`c > 0`, the cap on final logits of Gemma 2 (arXiv 2408.00118, section 2); None for no cap.
        chunk_tokens: the most tokens whose logits exist at once; None for :func:`default_chunk_tokens`.
        with_entropy: also compute the entropy.

    Returns:
        Log-probs ``(tokens,)`` and entropies ``(tokens,)``, or None, in nats; float32 for half-precision inputs, else
        their dtype.

    Raises:
        InvalidInput: shapes do not match, the weight is sharded, labels are outside the vocabulary (on a CPU; on a GPU
            the kernel asserts), or a setting is out of range.

    >>> hidden, weight = torch.zeros(3, 2), torch.zeros(4, 2)
    >>> log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0, 3, -100]), with_entropy=True)
    >>> log_probs
    tensor([-1.3863, -1.3863,  0.0000])
    >>> entropy
    tensor([1.3863, 1.3863, 1.3863])

    """
    _check_shapes(hidden, weight, labels, bias)
    if temperature <= 0:
        raise InvalidInput(must("temperature", "be above 0", temperature, "1.0 leaves logits as they are"))
    if softcap is not None and softcap <= 0:
        raise InvalidInput(must("softcap", "be above 0", softcap, "pass None for no cap"))
    if chunk_tokens is None:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        chunk = default_chunk_tokens(weight.shape[0], dtype, weight.device)
    else:
        chunk = positive("chunk_tokens", chunk_tokens, "pass the number of tokens whose logits exist at once")
    head = _Head(temperature=temperature, softcap=softcap, chunk=chunk, keeps_last=torch.is_grad_enabled())
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, bias, labels, head, with_entropy)  # pyright: ignore[reportGeneralTypeIssues]
    return log_probs, entropy


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.dim() != 2:
        raise InvalidInput(must("hidden", "be (tokens, width)", tuple(hidden.shape), "flatten the rows first"))
    if hasattr(weight, "full_tensor"):
        rule = "be a plain tensor"
        raise InvalidInput(must("weight", rule, type(weight).__name__, "gather it with full_tensor() first"))
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        rule = f"be (vocab, {hidden.shape[1]})"
        raise InvalidInput(must("weight", rule, tuple(weight.shape), "pass the head that belongs to the hidden states"))
    if labels.shape != hidden.shape[:1]:
        raise InvalidInput(
            must("labels", f"be ({hidden.shape[0]},)", tuple(labels.shape), "pass one label per hidden state")
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInput(must("bias", f"be ({weight.shape[0]},)", tuple(bias.shape), "pass one value per token id"))
    if labels.device.type == "cpu":
        wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= weight.shape[0]))]
        if wrong.numel():
            rule = f"be {IGNORE} or in 0..{weight.shape[0] - 1}"
            raise InvalidInput(must("labels", rule, int(wrong[0]), "pass token ids of the model's vocabulary"))


@dataclass(frozen=True, kw_only=True)
class _Head:
    """How to compute logits, how many at a time, and whether to keep the last ones for backward."""

    temperature: float
    softcap: float | None
    chunk: int
    keeps_last: bool

    def slices(self, tokens: int) -> Iterator[slice]:
        """As few chunks as possible, of even size, because the largest determines the peak memory."""
        number = -(-tokens // self.chunk)
        return (slice(i * tokens // number, (i + 1) * tokens // number) for i in range(number))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        logits = _product(hidden, weight.t())
        if bias is not None:
            logits += bias
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature)

    def backward_(self, grad: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the matrix product, in place of that of the logits."""
        grad.div_(self.temperature)
        if logits is not None and self.softcap is not None:
            tanh = logits.mul_(self.temperature / self.softcap)
            grad.mul_(tanh.square_().neg_().add_(1))
        return grad


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: _Head,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        operand = _operand(hidden, weight)
        log_z = hidden.new_empty(hidden.shape[0], dtype=_accumulator(operand.dtype))
        log_probs = torch.empty_like(log_z)
        entropy = torch.empty_like(log_z) if with_entropy else None
        with torch.autocast(hidden.device.type, enabled=False):
            logits = None
            for rows in head.slices(hidden.shape[0]):
                del logits  # before those of the next chunk are computed
                logits = head.logits(hidden[rows].to(operand.dtype), operand, bias)
                log_z[rows] = torch.cat([torch.logsumexp(block, -1) for block in _blocks(logits)])
                chosen = logits.gather(-1, labels[rows].clamp(min=0)[:, None])[:, 0]
                log_probs[rows] = (chosen - log_z[rows]).masked_fill(labels[rows] == IGNORE, 0.0)
                if entropy is not None:
                    entropy[rows] = _entropy(logits, log_z[rows])
        ctx.save_for_backward(hidden, weight, bias, labels, log_z, entropy)
        ctx.head, ctx.last_logits = head, logits if head.keeps_last else None
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_log_probs, grad_entropy = grad_outputs
        hidden, weight, bias, labels, log_z, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        operand = _operand(hidden, weight)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if need_weight and not hidden.shape[0] else None
        grad_bias = torch.zeros_like(bias, dtype=log_z.dtype) if need_bias else None
        grad_log_probs = grad_log_probs.masked_fill(labels == IGNORE, 0.0)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in reversed(list(head.slices(hidden.shape[0]))):
                inputs = hidden[rows].to(operand.dtype)
                logits, ctx.last_logits = ctx.last_logits, None  # overwritten below; a second backward recomputes them
                if logits is None:
                    logits = head.logits(inputs, operand, bias)
                grad = _grad_product_(
                    logits,
                    log_z[rows],
                    labels[rows],
                    grad_log_probs[rows],
                    None if entropy is None or grad_entropy is None else (entropy[rows], grad_entropy[rows]),
                    head,
                )
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(operand.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = _product(grad, operand).to(hidden.dtype)
                if grad_weight is not None:
                    _add_product_(grad_weight, grad.t(), inputs)
                elif need_weight:
                    grad_weight = _product(grad.t(), inputs)
                del logits, grad  # before those of the next chunk are computed
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 3,
        )


def _entropy(logits: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
    """Entropies ``(tokens,)``."""
    blocks = _blocks(logits)
    parts: list[torch.Tensor] = []
    for block, z in zip(blocks, log_z.split(blocks[0].shape[0]), strict=True):
        log_p = _log_p_(block.clone(), z)
        parts.append(-(log_p.exp().mul_(log_p)).sum(-1))
    return torch.cat(parts)


def _log_p_(logits: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
    # If a bias of -inf bans a token, p log p would be 0 * -inf = NaN. exp(-1000) is 0 in float64 too, so no
    # other value changes.
    return logits.sub_(log_z[:, None]).clamp_(min=-1000.0)


def _grad_product_(
    logits: torch.Tensor,
    log_z: torch.Tensor,
    labels: torch.Tensor,
    grad_log_probs: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
    head: _Head,
) -> torch.Tensor:
    """Gradient of the matrix product, ``(tokens, vocab)``; overwrites ``logits``.

    Works block by block to keep temporaries small.
    """
    blocks = _blocks(logits)
    columns = (log_z, labels, grad_log_probs, *(entropy or ()))
    parts = (column.split(blocks[0].shape[0]) for column in columns)
    for block, z, label, upstream, *more in zip(blocks, *parts, strict=True):
        capped = None if head.softcap is None else block.clone()
        head.backward_(_grad_logits_(block, z, label, upstream, *more), capped)
        del capped  # before that of the next block is computed
    return logits


def _grad_logits_(
    logits: torch.Tensor,
    log_z: torch.Tensor,
    labels: torch.Tensor,
    grad_log_probs: torch.Tensor,
    entropy: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    r""":math:`g (1_y - p) - g_H p (\log p + H)`, ``(tokens, vocab)``; overwrites ``logits``."""
    log_p = _log_p_(logits, log_z)
    if entropy is None or grad_entropy is None:
        grad = log_p.exp_().mul_(grad_log_probs.neg()[:, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None]).neg_().mul_(p)
    return grad.scatter_add_(-1, labels.clamp(min=0)[:, None], grad_log_probs[:, None])


def _blocks(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Blocks of at most 64 tokens, and on a CPU at most 1 MiB, which fits in its cache."""
    rows = _BLOCK_BYTES.get(logits.device.type, logits.nbytes) // max(1, logits[:1].nbytes)
    return logits.split(max(1, min(_BLOCK, rows)))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _operand(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype of the products: only GPUs keep half precision, because they accumulate in float32."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return weight.to(dtype if weight.is_cuda else _accumulator(dtype))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, half-precision operands (on a GPU) into float32."""
    out = _accumulator(a.dtype)
    return a @ b if out == a.dtype else torch.mm(a, b, out_dtype=out)  # pyright: ignore[reportCallIssue]


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += _product(a, b)
