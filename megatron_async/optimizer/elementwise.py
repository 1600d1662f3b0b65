"""What optimizers share that treat every element of a parameter alike: state, steps, and groups of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

Tensors = list[torch.Tensor]

MAX_ELEMENTS = 1 << 24
"""Elements updated by one call of torch's foreach functions: it bounds what a step allocates (64 MiB in fp32)."""


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers whose state has the shape of the parameter, which megatron-core saves in every format.

    megatron-core calls ``_init_group(group, skip_non_grad_params=False)`` to have all state before it loads a
    checkpoint, and wants one ``step`` for all parameters: an int, as in the optimizers of emerging-optimizers.

    A subclass names its state and updates some parameters that have made the same number of steps.

    Attributes:
        state_names: Names of the state of a parameter, each a tensor of its shape and dtype.
    """

    state_names: ClassVar[tuple[str, ...]]

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for parameter in group["params"]:
            if skip_non_grad_params and parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                for name in self.state_names:
                    state[name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; the others, and their state, are left alone.

        Args:
            closure: Not supported, must be None.

        Raises:
            ValueError: If there is a closure.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__} does not support a closure; compute the gradients before step()")
        for group in self.param_groups:
            self._init_group(group)
            by_step: dict[int, Tensors] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
                    by_step[self.state[parameter]["step"]].append(parameter)
            for step, parameters in by_step.items():
                for chunk in chunks(parameters, MAX_ELEMENTS):
                    grads = [parameter.grad for parameter in chunk]
                    states = [[self.state[p][name] for p in chunk] for name in self.state_names]
                    self._update(group, step, chunk, grads, *states)

    @abstractmethod
    def _update(self, group: dict[str, Any], step: int, parameters: Tensors, grads: Any, *states: Tensors) -> None:
        """Update parameters and state in place; gradients must stay as they are.

        Args:
            group: The parameter group, for the hyperparameters.
            step: Number of this step, from 1.
            parameters: The parameters.
            grads: Their gradients.
            *states: Their state, a list for each of ``state_names``.
        """


def chunks(tensors: Iterable[torch.Tensor], max_elements: int) -> Iterator[Tensors]:
    """Consecutive tensors in lists of at most ``max_elements`` elements; a larger tensor has a list of its own."""
    chunk: Tensors = []
    elements = 0
    for tensor in tensors:
        if chunk and elements + tensor.numel() > max_elements:
            yield chunk
            chunk, elements = [], 0
        chunk.append(tensor)
        elements += tensor.numel()
    if chunk:
        yield chunk


def check_hyperparameters(name: str, *, lr: float, eps: float, weight_decay: float, **betas: float) -> None:
    """Check what all these optimizers have.

    Args:
        name: Name of the optimizer, for the message.
        lr: Learning rate.
        eps: Term added to the denominator.
        weight_decay: Weight decay.
        **betas: Decay rates of averages.

    Raises:
        ValueError: If a value is out of range.
    """
    for key, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if value < 0.0:
            raise ValueError(f"{name}: {key} must be at least 0, got {value}")
    for key, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}: {key} must be in [0, 1), got {value}")
