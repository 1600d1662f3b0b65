"""Adan, MARS-AdamW and NAdam in fp64, one element at a time, written from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Vector = list[float]
Rule = Callable[["Parameter", int, Vector, float, float], Vector]


@dataclass
class Parameter:
    """A parameter, flat, and whatever an optimizer remembers of it."""

    value: Vector
    memory: dict[str, Vector]


def run(rule: Rule, start: Vector, gradients: list[Vector], rates: list[float], weight_decay: float) -> list[Vector]:
    """Values after each step."""
    parameter = Parameter(list(start), {})
    values = []
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        parameter.value = rule(parameter, step, gradient, rate, weight_decay)
        values.append(list(parameter.value))
    return values


def _remembered(parameter: Parameter, name: str, size: int) -> Vector:
    return parameter.memory.setdefault(name, [0.0] * size)


def adan(betas: tuple[float, float, float], eps: float) -> Rule:
    """Algorithm 1 of arXiv 2208.06677 without restart; the paper writes 1 - b for b. Bias correction as its code."""
    b1, b2, b3 = betas

    def rule(p: Parameter, k: int, g: Vector, lr: float, decay: float) -> Vector:
        m, v, n = (_remembered(p, name, len(g)) for name in "mvn")
        last = p.memory.get("g", g)
        new = []
        for i, x in enumerate(p.value):
            d = g[i] - last[i]
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * d
            n[i] = b3 * n[i] + (1 - b3) * (g[i] + b2 * d) ** 2
            rate = lr / (math.sqrt(n[i] / (1 - b3**k)) + eps)
            new.append((x - rate * (m[i] / (1 - b1**k) + b2 * v[i] / (1 - b2**k))) / (1 + lr * decay))
        p.memory["g"] = list(g)
        return new

    return rule


def mars(betas: tuple[float, float], gamma: float, eps: float) -> Rule:
    """Algorithm 2 of arXiv 2411.10438 (MARS-AdamW), on the last gradient as it was."""
    b1, b2 = betas

    def rule(p: Parameter, k: int, g: Vector, lr: float, decay: float) -> Vector:
        m, v = (_remembered(p, name, len(g)) for name in "mv")
        last = p.memory.get("g", g)
        c = [g[i] + gamma * b1 / (1 - b1) * (g[i] - last[i]) for i in range(len(g))]
        norm = math.sqrt(sum(x * x for x in c))
        if norm > 1:
            c = [x / norm for x in c]
        new = []
        for i, x in enumerate(p.value):
            m[i] = b1 * m[i] + (1 - b1) * c[i]
            v[i] = b2 * v[i] + (1 - b2) * c[i] ** 2
            direction = m[i] / (1 - b1**k) / (math.sqrt(v[i] / (1 - b2**k)) + eps)
            new.append(x - lr * (direction + decay * x))
        p.memory["g"] = list(g)
        return new

    return rule


def nadam(betas: tuple[float, float], eps: float, psi: float) -> Rule:
    """Dozat 2016 with the momentum schedule mu_k = b1 (1 - 0.96^(k psi) / 2), and decoupled weight decay."""
    b1, b2 = betas

    def mu(k: int) -> float:
        return b1 * (1 - 0.5 * 0.96 ** (k * psi))

    def rule(p: Parameter, k: int, g: Vector, lr: float, decay: float) -> Vector:
        m, v = (_remembered(p, name, len(g)) for name in "mv")
        product = math.prod(mu(j) for j in range(1, k + 1))
        new = []
        for i, x in enumerate(p.value):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            ahead = mu(k + 1) * m[i] / (1 - product * mu(k + 1)) + (1 - mu(k)) * g[i] / (1 - product)
            new.append(x - lr * decay * x - lr * ahead / (math.sqrt(v[i] / (1 - b2**k)) + eps))
        return new

    return rule
