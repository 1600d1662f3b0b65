"""Base optimizers on plain fp32 masters, and what they make of their momentum alone.

From torch and emerging-optimizers where these have them, put together without megatron-core; an optimizer for matrices
has AdamW beside it for the rest. Adan, MARS and NAdam are the package's own classes, which have tests of their own
against implementations in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.soap import SOAP
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor, nn

from tests.oracle.config import MATRIX_OPTIMIZERS, OracleConfig, ParamRule

Key = tuple[int, str]


class SplitMuon(Muon):
    """Muon that orthogonalizes the q, k and v parts of a fused projection separately.

    The rows of a fused projection are ordered by query group; within a group come q, k and v.
    """

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Orthogonalized momentum of shape (M, N), fp32."""
        shapes = kwargs["qkv_split_shapes"]
        if shapes is None:
            return super().orthogonalize(p, grad, **kwargs)
        groups, columns = grad.shape[0] // sum(shapes), grad.shape[1]
        parts = grad.view(groups, sum(shapes), columns).split(list(shapes), dim=1)
        done = [self.scaled_orthogonalize_fn(part.reshape(-1, columns)) for part in parts]
        return torch.cat([part.view(groups, -1, columns) for part in done], dim=1).view_as(grad)


class NormMatchedMuon(AdaptiveMuon):
    """Adaptive Muon whose updates have the Frobenius norm of the orthogonalized momentum, AdaMuon's too."""

    def _apply_moment2_normalization(self, orth_grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        update = super()._apply_moment2_normalization(orth_grad, *args, **kwargs)
        if self.moment2_method != "adamuon":
            return update
        return update * (torch.linalg.vector_norm(orth_grad) / torch.linalg.vector_norm(update).clamp_min(1e-8))


def group_order(rule: ParamRule, config: OracleConfig) -> tuple[bool, bool, bool]:
    """Sort key of a parameter's group: an optimizer's matrices, then what has weight decay, then the rest.

    Megatron lists groups without overrides first; the gradient norm of a stage follows that order.
    """
    return (config.optimizer in MATRIX_OPTIMIZERS and not rule.matrix, rule.wd_mult != 1.0, rule.lr_mult != 1.0)


def build_optimizers(
    masters: Mapping[Key, nn.Parameter], rules: Mapping[Key, ParamRule], config: OracleConfig
) -> list[torch.optim.Optimizer]:
    """Optimizers over all masters. Groups carry ``lr_mult``; the caller sets ``lr`` before every step."""
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for key, master in masters.items():
        rule = rules[key]
        group: dict[str, Any] = {
            "params": [master],
            "lr_mult": rule.lr_mult,
            "weight_decay": config.weight_decay * rule.wd_mult,
        }
        if config.optimizer in MATRIX_OPTIMIZERS and rule.matrix:
            matrices.append({**group, "qkv_split_shapes": rule.qkv_split_shapes})
        else:
            others.append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(_for_matrices(matrices, config))
    if others:
        optimizers.append(_for_all_shapes(others, config))
    return optimizers


def _for_matrices(groups: list[dict[str, Any]], config: OracleConfig) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "lion":
        return Lion(groups, betas=betas)  # Megatron gives it Adam's
    if config.optimizer == "soap":
        return SOAP(
            groups,
            lr=0.0,
            betas=betas,
            shampoo_beta=config.soap_shampoo_beta,
            use_kl_shampoo=config.soap_use_kl_shampoo,
        )
    muon: dict[str, Any] = {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "num_ns_steps": config.muon_num_ns_steps,
        "coefficient_type": config.muon_coefficient_type,
        "scale_mode": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
        "fp32_matmul_prec": config.muon_fp32_matmul_prec,
    }
    if config.optimizer == "muon":
        return SplitMuon(groups, **muon)
    if any(group["qkv_split_shapes"] is not None for group in groups):
        raise ValueError(f"optimizer={config.optimizer!r} takes a fused projection as one matrix here")
    return NormMatchedMuon(groups, lr=0.0, weight_decay=0.0, moment2_method=config.optimizer, **muon)


def _for_all_shapes(groups: list[dict[str, Any]], config: OracleConfig) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.sgd_momentum)
    if config.optimizer in ("adan", "mars", "nadam"):
        from megatron_async.optimizer.adan import Adan
        from megatron_async.optimizer.mars import Mars
        from megatron_async.optimizer.nadam import NAdam

        made: torch.optim.Optimizer = {"adan": Adan, "mars": Mars, "nadam": NAdam}[config.optimizer](groups)
        return made
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)


def momentum_direction(optimizer: torch.optim.Optimizer, group: dict[str, Any], master: Tensor) -> Tensor:
    """What the base optimizer makes of its momentum alone: weights go along minus this, times the learning rate.

    Args:
        optimizer: An optimizer of :func:`build_optimizers`, after its step.
        group: The group of it that holds ``master``.
        master: One of its parameters.

    Returns:
        fp32, the shape of ``master``.
    """
    state = optimizer.state[master]
    if isinstance(optimizer, torch.optim.SGD):
        return state["momentum_buffer"]
    if isinstance(optimizer, Lion):
        return torch.sign(state["exp_avg"])
    if isinstance(optimizer, SplitMuon):
        with fp32_matmul_precision(optimizer.fp32_matmul_prec):
            return optimizer.orthogonalize(master, state["momentum_buffer"], qkv_split_shapes=group["qkv_split_shapes"])
    (beta1, beta2), step = group["betas"], int(state["step"])
    denominator = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
    return state["exp_avg"] / denominator / (1 - beta1**step)
