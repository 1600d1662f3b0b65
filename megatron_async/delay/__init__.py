"""Delays apart from pipelines: simulating those of a pipeline, and auditing those of a run."""
