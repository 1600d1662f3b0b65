"""The schedule: what runs when, on which weights."""
