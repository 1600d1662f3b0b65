"""The oracle: one process, one global batch per call, every weight version kept by value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.oracle.arithmetic import (
    SumAcrossStages,
    accumulated_norm,
    clip_coefficient,
    compensated_gradient,
    sequential_sum,
    written_weights,
)
from tests.oracle.base_optimizer import build_optimizers, group_order, momentum_direction
from tests.oracle.config import OracleConfig, ParamRule, default_rule

Key = tuple[int, str]
StageTensors = list[dict[str, Tensor]]
"""Per stage, tensors by parameter name."""
Microbatch = tuple[Tensor, Tensor]
"""Input of the first stage and what the loss compares the last stage's output with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Everything about batch k and update k. All tensors are copies.

    Attributes:
        batch: k.
        losses: Loss of each microbatch, before the division by their number, fp32, shape (m,).
        gradients: Accumulated, reduced over tied copies and compensated, before clipping, fp32.
        norm: Global gradient norm before clipping.
        clip_coefficient: Factor applied to the gradients; 1.0 where nothing was clipped.
        skipped: Whether the norm was not finite, so that no weight changed.
        lr: Learning rate of the update, before per-parameter factors.
        updates: u_k = z_k - z_{k+1}, fp32; zero if skipped.
        newest: x_{k+1} in the model dtype.
        older: x_k in the model dtype.
        read_next: What batch k+1 reads, in the model dtype.
        masters: z_{k+1}, fp32.
        optimizer_state: Per stage and parameter, the base optimizer's tensors by their names.
    """

    batch: int
    losses: Tensor
    gradients: StageTensors
    norm: float
    clip_coefficient: float
    skipped: bool
    lr: float
    updates: StageTensors
    newest: StageTensors
    older: StageTensors
    read_next: StageTensors
    masters: StageTensors
    optimizer_state: list[dict[str, dict[str, Tensor]]]


def _clone(tensors: Sequence[Mapping[str, Tensor]]) -> StageTensors:
    return [{name: tensor.detach().clone() for name, tensor in stage.items()} for stage in tensors]


class Oracle:
    """Trains a chain of stages by the contract's definition of the weight versions.

    Args:
        stages: Modules applied in order; copied. The first takes a microbatch's input, each next one the
            output before.
        loss_fn: Mean loss (0-d) of the last output and the microbatch's target.
        config: What to compute.
        tied: Pairs of (stage, name), the first stage's copy first. Their gradients are summed in this order
            and both copies get the sum; the norm counts the first copy only.
        rule: Optimizer treatment by name and parameter; it sees the attributes of the given parameters.
        sum_across_stages: Adds the stages' squared norms.
        on_forward: Called with (batch, microbatch, stage) before each forward, for instance to seed dropout.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        config: OracleConfig,
        *,
        tied: Sequence[tuple[Key, Key]] = (),
        rule: Callable[[str, nn.Parameter], ParamRule] = default_rule,
        sum_across_stages: SumAcrossStages = sequential_sum,
        on_forward: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.stages = [copy.deepcopy(stage).to(config.dtype) for stage in stages]
        self.batch = 0
        self._loss_fn = loss_fn
        self._tied = tuple(tied)
        self._sum_across_stages = sum_across_stages
        self._on_forward = on_forward
        self._params = [dict(stage.named_parameters()) for stage in self.stages]
        # Copies of parameters lose the attributes that a rule may look at, so it sees the originals.
        rules = {(s, n): rule(n, p) for s, stage in enumerate(stages) for n, p in stage.named_parameters()}
        counted_elsewhere = {second for _, second in self._tied}
        self._norm_names = []
        for s, params in enumerate(self._params):
            order = {name: group_order(rules[s, name], config) for name in params}
            names = sorted(params, key=order.__getitem__)
            self._norm_names.append([name for name in names if (s, name) not in counted_elsewhere])
        self._masters = [
            {name: nn.Parameter(param.detach().float().clone()) for name, param in params.items()}
            for params in self._params
        ]
        flat = {(s, name): z for s, stage in enumerate(self._masters) for name, z in stage.items()}
        self._optimizers = build_optimizers(flat, rules, config)
        self._stage_of = {id(z): s for (s, _), z in flat.items()}
        self._stale_masters = _clone(self._masters)
        # One more than is read, for a fault that takes the version before that.
        history = 2 + max(1, *(config.delay(s, len(stages)) for s in range(len(stages))))
        initial = [{name: param.detach() for name, param in params.items()} for params in self._params]
        self._versions = [_clone(initial) for _ in range(history)]
        self._first_update_done = False

    def step(self, microbatches: Sequence[Microbatch], lr: float | None = None) -> Record:
        """Run batch k and make update k.

        Args:
            microbatches: The batch, in the order in which gradients are accumulated.
            lr: Learning rate; default ``config.learning_rate(k)``.

        Returns:
            The state after the update.
        """
        lr = self.config.learning_rate(self.batch) if lr is None else lr
        if self.batch == self.config.first_of_cooldown and self.config.fault != "cooldown_keeps_x":
            self._versions[0] = [
                {name: written_weights(z.detach(), z.detach(), 0.0, self.config.dtype) for name, z in stage.items()}
                for stage in self._masters
            ]
        gradients, losses = self._accumulate(microbatches)
        self._sum_tied(gradients)
        self._compensate(gradients)
        norm = self._norm(gradients)
        before_clipping = _clone(gradients)
        skipped = not math.isfinite(norm)
        coefficient = 1.0
        if skipped:
            newest = _clone(self._versions[0])
            updates = [{n: torch.zeros_like(z) for n, z in stage.items()} for stage in self._masters]
        else:
            if self.config.fault != "early_scaling":
                coefficient = clip_coefficient(norm, self.config.clip_grad)
            if coefficient < 1.0:
                for stage in gradients:
                    for gradient in stage.values():
                        gradient.mul_(coefficient)
            updates = self._update_masters(gradients, lr)
            newest = self._write(updates, lr)
        self._versions = [newest, *self._versions[:-1]]
        self.batch += 1
        return Record(
            batch=self.batch - 1,
            losses=losses,
            gradients=before_clipping,
            norm=norm,
            clip_coefficient=coefficient,
            skipped=skipped,
            lr=lr,
            updates=updates,
            newest=_clone(self._versions[0]),
            older=_clone(self._versions[1]),
            read_next=_clone([self._versions[self._age(s)][s] for s in range(len(self.stages))]),
            masters=_clone(self._masters),
            optimizer_state=self._optimizer_state(),
        )

    def _age(self, stage: int) -> int:
        """Age of the weights that the batch ``self.batch`` reads."""
        return self.config.age(self.batch, stage, len(self.stages))

    def _accumulate(self, microbatches: Sequence[Microbatch]) -> tuple[StageTensors, Tensor]:
        replicas = self.config.replicas
        count, rest = divmod(len(microbatches), replicas)
        if rest:
            raise ValueError(f"{len(microbatches)} microbatches cannot be divided among {replicas} replicas")
        results = [self._forward_backward(i, microbatch, count) for i, microbatch in enumerate(microbatches)]
        losses = torch.stack([loss for _, loss in results])
        if self.config.fault == "reordered_microbatches":
            results.reverse()
        totals = [self._sum(results[r * count : (r + 1) * count], count) for r in range(replicas)]
        return self._reduce(totals, microbatches), losses

    def _reduce(self, totals: list[StageTensors], microbatches: Sequence[Microbatch]) -> StageTensors:
        """The gradient of the batch from those of the replicas."""
        if not self.config.per_token:
            factor = 1.0 / len(totals)
            totals = [[{n: g * factor for n, g in stage.items()} for stage in total] for total in totals]
        reduced = totals[0]
        for total in totals[1:]:
            for sums, stage in zip(reduced, total, strict=True):
                for name, gradient in stage.items():
                    sums[name] = sums[name] + gradient
        if self.config.per_token:
            tokens = torch.tensor(sum(target.numel() for _, target in microbatches))
            scale = 1.0 / tokens
            reduced = [{n: g * scale for n, g in stage.items()} for stage in reduced]
        return reduced

    def _sum(self, results: Sequence[tuple[StageTensors, Tensor]], count: int) -> StageTensors:
        """Accumulate the microbatches of one replica."""
        total = [{n: torch.zeros_like(z, requires_grad=False) for n, z in s.items()} for s in self._masters]
        for gradients, _ in results:
            if self.config.fault == "early_scaling":
                scale = clip_coefficient(self._norm(gradients), self.config.clip_grad / count)
                gradients = [{n: g * scale for n, g in stage.items()} for stage in gradients]
            for accumulated, stage in zip(total, gradients, strict=True):
                for name, gradient in stage.items():
                    accumulated[name].add_(gradient)
        return total

    def _forward_backward(self, index: int, microbatch: Microbatch, count: int) -> tuple[StageTensors, Tensor]:
        """Gradients (fp32) and loss of one microbatch; the graph is cut between stages, as in a pipeline."""
        self._load(self._age)
        activation, target = microbatch
        inputs, outputs = [], []
        for number, stage in enumerate(self.stages):
            if self._on_forward is not None:
                self._on_forward(self.batch, index, number)
            if number > 0:
                activation = activation.detach().requires_grad_()
            inputs.append(activation)
            activation = stage(activation)
            outputs.append(activation)
        loss = self._loss_fn(activation, target)
        own_storage = self._disturb_weights()
        outputs[-1] = loss * target.numel() if self.config.per_token else loss / count
        gradient: Tensor | None = None
        for stage_input, stage_output in zip(reversed(inputs), reversed(outputs), strict=True):
            torch.autograd.backward(stage_output, grad_tensors=gradient)
            gradient = stage_input.grad
        gradients: StageTensors = []
        for params in self._params:
            gradients.append({n: p.grad.float() for n, p in params.items() if p.grad is not None})
            for param in params.values():
                param.grad = None
        for param, data in own_storage:
            param.data = data
        return gradients, loss.detach().float()

    def _load(self, age: Callable[[int], int]) -> None:
        with torch.no_grad():
            for number, params in enumerate(self._params):
                for name, param in params.items():
                    param.copy_(self._versions[age(number)][number][name])

    def _disturb_weights(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Put the newest weights under a live graph if the fault says so; returns what to rebind after it."""
        own_storage = []
        for number, params in enumerate(self._params):
            for name, param in params.items():
                if self.config.fault == "backward_at_new_weights":
                    param.data.copy_(self._versions[0][number][name])
                elif self.config.fault == "backward_rebound":
                    own_storage.append((param, param.data))
                    param.data = self._versions[0][number][name].clone()
        return own_storage

    def _sum_tied(self, gradients: StageTensors) -> None:
        for (first, first_name), (last, last_name) in self._tied:
            total = gradients[first][first_name] + gradients[last][last_name]
            gradients[first][first_name].copy_(total)
            gradients[last][last_name].copy_(total)

    def _compensate(self, gradients: StageTensors) -> None:
        """Move the gradients from the weights that were read to the newest ones."""
        strength = self.config.delay_compensation
        if strength == 0.0 or self.config.is_synchronous(self.batch):
            return
        if self.config.fault == "compensation_wrong_sign":
            strength = -strength
        offset = 1 if self.config.fault == "compensation_stale_difference" else 0
        for number, stage in enumerate(gradients):
            newest, read = self._versions[offset][number], self._versions[self._age(number) + offset][number]
            for name, gradient in stage.items():
                difference = newest[name].float() - read[name].float()
                gradient.copy_(compensated_gradient(gradient, difference, strength))

    def _norm(self, gradients: StageTensors) -> float:
        counted = [
            [stage[name] for name in names if name in stage]
            for stage, names in zip(gradients, self._norm_names, strict=True)
        ]
        return accumulated_norm(counted, self._sum_across_stages)

    def _update_masters(self, gradients: StageTensors, lr: float) -> StageTensors:
        """Make z_{k+1} in place; returns u_k."""
        current = _clone(self._masters)
        base = self._stale_masters if self.config.fault == "stale_base" else current
        self._stale_masters = current
        with torch.no_grad():
            for stage, start, stage_gradients in zip(self._masters, base, gradients, strict=True):
                for name, master in stage.items():
                    master.copy_(start[name])
                    master.grad = stage_gradients[name]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                stage = self._stage_of[id(group["params"][0])]
                group["lr"] = lr * group["lr_mult"] * self.config.lr_discount(self.batch, stage, len(self.stages))
            optimizer.step()
            optimizer.zero_grad()
        return [
            {name: start[name] - master.detach() for name, master in stage.items()}
            for stage, start in zip(self._masters, base, strict=True)
        ]

    def _write(self, updates: StageTensors, lr: float) -> StageTensors:
        synchronous = self.config.is_synchronous(self.batch)
        uncorrected = self.config.fault == "ef_drops_u0" and not synchronous and not self._first_update_done
        self._first_update_done = self._first_update_done or not synchronous
        coefficient = 0.0 if synchronous or uncorrected else self.config.ef_coefficient
        newest: StageTensors = []
        for number, (stage, stage_updates) in enumerate(zip(self._masters, updates, strict=True)):
            # A weight that is read D updates late is corrected for D updates.
            delay = self.config.delay(number, len(self.stages))
            written = {}
            for name, master in stage.items():
                step, effective = stage_updates[name], coefficient * delay
                if self.config.weight_prediction and not synchronous:
                    step, effective = self._prediction(master, delay, lr)
                written[name] = written_weights(master.detach(), step, effective, self.config.dtype)
            newest.append(written)
            if uncorrected:
                # What x_1 = x_0 - u_0 followed by the published recursion amounts to in terms of z = x + c u.
                for name, master in stage.items():
                    master.data.add_(stage_updates[name], alpha=self.config.ef_coefficient * delay)
        return newest

    def _prediction(self, master: nn.Parameter, delay: int, lr: float) -> tuple[Tensor, float]:
        """Direction, and how far the weights go along it."""
        if self.config.fault == "prediction_lr_of_next_batch":
            lr = self.config.learning_rate(self.batch + 1)
        optimizer, group = next(
            (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(p is master for p in group["params"])
        )
        return momentum_direction(optimizer, group, master), delay * (lr * group["lr_mult"])

    def _optimizer_state(self) -> list[dict[str, dict[str, Tensor]]]:
        state = {param: values for optimizer in self._optimizers for param, values in optimizer.state.items()}
        return [
            {
                name: {k: v.detach().clone() for k, v in state.get(z, {}).items() if isinstance(v, Tensor)}
                for name, z in stage.items()
            }
            for stage in self._masters
        ]
