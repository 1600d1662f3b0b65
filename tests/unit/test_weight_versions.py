"""The weight-stashing policy and the autograd hazards that it exists for."""

from __future__ import annotations

import pytest
import torch

from megatron_async.pipeline.weight_versions import WeightVersions
from tests.models import LeafLinear, ViewLinear


def make(module: torch.nn.Module) -> WeightVersions:
    return WeightVersions(module.parameters())


def write(versions: WeightVersions, value: float) -> None:
    for tensor in versions.begin_write(versions.newest + 1):
        tensor.fill_(value)
    versions.end_write(versions.newest + 1)


def test_starts_with_two_equal_versions_in_the_parameters_own_storage() -> None:
    linear = LeafLinear(3, 2)
    before = linear.weight.data_ptr()
    versions = make(linear)
    assert linear.weight.data_ptr() == before
    for newest, older in zip(versions.tensors(0), versions.tensors(-1), strict=True):
        assert torch.equal(newest, older)
        assert newest.data_ptr() != older.data_ptr()


def test_exactly_two_buffers_for_ever() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    pointers = {t.data_ptr() for v in (0, -1) for t in versions.tensors(v)}
    for k in range(7):
        write(versions, float(k))
        assert {t.data_ptr() for v in (k + 1, k) for t in versions.tensors(v)} == pointers
        with pytest.raises(KeyError, match=f"weight version {k - 1} is not in memory"):
            versions.tensors(k - 1)
    assert versions.nbytes() == 2 * sum(p.numel() * 4 for p in linear.parameters())


def test_binding_points_the_parameter_at_the_version() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    write(versions, 5.0)
    versions.bind(1)
    assert torch.all(linear.weight == 5.0)
    versions.bind(0)
    assert not torch.any(linear.weight == 5.0)


def test_a_buffer_with_a_live_graph_is_not_written() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    versions.acquire(0)
    write(versions, 1.0)  # over version -1, which nobody reads
    with pytest.raises(RuntimeError, match=r"cannot write weight version 2 over version 0: 1 live graph\(s\)"):
        versions.begin_write(2)
    versions.release(0)
    versions.begin_write(2)
    with pytest.raises(RuntimeError, match="no live graph reads weight version 0"):
        versions.release(0)


def test_versions_are_written_in_order() -> None:
    versions = make(LeafLinear(3, 2))
    with pytest.raises(RuntimeError, match="cannot write weight version 2: the next one is 1"):
        versions.begin_write(2)


def test_writing_moves_the_parameters_off_the_buffer_that_is_written() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    versions.bind(-1)
    versions.begin_write(1)
    assert versions.bound == 0


def test_a_skipped_update_repeats_the_newest_version() -> None:
    versions = make(LeafLinear(3, 2))
    write(versions, 3.0)
    versions.repeat_newest()
    assert versions.newest == 2
    for newest, older in zip(versions.tensors(2), versions.tensors(1), strict=True):
        assert torch.equal(newest, older)
        assert torch.all(newest == 3.0)


def test_tied_parameters_are_given_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="appears twice"):
        WeightVersions([weight, weight])


def input_gradient(linear: LeafLinear | ViewLinear, *, rebind: bool) -> torch.Tensor:
    """Forward on version 0 (weights 1), backward while version 1 (weights 2) is bound, or bound back before."""
    with torch.no_grad():
        linear.weight.fill_(1.0)
    versions = make(linear)
    x = torch.ones(1, 3, requires_grad=True)
    versions.acquire(0)
    y = linear(x)
    write(versions, 2.0)
    versions.bind(1)
    if rebind:
        versions.bind(0)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("layer", [LeafLinear, ViewLinear])
def test_backward_after_rebinding_reads_the_version_of_its_forward(layer: type) -> None:
    assert torch.all(input_gradient(layer(3, 2), rebind=True) == 2.0)  # two outputs of weight 1


def test_a_saved_leaf_follows_the_binding_and_a_saved_view_does_not() -> None:
    """Why a backward is preceded by a binding: without it the leaf's gradient is that of the other version."""
    assert torch.all(input_gradient(LeafLinear(3, 2), rebind=False) == 4.0)
    assert torch.all(input_gradient(ViewLinear(3, 2), rebind=False) == 2.0)
