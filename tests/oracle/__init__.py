"""Plain-PyTorch oracle of the asynchronous pipeline, independent of the package and of megatron-core.

It follows the definition of the schedule (weight versions, base optimizer, error feedback) and no
implementation of it. Pipeline runs are compared with it byte for byte in fp32.
"""

from tests.oracle.arithmetic import (
    accumulated_norm,
    clip_coefficient,
    compensated_gradient,
    published_weights,
    sequential_sum,
    written_weights,
)
from tests.oracle.config import FAULTS, OracleConfig, ParamRule, default_rule
from tests.oracle.oracle import Oracle, Record, StageTensors

__all__ = [
    "FAULTS",
    "Oracle",
    "OracleConfig",
    "ParamRule",
    "Record",
    "StageTensors",
    "accumulated_norm",
    "clip_coefficient",
    "compensated_gradient",
    "default_rule",
    "published_weights",
    "sequential_sum",
    "written_weights",
]
