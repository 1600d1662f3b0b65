"""What a checkpoint of an asynchronous run holds besides Megatron's own: the weights that the next batches read.

A checkpoint of an asynchronous run is a checkpoint of a synchronous one, with an entry more. Model and optimizer are
saved as z, the plain iterate, so that they belong together wherever they are loaded. The entry has the weights x_k-D to
x_k that the pipeline needs to go on where it was, in the model's type, sharded as the model is, and the number of the
next batch. Error feedback and weight prediction write weights that differ from z; without them the newest version is z
and is not saved twice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from megatron_async.errors import CheckpointError, ConfigurationError
from megatron_async.ranks import is_first_rank

ENTRY = "async_pipeline"
"""Key of the entry in a checkpoint."""

FORMAT = 1
"""Raised whenever an older version of this module could not read the entry."""

_REMEDY = "load it with --no-load-optim or --finetune to start from its weights alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """Where an asynchronous pipeline is, between two steps and with no update pending.

    Attributes:
        kind: Which delays it has: states of one kind can go on from each other.
        uniform: Whether all parameters have one delay. Copies of a tied weight on two stages are then equal.
        batch: Number of the next batch, which is also that of the newest weight version and of the next update.
        ages: The ages in updates of the versions in ``weights``; age 0 is absent where it equals z.
        weights: For each age a tensor a parameter, of its dtype and shape. Parameters of a smaller delay have no
            version of some ages: there the oldest one that they have stands in.
    """

    kind: str
    uniform: bool
    batch: int
    ages: tuple[int, ...]
    weights: Sequence[Sequence[torch.Tensor]]

    def header(self) -> dict[str, Any]:
        """What the entry says about itself, equal on all ranks."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "uniform": self.uniform,
            "batch": self.batch,
            "ages": list(self.ages),
        }

    @classmethod
    def from_header(cls, header: dict[str, Any], weights: Sequence[Sequence[torch.Tensor]]) -> "PipelineState":
        """The state that an entry describes."""
        return cls(
            kind=header["kind"],
            uniform=header["uniform"],
            batch=header["batch"],
            ages=tuple(header["ages"]),
            weights=weights,
        )


def add_entry(
    state_dict: dict[str, Any], state: PipelineState, parameters: dict[str, torch.Tensor], *, sharded: bool
) -> None:
    """Add the entry to what Megatron is about to save.

    Args:
        state_dict: From megatron-core's ``generate_state_dict``; changed in place.
        state: The state to save.
        parameters: What there are versions of, by name, in the order of the state's tensors.
        sharded: Whether the checkpoint is a distributed one (``torch_dist``); else every rank writes what it has.
    """
    weights = {}
    for age, tensors in zip(state.ages, state.weights, strict=True):
        named = dict(zip(parameters, tensors, strict=True))
        weights[f"age_{age}"] = _cut(state_dict, named, parameters, age, state.uniform) if sharded else named
    state_dict[ENTRY] = {**state.header(), "weights": weights}


def add_template(state_dict: dict[str, Any], header: dict[str, Any], parameters: dict[str, torch.Tensor]) -> None:
    """Add the entry to what Megatron is about to load, with tensors to load into.

    Memory: a copy of the weights for each age, until the pipeline starts.

    Args:
        state_dict: From megatron-core's ``generate_state_dict``; changed in place.
        header: The entry of the checkpoint, as the part says that is common to all ranks.
        parameters: What there are versions of, by name.
    """
    tensors = [[torch.empty_like(p.data) for p in parameters.values()] for _ in header["ages"]]
    add_entry(state_dict, PipelineState.from_header(header, tensors), parameters, sharded=True)


def read_entry(state_dict: dict[str, Any], parameters: dict[str, torch.Tensor]) -> PipelineState:
    """The state in a loaded checkpoint.

    Args:
        state_dict: What Megatron has loaded, with the entry.
        parameters: What there are versions of, by name.

    Raises:
        ConfigurationError: If the entry does not fit these parameters.
    """
    entry = state_dict[ENTRY]
    check_header(entry)
    weights = []
    for age in entry["ages"]:
        found = entry.get("weights", {}).get(f"age_{age}", {})
        for name, parameter in parameters.items():
            tensor = found.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                what = "lacks" if tensor is None else f"has another shape, {tuple(tensor.shape)}, for"
                raise ConfigurationError(
                    f"--load: the asynchronous pipeline's entry of the checkpoint {what} weight {name}; {_REMEDY}"
                )
        weights.append([found[name] for name in parameters])
    return PipelineState.from_header(entry, weights)


def check_header(entry: Any) -> None:
    """Check that this version of the package can read an entry.

    Raises:
        ConfigurationError: If it cannot.
    """
    if not isinstance(entry, dict) or not {"format", "kind", "uniform", "batch", "ages"} <= entry.keys():
        raise ConfigurationError(f"--load: the checkpoint's entry {ENTRY!r} is not megatron_async's; {_REMEDY}")
    if entry["format"] > FORMAT:
        raise ConfigurationError(
            f"--load: the checkpoint was written by a newer megatron_async (format {entry['format']}, this one reads "
            f"up to {FORMAT}); update it, or {_REMEDY}"
        )


class Checkpoints:
    """The entry on its way from the pipeline into Megatron's checkpoints, and back.

    Attributes:
        resumed: What a loaded checkpoint has left for a pipeline that has not started.
        is_saving: Whether Megatron is saving.
    """

    def __init__(self) -> None:
        self.resumed: PipelineState | None = None
        self._header: dict[str, Any] | None = None
        self._saved: PipelineState | None = None
        self.is_saving = False

    @contextmanager
    def saving(self, state: PipelineState | None) -> Iterator[None]:
        """While Megatron saves.

        Args:
            state: Where the pipeline is; None if training is synchronous.
        """
        self._saved, self.is_saving = state, True
        try:
            yield
        finally:
            self._saved, self.is_saving = None, False

    def extend(
        self, state_dict: dict[str, Any], parameters: dict[str, torch.Tensor], *, sharded: bool, optimizer: Any
    ) -> None:
        """Add the entry to what Megatron saves, or the template for one to what it loads.

        Args:
            state_dict: From megatron-core's ``generate_state_dict``; changed in place.
            parameters: What there are versions of, by name.
            sharded: Whether the checkpoint is a distributed one.
            optimizer: The optimizer whose state is saved or loaded; None for none, and then no entry either.
        """
        if optimizer is None:
            return
        if self.is_saving:
            if self._saved is not None:
                add_entry(state_dict, self._saved, parameters, sharded=sharded)
        elif sharded and self._header is not None:
            add_template(state_dict, self._header, parameters)

    def inspect(self, common: dict[str, Any] | None) -> None:
        """Look at the part of a checkpoint that is common to all ranks, before the rest is loaded."""
        self._header = (common or {}).get(ENTRY)
        if self._header is not None:
            check_header(self._header)

    def take(self, state_dict: dict[str, Any] | None, parameters: dict[str, torch.Tensor], *, wanted: bool) -> None:
        """Take the entry out of a loaded checkpoint.

        Args:
            state_dict: What Megatron has loaded.
            parameters: What there are versions of, by name.
            wanted: Whether the state of the optimizer is loaded as well.
        """
        entry = (state_dict or {}).get(ENTRY)
        self.resumed = read_entry(state_dict or {}, parameters) if wanted and entry is not None else None

    def hand_over(self, kind: str) -> PipelineState | None:
        """The state that a pipeline of this kind goes on from, once."""
        resumed, self.resumed = self.resumed, None
        if resumed is not None and resumed.kind != kind:
            if is_first_rank():
                print(
                    f"> megatron_async: the checkpoint has the weight versions of {resumed.kind}, from which {kind} "
                    "cannot go on: the pipeline starts with the weights of the checkpoint as its only version",
                    flush=True,
                )
            return None
        return resumed


def unreadable(folder: str, error: BaseException) -> CheckpointError:
    """What to say of a checkpoint that cannot be loaded, whatever the reason.

    Args:
        folder: Where Megatron was told to look.
        error: What happened.
    """
    there = sorted(int(path.name[5:]) for path in Path(folder).glob("iter_*") if path.name[5:].isdigit())
    others = f"there are those of iterations {', '.join(map(str, there))}" if there else "there is none"
    # The last line is where an error of several ranks names its cause.
    text = [type(error).__name__, *str(error).strip().splitlines()[-1:]]
    return CheckpointError(
        f"--load {folder}: the checkpoint cannot be read, it may be incomplete ({': '.join(text)}); "
        f"choose another one with --ckpt-step, {others}"
    )


def _cut(
    state_dict: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    parameters: dict[str, torch.Tensor],
    age: int,
    uniform: bool,
) -> dict[str, Any]:
    """One version, cut over ranks as the weights themselves: it can be loaded wherever they can."""
    places = get_param_id_to_sharded_param_map(state_dict["model"], parameters.values())
    cut = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        place = places[i]
        if getattr(parameter, "shared", False) and not uniform:
            # Megatron stores one copy of a tied weight. This one has another delay than that, and other versions.
            place = replace(place, key=f"{place.key}.copy", replica_id=(0, *place.replica_id[1:]))
        cut[name] = make_sharded_optimizer_tensor(place, tensors[name], prefix=f"{ENTRY}.age_{age}")
    return cut
