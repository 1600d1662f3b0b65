"""A smaller learning rate for parameters whose gradients come late, while training is young.

A parameter with a delay of D > 1 updates is stepped, in update k, with::

    lr_k / D^(1 - min((k+1)/K, 1))

so with lr/D at first, and with all of lr from update K on. A delay of one update, as everywhere under 2bw-async, leaves
the learning rate alone. A baseline for schedules of larger delays.

Sources: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", arXiv 1910.05124, technique 1; in the
form of the code of Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (AsyncPP),
arXiv 2505.01099, which takes the number of updates for the delay.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def discount_factor(delay: int, update: int, iterations: int) -> float:
    """Factor on the learning rate.

    Args:
        delay: D, in updates.
        update: k, from 0.
        iterations: K, at least 1.
    """
    exponent = 1.0 - min((update + 1) / iterations, 1.0)
    return math.pow(max(delay, 1), -exponent)


@contextmanager
def discounted(optimizers: Iterable[Any], factors: Mapping[torch.Tensor, float]) -> Iterator[None]:
    """Let torch optimizers step their parameters with discounted learning rates.

    Args:
        optimizers: The optimizers. Within the context a parameter group stands divided by factor.
        factors: Factor of each parameter.
    """
    kept = [(optimizer, optimizer.param_groups) for optimizer in optimizers]
    try:
        for optimizer, groups in kept:
            optimizer.param_groups = [part for group in groups for part in _divide(group, factors)]
        yield
    finally:
        for optimizer, groups in kept:
            parts = iter(optimizer.param_groups)
            for group in groups:
                for _ in _divide(group, factors):
                    # What the optimizer has changed in a group, such as a count of its steps, is the same in all parts.
                    changed = next(parts)
                    group.update({key: changed[key] for key in changed if key not in ("params", "lr")})
            optimizer.param_groups = groups


def _divide(group: dict[str, Any], factors: Mapping[torch.Tensor, float]) -> list[dict[str, Any]]:
    members: dict[float, list[torch.Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        members[factors[parameter]].append(parameter)
    return [{**group, "params": members[factor], "lr": group["lr"] * factor} for factor in members]
