"""What the trace test runs. Imports nothing heavy."""

STAGES = 2
MICROBATCHES = 4
BATCHES = 8
FIRST_STEP, STEPS = 3, 4
WARMUP_FACTORS = (1, 2)
SYNCHRONOUS = "1f1b"
