"""Errors that a user can mend."""


class ConfigurationError(ValueError):
    """A setting or a combination of settings that cannot work; the message names the flag and the remedy."""
