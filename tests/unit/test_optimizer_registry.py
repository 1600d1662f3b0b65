"""Names of optimizers in megatron-core's registry and on the command line, and the flags they read."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import emerging_optimizers as upstream
import pytest
import torch
from emerging_optimizers import registry as upstream_registry
from megatron.core.optimizer import emerging_optimizers

from megatron_async.errors import ConfigurationError
from megatron_async.optimizer.flags import OptimizerFlags, add_optimizer_arguments
from megatron_async.optimizer.registry import OWN_NAMES, optimizer_names, register

CONFIG = SimpleNamespace(lr=0.1, weight_decay=0.2, lion_beta1=0.95, lion_beta2=0.98)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=["adam", "sgd", "muon", "lion"], default="adam")
    parser.add_argument("--lion-beta1", type=float, default=0.95)
    parser.add_argument("--lion-beta2", type=float, default=0.98)
    return add_optimizer_arguments(parser).parse_args(list(arguments))


def check(*arguments: str) -> None:
    args = parse(*arguments)
    OptimizerFlags.from_args(args).validate(args)


def test_names_come_and_go() -> None:
    before = dict(emerging_optimizers._EMERGING_OPTIMIZERS)
    undo = register(OptimizerFlags())
    assert set(OWN_NAMES) <= set(emerging_optimizers._EMERGING_OPTIMIZERS)
    undo()
    assert before == emerging_optimizers._EMERGING_OPTIMIZERS


@pytest.mark.parametrize("name", [*OWN_NAMES, "adam", "lion"])
def test_names_on_the_command_line(name: str) -> None:
    assert parse("--optimizer", name).optimizer == name


def test_other_names_end_the_parser() -> None:
    with pytest.raises(SystemExit):
        parse("--optimizer", "adamax")


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("adan", {"adan_beta1": 0.5, "adan_eps": 1e-4}, {"betas": (0.5, 0.92, 0.99), "eps": 1e-4}),
        ("mars", {"mars_gamma": 0.7, "mars_beta2": 0.9}, {"betas": (0.95, 0.9), "gamma": 0.7}),
        ("nadam", {"nadam_momentum_decay": 0.1}, {"betas": (0.99, 0.999), "momentum_decay": 0.1}),
        ("lion", {"lion_everywhere": True}, {"betas": (0.95, 0.98)}),
    ],
)
def test_flags_reach_the_optimizer(name: str, flags: dict[str, Any], expected: dict[str, Any]) -> None:
    undo = register(OptimizerFlags(**flags))
    entry = emerging_optimizers._EMERGING_OPTIMIZERS[name]
    kwargs = entry.config_to_kwargs(CONFIG, None, None)
    undo()
    assert {key: kwargs[key] for key in expected} == expected
    assert (kwargs["lr"], kwargs["weight_decay"]) == (0.1, 0.2)
    assert entry.default_param_overrides == {}  # every parameter, whatever its shape


@pytest.mark.parametrize("name", ["normuon", "adamuon"])
def test_what_is_no_matrix_goes_to_the_scalar_optimizer(name: str) -> None:
    undo = register(OptimizerFlags(), scalar_optimizer="lion")
    overrides = emerging_optimizers._EMERGING_OPTIMIZERS[name].default_param_overrides
    undo()
    assert [override["optimizer"] for override in overrides.values()] == ["lion"]


OTHERS = sorted(set(optimizer_names()) - set(OWN_NAMES))


def test_all_of_emerging_optimizers_have_a_name() -> None:
    for module in pkgutil.walk_packages(upstream.__path__, "emerging_optimizers."):
        if "triton" not in module.name:  # kernels, which need a GPU
            importlib.import_module(module.name)
    there = set(upstream_registry.get_optimizer_name_list())
    assert set(OTHERS) == there - {"muon", "adaptive_muon", "soap", "lion", "sinkhorn_muon"}


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_step(name: str) -> None:
    """Made as megatron-core's factory makes them, on a problem that every one of them solves better and better."""
    config = SimpleNamespace(
        **vars(CONFIG), adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, muon_momentum=0.9, muon_nesterov=True,
        muon_num_ns_steps=5, muon_extra_scale_factor=0.2, muon_fp32_matmul_prec="medium",
    )  # fmt: skip
    config.lr, config.weight_decay = 0.02, 0.0
    torch.manual_seed(1)
    target, parameter = torch.randn(8, 6), torch.nn.Parameter(torch.randn(8, 6))
    undo = register(OptimizerFlags(), chosen=name)
    try:
        optimizer, _ = emerging_optimizers._create_emerging_optimizer(
            config, [{"params": [parameter]}], name, model_chunks=[], pg_collection=None
        )
    finally:
        undo()
    directions = []
    for _ in range(3):
        parameter.grad = parameter.detach() - target
        before, gradient = parameter.detach().clone(), parameter.grad.clone()
        optimizer.step()
        directions.append(float(((parameter.detach() - before) * gradient).sum()))
    assert torch.isfinite(parameter).all()
    assert not torch.equal(parameter, target)
    if name != "spel":  # which puts the weights themselves on a sphere after each step
        assert all(direction < 0 for direction in directions)
    assert optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adan-beta1", "1.0"], "--adan-beta1 must be below 1, got 1.0"),
        (["--mars-gamma", "-1"], "--mars-gamma must be a finite number of at least 0, got -1.0"),
        (["--nadam-eps", "nan"], "--nadam-eps must be a finite number"),
        (["--lion-everywhere"], "--lion-everywhere has no effect without --optimizer lion; drop it"),
        (
            ["--optimizer", "lion", "--lion-beta1", "0.9"],
            "--lion-beta1 and --lion-beta2 have no effect .* add --lion-everywhere",
        ),
    ],
)
def test_bad_flags(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(*arguments)


def test_good_flags() -> None:
    check("--optimizer", "lion", "--lion-everywhere", "--lion-beta1", "0.9")
    check("--optimizer", "adan", "--adan-beta1", "0.95")
    check("--optimizer", "normuon", "--adaptive-muon-beta2", "0.9")
