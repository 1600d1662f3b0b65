"""The oracle checked by hand, against plain training, and against the published equations in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.models import (
    LeafLinear,
    ModelSpec,
    Stage,
    ViewLinear,
    build_stages,
    cross_entropy,
    make_batch,
    tied_pairs,
)
from tests.oracle import FAULTS, Oracle, OracleConfig, ParamRule, Record, default_rule, published_weights

SPEC = ModelSpec()
LR = tuple(3e-3 * (1 + (k % 5)) for k in range(64))
ADAM = OracleConfig(optimizer="adam", lr=LR, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.5)
SGD = OracleConfig(optimizer="sgd", lr=LR, weight_decay=0.1, clip_grad=0.5)
MUON = OracleConfig(optimizer="muon", lr=LR, weight_decay=0.1, clip_grad=0.5, muon_nesterov=True)
OPTIMIZERS = pytest.mark.parametrize("config", [ADAM, SGD, MUON], ids=["adam", "sgd", "muon"])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=64)
def run(
    config: OracleConfig, *, spec: ModelSpec = SPEC, stages: int = 2, microbatches: int = 3, steps: int = 6
) -> list[Record]:
    oracle = Oracle(build_stages(spec, stages), cross_entropy, config, tied=tied_pairs(spec, stages))
    return [oracle.step(make_batch(spec, k, microbatches)) for k in range(steps)]


def by_name(tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for stage in tensors for name, tensor in stage.items()}


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    flat_a, flat_b = by_name(a), by_name(b)
    return flat_a.keys() == flat_b.keys() and all(torch.equal(flat_a[n], flat_b[n]) for n in flat_a)


def same_run(a: list[Record], b: list[Record]) -> bool:
    return all(
        torch.equal(x.losses, y.losses) and x.norm == y.norm and same(x.newest, y.newest)
        for x, y in zip(a, b, strict=True)
    )


# --- by hand ---


class Scale(nn.Module):
    """y = w x, w = 1 at first; with the loss y^2 / 2 and x = 1 the gradient is the weight that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


# u_k = w_read / 2. All numbers are exact in binary.
BY_HAND = {
    # u = 1/2, 1/4, 1/8, 1/16
    "sync": ({"schedule": "sync"}, [0.5, 0.25, 0.125, 0.0625]),
    # read 1, 1, 1/2, 0
    "2bw": ({}, [0.5, 0.0, -0.25, -0.25]),
    # read 1, 1, 0, -1/2; z = 1/2, 0, 0, 1/4; u = 1/2, 1/2, 0, -1/4
    "2bw-ef": ({"ef_coefficient": 1.0}, [0.0, -0.5, 0.0, 0.5]),
    # read 1, 1, 1/4, -1/4; z = 1/2, 0, -1/8, 0; u = 1/2, 1/2, 1/8, -1/8
    "2bw-half-ef": ({"ef_coefficient": 0.5}, [0.25, -0.25, -0.1875, 0.0625]),
    # read 1, 0, 1/2; u = 1/2, 0, 1/4
    "fresh": ({"ef_coefficient": 1.0, "fault": "fresh_gradient"}, [0.0, 0.5, 0.0]),
    # x_2 = x_0 - 1/2, x_3 = x_1 - 1/4, x_4 = x_2 - 1/4
    "stale-base": ({"fault": "stale_base"}, [0.5, 0.5, 0.25, 0.25]),
    # x_1 = x_0 - u_0; x_2 = x_0 - 2 u_1: u_0 is gone; then x_3 = x_2 - 2 u_2 + u_1 with u_2 = 1/4
    "drops-u0": ({"ef_coefficient": 1.0, "fault": "ef_drops_u0"}, [0.5, 0.0, 0.0]),
    # learning rates 1/2, 1/4, 1/8 from a sequence, off by one: 1/4, 1/8, 1/16; read 1, 1, 3/4
    "next-lr": (
        {"fault": "lr_of_next_step", "lr": [0.5, 0.25, 0.125, 0.0625]},
        [0.75, 0.625, 0.578125],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_hand_computed(case: str):
    options, expected = BY_HAND[case]
    config = OracleConfig(**{"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, **options})
    oracle = Oracle([Scale()], lambda y, _: 0.5 * (y * y).sum(), config)
    one = torch.ones(1)
    records = [oracle.step([(one, one)]) for _ in expected]
    assert [r.newest[0]["w"].item() for r in records] == expected
    assert [r.older[0]["w"].item() for r in records] == [1.0, *expected[:-1]]


def test_hand_computed_clipping_and_accumulation():
    # x = 3 and 4 with w = 1: mean gradient (9 + 16) / 2 = 12.5, clipped to 1.
    oracle = Oracle(
        [Scale()],
        lambda y, _: 0.5 * (y * y).sum(),
        OracleConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, clip_grad=1.0),
    )
    record = oracle.step([(torch.tensor([3.0]), torch.ones(1)), (torch.tensor([4.0]), torch.ones(1))])
    assert record.gradients[0]["w"].item() == 12.5
    assert record.losses.tolist() == [4.5, 8.0]
    assert record.norm == 12.5
    assert record.clip_coefficient == 1.0 / (12.5 + 1e-6)
    assert record.newest[0]["w"].item() == pytest.approx(0.5, abs=1e-6)


def test_pipedream_delay_depends_on_the_stage():
    # Three stages, delays 2, 1, 0. y = a b c with a = b = c = 1, SGD with learning rate 1/4.
    config = OracleConfig(schedule="pipedream", optimizer="sgd", sgd_momentum=0.0, lr=0.25)
    oracle = Oracle([Scale(), Scale(), Scale()], lambda y, _: y.sum(), config)
    records = [oracle.step([(torch.ones(1), torch.ones(1))]) for _ in range(3)]
    read = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.75], [1.0, 0.75, 0.5]]
    weights = [1.0, 1.0, 1.0]
    for record, (a, b, c) in zip(records, read, strict=True):
        gradients = (b * c, a * c, a * b)
        weights = [w - 0.25 * g for w, g in zip(weights, gradients, strict=True)]
        assert [stage["w"].item() for stage in record.newest] == weights


# --- versions and error feedback ---


@OPTIMIZERS
@pytest.mark.parametrize("coefficient", [0.0, 0.35, 1.0])
def test_weights_follow_the_published_recursion(config: OracleConfig, coefficient: float):
    records = run(replace(config, ef_coefficient=coefficient), steps=12)
    initial = by_name([dict(s.named_parameters()) for s in build_stages(SPEC, 2)])
    for name, start in initial.items():
        published = published_weights(start.detach(), [by_name(r.updates)[name] for r in records], coefficient)
        for record, expected in zip(records, published[1:], strict=True):
            torch.testing.assert_close(by_name(record.newest)[name].double(), expected, rtol=0, atol=2e-6)


@OPTIMIZERS
def test_older_version_is_the_newest_of_the_batch_before(config: OracleConfig):
    records = run(replace(config, ef_coefficient=1.0))
    initial = [{n: p.detach() for n, p in s.named_parameters()} for s in build_stages(SPEC, 2)]
    assert same(records[0].older, initial)
    assert all(same(later.older, earlier.newest) for earlier, later in pairwise(records))


@OPTIMIZERS
def test_error_feedback_changes_only_what_is_written(config: OracleConfig):
    # Batches 0 and 1 both read x_0, so the masters of their updates do not depend on the coefficient.
    off, on = run(config), run(replace(config, ef_coefficient=1.0))
    assert same(off[0].masters, on[0].masters)
    assert same(off[1].masters, on[1].masters)
    assert not same(off[0].newest, on[0].newest)
    assert not same(off[2].masters, on[2].masters)


@OPTIMIZERS
@pytest.mark.parametrize("coefficient", [0.0, 0.35, 1.0])
def test_bf16_rounds_once_from_the_masters(config: OracleConfig, coefficient: float):
    records = run(replace(config, ef_coefficient=coefficient, dtype=torch.bfloat16))
    for record in records:
        for name, written in by_name(record.newest).items():
            exact = by_name(record.masters)[name] - coefficient * by_name(record.updates)[name]
            assert written.dtype is torch.bfloat16
            assert by_name(record.masters)[name].dtype is torch.float32
            # One rounding to 8 significant bits.
            torch.testing.assert_close(written.float(), exact, rtol=2**-8, atol=1e-7)
        if coefficient == 0.0:
            masters = [{n: z.bfloat16() for n, z in s.items()} for s in record.masters]
            assert same(record.newest, masters)


# --- against plain training ---


def plain_training(steps: int, microbatches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = build_stages(SPEC, 1)[0]
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        batch_losses = []
        for inputs, targets in make_batch(SPEC, k, microbatches):
            loss = cross_entropy(model(inputs), targets)
            (loss / microbatches).backward()
            batch_losses.append(loss.detach())
        for group in optimizer.param_groups:
            group["lr"] = LR[k]
        optimizer.step()
        losses.append(torch.stack(batch_losses))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_synchronous_equals_plain_training(stages: int):
    records = run(replace(ADAM, schedule="sync", clip_grad=0.0), stages=stages, steps=8)
    losses, weights = plain_training(8, 3)
    assert all(torch.equal(r.losses, expected) for r, expected in zip(records, losses, strict=True))
    assert same(records[-1].newest, [weights])


@OPTIMIZERS
def test_number_of_stages_changes_nothing_without_clipping(config: OracleConfig):
    config = replace(config, clip_grad=0.0, ef_coefficient=0.35)
    one, two, four = (run(config, stages=p) for p in (1, 2, 4))
    for a, b, c in zip(one, two, four, strict=True):
        assert torch.equal(a.losses, b.losses)
        assert torch.equal(a.losses, c.losses)
        assert same(a.newest, b.newest)
        assert same(a.newest, c.newest)


def test_training_lowers_the_loss():
    for config in (ADAM, MUON):
        records = run(replace(config, lr=5e-3), steps=40)
        assert records[-1].losses.mean() < 0.75 * records[0].losses.mean()


def test_norm_is_the_l2_norm_of_all_gradients():
    for record in run(ADAM, stages=4, steps=2):
        flat = torch.cat([g.flatten().double() for g in by_name(record.gradients).values()])
        assert record.norm == pytest.approx(flat.norm().item(), rel=1e-6)
        assert record.clip_coefficient == pytest.approx(min(1.0, 0.5 / record.norm), rel=1e-5)
        assert record.clip_coefficient < 1.0


def test_the_sum_across_stages_can_be_replaced():
    seen: list[int] = []

    def reversed_sum(squares: list[Tensor]) -> Tensor:
        seen.append(len(squares))
        return torch.stack(squares[::-1]).sum()

    oracle = Oracle(build_stages(SPEC, 4), cross_entropy, ADAM, sum_across_stages=reversed_sum)
    record = oracle.step(make_batch(SPEC, 0, 2))
    assert seen == [4]
    assert record.norm == pytest.approx(run(ADAM, stages=4, microbatches=2, steps=1)[0].norm, rel=1e-6)


# --- tied weights ---


@OPTIMIZERS
def test_tied_copies_stay_equal_and_follow_one_stage(config: OracleConfig):
    spec = replace(SPEC, tied=True)
    config = replace(config, ef_coefficient=1.0)
    one, four = run(config, spec=spec, stages=1), run(config, spec=spec, stages=4)
    for a, b in zip(one, four, strict=True):
        first, last = b.newest[0]["embedding.weight"], b.newest[3]["output_layer.weight"]
        assert torch.equal(first, last)
        assert b.norm == pytest.approx(a.norm, rel=1e-4)
        torch.testing.assert_close(first, a.newest[0]["embedding.weight"], rtol=1e-3, atol=1e-4)
    summed = four[0].gradients[0]["embedding.weight"]
    torch.testing.assert_close(summed, one[0].gradients[0]["embedding.weight"], rtol=1e-4, atol=1e-6)


def test_tied_gradient_is_counted_once():
    spec = replace(SPEC, tied=True)
    record = run(ADAM, spec=spec, stages=2, steps=1)[0]
    counted = {n: g for n, g in by_name(record.gradients).items() if n != "output_layer.weight"}
    flat = torch.cat([g.flatten().double() for g in counted.values()])
    assert record.norm == pytest.approx(flat.norm().item(), rel=1e-6)


# --- base optimizers against their equations in fp64 ---


QUINTIC = (
    # https://leloykun.github.io/ponder/muon-opt-coeffs/
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def newton_schulz_64(matrix: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps on the wide orientation of a matrix, fp64."""
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for a, b, c in QUINTIC:
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


class Reference64:
    """One parameter's base optimizer from the papers' equations, fp64."""

    def __init__(self, config: OracleConfig, rule: ParamRule) -> None:
        self.config, self.rule, self.count = config, rule, 0
        self.first = self.second = 0.0

    def update(self, z: Tensor, gradient: Tensor, lr: float) -> Tensor:
        self.count += 1
        decay = self.config.weight_decay * self.rule.wd_mult
        if self.config.optimizer == "sgd":
            momentum = 0.0 if self.count == 1 else self.config.sgd_momentum
            self.first = momentum * self.first + (gradient + decay * z)
            return lr * self.first
        if self.config.optimizer == "muon" and self.rule.matrix:
            return lr * decay * z + lr * self._muon_direction(gradient, z * (1 - lr * decay))
        b1, b2 = self.config.adam_beta1, self.config.adam_beta2
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient**2
        mean, square = self.first / (1 - b1**self.count), self.second / (1 - b2**self.count)
        return lr * decay * z + lr * mean / (square.sqrt() + self.config.adam_eps)

    def _muon_direction(self, gradient: Tensor, decayed: Tensor) -> Tensor:
        momentum = self.config.muon_momentum
        self.first = momentum * self.first + (1 - momentum) * gradient
        step = self.first
        if self.config.muon_nesterov:
            step = momentum * self.first + (1 - momentum) * gradient
        shapes = self.rule.qkv_split_shapes or (gradient.shape[0],)
        out = torch.empty_like(decayed)
        rows = torch.arange(gradient.shape[0]) % sum(shapes)
        start = 0
        for size in shapes:
            part = (rows >= start) & (rows < start + size)
            scale = math.sqrt(max(int(part.sum()), gradient.shape[1]))
            out[part] = newton_schulz_64(step[part]) * scale
            start += size
        return out


def split_rule(name: str, param: nn.Parameter) -> ParamRule:
    rule = default_rule(name, param)
    return replace(rule, qkv_split_shapes=(8, 8, 8)) if name.endswith("linear_qkv.weight") else rule


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (ADAM, 2e-6),
        (SGD, 2e-6),
        (replace(MUON, muon_fp32_matmul_prec="highest"), 5e-5),
        (replace(MUON, muon_fp32_matmul_prec="highest", muon_nesterov=False), 5e-5),
        (MUON, 1e-1),  # Newton-Schulz in bf16
    ],
    ids=["adam", "sgd", "muon-nesterov", "muon", "muon-bf16"],
)
def test_base_optimizers_match_their_equations(config: OracleConfig, tolerance: float):
    spec = replace(SPEC, blocks=("attention", "mixed"))
    oracle = Oracle(build_stages(spec, 2), cross_entropy, config, rule=split_rule)
    params = {n: p for s in build_stages(spec, 2) for n, p in s.named_parameters()}
    references = {n: Reference64(config, split_rule(n, p)) for n, p in params.items()}
    masters = {n: p.detach().double() for n, p in params.items()}
    for k in range(8):
        record = oracle.step(make_batch(spec, k, 2))
        for name, gradient in by_name(record.gradients).items():
            clipped = gradient.double() * min(1.0, config.clip_grad / (record.norm + 1e-6))
            update = references[name].update(masters[name], clipped, LR[k])
            error = (by_name(record.updates)[name].double() - update).abs().max()
            # Relative to the largest entry; plus the rounding of z before and after.
            assert error <= tolerance * update.abs().max() + 2e-7, (name, k, error)
            masters[name] = by_name(record.masters)[name].double()


def test_split_projection_differs_from_one_matrix():
    spec = replace(SPEC, blocks=("attention", "mixed"))
    whole = Oracle(build_stages(spec, 2), cross_entropy, MUON).step(make_batch(spec, 0, 2))
    split = Oracle(build_stages(spec, 2), cross_entropy, MUON, rule=split_rule).step(make_batch(spec, 0, 2))
    name = "layers.0.linear_qkv.weight"
    assert not torch.equal(by_name(whole.newest)[name], by_name(split.newest)[name])
    assert torch.equal(by_name(whole.newest)["embedding.weight"], by_name(split.newest)["embedding.weight"])


@OPTIMIZERS
@pytest.mark.parametrize("coefficient", [0.0, 0.35, 1.0])
def test_whole_run_in_fp64_by_the_published_form(config: OracleConfig, coefficient: float):
    """A second implementation: functional calls at a history of weights, published recursion, fp64."""
    config = replace(config, ef_coefficient=coefficient, muon_fp32_matmul_prec="highest")
    records = run(config, stages=2, steps=8)
    model: Stage = build_stages(SPEC, 1)[0].double()
    references = {n: Reference64(config, default_rule(n, p)) for n, p in model.named_parameters()}
    history = [{n: p.detach() for n, p in model.named_parameters()}]
    previous = {n: torch.zeros_like(x) for n, x in history[0].items()}
    for k, record in enumerate(records):
        read = {n: x.clone().requires_grad_() for n, x in history[max(k - 1, 0)].items()}
        batch = make_batch(SPEC, k, 3)
        losses = [_loss64(functional_call(model, read, (inputs,)), targets) for inputs, targets in batch]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(read.values()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        scale = min(1.0, config.clip_grad / (norm + 1e-6))
        new = {}
        for (name, x), gradient in zip(history[k].items(), gradients, strict=True):
            z = x + coefficient * previous[name]
            u = references[name].update(z, gradient * scale, LR[k])
            new[name] = x - (1 + coefficient) * u + coefficient * previous[name]
            previous[name] = u
        history.append(new)
        torch.testing.assert_close(record.losses.double(), torch.stack(losses).detach(), rtol=2e-4, atol=1e-5)
        for name, x in new.items():
            torch.testing.assert_close(by_name(record.newest)[name].double(), x, rtol=0, atol=5e-4)


def _loss64(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- skipped updates ---


def weighted_loss(logits: Tensor, target: tuple[Tensor, float]) -> Tensor:
    return cross_entropy(logits, target[0]) * target[1]


@OPTIMIZERS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_skipped_update(config: OracleConfig, bad: float):
    config = replace(config, ef_coefficient=1.0)
    oracle = Oracle(build_stages(SPEC, 2), weighted_loss, config)

    def batch(k: int, weight: float) -> list:
        return [(x, (y, weight if i == 1 else 1.0)) for i, (x, y) in enumerate(make_batch(SPEC, k, 3))]

    good = [oracle.step(batch(k, 1.0)) for k in range(3)]
    skipped = oracle.step(batch(3, bad))
    after = oracle.step(batch(4, 1.0))

    assert skipped.skipped
    assert not good[2].skipped
    assert same(skipped.newest, good[2].newest)
    assert same(skipped.older, good[2].newest)
    assert same(skipped.masters, good[2].masters)
    assert all(
        torch.equal(value, good[2].optimizer_state[s][name][key])
        for s, stage in enumerate(skipped.optimizer_state)
        for name, state in stage.items()
        for key, value in state.items()
    )
    assert all(not u.any() for u in by_name(skipped.updates).values())
    for name, z in by_name(after.masters).items():
        before, u = by_name(skipped.masters)[name], by_name(after.updates)[name]
        assert torch.equal(before - z, u)
        assert torch.equal(by_name(after.newest)[name], torch.sub(z, u))
    assert same(after.older, skipped.newest)


def test_first_update_skipped():
    oracle = Oracle(build_stages(SPEC, 2), weighted_loss, replace(ADAM, ef_coefficient=1.0))
    initial = [{n: p.detach() for n, p in s.named_parameters()} for s in build_stages(SPEC, 2)]
    record = oracle.step([(x, (y, float("nan"))) for x, y in make_batch(SPEC, 0, 2)])
    assert record.skipped
    assert same(record.newest, initial)
    assert same(record.older, initial)
    assert record.optimizer_state[0]["embedding.weight"] == {}


# --- negative controls ---

# A few bf16 gradients add up exactly in fp32, in any order.
VISIBLE_FAULTS = [
    (fault, dtype)
    for fault in FAULTS
    for dtype in (torch.float32, torch.bfloat16)
    if (fault, dtype) != ("reordered_microbatches", torch.bfloat16)
]
FAULTY_PART = {
    "compensation_wrong_sign": {"delay_compensation": 2.0},
    "compensation_stale_difference": {"delay_compensation": 2.0},
    "prediction_lr_of_next_batch": {"weight_prediction": True},
    "cooldown_keeps_x": {"ef_coefficient": 1.0, "sync_cooldown": 2, "batches": 4},
}
"""What a fault needs to be one; error feedback by default."""


@OPTIMIZERS
@pytest.mark.parametrize(("fault", "dtype"), VISIBLE_FAULTS, ids=lambda value: str(value).split(".")[-1])
def test_every_fault_differs(config: OracleConfig, fault: str, dtype: torch.dtype):
    part = FAULTY_PART.get(fault, {"ef_coefficient": 1.0})
    assert_visible(replace(config, **part, dtype=dtype), fault, stages=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_differs_on_one_stage(fault: str):
    assert_visible(replace(ADAM, **FAULTY_PART.get(fault, {"ef_coefficient": 1.0})), fault, stages=1)


def assert_visible(config: OracleConfig, fault: str, stages: int) -> None:
    right = run(config, stages=stages, steps=4)
    wrong = run(replace(config, fault=fault), stages=stages, steps=4)
    assert not same_run(right, wrong)
    # It shows on every stage, so that a comparison on any one rank notices it.
    for stage in range(stages):
        assert any(not same([a.masters[stage]], [b.masters[stage]]) for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize(
    ("linear", "fault", "differs"),
    [
        (LeafLinear, "backward_rebound", True),
        (LeafLinear, "backward_at_new_weights", True),
        (ViewLinear, "backward_rebound", False),
        (ViewLinear, "backward_at_new_weights", True),
    ],
)
def test_saved_leaf_follows_rebinding_and_saved_view_does_not(linear: type, fault: str, differs: bool):
    def records(fault: str | None) -> list[Record]:
        torch.manual_seed(0)
        stages = [linear(16, 16), linear(16, 16)]
        for stage in stages:
            nn.init.normal_(stage.weight)
        x, y = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        config = OracleConfig(optimizer="sgd", lr=1e-3, fault=fault)
        oracle = Oracle(stages, nn.functional.mse_loss, config)
        return [oracle.step([(x, y), (x, 2 * y)]) for _ in range(4)]

    assert same_run(records(None), records(fault)) is not differs


@pytest.mark.parametrize("options", [{"fault": fault} for fault in ("ef_drops_u0", "early_scaling", *FAULTY_PART)])
def test_fault_without_effect_is_refused(options: dict):
    with pytest.raises(ValueError, match=options["fault"]):
        OracleConfig(**options)


def test_invalid_configurations_are_refused():
    with pytest.raises(ValueError, match="ef_coefficient=0"):
        OracleConfig(schedule="sync", ef_coefficient=1.0)
    with pytest.raises(ValueError, match="dtype"):
        OracleConfig(dtype=torch.float16)
    with pytest.raises(ValueError, match="fresh_gradients"):
        OracleConfig(fault="fresh_gradients")
    with pytest.raises(ValueError, match="changes nothing"):
        OracleConfig(schedule="sync", fault="stale_base")
    with pytest.raises(ValueError, match="soap"):
        OracleConfig(weight_prediction=True, optimizer="soap")
    with pytest.raises(ValueError, match="excludes"):
        OracleConfig(weight_prediction=True, ef_coefficient=1.0)
    with pytest.raises(ValueError, match="per_token"):
        OracleConfig(delay_compensation=1.0, per_token=True)
    with pytest.raises(ValueError, match="batches"):
        OracleConfig(sync_cooldown=1)


# --- reproducibility ---


@OPTIMIZERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_runs_are_equal(config: OracleConfig, dtype: torch.dtype):
    config = replace(config, ef_coefficient=0.35, dtype=dtype)
    run.cache_clear()
    first = run(config, stages=4)
    run.cache_clear()
    assert same_run(first, run(config, stages=4))


def test_on_forward_sees_every_forward_in_order():
    seen: list[tuple[int, int, int]] = []
    oracle = Oracle(build_stages(SPEC, 2), cross_entropy, ADAM, on_forward=lambda *position: seen.append(position))
    for k in range(2):
        oracle.step(make_batch(SPEC, k, 2))
    assert seen == [(k, i, s) for k in range(2) for i in range(2) for s in range(2)]


def test_given_stages_are_left_alone():
    stages = build_stages(SPEC, 2)
    before = [{n: p.detach().clone() for n, p in s.named_parameters()} for s in stages]
    Oracle(stages, cross_entropy, ADAM).step(make_batch(SPEC, 0, 2))
    assert same(before, [{n: p.detach() for n, p in s.named_parameters()} for s in stages])


def test_parameters_start_on_aligned_boundaries():
    for tied in (False, True):
        spec = replace(SPEC, tied=tied, blocks=("leaf", "view", "mixed", "attention"))
        for stage in build_stages(spec, 4):
            assert all(p.numel() % 16 == 0 for p in stage.parameters())
