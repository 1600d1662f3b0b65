"""Parts of ``scripts/check_lmo_delay.py``: linear minimization oracles under delay, with and without error feedback."""
