"""Parts of scripts/benchmark_schedules.py: pipeline schedules measured against each other on one machine."""
