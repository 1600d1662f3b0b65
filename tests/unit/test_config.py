"""Flags, their defaults and texts, and everything that is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import AsyncPipelineConfig, add_arguments, adjust_arguments, flag_names
from megatron_async.errors import ConfigurationError
from megatron_async.refusals import REFUSALS


def parse(*flags: str) -> AsyncPipelineConfig:
    return AsyncPipelineConfig.from_args(add_arguments(argparse.ArgumentParser()).parse_args(list(flags)))


def megatron(**changes: Any) -> argparse.Namespace:
    """The validated arguments of Megatron that a plain asynchronous run has."""
    values: dict[str, Any] = {
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "step_batch_size_schedule": None,
        "seq_length": 128,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 4,
        "tensor_model_parallel_size": 1,
        "optimizer": "adam",
        "cuda_graph_impl": "none",
        "optimizer_cuda_graph": False,
        "rerun_mode": "disabled",
        "timing_log_level": 0,
        "barrier_with_L1_time": True,
        "wandb_project": "",
        "wandb_save_dir": "",
        "tensorboard_dir": None,
        "save": None,
        "load": None,
        "ckpt_format": "torch_dist",
        "non_persistent_ckpt_type": None,
        "ckpt_assume_constant_structure": False,
        "train_iters": 100,
        "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": False,
        "bf16": False,
        "num_experts": None,
        "moe_router_load_balancing_type": "aux_loss",
        "overlap_param_gather": False,
        "calculate_per_token_loss": False,
        "untie_embeddings_and_output_weights": True,
        "num_layers": 12,
        "overlap_param_gather_with_optimizer_step": False,
    }
    return argparse.Namespace(**{**values, **changes})


def test_defaults_leave_megatron_alone() -> None:
    config = parse()
    assert config == AsyncPipelineConfig()
    assert not config.is_asynchronous
    assert config.ef_coefficient == 0.0
    config.validate(argparse.Namespace())  # looks at nothing of Megatron's


def test_flags() -> None:
    config = parse(
        "--pipeline-schedule=2bw-async",
        *("--async-error-feedback", "--async-ef-coefficient", "0.35", "--async-warmup-factor", "2"),
    )
    assert config.is_asynchronous
    assert config.ef_coefficient == 0.35
    assert config.async_warmup_factor == 2


def test_every_flag_has_a_help_text_in_its_own_group() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    (group,) = (g for g in parser._action_groups if "megatron_async" in (g.title or ""))
    texts = {a.option_strings[0]: a.help for a in group._group_actions}
    assert set(texts) == set(flag_names())
    assert all(text and len(text) > 20 for text in texts.values())
    parser.format_help()  # a stray % would raise


def test_a_plain_asynchronous_run_is_accepted() -> None:
    for flags in ([], ["--async-error-feedback"], ["--async-warmup-factor", "2"]):
        parse("--pipeline-schedule", "2bw-async", *flags).validate(megatron(global_batch_size=16))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--async-error-feedback"], r"--async-error-feedback has no effect .* add --pipeline-schedule=2bw-async"),
        (["--async-warmup-factor", "2"], r"--async-warmup-factor has no effect .* add --pipeline-schedule=2bw-async"),
        (["--async-ef-coefficient", "0.5"], "--async-ef-coefficient has no effect without --async-error-feedback"),
        (["--async-error-feedback", "--async-ef-coefficient", "-1"], "--async-ef-coefficient must be .* got -1.0"),
        (["--async-error-feedback", "--async-ef-coefficient", "nan"], "--async-ef-coefficient must be .* got nan"),
        (["--async-error-feedback", "--async-ef-coefficient", "inf"], "--async-ef-coefficient must be .* got inf"),
        (["--async-audit"], r"--async-audit has no effect .* add --pipeline-schedule=2bw-async"),
        (["--simulate-pipeline-stages", "4"], "--simulate-pipeline-stages has no effect"),
    ],
)
def test_bad_values(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(*flags).validate(megatron())


TIED = {"untie_embeddings_and_output_weights": False}
ALONE = {"pipeline_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ("--async-delay-compensation -1", {}, "--async-delay-compensation must be .* got -1.0"),
        (
            "--async-delay-compensation 0.1",
            {"calculate_per_token_loss": True},
            "--async-delay-compensation needs .* --calculate-per-token-loss .* drop one",
        ),
        (
            "--pipeline-schedule pipedream --async-delay-compensation 0.1",
            TIED,
            "--async-delay-compensation .* tied weight .* add --untie-embeddings-and-output-weights",
        ),
        (
            "--pipeline-schedule pipedream --async-lr-discount-iters -2",
            {},
            "--async-lr-discount-iters must be at least 0",
        ),
        ("--async-lr-discount-iters 50", {}, "--async-lr-discount-iters has no effect .* use pipedream or drop it"),
        ("--async-weight-prediction --async-error-feedback", {}, "same delay as --async-error-feedback; drop one"),
        ("--async-weight-prediction --async-delay-compensation 1", {}, "as --async-delay-compensation; drop one"),
        ("--async-weight-prediction", {"optimizer": "soap"}, "--optimizer soap alone .* use --optimizer adam, sgd"),
        ("--async-evaluate z", {}, "--async-evaluate has no effect without --async-error-feedback or"),
        ("--async-sync-start-iters -1", {}, "--async-sync-start-iters must be at least 0, got -1"),
        ("--async-sync-cooldown-iters 1.5", {}, "--async-sync-cooldown-iters must be a whole number or a fraction"),
        ("--async-sync-cooldown-iters nan", {}, "--async-sync-cooldown-iters must be"),
        ("--async-sync-start-iters 5", {"train_iters": None}, "need --train-iters; use it in place of --train-samples"),
        ("--async-sync-start-iters 60 --async-sync-cooldown-iters 0.4", {}, "leave no asynchronous iteration .* lower"),
        ("--async-sync-start-iters 100", {}, "leave no asynchronous iteration"),
        (
            "--pipeline-schedule pipedream",
            ALONE,
            "has no delay; raise --pipeline-model-parallel-size or add",
        ),
        ("--pipeline-schedule wpipe", ALONE, "on one pipeline stage has no delay"),
        ("--simulate-pipeline-stages 0", {}, "--simulate-pipeline-stages must be at least 1, got 0"),
        ("--simulate-pipeline-stages 2", {}, "simulates on one stage; use --pipeline-model-parallel-size 1"),
        ("--simulate-pipeline-stages 5", ALONE, "--simulate-pipeline-stages 5 does not divide --num-layers 12"),
        (
            "--pipeline-schedule wpipe --simulate-pipeline-stages 2",
            {**ALONE, **TIED},
            "--simulate-pipeline-stages .* add --untie-embeddings-and-output-weights",
        ),
        (
            "--pipeline-schedule pipedream --simulate-pipeline-stages 2",
            {**ALONE, "use_distributed_optimizer": True},
            "--simulate-pipeline-stages .* --use-distributed-optimizer .* drop one",
        ),
    ],
)
def test_what_corrections_phases_and_schedules_need(flags: str, settings: dict[str, Any], message: str) -> None:
    schedule = [] if "--pipeline-schedule" in flags else ["--pipeline-schedule", "2bw-async"]
    with pytest.raises(ConfigurationError, match=message):
        parse(*schedule, *flags.split()).validate(megatron(**settings))


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--async-error-feedback --async-delay-compensation 0.1 --async-evaluate both", {}),
        ("--async-weight-prediction --async-evaluate z --async-audit", {"optimizer": "lion"}),
        ("--async-sync-start-iters 10 --async-sync-cooldown-iters 0.25", {}),
        ("--async-sync-start-iters 0 --async-sync-cooldown-iters 99", {}),
        ("--pipeline-schedule pipedream --async-error-feedback", {}),
        ("--pipeline-schedule pipedream --simulate-pipeline-stages 6", ALONE),
        ("--simulate-pipeline-stages 6", {**ALONE, **TIED, "use_distributed_optimizer": True}),
    ],
)
def test_combinations_that_work(flags: str, settings: dict[str, Any]) -> None:
    schedule = [] if "--pipeline-schedule" in flags else ["--pipeline-schedule", "2bw-async"]
    parse(*schedule, *flags.split()).validate(megatron(**settings))


@pytest.mark.parametrize(
    ("start", "cooldown", "first", "end"), [(0, 0.0, 0, 100), (7, 0.0, 7, 100), (0, 0.25, 0, 75), (3, 12.0, 3, 88)]
)
def test_synchronous_iterations(start: int, cooldown: float, first: int, end: int) -> None:
    config = AsyncPipelineConfig(async_sync_start_iters=start, async_sync_cooldown_iters=cooldown)
    assert [i for i in range(100) if not config.is_synchronous_at(i, 100)] == list(range(first, end))


@pytest.mark.parametrize("flags", [["--pipeline-schedule", "gpipe"], ["--async-warmup-factor", "3"]])
def test_values_outside_the_choices_end_the_parser(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*flags)
    assert ended.value.code == 2


def test_too_few_microbatches_at_the_start_of_a_schedule() -> None:
    config = AsyncPipelineConfig(pipeline_schedule="2bw-async")
    config.validate(megatron(step_batch_size_schedule="0:8 2K:16"))
    with pytest.raises(
        ConfigurationError, match=r"--step-batch-size-schedule 0:6 2K:16 gives 3 .*-schedule to 8 or more"
    ):
        config.validate(megatron(step_batch_size_schedule="0:6 2K:16"))


@pytest.mark.parametrize(
    ("factor", "batch", "least"),
    [(1, 6, "raise --global-batch-size to 8 or more"), (2, 12, "raise --global-batch-size to 14 or more or use")],
)
def test_too_few_microbatches(factor: int, batch: int, least: str) -> None:
    config = AsyncPipelineConfig(pipeline_schedule="2bw-async", async_warmup_factor=factor)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"--global-batch-size {batch} gives {batch // 2} microbatch.*{least}"):
        config.validate(megatron(global_batch_size=batch))


SETTINGS: dict[str, dict[str, Any]] = {
    "--fp16": {"fp16": True},
    "--loss-scale": {"loss_scale": 1024.0},
    "--fp8-format": {"fp8": "e4m3"},
    "--fp4-format": {"fp4": "e2m1"},
    "virtual pipeline stages": {"virtual_pipeline_model_parallel_size": 2},
    "--optimizer with --tensor-model-parallel-size": {"tensor_model_parallel_size": 2, "optimizer": "soap"},
    "--context-parallel-size": {"context_parallel_size": 2},
    "--step-batch-size-schedule with --num-experts": {"num_experts": 8, "step_batch_size_schedule": "0:8 2K:16"},
    "--moe-router-load-balancing-type quantile_balancing": {
        "num_experts": 8,
        "moe_router_load_balancing_type": "quantile_balancing",
    },
    "--moe-enable-routing-replay": {"num_experts": 8, "moe_enable_routing_replay": True},
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "generalized tensor parallelism": {"gtp_weight_remat_size": 2},
    "--optimizer": {"optimizer": "polargrad"},
    "--use-distributed-optimizer with --optimizer": {
        "use_layer_wise_distributed_optimizer": True,
        "optimizer": "soap",
        "bf16": True,
    },
    "--use-distributed-optimizer in fp32": {"use_layer_wise_distributed_optimizer": True, "optimizer": "muon"},
    "--num-distributed-optimizer-instances": {"num_distributed_optimizer_instances": 2},
    "--ddp-reduce-scatter-with-fp32-accumulation": {"ddp_reduce_scatter_with_fp32_accumulation": True},
    "--use-megatron-fsdp / --use-torch-fsdp2": {"use_megatron_fsdp": True},
    "--use-precision-aware-optimizer": {"use_precision_aware_optimizer": True},
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "--overlap-param-gather-with-optimizer-step": {"overlap_param_gather_with_optimizer_step": True},
    "--delay-wgrad-compute": {"delay_wgrad_compute": True},
    "--ddp-param-name-patterns-for-fp32-local-accumulation": {
        "ddp_param_name_patterns_for_fp32_local_accumulation": ["bias"]
    },
    "--qk-clip": {"qk_clip": True},
    "--freeze-all-layers": {"freeze_all_layers": True},
    "--sft": {"sft": True},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--rerun-mode": {"rerun_mode": "report_determinism_stats"},
    "--timing-log-level": {"timing_log_level": 1},
    "--fine-grained-activation-offloading / --cpu-offloading-num-layers": {"cpu_offloading_num_layers": 1},
    "--use-ring-exchange-p2p": {"use_ring_exchange_p2p": True},
    "--perform-rl-step": {"perform_rl_step": True},
    "--inprocess-restart": {"inprocess_restart": True},
    "--ckpt-format": {"save": "checkpoints", "ckpt_format": "torch_dcp"},
    "--non-persistent-ckpt-type local": {"non_persistent_ckpt_type": "local"},
    "--ckpt-assume-constant-structure": {"ckpt_assume_constant_structure": True, "async_sync_start_iters": 5},
    "--log-num-zeros-in-grad": {"log_num_zeros_in_grad": True},
    "--log-params-norm": {"log_params_norm": True},
    "--save-params-interval / --save-wgrads-interval / --save-dgrads-interval / --save-activations-interval": {
        "save_wgrads_interval": 10
    },
    "--check-weight-hash-across-dp-replicas-interval": {"check_weight_hash_across_dp_replicas_interval": 10},
}


def test_the_distributed_optimizer_of_sgd_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--use-distributed-optimizer with --optimizer is not supported"):
        AsyncPipelineConfig(pipeline_schedule="2bw-async").validate(
            megatron(use_distributed_optimizer=True, optimizer="sgd")
        )


def test_every_refusal_is_tested() -> None:
    assert list(SETTINGS) == [refusal.flag for refusal in REFUSALS]


@pytest.mark.parametrize("flag", SETTINGS)
def test_refused_combinations(flag: str) -> None:
    config = AsyncPipelineConfig(pipeline_schedule="2bw-async")
    config.validate(megatron())
    with pytest.raises(ConfigurationError) as refused:
        config.validate(megatron(**SETTINGS[flag]))
    message = str(refused.value)
    assert message.startswith(f"{flag} is not supported with --pipeline-schedule=2bw-async: ")
    assert "; " in message  # the remedy
    AsyncPipelineConfig().validate(megatron(**SETTINGS[flag]))  # Megatron's own schedule keeps the setting


def test_rerun_mode_is_switched_off_only_from_its_default() -> None:
    args = megatron(rerun_mode="validate_results")
    (note,) = adjust_arguments(args)
    assert args.rerun_mode == "disabled"
    assert "--rerun-mode" in note
    args = megatron(rerun_mode="report_determinism_stats")
    assert adjust_arguments(args) == []
    assert args.rerun_mode == "report_determinism_stats"


def test_wandb_gets_the_tensorboard_folder_that_megatron_needs_for_it() -> None:
    args = megatron(wandb_project="delay", wandb_save_dir="runs/a")
    (note,) = adjust_arguments(args)
    assert args.tensorboard_dir == "runs/a/tensorboard"
    assert "--tensorboard-dir" in note
    args = megatron(wandb_project="delay", tensorboard_dir="elsewhere")
    assert adjust_arguments(args) == []
    assert args.tensorboard_dir == "elsewhere"


def test_the_all_gather_of_parameters_is_the_pipelines_own() -> None:
    args = megatron(overlap_param_gather=True)
    (note,) = adjust_arguments(args)
    assert not args.overlap_param_gather
    assert "--overlap-param-gather" in note


def test_trace_settings(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    for schedule in ("1f1b", "2bw-async"):
        parse("--pipeline-schedule", schedule, "--async-trace", str(folder)).validate(megatron())
        assert folder.is_dir()
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    for flags, message in (
        (["--async-trace-start", "3"], "--async-trace-start has no effect without --async-trace"),
        (["--async-trace-steps", "3"], "--async-trace-steps has no effect without --async-trace"),
        (["--async-trace", str(folder), "--async-trace-steps", "0"], "must be at least 1"),
        (["--async-trace", str(folder), "--async-trace-start", "101"], "101 is beyond --train-iters 100; lower it"),
        (["--async-trace", str(not_a_folder)], "--async-trace .* cannot be written"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            parse(*flags).validate(megatron())
