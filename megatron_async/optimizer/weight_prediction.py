"""Weight prediction by momentum: the model computes with a guess of the weights that its gradient will be applied to.

A version x_{k+1} that is read D updates before its gradient is applied is written as::

    x_{k+1} = z_{k+1} - D * lr * d_k

where z are the masters, lr is the learning rate of update k and d_k the direction that the optimizer would take if all
that it knew were its momentum after update k. Nothing is kept from one step to the next: d_k comes from the optimizer's
state. A baseline to compare error feedback with, which uses the update that was really made in place of d_k.

Sources: Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform"
(SpecTrain), arXiv 1809.02839, for momentum SGD; Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU
DNN Training", arXiv 1911.04610, for Adam. Muon and Lion are treated alike: what their step makes of the momentum alone.

To add an optimizer: write its direction and put it into :data:`DIRECTIONS`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer import SGD, Adam
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_async.errors import ConfigurationError
from megatron_async.optimizer.masters import Master, base_optimizers

Group = dict[str, Any]
"""A parameter group of a torch optimizer."""


def calculate_adam_direction(
    mean: torch.Tensor, square: torch.Tensor, step: int, betas: tuple[float, float], eps: float
) -> torch.Tensor:
    """m^ / (sqrt(v^) + eps), both moments corrected for their start at zero.

    Args:
        mean: m, fp32, any shape.
        square: v, same shape and dtype.
        step: Number of updates that the moments have seen, at least 1.
        betas: Decay rates of m and v.
        eps: Added to the root.

    Returns:
        A new tensor, same shape and dtype.
    """
    root = square.sqrt().div_(math.sqrt(1.0 - betas[1] ** step)).add_(eps)
    return torch.div(mean, root, out=root).div_(1.0 - betas[0] ** step)


def _sgd(optimizer: Any, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    momentum: torch.Tensor = optimizer.state[parameter]["momentum_buffer"]
    return momentum


def _adam(optimizer: Any, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    state = optimizer.state[parameter]
    # Transformer Engine's Adam counts the steps of a group, PyTorch's those of a parameter.
    step = int(state["step"] if "step" in state else group["step"])
    return calculate_adam_direction(state["exp_avg"], state["exp_avg_sq"], step, group["betas"], group["eps"])


def _muon(optimizer: Any, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    settings = {key: value for key, value in group.items() if key != "params"}
    with fp32_matmul_precision(optimizer.fp32_matmul_prec):
        direction: torch.Tensor = optimizer.orthogonalize(
            parameter, optimizer.state[parameter]["momentum_buffer"], **settings
        )
    return direction


def _lion(optimizer: Any, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    momentum: torch.Tensor = optimizer.state[parameter]["exp_avg"]
    return momentum.sign()


DIRECTIONS: dict[type, Callable[[Any, Group, torch.Tensor], torch.Tensor]] = {
    torch.optim.SGD: _sgd,
    SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    Adam: _adam,
    TensorParallelMuon: _muon,
    Lion: _lion,
}
"""Direction by class of the inner optimizer: (optimizer, group, parameter) -> d, fp32, the parameter's shape.

By the class itself: a subclass may make something else of the same momentum."""


class WeightPrediction:
    """Writes model weights that are as many updates ahead of the masters as their readers are late.

    Args:
        optimizer: The Megatron optimizer.
        masters: Its masters, from :func:`~megatron_async.optimizer.masters.find_masters`.
        delays: D of each master.

    Raises:
        ConfigurationError: If an optimizer of the chain has no momentum, or none that a direction is known for.
    """

    def __init__(self, optimizer: Any, masters: Sequence[Master], delays: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._position = {id(master.optimized): i for i, master in enumerate(masters)}
        self._masters = masters
        self._delays = delays
        for inner in self._inner_optimizers():
            _check(inner)

    def write(self, targets: Sequence[torch.Tensor]) -> None:
        """Write x_{k+1}, computed in fp32 and rounded once, after the step and with its learning rates in force.

        Memory: a few temporaries of the size of one parameter.

        Args:
            targets: Where x_{k+1} goes, one a master, of the model's dtype.
        """
        for inner in self._inner_optimizers():
            direction_of = DIRECTIONS[type(inner)]
            for group in inner.param_groups:
                for parameter in group["params"]:
                    i = self._position[id(parameter)]
                    weight, ahead = self._masters[i].weight, self._delays[i] * float(group["lr"])
                    if ahead == 0.0:
                        targets[i].copy_(weight)
                    else:
                        direction = direction_of(inner, group, parameter)
                        torch.sub(weight, direction, alpha=ahead, out=targets[i])

    def _inner_optimizers(self) -> Iterator[Any]:
        for base in base_optimizers(self._optimizer):
            if not base.is_stub_optimizer:
                yield base.optimizer


def _check(inner: Any) -> None:
    if type(inner) not in DIRECTIONS:
        raise ConfigurationError(
            f"--async-weight-prediction does not know where the momentum of {type(inner).__name__} alone would lead; "
            "use --optimizer adam, sgd, muon or lion, or --async-error-feedback, which works with every optimizer"
        )
    if DIRECTIONS[type(inner)] is _sgd and not all(group["momentum"] for group in inner.param_groups):
        raise ConfigurationError(
            "--async-weight-prediction predicts by momentum, and --sgd-momentum is 0; "
            "raise it or use --async-error-feedback"
        )
