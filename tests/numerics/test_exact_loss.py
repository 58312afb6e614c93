"""verl's own actor and critic losses with ``equipoise.loss=exact``: equal to rounding, whatever is under the mask.

The real ``ppo_loss`` and ``value_loss`` of verl 0.9.1 run on jagged rows as an engine hands them over, in float64.
"""

# verl is typed in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from equipoise.trainer_hooks.on_verl._patches import EXACT_KEY

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
POLICIES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
RIGHT_TO_ROUNDING = 1e-8  # verl adds 1e-8 to the counts that it divides by
PROMPTS, RESPONSES = (3, 1, 4, 2), (5, 1, 7, 3)
MASKS = ([1, 1, 0, 0, 1], [0], [1, 0, 1, 1, 1, 1, 0], [1, 1, 1])
"""A tool's tokens in the first and third row; the second is a padding row."""
BAD = (math.nan, math.inf, -math.inf)


@functools.cache
def losses() -> Any:
    from verl.workers.utils import losses as module

    return module


def jagged(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def under_the_mask(prompts: tuple[int, ...], masks: tuple[list[int], ...]) -> torch.Tensor:
    """Of all tokens, those whose output scores a token that is not counted: outputs are shifted by one."""
    parts = [[1] * (n - 1) + [1 - m for m in mask] + [1] for n, mask in zip(prompts, masks, strict=True)]
    return torch.tensor([value for part in parts for value in part]).bool()


class Case:
    """A micro-batch of one of two ranks, and what a model made of it.

    Args:
        bad: what stands under the mask, in each column and output; None for ordinary numbers.
        exact: the batch asks for an exact loss.
        wide: a row whose response is longer than all others, with nothing in its mask.
    """

    def __init__(self, *, bad: float | None = None, exact: bool = True, wide: bool = False) -> None:
        prompts, responses, masks = PROMPTS, RESPONSES, MASKS
        if wide:
            prompts, responses, masks = (*prompts, 2), (*responses, 19), (*masks, [0] * 19)
        draw = torch.Generator().manual_seed(0)
        whole = tuple(p + r for p, r in zip(prompts, responses, strict=True))
        mask = torch.tensor([value for row in masks for value in row])
        self.hidden = under_the_mask(prompts, masks)

        def normal(scale: float, shift: float, hidden: torch.Tensor) -> torch.Tensor:
            made = shift + scale * torch.randn(64, generator=draw, dtype=torch.float64)[: hidden.numel()]
            if bad is not None:
                made[hidden] = bad
            return made

        def column(scale: float, shift: float) -> torch.Tensor:
            return jagged(normal(scale, shift, mask == 0), responses)

        self.log_probs = normal(0.5, -2.0, self.hidden).requires_grad_()
        self.other = normal(0.3, 1.0, self.hidden).requires_grad_()  # entropy, or values
        self.output = {
            "log_probs": jagged(self.log_probs, whole),
            "entropy": jagged(self.other, whole),
            "values": jagged(self.other, whole),
        }
        columns = {
            "prompts": jagged(torch.zeros(sum(prompts)).long(), prompts),
            "responses": jagged(torch.zeros(sum(responses)).long(), responses),
            "response_mask": jagged(mask, responses),
            "old_log_probs": column(0.5, -2.0),
            "advantages": column(1.0, 0.0),
            "rollout_is_weights": column(0.1, 1.0),
            "ref_log_prob": column(0.5, -2.0),
            "values": column(0.5, 0.0),
            "returns": column(0.5, 0.0),
        }
        self.data = TensorDict(columns, batch_size=[len(prompts)])
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(self.data, dp_size=2, batch_num_tokens=int(mask.sum()) + 9, global_batch_size=7)
        if exact:
            tu.assign_non_tensor(self.data, **{EXACT_KEY: True})

    def actor(self, *, mode: str = "token-mean", policy: str = "vanilla") -> dict[str, Any]:
        """Loss, gradients and metrics of ``ppo_loss`` with entropy and KL terms."""
        return self._run(losses().ppo_loss, actor_config(mode, policy))

    def critic(self, *, mode: str = "token-mean") -> dict[str, Any]:
        """The same of ``value_loss``."""
        return self._run(losses().value_loss, critic_config(mode))

    def _run(self, function: Any, config: Any) -> dict[str, Any]:
        loss, metrics = function(config=config, model_output=self.output, data=self.data, dp_group=None)
        loss.backward()
        grads = [leaf.grad for leaf in (self.log_probs, self.other) if leaf.grad is not None]
        assert grads
        figures = {name: float(getattr(metric, "values", [metric])[0]) for name, metric in metrics.items()}
        return {"loss": loss.detach(), "grads": grads, "metrics": figures}


def actor_config(mode: str, policy: str) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=8,
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        loss_scale_factor=16,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        policy_loss=PolicyLossConfig(loss_mode=policy),
    )


def critic_config(mode: str) -> Any:
    from verl.workers.config import FSDPCriticConfig

    return FSDPCriticConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=8,
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        loss_scale_factor=16,
    )


def assert_alike(one: dict[str, Any], other: dict[str, Any], *, tolerance: float) -> None:
    torch.testing.assert_close(one["loss"], other["loss"], rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(one["grads"], other["grads"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert one["metrics"] == pytest.approx(other["metrics"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_exact_actor_loss_is_verls_to_rounding(policy: str, mode: str) -> None:
    mine, verls = Case().actor(mode=mode, policy=policy), Case(exact=False).actor(mode=mode, policy=policy)
    assert_alike(mine, verls, tolerance=RIGHT_TO_ROUNDING)
    assert any(bool(grad.any()) for grad in mine["grads"])


@pytest.mark.parametrize("mode", MODES)
def test_an_exact_critic_loss_is_verls_to_rounding(mode: str) -> None:
    assert_alike(Case().critic(mode=mode), Case(exact=False).critic(mode=mode), tolerance=RIGHT_TO_ROUNDING)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_under_the_mask_reaches_an_exact_actor_loss(policy: str, bad: float) -> None:
    dirty = Case(bad=bad)
    found = dirty.actor(policy=policy)
    assert_alike(found, Case().actor(policy=policy), tolerance=0.0)
    for grad in found["grads"]:
        assert not grad[dirty.hidden].any()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_under_the_mask_reaches_an_exact_critic_loss(mode: str, bad: float) -> None:
    assert_alike(Case(bad=bad).critic(mode=mode), Case().critic(mode=mode), tolerance=0.0)


@pytest.mark.parametrize("mode", MODES)
def test_the_width_of_a_batch_does_not_reach_an_exact_loss(mode: str) -> None:
    narrow, wide = Case().actor(mode=mode), Case(wide=True).actor(mode=mode)
    torch.testing.assert_close(wide["loss"], narrow["loss"], rtol=1e-14, atol=0)
    torch.testing.assert_close(wide["grads"][0][: Case().hidden.numel()], narrow["grads"][0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("dense_mask", [False, True])
def test_columns_of_rows_of_one_length_may_be_dense(dense_mask: bool) -> None:
    from equipoise.trainer_hooks.on_verl.worker.loss import exact_loss

    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    advantages = torch.where(mask == 1, 5.0, math.nan)
    columns = {"response_mask": mask if dense_mask else jagged(mask.flatten(), (3, 3)), "advantages": advantages}

    def original(_config: Any, _output: Any, data: Any, _group: Any) -> Any:
        return data["advantages"]

    found = exact_loss(original, None, {}, TensorDict(columns, batch_size=[2]))
    assert found.tolist() == [[5, 0, 5], [0, 5, 5]]
    assert advantages.isnan().any()  # the batch itself is left as it was


def is_finite(found: dict[str, Any]) -> bool:
    return all(bool(part.isfinite().all()) for part in (found["loss"], *found["grads"]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["gspo", "gpg", "geo_mean", "cispo"])
def test_without_it_a_nan_under_the_mask_reaches_verls_loss_or_gradient(policy: str, mode: str) -> None:
    """What the exact loss is for; and proof that the cases above can tell."""
    assert not is_finite(Case(bad=math.nan, exact=False).actor(mode=mode, policy=policy))
    assert not is_finite(Case(bad=math.nan, exact=False).critic(mode=mode))


def test_aggregation_alone_does_not_stop_a_nan_in_what_a_loss_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.trainer_hooks.on_verl.worker import loss as hook

    monkeypatch.setattr(hook, "_COLUMNS", ())
    monkeypatch.setattr(hook, "_where", lambda _mask, values: values)  # pyright: ignore[reportUnknownLambdaType]
    assert is_finite(Case(bad=math.nan).actor(policy="sapo"))
    assert not is_finite(Case(bad=math.nan).actor(policy="gpg"))
    assert not is_finite(Case(bad=math.nan).critic())


@pytest.mark.slow
def test_undo_puts_every_name_of_verl_back() -> None:
    code = """
import importlib, sys
from equipoise.trainer_hooks.on_verl import _patches
names = [("verl.workers.utils.losses", n) for n in ("ppo_loss", "value_loss", "agg_loss", "no_padding_2_padding")]
names += [("verl.trainer.ppo.core_algos", "agg_loss"), ("verl.trainer.distillation.losses", "agg_loss")]
names += [("verl.workers.engine.utils", n) for n in ("prepare_micro_batches", "postprocess_batch_func")]
names += [("verl.workers.engine.fsdp.transformer_impl", "prepare_micro_batches")]
found = lambda: [hasattr(getattr(importlib.import_module(m), n), "__wrapped__") for m, n in names]
assert all(found()), found()
_patches.undo()
assert not any(found()), found()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import verl\n" + code], check=True, timeout=200)
