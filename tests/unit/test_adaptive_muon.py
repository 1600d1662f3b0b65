"""NorMuon and AdaMuon as megatron-core's registry makes them, against an implementation in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_async.optimizer.adaptive_muon import AdaptiveMuon

MOMENTUM, BETA2, EPS, LR, DECAY = 0.9, 0.8, 1e-8, 0.1, 0.05
SHAPES = [(6, 4), (4, 6), (5, 5)]
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SETTINGS: dict[str, Any] = {
    "lr": LR,
    "momentum": MOMENTUM,
    "weight_decay": DECAY,
    "nesterov": False,
    "fp32_matmul_prec": "highest",
    "extra_scale_factor": 0.2,
}


def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5)]


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz with the quintic coefficients, fp64."""
    turned = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if turned else matrix
    x = x / x.norm().clamp_min(1e-7)
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


def expected(method: str, shape: tuple[int, int]) -> torch.Tensor:
    weight, momentum = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    rows = shape[0] >= shape[1]
    second = torch.zeros((), dtype=torch.float64)
    for gradient in gradients(shape):
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ortho = orthogonalized(momentum)
        squares = ortho**2 if method == "adamuon" else (ortho**2).mean(dim=1 if rows else 0, keepdim=True)
        second = BETA2 * second + (1 - BETA2) * squares
        update = ortho / (second.sqrt() + (EPS if method == "adamuon" else 0.0))
        update = update * (ortho.norm() / update.norm()) * get_muon_scale_factor(*shape, mode="spectral") * 0.2
        weight = weight - LR * DECAY * weight - LR * update
    return weight


def trained(cls: type, shape: tuple[int, int], **settings: Any) -> tuple[torch.Tensor, Any]:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = cls([parameter], split_qkv=False, is_qkv_fn=lambda p: False, **{**SETTINGS, **settings})
    for gradient in gradients(shape):
        parameter.grad = gradient.float()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["normuon", "adamuon"])
def test_equals_the_reference(method: str, shape: tuple[int, int]) -> None:
    found, _ = trained(AdaptiveMuon, shape, moment2_method=method, beta2=BETA2, eps=EPS)
    torch.testing.assert_close(found.double(), expected(method, shape), rtol=2e-2, atol=2e-3)
    other = expected({"normuon": "adamuon", "adamuon": "normuon"}[method], shape)
    assert (found.double() - expected(method, shape)).norm() < 0.1 * (found.double() - other).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_second_moments(shape: tuple[int, int]) -> None:
    assert trained(AdaptiveMuon, shape, moment2_method="adamuon")[1]["moment2_buffer"].shape == shape
    reduced = (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])
    assert trained(AdaptiveMuon, shape, moment2_method="normuon")[1]["moment2_buffer"].shape == reduced


@pytest.mark.parametrize("method", ["normuon", "adamuon"])
def test_the_update_has_the_size_of_muons(method: str) -> None:
    """So that a learning rate carries over."""
    ones = torch.ones(6, 4)
    settings = {"weight_decay": 0.0}
    parameter = torch.nn.Parameter(ones.clone())
    muon = torch.nn.Parameter(ones.clone())
    shared: dict[str, Any] = {**SETTINGS, **settings, "split_qkv": False, "is_qkv_fn": lambda p: False}
    adaptive = AdaptiveMuon([parameter], moment2_method=method, **shared)
    plain = TensorParallelMuon([muon], **shared)
    gradient = gradients((6, 4))[0].float()
    parameter.grad, muon.grad = gradient.clone(), gradient.clone()
    adaptive.step()
    plain.step()
    torch.testing.assert_close((parameter - ones).norm(), (muon - ones).norm(), rtol=1e-4, atol=0.0)


def test_query_key_and_value_are_scaled_each_by_its_own_shape() -> None:
    shapes, groups, columns = [4, 2, 2], 2, 3
    parameter = torch.nn.Parameter(torch.zeros(groups * sum(shapes), columns))
    settings = {**SETTINGS, "weight_decay": 0.0, "qkv_split_shapes": shapes, "scale_mode": "shape_scaling"}
    optimizer = AdaptiveMuon(
        [parameter], split_qkv=True, is_qkv_fn=lambda p: True, moment2_method="normuon", **settings
    )
    update = torch.ones_like(parameter)
    optimizer.pre_weight_update_fn_inplace(parameter, update)
    scales = [get_muon_scale_factor(groups * rows, columns, mode="shape_scaling") * 0.2 for rows in shapes]
    for part, scale in zip(update.view(groups, sum(shapes), columns).split(shapes, dim=1), scales, strict=True):
        torch.testing.assert_close(part, torch.full_like(part, scale))
    assert len(set(scales)) > 1
