"""NorMuon and AdaMuon: megatron-core's adaptive Muon, mended for emerging-optimizers 0.3."""

from __future__ import annotations

from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon
from megatron.core.utils import get_pg_size


class AdaptiveMuon(TensorParallelAdaptiveMuon):  # type: ignore[misc]
    r"""Muon whose orthogonalized momentum is normalized by a second moment before it is scaled.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t, \quad
        O_t = \mathrm{NewtonSchulz}(m_t) \\
        v_t &= \beta_2 v_{t-1} + (1-\beta_2) S(O_t), \quad
        \hat O_t = O_t / \sqrt{v_t} \\
        \theta_{t+1} &= (1 - \eta\lambda) \theta_t
                      - \eta s \frac{\lVert O_t \rVert_F}{\lVert \hat O_t \rVert_F} \hat O_t

    - ``normuon`` (Li et al., arXiv:2510.05491): S is the mean of squares of each row (of each column, where a matrix
      has fewer rows than columns), so v has an element a row;
    - ``adamuon`` (Si et al., arXiv:2507.11005): S squares every element, so v has the parameter's shape. As in
      emerging-optimizers, the momentum is orthogonalized as it is and not its sign;
    - ``namo`` (arXiv:2602.17080): a scalar for the whole matrix, without the ratio of norms.

    s is Muon's scale, ``--muon-scale-mode`` and ``--muon-extra-scale-factor``. With ``spectral``, an update of normuon
    and adamuon has the root mean square of Muon's, so a learning rate carries over; 0.2 for the extra factor gives the
    step of both papers.

    megatron-core 0.19.2 subclasses the optimizer of emerging-optimizers 0.2. Since 0.3 that applies the scale itself,
    after the normalization, by attributes which the subclass does not have: its first step fails. Here the
    orthogonalization is raw, and the scale is applied once, with the shapes of query, key and value where these are
    orthogonalized apart. And AdaMuon lacks the ratio of norms there, which makes its steps larger by the root of the
    longer side of the matrix.

    Args:
        params: Matrices, or groups of them.
        scale_mode: As in ``TensorParallelMuon``.
        extra_scale_factor: As in ``TensorParallelMuon``.
        num_ns_steps: As in ``TensorParallelMuon``.
        coefficient_type: As in ``TensorParallelMuon``.
        tp_mode: As in ``TensorParallelMuon``.
        **kwargs: Everything else that ``TensorParallelAdaptiveMuon`` takes.
    """

    def __init__(
        self,
        params: Any,
        *,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        num_ns_steps: int = 5,
        coefficient_type: str = "quintic",
        tp_mode: str = "duplicated",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            params, num_ns_steps=num_ns_steps, coefficient_type=coefficient_type, tp_mode=tp_mode, **kwargs
        )
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor

        def orthogonalize(grad: torch.Tensor, tp_group: Any, partition_dim: int | None = None) -> torch.Tensor:
            orthogonal: torch.Tensor = newton_schulz_tp(
                grad,
                steps=num_ns_steps,
                coefficient_type=coefficient_type,
                tp_group=tp_group,
                partition_dim=partition_dim,
                tp_mode="duplicated" if tp_mode == "blockwise" else tp_mode,
            )
            return orthogonal

        self.scaled_orthogonalize_fn = orthogonalize

    def _apply_moment2_normalization(self, orth_grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        update: torch.Tensor = super()._apply_moment2_normalization(orth_grad, *args, **kwargs)
        if self.moment2_method == "adamuon":
            update = self._match_frobenius_norm(update, orth_grad, kwargs["eps"])
        return update

    def _apply_muon_scale(self, update: torch.Tensor, size_out: int, size_in: int) -> torch.Tensor:
        # Not here, where the parameter is unknown, and with it its parts and its split over tensor-parallel ranks.
        return update

    def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
        """Scale the update, query, key and value each by its own shape if they are orthogonalized apart."""
        if not (self.split_qkv and self.is_qkv_fn(p)):
            update.mul_(self._scale(p, update.size(0)))
            return
        shapes = getattr(p, "qkv_split_shapes", None) or self.qkv_split_shapes
        groups = update.size(0) // sum(shapes)
        for part in torch.split(update.view(groups, sum(shapes), -1), shapes, dim=1):
            part.mul_(self._scale(p, groups * part.size(1)))

    def _scale(self, p: torch.Tensor, rows: int) -> float:
        """Muon's scale of a part of a parameter with this many rows on this rank."""
        size = [rows, p.size(1)]
        partition_dim = getattr(p, "partition_dim", -1)
        if self.tp_mode != "blockwise" and self.pg_collection and partition_dim in (0, 1):
            group = self.pg_collection.expt_tp if getattr(p, "expert_tp", False) else self.pg_collection.tp
            size[partition_dim] *= get_pg_size(group)
        return float(get_muon_scale_factor(*size, mode=self.scale_mode) * self.extra_scale_factor)
