"""The asynchronous pipeline of one rank: plan, executor, weight versions and deferred step, put together."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_pg_size

from megatron_async.checkpoint import PipelineState
from megatron_async.delay.simulate import stages_of_parameters
from megatron_async.errors import ConfigurationError
from megatron_async.observe.moe_metrics import BatchMetrics
from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.optimizer.deferred_step import DeferredStep, UpdateResult
from megatron_async.optimizer.gradients import Gradients
from megatron_async.optimizer.masters import covered_parameters, find_masters, layer_wise_optimizers, norm_parts
from megatron_async.optimizer.owner_broadcast import OwnerBroadcast
from megatron_async.optimizer.parameter_gather import ParameterGather, make_copies, parameter_buffers
from megatron_async.pipeline.communication import StageCommunicator
from megatron_async.pipeline.executor import BatchContext, PipelineExecutor
from megatron_async.pipeline.plan import Action, make_schedule
from megatron_async.pipeline.routers import Routers, named_biases
from megatron_async.pipeline.weight_versions import WeightVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How the pipeline runs.

    Attributes:
        schedule: Name of the schedule in :data:`~megatron_async.pipeline.plan.SCHEDULES`.
        warmup_factor: See ``--async-warmup-factor``.
        ef_coefficient: c of the error feedback, 0 for none.
        timeout: Timeout of the process groups made here; None for PyTorch's default.
        per_token: Whether gradients are divided by the tokens of the batch (``--calculate-per-token-loss``).
        simulated_stages: Number of stages of the pipeline whose delays this one stage reproduces.
        delay_compensation: See ``--async-delay-compensation``.
        weight_prediction: See ``--async-weight-prediction``.
        lr_discount_iters: See ``--async-lr-discount-iters``.
    """

    schedule: str = "2bw-async"
    warmup_factor: int = 1
    ef_coefficient: float = 0.0
    timeout: timedelta | None = None
    per_token: bool = False
    simulated_stages: int = 1
    delay_compensation: float = 0.0
    weight_prediction: bool = False
    lr_discount_iters: int = 0


class AsyncPipeline:
    """An asynchronous pipeline stage with Megatron's interfaces.

    :meth:`forward_backward` has the signature of megatron-core's schedule functions and :meth:`step` that of an
    optimizer's ``step``, so that a training loop calls them as it calls Megatron's. Weights are read when this object
    is made: load a checkpoint before. The model's ``zero_grad_buffer()``, which a training loop calls before each step,
    does nothing from then on: the pipeline empties the accumulation buffers when their gradients have been taken.

    Args:
        model: The DDP-wrapped model of this stage.
        optimizer: Its Megatron optimizer.
        pg_collection: Megatron's process groups; ``pp``, ``tp``, ``cp``, ``embd`` and ``dp_cp`` are used.
        options: How to run.
        resumed: Where the pipeline goes on; None to start with the present weights. The present ones are z in any case.
        metrics: Books the metrics of experts; None if there are none.
        observer: Called with every executed action, while the parameters point at what it read.
        trace: Where the times of all actions go.

    Raises:
        TypeError: If the optimizer's masters have a form that is not supported.
        ValueError: If a trainable parameter has no optimizer, or no place in a simulated pipeline.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        pg_collection: Any,
        options: PipelineOptions,
        resumed: PipelineState | None = None,
        metrics: BatchMetrics | None = None,
        observer: Callable[[Action], None] | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.model = model
        self.options = options
        self.pg_collection = pg_collection
        self.config = get_model_config(model)
        pp_group = pg_collection.pp
        self.schedule = make_schedule(
            options.schedule, pp_group.size(), pp_group.rank(), options.warmup_factor, options.simulated_stages
        )
        self.routers = Routers(model)
        _check_parameters(model, optimizer)
        named = versioned_tensors(model)
        parameters = list(named.values())
        self._metrics = metrics
        self.first_batch = 0 if resumed is None else resumed.batch
        masters = find_masters(optimizer)
        delays = self._delays(list(named))
        sharded = [buffer.param_data for buffer in parameter_buffers(model)]
        self.versions = WeightVersions(
            parameters,
            delays,
            copies=make_copies(model, parameters, max(delays)) if sharded else None,
            flat=sharded,
            trace=trace,
        )
        if resumed is not None:
            self.versions.resume(resumed.batch, dict(zip(resumed.ages, resumed.weights, strict=True)))
        self._gather = _make_gather(model, optimizer, parameters)
        self.communicator = StageCommunicator(
            pp_group,
            self.config.pipeline_dtype,
            parameters[0].device,
            options.timeout,
            self.schedule.unconfirmed_gradients(),
        )
        tied_weight, tied_group = _find_tied_weight(model, pg_collection)
        gradients = Gradients(model, self._finalize_gradients, masters, tied_weight)
        gradients.detach()  # what a synchronous step before may have left
        model.zero_grad_buffer = _do_nothing
        everyone = dist.group.WORLD if gradients.has_peers else norm_parts(optimizer)[0][0]
        assert everyone is not None
        self.updates = DeferredStep(
            optimizer=optimizer,
            masters=masters,
            versions=self.versions,
            gradients=gradients,
            parameter_gather=self._gather,
            everyone=everyone,
            write_others=lambda buffers: self.routers.write(self._biases_of(buffers)),
            tied_weight=tied_weight,
            tied_group=tied_group,
            waits_for_tied=self.schedule.some_stage_waits(),
            # Megatron's finalization reduces gradients over tensor-parallel ranks, and counts the tokens of experts.
            takes_early=pg_collection.tp.size() == 1 and not self.config.num_moe_experts,
            delays=delays,
            ef_coefficient=options.ef_coefficient,
            delay_compensation=options.delay_compensation,
            weight_prediction=options.weight_prediction,
            lr_discount_iters=options.lr_discount_iters,
            first_update=self.first_batch,
            timeout=options.timeout,
            trace=trace,
        )
        self.executor = PipelineExecutor(
            model=model,
            config=self.config,
            schedule=self.schedule,
            versions=self.versions,
            communicator=self.communicator,
            updates=self.updates,
            observer=observer,
            first_batch=self.first_batch,
            enter_batch=self._enter_batch,
            trace=trace,
        )
        self.trace = trace
        self._plain_iterate: Sequence[torch.Tensor] | None = None

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        num_microbatches: int,
        next_num_microbatches: int | None,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """Run the backwards of the next batch, and what the plan puts beside them.

        Args:
            forward_step_func: As for megatron-core's schedules.
            data_iterator: Iterator over the microbatches of all batches in a row, or a list with that iterator.
            num_microbatches: m of this batch.
            next_num_microbatches: m of the batch after it; None to prefetch nothing, as in the last step of a run.
            seq_length: Sequence length of a microbatch, in tokens.
            micro_batch_size: Sequences of a microbatch.
            decoder_seq_length: As for megatron-core's schedules.

        Returns:
            The batch's loss dictionaries on the last stage; elsewhere an empty list.
        """
        self._plain_iterate = None
        (tensor_shape,) = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self.config,
            tp_group=self.pg_collection.tp,
            cp_group=self.pg_collection.cp,
        )
        context = BatchContext(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator[0] if isinstance(data_iterator, list) else data_iterator,
            tensor_shape=tensor_shape,
        )
        return self.executor.run_step(context, num_microbatches, next_num_microbatches)

    def step(self) -> None:
        """Begin the update of the batch whose backwards have just run."""
        per_token = self.options.per_token
        # Tensor-parallel peers have the same tokens: one of them counts.
        counts = per_token and self.pg_collection.tp.rank() == 0
        self.updates.begin(per_token=per_token, tokens=self.executor.tokens if counts else None)
        self.trace.next_step()

    def complete(self) -> UpdateResult | None:
        """Complete the pending update, if there is one. Changes no number, only when the waiting happens."""
        return self.updates.complete()

    def bind_newest(self) -> None:
        """Complete the pending update and let the model hold the newest weights, for an evaluation or a checkpoint."""
        self.complete()
        self.versions.bind_newest()

    def bind_plain_iterate(self) -> None:
        """Complete the pending update and let the model hold z, the plain iterate, for an evaluation.

        Memory: until the next training step a copy of the weights, if they have another type than the masters.
        """
        self.complete()
        if self._plain_iterate is None:
            self._plain_iterate = self._make_plain_iterate()
        self.versions.bind_to(self._plain_iterate)

    def state(self) -> PipelineState:
        """Complete the pending update, and say where the pipeline is. Its tensors are those in use."""
        self.complete()
        versions = self.versions
        ages = range(0 if self._has_corrected_weights() else 1, self.schedule.deepest_delay() + 1)
        return PipelineState(
            kind=self.schedule.kind(),
            uniform=self.schedule.is_uniform(),
            batch=versions.newest,
            ages=tuple(ages),
            weights=[versions.tensors_of_age(age) for age in ages],
        )

    @contextmanager
    def as_saved(self) -> Iterator[None]:
        """Let model and random state be, for a while, what a checkpoint has to hold: z, and nothing prefetched."""
        if self._has_corrected_weights():
            self.bind_plain_iterate()
        else:
            self.bind_newest()
        with self.executor.random_state_of_next_batch():
            yield

    def _has_corrected_weights(self) -> bool:
        return bool(self.options.ef_coefficient) or self.options.weight_prediction

    @torch.no_grad()
    def _make_plain_iterate(self) -> Sequence[torch.Tensor]:
        versions, masters = self.versions, self.updates.masters
        newest = self._newest_biases()
        if not parameter_buffers(self.model):
            weights: dict[torch.Tensor, torch.Tensor] = {master.parameter: master.weight for master in masters}
            weights |= dict(zip(self._biases_of(versions.parameters), newest, strict=True))
            # What another replica has the master of comes from there.
            plain = [weights[p].to(p.dtype) if p in weights else torch.empty_like(p) for p in versions.parameters]
            if self._gather is not None:
                for work in self._gather.start(versions, plain):
                    work.wait()
            return plain
        (storage,) = make_copies(self.model, versions.parameters, 1)
        for copied, bias in zip(self._biases_of(storage.tensors), newest, strict=True):
            copied.copy_(bias)
        positions = {parameter: i for i, parameter in enumerate(versions.parameters)}
        for master in masters:
            master.part_of(storage.tensors[positions[master.parameter]]).copy_(master.weight)
        for work in ParameterGather(self.model).start_flat(storage.flat):
            work.wait()
        return storage.tensors

    @torch.no_grad()
    def hand_back(self) -> None:
        """Leave model and optimizer as Megatron's own schedule wants them, with x = z. Closes the pipeline.

        The step before must have prefetched nothing.
        """
        self.bind_plain_iterate()
        self.versions.return_home(self._plain_iterate)
        home = dict(zip(self.versions.parameters, self.versions.home, strict=True))
        for master in self.updates.masters:
            master.give_back(home[master.parameter])
        self.close()

    def discard_prefetched(self) -> None:
        """Throw prefetched forwards away, and what they have counted."""
        self.executor.discard_prefetched()
        self.routers.forget(self.executor.next_batch)
        if self._metrics is not None:
            self._metrics.forget(self.executor.next_batch)

    def close(self) -> None:
        """Give the process groups back. Prefetched forwards are thrown away."""
        self.discard_prefetched()
        self.routers.close()
        self.communicator.close()
        self.updates.close()
        # The class's own method comes back into sight.
        del self.model.zero_grad_buffer

    def _delays(self, names: list[str]) -> list[int]:
        """Delay of each parameter, in updates."""
        delays = self.schedule.delays
        if len(delays) == 1:
            return [delays[0]] * len(names)
        return [delays[stage] for stage in stages_of_parameters(names, self.config.num_layers, len(delays))]

    def _biases_of(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of the routers: they come last."""
        return buffers[len(buffers) - len(self.routers.biases) :]

    def _newest_biases(self) -> Sequence[torch.Tensor]:
        if not self.routers.biases:
            return ()  # a look at the newest version waits for it, which a model without routers need not do here
        return self._biases_of(self.versions.tensors(self.versions.newest))

    def _enter_batch(self, batch: int) -> None:
        self.routers.enter(batch)
        if self._metrics is not None:
            self._metrics.enter(batch)

    def _finalize_gradients(self) -> None:
        """Megatron's own finalization, less the reduction of tied weights across stages, which would block."""
        batch = self.updates.pending
        if batch is None:
            raise RuntimeError("gradients are finalized for an update that has begun")
        with self.routers.finalizing(batch, self._newest_biases()):
            self._finalize()

    def _finalize(self) -> None:
        finalize = self.config.finalize_model_grads_func or finalize_model_grads
        groups = copy.copy(self.pg_collection)
        groups.embd = groups.pos_embd = _Alone()
        finalize([self.model], None, pg_collection=groups)


def _make_gather(
    model: Any, optimizer: Any, parameters: Sequence[torch.Tensor]
) -> ParameterGather | OwnerBroadcast | None:
    """What completes a new version where replicas share the work of an update."""
    layer_wise = [found for found in layer_wise_optimizers(optimizer) if found.dp_cp_params_list]
    flat = bool(parameter_buffers(model))
    if not layer_wise:
        return ParameterGather(model) if flat else None
    if flat or len(layer_wise) > 1:
        raise ConfigurationError(
            "--use-distributed-optimizer: matrices in shard-aligned buffers are not supported with an asynchronous "
            "--pipeline-schedule; add --no-use-layer-wise-param-layout"
        )
    return OwnerBroadcast(layer_wise[0], parameters)


class _Alone:
    """Stands for a process group of one rank: Megatron then has nothing to reduce there."""

    def size(self) -> int:
        return 1


def _do_nothing() -> None:
    """Stands for the model's ``zero_grad_buffer``."""


def versioned_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a pipeline keeps versions of, by name, in its order: the trainable parameters and the routers' biases."""
    return _trainable_parameters(model) | named_biases(model)


def _trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _check_parameters(model: torch.nn.Module, optimizer: Any) -> None:
    trainable = _trainable_parameters(model)
    covered = covered_parameters(optimizer)
    missing = [name for name, p in trainable.items() if p not in covered]
    if missing:
        raise ValueError(f"no optimizer updates {missing[0]} and {len(missing) - 1} other trainable parameter(s)")
    if not trainable:
        raise ValueError("a pipeline stage without trainable parameters is not supported by 2bw-async")


def _find_tied_weight(
    model: torch.nn.Module, pg_collection: Any
) -> tuple[torch.nn.Parameter | None, dist.ProcessGroup | None]:
    """This stage's copy of the embedding that the output layer of another stage shares, and the group of both."""
    group = getattr(pg_collection, "embd", None)
    if get_pg_size(group) <= 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return None, None
    module = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if not module.share_embeddings_and_output_weights:
        return None, None
    return module.shared_embedding_or_output_weight(), group
