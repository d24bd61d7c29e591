"""Save and load: `torch.distributed.checkpoint` keyed by global parameter name.

What is stored does not depend on the layout: every tensor is whole, under its global name, so a
checkpoint loads under any schedule and any pipeline or data-parallel size. Random numbers are
keyed by position (see `keyed_random.py`), so there is no random state to keep.
"""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron.training.checkpoint_files import (
    TRACKER,
    CheckpointError,
    CheckpointFolder,
    read_common,
)
from megatron.training.checkpoint_state import ModelState, OptimizerState, load_tensors
from megatron.training.model_setup import Trainer
from megatron.training.progress import ProgressFile
from megatron.training.session import Session, TrainState

logger = logging.getLogger(__name__)

# Arguments that must be what they were when the checkpoint was written.
_MUST_MATCH = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "tokenizer_type",
)


class Checkpointer:
    """Saves and loads a trainer. All methods are collective."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._arguments = trainer.session.run.checkpoint
        self._last_saved: int | None = None
        self._pending: _Pending | None = None
        self._group: dist.ProcessGroup | None = None
        self.progress: ProgressFile | None = None  # told of every save, on rank 0

    def load(self) -> TrainState:
        """Bring the trainer to where the checkpoint that `--load` names left it.

        Without one, a fresh start. Raises CheckpointError for a checkpoint that does not fit.
        """
        found = self._find()
        if found is None:
            return TrainState()
        folder, iteration, weights_only = found
        path = folder.existing_path(iteration)
        logger.info(" loading checkpoint from %s at iteration %s", folder.root, iteration)
        common = read_common(path)
        _check_arguments(self._trainer.session, common["args"])
        _check_vocabulary(self._trainer.session, common)
        load_tensors(path, ModelState(self._trainer))
        weights_only = weights_only or self._arguments.finetune or iteration == "release"
        if weights_only:
            self._trainer.optimizer.reload_model_params()
            return TrainState()
        self._load_training(path, common)
        state = TrainState(**common["state"])
        logger.info(
            "  successfully loaded checkpoint from %s at iteration %d", folder.root, state.iteration
        )
        if folder.is_at(self._arguments.save):
            self._last_saved = state.iteration
        return state

    def save(self, state: TrainState) -> None:
        """Save unless there is no `--save` or this iteration has just been saved."""
        if self._arguments.save is None or self._last_saved == state.iteration:
            return
        self.finish()
        folder = CheckpointFolder(self._arguments.save)
        logger.info(
            "saving checkpoint at iteration %7d to %s in torch_dist format",
            state.iteration,
            folder.root,
        )
        self._last_saved = state.iteration
        if self._trainer.session.is_first_rank:
            folder.prepare(state.iteration)
        self._trainer.session.barrier()
        pending = _Pending(folder, state.iteration, self._common(state))
        writer = dcp.FileSystemWriter(folder.writing_path(state.iteration))
        tensors = self._tensors()
        if self._arguments.async_save:
            pending.future = self._save_async(tensors, writer)
            self._pending = pending
            logger.info(
                "  scheduled an async checkpoint save at iteration %7d to %s",
                state.iteration,
                folder.root,
            )
        else:
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
            self._complete(pending)
            self._trainer.session.barrier()

    def poll(self) -> None:
        """Complete an asynchronous save that has ended meanwhile. Not collective."""
        if self._pending is not None and self._pending.future.done():
            self._complete_pending()

    def finish(self) -> None:
        """Wait for a save that is still being written."""
        if self._pending is not None:
            self._complete_pending()

    def _complete_pending(self) -> None:
        assert self._pending is not None
        self._pending.future.result()
        self._complete(self._pending)
        self._pending = None

    def _complete(self, pending: _Pending) -> None:
        """Rank 0 names the checkpoint: it is complete once rank 0 has written its index."""
        if not self._trainer.session.is_first_rank:
            return
        pending.folder.complete(pending.iteration, pending.common)
        if self.progress is not None:
            self._note_progress(pending.common["state"])
        retain = self._arguments.save_retain_interval
        if retain is not None:
            pending.folder.drop_unretained(pending.iteration, retain)
        logger.info(
            "  successfully saved checkpoint from iteration %7d to %s",
            pending.iteration,
            pending.folder.root,
        )

    def _note_progress(self, state: dict[str, Any]) -> None:
        assert self.progress is not None
        self.progress.saved_checkpoint(
            state["iteration"],
            num_flops_so_far=state["floating_point_operations"],
            num_tokens_so_far=state["consumed_train_samples"]
            * self._trainer.session.run.model.seq_length,
        )

    def _find(self) -> tuple[CheckpointFolder, int | str, bool] | None:
        """(folder, iteration, weights only) of what to load, or None for a random start."""
        arguments = self._arguments
        if arguments.load is not None:
            folder = CheckpointFolder(arguments.load)
            iteration = folder.newest() if arguments.ckpt_step is None else arguments.ckpt_step
            if iteration is not None:
                return folder, iteration, False
            logger.info("WARNING: could not find the metadata file %s", folder.root / TRACKER)
        if arguments.pretrained_checkpoint is not None:
            folder = CheckpointFolder(arguments.pretrained_checkpoint)
            iteration = folder.newest()
            if iteration is None:
                raise CheckpointError(
                    f"--pretrained-checkpoint {folder.root} holds no checkpoint (no tracker file)"
                )
            return folder, iteration, True
        if arguments.load is None:
            return None
        if arguments.exit_on_missing_checkpoint:
            logger.info(">> '--exit-on-missing-checkpoint' set ... exiting. <<")
            raise SystemExit(1)
        logger.info("    will not load any checkpoints and will start from random")
        return None

    def _load_training(self, path: Any, common: dict[str, Any]) -> None:
        """Optimizer, scheduler, loss scale."""
        trainer = self._trainer
        if trainer.session.run.no_load_optim:
            trainer.optimizer.reload_model_params()
        else:
            if not common["has_optimizer"]:
                raise CheckpointError(
                    f"{path} was saved with --no-save-optim; load it with --no-load-optim"
                )
            optimizer_state = OptimizerState(trainer)
            load_tensors(path, optimizer_state)
            optimizer_state.set_step(common["optimizer_step"])
            trainer.optimizer.write_back_params()
            trainer.optimizer.grad_scaler.load_state_dict(common["grad_scaler"])
        if not trainer.session.run.training.skip_train:
            trainer.scheduler.load_state_dict(common["opt_param_scheduler"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = ModelState(self._trainer).to_save()
        if not self._arguments.no_save_optim:
            tensors.update(OptimizerState(self._trainer).to_save())
        return tensors

    def _common(self, state: TrainState) -> dict[str, Any]:
        trainer, session = self._trainer, self._trainer.session
        return {
            "args": _plain(vars(session.namespace)),
            "checkpoint_version": 3.0,
            "iteration": state.iteration,
            "state": dataclasses.asdict(state),
            "opt_param_scheduler": trainer.scheduler.state_dict(),
            "grad_scaler": trainer.optimizer.grad_scaler.state_dict(),
            "has_optimizer": not self._arguments.no_save_optim,
            "optimizer_step": OptimizerState(trainer).step(),
            "true_vocab_size": session.tokenizer.vocab_size,
        }

    def _save_async(self, tensors: dict[str, torch.Tensor], writer: Any) -> Future[Any]:
        """Write in the background, over a group of its own: training uses the others meanwhile."""
        if not dist.is_initialized():
            copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            pool = ThreadPoolExecutor(1)
            future = pool.submit(dcp.save, copies, storage_writer=writer, no_dist=True)
            pool.shutdown(wait=False)
            return future
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        response = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(response, Future), "a stager of our own would give more than a future"
        return response


class _Pending:
    """A checkpoint that is being written."""

    def __init__(self, folder: CheckpointFolder, iteration: int, common: dict[str, Any]) -> None:
        self.folder, self.iteration, self.common = folder, iteration, common
        self.future: Future[Any]


def _check_arguments(session: Session, stored: dict[str, Any]) -> None:
    """Raise CheckpointError, naming every difference, if the saved model is another one."""
    given = vars(session.namespace)
    names = list(_MUST_MATCH)
    if given.get("position_embedding_type") == "learned_absolute":
        names.append("max_position_embeddings")  # the rows of a weight
    differences = [
        f"{name} is {given.get(name)} here and {stored[name]} there"
        for name in names
        if name in stored and stored[name] != _plain_value(given.get(name))
    ]
    if differences:
        raise CheckpointError(
            "the checkpoint is of another model: "
            + "; ".join(differences)
            + "; give the same model arguments (or --use-checkpoint-args)"
        )


def _check_vocabulary(session: Session, common: dict[str, Any]) -> None:
    """Raise CheckpointError if the run's vocabulary leaves out tokens that the model has learned.

    The number of rows may differ, as long as only padding comes or goes.
    """
    rows, size = session.padded_vocab_size, common["true_vocab_size"]
    if rows < min(size, common["args"]["padded_vocab_size"]):
        raise CheckpointError(
            f"the checkpoint is of a vocabulary of {size} tokens, but the embedding has {rows} "
            "rows here; use the tokenizer (or --vocab-size) that the model was trained with"
        )


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in arguments.items()}


def _plain_value(value: Any) -> Any:
    """The value, if `torch.load` may read it back safely, else its text."""
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
