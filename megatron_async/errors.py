"""Errors that a user can mend."""


class ConfigurationError(ValueError):
    """A setting or a combination of settings that cannot work; the message names the flag and the remedy."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read; the message names the remedy."""
