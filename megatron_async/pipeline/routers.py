"""What mixture-of-experts routers keep of a batch, kept apart for the two batches that are in flight.

A router counts the tokens of each expert over the microbatches of a batch, for its expert bias (aux-loss-free
balancing) and for the global auxiliary loss. Forwards of the next batch run before the counts of this one are used. So
each batch has counters of its own, which the router is given before a forward or backward of that batch. (With
recomputation it is the backward that counts.)

The expert bias decides where tokens go, so it is a part of the weight version: :class:`WeightVersions` keeps it beside
the parameters, and batch k reads b_{k-D}, in forward and backward. Update k makes b_{k+1} from b_k and the counts of
batch k, as Megatron does, also where the optimizer skips the update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")

_BIAS = "expert_bias"


def named_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The expert biases of a model, by name: fp32 buffers of (experts,)."""
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == _BIAS}


class Routers:
    """The routers of one stage.

    Attributes:
        biases: Their expert biases, by name.

    Args:
        model: The stage's model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [m for m in model.modules() if any(_counter(m, name) is not None for name in _COUNTERS)]
        for module in self._modules:
            if _counter(module, _BIAS) is not None:
                # A bf16 model has turned it into bf16. Megatron mends that in the first forward: too late for versions.
                maintain: Any = module._maintain_float32_expert_bias
                maintain()
        self.biases = named_biases(model)
        found = [(m, name, _counter(m, name)) for m in self._modules for name in _COUNTERS]
        self._home = [(module, name, tensor) for module, name, tensor in found if tensor is not None]
        # Batch k has set k % 2: batches k and k+1 are in flight.
        own = [tensor for _, _, tensor in self._home]
        self._sets = (own, [torch.zeros_like(tensor) for tensor in own])
        self._made: list[torch.Tensor] = []

    def enter(self, batch: int) -> None:
        """Give the routers the counters of a batch, before a forward or backward of it."""
        for (module, name, _), tensor in zip(self._home, self._sets[batch % 2], strict=True):
            module._buffers[name] = tensor

    @contextmanager
    def finalizing(self, batch: int, newest: Sequence[torch.Tensor]) -> Iterator[None]:
        """While Megatron finalizes the gradients of a batch: it makes new biases from its counts, and empties these.

        Args:
            batch: The batch.
            newest: The newest biases, which are left alone.
        """
        self.enter(batch)
        biases = list(self.biases.values())
        bound = [bias.data for bias in biases]
        training = [module.training for module in self._modules]
        self._made = [tensor.clone() for tensor in newest]
        for bias, tensor in zip(biases, self._made, strict=True):
            bias.data = tensor
        for module in self._modules:
            # An evaluation may be what completes the update; Megatron updates the biases of a model in training only.
            module.training = True
        try:
            yield
        finally:
            for bias, tensor in zip(biases, bound, strict=True):
                bias.data = tensor
            for module, was_training in zip(self._modules, training, strict=True):
                module.training = was_training

    def write(self, targets: Sequence[torch.Tensor]) -> None:
        """Write the biases that the last :meth:`finalizing` made.

        Args:
            targets: The buffers of the new version.
        """
        if self._made:
            torch._foreach_copy_(list(targets), self._made)
        self._made = []

    def forget(self, batch: int) -> None:
        """Throw the counts of a batch away; its forwards have to be run again."""
        for tensor in self._sets[batch % 2]:
            tensor.zero_()

    def close(self) -> None:
        """Give the routers their own counters back, empty."""
        for module, name, tensor in self._home:
            tensor.zero_()
            module._buffers[name] = tensor


def _counter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    return module._buffers.get(name)
