"""The grid of the exactness test. Imports nothing of Megatron: pytest reads it to name the cases."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.models import ModelSpec, make_microbatch

UPDATES = 20
SHORT = 9
"""Updates of cases that differ from others in one thing."""
PEAK_LR = {"sgd": 3e-2, "lion": 3e-4}


def learning_rate(optimizer: str, batch: int) -> float:
    """Another value in every batch: three of warm-up, then a cosine."""
    peak = PEAK_LR.get(optimizer, 3e-3)
    return peak * (batch + 1) / 4 if batch < 3 else peak * 0.5 * (1 + math.cos(math.pi * batch / (UPDATES + 5)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    ``data_parallel`` runs it on all replicas of the pipeline: with 2 of them on data of their own, with 4 on equal data
    (the sum of 4 different gradients depends on the backend's order). ``sharded`` is the distributed optimizer,
    ``hooks`` starts reductions inside the last backward. ``per_token`` divides by the number of tokens at the end.
    ``poisoned`` is a batch whose loss is not a number, so that its update is skipped. ``fault`` makes the oracle wrong,
    ``sabotage`` the pipeline: negative controls.
    """

    stages: int
    microbatches: int
    optimizer: str
    ef: float = 0.0
    warmup_factor: int = 1
    dtype: str = "float32"
    tied: bool = False
    compensation: float = 0.0
    prediction: bool = False
    discount: int = 0
    sync_start: int = 0
    sync_cooldown: int = 0
    clip: float = 0.5
    blocks: tuple[str, ...] = ("leaf", "view", "mixed", "leaf")
    updates: int = UPDATES
    complete_early: bool = False
    data_parallel: bool = False
    sharded: bool = False
    schedule: str = "2bw-async"
    simulated: int = 1
    hooks: bool = False
    per_token: bool = False
    poisoned: int | None = None
    fault: str | None = None
    sabotage: str | None = None

    @property
    def name(self) -> str:
        parts = [
            f"p{self.stages}-m{self.microbatches}-w{self.warmup_factor}",
            self.optimizer,
            f"c{self.ef}",
            self.dtype,
        ]
        parts += (
            [self.schedule] * (self.schedule != "2bw-async")
            + [f"simulates{self.simulated}"] * (self.simulated > 1)
            + ["tied"] * self.tied
            + ["early"] * self.complete_early
            + ["dp"] * self.data_parallel
            + ["sharded"] * self.sharded
            + ["hooks"] * self.hooks
            + ["per-token"] * self.per_token
            + ["unclipped"] * (self.clip == 0)
            + [f"lambda{self.compensation}"] * (self.compensation != 0)
            + ["predicted"] * self.prediction
            + [f"discount{self.discount}"] * bool(self.discount)
            + [f"sync{self.sync_start}+{self.sync_cooldown}"] * bool(self.sync_start or self.sync_cooldown)
            + [f"poisoned{self.poisoned}"] * (self.poisoned is not None)
        )
        parts += [f"fault={self.fault}"] * bool(self.fault) + [f"sabotage={self.sabotage}"] * bool(self.sabotage)
        return "-".join(parts + ([] if self.blocks == Case.blocks else ["+".join(self.blocks)]))

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(blocks=self.blocks, tied=self.tied)

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """Fields that Megatron's and the oracle's configuration share by name."""
        return {
            "optimizer": self.optimizer,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "sgd_momentum": 0.9,
            "muon_momentum": 0.95,
            "muon_nesterov": True,
            "clip_grad": self.clip,
        }

    @property
    def counts_bytes(self) -> bool:
        """Whether the tensors that it keeps alive are counted, which takes a look at every object of the process."""
        return replace(self, updates=UPDATES) in byte_cases()

    @property
    def replicas(self) -> int:
        """Replicas of the pipeline that have data of their own."""
        return 2 if self.data_parallel and self.stages == 2 else 1

    @property
    def norm_is_exact(self) -> bool:
        """Whether the norm has the oracle's bytes: shards and late scaling round in other places."""
        return not (self.sharded or self.per_token or self.simulated > 1 or self.sync_start or self.sync_cooldown)

    def is_synchronous(self, batch: int) -> bool:
        """Whether a batch runs with Megatron's own schedule."""
        return not self.sync_start <= batch < self.updates - self.sync_cooldown

    @property
    def oracle_stages(self) -> int:
        """Stages of the oracle: those of the pipeline, or the simulated ones."""
        return self.stages if self.simulated == 1 else self.simulated

    def microbatch(self, batch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, (S, B); those of the second replica come after the first's."""
        tokens, targets = make_microbatch(self.spec, batch, index)
        # No target that counts: the mean of nothing.
        return tokens, torch.full_like(targets, -100) if (batch, index) == (self.poisoned, 0) else targets

    def oracle_key(self) -> Case:
        """The part of the case that the oracle's records depend on."""
        return replace(self, warmup_factor=1, sabotage=None, complete_early=False, sharded=False, hooks=False)


OPTIMIZERS = ("adam", "sgd", "muon")
OTHER_OPTIMIZERS = ("lion", "soap", "normuon", "adamuon", "adan", "mars", "nadam")
COEFFICIENTS = (0.0, 0.35, 1.0)


def layouts() -> list[tuple[int, int, int]]:
    """(stages, microbatches, warm-up factor): m in {p, p+1, 2p+1}, factor 2 where m allows it."""
    return [
        (p, m, factor)
        for p in (1, 2, 4)
        for m in (p, p + 1, 2 * p + 1)
        for factor in (1, 2)
        if m >= factor * (p - 1) + 1 and not (p == 1 and factor == 2)
    ]


@functools.cache
def byte_cases() -> frozenset[Case]:
    """Equal cases whose bytes are counted."""
    kinds = ({"dtype": "float32"}, {"dtype": "bfloat16"})
    alone = [
        {"stages": p, "microbatches": 2 * p + 1, "optimizer": optimizer, "ef": c, **kind}
        for p in (1, 2, 4)
        for optimizer in OPTIMIZERS
        for c in (0.0, 1.0)
        for kind in kinds
    ]
    # fp32 shards of Megatron's distributed optimizer are views with a history, which keep a dead model alive: their
    # bytes cannot be told from the last case's.
    replicated = [{**SHARDED, "stages": 2, "optimizer": "adam", "ef": c, "dtype": "bfloat16"} for c in (0.0, 1.0)]
    two = {"stages": 2, "microbatches": 3}
    answered = [
        {**two, "optimizer": optimizer, **kind, **answer}
        for optimizer in ("adam", "muon")
        for kind in kinds
        for answer in ({"compensation": 2.0}, {"prediction": True})
    ]
    others = [{**two, "optimizer": optimizer, "ef": 1.0} for optimizer in OTHER_OPTIMIZERS]
    return frozenset(Case(**case) for case in [*alone, *replicated, *answered, *others])


SHARDED = {"microbatches": 3, "data_parallel": True, "sharded": True, "clip": 0.0}


def equal_cases() -> list[dict[str, Any]]:
    """Cases in which the pipeline must equal the oracle."""
    cases: list[dict[str, Any]] = [
        {"stages": p, "microbatches": m, "warmup_factor": factor, "optimizer": optimizer, "ef": c}
        for p, m, factor in layouts()
        for optimizer, c in zip(OPTIMIZERS, (0.35, 0.0, 1.0), strict=True)
    ]
    # every optimizer with every coefficient
    cases += [
        {"stages": p, "microbatches": 2 * p + 1, "warmup_factor": 1, "optimizer": optimizer, "ef": c}
        for p in (1, 2, 4)
        for optimizer in OPTIMIZERS
        for c in COEFFICIENTS
    ]
    cases = [dict(items) for items in dict.fromkeys(tuple(case.items()) for case in cases)]
    # bf16 with fp32 masters
    cases += [
        {"stages": p, "microbatches": 2 * p + 1, "optimizer": optimizer, "ef": c, "dtype": "bfloat16"}
        for p in (1, 2, 4)
        for optimizer in OPTIMIZERS
        for c in (0.0, 1.0)
    ]
    # embedding tied to the output layer of another stage
    cases += [
        {"stages": p, "microbatches": p + 1, "optimizer": optimizer, "ef": c, "tied": True}
        for p in (1, 2, 4)
        for optimizer in OPTIMIZERS
        for c in (0.0, 1.0)
    ]
    cases.append({"stages": 4, "microbatches": 5, "optimizer": "muon", "ef": 1.0, "tied": True, "dtype": "bfloat16"})
    # data parallelism: the sum of two gradients is exact in any order, as is the average of equal ones
    cases += [
        {"stages": p, "microbatches": 3, "optimizer": optimizer, "ef": 1.0, "data_parallel": True}
        for p in (1, 2)
        for optimizer in ("adam", "muon")
    ]
    cases += [
        {"stages": p, "microbatches": 3, "optimizer": optimizer, "ef": 1.0, "data_parallel": True, "hooks": True}
        for p, optimizer in ((1, "adam"), (2, "muon"))
    ]
    # the distributed optimizer: every replica steps a shard; its norm is another sum, hence no clipping
    cases += [
        {**SHARDED, "stages": p, "optimizer": "adam", "ef": c, "dtype": dtype}
        for p, c, dtype in (
            (1, 1.0, "float32"),
            *((2, c, dtype) for c in (0.0, 1.0) for dtype in ("float32", "bfloat16")),
        )
    ]
    cases.append({**SHARDED, "stages": 2, "optimizer": "adam", "ef": 1.0, "hooks": True, "dtype": "bfloat16"})
    cases.append({**SHARDED, "stages": 2, "optimizer": "adam", "ef": 0.35, "tied": True, "complete_early": True})
    cases.append({**SHARDED, "stages": 2, "optimizer": "adam", "ef": 1.0, "poisoned": 5})
    # gradients divided by the number of tokens, which every stage learns late
    cases += [
        {"stages": p, "microbatches": p + 1, "optimizer": "adam", "ef": c, "clip": 0.0, "per_token": True}
        for p, c in ((1, 0.0), (2, 1.0), (4, 1.0))
    ]
    cases.append({**SHARDED, "stages": 2, "optimizer": "adam", "ef": 1.0, "per_token": True})
    # a gradient that is not finite: the update is skipped on every stage, and error feedback adds nothing
    cases += [
        {"stages": p, "microbatches": p + 1, "optimizer": optimizer, "ef": c, "poisoned": batch}
        for p in (1, 2, 4)
        for optimizer, c, batch in (("adam", 1.0, 5), ("muon", 0.35, 0), ("sgd", 0.0, 7))
    ]
    # completed right after they begin, every third time, as an evaluation does; clipping off
    cases += [
        {"stages": p, "microbatches": p + 1, "optimizer": "adam", "ef": 1.0, "complete_early": True} for p in (1, 2, 4)
    ]
    cases += [{"stages": p, "microbatches": p, "optimizer": "adam", "ef": 0.35, "clip": 0.0} for p in (1, 4)]
    families = other_schedules() + mitigations() + other_optimizers() + synchronous_phases()
    return cases + [{"updates": SHORT, **case} for case in families]


def other_schedules() -> list[dict[str, Any]]:
    """Schedules whose stages have other delays, on stages and simulated by one."""
    cases: list[dict[str, Any]] = []
    for schedule in ("pipedream", "wpipe"):
        for p, m, factor in layouts():
            if p > 1:
                cases.append(
                    {"schedule": schedule, "stages": p, "microbatches": m, "warmup_factor": factor, "optimizer": "adam"}
                    | {"ef": 0.35}
                )
        cases += [
            {"schedule": schedule, "stages": p, "microbatches": p + 1, "optimizer": "muon", "ef": 0.0, **kind}
            for p, kind in ((2, {"dtype": "bfloat16"}), (4, {"tied": True}), (4, {"poisoned": 5}))
        ]
        cases += [
            {"schedule": schedule, "stages": 2, "microbatches": 3, "optimizer": "adam", "ef": 1.0, "tied": True}
            | {"data_parallel": True},
            {**SHARDED, "schedule": schedule, "stages": 2, "optimizer": "adam", "ef": 1.0},
            {"schedule": schedule, "stages": 4, "microbatches": 5, "optimizer": "adam", "ef": 1.0}
            | {"complete_early": True},
        ]
        # Simulated: the norm of one stage is another sum, hence no clipping.
        cases += [
            {"schedule": schedule, "stages": 1, "microbatches": m, "simulated": p, "optimizer": optimizer, "ef": c}
            | {"clip": 0.0}
            for p, m, optimizer, c in ((2, 3, "adam", 1.0), (4, 1, "muon", 0.0), (4, 5, "adam", 0.35))
        ]
        cases.append(
            {"schedule": schedule, "stages": 1, "microbatches": 2, "simulated": 4, "optimizer": "adam", "ef": 1.0}
            | {"clip": 0.0, "dtype": "bfloat16", "data_parallel": True}
        )
    cases.append({"stages": 1, "microbatches": 2, "simulated": 4, "optimizer": "muon", "ef": 1.0, "clip": 0.0})
    return cases


def mitigations() -> list[dict[str, Any]]:
    """Delay compensation and weight prediction."""
    compensated, predicted = {"compensation": 2.0}, {"prediction": True}
    cases: list[dict[str, Any]] = [
        {"stages": p, "microbatches": 3, "optimizer": optimizer, "dtype": dtype, **answer}
        for p in (1, 2)
        for optimizer in (*OPTIMIZERS, "lion")
        for dtype in ("float32", "bfloat16")
        for answer in (compensated, predicted)
    ]
    four = {"stages": 4, "microbatches": 5}
    cases += [{**four, "optimizer": "muon", **answer} for answer in (compensated, predicted)]
    for p in (1, 2):
        few = {"stages": p, "microbatches": 3}
        cases += [
            {**few, "optimizer": "adam", "ef": 1.0, "compensation": 0.7},
            {**few, "optimizer": "adam", "complete_early": True, **compensated},
            {**few, "optimizer": "adam", "complete_early": True, **predicted},
            {**few, "optimizer": "adam", "poisoned": 5, **compensated},
            {**few, "optimizer": "muon", "poisoned": 5, **predicted},
            {**few, "optimizer": "adam", "tied": True, **compensated},
            {**few, "optimizer": "adam", "tied": True, **predicted},
        ]
    # what a shard sees, and gradients that are reduced
    cases += [
        {**SHARDED, "stages": 2, "optimizer": "adam", "dtype": dtype, **answer}
        for dtype in ("float32", "bfloat16")
        for answer in (compensated, predicted)
    ]
    cases.append({"stages": 2, "microbatches": 3, "optimizer": "muon", "data_parallel": True, **compensated})
    # a discount of the learning rate, on stages and simulated
    cases += [
        {**four, "schedule": "pipedream", "optimizer": "nadam", "discount": 5},
        {**four, "schedule": "pipedream", "optimizer": "muon", "discount": 5, "ef": 1.0, "dtype": "bfloat16"},
        {"schedule": "pipedream", "stages": 1, "microbatches": 3, "simulated": 4, "optimizer": "adam", "discount": 5}
        | {"clip": 0.0},
    ]
    # delays of other than one update, on stages and simulated
    for schedule in ("pipedream", "wpipe"):
        for answer in (compensated, predicted):
            cases.append({"schedule": schedule, **four, "optimizer": "adam", **answer})
            cases.append(
                {"schedule": schedule, "stages": 1, "microbatches": 3, "simulated": 4, "optimizer": "muon"}
                | {"clip": 0.0, "dtype": "bfloat16", **answer}
            )
    return cases


def synchronous_phases() -> list[dict[str, Any]]:
    """Synchronous start and cooldown. Megatron rounds the norm in another place, hence no clipping."""
    both = {"sync_start": 3, "sync_cooldown": 3, "clip": 0.0, "ef": 1.0}
    cases: list[dict[str, Any]] = [
        {**both, "stages": p, "microbatches": p + 1, "optimizer": optimizer, "dtype": dtype}
        for p in (1, 2, 4)
        for optimizer in ("adam", "muon")
        for dtype in ("float32", "bfloat16")
    ]
    two = {**both, "stages": 2, "microbatches": 3, "optimizer": "adam"}
    return [
        *cases,
        {**two, "tied": True},
        {**two, "sync_start": 0, "optimizer": "mars", "warmup_factor": 2},
        {**two, "sync_cooldown": 0, "compensation": 2.0, "ef": 0.0},
        {**two, "prediction": True, "ef": 0.0, "data_parallel": True},
        {**two, **SHARDED},
        {**two, **SHARDED, "dtype": "bfloat16"},
        {**two, "schedule": "pipedream", "optimizer": "soap"},
        {**two, "schedule": "wpipe", "stages": 4, "microbatches": 5},
    ]


def other_optimizers() -> list[dict[str, Any]]:
    """Every other optimizer with error feedback in both dtypes, and with delay compensation."""
    settings = ({"ef": 1.0}, {"ef": 0.35, "dtype": "bfloat16"}, {"compensation": 2.0})
    cases: list[dict[str, Any]] = [
        {"stages": p, "microbatches": 3, "optimizer": optimizer, **setting}
        for p in (1, 2)
        for optimizer in OTHER_OPTIMIZERS
        for setting in settings
        if not (optimizer == "lion" and "compensation" in setting)  # among the mitigations
    ]
    cases += [
        {"stages": 2, "microbatches": 3, "optimizer": name, "ef": 1.0, "poisoned": 5} for name in OTHER_OPTIMIZERS
    ]
    return cases


def unequal_cases() -> list[dict[str, Any]]:
    """Negative controls: cases in which the comparison must find a difference."""
    base = {"stages": 2, "microbatches": 3, "optimizer": "adam", "ef": 1.0, "updates": 8}
    faults = (
        "fresh_gradient",
        "stale_base",
        "ef_drops_u0",
        "lr_of_next_step",
        "backward_at_new_weights",
        "reordered_microbatches",
        "early_scaling",
    )
    cases: list[dict[str, Any]] = [{**base, "fault": fault} for fault in faults]
    delayed = {**base, "ef": 0.0}
    cases += [
        {**delayed, "compensation": 2.0, "fault": "compensation_wrong_sign"},
        {**delayed, "compensation": 2.0, "fault": "compensation_stale_difference"},
        {**delayed, "prediction": True, "fault": "prediction_lr_of_next_batch"},
        {**delayed, "stages": 4, "microbatches": 5, "schedule": "pipedream", "discount": 5, "sabotage": "no discount"},
        {**delayed, "prediction": True, "sabotage": "learning rate of the next batch"},
        {**delayed, "compensation": 2.0, "sabotage": "compensated before the tied sum", "tied": True},
    ]
    phases = {**base, "clip": 0.0, "sync_start": 2, "sync_cooldown": 3}
    cases += [{**phases, "fault": "cooldown_keeps_x"}, {**phases, "sabotage": "hands back x"}]
    leaf, view = ("leaf",) * 4, ("view",) * 4
    cases += [
        {**base, "sabotage": "no rebinding before the backward", "blocks": leaf},
        # An op that saved a view is safe from a missing rebinding, not from a buffer that is written while it lives.
        {**base, "sabotage": "written into a live buffer", "blocks": view},
        {**base, "sabotage": "written into a live buffer", "blocks": leaf},
        {**base, "sabotage": "learning rate of the next batch"},
        {**base, "sabotage": "error feedback drops u_0"},
        {**base, "stages": 1, "complete_early": True, "sabotage": "newest weights"},
        {**base, "data_parallel": True, "sabotage": "gradients taken before they are reduced"},
        {**base, "data_parallel": True, "sharded": True, "clip": 0.0, "sabotage": "shards are not gathered"},
        {**base, "clip": 0.0, "per_token": True, "sabotage": "a token too many"},
    ]
    return cases
