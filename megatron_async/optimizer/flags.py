"""Flags of optimizers that Megatron has none for, their checks, and the names that ``--optimizer`` takes."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import Literal

from megatron_async.errors import ConfigurationError


@dataclass(kw_only=True)
class OptimizerFlags:
    """Optimizers (megatron_async). Learning rate, weight decay and clipping are Megatron's own flags."""

    adaptive_muon_moment2_method: Literal["adamuon", "normuon", "namo"] = "adamuon"
    """Second moment of --optimizer adaptive_muon; --optimizer normuon and adamuon say it by their names."""

    adaptive_muon_beta2: float = 0.95
    """Decay rate of the second moment of normuon, adamuon and adaptive_muon. Momentum, scale and Newton-Schulz steps
    are those of the --muon flags."""

    adaptive_muon_eps: float = 1e-8
    """Term that keeps the second moment of normuon, adamuon and adaptive_muon above zero."""

    lion_everywhere: bool = False
    """--optimizer lion for all parameters, with --lion-beta1 and --lion-beta2. Without it Megatron gives embeddings
    and vectors to Adam, and matrices to a Lion with --adam-beta1 and --adam-beta2."""

    soap_shampoo_beta: float = 0.95
    """Decay rate of the Kronecker factors of SOAP."""

    soap_use_kl_shampoo: bool = True
    """SOAP as published, without the KL-Shampoo correction that Megatron switches on."""

    adan_beta1: float = 0.98
    """Decay rate of Adan's average of gradients (the paper writes 1 - beta)."""

    adan_beta2: float = 0.92
    """Decay rate of Adan's average of gradient differences."""

    adan_beta3: float = 0.99
    """Decay rate of Adan's second moment."""

    adan_eps: float = 1e-8
    """Term added to Adan's denominator."""

    mars_beta1: float = 0.95
    """Decay rate of the first moment of MARS."""

    mars_beta2: float = 0.99
    """Decay rate of the second moment of MARS."""

    mars_gamma: float = 0.025
    """Scale of the variance reduction of MARS."""

    mars_eps: float = 1e-8
    """Term added to the denominator of MARS."""

    nadam_beta1: float = 0.99
    """Momentum of NAdam; 0.99 is that of AsyncPP."""

    nadam_beta2: float = 0.999
    """Decay rate of NAdam's second moment."""

    nadam_eps: float = 1e-8
    """Term added to NAdam's denominator."""

    nadam_momentum_decay: float = 4e-3
    """Rate at which NAdam's momentum grows from a half of --nadam-beta1 to all of it."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "OptimizerFlags":
        """The flags in Megatron's parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    def validate(self, args: argparse.Namespace) -> None:
        """Check the flags together with Megatron's arguments.

        Args:
            args: Megatron's parsed arguments.

        Raises:
            ConfigurationError: With the flag and the remedy, for a value out of range or a flag that its optimizer
                does not read.
        """
        for name, value in vars(self).items():
            if isinstance(value, float):
                _check_range(name, value)
        self._check_lion(args)

    def _check_lion(self, args: argparse.Namespace) -> None:
        if self.lion_everywhere and args.optimizer != "lion":
            raise ConfigurationError("--lion-everywhere has no effect without --optimizer lion; drop it")
        changed = (args.lion_beta1, args.lion_beta2) != (0.95, 0.98)
        if changed and args.optimizer == "lion" and not self.lion_everywhere:
            raise ConfigurationError(
                "--lion-beta1 and --lion-beta2 have no effect on --optimizer lion as Megatron makes it, which reads "
                "--adam-beta1 and --adam-beta2; add --lion-everywhere, or use these"
            )


def _check_range(name: str, value: float) -> None:
    flag = "--" + name.replace("_", "-")
    if not math.isfinite(value) or value < 0.0:
        raise ConfigurationError(f"{flag} must be a finite number of at least 0, got {value}")
    if "beta" in name and value >= 1.0:
        raise ConfigurationError(f"{flag} must be below 1, got {value}: it is the share of an average that is kept")


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags, and the names of all registered optimizers to the choices of ``--optimizer``.

    Args:
        parser: Megatron's parser.

    Returns:
        The same parser.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megatron_async.optimizer.registry import optimizer_names

    ArgumentGroupFactory(OptimizerFlags).build_group(parser, title="optimizers (megatron_async)")
    for action in parser._actions:
        if action.dest == "optimizer":
            known = list(action.choices or ())
            action.choices = [*known, *(name for name in optimizer_names() if name not in known)]
    return parser
