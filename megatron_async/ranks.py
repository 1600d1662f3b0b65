"""Who speaks: what a job says once, before torch.distributed is there to ask."""

import os


def is_first_rank() -> bool:
    """Whether this is rank 0 of the job, or a process without a launcher."""
    return os.environ.get("RANK", "0") == "0"
