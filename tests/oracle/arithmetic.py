"""The arithmetic that byte equality depends on: compensation, gradient norm, clipping, writing x from the masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

SumAcrossStages = Callable[[list[Tensor]], Tensor]


def sequential_sum(squares: list[Tensor]) -> Tensor:
    """Sum of 0-d fp32 tensors, first stage first, in fp32."""
    total = torch.zeros((), dtype=torch.float32)
    for square in squares:
        total = total + square
    return total


def accumulated_norm(
    gradients: Sequence[Iterable[Tensor]], sum_across_stages: SumAcrossStages = sequential_sum
) -> float:
    """Global l2 norm in the order of a pipeline: within each stage first, then across stages.

    Within a stage it is the norm of the tensors' norms in fp32, as megatron-core computes it without fused
    kernels.

    Args:
        gradients: Per stage, its fp32 gradients, each parameter once.
        sum_across_stages: Adds the stages' squared norms (0-d fp32); the order matters in the last bit.

    Returns:
        The norm as a Python float (not rounded to fp32 after the square root).
    """
    squares = []
    for stage in gradients:
        norms = [torch.linalg.vector_norm(gradient) for gradient in stage]
        stage_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        squares.append(stage_norm**2)
    return float(sum_across_stages(squares).item() ** 0.5)


def clip_coefficient(norm: float, limit: float) -> float:
    """Factor on the gradients for clipping to ``limit`` (0 is off); 1.0 where nothing is clipped."""
    if limit <= 0.0:
        return 1.0
    return min(1.0, limit / (norm + 1.0e-6))


def written_weights(master_after: Tensor, update: Tensor, coefficient: float, dtype: torch.dtype) -> Tensor:
    """x_{k+1} = z_{k+1} - c u_k, computed in fp32 and rounded once to the model dtype.

    Args:
        master_after: z_{k+1}, fp32.
        update: u_k, or the direction that a prediction follows, fp32.
        coefficient: c, times the delay where that is not one update; for a prediction delay times learning rate.
        dtype: Model dtype.
    """
    if coefficient == 0.0:
        return master_after.to(dtype, copy=True)
    return torch.sub(master_after, update, alpha=coefficient).to(dtype)


def published_weights(initial: Tensor, updates: Sequence[Tensor], coefficient: float) -> list[Tensor]:
    """x_0, x_1, ... by the published recursion x_{k+1} = x_k - (1+c) u_k + c u_{k-1}, u_{-1} = 0, in fp64."""
    weights = [initial.double()]
    previous = torch.zeros_like(weights[0])
    for update in updates:
        current = update.double()
        weights.append(weights[-1] - (1.0 + coefficient) * current + coefficient * previous)
        previous = current
    return weights


def compensated_gradient(gradient: Tensor, difference: Tensor, strength: float) -> Tensor:
    """g + lambda g g (x_k - x_read), as g * (lambda * (difference * g) + 1), fp32.

    In this form, with one rounding an operation, a difference of zero changes no bit of g.
    """
    return gradient * (difference * gradient * strength + 1.0)
