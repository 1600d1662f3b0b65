"""Error feedback for updates that come one step late, without persistent state.

Published form, with a coefficient c (1 = published, 0 = off) and u_{-1} = 0::

    x_{k+1} = x_k - (1 + c) u_k + c u_{k-1}

Put z_k = x_k + c u_{k-1}. Then::

    z_{k+1} = z_k - u_k
    x_{k+1} = z_{k+1} - c u_k

so the master weights z follow the plain optimizer, and only the weights that the model computes with are written with
the last update subtracted once more. u_k is the difference of the masters before and after the step; it lives for the
time of the step.

Source: Zmushko et al., "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM
Pretraining", arXiv 2606.30634. The form without state is derived in docs/schedule.md.
"""

import torch


def calculate_error_feedback(
    master_before: torch.Tensor, master_after: torch.Tensor, coefficient: float, *, out: torch.Tensor
) -> torch.Tensor:
    """x_{k+1} = z_{k+1} - c u_k with u_k = z_k - z_{k+1}.

    Args:
        master_before: z_k, fp32, any shape.
        master_after: z_{k+1}, same shape and dtype.
        coefficient: c, not negative.
        out: Where x_{k+1} goes, same shape and dtype; it may be ``master_before``.

    Returns:
        ``out``.
    """
    torch.sub(master_before, master_after, out=out)
    return torch.sub(master_after, out, alpha=coefficient, out=out)
