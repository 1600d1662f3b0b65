"""NAdam with decoupled weight decay, the base optimizer of AsyncPP."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optimizer.elementwise import ElementwiseOptimizer, Tensors, check_hyperparameters


class NAdam(ElementwiseOptimizer):
    r"""NAdam (Dozat, 2016) with decoupled weight decay, as AsyncPP uses it (Ajanthan et al., arXiv:2505.01099).

    AsyncPP answers stale gradients with a look-ahead that grows with the momentum, hence its β1 of 0.99.

    .. math::
        \mu_t &= \beta_1 (1 - \tfrac12 \, 0.96^{t \psi}), \quad \pi_t = \prod_{i \le t} \mu_i \\
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
        \theta_{t+1} &= (1 - \eta \lambda) \theta_t - \eta
               \left(\frac{\mu_{t+1} m_t}{1-\pi_{t+1}} + \frac{(1-\mu_t) g_t}{1-\pi_t}\right)
               \Big/ \left(\sqrt{\frac{v_t}{1-\beta_2^t}} + \epsilon\right)

    The arithmetic is that of ``torch.optim.NAdam``, which is not used itself: its state has a π of its own for every
    parameter, which a checkpoint of megatron-core refuses and whose copy on the device, after loading, would stop the
    host in every step. π follows from the step. State: 2 tensors of the parameter's shape.

    Args:
        params: Parameters or groups.
        lr: η.
        betas: β1, β2.
        eps: ε.
        weight_decay: λ.
        momentum_decay: ψ, the rate at which μ_t grows from β1/2 to β1.

    Raises:
        ValueError: If a value is out of range.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
    ) -> None:
        check_hyperparameters("NAdam", lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        if momentum_decay < 0.0:
            raise ValueError(f"NAdam: momentum_decay must be at least 0, got {momentum_decay}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        self._products: dict[tuple[float, float], tuple[int, float]] = {}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], step: int, parameters: Tensors, grads: Any, *states: Tensors) -> None:
        exp_avg, exp_avg_sq = states
        beta1, beta2 = group["betas"]
        psi = group["momentum_decay"]
        product = self._product(beta1, psi, step)
        now, following = scheduled_momentum(beta1, psi, step), scheduled_momentum(beta1, psi, step + 1)
        torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - beta2)

        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominator, group["eps"])
        lr = group["lr"]
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, grads, denominator, -lr * (1 - now) / (1 - product))
        torch._foreach_addcdiv_(parameters, exp_avg, denominator, -lr * following / (1 - product * following))

    def _product(self, beta1: float, psi: float, step: int) -> float:
        """π_step, continued from the last one asked for."""
        done, product = self._products.get((beta1, psi), (0, 1.0))
        if done > step:
            done, product = 0, 1.0
        for earlier in range(done + 1, step + 1):
            product *= scheduled_momentum(beta1, psi, earlier)
        self._products[beta1, psi] = step, product
        return product


def scheduled_momentum(beta1: float, psi: float, step: int) -> float:
    """μ_step of NAdam: grows from about β1/2 to β1."""
    return float(beta1 * (1 - 0.5 * 0.96 ** (step * psi)))
