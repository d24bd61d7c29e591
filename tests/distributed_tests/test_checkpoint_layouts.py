"""A checkpoint belongs to the model, not to a layout; what does not fit is refused by name."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from megatron.training.checkpoint_files import CheckpointError
from tests.pretrain_runs import (
    History,
    assert_same_optimizer,
    assert_same_training,
    pretrain_case,
    run,
    tail,
)
from tests.training_runs import GPT, LLAMA

_BASE = f"{LLAMA} --num-layers 2 --global-batch-size 12 --eval-iters 0"
_P2 = "--pipeline-model-parallel-size 2"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [
        f"{LLAMA} --bf16",
        f"{GPT} --untie-embeddings-and-output-weights --fp16 --initial-loss-scale 4194304 "
        "--hysteresis 1 --loss-scale-window 2",
    ],
)
def test_one_run_moves_through_layouts_as_if_it_had_one(
    pool: Any, tmp_path: pathlib.Path, case: str
) -> None:
    """p = 1, 2, 4, 2, 1 and four schedules, two steps each: bit for bit the run that stays."""
    case += f" --global-batch-size 8 --train-iters 10 --eval-iters 0 --save {tmp_path / 'moving'}"
    case += " --save-interval 2"
    (whole,) = run(pool, 1, case.replace("moving", "staying"))
    layouts = [
        (1, ""),
        (2, f"{_P2} --pipeline-schedule zb-h1"),
        (4, "--pipeline-model-parallel-size 4"),
        (2, f"{_P2} --pipeline-schedule dualpipe-v"),
        (1, ""),
    ]
    for index, (p, flags) in enumerate(layouts):
        stay = f"--load {tmp_path / 'moving'} --exit-interval 2 {flags}"
        (part,) = run(pool, p, f"{case} {stay}")
        assert part.iterations == [2 * index + 1, 2 * index + 2], flags
        first = tail(whole, 2 * index + 1)
        assert part.losses == first.losses[:2], flags
        assert part.norms == first.norms[:2], flags
        assert part.weights == first.weights[:3], flags
    assert_same_optimizer(part, whole)
    for step, other in zip(part.steps, whole.steps[-2:], strict=True):
        assert (step.learning_rate, step.loss_scale) == (other.learning_rate, other.loss_scale)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_optimizer_state_is_cut_anew_for_another_number_of_replicas(
    pool: Any, tmp_path: pathlib.Path, precision: str
) -> None:
    """2 replicas with a distributed optimizer, then 3, 1, 2 pipelines of 2, and whole state."""
    case = f"{_BASE} --lr-warmup-iters 0 --train-iters 2 --ffn-hidden-size 36 {precision}"
    sharded = "--use-distributed-optimizer"
    (saved,) = run(pool, 2, f"{case} {sharded} --save {tmp_path} --save-interval 2")
    loading = f"{case} --load {tmp_path}"
    layouts = [(3, sharded), (1, sharded), (4, f"{_P2} {sharded}"), (2, ""), (4, _P2)]
    for world_size, flags in layouts:
        (loaded,) = run(pool, world_size, f"{loading} {flags}")
        assert loaded.steps == [], "the run is complete: what is compared is what was loaded"
        assert_same_optimizer(loaded, saved, f"{world_size} ranks {flags}")
    assert any(values.any() for key, values in saved.moments.items() if "exp_avg_sq" in key)


@pytest.mark.timeout(60)
def test_training_goes_on_with_other_replicas(pool: Any, tmp_path: pathlib.Path) -> None:
    """The next losses agree to the rounding of sums (no dropout: it is keyed by replica)."""
    case = f"{_BASE} --attention-dropout 0 --hidden-dropout 0 --train-iters 4 --save-interval 2"
    case += f" --use-distributed-optimizer --optimizer sgd --save {tmp_path / 'a'}"
    (whole,) = run(pool, 2, case)
    loading = case.replace(f"--save {tmp_path / 'a'}", f"--load {tmp_path / 'a'} --ckpt-step 2")
    for world_size in (1, 3):
        (resumed,) = run(pool, world_size, loading.replace("--save-interval 2", ""))
        assert resumed.iterations == [3, 4]
        ours = [float.fromhex(loss) for loss in resumed.losses]
        expected = [float.fromhex(loss) for loss in tail(whole, 3).losses]
        assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.timeout(60)
def test_padding_of_the_vocabulary_may_differ(pool: Any, tmp_path: pathlib.Path) -> None:
    """120 tokens in 128 rows; then in 120 rows and in 200. Moments are padded like weights."""
    case = f"{GPT} --untie-embeddings-and-output-weights --global-batch-size 8 --train-iters 2"
    case += " --num-layers 2"
    case += " --lr-warmup-iters 0 --eval-iters 0"
    (saved,) = run(pool, 1, f"{case} --save {tmp_path} --save-interval 2")
    width = 32
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    for divisor, rows in ((8, 120), (200, 200)):
        loading = f"{case} --load {tmp_path} --make-vocab-size-divisible-by {divisor}"
        (loaded,) = run(pool, 1, loading)
        for key, values in saved.moments.items():
            ours = loaded.moments[key]
            if key.endswith(vocabulary) and values.size > 1:
                assert (values.size, ours.size) == (128 * width, rows * width)
                kept = min(rows, 128) * width
                assert numpy.array_equal(ours[:kept], values[:kept]), key
                assert not ours[kept:].any(), f"{key}: new rows are padding"
            else:
                assert numpy.array_equal(ours, values), key
        (trained,) = run(pool, 1, f"{loading} --train-iters 4 --override-opt_param-scheduler")
        assert trained.iterations == [3, 4]
    smaller = f"{case} --load {tmp_path} --vocab-size 100 --make-vocab-size-divisible-by 1"
    (error,) = _failures(pool, 1, smaller)
    assert "a vocabulary of 120 tokens, but the embedding has 100 rows here" in error


def _refusals(cases: Sequence[str]) -> list[str]:
    """The CheckpointError of each case on this rank, as text."""
    texts = []
    for case in cases:
        with pytest.raises(CheckpointError) as caught:
            pretrain_case(case)
        texts.append(str(caught.value))
    return texts


def _failures(pool: Any, world_size: int, *cases: str) -> list[str]:
    """The CheckpointErrors of the cases, the same on every rank."""
    per_rank = pool.run(world_size, _refusals, cases)
    assert per_rank == per_rank[:1] * world_size
    return per_rank[0]


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, History]:
    """A checkpoint of GPT at iterations 2 and 4 of 6, and its run up to the last step."""
    folder = tmp_path_factory.mktemp("saved")
    (history,) = run(pool, 1, f"{_SAVED} --save {folder} --save-interval 2")
    return folder, history


_SAVED = f"{GPT} --num-layers 2 --global-batch-size 8 --train-iters 6 --eval-iters 0"


@pytest.mark.timeout(120)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(
    pool: Any, tmp_path: pathlib.Path, saved: tuple[pathlib.Path, History]
) -> None:
    folder, _ = saved
    wider, bare = tmp_path / "wider", tmp_path / "bare"
    run(pool, 1, f"{_SAVED} --qk-layernorm --save {wider} --save-interval 6")
    run(pool, 1, f"{_SAVED} --no-save-optim --save {bare} --save-interval 6")
    extra = "decoder.layers.0.self_attention.k_layernorm.bias"
    expected = {
        f"{folder} --hidden-size 64": "hidden_size is 64 here and 32 there",
        f"{folder} --num-layers 4": "num_layers is 4 here and 2 there",
        f"{folder} --max-position-embeddings 32": "max_position_embeddings is 32 here and 16",
        f"{folder} --ffn-hidden-size 32 --swiglu": "ffn_hidden_size is 32 here and 64 there; swi",
        f"{folder} --qk-layernorm": f"it lacks {extra}",
        f"{folder} --ckpt-step 3": f"there is no checkpoint {folder}/iter_0000003",
        f"{folder} --bf16": "it lacks optimizer.state.fp32_param.decoder.final_layernorm.bias",
        f"{wider}": f"nothing in this run takes {extra}",
        f"{bare}": "was saved with --no-save-optim; load it with --no-load-optim",
    }
    cases = [f"{_SAVED} {_P2} --load {flags}" for flags in expected]
    for message, error in zip(expected.values(), _failures(pool, 2, *cases), strict=True):
        assert message in error
    (loaded,) = run(pool, 2, f"{_SAVED} --load {bare} {_P2} --no-load-optim")
    assert loaded.steps == []


@pytest.mark.timeout(60)
def test_damaged_files_are_refused_by_name(pool: Any, tmp_path: pathlib.Path) -> None:
    case = f"{_SAVED} --train-iters 3"
    for name in ("common.pt", ".metadata", "__0_0.distcp"):
        folder = tmp_path / name.strip(".")
        run(pool, 1, f"{case} --save {folder} --save-interval 3")
        file = folder / "iter_0000003" / name
        file.write_bytes(file.read_bytes()[:100])
        (error,) = _failures(pool, 1, f"{case} --load {folder}")
        assert f"{folder}/iter_0000003" in error and "cannot be read" in error, name


@pytest.mark.timeout(120)
def test_flags_that_choose_what_to_load(pool: Any, saved: tuple[pathlib.Path, History]) -> None:
    folder, whole = saved
    newest, older, no_optimizer, finetuned = run(
        pool,
        1,
        f"{_SAVED} --load {folder}",
        f"{_SAVED} --load {folder} --ckpt-step 2",
        f"{_SAVED} --load {folder} --ckpt-step 4 --no-load-optim",
        f"{_SAVED} --load {folder} --finetune",
    )
    assert newest.steps == []
    assert_same_optimizer(newest, whole)
    assert_same_training(older, tail(whole, 3))
    assert no_optimizer.iterations == [5, 6], "position and schedule are loaded"
    assert no_optimizer.weights[0] == whole.weights[4]
    assert [s.learning_rate for s in no_optimizer.steps] == [
        s.learning_rate for s in whole.steps[4:]
    ]
    assert no_optimizer.losses[0] == whole.losses[4]
    assert no_optimizer.weights[1] != whole.weights[5], "the moments are new"
    assert no_optimizer.moments["step decoder.final_layernorm.weight"] == [2.0]
    assert finetuned.iterations == [1, 2, 3, 4, 5, 6]
    assert finetuned.samples["train"] == whole.samples["train"]
    assert finetuned.weights[0] == whole.weights[6]
    assert finetuned.steps[0].learning_rate == whole.steps[0].learning_rate


@pytest.mark.timeout(120)
def test_flags_for_a_load_that_holds_nothing(
    pool: Any, tmp_path: pathlib.Path, saved: tuple[pathlib.Path, History]
) -> None:
    folder, whole = saved
    empty, missing = f"--load {tmp_path}", "could not find the metadata file"
    for rank in pool.run(2, pretrain_case, f"{_SAVED} {empty} --exit-on-missing-checkpoint {_P2}"):
        assert (rank.exit_code, rank.steps) == (1, [])
    random, pretrained, continued = run(
        pool,
        1,
        f"{_SAVED} {empty}",
        f"{_SAVED} {empty} --pretrained-checkpoint {folder}",
        f"{_SAVED} --load {folder} --pretrained-checkpoint {tmp_path}",
    )
    assert missing in random.output and random.weights == whole.weights
    assert pretrained.iterations[0] == 1 and pretrained.weights[0] == whole.weights[-1]
    assert continued.steps == [], "--load comes first"
    (error,) = _failures(pool, 1, f"{_SAVED} --pretrained-checkpoint {tmp_path}")
    assert f"--pretrained-checkpoint {tmp_path} holds no checkpoint" in error


@pytest.mark.timeout(60)
def test_which_checkpoints_are_kept(
    pool: Any, tmp_path: pathlib.Path, saved: tuple[pathlib.Path, History]
) -> None:
    case = f"{_SAVED} --train-iters 10 --save {tmp_path / 'kept'}"
    for asynchronous in ("", "--async-save"):
        run(pool, 1, f"{case} --save-interval 2 --save-retain-interval 4 {asynchronous}")
        kept = sorted(path.name for path in (tmp_path / "kept").glob("*iter_*"))
        assert kept == ["iter_0000004", "iter_0000008", "iter_0000010"]
    folder, _ = saved
    copy = tmp_path / "copy"
    run(pool, 1, f"{_SAVED} --load {folder} --save {copy} --save-interval 6")
    assert (copy / "iter_0000006" / "metadata.json").is_file(), (
        "saved elsewhere, though not trained"
    )
