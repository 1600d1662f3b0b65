"""Base optimizers on plain fp32 masters: torch's AdamW and SGD, and Muon with AdamW for what is no matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from torch import Tensor, nn

from tests.oracle.config import OracleConfig, ParamRule

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


def group_order(rule: ParamRule, config: OracleConfig) -> tuple[bool, bool, bool]:
    """Sort key of a parameter's group: Muon's matrices, then what has weight decay, then the rest.

    Megatron lists groups without overrides first; the gradient norm of a stage follows that order.
    """
    return (config.optimizer == "muon" and not rule.matrix, rule.wd_mult != 1.0, rule.lr_mult != 1.0)


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
        if config.optimizer == "muon" and rule.matrix:
            matrices.append({**group, "qkv_split_shapes": rule.qkv_split_shapes})
        else:
            others.append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            SplitMuon(
                matrices,
                momentum=config.muon_momentum,
                nesterov=config.muon_nesterov,
                num_ns_steps=config.muon_num_ns_steps,
                coefficient_type=config.muon_coefficient_type,
                scale_mode=config.muon_scale_mode,
                extra_scale_factor=config.muon_extra_scale_factor,
                fp32_matmul_prec=config.muon_fp32_matmul_prec,
            )
        )
    if others and config.optimizer == "sgd":
        optimizers.append(torch.optim.SGD(others, momentum=config.sgd_momentum))
    elif others:
        betas = (config.adam_beta1, config.adam_beta2)
        optimizers.append(torch.optim.AdamW(others, betas=betas, eps=config.adam_eps))
    return optimizers
