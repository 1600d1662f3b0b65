"""The random state of a rank, to be kept and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


@dataclass(frozen=True, slots=True)
class RandomState:
    """All that Megatron draws random numbers from, as its checkpoints hold it.

    Attributes:
        python: Of the module ``random``.
        numpy: Of NumPy's global generator.
        cpu: Of torch's CPU generator.
        device: Of the CUDA generator.
        tracker: Of Megatron's named generators, by name.
    """

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor
    tracker: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> "RandomState":
        """The present state. Some tens of microseconds; no synchronization with the device."""
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(),
            # As tensors: generators of a graph-safe tracker would go on changing.
            {name: tensor_parallel.convert_cuda_rng_state(s, to_graphable=False) for name, s in states.items()},
        )

    def put_back(self) -> None:
        """Make it the present state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state(self.device)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {n: tensor_parallel.convert_cuda_rng_state(s, to_graphable=graphable) for n, s in self.tracker.items()}
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make it the present state for a while."""
        present = RandomState.now()
        self.put_back()
        try:
            yield
        finally:
            present.put_back()
