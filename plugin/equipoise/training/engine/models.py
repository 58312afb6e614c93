"""HF causal language models as modules from packed rows to log-probs or values."""

# transformers' and torch's modules are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from equipoise.errors import InvalidInput, must
from equipoise.training.engine import attention, ulysses
from equipoise.training.engine.config import EngineConfig
from equipoise.training.engine.log_probs import token_log_probs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_WRAPPED = "hf."


class LanguageModel(nn.Module):
    """Log-prob (and entropy) of the next token at each position.

    Args:
        hf: causal language model.
        chunk_tokens: the most tokens whose logits exist at once; None for a size that suits vocabulary and device.
    """

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int | None) -> None:
        super().__init__()
        if hf.get_output_embeddings() is None:
            raise InvalidInput(must("model", "have an output head", type(hf).__name__, "pass a causal language model"))
        text = hf.config.get_text_config()
        self.hf = hf
        self.chunk_tokens = chunk_tokens
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.divisor = float(getattr(text, "logits_scaling", None) or 1) / float(
            getattr(text, "logit_scale", None) or 1
        )
        if self.softcap is not None and self.divisor != 1:
            got = (self.softcap, self.divisor)
            raise InvalidInput(must("model", "either cap or scale its logits", got, "this head is not known here"))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Columns of shape (tokens,); inputs have shape (1, tokens), and labels are the next tokens."""
        hidden = _hidden(self.hf.base_model, input_ids, position_ids)
        head: Any = self.hf.get_output_embeddings()
        log_probs, entropy = token_log_probs(
            hidden,
            head.weight,
            labels[0],
            bias=getattr(head, "bias", None),
            temperature=temperature * self.divisor,
            softcap=self.softcap,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    def hf_name(self, name: str) -> str:
        """Parameter name in a checkpoint of HF's class."""
        return name.removeprefix(_WRAPPED)


class ValueModel(nn.Module):
    """Value at each position: the backbone of a causal language model and a linear head.

    Parameters are named as in HF's token classification models with one label: ``model.*`` and ``score.*``.

    Args:
        hf: causal language model; its output head is dropped.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        text = hf.config.get_text_config()
        self.prefix = str(hf.base_model_prefix)
        self.add_module(self.prefix, hf.base_model)
        self.score = nn.Linear(text.hidden_size, 1, dtype=hf.dtype, device=hf.device)
        nn.init.normal_(self.score.weight, std=getattr(text, "initializer_range", 0.02))
        nn.init.zeros_(self.score.bias)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, torch.Tensor]:
        """``{"values": (tokens,)}``; arguments that only a language model needs are ignored."""
        hidden = _hidden(getattr(self, self.prefix), input_ids, position_ids)
        values = self.score(hidden.to(self.score.weight.dtype))
        return {"values": values.flatten().clone()}  # fsdp2 warns about outputs that are views

    def hf_name(self, name: str) -> str:
        """Parameter name in a checkpoint of HF's class."""
        return name


AnyModel = LanguageModel | ValueModel


def build(source: Any, config: EngineConfig) -> AnyModel:
    """The module for ``config.model_type``, on torch's default device.

    Args:
        source: folder or hub name, HF configuration (random weights), or an HF module, which is modified.
        config: defines type, dtype and checkpointing.

    Raises:
        InvalidInput: the source or model type is not supported, or ``sp_size`` does not divide the heads.
    """
    dtype = DTYPES[config.dtype]
    if isinstance(source, PreTrainedModel):
        hf: PreTrainedModel = source.to(dtype)  # pyright: ignore[reportArgumentType]
    elif isinstance(source, PreTrainedConfig):
        hf = AutoModelForCausalLM.from_config(source, dtype=dtype)
    elif isinstance(source, (str, Path)):
        hf = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    else:
        remedy = "pass its folder, its HF configuration or a HF module"
        raise InvalidInput(must("model", "be a causal language model", type(source).__name__, remedy))
    if config.sp_size > 1:
        ulysses.check_heads(hf.config.get_text_config().num_attention_heads, config.sp_size)
    hf.set_attn_implementation(ulysses.register() if config.sp_size > 1 else attention.register())
    if config.gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.model_type == "language_model":
        return LanguageModel(hf, chunk_tokens=config.log_prob_chunk_tokens)
    if config.model_type == "value_model":
        return ValueModel(hf)
    options = ["language_model", "value_model"]
    raise InvalidInput(must("model_type", f"be one of {options}", config.model_type, "register an engine for others"))


def may_be_bare(source: Any) -> bool:
    """Whether a rank can build the module without weights and receive them.

    Tied weights are separated when a module leaves the meta device, and a given module already has its weights.
    """
    config = _config_of(source)
    return config is not None and not config.get_text_config().tie_word_embeddings


def bare(source: Any, config: EngineConfig) -> AnyModel:
    """The module of :func:`build` on the meta device."""
    with torch.device("meta"):
        return build(_config_of(source), config)


def _config_of(source: Any) -> Any:
    return (
        AutoConfig.from_pretrained(source)
        if isinstance(source, (str, Path))
        else (source if isinstance(source, PreTrainedConfig) else None)
    )


def blocks(module: AnyModel) -> list[nn.Module]:
    """Modules to shard separately: embeddings that are not tied to the head, and transformer blocks.

    HF models list the classes of their blocks in ``_no_split_modules``.

    Raises:
        InvalidInput: the model does not list them.
    """
    names = {
        str(name)
        for part in module.modules()
        if isinstance(part, PreTrainedModel)
        for name in (getattr(part, "_no_split_modules", None) or ())
    }
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found:
        rule = "name its blocks in _no_split_modules"
        raise InvalidInput(must("model", rule, sorted(names), "set the attribute on its class, or use backend='ddp'"))
    tied = isinstance(module, LanguageModel) and module.hf.config.get_text_config().tie_word_embeddings
    return found if tied else [*(part for part in module.modules() if isinstance(part, nn.Embedding)), *found]


def _hidden(backbone: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states, shape (tokens, width)."""
    return backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state[0]
