"""Taylor compensation against its formula, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch

from megatron_async.optimizer.delay_compensation import compensate_delay_


def test_hand_computed() -> None:
    """g + lambda g^2 (x_k - x_read), all exact in binary."""
    gradient = torch.tensor([2.0, -2.0, 2.0, 0.0])
    newest, read = torch.tensor([3.0, 3.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 3.0, 1.0])
    corrected = compensate_delay_(gradient, newest, read, 0.5)
    assert corrected is gradient
    assert corrected.tolist() == [6.0, 2.0, -2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_formula_in_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient, read = torch.randn(64, 32), torch.randn(64, 32).to(dtype)
    newest = (read.float() + 0.1 * torch.randn(64, 32)).to(dtype)
    g, difference = gradient.double(), newest.double() - read.double()
    expected = g + 0.7 * g * g * difference
    kept = newest.clone(), read.clone()
    compensate_delay_(gradient, newest, read, 0.7)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(newest, kept[0])
    assert torch.equal(read, kept[1])


def test_bf16_versions_are_subtracted_in_fp32() -> None:
    newest, read = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-10], dtype=torch.bfloat16)
    assert (newest - read).item() == 1.0  # what bf16 would make of it
    assert compensate_delay_(torch.ones(1), newest, read, 1.0).item() == 2.0 - 2.0**-10


def test_equal_versions_change_no_bit() -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])
    gradient = torch.cat([special, torch.randn(1000)])
    weights = torch.randn(1006)
    bits = gradient.clone().view(torch.int32)
    compensate_delay_(gradient, weights, weights.clone(), 5.0)
    assert torch.equal(gradient.view(torch.int32), bits)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("difference", [0.0, 0.5, -0.5])
def test_what_is_not_finite_stays_so(bad: float, difference: float) -> None:
    corrected = compensate_delay_(torch.tensor([bad]), torch.tensor([1.0 + difference]), torch.tensor([1.0]), 2.0)
    assert not torch.isfinite(corrected).any()


def test_error_is_of_second_order_where_the_approximation_holds() -> None:
    """f(x) = -log(1 - x) has f'' = f'^2, which lambda = 1 assumes: halving the distance quarters the error."""

    def gradient(x: float) -> float:
        return 1.0 / (1.0 - x)

    def errors(distance: float) -> tuple[float, float]:
        read, newest = torch.tensor([0.3]), torch.tensor([0.3 + distance])
        corrected = compensate_delay_(torch.tensor([gradient(0.3)]), newest, read, 1.0).item()
        exact = gradient(0.3 + distance)
        return abs(corrected - exact), abs(gradient(0.3) - exact)

    (far, far_plain), (near, near_plain) = errors(0.1), errors(0.05)
    assert far / near == pytest.approx(4.0, rel=0.1)
    assert far_plain / near_plain == pytest.approx(2.0, rel=0.1)
    assert far < 0.3 * far_plain
