"""Norms with their duals and linear minimization oracles.

For a norm ||.|| on (m, n) matrices with dual ||.||_*, the oracle returns the D with ||D|| <= 1 that maximizes
<M, D>, so that <M, D> = ||M||_*. The methods step along -D. Spectral norm: D = U V^T of the reduced SVD (Muon with an
exact polar factor); l_inf: D = sign(M) (sign descent); Frobenius: D = M / ||M||_F (normalized descent).

Source: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs", arXiv 2502.07529, Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Geometry:
    """A norm on matrices, batched over leading dimensions.

    Attributes:
        name: As on the command line and in the tables.
        label: What the method is called in the field.
        oracle: (..., m, n) to the maximizer D of the same shape.
        norm: (..., m, n) to (...).
        dual: (..., m, n) to (...), the dual norm.
        dual_over_frobenius: (m, n) to the smallest rho with ||M||_* <= rho ||M||_F for all M.
        exact: Whether the oracle is exact, as the bound supposes.
    """

    name: str
    label: str
    oracle: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    dual: Callable[[Tensor], Tensor]
    dual_over_frobenius: Callable[[int, int], float]
    exact: bool = True


def polar_factor(matrix: Tensor) -> Tensor:
    """U V^T of the reduced SVD, (..., m, n)."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def newton_schulz(matrix: Tensor) -> Tensor:
    """Muon's polynomial approximation of the polar factor, five steps, as megatron-core runs it; (..., m, n).

    Its singular values lie around one, not at one. Computed in fp32, which is what the library accepts.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    flat = matrix.reshape(-1, *matrix.shape[-2:]).float()
    return muon_utils.newton_schulz(flat, steps=5, coefficient_type="quintic").to(matrix.dtype).view_as(matrix)


def _spectral(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, ord=2)


def _nuclear(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix).sum(-1)


def _rank_root(rows: int, columns: int) -> float:
    return math.sqrt(min(rows, columns))


def _frobenius(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix)


GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        Geometry("muon", "Muon (spectral norm)", polar_factor, _spectral, _nuclear, _rank_root),
        Geometry(
            "sign",
            "sign descent (l_inf)",
            torch.sign,
            lambda matrix: matrix.abs().amax((-2, -1)),
            lambda matrix: matrix.abs().sum((-2, -1)),
            lambda rows, columns: math.sqrt(rows * columns),
        ),
        Geometry(
            "normalized",
            "normalized descent (Frobenius)",
            lambda matrix: torch.nn.functional.normalize(matrix.flatten(-2), dim=-1, eps=1e-300).view_as(matrix),
            _frobenius,
            _frobenius,
            lambda rows, columns: 1.0,
        ),
        Geometry("muon-ns", "Muon, Newton-Schulz", newton_schulz, _spectral, _nuclear, _rank_root, exact=False),
    )
}
"""Every geometry by name."""
