"""The check of the LMO guarantee: its constants, its oracles, its bound, its exponents, and that it can fail."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_lmo_delay  # noqa: E402
from lmo_delay import bound, experiment, quadratic, report  # noqa: E402
from lmo_delay.method import ARMS, Arm, run  # noqa: E402
from lmo_delay.oracles import GEOMETRIES  # noqa: E402
from lmo_delay.problems import Problem  # noqa: E402

EXACT = [geometry for geometry in GEOMETRIES.values() if geometry.exact]
NOISY, PLAIN, MOMENTUM = experiment.REGIMES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("geometry", EXACT, ids=lambda g: g.name)
def test_an_oracle_attains_the_dual_norm_in_the_unit_ball(geometry) -> None:
    matrix, others = _random(4, 5, 5), _random(200, 4, 5, 5)
    direction = geometry.oracle(matrix)
    torch.testing.assert_close(geometry.norm(direction), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close((direction * matrix).sum((-2, -1)), geometry.dual(matrix))
    others /= geometry.norm(others)[..., None, None]
    assert ((others * matrix).sum((-2, -1)) <= geometry.dual(matrix) + 1e-9).all()
    frobenius = geometry.dual_over_frobenius(5, 5) * torch.linalg.matrix_norm(matrix)
    assert (geometry.dual(matrix) <= frobenius + 1e-9).all()


def test_newton_schulz_is_near_the_polar_factor() -> None:
    matrix = torch.eye(5, dtype=torch.float64) + 0.1 * _random(5, 5)
    singular = torch.linalg.svdvals(GEOMETRIES["muon-ns"].oracle(matrix))
    assert ((singular > 0.6) & (singular < 1.3)).all()


@pytest.mark.parametrize("geometry", EXACT, ids=lambda g: g.name)
def test_the_smoothness_constant_holds_and_is_attained(geometry) -> None:
    problem = Problem()
    curvature, smooth = problem.curvature(), problem.smoothness(geometry)
    first, second = _random(2000, 5, 5), _random(2000, 5, 5)
    second = first + 0.2 * second
    difference = problem.gradient(first.clone(), curvature) - problem.gradient(second.clone(), curvature)
    assert (geometry.dual(difference) <= smooth * geometry.norm(first - second)).all()
    worst = {"muon": torch.eye(5), "sign": torch.ones(5, 5), "normalized": torch.zeros(5, 5)}[geometry.name].double()
    if geometry.name == "normalized":
        worst[0, 0] = 1.0
    gradient = problem.gradient(1e-6 * worst, curvature) / 1e-6
    assert float(geometry.dual(gradient)) == pytest.approx(smooth, rel=1e-6)


def test_gradient_value_and_noise_of_the_problem() -> None:
    problem = Problem(noise=1.7)
    weights = _random(5, 5).requires_grad_()
    (expected,) = torch.autograd.grad(problem.value(weights), weights)
    torch.testing.assert_close(problem.gradient(weights.detach().clone(), problem.curvature()), expected)
    assert (problem.value(_random(1000, 5, 5)) > 0).all()
    assert problem.value(torch.zeros(5, 5, dtype=torch.float64)) == 0
    second = torch.autograd.functional.hessian(problem.value, torch.full((5, 5), math.pi / 3, dtype=torch.float64))
    assert second.reshape(25, 25).diagonal().min() < 0, "the function is meant to be non-convex"
    noise = problem.draw_noise(20000, torch.Generator().manual_seed(0))
    assert float(noise.square().sum((-2, -1)).mean()) == pytest.approx(1.7**2, rel=0.01)


def test_prescribed_settings_minimize_the_bound() -> None:
    constants = bound.Constants(2.8, 4.2, 2.2)
    for alpha in (None, 0.05, 1.0):
        best = bound.prescribe(constants, 4096, alpha)
        value = bound.evaluate(constants, best, 0, 0.0).at_z
        for factor in (0.8, 1.25):
            assert bound.evaluate(constants, replace(best, step_size=factor * best.step_size), 0, 0.0).at_z > value


@pytest.mark.parametrize(("delay", "coefficient"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_corollary_is_above_the_bound_and_of_the_promised_order(delay: int, coefficient: float) -> None:
    constants = bound.Constants(2.8, 4.2, 2.2)
    for steps in (64, 1024, 10**6, 10**12):
        settings = bound.prescribe(constants, steps)
        terms = bound.evaluate(constants, settings, delay, coefficient)
        assert terms.at_z <= bound.corollary(constants, steps, delay, coefficient)
    huge = [bound.corollary(constants, steps, delay, coefficient) for steps in (10**14, 10**16)]
    assert math.log10(huge[1] / huge[0]) / 2 == pytest.approx(-0.25, abs=1e-3)
    with pytest.raises(ValueError, match="needs K"):
        bound.corollary(constants, 8, delay, coefficient)


@pytest.fixture(scope="module")
def noisy() -> experiment.Series:
    torch.set_num_threads(1)
    return experiment.measure(Problem(), NOISY, GEOMETRIES["normalized"], [256, 512, 1024, 2048, 4096], seeds=4)


def test_with_noise_delay_is_of_lower_order_and_feedback_removes_it(noisy: experiment.Series) -> None:
    assert experiment.failures(noisy) == []
    base = noisy.slope(Arm(0, 0.0))[0]
    for delay in (1, 2):
        assert noisy.slope(Arm(delay, 0.0))[0] == pytest.approx(base, abs=0.01)
        fitted = noisy.gap_slope(Arm(delay, 0.0))
        assert fitted is not None
        assert -0.85 < fitted[0] < -0.5

    def gap(arm: Arm) -> float:
        return float(np.mean(noisy.points[arm][-1].gap))

    one = gap(Arm(1, 0.0))
    assert gap(Arm(2, 0.0)) == pytest.approx(2 * one, rel=0.2), "the gap is linear in tau - c"
    assert gap(Arm(2, 1.0)) == pytest.approx(one, rel=0.2)
    assert abs(gap(Arm(1, 1.0))) < 0.1 * one
    assert abs(gap(Arm(2, 2.0))) < 0.2 * one


@pytest.mark.parametrize("name", ["muon", "sign", "normalized"])
@pytest.mark.parametrize("regime", [PLAIN, MOMENTUM], ids=lambda r: r.name)
def test_without_noise_the_bound_holds_and_the_order_is_a_half(name: str, regime: experiment.Regime) -> None:
    series = experiment.measure(Problem(), regime, GEOMETRIES[name], [256, 512, 1024], seeds=2)
    assert experiment.failures(series) == []
    if regime is PLAIN:
        share = np.mean(series.points[ARMS[0]][-1].gradient_z) / series.points[ARMS[0]][-1].bound.at_z
        assert share > 0.9, "without delay and noise the bound is nearly attained: a smaller one would fail"


def test_the_wrong_sign_of_feedback_is_seen() -> None:
    """x = z + c u instead of z - c u makes the delay worse: the check of the gap fails."""

    def wrong(before: torch.Tensor, after: torch.Tensor, coefficient: float, *, out: torch.Tensor) -> torch.Tensor:
        return torch.add(after, before - after, alpha=coefficient, out=out)

    problem, geometry, arms = Problem(), GEOMETRIES["normalized"], (Arm(0, 0.0), Arm(1, 0.0), Arm(1, 1.0))
    settings = bound.prescribe(problem.constants(geometry, 4, 0), 1024)
    common = {"steps": 1024, "step_size": settings.step_size, "alpha": settings.alpha, "seeds": 4}
    right, swapped = (
        run(problem, geometry, arms, **common),
        run(problem, geometry, arms, **common, write_weights=wrong),
    )
    plain, good = (right.gradient_z[i] - right.gradient_z[0] for i in (1, 2))
    bad = swapped.gradient_z[2] - swapped.gradient_z[0]
    assert float(good.mean().abs()) < 0.2 * float(plain.mean())
    assert float(bad.mean()) > 1.5 * float(plain.mean())
    assert float(right.displacement[2].mean()) < 0.6
    assert float(swapped.displacement[2].mean()) > 1.8


def test_a_delay_that_grows_with_the_steps_is_seen() -> None:
    """A delay of K/4 is not of lower order: the exponent that delay 0 has is lost."""
    problem, geometry = Problem(), GEOMETRIES["normalized"]
    constants = problem.constants(geometry, 2, 0)
    means, counts = [], [128, 256, 512]
    for steps in counts:
        settings = bound.prescribe(constants, steps)
        arms = (Arm(0, 0.0), Arm(steps // 4, 0.0))
        measured = run(
            problem, geometry, arms, steps=steps, step_size=settings.step_size, alpha=settings.alpha, seeds=2
        )
        means.append(measured.gradient_z.mean(1))
    slopes = [experiment.fit_exponent(counts, [float(m[i]) for m in means]) for i in (0, 1)]
    assert slopes[0] < -0.17
    assert slopes[1] > slopes[0] + 0.05


def test_without_momentum_noise_does_not_average_out() -> None:
    problem, geometry = Problem(noise=3.0), GEOMETRIES["normalized"]
    series = experiment.measure(problem, replace(NOISY, alpha=1.0), geometry, [256, 512, 1024], seeds=2)
    with_momentum = experiment.measure(problem, NOISY, geometry, [256, 512, 1024], seeds=2)
    last, other = (
        np.mean(s.points[ARMS[0]][-1].gradient_z) / s.points[ARMS[0]][-1].bound.at_z for s in (series, with_momentum)
    )
    assert last < 1
    assert other < 1
    assert series.bound_slope(ARMS[0]) > -0.1, "the bound itself has a floor"


def test_failures_names_what_does_not_hold(noisy: experiment.Series) -> None:
    doubled = {
        arm: [replace(p, gradient_z=[4 * value for value in p.gradient_z]) for p in points]
        for arm, points in noisy.points.items()
    }
    assert any("above the bound" in text for text in experiment.failures(replace(noisy, points=doubled)))
    flat = {arm: [replace(p, gradient_z=points[0].gradient_z) for p in points] for arm, points in noisy.points.items()}
    assert any("the exponent of K is" in text for text in experiment.failures(replace(noisy, points=flat)))
    kept = dict(noisy.points)
    kept[Arm(1, 1.0)] = noisy.points[Arm(1, 0.0)]
    assert any("leaves more than half" in text for text in experiment.failures(replace(noisy, points=kept)))


CASES = [(delayed, c) for _, delayed, c in report.CASES]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.95, 0.99])
@pytest.mark.parametrize(("delayed", "coefficient"), CASES)
def test_stability_limits(momentum: float, delayed: bool, coefficient: float) -> None:
    """The closed form against the roots of the polynomial and against the method itself."""
    limit = quadratic.largest_stable(momentum, delayed=delayed, coefficient=coefficient)
    setting = {"delayed": delayed, "coefficient": coefficient}
    assert quadratic.spectral_radius(0.999 * limit, momentum, **setting) < 1
    assert quadratic.spectral_radius(1.001 * limit, momentum, **setting) > 1
    assert quadratic.simulate(0.9 * limit, momentum, **setting, steps=20000) < 1e-3
    assert quadratic.simulate(1.1 * limit, momentum, **setting, steps=20000) > 1e3


def test_published_stability_table() -> None:
    """The numbers that docs/theory.md prints."""
    documented = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
    assert report.stability_table() in documented
    assert report.damping_table() in documented


def test_polynomial_is_that_of_the_method() -> None:
    """The ratio of successive steps of a long run tends to the dominant real root."""
    h, momentum = 0.05, 0.5
    for delayed, c in CASES:
        roots = np.roots(quadratic.characteristic_polynomial(h, momentum, delayed=delayed, coefficient=c))
        dominant = roots[np.argmax(np.abs(roots))]
        assert abs(dominant.imag) < 1e-9
        values = [quadratic.simulate(h, momentum, delayed=delayed, coefficient=c, steps=n) for n in (200, 201)]
        assert values[1] / values[0] == pytest.approx(abs(dominant), rel=1e-6)


def test_program_writes_table_json_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_lmo_delay, "FAST_STEPS", {True: (256, 512, 1024), False: (128, 256, 512)})
    arguments = ["--fast", "--seeds", "3", "--methods", "normalized"]
    status = check_lmo_delay.main([*arguments, "--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")])
    assert status == 0
    printed = capsys.readouterr()
    assert "all agrees with the guarantee" in printed.out
    assert "| normalized | delay 2, EF c=2" in printed.out
    assert "normalized, noise: K = 256" in printed.err
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["failures"] == []
    assert {series["regime"] for series in content["series"]} == {regime.name for regime in experiment.REGIMES}
    assert len(content["series"][0]["arms"]) == len(ARMS)
    assert (tmp_path / "r.png").stat().st_size > 20000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seeds", "1"], "--seeds 1"), (["--noise", "0"], "--noise 0"), (["--methods", "adam"], "--methods")],
)
def test_bad_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        check_lmo_delay.parse_args(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
