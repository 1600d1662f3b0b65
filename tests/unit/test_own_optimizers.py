"""Adan, MARS and NAdam against implementations in fp64, and what Megatron asks of an optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from megatron_async.optimizer.adan import Adan
from megatron_async.optimizer.elementwise import ElementwiseOptimizer, chunks
from megatron_async.optimizer.mars import Mars
from megatron_async.optimizer.nadam import NAdam
from tests.unit import reference_optimizers as reference

SHAPES = [(7,), (3, 4), (2, 1, 3)]
STEPS = 12
DECAY = 0.3
CASES: dict[str, tuple[type[ElementwiseOptimizer], dict[str, Any], reference.Rule]] = {
    "adan": (Adan, {"betas": (0.98, 0.92, 0.99), "eps": 1e-3}, reference.adan((0.98, 0.92, 0.99), 1e-3)),
    "adan, other betas": (Adan, {"betas": (0.9, 0.7, 0.95)}, reference.adan((0.9, 0.7, 0.95), 1e-8)),
    "mars": (Mars, {"betas": (0.95, 0.99), "gamma": 0.5}, reference.mars((0.95, 0.99), 0.5, 1e-8)),
    "mars, clipped": (Mars, {"betas": (0.9, 0.95), "gamma": 3.0}, reference.mars((0.9, 0.95), 3.0, 1e-8)),
    "nadam": (NAdam, {"betas": (0.99, 0.999), "eps": 1e-3}, reference.nadam((0.99, 0.999), 1e-3, 4e-3)),
    "nadam, fast": (NAdam, {"betas": (0.9, 0.99), "momentum_decay": 0.5}, reference.nadam((0.9, 0.99), 1e-8, 0.5)),
}
WRONG: dict[str, reference.Rule] = {
    "adan": reference.adan((0.98, 0.92, 0.98), 1e-3),
    "adan, other betas": reference.adan((0.9, 0.71, 0.95), 1e-8),
    "mars": reference.mars((0.95, 0.99), -0.5, 1e-8),
    "mars, clipped": reference.mars((0.9, 0.95), 2.9, 1e-8),
    "nadam": reference.nadam((0.99, 0.999), 1e-3, 8e-3),
    "nadam, fast": reference.nadam((0.9, 0.98), 1e-8, 0.5),
}


def gradients(shape: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def initial(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(-1, 2, steps=math.prod(shape), dtype=torch.float64).view(shape)


def rates() -> list[float]:
    return [0.05 * (1 + k % 3) for k in range(STEPS)]


def trained(cls: type[ElementwiseOptimizer], settings: dict[str, Any], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Values of parameters of all shapes, in one group, after each step."""
    parameters = [torch.nn.Parameter(initial(shape).to(dtype)) for shape in SHAPES]
    optimizer = cls(parameters, lr=0.0, weight_decay=DECAY, **settings)
    series = [gradients(shape) for shape in SHAPES]
    found = []
    for k, rate in enumerate(rates()):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, mine in zip(parameters, series, strict=True):
            parameter.grad = mine[k].to(dtype)
        optimizer.step()
        found.append([p.detach().clone() for p in parameters])
    return found


def expected(rule: reference.Rule) -> list[list[torch.Tensor]]:
    columns = []
    for shape in SHAPES:
        start = initial(shape).flatten().tolist()
        mine = [g.flatten().tolist() for g in gradients(shape)]
        values = reference.run(rule, start, mine, rates(), DECAY)
        columns.append([torch.tensor(v, dtype=torch.float64).view(shape) for v in values])
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    cls, settings, rule = CASES[name]
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    for found, wanted in zip(trained(cls, settings, dtype), expected(rule), strict=True):
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_another_rule_is_told_apart(name: str) -> None:
    cls, settings, _ = CASES[name]
    found, wanted = trained(cls, settings, torch.float64)[-1], expected(WRONG[name])[-1]
    assert all(not torch.allclose(mine, other, rtol=1e-6) for mine, other in zip(found, wanted, strict=True))


def test_mars_without_correction_is_adamw_on_clipped_gradients() -> None:
    parameter, other = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    mars = Mars([parameter], lr=0.1, betas=(0.9, 0.99), gamma=0.0, weight_decay=0.1)
    adamw = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    for gradient in gradients((5,)):
        parameter.grad = gradient.clone()
        other.grad = gradient / max(1.0, float(gradient.norm()))
        mars.step()
        adamw.step()
    torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


def test_nadam_is_torchs_with_decoupled_weight_decay() -> None:
    parameter, other = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.99, 0.999), "weight_decay": 0.1}
    ours, torchs = NAdam([parameter], **settings), torch.optim.NAdam([other], decoupled_weight_decay=True, **settings)
    for gradient in gradients((5,)):
        parameter.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        torchs.step()
    # Its product of momenta is a tensor of fp32.
    torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [Adan, Mars, NAdam])
def test_parameters_without_gradient_are_left_alone(cls: type[ElementwiseOptimizer]) -> None:
    trains, rests = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = cls([trains, rests], lr=0.1, weight_decay=0.1)
    trains.grad = torch.ones(3)
    gradient = trains.grad.clone()
    optimizer.step()
    assert rests.tolist() == [1.0] * 3
    assert not optimizer.state[rests]
    assert trains.tolist() != [1.0] * 3
    assert torch.equal(trains.grad, gradient)


@pytest.mark.parametrize("cls", [Adan, Mars, NAdam])
def test_state_is_made_for_all_before_a_checkpoint_is_loaded(cls: type[ElementwiseOptimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = cls(parameters, lr=0.1)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    for parameter in parameters:
        state = dict(optimizer.state[parameter])
        assert state.pop("step") == 0
        assert set(state) == set(cls.state_names)
        assert all(value.shape == parameter.shape and value.dtype == parameter.dtype for value in state.values())


@pytest.mark.parametrize("cls", [Adan, Mars, NAdam])
def test_a_run_goes_on_from_saved_state(cls: type[ElementwiseOptimizer]) -> None:
    def step(optimizer: ElementwiseOptimizer, parameter: torch.nn.Parameter, k: int) -> None:
        parameter.grad = gradients((4,))[k].float()
        optimizer.step()

    whole = torch.nn.Parameter(torch.ones(4))
    optimizer = cls([whole], lr=0.1)
    for k in range(4):
        step(optimizer, whole, k)
    resumed = torch.nn.Parameter(whole.detach().clone())
    other = cls([resumed], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for k in range(4, 8):
        step(optimizer, whole, k)
        step(other, resumed, k)
    assert torch.equal(whole, resumed)


def test_chunks_hold_every_tensor_once() -> None:
    tensors = [torch.zeros(n) for n in (3, 9, 1, 1, 4, 20, 2)]
    made = list(chunks(tensors, 8))
    assert [t for chunk in made for t in chunk] == tensors
    assert [[t.numel() for t in chunk] for chunk in made] == [[3], [9], [1, 1, 4], [20], [2]]


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, settings, _ = CASES["adan"]
    whole = trained(cls, settings, torch.float32)
    monkeypatch.setattr("megatron_async.optimizer.elementwise.MAX_ELEMENTS", 5)
    divided = trained(cls, settings, torch.float32)
    assert all(torch.equal(a, b) for x, y in zip(whole, divided, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (Adan, {"lr": -1.0}, "Adan: lr must be at least 0, got -1.0"),
        (Adan, {"betas": (0.9, 1.0, 0.9)}, r"Adan: beta2 must be in \[0, 1\), got 1.0"),
        (Mars, {"gamma": -0.1}, "Mars: gamma must be at least 0"),
        (Mars, {"eps": -1e-8}, "Mars: eps must be at least 0"),
        (NAdam, {"momentum_decay": -1.0}, "NAdam: momentum_decay must be at least 0"),
        (NAdam, {"weight_decay": -1.0}, "NAdam: weight_decay must be at least 0"),
    ],
)
def test_values_out_of_range(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([torch.nn.Parameter(torch.ones(2))], **settings)


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support a closure"):
        Adan([torch.nn.Parameter(torch.ones(2))]).step(lambda: 0.0)
