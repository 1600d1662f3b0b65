"""What an oracle run computes: schedule, optimizer, answer to the delay, and an optional deliberate fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

Schedule = Literal["sync", "2bw-async", "pipedream", "wpipe"]
OptimizerName = Literal["adam", "sgd", "muon", "lion", "soap", "normuon", "adamuon", "adan", "mars", "nadam"]
MATRIX_OPTIMIZERS: tuple[OptimizerName, ...] = ("muon", "lion", "soap", "normuon", "adamuon")
"""Optimizers that take matrices only, as Megatron makes them; Adam takes the rest."""
PREDICTABLE: tuple[OptimizerName, ...] = ("adam", "sgd", "muon", "lion")
"""Optimizers that weight prediction is defined for."""
Fault = Literal[
    "fresh_gradient",
    "stale_base",
    "ef_drops_u0",
    "lr_of_next_step",
    "backward_at_new_weights",
    "backward_rebound",
    "reordered_microbatches",
    "early_scaling",
    "compensation_wrong_sign",
    "compensation_stale_difference",
    "prediction_lr_of_next_batch",
    "cooldown_keeps_x",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRule:
    """How the optimizer treats one parameter.

    Attributes:
        matrix: Whether Muon takes the parameter (ignored by Adam and SGD).
        lr_mult: Factor on the learning rate.
        wd_mult: Factor on the weight decay.
        qkv_split_shapes: Rows of q, k and v of one query group, for a fused projection that Muon
            orthogonalizes in parts; None for one matrix.
    """

    matrix: bool = False
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    qkv_split_shapes: tuple[int, ...] | None = None


def default_rule(name: str, param: nn.Parameter) -> ParamRule:
    """Megatron's treatment: no decay on vectors and biases, no Muon on vectors, embedding and output."""
    decays = param.dim() > 1 and not name.endswith(".bias")
    embedding = getattr(param, "is_embedding_or_output_parameter", False)
    return ParamRule(matrix=param.dim() == 2 and not embedding, wd_mult=1.0 if decays else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleConfig:
    """One oracle run. The optimizer's fields bear the names of megatron-core's ``OptimizerConfig``.

    Attributes:
        schedule: "sync" reads x_k, "2bw-async" reads x_{max(k-1,0)}, "pipedream" reads x_{max(k-(p-1-s),0)} on stage
            s of p, "wpipe" reads x_{max(k-1,0)} on the first p // 2 stages and x_k on the others.
        ef_coefficient: c of the error feedback; 0 is off. With a delay of D updates x_{k+1} = z_{k+1} - c D u_k.
        delay_compensation: lambda of g * (1 + lambda * (x_k - x_read) * g), which takes the place of the gradient g
            before the norm; 0 is off.
        weight_prediction: Whether x_{k+1} = z_{k+1} - D * lr_k * d_k, where d_k is what the base optimizer makes of
            its momentum alone.
        lr_discount_iters: K of the discount lr / D^(1 - min((k+1)/K, 1)) where D > 1; 0 is off. k counts from the end
            of ``sync_start``.
        sync_start: Batches 0 to N-1 run synchronously: they read x_k, gradients are not compensated, and x = z. From
            batch N on the delay counts from there: batch k reads x_{max(k-D,N)}.
        sync_cooldown: Number of batches at the end that run synchronously; before the first of them x becomes z.
        batches: Number of batches of the run; needed for ``sync_cooldown`` alone.
        lr: Learning rate of batch k: a constant, a sequence indexed by k, or a function of k.
        clip_grad: Limit of the global gradient norm; 0 is off.
        dtype: Model dtype, torch.float32 or torch.bfloat16; masters are always fp32.
        replicas: Data-parallel replicas d. A batch then has the microbatches of replica 0 first, of replica 1 next, and
            so on; each replica accumulates its own, divides by d, and the sum of these is the gradient.
        per_token: Whether losses are sums over tokens and the gradient is divided by the tokens of the batch.
        fault: A deliberate error, for negative controls. "fresh_gradient" reads x_k. "stale_base" applies the
            update to x_{k-1}. "ef_drops_u0" leaves the first update uncorrected. "lr_of_next_step" is off by
            one. "backward_at_new_weights" overwrites the weights in place between forward and backward;
            "backward_rebound" rebinds ``param.data`` there, which an op that saved a view does not notice.
            "reordered_microbatches" accumulates in reverse order; that shows in fp32 and for m >= 3 (two
            terms commute, and a few bf16 gradients add up exactly in fp32). "early_scaling" clips each
            microbatch to ``clip_grad / m`` before accumulation, instead of the sum. "compensation_wrong_sign" takes
            x_read - x_k, "compensation_stale_difference" the difference of the two versions before these,
            "prediction_lr_of_next_batch" predicts with lr_{k+1}, "cooldown_keeps_x" cools down from x.
    """

    schedule: Schedule = "2bw-async"
    ef_coefficient: float = 0.0
    delay_compensation: float = 0.0
    weight_prediction: bool = False
    lr_discount_iters: int = 0
    sync_start: int = 0
    sync_cooldown: int = 0
    batches: int | None = None
    lr: float | Sequence[float] | Callable[[int], float] = 1e-2
    clip_grad: float = 0.0
    dtype: torch.dtype = torch.float32
    replicas: int = 1
    per_token: bool = False
    fault: Fault | None = None

    optimizer: OptimizerName = "adam"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.9
    muon_nesterov: bool = False
    muon_num_ns_steps: int = 5
    muon_coefficient_type: str = "quintic"
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_fp32_matmul_prec: str = "medium"
    soap_shampoo_beta: float = 0.95
    soap_use_kl_shampoo: bool = True

    def __post_init__(self) -> None:
        if self.schedule == "sync" and self.ef_coefficient != 0.0:
            raise ValueError("schedule='sync' has no error feedback: set ef_coefficient=0")
        if self.schedule == "sync" and (self.delay_compensation or self.weight_prediction):
            raise ValueError("schedule='sync' has no delay to compensate or to predict over")
        if self.weight_prediction and self.optimizer not in PREDICTABLE:
            raise ValueError(f"weight_prediction is not defined for optimizer={self.optimizer!r}")
        if self.weight_prediction and (self.ef_coefficient or self.delay_compensation):
            raise ValueError("weight_prediction excludes ef_coefficient and delay_compensation")
        if self.delay_compensation and self.per_token:
            raise ValueError("delay_compensation excludes per_token")
        if self.sync_cooldown and self.batches is None:
            raise ValueError("sync_cooldown needs batches")
        for value, allowed in (
            (self.schedule, get_args(Schedule)),
            (self.optimizer, get_args(OptimizerName)),
            (self.fault, (None, *FAULTS)),
        ):
            if value not in allowed:
                raise ValueError(f"{value!r} is not one of {allowed}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {self.dtype}")
        if not math.isfinite(self.ef_coefficient) or self.ef_coefficient < 0:
            raise ValueError(f"ef_coefficient must be finite and >= 0, got {self.ef_coefficient}")
        needs_delay = ("fresh_gradient", "stale_base", "backward_at_new_weights", "backward_rebound")
        if self.fault in needs_delay and self.schedule == "sync":
            raise ValueError(f"fault={self.fault!r} changes nothing under schedule='sync'")
        needs = {
            "ef_drops_u0": ("ef_coefficient", self.ef_coefficient > 0.0),
            "early_scaling": ("clip_grad", self.clip_grad > 0.0),
            "compensation_wrong_sign": ("delay_compensation", self.delay_compensation != 0.0),
            "compensation_stale_difference": ("delay_compensation", self.delay_compensation != 0.0),
            "prediction_lr_of_next_batch": ("weight_prediction", self.weight_prediction),
            "cooldown_keeps_x": (
                "sync_cooldown and either ef_coefficient or weight_prediction",
                self.sync_cooldown > 0 and (self.ef_coefficient > 0.0 or self.weight_prediction),
            ),
        }
        option, is_there = needs.get(self.fault or "", ("", True))
        if not is_there:
            raise ValueError(f"fault={self.fault!r} changes nothing without {option}")

    def learning_rate(self, batch: int) -> float:
        """Learning rate of batch ``batch``, under the configured fault."""
        index = batch + 1 if self.fault == "lr_of_next_step" else batch
        if callable(self.lr):
            return self.lr(index)
        return self.lr if isinstance(self.lr, float | int) else self.lr[index]

    def lr_discount(self, batch: int, stage: int, stages: int) -> float:
        """Factor on the learning rate of a stage."""
        delay = self.delay(stage, stages)
        if not self.lr_discount_iters or delay < 2 or self.is_synchronous(batch):
            return 1.0
        progress = min((batch - self.sync_start + 1) / self.lr_discount_iters, 1.0)
        return float(delay) ** -(1.0 - progress)

    def delay(self, stage: int, stages: int) -> int:
        """D, age in updates of the weights that the schedule lets stage ``stage`` of ``stages`` read."""
        if self.schedule == "sync":
            return 0
        if self.schedule == "pipedream":
            return stages - 1 - stage
        return 1 if self.schedule == "2bw-async" or stage < stages // 2 else 0

    @property
    def first_of_cooldown(self) -> int | None:
        """Number of the first batch of the synchronous phase at the end; None if there is none."""
        if self.sync_cooldown == 0 or self.batches is None:
            return None
        return self.batches - self.sync_cooldown

    def is_synchronous(self, batch: int) -> bool:
        """Whether batch ``batch`` belongs to a synchronous phase of an asynchronous run."""
        end = self.first_of_cooldown
        return batch < self.sync_start or (end is not None and batch >= end)

    def age(self, batch: int, stage: int, stages: int) -> int:
        """Age in updates of the weights that batch ``batch`` reads on a stage: at most back to the first version."""
        if self.is_synchronous(batch) or self.fault == "fresh_gradient":
            return 0
        return min(self.delay(stage, stages), batch - self.sync_start)
