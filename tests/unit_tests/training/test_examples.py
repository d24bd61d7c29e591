"""Launch scripts in examples/: the command line of each means what the script says."""

import os
import pathlib
import shlex
import subprocess

import pytest

from megatron.training.arguments import read_run
from megatron.training.config import ConfigError

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
SCRIPTS = sorted(str(p.relative_to(EXAMPLES)) for p in EXAMPLES.glob("*/pretrain_*.sh"))
OWN_VARIABLES = shlex.split(
    "NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT TP_SIZE PIPELINE_SIZE SCHEDULE "
    "MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS DATA_PATH TOKENIZER_MODEL VOCAB_FILE "
    "MERGE_FILE CHECKPOINT_PATH TENSORBOARD_LOGS_PATH RAMPUP_BATCH_SIZE MODEL_SIZE "
    "NUM_MICROBATCHES EXIT_INTERVAL"
)


def clean_environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES}
    return {**kept, "DRY_RUN": "1", **variables}


def bash(script, *flags, cwd=EXAMPLES.parent, **variables):
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *flags],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
    )


def command_of(script, *flags, **options):
    """The tokens of the command that the script would run."""
    done = bash(script, *flags, **options)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def run_of(script, *flags, **variables):
    """The configuration that the script's training processes get."""
    command = command_of(script, *flags, **variables)
    at = next(i for i, token in enumerate(command) if token.endswith("pretrain_gpt.py"))
    launcher = dict(zip(command[1:at:2], command[2:at:2], strict=True))
    world_size = int(launcher["--nnodes"]) * int(launcher["--nproc_per_node"])
    return read_run(command[at + 1 :], world_size=world_size)[0]


def num_parameters(run, vocabulary):
    """Weights of an untied Llama without biases, from the shape alone."""
    h, heads, width = run.model.hidden_size, run.model.num_attention_heads, run.kv_channels
    groups = run.num_query_groups or heads
    attention = h * width * (heads + 2 * groups) + heads * width * h
    layer = attention + 3 * h * run.ffn_hidden_size + 2 * h
    return 2 * vocabulary * h + run.model.num_layers * layer + h


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs_as_it_stands(script):
    run = run_of(script)
    assert run.data.mock_data and run.tokenizer.tokenizer_type == "NullTokenizer"
    assert run.pipeline_schedule == "1f1b"
    assert sum(run.stage_layers) == run.model.num_layers
    assert len(run.stage_layers) == run.parallel.pipeline_model_parallel_size
    assert run.checkpoint.save is None and run.logging.tensorboard_dir is None


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_opens_with_a_command_that_runs_it(script):
    lines = (EXAMPLES / script).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    header = lines[1 : next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    assert any(f"bash examples/{script}" in line for line in header)
    assert "set -euo pipefail" in lines
    assert os.access(EXAMPLES / script, os.X_OK)


@pytest.mark.parametrize(
    ("script", "parameters", "dp", "layers", "lr", "min_lr"),
    [
        ("llama2/pretrain_llama2_7b.sh", 6_738_415_616, 2, (8,) * 4, 3e-4, 3e-5),
        ("llama2/pretrain_llama2_13b.sh", 13_015_864_320, 2, (10,) * 4, 3e-4, 3e-5),
        ("llama2/pretrain_llama2_70b.sh", 68_976_648_192, 8, (5,) * 16, 1.5e-4, 1.5e-5),
    ],
)
def test_llama2_recipes(script, parameters, dp, layers, lr, min_lr):
    """Parameter counts and rates as published (arXiv:2307.09288, tables 1 and 2)."""
    run = run_of(script)
    assert num_parameters(run, 32000) == parameters
    assert (run.data_parallel_size, run.stage_layers) == (dp, layers)
    assert run.global_batch_size == 1024 and run.num_microbatches == 1024 // dp
    assert run.global_batch_size * run.model.seq_length == 4 * 2**20  # 4M tokens
    assert (run.learning_rate.lr, run.learning_rate.min_lr) == (lr, min_lr)
    assert run.lr_warmup_steps == 2000 * 1024 and run.lr_decay_steps == 500000 * 1024
    model, optimizer = run.model, run.optimizer
    assert (model.normalization, model.norm_epsilon, model.swiglu) == ("RMSNorm", 1e-5, True)
    assert run.position_embedding_type == "rope" and model.rotary_base == 10000
    assert model.untie_embeddings_and_output_weights and not model.add_bias_linear
    assert model.attention_dropout == model.hidden_dropout == 0
    assert (model.seq_length, model.max_position_embeddings) == (4096, 4096)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-5)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.1, 1.0)
    assert run.params_dtype == "bfloat16" and run.kv_channels == 128
    assert run.num_query_groups == (8 if "70b" in script else None)


def test_gpt3_175b():
    run = run_of("gpt3/pretrain_gpt3_175b.sh")
    assert (run.model.num_layers, run.model.hidden_size, run.ffn_hidden_size) == (96, 12288, 49152)
    assert (run.data_parallel_size, run.stage_layers) == (2, (2,) * 48)
    assert (run.global_batch_size, run.num_microbatches, run.train_iters) == (1536, 768, 500000)
    assert run.lr_decay_steps == 430000 * 1536
    assert run.lr_warmup_steps == pytest.approx(430 * 1536)
    ramped = run_of("gpt3/pretrain_gpt3_175b.sh", RAMPUP_BATCH_SIZE="16 16 5859375")
    assert (ramped.batch_sizes.at(0), ramped.batch_sizes.final) == (16, 1536)
    assert any("--rampup-batch-size 16 16 5859375" in notice for notice in ramped.notices)


def test_published_gpt3_command_line_of_newer_megatron():
    """It gives both a batch schedule and the final batch size."""
    schedule = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    run = run_of("gpt3/pretrain_gpt3_175b.sh", "--step-batch-size-schedule", schedule)
    assert (run.batch_sizes.at(0), run.global_batch_size) == (16, 1536)
    assert any("the schedule is applied" in notice for notice in run.notices)


@pytest.mark.parametrize(
    ("size", "ends", "middle", "global_batch"),
    [("1.5b", 2, 3, 144), ("6.2b", 3, 4, 72), ("14.6b", 2, 3, 48), ("28.3b", 1, 2, 96)],
)
def test_zero_bubble_paper_models(size, ends, middle, global_batch):
    """Table 3 of arXiv:2401.10241: the first and the last stage have one layer fewer."""
    run = run_of("gpt3/pretrain_gpt3_zero_bubble_paper.sh", MODEL_SIZE=size)
    assert run.stage_layers[0] == run.stage_layers[-1] == ends
    assert set(run.stage_layers[1:-1]) == {middle}
    assert (run.global_batch_size, run.data_parallel_size) == (global_batch, 1)
    more = run_of(
        "gpt3/pretrain_gpt3_zero_bubble_paper.sh",
        MODEL_SIZE=size,
        NNODES=str(2 * run.world_size // 8),
        NUM_MICROBATCHES="64",
    )
    assert (more.data_parallel_size, more.num_microbatches) == (2, 64)


def test_unknown_paper_model():
    done = bash("gpt3/pretrain_gpt3_zero_bubble_paper.sh", MODEL_SIZE="7b")
    assert done.returncode == 2
    assert "MODEL_SIZE is 7b; choose 1.5b, 6.2b, 14.6b or 28.3b" in done.stderr


def test_environment_of_a_launch(tmp_path):
    command = command_of(
        "llama2/pretrain_llama2_7b.sh",
        "--metrics-file",
        "a file.jsonl",
        cwd=tmp_path,  # scripts find the repository themselves
        NNODES="2",
        NODE_RANK="1",
        GPUS_PER_NODE="4",
        MASTER_ADDR="node0",
        MASTER_PORT="1234",
        DATA_PATH="0.3 /data/a 0.7 /data/b",
        TOKENIZER_MODEL="/data/my tokenizer.model",
        CHECKPOINT_PATH="/data/checkpoints",
        TENSORBOARD_LOGS_PATH="/data/logs",
        PIPELINE_SIZE="8",
        GLOBAL_BATCH_SIZE="64",
    )
    at = next(i for i, token in enumerate(command) if token.endswith("pretrain_gpt.py"))
    assert pathlib.Path(command[at]) == EXAMPLES.parent / "pretrain_gpt.py"
    assert command[:at] == shlex.split(
        "torchrun --nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr node0 "
        "--master_port 1234"
    )
    run, _ = read_run(command[at + 1 :], world_size=8)
    assert run.data.data_path == ("0.3", "/data/a", "0.7", "/data/b")
    assert run.tokenizer.tokenizer_model == "/data/my tokenizer.model"
    assert (run.checkpoint.save, run.checkpoint.load) == ("/data/checkpoints",) * 2
    assert run.logging.tensorboard_dir == "/data/logs"
    assert run.logging.metrics_file == "a file.jsonl"
    assert (run.stage_layers, run.num_microbatches) == ((4,) * 8, 64)


def test_flags_on_the_command_line_win():
    run = run_of("llama2/pretrain_llama2_7b.sh", "--train-iters", "20", "--lr-warmup-iters", "2")
    assert (run.train_iters, run.lr_warmup_steps) == (20, 2048)


def test_schedule_and_tensor_ranks_are_passed_on():
    with pytest.raises(ConfigError) as caught:
        run_of("llama2/pretrain_llama2_7b.sh", SCHEDULE="no-such-schedule")
    assert caught.value.messages[0].startswith("--pipeline-schedule no-such-schedule is not")
    command = command_of("llama2/pretrain_llama2_70b.sh", TP_SIZE="8", PIPELINE_SIZE="2")
    assert "--sequence-parallel" in command
    assert command[command.index("--tensor-model-parallel-size") + 1] == "8"
    assert "--sequence-parallel" not in command_of("llama2/pretrain_llama2_70b.sh")


@pytest.mark.parametrize(
    ("script", "variable"),
    [
        ("llama2/pretrain_llama2_13b.sh", "TOKENIZER_MODEL"),
        ("gpt3/pretrain_gpt3_175b.sh", "VOCAB_FILE"),
        ("gpt3/pretrain_gpt3_zero_bubble_paper.sh", "TOKENIZER_MODEL"),
    ],
)
def test_real_data_needs_its_tokenizer(script, variable):
    done = bash(script, DATA_PATH="/data/a")
    assert done.returncode == 2
    assert done.stderr == f"DATA_PATH is set, so {variable} is needed as well\n"


def fake_slurm(folder, num_nodes):
    """`srun` runs its command once per node, `scontrol` expands the node list."""
    nodes = " ".join(map(str, range(num_nodes)))
    programs = {
        "srun": f'for node in {nodes}; do SLURM_NODEID=$node "$@" || exit 1; done',
        "scontrol": "printf 'node0\\nnode1\\n'",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_ID": "41234",
        "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
    }


def test_slurm_starts_every_node(tmp_path):
    done = bash(
        "slurm/pretrain.sbatch",
        "examples/llama2/pretrain_llama2_13b.sh",
        "--tensorboard-dir",
        "my logs",
        cwd=tmp_path,
        **fake_slurm(tmp_path, 2),
    )
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(commands) == 2
    for rank, command in enumerate(commands):
        assert command[1:11] == shlex.split(
            f"--nproc_per_node 8 --nnodes 2 --node_rank {rank} --master_addr node0 "
            "--master_port 21234"
        )
        assert command[-2:] == ["--tensorboard-dir", "my logs"]


def test_slurm_without_a_script_explains_itself(tmp_path):
    done = bash("slurm/pretrain.sbatch", **fake_slurm(tmp_path, 1))
    assert done.returncode == 2 and "LAUNCH_SCRIPT" in done.stderr
