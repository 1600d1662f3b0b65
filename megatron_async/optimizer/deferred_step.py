"""One optimizer update in two halves, apart in time: begin and complete.

*Begin*, right after the last backward of batch k, waits for no other stage: it takes the reduced gradients out of the
accumulation buffer, so that batch k+1 can accumulate there, and starts the communication that the update needs.
*Complete*, a step later, joins it, clips by the exact global norm, steps, and writes x_{k+1}.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.optimizer.error_feedback import calculate_error_feedback
from megatron_async.optimizer.masters import Master, base_optimizers
from megatron_async.pipeline.groups import new_group_like
from megatron_async.pipeline.weight_versions import WeightVersions


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one completed update did.

    Attributes:
        update: Number k of the update, which made x_{k+1}.
        grad_norm: Global l2 norm of the batch-k gradient before clipping.
        skipped: Whether the update was skipped, so that x_{k+1} = x_k: the norm was not finite or above
            ``--grad-norm-skip-threshold``.
    """

    update: int
    grad_norm: float
    skipped: bool


class DeferredStep:
    """Begins and completes the updates of a Megatron optimizer.

    Args:
        optimizer: The Megatron optimizer.
        masters: Its masters, from :func:`~megatron_async.optimizer.masters.find_masters`.
        versions: The weight versions of the stage, over the parameters of ``masters`` in the same order.
        gradient_buffers: The gradient accumulation buffers of the DDP-wrapped model (``model.buffers``).
        finalize: Reduces the gradients in the buffers within the stage: data parallelism, sequence parallelism.
        tied_weight: This stage's copy of a weight that another stage holds too, or None.
        tied_group: The group of the stages that hold a copy; None if there is no tied weight.
        ef_coefficient: c of the error feedback, 0 for none.
        timeout: Timeout of the group for the gradient norm; None for PyTorch's default.
    """

    def __init__(
        self,
        *,
        optimizer: Any,
        masters: list[Master],
        versions: WeightVersions,
        gradient_buffers: Iterable[Any],
        finalize: Callable[[], None],
        tied_weight: torch.nn.Parameter | None = None,
        tied_group: dist.ProcessGroup | None = None,
        ef_coefficient: float = 0.0,
        timeout: timedelta | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.versions = versions
        self.ef_coefficient = ef_coefficient
        self.finalize = finalize
        self.next_update = 0
        self.on_complete: list[Callable[[UpdateResult], None]] = []
        self._gradients = _DetachedGradients(gradient_buffers, masters)
        self._tied_weight = tied_weight
        self._tied_group = tied_group
        self._tied_work: dist.Work | None = None
        self._norm = _GlobalNorm(optimizer.get_grad_stats_parallel_group(), timeout)
        self._pending: int | None = None
        self._schedule: list[tuple[float, float]] = []

    @property
    def pending(self) -> int | None:
        """Number of the update that has begun and is not complete, if any."""
        return self._pending

    @torch.no_grad()
    def begin(self) -> None:
        """Begin the next update with the gradients in the accumulation buffers.

        Raises:
            RuntimeError: If the update before is not complete.
        """
        if self._pending is not None:
            raise RuntimeError(f"update {self._pending} must be complete before update {self.next_update} begins")
        self.finalize()
        self._gradients.take()
        # The scheduler moves on before the step runs: the update keeps the values of its own batch.
        self._schedule = self._current_schedule()
        self._pending = self.next_update
        self.next_update += 1
        if self._tied_weight is not None:
            gradient = self._gradients.of(self._tied_weight)
            self._tied_work = dist.all_reduce(gradient, group=self._tied_group, async_op=True)
        else:
            self._start_norm()

    @torch.no_grad()
    def poll(self) -> None:
        """Start the norm once the gradient of the tied weight, which it counts, has been summed. Never blocks."""
        if self._tied_work is not None and self._tied_work.is_completed():
            self._join_tied()

    @torch.no_grad()
    def complete(self) -> UpdateResult | None:
        """Complete the pending update: join, clip, step, write the new version.

        Returns:
            What was done; None if no update is pending.
        """
        if self._pending is None:
            return None
        self._join_tied()
        norm = self._norm.join()
        threshold = self.optimizer.config.grad_norm_skip_threshold
        skipped = not math.isfinite(norm) or norm > threshold
        if skipped:
            self.versions.repeat_newest()
        else:
            self._step(norm)
        result = UpdateResult(self._pending, norm, skipped)
        self._pending = None
        for callback in self.on_complete:
            callback(result)
        return result

    def _join_tied(self) -> None:
        if self._tied_work is not None:
            self._tied_work.wait()
            self._tied_work = None
            self._start_norm()

    def _start_norm(self) -> None:
        self._gradients.attach()
        gradients = [g for base in base_optimizers(self.optimizer) for g in base.get_grads_for_grad_norm()]
        self._gradients.detach()
        self._norm.start(gradients)

    def _step(self, norm: float) -> None:
        versions, masters = self.versions, self.masters
        before = [m.weight.clone() for m in masters] if self.ef_coefficient else None
        target = versions.begin_write(versions.newest + 1)
        self._gradients.attach()
        self._clip(norm)
        # Megatron copies a bf16 parameter's master to `param.data`: that is the new version's buffer while it steps.
        # An fp32 parameter is stepped in place: that is its master meanwhile. No graph reads either, so the versions
        # that autograd compares may stay as they are.
        versions.bind_to(m.weight if m.is_own else t for m, t in zip(masters, target, strict=True))
        own = tuple(m.parameter for m in masters if m.is_own)
        values = self._exchange_schedule(self._schedule)
        try:
            with _unsafe_preserve_version_counter(own):
                self.optimizer.step_with_ready_grads()
        finally:
            self._exchange_schedule(values)
            self._gradients.detach()
            versions.rebind()
        if before is not None:
            for old, master, tensor in zip(before, masters, target, strict=True):
                tensor.copy_(calculate_error_feedback(old, master.weight, self.ef_coefficient, out=old))
        else:
            for master, tensor in zip(masters, target, strict=True):
                if master.is_own:
                    tensor.copy_(master.weight)
        versions.end_write(versions.newest + 1)

    def _clip(self, norm: float) -> None:
        for base in base_optimizers(self.optimizer):
            if not base.is_stub_optimizer and base.config.clip_grad > 0.0:
                clip_grads.clip_grad_by_total_norm_fp32(base.get_parameters(), base.config.clip_grad, norm)

    def _current_schedule(self) -> list[tuple[float, float]]:
        """Learning rate and weight decay of every group."""
        return [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]

    def _exchange_schedule(self, values: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Set learning rate and weight decay of every group, and return what stood there."""
        current = self._current_schedule()
        for group, (lr, weight_decay) in zip(self.optimizer.param_groups, values, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay
        return current

    def close(self) -> None:
        """Give the process group back."""
        self._norm.close()


class _DetachedGradients:
    """A copy of the reduced gradients, out of the way of the next batch's accumulation."""

    def __init__(self, buffers: Iterable[Any], masters: list[Master]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        views: dict[torch.nn.Parameter, torch.Tensor] = {}
        for buffer in buffers:
            copy = torch.empty_like(buffer.grad_data, dtype=torch.float32)
            self._pairs.append((buffer.grad_data, copy))
            for parameter, (start, end, _) in buffer.param_index_map.items():
                views[parameter] = copy[start:end].view(parameter.shape)
        missing = [m for m in masters if m.parameter not in views]
        if missing:
            raise RuntimeError(f"{len(missing)} trainable parameter(s) have no gradient buffer")
        self._views = views
        self._masters = masters

    def take(self) -> None:
        for source, copy in self._pairs:
            copy.copy_(source)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._views[parameter]

    def attach(self) -> None:
        """Let the optimizer see the gradients."""
        for master in self._masters:
            master.optimized.grad = self._views[master.parameter]

    def detach(self) -> None:
        """Take them away: a backward would accumulate into the ``grad`` of an fp32 parameter."""
        for master in self._masters:
            master.optimized.grad = None


class _GlobalNorm:
    """The l2 norm over all stages, from one small all-gather that runs in the background.

    Every rank gathers the squared norms of all ranks and adds them with one rounding (``math.fsum``): the result does
    not depend on backend, rank order, or the number of stages a norm is split over beyond the per-stage sums.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        # Of its own, since a stage that waits for a tied gradient joins later than others do: on a shared group that
        # would change the order of collectives.
        self._group: dist.ProcessGroup | None = new_group_like(group, "gradient norm", timeout)
        self._size = group.size()
        self._work: dist.Work | None = None
        self._gathered: torch.Tensor | None = None

    def start(self, gradients: list[torch.Tensor]) -> None:
        squared = self._local_squared_norm(gradients)
        self._gathered = torch.empty(self._size, dtype=torch.float32, device=squared.device)
        self._work = dist.all_gather_single(self._gathered, squared, group=self._group, async_op=True)

    @staticmethod
    def _local_squared_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            return torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
        overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        squared: torch.Tensor = norm.reshape(1) ** 2
        return squared

    def join(self) -> float:
        if self._work is None or self._gathered is None:
            raise RuntimeError("the gradient norm was not started")
        self._work.wait()
        values = self._gathered.tolist()
        self._work = self._gathered = None
        if not all(map(math.isfinite, values)):
            return math.nan
        return float(math.fsum(values) ** 0.5)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
