"""Which simulated stage a parameter is on."""

from __future__ import annotations

import pytest

from megatron_async.delay.simulate import stages_of_parameters

NAMES = [
    "module.embedding.word_embeddings.weight",
    *(f"module.decoder.layers.{i}.mlp.linear_fc1.weight" for i in range(12)),
    "module.decoder.final_layernorm.weight",
    "module.output_layer.weight",
]


@pytest.mark.parametrize("stages", [1, 2, 3, 6, 12])
def test_layers_are_cut_evenly(stages: int) -> None:
    per_stage = 12 // stages
    layers = [i // per_stage for i in range(12)]
    assert stages_of_parameters(NAMES, 12, stages) == [0, *layers, stages - 1, stages - 1]


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="12 layers cannot be cut into 5 equal stages"):
        stages_of_parameters(NAMES, 12, 5)
    with pytest.raises(ValueError, match=r"vision\.patch\.weight is in no layer"):
        stages_of_parameters(["vision.patch.weight"], 12, 2)
