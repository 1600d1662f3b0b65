"""The entry of the pipeline in a checkpoint: what goes in comes out, and what does not fit is refused."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_async.checkpoint import ENTRY, Checkpoints, PipelineState, add_entry, add_template, read_entry
from megatron_async.errors import ConfigurationError
from megatron_async.pipeline.plan import make_schedule
from megatron_async.pipeline.random_state import RandomState


def parameters(*shapes: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
    return {f"layer{i}.weight": torch.nn.Parameter(torch.full(shape, float(i))) for i, shape in enumerate(shapes)}


def state(named: dict[str, torch.nn.Parameter], **changes: Any) -> PipelineState:
    ages = changes.pop("ages", (0, 1))
    weights = [[torch.full_like(p, 10.0 * age + i) for i, p in enumerate(named.values())] for age in ages]
    fields: dict[str, Any] = {"kind": "2bw-async", "uniform": True, "batch": 7, "ages": ages, "weights": weights}
    return PipelineState(**{**fields, **changes})


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def saved(named: dict[str, torch.nn.Parameter], **changes: Any) -> dict[str, Any]:
    state_dict: dict[str, Any] = {}
    add_entry(state_dict, state(named, **changes), named, sharded=False)
    return through_a_file(state_dict)


@pytest.mark.parametrize("ages", [(0, 1), (1,), (0, 1, 2, 3), ()])
def test_what_goes_in_comes_out(ages: tuple[int, ...]) -> None:
    named = parameters((2, 3), (4,))
    before, after = state(named, ages=ages), read_entry(saved(named, ages=ages), named)
    assert after.header() == before.header()
    for expected, found in zip(before.weights, after.weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: entry["weights"]["age_1"].pop("layer0.weight"), "lacks weight layer0.weight"),
        (lambda entry: entry["weights"].pop("age_0"), "lacks weight layer0.weight"),
        (lambda entry: entry.pop("weights"), "lacks weight layer0.weight"),
        (lambda entry: entry["weights"]["age_0"].update({"layer1.weight": torch.ones(5)}), "another shape, (5,), for"),
        (lambda entry: entry.update(format=99), "newer megatron_async (format 99"),
        (lambda entry: entry.pop("kind"), "is not megatron_async's"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, text: str) -> None:
    named = parameters((2, 3), (4,))
    state_dict = saved(named)
    change(state_dict[ENTRY])
    with pytest.raises(ConfigurationError) as refused:
        read_entry(state_dict, named)
    message = str(refused.value)
    assert text in message
    assert message.startswith("--load: ")
    assert "--no-load-optim" in message


def test_foreign_entries_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigurationError, match="is not megatron_async's"):
        Checkpoints().inspect({ENTRY: [1, 2]})
    Checkpoints().inspect({"args": None})  # a synchronous checkpoint
    Checkpoints().inspect(None)  # none at all


@pytest.mark.parametrize("uniform", [True, False])
def test_weights_are_cut_as_the_model_is(uniform: bool) -> None:
    """A tied copy, which Megatron does not store, has a place of its own where its versions are others."""
    named = parameters((2, 3), (4, 3))
    named["layer1.weight"].shared = True
    whole = ShardedTensor.from_rank_offsets("layers.weight", named["layer0.weight"], (0, 1, 4))
    copy = ShardedTensor.from_rank_offsets("word.weight", named["layer1.weight"], replica_id=(1, 0, 0))
    state_dict: dict[str, Any] = {"model": {"a": whole, "b": copy}}
    add_entry(state_dict, state(named, uniform=uniform, ages=(1,)), named, sharded=True)
    first, second = state_dict[ENTRY]["weights"]["age_1"].values()
    assert (first.key, first.global_offset, first.global_shape) == (
        "async_pipeline.age_1.layers.weight",
        (2, 0),
        (8, 3),
    )
    assert torch.equal(first.data, torch.full((2, 3), 10.0))
    assert second.key == "async_pipeline.age_1.word.weight" + ("" if uniform else ".copy")
    assert second.replica_id == ((1, 0, 0) if uniform else (0, 0, 0))


def test_a_template_has_room_of_its_own() -> None:
    named = parameters((2, 3))
    state_dict: dict[str, Any] = {"model": {"a": ShardedTensor.from_rank_offsets("w", named["layer0.weight"])}}
    add_template(state_dict, state(named).header(), named)
    tensors = [version["layer0.weight"].data for version in state_dict[ENTRY]["weights"].values()]
    assert len({t.data_ptr() for t in [*tensors, named["layer0.weight"]]}) == 3


def test_only_what_is_asked_for_is_taken() -> None:
    named = parameters((2, 3))
    checkpoints = Checkpoints()
    checkpoints.take(saved(named), named, wanted=False)
    assert checkpoints.resumed is None
    checkpoints.take({"args": None}, named, wanted=True)
    assert checkpoints.resumed is None
    checkpoints.take(saved(named), named, wanted=True)
    assert checkpoints.resumed is not None
    assert checkpoints.resumed.batch == 7


def test_a_pipeline_of_other_delays_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    named = parameters((2, 3))
    for kind, goes_on in (("2bw-async", True), ("pipedream of 4 stages", False)):
        checkpoints = Checkpoints()
        checkpoints.take(saved(named), named, wanted=True)
        assert (checkpoints.hand_over(kind) is not None) == goes_on
        assert checkpoints.resumed is None
        assert ("cannot go on" in capsys.readouterr().out) != goes_on


def test_kinds() -> None:
    assert make_schedule("2bw-async", 4, 1).kind() == make_schedule("2bw-async", 1, 0).kind() == "2bw-async"
    real, simulated = make_schedule("pipedream", 4, 1), make_schedule("pipedream", 1, 0, simulated_stages=4)
    assert real.kind() == simulated.kind() == "pipedream of 4 stages"
    assert make_schedule("wpipe", 2, 1).kind() == "wpipe of 2 stages"
    assert [make_schedule(name, 4, 3).deepest_delay() for name in ("2bw-async", "pipedream", "wpipe")] == [1, 3, 1]


def test_random_states_are_put_back_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    device = [torch.zeros(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: device.__setitem__(0, state))
    kept = RandomState.now()
    first, second = draw(), draw()
    with kept.in_place():
        assert draw() == first
    third = draw()
    kept.put_back()
    assert [draw(), draw(), draw()] == [first, second, third]
    assert first != second != third
