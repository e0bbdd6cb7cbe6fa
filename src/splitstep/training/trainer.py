"""The Hugging Face Trainer with what it lacks.

Batches by plan, a stop at a loss that is no number, sealed checkpoints, signals obeyed between updates, and a log in
which a continued run does not show.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from splitstep.data.batches import Piece, Plan, Stream
from splitstep.fields.attention import Attention
from splitstep.fields.evolution import EvolvedAttention
from splitstep.fields.feedforward import FEED_FORWARDS
from splitstep.models.labels import IGNORED
from splitstep.recipe import Training
from splitstep.solver.errors import RunError
from splitstep.tasks.base import METRICS, Task
from splitstep.tasks.memory import out_of_memory
from splitstep.tasks.prediction import Predictor, tensors
from splitstep.training import checkpoints
from splitstep.training.optimizers import MovingAverage, optimizer
from splitstep.training.processes import world
from splitstep.training.rates import rate
from splitstep.training.run import Run
from splitstep.training.signals import Signals, leave_signals_to_the_trainer
from splitstep.training.timing import Clock

PROGRESS = "training.json"  # beside a checkpoint's weights: what the Trainer itself forgets
EMA = "ema.safetensors"
SHARDED: tuple[Any, ...] = (Attention, EvolvedAttention, *FEED_FORWARDS.values())  # what each process holds a part of


class NotFiniteError(RunError):
    """The loss or the gradient is no number; the run stops before the update that would spoil the weights."""


class Pieces(Dataset[dict[str, Tensor]]):
    """The batch of each piece of an update, made by the task."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed

    def __getitems__(self, piece: Piece) -> dict[str, Tensor]:
        """What the model takes; a piece that does not count has its labels ignored."""
        batch = tensors(self.task.training_batch(piece, seed=self.seed))
        if not piece.counted:
            batch = {name: _uncounted(name, tensor) for name, tensor in batch.items()}
        return batch


def _uncounted(name: str, tensor: Tensor) -> Tensor:
    if "label" in name:
        return torch.full_like(tensor, IGNORED)
    return torch.zeros_like(tensor) if name.startswith("num_") else tensor


def _as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


class SplitstepTrainer(Trainer):
    """Trains a model on a task by a recipe's settings, in a run folder."""

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        task: Task,
        settings: Training,
        run: Run,
        plan: Plan,
        updates: int,
        signals: Signals,
        show: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self.task, self.settings, self.run, self.plan = task, settings, run, plan
        self.updates, self.signals = updates, signals
        arguments = training_arguments(settings, run, updates)
        world = max(arguments.world_size, 1)
        # As many pieces as asked for, rounded up so that every process has the same number of them.
        self.pieces = -(-settings.micro_batches // world) * world
        arguments.gradient_accumulation_steps = self.pieces // world
        self.clock = Clock()
        callbacks = [_Book(self, show), _Flow(self)]
        self.ema = MovingAverage(settings.ema) if settings.ema is not None else None
        self.examples = Pieces(task, settings.seed)
        super().__init__(model, arguments, train_dataset=self.examples, eval_dataset=self.examples, callbacks=callbacks)
        self.remove_callback(PrinterCallback)
        if run.folder.is_dir() and self.is_world_process_zero():
            self.add_callback(_tensorboard(run.folder / "tensorboard"))
        self.loss_is_scaled_for_ga = True
        self.stopping = False
        self._finite = torch.ones((), dtype=torch.bool, device=arguments.device)

    def create_accelerator_and_postprocess(self) -> None:
        """What the processes share the work by; accelerate would leave out sharding on CPU without a word."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.args.world_size > 1 and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model by its operators, which are what the solver calls; accelerate would shard whole layers."""
        if self.is_fsdp_enabled:
            world = self.args.world_size
            mesh = torch.distributed.init_device_mesh(self.args.device.type, (world,))

            def side(p: nn.Parameter) -> Shard | None:
                """By rows, or by the longest side that divides: all must have a part, for they save its state."""
                even = [length if length % world == 0 else 0 for length in p.shape]
                return None if len(p) >= world or not any(even) else Shard(int(np.argmax(even)))

            # Its advice against in-place sums, which the solver does not make.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            for operator in self.model.modules():
                if isinstance(operator, SHARDED):
                    fully_shard(operator, mesh=mesh, shard_placement_fn=side)
            fully_shard(self.model, mesh=mesh, shard_placement_fn=side)
        return super()._prepare_for_training(*args, **kwargs)

    # Batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """All batches of the run, in one pass: where a continued run begins is then one number."""
        world, rank = max(self.args.world_size, 1), self.args.process_index
        stream = Stream(self.plan, self.updates, pieces=self.pieces, rank=rank, world=world)
        return DataLoader(
            self.examples,
            batch_sampler=stream,  # type: ignore[arg-type]
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=self.settings.workers,
            # Forked workers share the mapped files; others get them as copies.
            multiprocessing_context="fork" if self.settings.workers and sys.platform == "linux" else None,
            worker_init_fn=leave_signals_to_the_trainer,
            pin_memory=self.args.device.type == "cuda",
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The pieces of the next update, with the time it took to wait for them."""
        with self.clock.waiting():
            samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counted = [name for name in samples[0] if name.startswith("num_")]
        sums = {name: self._over_all(sum(int(batch.pop(name)) for batch in samples)) for name in counted}
        # An update can have nothing to count, such as not one masked token: its loss is then 0, not 0 / 0.
        self._counts = {f"{name}_in_batch": max(count, 1) for name, count in sums.items()}
        self.clock.items += self.task.units(self._counts["num_items_in_batch"])
        return samples, None

    def _over_all(self, count: int) -> int:
        if self.args.world_size <= 1:
            return count
        return int(self.accelerator.gather(torch.tensor([count], device=self.args.device)).sum())

    # The update

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a micro-batch; one that does not fit is named."""
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items() if tensor.ndim > 1)
            raise RunError(
                f"out of memory in update {self.state.global_step + 1}, with a micro-batch of {shapes}. Less is needed "
                f"with training.micro_batches = {2 * self.pieces}, which changes but the masks of dropout, with "
                "training.gradient_checkpointing = true, or with shorter examples (data.max_length)"
            ) from error

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The part of the update's mean loss that these examples are."""
        smoothing = {"label_smoothing": self.settings.label_smoothing} if self.settings.label_smoothing else {}
        loss = model(**inputs, **self._counts, **smoothing, **self.task.loss_options).loss
        # DDP takes the mean over processes of what is here a sum.
        loss = loss * max(self.args.world_size, 1)
        self._finite = self._finite & loss.detach().isfinite().all()
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the gradient, and the moment to stop: nothing is spoilt before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm)
        fine = bool(self._finite) and bool(torch.as_tensor(norm).isfinite())
        bad, received = self._agreed(int(not fine), self.signals.received or 0)
        if bad:
            raise NotFiniteError(self._not_finite())
        if received:
            self.signals.received, self.stopping = received, True
        return norm

    def _agreed(self, *votes: int) -> list[int]:
        """The largest vote of all processes: what one has met, all act upon."""
        if self.args.world_size <= 1:
            return list(votes)
        ballot = torch.tensor(votes, dtype=torch.int32, device=self.args.device)
        torch.distributed.all_reduce(ballot, torch.distributed.ReduceOp.MAX)
        return ballot.tolist()

    def _not_finite(self) -> str:
        number = self.state.global_step
        update = next(islice(self.plan.updates(), number, None))
        last = checkpoints.checkpoints(self.run.checkpoints)
        kept = f"the last good checkpoint is {last[-1]}" if last else "there was no checkpoint before it"
        shown = ", ".join(map(str, update.indices[:8])) + (", ..." if len(update) > 8 else "")
        return (
            f"the loss or its gradient is not finite in update {number + 1} (epoch {update.epoch + 1}, training "
            f"examples {shown}); {kept}. A lower learning_rate, a longer warmup or clip may help"
        )

    # Optimizer and schedule

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the recipe."""
        if self.optimizer is None:
            self.optimizer = optimizer(self.model if model is None else model, self.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate of the recipe, update by update."""
        if self.lr_scheduler is None:
            width = int(self.model.config.hidden_size)
            peak = self.settings.learning_rate

            def factor(update: int) -> float:
                return rate(self.settings, update, total=self.updates, width=width) / peak

            assert self.optimizer is not None
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """What a checkpoint remembers, at the rate of this run: more updates may be asked for now."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.optimizer is not None:
            schedule: Any = self.lr_scheduler
            bases = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [base * factor(schedule.last_epoch) for base, factor in bases]
            for group, value in zip(self.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = value

    # Evaluation

    def predictor(self, model: nn.Module | None = None) -> Predictor:
        """The model at work, with this process's share."""
        return Predictor(
            model or self.model,
            rank=self.args.process_index,
            world=max(self.args.world_size, 1),
            autocast=torch.bfloat16 if self.settings.precision == "bf16" else None,
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The metrics of the validation split, every example once."""
        begun = time.monotonic()
        metrics = self.task.validate(self.predictor(self._whole()), "valid", select=self.settings.select)
        numbers = {f"eval_{key}": value for key, value in metrics.items() if isinstance(value, int | float)}
        self.clock.pause(time.monotonic() - begun)
        self.log(dict(numbers))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, numbers)
        return numbers

    def _whole(self) -> nn.Module:
        """The model with all its weights: processes with unequal shares cannot evaluate a sharded one."""
        if not self.is_fsdp_enabled:
            return self.model
        weights: dict[str, Any] = {name: cast(DTensor, p).full_tensor() for name, p in self.model.named_parameters()}
        whole = self.task.model()(self.model.config).to(self.args.device)
        whole.load_state_dict(weights | dict(self.model.named_buffers()), strict=False)
        return whole

    # The log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """An entry of the log: numbers that a continued run repeats to the bit, then those of the clock."""
        if "loss" in logs:
            logs = logs | self.clock.lap(self.task.unit)
        elif "train_runtime" in logs:
            return
        entry = {"update": self.state.global_step, **logs}
        self.state.log_history.append(entry)
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs=entry)

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A whole model, with its tokenizer or image processor; the Trainer's own arguments are in the recipe."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.run.checkpoints)
        (folder / "training_args.bin").unlink(missing_ok=True)
        self.task.save_processor(folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint, sealed when all processes have written their part; then the old ones go."""
        folder = self.run.checkpoints / f"{checkpoints.PREFIX}{self.state.global_step}"
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        with checkpoints.or_nothing(folder, needs=(3 if self.ema is None else 4) * weights):  # Adam has two moments
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                if self.ema is not None:
                    save_file(self.ema.weights, folder / EMA)
                (folder / PROGRESS).write_text(json.dumps(self._progress()))
        if self.args.world_size > 1:
            torch.distributed.barrier()
        if self.args.should_save:
            checkpoints.seal(folder)
            checkpoints.rotate(
                self.run.checkpoints,
                keep=self.settings.checkpoints_kept,
                best=self.state.best_global_step or None,
                regular=self.regular,
            )

    def regular(self, update: int) -> bool:
        """Whether an undisturbed run saves here; a signal saves elsewhere too, which no average may notice."""
        every = (self.settings.evaluate_every, self.settings.save_every or self.settings.evaluate_every)
        return update == self.updates or any(update % number == 0 for number in every)

    def _progress(self) -> dict[str, Any]:
        return {
            "loss_sum": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "seconds": self.clock.total,
            "items": self.clock.items,
        }

    def restore(self, folder: Path) -> None:
        """Take up what the Trainer itself forgets."""
        known = json.loads((folder / PROGRESS).read_text())
        self._tr_loss += known["loss_sum"]
        self._globalstep_last_logged = known["last_logged"]
        self.clock = Clock(seconds=known["seconds"], items=known["items"])
        if self.ema is not None:
            self.ema.weights = load_file(folder / EMA)

    def trial_updates(self) -> Iterator[float]:
        """Make the first updates, leaving no trace on the disk; the loss of each."""
        batches = iter(self.get_train_dataloader())
        optimizer = self.create_optimizer()
        model = self.accelerator.prepare_model(self.model)  # in the precision, and compiled, as training has it
        while True:
            samples, _ = self.get_batch_samples(batches, self.args.gradient_accumulation_steps, self.args.device)
            loss = sum(self.training_step(model, inputs).item() for inputs in samples)
            self._get_grad_norm(model)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, or until a signal, from a checkpoint or from the beginning."""
        self._begin_at = checkpoint
        super().train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def training_arguments(settings: Training, run: Run, updates: int) -> TrainingArguments:
    """The settings in the Trainer's words."""
    every = settings.evaluate_every
    sharded: dict[str, Any] = (
        {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "NO_WRAP"}}
        if settings.sharding == "fsdp" and world() > 1
        else {}
    )
    return TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=updates,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        torch_compile=settings.compile,
        gradient_checkpointing=settings.gradient_checkpointing,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=settings.save_every or every,
        metric_for_best_model=settings.select,
        greater_is_better=METRICS[settings.select] is max,
        seed=settings.seed,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        remove_unused_columns=False,
        use_cache=True,
        ddp_find_unused_parameters=False,
        ddp_timeout=settings.timeout,
        **sharded,
    )


class _Flow(TrainerCallback):
    """When a run ends: at a signal, or when evaluations no longer get better."""

    def __init__(self, trainer: SplitstepTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Each process draws its own dropout.
        if self.trainer._begin_at is None:
            torch.manual_seed(int(np.random.SeedSequence((args.seed, args.process_index)).generate_state(1)[0]))
        else:
            self.trainer.restore(self.trainer._begin_at)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer.ema is not None:
            trainer.ema.step(trainer.accelerator.unwrap_model(trainer.model))
        if control.should_evaluate:
            control.should_save = True
        if trainer.stopping:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        patience = self.trainer.settings.patience
        if patience is not None and since_best(state.log_history, self.trainer.settings.select) >= patience:
            control.should_training_stop = True


def since_best(history: list[dict[str, Any]], metric: str) -> int:
    """How many evaluations came after the best."""
    values = [entry[f"eval_{metric}"] for entry in history if f"eval_{metric}" in entry]
    return len(values) - 1 - values.index(METRICS[metric](values)) if values else 0


class _Book(TrainerCallback):
    """Writes the log and shows it."""

    def __init__(self, trainer: SplitstepTrainer, show: Callable[[int, dict[str, Any]], None]) -> None:
        self.trainer, self.show = trainer, show

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.trainer.run.write_metrics(state.log_history)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.trainer.run.log(logs)
            self.show(state.global_step, logs)


def _tensorboard(folder: Path) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder)))
