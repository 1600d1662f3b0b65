"""Error feedback for updates that come late, without persistent state.

Published form for a delay of one update, with a coefficient c (1 = published, 0 = off) and u_{-1} = 0::

    x_{k+1} = x_k - (1 + c) u_k + c u_{k-1}

Put z_k = x_k + c u_{k-1}. Then::

    z_{k+1} = z_k - u_k
    x_{k+1} = z_{k+1} - c u_k

so the master weights z follow the plain optimizer, and only the weights that the model computes with are written with
the last update subtracted once more. u_k is the difference of the masters before and after the step; it lives for the
time of the step. Where a parameter is D updates late, the last update stands for the D that its reader will miss::

    x_{k+1} = z_{k+1} - c D u_k

Source: Zmushko et al., "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM
Pretraining", arXiv 2606.30634. The form without state is derived in docs/theory.md.
"""

from collections.abc import Sequence

import torch


def calculate_error_feedback(
    master_before: torch.Tensor, master_after: torch.Tensor, coefficient: float, *, out: torch.Tensor
) -> torch.Tensor:
    """x_{k+1} = z_{k+1} - c u_k with u_k = z_k - z_{k+1}.

    Args:
        master_before: z_k, fp32, any shape.
        master_after: z_{k+1}, same shape and dtype.
        coefficient: c, or c D for a delay of D updates; not negative.
        out: Where x_{k+1} goes, same shape and dtype; it may be ``master_before``.

    Returns:
        ``out``.
    """
    if coefficient == 0.0:
        return out.copy_(master_after)
    torch.sub(master_before, master_after, out=out)
    return torch.sub(master_after, out, alpha=coefficient, out=out)


def keep_masters(masters: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the masters z_k before a step changes them.

    Fresh memory costs more time than the arithmetic does, so a copy waits in the buffer that x_{k+1} is going to,
    wherever that has fp32. The copies of other masters, 4 bytes an element, live until the caller drops them.

    Args:
        masters: z_k, fp32.
        targets: Where x_{k+1} will go, tensors of the same shapes and of the model's dtype. Their contents are lost.

    Returns:
        A copy of each master.
    """
    pairs = zip(masters, targets, strict=True)
    kept = [t if t.dtype == z.dtype else torch.empty_like(z) for z, t in pairs]
    if kept:
        torch._foreach_copy_(kept, list(masters))
    return kept


def write_corrected_weights(
    kept: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    coefficients: Sequence[float],
    targets: Sequence[torch.Tensor],
) -> None:
    """Write x_{k+1} from the masters before and after a step, computed in fp32 and rounded once.

    Args:
        kept: z_k, from :func:`keep_masters`. Their contents are lost.
        masters: z_{k+1}, fp32.
        coefficients: c D of each.
        targets: Where x_{k+1} goes; the same as were given to :func:`keep_masters`.
    """
    for before, after, coefficient in zip(kept, masters, coefficients, strict=True):
        calculate_error_feedback(before, after, coefficient, out=before)
    unrounded = [(x, target) for x, target in zip(kept, targets, strict=True) if x is not target]
    if unrounded:
        torch._foreach_copy_([target for _, target in unrounded], [x for x, _ in unrounded])
