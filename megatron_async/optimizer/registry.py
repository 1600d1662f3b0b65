"""Optimizers in megatron-core's registry, by the names that ``--optimizer`` takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_async.optimizer.flags import OptimizerFlags

Arguments = dict[str, Any]
ConfigToKwargs = Callable[[Any, Any, Any], Arguments]

OWN_NAMES = ("normuon", "adamuon", "adan", "mars", "nadam")
"""Names that are new to Megatron's ``--optimizer``."""


def optimizer_names() -> tuple[str, ...]:
    """Names beyond Megatron's own."""
    return OWN_NAMES


def register(flags: OptimizerFlags, *, scalar_optimizer: str = "adam") -> Callable[[], None]:
    """Put the optimizers into megatron-core's registry, with the values of the flags.

    Args:
        flags: Hyperparameters that megatron-core's OptimizerConfig has no place for.
        scalar_optimizer: What updates embeddings, output layer and vectors beside the Muon family
            (``--muon-scalar-optimizer``).

    Returns:
        A function that puts the registry back as it was.
    """
    from megatron.core.optimizer import emerging_optimizers

    registry: dict[str, Any] = emerging_optimizers._EMERGING_OPTIMIZERS
    before = dict(registry)
    registry.update(_elementwise(flags))
    registry.update(_adaptive_muon(flags, scalar_optimizer))

    def undo() -> None:
        registry.clear()
        registry.update(before)

    return undo


def _elementwise(flags: OptimizerFlags) -> dict[str, Any]:
    """Optimizers that take every parameter, whatever its shape."""
    from emerging_optimizers.scalar_optimizers import Lion

    from megatron_async.optimizer.adan import Adan
    from megatron_async.optimizer.mars import Mars
    from megatron_async.optimizer.nadam import NAdam

    entries = {
        "adan": _entry(Adan, betas=(flags.adan_beta1, flags.adan_beta2, flags.adan_beta3), eps=flags.adan_eps),
        "mars": _entry(Mars, betas=(flags.mars_beta1, flags.mars_beta2), gamma=flags.mars_gamma, eps=flags.mars_eps),
        "nadam": _entry(
            NAdam,
            betas=(flags.nadam_beta1, flags.nadam_beta2),
            eps=flags.nadam_eps,
            momentum_decay=flags.nadam_momentum_decay,
        ),
    }
    if flags.lion_everywhere:
        entries["lion"] = _entry(Lion, betas=lambda config: (config.lion_beta1, config.lion_beta2))
    return entries


def _entry(optimizer_cls: type, **hyperparameters: Any) -> Any:
    """An entry for all parameters; a hyperparameter that is a function is asked with megatron-core's configuration."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    def config_to_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> Arguments:
        given = {name: value(config) if callable(value) else value for name, value in hyperparameters.items()}
        return {"lr": config.lr, "weight_decay": config.weight_decay, **given}

    return EmergingOptimizerEntry(
        optimizer_cls=optimizer_cls, config_to_kwargs=config_to_kwargs, default_param_overrides={}
    )


def _adaptive_muon(flags: OptimizerFlags, scalar_optimizer: str) -> dict[str, Any]:
    """``normuon`` and ``adamuon``, and ``adaptive_muon`` in place of megatron-core's, which cannot step."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    from megatron_async.optimizer.adaptive_muon import AdaptiveMuon

    methods = {
        "normuon": "normuon",
        "adamuon": "adamuon",
        "adaptive_muon": flags.adaptive_muon_moment2_method,
    }
    entries = {}
    for name, method in methods.items():
        entry = EmergingOptimizerEntry(
            optimizer_cls=AdaptiveMuon,
            config_to_kwargs=functools.partial(_adaptive_muon_kwargs, flags=flags, method=method),
        )
        # megatron-core puts --muon-scalar-optimizer in by itself only for the names that it knows.
        for override in entry.default_param_overrides.values():
            override["optimizer"] = scalar_optimizer
        entries[name] = entry
    return entries


def _adaptive_muon_kwargs(
    config: Any, model_chunks: Any, pg_collection: Any, *, flags: OptimizerFlags, method: str
) -> Arguments:
    from megatron.core.optimizer.emerging_optimizers import _muon_config_to_kwargs

    kwargs: Arguments = _muon_config_to_kwargs(config, model_chunks, pg_collection)
    return kwargs | {
        "moment2_method": method,
        "beta2": flags.adaptive_muon_beta2,
        "eps": flags.adaptive_muon_eps,
    }
