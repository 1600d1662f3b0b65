"""Taylor compensation of the delay: the gradient at old weights is moved to the newest ones.

With G(x) the gradient and H its derivative, G(x_k) = G(x_read) + H (x_k - x_read) + O(|x_k - x_read|^2). The Hessian of
a loss that is a negative log-likelihood is approximated by the outer product of the gradient, of that by its diagonal,
and the whole term is weighted by lambda::

    g + lambda * g * g * (x_k - x_read)        (all products elementwise)

Both versions of the weights are in memory anyway. Written as g * (1 + lambda * (x_k - x_read) * g) the formula needs
one temporary, and leaves every bit of g alone where the two versions are equal.

Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (DC-ASGD), ICML 2017,
arXiv 1609.08326, equation 10, with constant lambda.
"""

import torch


def compensate_delay_(
    gradient: torch.Tensor, newest: torch.Tensor, read: torch.Tensor, strength: float
) -> torch.Tensor:
    """Correct a gradient in place for weights that have changed since it was taken.

    Memory: one temporary of the gradient's size. An element that is not finite stays so.

    Args:
        gradient: g at ``read``, fp32, any shape.
        newest: x_k, the weights that the update is going to be applied after; the model's dtype, same shape.
        read: x_read, same dtype and shape. The difference is taken in fp32.
        strength: lambda.

    Returns:
        ``gradient``.
    """
    factor = newest.to(torch.float32, copy=True).sub_(read)
    factor.mul_(gradient).mul_(strength).add_(1.0)
    return gradient.mul_(factor)
