"""What decoding needs from an HF causal language model: cache layout, limits, identity, and forward pass."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's and transformers' modules are typed in part only.

from __future__ import annotations

import zlib
from typing import Any

import torch

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must
from equipoise.rollout.decode import attention
from equipoise.rollout.transfer.state import DTYPES, KVLayout


class HFModel:
    """An HF model in evaluation mode whose attention reads a paged cache.

    Args:
        model: causal language model with plain causal attention.
        block_size: tokens of a cache block.

    Raises:
        InvalidInput: it is not a torch module, or caches do not support its dtype.
    """

    def __init__(self, model: Any, *, block_size: int) -> None:
        of_kind("model", model, torch.nn.Module, "load it with transformers' from_pretrained")
        names = {dtype: name for name, dtype in DTYPES.items()}
        if model.dtype not in names:
            raise InvalidInput(must("dtype of the model", f"be one of {list(DTYPES)}", model.dtype, "convert it"))
        self.module = model.eval()
        self.module.set_attn_implementation(attention.register())
        text = model.config.get_text_config()
        self.num_heads = int(text.num_attention_heads)
        self.width = int(text.hidden_size)
        self.vocab_size = int(text.vocab_size)
        self.max_tokens = int(getattr(text, "max_position_embeddings", None) or 2**31)
        self.layout = KVLayout(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or self.num_heads,
            head_dim=getattr(text, "head_dim", None) or self.width // self.num_heads,
            block_size=block_size,
            dtype=names[model.dtype],
        )

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.module.device

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: attention.PagedRows, head: bool
    ) -> torch.Tensor:
        """Logits, or hidden states without the head, (rows, width)."""
        model = self.module if head else self.module.base_model
        with attention.paged(rows):
            out = model(input_ids=tokens, position_ids=positions, use_cache=False)
        return out.logits[:, 0] if head else out.last_hidden_state[:, 0]

    def identity(self) -> str:
        """Class, shape, arithmetic, and a checksum over the first values of each weight."""
        crc = 0
        for _, parameter in sorted(self.module.named_parameters()):
            crc = zlib.crc32(parameter.detach().flatten()[:256].to("cpu", torch.float64).numpy().tobytes(), crc)
        device = self.device.type
        threads = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
        shape = f"{self.layout.num_layers} layers of width {self.width}, {self.vocab_size} tokens"
        return f"{type(self.module).__name__}, {shape}, weights {crc:08x}; {self.layout.dtype}, {device}, {threads}"
