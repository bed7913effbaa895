"""Where the policy lives: processes, devices and DeepSpeed engines.

`accelerate launch` (or plain `python`) starts the processes; DeepSpeed is used directly. Nothing here can change what is
learned: the loss, the batches and the optimizer's lines are in the recipe.
"""

import datetime
import gc
import logging
import math
import os
import random
import socket
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import numpy as np
import torch
import torch.distributed
import transformers
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

# A slow oracle on one rank must not kill the others, and a dead one must not hold them for ever.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=60)


@dataclass(frozen=True)
class Dist:
    """This process among all processes of the run, and what it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    dtype: torch.dtype  # of parameters and activations: bfloat16, float16 or float32
    zero_stage: int

    @property
    def main(self) -> bool:
        return self.rank == 0


# ---- Start ----


def precision(bf16: bool | None, fp16: bool | None, cuda: bool) -> torch.dtype:
    """The dtype that the flags and the launcher ask for; bf16 on CUDA and fp32 on CPU when nobody says.

    Raises SystemExit when a flag contradicts `accelerate`'s mixed_precision, or fp16 is asked for on CPU. The launcher's
    "no" counts as silence, since `accelerate launch` sets it when it was told nothing.
    """
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if bf16 and fp16:
        raise SystemExit("--bf16 and --fp16 exclude each other: give one of them (neither, with --no-bf16, is fp32)")
    flag = "fp16" if fp16 else "bf16" if bf16 else "fp32" if bf16 is False else None
    if launcher in ("bf16", "fp16") and flag not in (None, launcher):
        raise SystemExit(
            f"the flags ask for {flag} but accelerate was told mixed_precision={launcher}: "
            f"drop the flag, or launch with --mixed_precision {flag.replace('fp32', 'no')}"
        )
    chosen = flag or (launcher if launcher in ("bf16", "fp16") else "bf16" if cuda else "fp32")
    if chosen == "fp16" and not cuda:
        raise SystemExit("fp16 needs CUDA (DeepSpeed refuses it on CPU): use --bf16, or no precision flag for fp32")
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[chosen]


def resolve_zero_stage(zero_stage: int | None) -> int:
    """The ZeRO stage of the flag, else of the launcher's config, else 2. Raises SystemExit when the two disagree."""
    if os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        raise SystemExit(
            "a DeepSpeed config file is not read here, the recipe calls DeepSpeed itself: "
            "set zero_stage in accelerate's config instead (recipes/configs/ has examples)"
        )
    launcher = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if launcher is not None and zero_stage is not None and int(launcher) != zero_stage:
        raise SystemExit(
            f"--zero-stage {zero_stage} but accelerate was told zero_stage {launcher}: drop the flag, "
            f"or launch with `accelerate launch --use_deepspeed --zero_stage {zero_stage} ...`"
        )
    stage = zero_stage if zero_stage is not None else int(launcher) if launcher is not None else 2
    if stage not in (0, 1, 2, 3):
        raise SystemExit(f"--zero-stage {stage} does not exist: use 0, 1, 2 or 3")
    return stage


def init(zero_stage: int | None = None, bf16: bool | None = None, fp16: bool | None = None) -> Dist:
    """Joins the process group (gloo on CPU, NCCL on CUDA) and sets this process's device and threads.

    Without a launcher (`python recipe.py`, or `accelerate launch` on a machine without GPUs) the run is one process, and the
    variables that a launcher would have set are set here. Call it before the actor is created and before any model is loaded.
    """
    cuda = torch.cuda.is_available()
    dtype, stage = precision(bf16, fp16, cuda), resolve_zero_stage(zero_stage)
    if stage == 0 and dtype != torch.float32:  # measured: the losses of the first steps are 10 % off those of ZeRO 1-3 and of fp32
        raise SystemExit("--zero-stage 0 in half precision: DeepSpeed's updates there are not those of ZeRO 1-3; use --zero-stage 1")
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank, world_size, local_rank = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        # accelerate leaves one thread, and once an engine exists the number cannot be changed any more.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        # gloo does; DeepSpeed's own all-reduce would be compiled at the first start, which needs a compiler and half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls, one line for each
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\).* before .*optimizer.step")
    deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT, verbose=False)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Dist(rank, world_size, local_rank, local_world_size, device, dtype, stage)


def check_multiple(flag: str, value: int, factors: dict[str, int]) -> None:
    """Raises SystemExit, with the product and the nearest values that work, unless `value` is a multiple of the factors' product."""
    product = math.prod(factors.values())
    if product <= 0 or value <= 0 or value % product:
        words = " x ".join(f"{name} ({factor})" for name, factor in factors.items())
        near = sorted({max(1, value // max(1, product)) * product, (max(0, value) // max(1, product) + 1) * product} - {0})
        raise SystemExit(f"{flag} {value} is not a multiple of {words} = {product}; the nearest that work: {' and '.join(map(str, near))}")


def check_batch_sizes(world_size: int, train: int, train_per_device: int, rollout: int, buffer_per_device: int | None = None) -> None:
    """Raises SystemExit unless train batches divide into whole micro-batches, and rounds into whole train batches and equal shares.

    buffer_per_device: Oat's --pi-buffer-maxlen-per-device, accepted where it says what is derived.
    """
    check_multiple("--train-batch-size", train, {"processes": world_size, "--train-batch-size-per-device": train_per_device})
    check_multiple("--rollout-batch-size", rollout, {"processes": world_size})
    check_multiple("--rollout-batch-size", rollout, {"--train-batch-size": train})
    share = rollout // world_size
    if buffer_per_device not in (None, share):
        raise SystemExit(
            f"--pi-buffer-maxlen-per-device {buffer_per_device}: it is derived (--rollout-batch-size / processes = {share}); leave it out"
        )


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch. Call it after the actor exists (creating an engine resets the global random state)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ---- Models and engines ----

def load_tokenizer(path: str, flag: str = "--pretrain"):
    """The tokenizer (with a padding token: the EOS where it has none) and the model's context in tokens.

    Raises SystemExit, before anything heavy is loaded, when there is no such model.
    """
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as e:
        raise SystemExit(f"{flag} {path}: no such model: {str(e).strip().splitlines()[0]}") from e
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, config.max_position_embeddings


_zero3_config = None  # transformers reads it through a weak reference: it must outlive every from_pretrained


def load_model(auto_class, path: str, dist: Dist, flash_attn: bool = False, gradient_checkpointing: bool = False, **kwargs):
    """`auto_class.from_pretrained(path)` in the run's dtype, with dropout off; on CPU or, under ZeRO-3, already partitioned.

    Without FlashAttention's package (or on CPU) attention is PyTorch's SDPA; rank 0 says so once.
    Raises SystemExit when the path does not exist or the model does not load.
    """
    global _zero3_config
    if dist.zero_stage == 3 and _zero3_config is None:
        half = {name: {"enabled": dist.dtype == dtype} for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))}
        _zero3_config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1} | half)
    attention = "sdpa"
    if flash_attn:
        try:
            import flash_attn as _  # noqa: F401

            attention = "flash_attention_2" if dist.device.type == "cuda" and dist.dtype != torch.float32 else "sdpa"
        except ImportError:
            attention = "sdpa"
        if attention == "sdpa" and dist.main:
            print("--flash-attn: needs the flash-attn package, CUDA and bf16 or fp16; using PyTorch's SDPA instead", flush=True)
    try:
        config = AutoConfig.from_pretrained(path)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
                setattr(config, key, 0.0)
        if "num_labels" in kwargs:
            config.num_labels = kwargs.pop("num_labels")
        model = auto_class.from_pretrained(path, config=config, dtype=dist.dtype, attn_implementation=attention, **kwargs)
    except (OSError, ValueError, KeyError) as e:
        raise SystemExit(f"cannot load a model from {path!r}: {str(e).strip().splitlines()[0]}") from e
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for AdamW: matrices decay, biases and norms never do."""
    plain = [p for n, p in model.named_parameters() if p.requires_grad and (n.endswith("bias") or "norm" in n.lower() or "ln_" in n)]
    names = {id(p) for p in plain}
    decayed = [p for p in model.parameters() if p.requires_grad and id(p) not in names]
    return [g for g in ({"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}) if g["params"]]


def lr_schedule(optimizer: torch.optim.Optimizer, kind: str, total_steps: int, warmup_ratio: float, floor: float = 0.1):
    """Learning-rate schedule over `total_steps` optimizer steps, with ceil(total_steps * warmup_ratio) linear warm-up steps.

    `cosine_with_min_lr` falls to `floor` x peak, `linear` and `polynomial` (power 1) to 0, `constant` stays at the peak
    (and has no warm-up). The first warm-up step is not zero: it would waste a batch of labels. Past the end the last value stays.
    Raises SystemExit for another kind.
    """
    if kind not in ("cosine_with_min_lr", "linear", "polynomial", "constant"):
        raise SystemExit(f"--lr-scheduler {kind} does not exist: use cosine_with_min_lr, linear, polynomial or constant")
    warmup = 0 if kind == "constant" else math.ceil(total_steps * warmup_ratio)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if kind == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine_with_min_lr" else 1 - done

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def initialize(model, dist: Dist, optimizer=None, scheduler=None, max_norm: float = 0.0, adam_offload: bool = False, offload: bool = False):
    """A DeepSpeed engine around `model`; without an optimizer it is frozen and in eval mode (a reference, a reward model).

    Gradient accumulation is ours: `backward` only accumulates, `engine.step()` is called once per train batch and updates.
    A frozen model is partitioned when the run is ZeRO-3, else it is a plain module on the device (on the CPU with `offload`).
    """
    if optimizer is None:
        model.requires_grad_(False).eval()
        if dist.zero_stage < 3:
            return model if offload else model.to(dist.device)
    zero = {"stage": dist.zero_stage}
    if adam_offload and optimizer is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": dist.device.type == "cuda"}
    if offload and dist.zero_stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": dist.device.type == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only bookkeeping: rows per micro-batch are the recipe's
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW with offload: DeepSpeedCPUAdam would have to be compiled
        "bf16": {"enabled": dist.dtype == torch.bfloat16},
        "fp16": {"enabled": dist.dtype == torch.float16},
        "steps_per_print": None,
    }
    if optimizer is None:
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.eval()
        return engine
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    engine.train()
    if dist.zero_stage == 0 and dist.dtype == torch.float32:  # here DeepSpeed clips without telling the norm

        def clip() -> None:
            engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)

        engine.clip_fp32_gradients = clip
    return engine


def backward(engine, loss_sum: torch.Tensor, count: float) -> None:
    """Accumulates the gradient of (sum of `loss_sum` over all ranks and micro-batches) / `count`.

    loss_sum: scalar, the SUM over this micro-batch's rows (or tokens) that count; a zero-weight micro-batch gives 0.
    count: how many rows (or tokens) count in the whole train batch, over all ranks.
    DeepSpeed averages over ranks, hence the world size here. This is exact however the rows fall on ranks and micro-batches
    (the mean of micro-batch means is not). Every rank must call it equally often, or ZeRO-3 hangs.
    """
    engine.backward(loss_sum * (engine.world_size / max(count, 1)), scale_wrt_gas=False)


def grad_norm(engine) -> float:
    """Global gradient norm before clipping at the last `engine.step()`; NaN at ZeRO-0 in fp32 without clipping."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


def zero_stage(engine) -> int:
    """The ZeRO stage that really runs (a launcher's config alone changes nothing in a script that calls DeepSpeed itself)."""
    return engine.zero_optimization_stage()


def named_weights(engine, dist: Dist) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters by checkpoint name, whole, for the actor; a tied weight comes under each of its names.

    Every rank must exhaust the iterator: under ZeRO-3 each parameter is gathered on all ranks. There the tensor is cloned,
    since vLLM keeps it until its q/k/v or gate/up partners arrive, and DeepSpeed frees it before that.
    """
    module = getattr(engine, "module", engine)
    for name, param in module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([param], enabled=dist.zero_stage == 3):
            weight = param.detach().clone() if dist.zero_stage == 3 else param.detach()
        yield name, weight


# ---- Between ranks ----


def gather(value, dist: Dist) -> list:
    """`value` of every rank, in rank order, on every rank. Values are pickled: only for what this run itself made."""
    if dist.world_size == 1:
        return [value]
    values = [None] * dist.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def barrier(dist: Dist) -> None:
    if dist.world_size > 1:
        torch.distributed.barrier()


def agree(error: BaseException | None, dist: Dist) -> None:
    """Ends the run on every rank, with one line that says where, when any rank has an error. Call it before the next collective.

    Without it the failed rank leaves and the others wait in a collective until it times out.
    """
    line = None
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        line = f"{type(error).__name__}: {error}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")
    failed = [f"{line} (rank {rank})" if dist.world_size > 1 else line for rank, line in enumerate(gather(line, dist)) if line]
    if failed:
        raise SystemExit(failed[0]) from error


def close(dist: Dist) -> None:
    """Leaves the process group; the actor, whose engine leaves it too, is closed before."""
    gc.collect()
    if torch.distributed.is_initialized():
        barrier(dist)
        torch.distributed.destroy_process_group()
