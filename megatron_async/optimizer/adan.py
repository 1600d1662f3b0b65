"""Adan: adaptive Nesterov momentum (Xie et al., 2022)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optimizer.elementwise import ElementwiseOptimizer, Tensors, check_hyperparameters


class Adan(ElementwiseOptimizer):
    r"""Adan (Xie, Zhou, Li, Lin, Yan, arXiv:2208.06677), with the authors' bias correction.

    With d_k = g_k - g_{k-1}, and d_1 = 0:

    .. math::
        m_k &= \beta_1 m_{k-1} + (1-\beta_1) g_k \\
        v_k &= \beta_2 v_{k-1} + (1-\beta_2) d_k \\
        n_k &= \beta_3 n_{k-1} + (1-\beta_3) (g_k + \beta_2 d_k)^2 \\
        u_k &= \left(\frac{m_k}{1-\beta_1^k} + \frac{\beta_2 v_k}{1-\beta_2^k}\right)
               \Big/ \left(\sqrt{\frac{n_k}{1-\beta_3^k}} + \epsilon\right) \\
        \theta_{k+1} &= (\theta_k - \eta u_k) / (1 + \eta \lambda)

    The paper writes 1-β for β. The weight decay λ is decoupled in the proximal form of the paper. g_{k-1} is the
    gradient that the step before was given, clipped as it was. State: 4 tensors of the parameter's shape.

    Args:
        params: Parameters or groups.
        lr: η.
        betas: β1, β2, β3.
        eps: ε.
        weight_decay: λ.

    Raises:
        ValueError: If a value is out of range.
    """

    state_names = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        beta1, beta2, beta3 = betas
        check_hyperparameters("Adan", lr=lr, eps=eps, weight_decay=weight_decay, beta1=beta1, beta2=beta2, beta3=beta3)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], step: int, parameters: Tensors, grads: Any, *states: Tensors) -> None:
        exp_avg, exp_avg_diff, exp_avg_sq, previous_grad = states
        beta1, beta2, beta3 = group["betas"]
        if step == 1:
            torch._foreach_copy_(previous_grad, grads)
        scratch = torch._foreach_sub(grads, previous_grad)
        torch._foreach_copy_(previous_grad, grads)
        torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
        torch._foreach_lerp_(exp_avg_diff, scratch, 1 - beta2)
        torch._foreach_mul_(scratch, beta2)
        torch._foreach_add_(scratch, grads)
        torch._foreach_mul_(exp_avg_sq, beta3)
        torch._foreach_addcmul_(exp_avg_sq, scratch, scratch, 1 - beta3)

        torch._foreach_copy_(scratch, exp_avg_sq)
        torch._foreach_sqrt_(scratch)
        torch._foreach_div_(scratch, math.sqrt(1 - beta3**step))
        torch._foreach_add_(scratch, group["eps"])
        lr = group["lr"]
        torch._foreach_addcdiv_(parameters, exp_avg, scratch, -lr / (1 - beta1**step))
        torch._foreach_addcdiv_(parameters, exp_avg_diff, scratch, -lr * beta2 / (1 - beta2**step))
        torch._foreach_div_(parameters, 1 + lr * group["weight_decay"])
