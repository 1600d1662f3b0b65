"""One optimizer update in halves that are apart in time: begin, take, complete.

*Begin*, right after the last backward of batch k, waits for nothing: it starts the reduction of the gradients over
data-parallel replicas. *Take*, before the first backward of batch k+1, moves the reduced gradients out of the
accumulation buffer and starts what the stages must agree on. *Complete*, most of a step later, joins it, clips by the
exact global norm, steps, and writes x_{k+1}.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.errors import ConfigurationError
from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.optimizer.agreement import Agreed, Agreement
from megatron_async.optimizer.delay_compensation import compensate_delay_
from megatron_async.optimizer.error_feedback import keep_masters, write_corrected_weights
from megatron_async.optimizer.gradients import Gradients
from megatron_async.optimizer.learning_rate_discount import discount_factor, discounted
from megatron_async.optimizer.masters import Master, base_optimizers, norm_parts
from megatron_async.optimizer.owner_broadcast import OwnerBroadcast
from megatron_async.optimizer.parameter_gather import ParameterGather
from megatron_async.optimizer.weight_prediction import WeightPrediction
from megatron_async.pipeline.streams import SideStream
from megatron_async.pipeline.weight_versions import WeightVersions


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one completed update did.

    Attributes:
        update: Number k of the update, which made x_{k+1}.
        grad_norm: Global l2 norm of the batch-k gradient before clipping.
        skipped: Whether the update was skipped, so that x_{k+1} = x_k: the norm was not finite or above
            ``--grad-norm-skip-threshold``.
        requests: Union of what the ranks requested while the update was pending, a bit each; the same on all ranks.
    """

    update: int
    grad_norm: float
    skipped: bool
    requests: int = 0


class DeferredStep:
    """Begins and completes the updates of a Megatron optimizer.

    Attributes:
        on_complete: Called with the result of every completed update.
        request: Bits that this rank wants the others to know, asked for once an update.

    Args:
        optimizer: The Megatron optimizer.
        masters: Its masters, from :func:`~megatron_async.optimizer.masters.find_masters`.
        versions: The weight versions of the stage.
        gradients: The gradients of the stage.
        write_others: Given the buffers of a new version, writes what the optimizer does not update.
        parameter_gather: Gathers the shards of a new version; None if every rank writes all of it.
        everyone: The ranks that have to agree on requests and token counts.
        tied_weight: This stage's copy of a weight that another stage holds too, or None.
        tied_group: The group of the stages that hold a copy; None if there is no tied weight.
        waits_for_tied: Whether to wait for the sum of a tied gradient as soon as the gradients are taken. Needed where
            another stage waits for the update before it computes: the sum would else be joined after what that stage
            is to send.
        takes_early: Whether gradients may be taken as soon as they are reduced, at a place of the plan that depends on
            timing. Not where finalizing them is collective within the stage: its ranks would be at different places.
        delays: Age in updates of the weights that each parameter of ``versions`` is read at; 1 for all by default.
        ef_coefficient: c of the error feedback, 0 for none.
        delay_compensation: lambda of the Taylor compensation, 0 for none.
        weight_prediction: Whether to write weights that are predicted by momentum.
        lr_discount_iters: K of the learning-rate discount of delays above one update, 0 for none.
        first_update: Number of the first update.
        timeout: Timeout of the group for the agreement; None for PyTorch's default.
        trace: Where the times of waits and steps go.

    Raises:
        ConfigurationError: If weights are to be predicted and the optimizer has no momentum to do that by, or error
            feedback or delay compensation, which mean the same delay, are on as well.
    """

    def __init__(
        self,
        *,
        optimizer: Any,
        masters: list[Master],
        versions: WeightVersions,
        gradients: Gradients,
        everyone: dist.ProcessGroup,
        parameter_gather: ParameterGather | OwnerBroadcast | None = None,
        write_others: Callable[[list[torch.Tensor]], None] = lambda buffers: None,
        tied_weight: torch.nn.Parameter | None = None,
        tied_group: dist.ProcessGroup | None = None,
        waits_for_tied: bool = False,
        takes_early: bool = True,
        delays: Sequence[int] | None = None,
        ef_coefficient: float = 0.0,
        delay_compensation: float = 0.0,
        weight_prediction: bool = False,
        lr_discount_iters: int = 0,
        first_update: int = 0,
        timeout: timedelta | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.versions = versions
        self.gradients = gradients
        self.ef_coefficient = ef_coefficient
        self.delay_compensation = delay_compensation
        self.next_update = first_update
        self.on_complete: list[Callable[[UpdateResult], None]] = []
        self.request: Callable[[], int] = lambda: 0
        self.trace = trace
        self._parameter_gather = parameter_gather
        self._write_others = write_others
        self._tied_weight = tied_weight
        self._tied_group = tied_group
        self._waits_for_tied = waits_for_tied
        self._takes_early = takes_early
        self._tied_work: dist.Work | None = None
        self._norm_parts = norm_parts(optimizer)
        self._agreement = Agreement([group for group, _ in self._norm_parts], everyone, timeout)
        self._pending: int | None = None
        self._is_taken = False
        self._side = SideStream(versions.parameters[0].device)
        self._tokens: torch.Tensor | None = None
        self._per_token = False
        self._schedule: list[tuple[float, float]] = []
        positions = {parameter: i for i, parameter in enumerate(versions.parameters)}
        self._positions = [positions[master.parameter] for master in masters]
        self._delays = [1 if delays is None else delays[i] for i in self._positions]
        self._lr_discount_iters = lr_discount_iters
        self._uncompensated: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._prediction: WeightPrediction | None = None
        if weight_prediction:
            if ef_coefficient or delay_compensation:
                other = "--async-error-feedback" if ef_coefficient else "--async-delay-compensation"
                raise ConfigurationError(f"--async-weight-prediction corrects the same delay as {other}; drop one")
            self._prediction = WeightPrediction(optimizer, masters, self._delays)

    @property
    def pending(self) -> int | None:
        """Number of the update that has begun and is not complete, if any."""
        return self._pending

    @torch.no_grad()
    def begin(self, *, per_token: bool = False, tokens: torch.Tensor | None = None) -> None:
        """Begin the next update with the gradients in the accumulation buffers.

        Args:
            per_token: Whether the gradients are sums that have to be divided by the number of tokens of the batch.
            tokens: Tokens of the batch that this rank alone counts, one element; None on ranks that count none.

        Raises:
            RuntimeError: If the update before is not complete.
            ConfigurationError: If the gradients are sums and have to be compensated.
        """
        if self._pending is not None:
            raise RuntimeError(f"update {self._pending} must be complete before update {self.next_update} begins")
        if per_token and self.delay_compensation:
            raise ConfigurationError(
                "--async-delay-compensation needs the mean gradient before the norm is taken, and "
                "--calculate-per-token-loss knows it only afterwards; drop one of them"
            )
        with self.trace.span("begin update", batch=self.next_update):
            self.gradients.start_reduction()
            # The scheduler moves on before the step runs: the update keeps the values of its own batch.
            self._schedule = self._current_schedule()
            self._per_token, self._tokens = per_token, tokens
            self._pending = self.next_update
            self._is_taken = False
            self.next_update += 1
            if not self.gradients.has_peers:
                self._take()

    @torch.no_grad()
    def take(self) -> None:
        """Move the reduced gradients out of the accumulation buffers, if that has not been done."""
        if self._pending is None or self._is_taken:
            return
        with self.trace.span("reduction wait", batch=self._pending):
            self._take()

    @torch.no_grad()
    def poll(self) -> None:
        """Let what runs in the background go on as soon as it can. Never blocks.

        On CUDA, where the host runs ahead, the order of streams does this.
        """
        if self._pending is None or self._side.is_real:
            return
        if self._takes_early and not self._is_taken and self.gradients.is_reduced():
            self._take()
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
        update = self._pending
        self.take()
        with self.trace.span("norm wait", batch=update):
            self._join_tied()
            agreed = self._agreement.join()
        with self.trace.span("step", batch=update, version=self.versions.newest + 1):
            norm = self._scale_per_token(agreed)
            skipped = not math.isfinite(norm) or norm > self.optimizer.config.grad_norm_skip_threshold
            if skipped:
                self.versions.repeat_newest(self._write_others)
            else:
                self._step(norm)
        result = UpdateResult(update, norm, skipped, agreed.requests)
        self._pending = None
        for callback in self.on_complete:
            callback(result)
        return result

    def _take(self) -> None:
        self.gradients.take()
        self._is_taken = True
        # The norm counts the gradient of a tied weight, so its sum over both stages comes first.
        gradient = None if self._tied_weight is None else self.gradients.of(self._tied_weight)
        if self.delay_compensation:
            # Out here: if a version is still being gathered, the computation that reads it next has to wait for it too.
            self._find_uncompensated()
        with self._side(after_computation=True):
            if gradient is None:
                self._start_agreement()
                return
            self._tied_work = dist.all_reduce(gradient, group=self._tied_group, async_op=True)
            if self._side.is_real or self._waits_for_tied:
                self._join_tied()

    def _join_tied(self) -> None:
        if self._tied_work is not None:
            self._tied_work.wait()
            self._tied_work = None
            self._start_agreement()

    def _find_uncompensated(self) -> None:
        """Note the gradients whose weights have changed since, with the weights of this batch and the newest.

        The pending update is number k, so the newest version is x_k: update k-1 was complete before this one began.
        """
        assert self._pending is not None
        newest, read = self.versions.tensors(self.versions.newest), self.versions.tensors_read(self._pending)
        for master, i in zip(self.masters, self._positions, strict=True):
            gradient = self.gradients.of(master.parameter)
            if newest[i] is not read[i] and gradient is not None:
                self._uncompensated.append((gradient, master.part_of(newest[i]), master.part_of(read[i])))

    def _start_agreement(self) -> None:
        for gradient, newest, read in self._uncompensated:
            compensate_delay_(gradient, newest, read, self.delay_compensation)
        self._uncompensated.clear()
        self.gradients.attach()
        squares = [
            self._local_squared_norm([g for base in bases for g in base.get_grads_for_grad_norm()])
            for _, bases in self._norm_parts
        ]
        self.gradients.detach()
        # The tokens are kept until the next update begins: on CUDA the side stream has not read them yet.
        self._agreement.start(torch.cat(squares), self._tokens, self.request())

    def _local_squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        device = self.versions.parameters[0].device
        if not gradients:
            return torch.zeros(1, dtype=torch.float32, device=device)
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        squared: torch.Tensor = norm.reshape(1) ** 2
        return squared

    def _scale_per_token(self, agreed: Agreed) -> float:
        """Divide the gradients by the number of tokens of the batch, if they are sums.

        Returns:
            The norm of the gradients as they are now.
        """
        if not self._per_token:
            return agreed.norm
        # In fp32, as Megatron does: its scale is the reciprocal of an integer tensor.
        tokens = torch.tensor(max(agreed.tokens, 1.0), dtype=torch.float32)
        scale = 1.0 / tokens
        self.gradients.scale(scale.to(self.versions.parameters[0].device))
        return agreed.norm * float(scale)

    def _step(self, norm: float) -> None:
        versions = self.versions
        version = versions.newest + 1
        buffers = versions.begin_write(version)
        targets = [m.part_of(buffers[i]) for m, i in zip(self.masters, self._positions, strict=True)]
        weights = [m.weight for m in self.masters]
        kept = keep_masters(weights, targets) if self.ef_coefficient else None
        with self._values_of_the_batch():
            self._step_masters(norm)
            if self._prediction is not None:
                self._prediction.write(targets)
            elif kept is not None:
                coefficients = [self.ef_coefficient * delay for delay in self._delays]
                write_corrected_weights(kept, weights, coefficients, targets)
            elif targets:
                torch._foreach_copy_(targets, weights)
        self._write_others(buffers)
        gather = self._parameter_gather
        versions.end_write(version, gather.start(versions, buffers) if gather else ())

    def _step_masters(self, norm: float) -> None:
        self.gradients.attach()
        self._clip(norm)
        # The inner optimizers, not Megatron's `step_with_ready_grads`: that also copies the masters into the weights
        # that the model computes with, and gathers those; here they go to the buffers of the new version.
        in_place = [m for m in self.masters if m.steps_in_place]
        bound = [m.parameter.data for m in in_place]
        try:
            # No graph reads the masters: the versions that autograd compares may stay as they are.
            with _unsafe_preserve_version_counter(tuple(m.optimized for m in self.masters if m.shares_version_counter)):
                for master in in_place:
                    master.parameter.data = master.weight
                for base in base_optimizers(self.optimizer):
                    if not base.is_stub_optimizer:
                        base.optimizer.step()
        finally:
            for master, data in zip(in_place, bound, strict=True):
                master.parameter.data = data
            self.gradients.detach()

    def _clip(self, norm: float) -> None:
        for base in base_optimizers(self.optimizer):
            if not base.is_stub_optimizer and base.config.clip_grad > 0.0:
                clip_grads.clip_grad_by_total_norm_fp32(base.get_parameters(), base.config.clip_grad, norm)

    def _current_schedule(self) -> list[tuple[float, float]]:
        """Learning rate and weight decay of every group."""
        return [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]

    @contextmanager
    def _values_of_the_batch(self) -> Iterator[None]:
        """Learning rate, discounted if it has to be, and weight decay of the batch that the pending update is for."""
        values = self._exchange_schedule(self._schedule)
        try:
            with self._discount():
                yield
        finally:
            self._exchange_schedule(values)

    def _discount(self) -> AbstractContextManager[None]:
        if not self._lr_discount_iters:
            return nullcontext()
        assert self._pending is not None
        factors = {
            master.optimized: discount_factor(delay, self._pending, self._lr_discount_iters)
            for master, delay in zip(self.masters, self._delays, strict=True)
        }
        inner = [base.optimizer for base in base_optimizers(self.optimizer) if not base.is_stub_optimizer]
        return discounted(inner, factors)

    def _exchange_schedule(self, values: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Set learning rate and weight decay of every group, and return what stood there."""
        current = self._current_schedule()
        for group, (lr, weight_decay) in zip(self.optimizer.param_groups, values, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay
        return current

    def close(self) -> None:
        """Give the process group and the gradient buffers back."""
        self._agreement.close()
        self.gradients.close()
