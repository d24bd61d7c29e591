"""The model, whole and cut into stages: same weights, same bits, nothing kept too long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.stage_context import StageContext
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.models.tiny_models import (
    BATCH,
    EMBEDDING,
    SEQUENCE,
    VOCAB,
    assert_same_bits,
    batch,
    build_stages,
    gpt_config,
    gradients,
    llama_config,
    train_step,
)

CONFIGS = [
    pytest.param(gpt_config, {"hidden_dropout": 0.1, "attention_dropout": 0.1}, id="gpt-dropout"),
    pytest.param(llama_config, {}, id="llama"),
    pytest.param(llama_config, {"params_dtype": torch.bfloat16}, id="llama-bf16"),
]
SPLITS = [[2, 2], [1, 1, 1, 1], [0, 3, 1, 0]]

MakeConfig = Callable[..., TransformerConfig]


def _losses_and_gradients(
    stages: list[GPTModel], *, split_backward: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [float(train_step(stages, m, split_backward=split_backward)) for m in range(2)]
    return losses, gradients(stages)


@pytest.mark.parametrize(("make", "changes"), CONFIGS)
@pytest.mark.parametrize("tied", ["untied", "copy", "in place"])
def test_a_model_cut_into_stages_gives_the_same_bits(
    make: MakeConfig, changes: dict[str, Any], tied: str
) -> None:
    config = make(**changes)
    whole = build_stages(config, tied=tied != "untied")
    losses, grads = _losses_and_gradients(whole)
    for split in SPLITS:
        stages = build_stages(config, split, tied=tied != "untied", share_in_place=tied[0] == "i")
        stage_losses, stage_grads = _losses_and_gradients(stages)
        assert stage_losses == losses
        assert_same_bits(stage_grads, grads)


@pytest.mark.parametrize(("make", "changes"), CONFIGS)
def test_split_backward_gives_the_bits_of_fused_backward(
    make: MakeConfig, changes: dict[str, Any]
) -> None:
    config = make(**changes)
    fused = _losses_and_gradients(build_stages(config))
    stages = build_stages(config, [2, 2], share_in_place=True)
    split = _losses_and_gradients(stages, split_backward=True)
    assert split[0] == fused[0]
    assert_same_bits(split[1], fused[1])
    for stage in stages:
        stage.stage.store.assert_empty()


@pytest.mark.parametrize("make", [gpt_config, llama_config])
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_do_not_depend_on_the_split(make: MakeConfig, tied: bool) -> None:
    config = make()

    def weights(stages: list[GPTModel]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for stage in stages:
            for local_name, parameter in stage.named_parameters():
                name = stage.global_parameter_name(local_name)
                if name in found:  # the copy of a tied weight
                    assert torch.equal(found[name], parameter)
                found[name] = parameter.detach()
        return found

    whole = weights(build_stages(config, tied=tied))
    assert len(whole) == len(list(build_stages(config, tied=tied)[0].parameters()))
    for split in SPLITS:
        assert_same_bits(weights(build_stages(config, split, tied=tied)), whole)
    other_seed = weights(build_stages(config, tied=tied, seed=8))
    assert not torch.equal(other_seed[EMBEDDING], whole[EMBEDDING])


def test_initial_weights_have_megatrons_distributions() -> None:
    config = gpt_config(num_layers=2, hidden_size=128, init_method_std=0.05)
    (model,) = build_stages(config, tied=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1.0).all(), name
        else:
            writes_to_residual = "linear_proj" in name or "linear_fc2" in name
            expected = 0.05 / 2.0 if writes_to_residual else 0.05  # sqrt(2 x 2 layers) = 2
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name


def test_global_names() -> None:
    first, last = build_stages(llama_config(), [1, 3])
    assert first.global_parameter_name(EMBEDDING) == EMBEDDING
    local = "decoder.layers.2.mlp.linear_fc1.weight"
    assert last.global_parameter_name(local) == "decoder.layers.3.mlp.linear_fc1.weight"
    assert last.global_parameter_name("output_layer.weight") == EMBEDDING
    untied = build_stages(llama_config(), [1, 3], tied=False)[-1]
    assert untied.global_parameter_name("output_layer.weight") == "output_layer.weight"
    assert last.decoder.layers[2].layer_number == 4
    assert last.decoder.layers[2].mlp.linear_fc1.layer_name == "decoder.layers.3.mlp.linear_fc1"


def test_parameters_are_named_as_in_megatron() -> None:
    (model,) = build_stages(gpt_config(num_layers=1), tied=False)
    layer = "decoder.layers.0."
    expected = {EMBEDDING, "embedding.position_embeddings.weight", "output_layer.weight"}
    for name in (
        f"{layer}input_layernorm",
        f"{layer}self_attention.linear_qkv",
        f"{layer}self_attention.linear_proj",
        f"{layer}pre_mlp_layernorm",
        f"{layer}mlp.linear_fc1",
        f"{layer}mlp.linear_fc2",
        "decoder.final_layernorm",
    ):
        expected |= {f"{name}.weight", f"{name}.bias"}
    assert set(model.state_dict_for_save_checkpoint()) == expected


# Tied embedding and head.


def test_a_tied_head_on_the_embeddings_rank_has_no_parameter_of_its_own() -> None:
    first, last = build_stages(llama_config(), [2, 2], share_in_place=True)
    assert "output_layer.weight" not in dict(last.named_parameters())
    assert "output_layer.weight" not in last.state_dict()
    weight = first.embedding.word_embeddings.weight
    assert first.shared_embedding_or_output_weight() is weight
    assert last.shared_embedding_or_output_weight() is weight


def test_each_use_of_a_tied_weight_has_its_own_gradient() -> None:
    (tied,) = build_stages(llama_config())
    (untied,) = build_stages(llama_config(), tied=False)
    with torch.no_grad():
        untied.output_layer.weight.copy_(untied.embedding.word_embeddings.weight)
    train_step([tied]), train_step([untied])
    use = tied.output_layer.tied_use
    assert use is not None and use.main_grad is not None
    assert torch.equal(use.main_grad, untied.output_layer.weight.grad)
    tied_grad = tied.embedding.word_embeddings.weight.grad
    assert torch.equal(tied_grad, untied.embedding.word_embeddings.weight.grad)


def test_without_a_buffer_both_uses_of_a_tied_weight_add_to_its_grad() -> None:
    (model,) = build_stages(llama_config())
    train_step([model])
    summed = gradients([model])[EMBEDDING]
    (bare,) = build_stages(llama_config())
    bare.output_layer.tied_use.main_grad = None
    train_step([bare])
    difference = bare.embedding.word_embeddings.weight.grad - summed
    assert difference.abs().max() < 1e-6 * summed.abs().max()


def test_a_tied_copy_is_marked() -> None:
    first, last = build_stages(llama_config(), [2, 2])
    copy, weight = last.output_layer.weight, first.embedding.word_embeddings.weight
    assert copy.shared_embedding and copy.shared and weight.shared_embedding
    assert not hasattr(weight, "shared")
    assert copy.is_embedding_or_output_parameter and weight.is_embedding_or_output_parameter


def test_a_tied_head_without_a_weight_says_so() -> None:
    context = StageContext(1, 2, layer_offset=2, num_layers=2, tied_head="shared")
    model = GPTModel(
        llama_config(),
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQUENCE,
        pre_process=False,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        stage=context,
    )
    model.set_input_tensor(torch.zeros(SEQUENCE, BATCH, 32))
    with pytest.raises(ValueError, match="attach_shared_embedding"):
        model(None)


# What lives how long.


class _Witness:
    """Hangs on an autograd node; gone when the node is."""

    def __call__(self, *_: Any) -> None:
        return None


def _nodes(root: Any) -> Iterator[Any]:
    """The autograd graph behind `root`, without the leaves' accumulators."""
    seen, pending = set(), [root]
    while pending:
        node = pending.pop()
        if node is None or node in seen or "AccumulateGrad" in node.name():
            continue
        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


def _live_storages() -> set[int]:
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [gpt_config, llama_config])
def test_after_b_only_what_w_needs_is_alive(make: MakeConfig, recompute: bool) -> None:
    changes: dict[str, Any] = {}
    if recompute:
        changes = {"recompute_granularity": "full", "recompute_method": "uniform"}
        changes |= {"recompute_num_layers": 1}
    (model,) = build_stages(make(**changes))
    store = model.stage.store
    train_step([model], split_backward=True)  # makes gradients, rotary tables
    tokens, labels = batch()
    gc.collect()
    gc.disable()  # reference counts alone must do
    try:
        before = _live_storages()
        loss = model(tokens, labels=labels).mean()
        witnesses = []
        for node in _nodes(loss.grad_fn):
            witness = _Witness()
            node.register_hook(witness)
            witnesses.append(weakref.ref(witness))
        del node, witness
        assert len(witnesses) > 20 or recompute
        with store.defer(5):
            loss.backward()
        del loss
        assert all(witness() is None for witness in witnesses)
        tasks = store._deferred[5]
        needed = {
            argument.untyped_storage().data_ptr()
            for task in tasks
            for argument in task.arguments
            if isinstance(argument, torch.Tensor)
        }
        assert len(tasks) == 4 * 4 + 2 + (make is gpt_config)  # layers, ends, position table
        assert _live_storages() - before <= needed
        inputs = [weakref.ref(task.arguments[1]) for task in tasks[:1]]
        del tasks
        store.run(5)
        assert all(reference() is None for reference in inputs)
        assert _live_storages() <= before
    finally:
        gc.enable()


def test_the_last_stage_keeps_one_tensor_of_the_logits_size() -> None:
    """Counted through what autograd saves between F and B."""
    (model,) = build_stages(llama_config(), tied=False)
    tokens, labels = batch()
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, labels=labels)
    assert saved.count(BATCH * SEQUENCE * VOCAB) == 1


def test_no_tensor_of_sequence_by_sequence_is_kept_without_a_mask() -> None:
    sequence = 64
    config = llama_config(num_layers=1)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, sequence, position_embedding_type="rope"
    )
    shapes: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(1, sequence, dtype=torch.long)).sum()
    assert shapes
    assert not [shape for shape in shapes if list(shape).count(sequence) > 1]


def test_the_model_forgets_its_input_tensor() -> None:
    stage = build_stages(llama_config(), [2, 2])[1]
    sent = torch.zeros(SEQUENCE, BATCH, 32)
    stage.set_input_tensor([sent])  # Megatron's schedules send a list of one
    with torch.no_grad():
        stage(None)
    reference = weakref.ref(sent)
    del sent
    assert reference() is None
    with pytest.raises(ValueError, match="stage 1 has no input"):
        stage(None)


# Frozen and shared parameters.


def test_frozen_parameters_queue_nothing_and_change_no_other_gradient() -> None:
    (free,) = build_stages(llama_config(), tied=False)
    train_step([free])
    expected = gradients([free])
    (model,) = build_stages(llama_config(), tied=False)
    frozen = [model.embedding, model.decoder.layers[0], model.decoder.layers[2].mlp]
    for module in frozen:
        module.requires_grad_(False)
    tokens, labels = batch(seed=100)
    with model.stage.store.defer(0):
        model(tokens, labels=labels).mean().backward()
    pending = model.stage.store.layers_pending(0)
    assert len(pending) == 1 + 2 + 4 + 4  # the head, half of layer 2, layers 1 and 3
    assert not [name for name in pending if name.startswith(("embedding", "decoder.layers.0"))]
    model.stage.store.run(0)
    found = gradients([model])
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert_same_bits(found, {name: expected[name] for name in found})


def test_a_wholly_frozen_stage_needs_no_backward() -> None:
    stages = build_stages(llama_config(), [2, 2], tied=False)
    stages[0].requires_grad_(False)
    train_step(stages, split_backward=True)
    assert gradients(stages).keys() == gradients(stages[1:]).keys()
    assert not any(p.grad is not None for p in stages[0].parameters())


def test_a_parameter_used_by_two_layers_gets_both_gradients() -> None:
    config = llama_config(params_dtype=torch.float64)
    (separate,) = build_stages(config, tied=False)
    (shared,) = build_stages(config, tied=False)
    for model in (separate, shared):
        weight = model.decoder.layers[0].mlp.linear_fc1.weight
        model.decoder.layers[2].mlp.linear_fc1.weight.data.copy_(weight.data)
    weight = shared.decoder.layers[0].mlp.linear_fc1.weight
    shared.decoder.layers[2].mlp.linear_fc1.weight = weight
    train_step([separate])
    tokens, labels = batch(seed=100)
    with shared.stage.store.defer(0):
        shared(tokens, labels=labels).mean().backward()
    pending = shared.stage.store.layers_pending(0)
    assert sum(name.endswith("linear_fc1") for name in pending) == 4
    shared.stage.store.run(0)
    uses = (separate.decoder.layers[i].mlp.linear_fc1.weight.grad for i in (0, 2))
    torch.testing.assert_close(weight.grad, sum(uses), rtol=1e-12, atol=1e-15)


# Dropout, masks, precision.


def test_dropout_is_keyed_by_micro_batch_and_iteration_and_off_in_evaluation() -> None:
    config = gpt_config(hidden_dropout=0.2, attention_dropout=0.2)
    (model,) = build_stages(config)
    tokens, labels = batch()

    @torch.no_grad()
    def loss(iteration: int, microbatch: int) -> float:
        model.stage.random.iteration, model.stage.random.microbatch = iteration, microbatch
        return float(model(tokens, labels=labels).mean())

    first = loss(0, 0)
    torch.manual_seed(99)  # the default generator's state is no part of it
    assert loss(0, 0) == first
    assert len({first, loss(0, 1), loss(1, 0)}) == 3
    model.eval()
    (without,) = build_stages(gpt_config())
    with torch.no_grad():
        assert loss(0, 0) == loss(3, 1) == float(without(tokens, labels=labels).mean())


def test_every_dropout_site_draws_its_own_mask() -> None:
    config = gpt_config(num_layers=2, hidden_dropout=0.2, attention_dropout=0.2)
    (model,) = build_stages(config)
    keys: list[int] = []
    random = model.stage.random
    original = random.dropout_key

    def recorded(*args: Any, **kwargs: Any) -> int:
        keys.append(original(*args, **kwargs))
        return keys[-1]

    random.dropout_key = recorded  # type: ignore[method-assign]
    model(batch()[0])
    assert len(keys) == len(set(keys)) == 1 + 2 * 3  # embedding; two branches, probabilities


def test_a_causal_mask_that_is_passed_equals_none_and_a_document_mask_separates() -> None:
    (model,) = build_stages(llama_config())
    tokens, _ = batch()
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)  # True: hidden
    masked = model(tokens, attention_mask=causal[None, None])
    torch.testing.assert_close(masked, model(tokens))
    documents = causal.clone()
    documents[SEQUENCE // 2 :, : SEQUENCE // 2] = True
    apart = model(tokens, attention_mask=documents[None, None])
    second = model(tokens[:, SEQUENCE // 2 :])  # rotary: only differences of positions count
    torch.testing.assert_close(apart[:, SEQUENCE // 2 :], second)


def test_position_ids_choose_rows_of_the_learned_table() -> None:
    (model,) = build_stages(gpt_config())
    tokens, _ = batch()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    assert torch.equal(model(tokens, positions), model(tokens))
    assert not torch.equal(model(tokens, positions.flip(1)), model(tokens))


@pytest.mark.parametrize("make", [gpt_config, llama_config])
def test_16_bit_models_come_close_to_fp32(make: MakeConfig) -> None:
    exact = train_step(build_stages(make()))
    for dtype in (torch.bfloat16, torch.float16):
        stages = build_stages(make(params_dtype=dtype), [2, 2])
        loss = train_step(stages)
        assert loss.dtype is torch.float32
        assert abs(loss - exact) < 0.01 * exact
        assert all(grad.dtype is dtype for grad in gradients(stages).values())


def test_an_fp32_residual_stream_travels_in_fp32_and_is_more_exact() -> None:
    def hidden(**changes: Any) -> torch.Tensor:
        stage = build_stages(llama_config(**changes), [2, 2])[0]
        return stage(batch()[0])

    exact = hidden()
    plain = hidden(params_dtype=torch.bfloat16)
    config = {"params_dtype": torch.bfloat16, "fp32_residual_connection": True}
    wide = hidden(**config)
    assert wide.dtype is torch.float32 and plain.dtype is torch.bfloat16
    assert (wide - exact).norm() < 0.8 * (plain.float() - exact).norm()
    stages = build_stages(llama_config(**config), [2, 2])
    assert torch.isfinite(train_step(stages))
    assert llama_config(**config).pipeline_dtype is torch.float32


def test_half_precision_cross_entropy() -> None:
    config = llama_config(params_dtype=torch.float16)
    (exact,), (half,) = build_stages(config), build_stages(config, fp16_lm_cross_entropy=True)
    loss = train_step([half])
    assert loss.dtype is torch.float32
    assert 0 < abs(loss - train_step([exact])) < 0.01


# What is refused, and how.


def test_ids_outside_their_tables_are_named() -> None:
    (model,) = build_stages(gpt_config())
    tokens, labels = batch()
    bad = tokens.clone()
    bad[1, 3] = VOCAB
    with pytest.raises(ValueError, match=r"token id 96 in sample 1 .*position 3.*\[0, 96\)"):
        model(bad)
    bad[1, 3] = -1
    with pytest.raises(ValueError, match=r"token id -1 in sample 1"):
        model(bad)
    bad_labels = labels.clone()
    bad_labels[0, 5] = VOCAB + 3
    with pytest.raises(ValueError, match=r"label id 99 in sample 0 .*position 5"):
        model(tokens, labels=bad_labels)
    positions = torch.full((BATCH, SEQUENCE), SEQUENCE)
    with pytest.raises(ValueError, match=r"position id 12 .*max_sequence_length is 12"):
        model(tokens, positions)


def test_unsupported_arguments_are_refused() -> None:
    (model,) = build_stages(gpt_config())
    with pytest.raises(ValueError, match="inference_params"):
        model(batch()[0], inference_params=object())
    with pytest.raises(ValueError, match="position_embedding_type is 'yarn'"):
        build_stages(gpt_config(), position_embedding_type="yarn")
    with pytest.raises(ValueError, match="num_experts is 8"):
        get_gpt_layer_local_spec(num_experts=8)
    with pytest.raises(ValueError, match="get_gpt_layer_local_spec"):
        get_gpt_layer_with_transformer_engine_spec()


def test_a_parameter_without_an_init_method_is_named() -> None:
    (model,) = build_stages(gpt_config())
    model.decoder.layers[0].mlp.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.mlp\.extra has no init_method"):
        model.initialize_weights(1)


def test_a_stage_beyond_the_models_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers 3 to 5, but num_layers is 4"):
        build_stages(gpt_config(), [3, 3])


def test_kept_weight_gradients_run_in_backward_dw() -> None:
    """Megatron's delay_wgrad_compute: the caller, not the store, says when."""
    (plain,) = build_stages(gpt_config(), tied=False)
    train_step([plain])
    (delayed,) = build_stages(gpt_config(delay_wgrad_compute=True), tied=False)
    train_step([delayed])
    matrices = {name for name, p in delayed.named_parameters() if p.dim() == 2}
    assert not matrices & gradients([delayed]).keys()
    delayed.backward_dw()
    assert_same_bits(gradients([delayed]), gradients([plain]))
    before = {name: grad.clone() for name, grad in gradients([delayed]).items()}
    delayed.backward_dw()  # nothing is left
    assert_same_bits(gradients([delayed]), before)
