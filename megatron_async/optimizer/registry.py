"""Optimizers in megatron-core's registry, by the names that ``--optimizer`` takes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_async.optimizer.flags import OptimizerFlags

Arguments = dict[str, Any]
ConfigToKwargs = Callable[[Any, Any, Any], Arguments]

_EMERGING = {
    "laprop": "scalar_optimizers.laprop",
    "mop": "orthogonalized_optimizers.mop",
    "muon_hyperball": "orthogonalized_optimizers.muon_hyperball",
    "oblique_adam": "riemannian_optimizers.normalized_optimizer",
    "oblique_sgd": "riemannian_optimizers.normalized_optimizer",
    "polargrad": "orthogonalized_optimizers.polargrad",
    "psgd_pro": "psgd.psgd",
    "rekls": "soap.rekls",
    "scion": "orthogonalized_optimizers.scion",
    "spel": "orthogonalized_optimizers.spel",
}
"""Further optimizers of emerging-optimizers, and the modules that register them. Imported when chosen: it takes a
second. sinkhorn_muon is left out: it wants weights without negative elements, which a transformer does not have."""

OWN_NAMES = ("normuon", "adamuon", "adan", "mars", "nadam")
"""Names that are new to Megatron's ``--optimizer``."""


def optimizer_names() -> tuple[str, ...]:
    """Names beyond Megatron's own: ours, and all that emerging-optimizers has."""
    return (*OWN_NAMES, *_EMERGING)


def register(flags: OptimizerFlags, *, chosen: str | None = None, scalar_optimizer: str = "adam") -> Callable[[], None]:
    """Put the optimizers into megatron-core's registry, with the values of the flags.

    Args:
        flags: Hyperparameters that megatron-core's OptimizerConfig has no place for.
        chosen: The optimizer of this run, for those that are only registered when chosen.
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
    if chosen in _EMERGING:
        registry[chosen] = _emerging_entry(chosen, scalar_optimizer)

    def undo() -> None:
        registry.clear()
        registry.update(before)

    return undo


def _emerging_entry(name: str, scalar_optimizer: str) -> Any:
    """An entry for a class that megatron-core has none for, or one that gives it Adam's betas as it does to all."""
    from emerging_optimizers import registry
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    importlib.import_module(f"emerging_optimizers.{_EMERGING[name]}")
    cls = registry.get_optimizer_cls(name)
    accepted = _constructor_arguments(cls)

    def config_to_kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> Arguments:
        known = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "num_ns_steps": config.muon_num_ns_steps,
            "extra_scale_factor": config.muon_extra_scale_factor,
            "fp32_matmul_prec": config.muon_fp32_matmul_prec,
        }
        return {key: value for key, value in known.items() if key in accepted}

    entry = EmergingOptimizerEntry(optimizer_cls=cls, config_to_kwargs=config_to_kwargs)
    for override in entry.default_param_overrides.values():
        override["optimizer"] = scalar_optimizer
    return entry


def _constructor_arguments(cls: type) -> set[str]:
    """Names that a constructor takes, also those that it hands on to its base class."""
    accepted: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base).parameters.values()
        accepted.update(parameter.name for parameter in parameters)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return accepted


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
