"""The delays of a pipeline without one: which of the simulated stages would hold a parameter."""

import re
from collections.abc import Sequence

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FIRST, _LAST = re.compile(r"\bembedding\."), re.compile(r"\b(final_layernorm|output_layer)\.")


def stages_of_parameters(names: Sequence[str], layers: int, stages: int) -> list[int]:
    """The stage that would hold each parameter of a model that is cut as Megatron cuts one by default.

    The layers are cut into equal parts; the embedding is on the first stage, the final norm and the output layer are on
    the last one.

    Args:
        names: Names of the parameters of the whole model.
        layers: Its number of layers.
        stages: Number of stages to simulate; divides ``layers``.

    Raises:
        ValueError: If the layers cannot be cut evenly, or a name tells no place.
    """
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} equal stages")
    return [_stage_of(name, layers // stages, stages) for name in names]


def _stage_of(name: str, layers_per_stage: int, stages: int) -> int:
    layer = _LAYER.search(name)
    if layer is not None:
        return int(layer[1]) // layers_per_stage
    if _FIRST.search(name):
        return 0
    if _LAST.search(name):
        return stages - 1
    raise ValueError(f"the parameter {name} is in no layer, embedding or output layer: its stage is not known")
