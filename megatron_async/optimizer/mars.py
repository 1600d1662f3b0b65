"""MARS-AdamW: AdamW on variance-reduced gradients (Yuan et al., 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optimizer.elementwise import ElementwiseOptimizer, Tensors, check_hyperparameters


class Mars(ElementwiseOptimizer):
    r"""MARS-AdamW (Yuan, Liu, Wu, Zhou, Gu, arXiv:2411.10438), in its approximate form.

    .. math::
        c_t &= g_t + \gamma \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \quad g_0 = g_1 \\
        \tilde c_t &= c_t / \max(1, \lVert c_t \rVert_2) \\
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t \\
        v_t &= \beta_2 v_{t-1} + (1-\beta_2) \tilde c_t^2 \\
        \theta_{t+1} &= (1 - \eta \lambda) \theta_t - \eta \frac{m_t}{1-\beta_1^t}
               \Big/ \left(\sqrt{\frac{v_t}{1-\beta_2^t}} + \epsilon\right)

    Approximate means that g_{t-1} is the gradient of the batch before at the weights before, as it was given to that
    step, and not one of this batch at the weights before, which would cost a second backward pass. The norm is that
    of one parameter, as in the authors' code. 1-D parameters are treated like the others (the authors' code leaves
    that open and gives them to AdamW by default). State: 3 tensors of the parameter's shape.

    Args:
        params: Parameters or groups.
        lr: η.
        betas: β1, β2.
        gamma: γ, the scale of the variance reduction; 0 is AdamW on gradients that are clipped one by one.
        eps: ε.
        weight_decay: λ, decoupled.

    Raises:
        ValueError: If a value is out of range.
    """

    state_names = ("exp_avg", "exp_avg_sq", "previous_grad")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        gamma: float = 0.025,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters("Mars", lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        if gamma < 0.0:
            raise ValueError(f"Mars: gamma must be at least 0, got {gamma}")
        defaults = {"lr": lr, "betas": tuple(betas), "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], step: int, parameters: Tensors, grads: Any, *states: Tensors) -> None:
        exp_avg, exp_avg_sq, previous_grad = states
        beta1, beta2 = group["betas"]
        if step == 1:
            torch._foreach_copy_(previous_grad, grads)
        corrected = torch._foreach_sub(grads, previous_grad)
        torch._foreach_copy_(previous_grad, grads)
        torch._foreach_mul_(corrected, group["gamma"] * beta1 / (1 - beta1))
        torch._foreach_add_(corrected, grads)
        norms = torch._foreach_norm(corrected)
        # Divided on the device: to ask whether a norm is above 1 would stop the host at every parameter.
        torch._foreach_clamp_min_(norms, 1.0)
        torch._foreach_div_(corrected, norms)
        torch._foreach_lerp_(exp_avg, corrected, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, corrected, corrected, 1 - beta2)

        denominator = corrected
        torch._foreach_copy_(denominator, exp_avg_sq)
        torch._foreach_sqrt_(denominator)
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, exp_avg, denominator, -group["lr"] / (1 - beta1**step))
