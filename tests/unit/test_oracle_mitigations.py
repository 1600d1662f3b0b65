"""The oracle's answers to the delay, its synchronous phases and its further optimizers, by hand and by formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import pytest
import torch
from torch import nn

from tests.models import ModelSpec, build_stages, cross_entropy, make_batch
from tests.oracle import Oracle, OracleConfig, Record, compensated_gradient
from tests.oracle.config import OptimizerName

SPEC = ModelSpec()
OPTIMIZERS = get_args(OptimizerName)


@pytest.fixture(autouse=True)
def one_thread_and_nothing_compiled() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(before)


class Scale(nn.Module):
    """y = w x, w = 1 at first; with the loss y^2 / 2 and x = 1 the gradient is the weight that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


HALF = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5}
COOLDOWN = {"ef_coefficient": 0.5, "sync_cooldown": 2, "batches": 5}
# u_k = w_read / 2 where nothing else is said. All numbers are exact in binary.
BY_HAND = {
    # read 1, 1, 1/2 with differences 0, -1/2, -1/4: g = 1, 1/2, 7/16
    "compensation": ({"delay_compensation": 1.0}, [0.5, 0.25, 0.03125]),
    # g = 1, 3/2
    "wrong-sign": ({"delay_compensation": 1.0, "fault": "compensation_wrong_sign"}, [0.5, -0.25]),
    # differences 0, 0, -1/2: g = 1, 1, 3/8
    "stale-difference": (
        {"delay_compensation": 1.0, "fault": "compensation_stale_difference"},
        [0.5, 0.0, -0.1875],
    ),
    # momentum 1, 3/2, 3/4 of gradients 1, 1, 0; z = 1/2, -1/4, -5/8
    "prediction": ({"weight_prediction": True, "sgd_momentum": 0.5}, [0.0, -1.0, -1.0]),
    # the same with learning rates 1/2, 1/4, 1/8 and predictions by the next one: z = 1/2, 1/8; then x_1 = 1/4 is read:
    # momentum 1, z = 0
    "prediction-next-lr": (
        {"weight_prediction": True, "sgd_momentum": 0.5, "lr": [0.5, 0.25, 0.125, 0.0625]}
        | {"fault": "prediction_lr_of_next_batch"},
        [0.25, -0.0625, -0.0625],
    ),
    # u = 1/2, 1/4 synchronously; then 1/4, 1/4, 0 are read: z = 1/8, 0, 0
    "sync-start": ({"ef_coefficient": 1.0, "sync_start": 2}, [0.5, 0.25, 0.0, -0.125, 0.0]),
    # as half error feedback up to z_3 = -1/8, which is read, and so on
    "cooldown": (COOLDOWN, [0.25, -0.25, -0.1875, -0.0625, -0.03125]),
    # x_3 = -3/16 is read instead: z_4 = -1/8 + 3/32
    "cooldown-keeps-x": (
        {**COOLDOWN, "fault": "cooldown_keeps_x"},
        [0.25, -0.25, -0.1875, -0.03125, -0.015625],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_hand_computed(case: str) -> None:
    options, expected = BY_HAND[case]
    oracle = Oracle([Scale()], lambda y, _: 0.5 * (y * y).sum(), OracleConfig(**{**HALF, **options}))
    records = [oracle.step([(torch.ones(1), torch.ones(1))]) for _ in expected]
    assert [r.newest[0]["w"].item() for r in records] == expected


def test_the_switch_to_synchronous_puts_z_into_the_model() -> None:
    oracle = Oracle([Scale()], lambda y, _: 0.5 * (y * y).sum(), OracleConfig(**{**HALF, **COOLDOWN}))
    records = [oracle.step([(torch.ones(1), torch.ones(1))]) for _ in range(5)]
    assert records[2].newest[0]["w"].item() == -0.1875
    assert records[3].older[0]["w"].item() == records[2].masters[0]["w"].item() == -0.125


def test_error_feedback_grows_with_the_delay_of_the_stage() -> None:
    """Three stages of delay 2, 1, 0; y = a b c with a = b = c = 1, SGD with learning rate 1/4: x = z - D u."""
    config = OracleConfig(**{**HALF, "lr": 0.25}, schedule="pipedream", ef_coefficient=1.0)
    oracle = Oracle([Scale(), Scale(), Scale()], lambda y, _: y.sum(), config)
    records = [oracle.step([(torch.ones(1), torch.ones(1))]) for _ in range(2)]
    # gradients 1, 1, 1; then with a, b, c = 1, 1, 3/4: 3/4, 3/4, 1
    assert [stage["w"].item() for stage in records[0].newest] == [0.25, 0.5, 0.75]
    assert [stage["w"].item() for stage in records[1].newest] == [0.1875, 0.375, 0.5]


def test_wpipe_delays_the_first_half() -> None:
    config = OracleConfig(schedule="wpipe")
    assert [config.delay(s, 5) for s in range(5)] == [1, 1, 0, 0, 0]


def test_the_delay_counts_from_the_start_of_the_pipeline() -> None:
    config = OracleConfig(schedule="pipedream", sync_start=3, sync_cooldown=2, batches=9)
    read = [k - config.age(k, 0, 3) for k in range(9)]  # delay 2
    assert read == [0, 1, 2, 3, 3, 3, 4, 7, 8]


def test_equal_versions_change_no_bit_of_a_gradient() -> None:
    gradient = torch.tensor([1.5, -0.0, 0.0, 1e-45, 3e38, float("inf")])
    compensated = compensated_gradient(gradient, torch.zeros(6), 2.0)
    assert torch.equal(compensated[:5].view(torch.int32), gradient[:5].view(torch.int32))
    assert not torch.isfinite(compensated[5])


@lru_cache(maxsize=32)
def run(config: OracleConfig, steps: int = 6) -> list[Record]:
    oracle = Oracle(build_stages(SPEC, 2), cross_entropy, config)
    return [oracle.step(make_batch(SPEC, k, 2)) for k in range(steps)]


def same(a: Record, b: Record) -> bool:
    pairs = [(getattr(a, field), getattr(b, field)) for field in ("newest", "masters", "gradients")]
    return a.norm == b.norm and all(
        torch.equal(first[name], second[name])
        for left, right in pairs
        for first, second in zip(left, right, strict=True)
        for name in first
    )


ANSWERS = {
    "none": {},
    "feedback": {"ef_coefficient": 1.0},
    "compensation": {"delay_compensation": 2.0},
    "prediction": {"weight_prediction": True},
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_synchronous_phases_know_no_answer_to_a_delay(answer: str) -> None:
    """The first N batches are those of a synchronous run, bit for bit, and so is a run that is all cooldown."""
    plain = run(OracleConfig(schedule="sync", lr=3e-3))
    started = run(OracleConfig(lr=3e-3, sync_start=4, **ANSWERS[answer]))
    assert all(same(a, b) for a, b in zip(plain[:4], started[:4], strict=True))
    assert not same(plain[5], started[5])
    cooled = run(OracleConfig(lr=3e-3, sync_cooldown=6, batches=6, **ANSWERS[answer]))
    assert all(same(a, b) for a, b in zip(plain, cooled, strict=True))


@pytest.mark.parametrize("answer", ["none", "feedback", "compensation"])
def test_the_pipeline_after_a_synchronous_start_is_a_new_one(answer: str) -> None:
    """From batch N on the run is that of an oracle that starts there with x_N; SGD without momentum has no state."""
    config = OracleConfig(optimizer="sgd", sgd_momentum=0.0, lr=1e-2, **ANSWERS[answer])
    whole = run(replace(config, sync_start=3), 8)
    stages = build_stages(SPEC, 2)
    for stage, weights in zip(stages, whole[2].newest, strict=True):
        stage.load_state_dict(weights)
    fresh = Oracle(stages, cross_entropy, config)
    for record in whole[3:]:
        assert same(record, fresh.step(make_batch(SPEC, record.batch, 2)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_and_repeats(optimizer: OptimizerName) -> None:
    lr = {"sgd": 3e-2, "lion": 1e-3}.get(optimizer, 5e-3)
    config = OracleConfig(optimizer=optimizer, lr=lr, clip_grad=1.0, ef_coefficient=1.0)
    records = run(config, 30)
    assert records[-1].losses.mean() < 0.9 * records[0].losses.mean()
    run.cache_clear()
    assert same(records[-1], run(config, 30)[-1])


def test_lion_takes_matrices_and_adam_the_rest() -> None:
    """As Megatron makes it: u = lr sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g, with Adam's betas."""
    config = OracleConfig(optimizer="lion", lr=1e-3, adam_beta1=0.9, adam_beta2=0.99)
    name, momentum = "layers.0.linear_fc1.weight", 0.0
    for record in run(config):
        gradient = record.gradients[0][name].double()
        expected = 1e-3 * torch.sign(0.9 * momentum + 0.1 * gradient)
        torch.testing.assert_close(record.updates[0][name].double(), expected, rtol=0, atol=2e-7)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert set(run(config)[0].optimizer_state[0]["embedding.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("optimizer", ["normuon", "adamuon"])
def test_adaptive_muon_keeps_the_norm_of_muon(optimizer: OptimizerName) -> None:
    """The second moment redistributes the first update among elements; spectral scale gives both one size."""
    base = {"lr": 1e-3, "muon_nesterov": True}
    muon = run(OracleConfig(optimizer="muon", **base), 1)[0]
    adaptive = run(OracleConfig(optimizer=optimizer, **base), 1)[0]
    name = "layers.0.linear_fc1.weight"
    assert adaptive.updates[0][name].norm() == pytest.approx(muon.updates[0][name].norm().item(), rel=1e-3)
    assert not torch.allclose(adaptive.updates[0][name], muon.updates[0][name], rtol=1e-3, atol=1e-6)
