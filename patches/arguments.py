"""Our flags in Megatron's parser, and their checks after Megatron's own."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_async.config import AsyncPipelineConfig, add_arguments, adjust_arguments, flag_names
from megatron_async.errors import ConfigurationError
from megatron_async.optimizer.flags import OptimizerFlags, add_optimizer_arguments
from megatron_async.optimizer.registry import register
from megatron_async.ranks import is_first_rank

if TYPE_CHECKING:
    from megatron_async.session import Session


def with_own_flags(
    original: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """``add_megatron_arguments`` that adds the plugin's group too."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return _mend_help(add_optimizer_arguments(add_arguments(original(parser))))

    return add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape texts that argparse cannot expand: a stray % in one of Megatron's makes every --help fail."""
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action)
        except (ValueError, KeyError, TypeError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def with_own_checks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """``validate_args`` that checks our configuration too, and switches the asynchronous schedule on."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Any:
        config = AsyncPipelineConfig.from_args(args)
        try:
            session.check_machine(args)
            optimizer_flags = OptimizerFlags.from_args(args)
            optimizer_flags.validate(args)
            notes = adjust_arguments(args) if config.is_asynchronous else []
            result = original(args, defaults or {})
            config.validate(args)
        except ConfigurationError as error:
            refuse(error)
        for note in notes:
            if is_first_rank():
                print(f"> megatron_async: {note}", flush=True)
        session.configure(config, args)
        register(optimizer_flags, chosen=args.optimizer, scalar_optimizer=args.muon_scalar_optimizer)
        return result

    return validate_args


def without_own_flags(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """``load_yaml`` that refuses our flags beside it."""

    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        used = [flag for flag in flag_names() if any(a == flag or a.startswith(flag + "=") for a in sys.argv[1:])]
        if used:
            refuse(
                ConfigurationError(
                    f"{used[0]} is not supported with --yaml-cfg, which takes the place of the command line; "
                    "give Megatron's settings as flags"
                )
            )
        result = original(yaml_path)
        add_defaults(result)
        return result

    return load_yaml


def add_defaults(args: Any) -> None:
    """Give a namespace that no parser of ours made the defaults of our flags."""
    for name, value in vars(AsyncPipelineConfig()).items():
        if not hasattr(args, name):
            setattr(args, name, value)


def refuse(error: ConfigurationError) -> None:
    """End the process as argparse does: one message, on the first rank of the job, and status 2 on every rank."""
    if is_first_rank():
        print(f"megatron_async: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)
