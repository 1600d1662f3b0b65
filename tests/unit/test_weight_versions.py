"""The weight-stashing policy and the autograd hazards that it exists for."""

from __future__ import annotations

import pytest
import torch

from megatron_async.pipeline.weight_versions import WeightVersions
from tests.models import LeafLinear, ViewLinear


def make(module: torch.nn.Module, delay: int = 1) -> WeightVersions:
    return WeightVersions(module.parameters(), [delay] * len(list(module.parameters())))


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


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_one_buffer_more_than_the_delay_for_ever(delay: int) -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear, delay)
    pointers = {t.data_ptr() for v in range(-delay, 1) for t in versions.tensors(v)}
    for k in range(7):
        write(versions, float(k))
        assert {t.data_ptr() for v in range(k + 1 - delay, k + 2) for t in versions.tensors(v)} == pointers
        with pytest.raises(KeyError, match=f"weight version {k - delay} is not in memory"):
            versions.tensors(k - delay)
    assert versions.nbytes() == (delay + 1) * sum(p.numel() * 4 for p in linear.parameters())


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_batch_reads_weights_of_its_delay(delay: int) -> None:
    """Version k is filled with the value k."""
    linear = LeafLinear(3, 2)
    with torch.no_grad():
        linear.weight.zero_()
    versions = make(linear, delay)
    for k in range(6):
        versions.bind(k)
        assert torch.all(linear.weight == max(k - delay, 0))
        assert versions.bound() == [max(k - delay, 0) if k or not delay else 0] * 2
        versions.bind_newest()
        assert torch.all(linear.weight == k)
        write(versions, k + 1.0)


def test_every_parameter_has_its_own_delay() -> None:
    linear = LeafLinear(3, 2)
    versions = WeightVersions(linear.parameters(), [2, 0])
    for k in range(5):
        versions.bind(k)
        assert versions.bound() == [max(k - 2, 0), k]
        write(versions, k + 1.0)
    assert versions.nbytes() == 3 * 6 * 4 + 1 * 2 * 4
    versions.bind(5)
    assert torch.all(linear.weight == 3.0)
    assert torch.all(linear.bias == 5.0)


def test_a_buffer_with_a_live_graph_is_not_written() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    versions.acquire(0)
    with pytest.raises(RuntimeError, match=r"cannot write weight version 1 over its predecessors: 1 live graph\(s\)"):
        versions.begin_write(1)
    versions.release(0)
    versions.acquire(1)
    write(versions, 1.0)  # over the version before x_0, which batch 1 does not read
    with pytest.raises(RuntimeError, match="cannot write weight version 2"):
        versions.begin_write(2)
    versions.release(1)
    versions.begin_write(2)
    with pytest.raises(RuntimeError, match="no live graph of batch 1"):
        versions.release(1)


def test_versions_are_written_in_order() -> None:
    versions = make(LeafLinear(3, 2))
    with pytest.raises(RuntimeError, match="cannot write weight version 2: the next one is 1"):
        versions.begin_write(2)


def test_writing_moves_the_parameters_off_the_buffer_that_is_written() -> None:
    versions = make(LeafLinear(3, 2))
    write(versions, 1.0)
    versions.bind(1)
    assert versions.bound() == [0, 0]
    versions.begin_write(2)
    assert versions.bound() == [1, 1]


def test_foreign_storage_is_found_out() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    versions.bind_to([torch.zeros(2, 3), torch.zeros(2)])
    assert not torch.any(linear.weight)
    with pytest.raises(RuntimeError, match="none of its versions"):
        versions.bound()
    versions.bind_newest()
    assert versions.bound() == [0, 0]


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_skipped_update_repeats_the_newest_version(delay: int) -> None:
    versions = make(LeafLinear(3, 2), delay)
    write(versions, 3.0)
    versions.repeat_newest()
    assert versions.newest == 2
    for version in (1, 2)[-1 - delay :]:
        assert all(torch.all(t == 3.0) for t in versions.tensors(version))


def test_going_on_from_the_versions_of_another_run() -> None:
    """Two parameters of delay 2 and 0, after 5 updates and after 1, when the first version stands for older ones."""
    for updates in (5, 1):
        linear, same = LeafLinear(3, 2), LeafLinear(3, 2)
        versions, resumed = (WeightVersions(m.parameters(), [2, 0]) for m in (linear, same))
        for k in range(updates):
            write(versions, k + 1.0)
        weights = {age: [t.clone() for t in versions.tensors_of_age(age)] for age in range(3)}
        assert torch.equal(weights[2][1], weights[0][1])  # the oldest that there is
        resumed.resume(versions.newest, weights)
        for _ in range(4):
            for v in (versions, resumed):
                v.bind(v.newest)
            assert torch.equal(linear.weight, same.weight)
            assert torch.equal(linear.bias, same.bias)
            for v in (versions, resumed):
                write(v, v.newest * 10.0)


def test_going_on_with_a_newest_version_that_is_there_already() -> None:
    linear = LeafLinear(3, 2)
    versions = make(linear)
    older = [torch.full_like(p, 7.0) for p in linear.parameters()]
    newest = [p.detach().clone() for p in linear.parameters()]
    versions.resume(4, {1: older})
    assert versions.newest == 4
    assert all(torch.equal(a, b) for a, b in zip(versions.tensors(4), newest, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(versions.tensors_read(4), older, strict=True))


def test_weights_return_to_the_storage_that_they_had() -> None:
    linear = LeafLinear(3, 2)
    before = linear.weight.data_ptr()
    versions = make(linear)
    write(versions, 3.0)
    versions.bind_newest()
    assert linear.weight.data_ptr() != before
    versions.return_home()
    assert linear.weight.data_ptr() == before
    assert torch.all(linear.weight == 3.0)


def test_tied_parameters_are_given_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="appears twice"):
        WeightVersions([weight, weight])


def input_gradient(linear: LeafLinear | ViewLinear, *, rebind: bool) -> torch.Tensor:
    """Forward of batch 1 on weights 1, backward while version 1 (weights 2) is bound, or its own bound back before."""
    with torch.no_grad():
        linear.weight.fill_(1.0)
    versions = make(linear)
    x = torch.ones(1, 3, requires_grad=True)
    versions.acquire(1)
    y = linear(x)
    write(versions, 2.0)
    versions.bind_newest()
    if rebind:
        versions.bind(1)
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
