"""The deferred optimizer step, and what can be done about its delay."""
