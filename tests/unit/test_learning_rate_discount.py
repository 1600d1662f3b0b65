"""The learning-rate discount of late gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_async.optimizer.learning_rate_discount import discount_factor, discounted


@pytest.mark.parametrize("delay", [0, 1])
def test_a_delay_of_one_update_costs_nothing(delay: int) -> None:
    assert all(discount_factor(delay, k, 10) == 1.0 for k in range(20))


def test_the_discount_fades() -> None:
    factors = [discount_factor(4, k, 8) for k in range(12)]
    assert factors[0] == pytest.approx(4 ** -(7 / 8))
    assert factors[3] == pytest.approx(0.5)
    assert factors[7:] == [1.0] * 5
    assert factors == sorted(factors)


def test_parameters_of_a_group_are_stepped_with_their_own_rates() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    optimizer.param_groups[0]["note"] = "kept"
    groups = optimizer.param_groups
    for p in (first, second):
        p.grad = torch.ones(2)
    with discounted([optimizer], {first: 0.5, second: 0.25}):
        assert len(optimizer.param_groups) == 2
        for group in optimizer.param_groups:
            group["steps"] = 7  # as optimizers do that count the steps of a group
        optimizer.step()
    assert first.tolist() == [-0.5] * 2
    assert second.tolist() == [-0.25] * 2
    assert optimizer.param_groups is groups
    assert len(groups) == 1
    assert {k: groups[0][k] for k in ("lr", "note", "steps")} == {"lr": 1.0, "note": "kept", "steps": 7}
    assert groups[0]["params"] == [first, second]


def test_groups_come_back_after_an_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(RuntimeError, match="step"), discounted([optimizer], {parameter: 0.5}):
        raise RuntimeError("step")
    assert optimizer.param_groups[0]["lr"] == 1.0
