"""The stateless form of error feedback against the published recursion, and how it is written."""

from __future__ import annotations

import pytest
import torch

from megatron_async.optimizer.error_feedback import (
    calculate_error_feedback,
    keep_masters,
    write_corrected_weights,
)
from tests.oracle import written_weights


@pytest.mark.parametrize("coefficient", [0.0, 0.35, 1.0, 2.0])
def test_equals_the_published_recursion(coefficient: float) -> None:
    """x_{k+1} = x_k - (1+c) u_k + c u_{k-1}, in fp64 from the same updates."""
    torch.manual_seed(0)
    master = torch.randn(5, 3)
    published = master.double()
    previous = torch.zeros(5, 3, dtype=torch.float64)
    for _ in range(50):
        update = 0.1 * torch.randn(5, 3)
        before, master = master, master - update
        weights = calculate_error_feedback(before, master, coefficient, out=torch.empty(5, 3))
        applied = before.double() - master.double()
        published = published - (1 + coefficient) * applied + coefficient * previous
        previous = applied
        torch.testing.assert_close(weights.double(), published, rtol=0, atol=3e-6)


def test_every_update_counts_once_and_the_last_twice() -> None:
    updates = [0.5, 0.25, 0.125]
    z = torch.tensor([8.0])
    for update in updates:
        before, z = z, z - update
        x = calculate_error_feedback(before, z, 1.0, out=torch.empty(1))
    assert x.item() == 8.0 - sum(updates) - updates[-1]


def test_out_may_be_the_weights_before() -> None:
    before, after = torch.tensor([3.0]), torch.tensor([2.0])
    out = calculate_error_feedback(before, after, 1.0, out=before)
    assert out is before
    assert out.item() == 1.0


def test_dropping_the_first_update_loses_it_for_ever() -> None:
    """A variant that leaves the first call uncorrected, x_1 = x_0 - u_0, never makes up for it."""
    updates = [0.5, 0.25, 0.125]
    right = wrong = 8.0
    previous = 0.0
    for k, update in enumerate(updates):
        right = right - 2 * update + previous
        wrong = wrong - update if k == 0 else wrong - 2 * update + previous
        previous = update
    assert wrong - right == updates[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_has_the_bits_of_the_oracle(dtype: torch.dtype) -> None:
    """With delays of 0 to 3 updates, in which the last update is subtracted c D times."""
    torch.manual_seed(0)
    coefficients = [0.0, 1.0, 0.35, 3 * 0.35, 2.0]
    before = [torch.randn(7, 33) for _ in coefficients]
    after = [z - 0.1 * torch.randn(7, 33) for z in before]
    targets = [torch.empty(7, 33, dtype=dtype) for _ in coefficients]
    kept = keep_masters(before, targets)
    write_corrected_weights(kept, after, coefficients, targets)
    for x, old, new, coefficient in zip(targets, before, after, coefficients, strict=True):
        assert torch.equal(x, written_weights(new, old - new, coefficient, dtype))
    assert torch.equal(targets[0], after[0].to(dtype))
    assert not torch.equal(targets[2], targets[0])


def test_masters_wait_in_the_buffer_of_the_new_weights_if_it_has_fp32() -> None:
    masters = [torch.randn(4), torch.randn(4)]
    targets = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)]
    kept = keep_masters(masters, targets)
    assert kept[0] is targets[0]
    assert kept[1].data_ptr() not in (targets[1].data_ptr(), masters[1].data_ptr())
    assert all(torch.equal(k, z) for k, z in zip(kept, masters, strict=True))


def test_a_rank_without_masters_writes_nothing() -> None:
    assert keep_masters([], []) == []
    write_corrected_weights([], [], [], [])
