"""Weight prediction against what the optimizers really do when only their momentum speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.soap import SOAP
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_async.errors import ConfigurationError
from megatron_async.optimizer.masters import Master
from megatron_async.optimizer.weight_prediction import WeightPrediction, calculate_adam_direction

LR = 0.01


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Lion's update is compiled otherwise, which takes seconds."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def sgd(groups: Any) -> torch.optim.Optimizer:
    # With this dampening the momentum of a constant gradient is that gradient.
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, dampening=0.9)


def muon(groups: Any) -> torch.optim.Optimizer:
    return TensorParallelMuon(groups, lr=LR, momentum=0.9, nesterov=False, weight_decay=0.0, fp32_matmul_prec="highest")


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": lambda groups: torch.optim.Adam(groups, lr=LR, betas=(0.9, 0.95)),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.0),
    "muon": muon,
    "lion": lambda groups: Lion(groups, lr=LR, weight_decay=0.0),
}


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(8, 12)) for _ in range(count)]


def prediction(inner: torch.optim.Optimizer, params: list[torch.nn.Parameter], delays: list[int]) -> WeightPrediction:
    masters = [Master(p, p, p.data) for p in params]
    return WeightPrediction(SimpleNamespace(optimizer=inner, is_stub_optimizer=False), masters, delays)


def written(predicted: WeightPrediction, count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    targets = [torch.full((8, 12), torch.nan, dtype=dtype) for _ in range(count)]
    with torch.no_grad():
        predicted.write(targets)
    return targets


def step(inner: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    params = [p for group in inner.param_groups for p in group["params"]]
    for parameter, gradient in zip(params, gradients, strict=True):
        parameter.grad = gradient.clone()
    inner.step()


@pytest.mark.parametrize("name", MAKERS)
def test_under_a_constant_gradient_it_is_the_future(name: str) -> None:
    """x_{k+1} = z_{k+1+D}: the momentum alone then says what D more steps will do."""
    params, delays = parameters(3), [0, 1, 3]
    inner = MAKERS[name]([{"params": params[:2]}, {"params": params[2:]}])
    predicted = prediction(inner, params, delays)
    gradients = [torch.randn(8, 12) for _ in params]
    for _ in range(3):
        step(inner, gradients)
    guessed = written(predicted, 3)
    assert torch.equal(guessed[0], params[0].data)
    for steps in range(1, 4):
        step(inner, gradients)
        for i, delay in enumerate(delays):
            if delay == steps:
                torch.testing.assert_close(guessed[i], params[i].data, rtol=1e-5, atol=1e-6)
            elif delay > 0:
                assert not torch.allclose(guessed[i], params[i].data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_follows_the_state_and_leaves_it_alone(name: str) -> None:
    """By the formulas in fp64, after different gradients and with a learning rate of its own in each group."""
    params = parameters()
    inner = MAKERS[name]([{"params": params[:1]}, {"params": params[1:]}])
    predicted = prediction(inner, params, [1, 2])
    for _ in range(4):
        step(inner, [torch.randn(8, 12) for _ in params])
    inner.param_groups[0]["lr"], inner.param_groups[1]["lr"] = 0.5, 0.25
    before = {(i, key): torch.as_tensor(v).clone() for i, p in enumerate(params) for key, v in inner.state[p].items()}
    guessed = written(predicted)
    for i, parameter in enumerate(params):
        expected = parameter.detach().double() - 0.5 * direction_in_fp64(name, inner, parameter)
        torch.testing.assert_close(guessed[i].double(), expected, rtol=1e-5, atol=1e-5)
        for key, value in inner.state[parameter].items():
            assert torch.equal(torch.as_tensor(value), before[i, key])


def direction_in_fp64(name: str, inner: Any, parameter: torch.Tensor) -> torch.Tensor:
    state = {key: torch.as_tensor(value).double() for key, value in inner.state[parameter].items()}
    if name == "sgd":
        return state["momentum_buffer"]
    if name == "lion":
        return state["exp_avg"].sign()
    if name == "muon":
        # Newton-Schulz leaves the singular vectors and brings the values near 1; the scale is root of the longer side.
        direction = inner.scaled_orthogonalize_fn(state["momentum_buffer"].float(), None).double()
        u, _, vh = torch.linalg.svd(state["momentum_buffer"], full_matrices=False)
        values = (u.T @ direction @ vh.T).diagonal() / 12**0.5
        assert values.min() > 0.5
        assert values.max() < 1.5
        return direction
    mean, square = state["exp_avg"] / (1 - 0.9**4), state["exp_avg_sq"] / (1 - 0.95**4)
    return mean / (square.sqrt() + 1e-8)


def test_transformer_engine_counts_the_steps_of_a_group() -> None:
    """Its Adam has the number of steps in the group and none in the state of a parameter."""
    params = parameters()
    inner = MAKERS["adam"](params)
    predicted = prediction(inner, params, [1, 1])
    for _ in range(3):
        step(inner, [torch.randn(8, 12) for _ in params])
    guessed = written(predicted)
    inner.param_groups[0]["step"] = 3
    for parameter in params:
        del inner.state[parameter]["step"]
    assert all(torch.equal(a, b) for a, b in zip(guessed, written(predicted), strict=True))


def test_adam_direction_after_one_step_is_the_sign() -> None:
    """Both moments of the first gradient g are g and g^2 after their correction."""
    gradient = torch.tensor([3.0, -0.5])
    direction = calculate_adam_direction(0.1 * gradient, 0.05 * gradient**2, 1, (0.9, 0.95), 0.0)
    torch.testing.assert_close(direction, gradient.sign())


def test_bf16_weights_are_rounded_once() -> None:
    params = parameters()
    inner = MAKERS["adamw"](params)
    predicted = prediction(inner, params, [1, 0])
    step(inner, [torch.randn(8, 12) for _ in params])
    exact, rounded = written(predicted), written(predicted, dtype=torch.bfloat16)
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(exact, rounded, strict=True))


class OtherMuon(TensorParallelMuon):
    """Makes something else of the momentum, perhaps."""


REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SOAP": lambda params: SOAP(params, lr=LR),
    "OtherMuon": lambda params: OtherMuon(params, lr=LR),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=LR),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_momentum_is_refused(name: str) -> None:
    params = parameters()
    with pytest.raises(ConfigurationError, match=rf"--async-weight-prediction .*{name}.* --async-error-feedback"):
        prediction(REFUSED[name](params), params, [1, 1])


def test_no_momentum_is_refused() -> None:
    params = parameters()
    with pytest.raises(ConfigurationError, match="--sgd-momentum"):
        prediction(torch.optim.SGD(params, lr=LR), params, [1, 1])
