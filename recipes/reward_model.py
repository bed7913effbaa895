# docs: https://github.com/huggingface/transformers/blob/main/docs/source/en/tasks/sequence_classification.md
"""Reward model: fit the score of a response so that the chosen one of a pair scores higher.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022), arXiv 2203.02155, equation 1, which is the
model of Bradley & Terry (1952): P(chosen wins) = sigmoid(score(chosen) - score(rejected)).

differs from the paper in:
  * one pair a prompt, not all pairs of a ranking of 4 to 9 responses;
  * any body, encoder or causal, that `AutoModelForSequenceClassification` loads with one logit; `--freeze-body` trains the head alone,
    which is what a few hundred pairs can carry;
  * identical pairs say nothing: they are masked, counted, and not part of the mean.

dimensions: B pairs of a micro-batch, N = 2 B rows (all chosen, then all rejected), S tokens.

data: rows with --prompt-key (text or messages), --chosen-key and --rejected-key (text, or messages whose last one is the response).

    python recipes/reward_model.py                                                     the embedded policy as body, embedded pairs
    accelerate launch --use_deepspeed --num_processes 2 recipes/reward_model.py
    python recipes/reward_model.py --pretrain ENCODER --preference-data pairs.jsonl --freeze-body --learning-rate 1e-2 --max-epochs 20
    accelerate launch recipes/dpo_online.py --oracle reward_model --oracle-model output/RUN/model
"""

import math
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from oat_lib import cli, data, learner, saving, tiny, tracking
from oracles.reward_model import render, segments


@dataclass
class Args:
    # Model
    pretrain: str = tiny.POLICY  # body to start from: a directory or a hub name; an SFT model of the same kind of text is best
    from_scratch: bool = False  # take only the config and the tokenizer of --pretrain; the weights are drawn from --seed
    freeze_body: bool = False  # train the head alone
    flash_attn: bool = False  # FlashAttention 2 where it is installed, else PyTorch's SDPA
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    # Data
    preference_data: str = tiny.PAIRS  # hub name, config@name, folder with train.jsonl and test.jsonl, or a json/jsonl/csv/parquet file
    eval_data: str | None = None  # the same for held-out pairs; default: --preference-data
    train_split: str = "train"  # split to train on
    eval_split: str | None = "test"  # split to evaluate on; None: no evaluation
    prompt_key: str = "prompt"  # column of prompts, text or messages
    chosen_key: str = "chosen"  # column of the better responses
    rejected_key: str = "rejected"  # column of the worse responses
    max_train: int = -1  # first rows of the train split; -1: all
    max_eval: int = 2000  # first rows of the eval split
    max_model_len: int = 512  # tokens of prompt and response; pairs with a longer row are dropped and counted
    # Training
    train_batch_size: int = 64  # pairs an optimizer step, over all processes
    train_batch_size_per_device: int = 64  # pairs a micro-batch: an upper bound
    max_epochs: float = 2.0  # passes over the data; a last batch that is not full is left out
    learning_rate: float = 5e-4  # peak; for a real body 1e-5, for a head alone 1e-3 to 1e-2
    lr_scheduler: str = "cosine_with_min_lr"  # cosine_with_min_lr | linear | polynomial | constant
    lr_warmup_ratio: float = 0.05  # share of the steps with a rising rate
    adam_beta_1: float = 0.9  # Adam, first moment
    adam_beta_2: float = 0.95  # Adam, second moment
    l2: float = 0.0  # weight decay of matrices
    max_norm: float = 1.0  # gradient clipping
    # Placement
    zero_stage: int | None = None  # ZeRO 0-3; default: what the launcher says, else 2
    bf16: bool | None = None  # default: what the launcher says, else on with CUDA
    fp16: bool | None = None  # CUDA only
    adam_offload: bool = False  # optimizer states on the CPU
    # Run
    eval_steps: int = 25  # optimizer steps between evaluations; -1: only the last
    save_steps: int = -1  # optimizer steps between saved models; -1: only the final one
    save_ckpt: bool = False  # with --save-steps: also save all that is needed to resume
    resume_dir: str | None = None  # run folder to go on from
    save_path: str = "output"  # the run's folder is made in it; the model is in its model/
    seed: int = 0  # order of the data, and new weights (the head's always)
    use_wb: bool = False  # Weights & Biases
    wb_org: str | None = None  # its entity
    wb_group: str | None = None  # its group
    wb_project: str = "oat-recipes"  # its project
    wb_run_name: str = "reward_model"  # name of the run and start of the folder's name


# ---- Data ----
def response_text(value: str | list[dict]) -> str:
    """A response as text; of a list of messages the last one's content."""
    return value[-1]["content"] if isinstance(value, list) else value


def load(args: Args, spec: str, split: str, limit: int, tokenizer, flag: str) -> tuple[list[tuple[list[int], list[int], float]], dict]:
    """(chosen ids, rejected ids, weight 1 or 0) of each pair, and how many were read, kept and dropped; weight 0: the two are identical.

    Rows are rendered as the oracle renders them: a reward model is only right on the form that it was trained on.
    """
    rows = data.load_rows(spec, split, flag)
    rows = rows.select(range(min(limit, len(rows)))) if limit > 0 else rows
    kept, report = [], dict(rows=len(rows), kept=0, too_long=0, empty=0, identical=0)
    columns = (data.column(rows, args.prompt_key, "--prompt-key"), data.column(rows, args.chosen_key, "--chosen-key"),
               data.column(rows, args.rejected_key, "--rejected-key"))  # fmt: skip
    for prompt, chosen, rejected in zip(*columns, strict=True):
        if not prompt or chosen is None or rejected is None:
            report["empty"] += 1
            continue
        chosen, rejected = response_text(chosen), response_text(rejected)
        pair = render(tokenizer, prompt, chosen), render(tokenizer, prompt, rejected)
        if max(map(len, pair)) > args.max_model_len:
            report["too_long"] += 1
            continue
        report["identical"] += chosen == rejected
        kept.append((*pair, float(chosen != rejected)))
    report["kept"] = len(kept)
    if not any(weight for _, _, weight in kept):
        raise SystemExit(f"{flag} {spec} (split {split!r}): no pair is left of {report}; --max-model-len is {args.max_model_len}")
    return kept, report


def micro_batches(pairs: list, size: int, dist: learner.Dist) -> list[list]:
    """This rank's share in micro-batches; the same number on every rank (ZeRO-3 would hang otherwise), so some may be short or empty.

    Pairs of similar length go together, which saves padding and changes nothing else: the loss is a sum over the global batch.
    """
    count = math.ceil(math.ceil(len(pairs) / dist.world_size) / size)
    mine = sorted(pairs, key=lambda pair: max(len(pair[0]), len(pair[1])))[dist.rank :: dist.world_size]
    return [mine[k * size : (k + 1) * size] for k in range(count)]


# ---- Scores and loss ----
def scores(model, pairs: list, tokenizer, pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """chosen_B, rejected_B (fp32 logits) and weight_B; no pair at all becomes one pair of weight 0."""
    pairs = pairs or [([int(pad_id == 0)] * 2, [int(pad_id == 0)] * 2, 0.0)]  # any token that is not padding
    rows = [chosen for chosen, _, _ in pairs] + [rejected for _, rejected, _ in pairs]
    ids_NS, attention_NS = data.pad(rows, pad_id)
    inputs = dict(input_ids=ids_NS, attention_mask=attention_NS)
    if tokenizer.chat_template is None and tokenizer.sep_token_id is not None:  # encoders that tell prompt and response by segment
        config = getattr(model, "module", model).config
        if getattr(config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = data.pad([segments(tokenizer, row) for row in rows], 0)[0]
    scores_N = model(**{name: value.to(device) for name, value in inputs.items()}).logits[:, 0].float()
    return *scores_N.chunk(2), torch.tensor([weight for _, _, weight in pairs], device=device)


def bt_loss_sum(chosen_B: torch.Tensor, rejected_B: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Sum over pairs of weight x -log sigmoid(chosen - rejected), nats."""
    return -(F.logsigmoid(chosen_B - rejected_B) * weight_B).sum()


# ---- Evaluate ----
@torch.no_grad()
def evaluate(engine, pairs: list, args: Args, tokenizer, pad_id: int, dist: learner.Dist) -> dict[str, float]:
    """Loss, and share of held-out pairs in the right order (ties count one half) with its 95 % interval; identical pairs left out."""
    engine.eval()
    total = torch.zeros(3, dtype=torch.float64)  # loss, right, pairs
    for micro in micro_batches(pairs, args.train_batch_size_per_device, dist):
        chosen_B, rejected_B, weight_B = scores(engine, micro, tokenizer, pad_id, dist.device)
        right_B = (chosen_B > rejected_B).float() + 0.5 * (chosen_B == rejected_B).float()
        total += torch.stack([bt_loss_sum(chosen_B, rejected_B, weight_B), (right_B * weight_B).sum(), weight_B.sum()]).double().cpu()
    engine.train()
    loss, right, count = (sum(column) for column in zip(*learner.gather(total.tolist(), dist), strict=True))
    low, high = tracking.wilson(right / count, round(count))
    return {"eval/loss": loss / count, "eval/accuracy": right / count, "eval/accuracy_low": low, "eval/accuracy_high": high}


def main(args: Args) -> None:
    # ---- Setup ----
    dist = learner.init(args.zero_stage, args.bf16, args.fp16)
    learner.seed_all(args.seed)

    # ---- Data ----
    tokenizer, context = learner.load_tokenizer(args.pretrain)
    args.max_model_len, pad_id = min(args.max_model_len, context), tokenizer.pad_token_id
    train, train_report = load(args, args.preference_data, args.train_split, args.max_train, tokenizer, "--preference-data")
    held_out, eval_report = [], None
    if args.eval_split is not None:
        held_out, eval_report = load(args, args.eval_data or args.preference_data, args.eval_split, args.max_eval, tokenizer, "--eval-data")
    total_steps = int(len(train) * args.max_epochs) // args.train_batch_size
    if total_steps < 1:
        raise SystemExit(f"{len(train)} pairs x {args.max_epochs:g} epochs do not fill one --train-batch-size of {args.train_batch_size}")

    # ---- Models ----
    if args.from_scratch:
        config = AutoConfig.from_pretrained(args.pretrain, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config, dtype=dist.dtype)
    else:
        model = learner.load_model(
            AutoModelForSequenceClassification, args.pretrain, dist, args.flash_attn, args.gradient_checkpointing, num_labels=1
        )
    model.config.pad_token_id = pad_id  # causal bodies are read at the last token that is not this one
    if args.freeze_body:
        model.base_model.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        learner.param_groups(model, args.l2), lr=args.learning_rate, betas=(args.adam_beta_1, args.adam_beta_2)
    )
    scheduler = learner.lr_schedule(optimizer, args.lr_scheduler, total_steps, args.lr_warmup_ratio)
    engine = learner.initialize(model, dist, optimizer, scheduler, max_norm=args.max_norm, adam_offload=args.adam_offload)

    # what must survive a restart, beside the engine and the random states; the place in the data follows from the step
    state = dict(step=0, pairs=0)
    resume_from = None
    if args.resume_dir:
        checkpoint = saving.latest_checkpoint(args.resume_dir)
        loaded = saving.load_checkpoint(engine, checkpoint, dist)
        state, resume_from = {key: loaded[key] for key in state}, checkpoint.parent.parent
    run = tracking.Run(
        args.save_path, args.wb_run_name, asdict(args) | dict(zero_stage=learner.zero_stage(engine)), dist, total_steps,
        panels=[["learner/loss", "eval/loss"], ["learner/accuracy", "eval/accuracy"], ["learner/grad_norm"]], use_wb=args.use_wb,
        wb_project=args.wb_project, wb_group=args.wb_group, wb_org=args.wb_org, resume_from=resume_from, resume_step=state["step"],
    )  # fmt: skip
    run.print(f"train pairs {train_report}, held-out pairs {eval_report}, {total_steps} steps")
    run.print(f"first chosen row: {tokenizer.decode(train[0][0])!r}\nfirst rejected row: {tokenizer.decode(train[0][1])!r}")
    if held_out and state["step"] == 0:
        run.log(0, evaluate(engine, held_out, args, tokenizer, pad_id, dist), show=("eval/accuracy",))

    # ---- Loop ----
    while state["step"] < total_steps:
        started = time.time()
        # Collect
        batch = [pair for _, pair in data.take(state["step"] * args.train_batch_size, args.train_batch_size, train, args.seed)]
        count = sum(weight for _, _, weight in batch)
        # Learn
        loss, right, margin = 0.0, 0.0, 0.0
        for micro in micro_batches(batch, args.train_batch_size_per_device, dist):
            chosen_B, rejected_B, weight_B = scores(engine, micro, tokenizer, pad_id, dist.device)
            loss_sum = bt_loss_sum(chosen_B, rejected_B, weight_B)
            learner.backward(engine, loss_sum, count)
            loss += loss_sum.item()
            right += ((chosen_B > rejected_B) * weight_B).sum().item()
            margin += ((chosen_B - rejected_B) * weight_B).sum().item()
        lr = optimizer.param_groups[0]["lr"]
        engine.step()
        state["step"] += 1
        state["pairs"] += int(count)
        # Log
        loss, right, margin = (sum(column) / max(count, 1) for column in zip(*learner.gather((loss, right, margin), dist), strict=True))
        metrics = {"learner/loss": loss, "learner/accuracy": right, "learner/margin": margin, "learner/lr": lr,
                   "learner/grad_norm": learner.grad_norm(engine), "learner/masked_pairs": len(batch) - int(count),
                   "misc/epoch": state["step"] * args.train_batch_size / len(train), "misc/pairs": state["pairs"],
                   "time/step": time.time() - started}  # fmt: skip
        # Evaluate
        last = state["step"] == total_steps
        if held_out and (last or (args.eval_steps > 0 and state["step"] % args.eval_steps == 0)):
            metrics |= evaluate(engine, held_out, args, tokenizer, pad_id, dist)
        run.log(state["step"], metrics, show=("learner/loss", "eval/accuracy"))
        if not math.isfinite(loss):
            raise SystemExit(f"step {state['step']}: the loss is {loss}; lower --learning-rate")
        # Save
        if args.save_steps > 0 and state["step"] % args.save_steps == 0:
            saving.save_hf(engine, tokenizer, run.dir / "saved_models" / f"step_{state['step']:05d}", dist)
            if args.save_ckpt:
                saving.save_checkpoint(engine, state, run.dir / "checkpoints" / f"step_{state['step']:05d}", dist)

    # ---- Finish ----
    saving.save_hf(engine, tokenizer, run.dir / "model", dist)
    if held_out:
        share = [metrics[f"eval/accuracy{suffix}"] for suffix in ("", "_low", "_high")]
        run.print(f"held-out accuracy {share[0]:.3f} (95 % interval {share[1]:.3f} to {share[2]:.3f})")
    run.print(f"model: {run.dir}/model")
    run.finish()
    learner.close(dist)


if __name__ == "__main__":
    main(cli.parse(Args))
