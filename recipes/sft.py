# docs: https://github.com/huggingface/transformers/blob/main/docs/source/en/chat_templating.md
"""Supervised fine-tuning: maximise the likelihood of the responses, given what comes before them.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022), arXiv 2203.02155, section 3.5 (first stage);
used as cold start of nearly every alignment run, and here also to make the embedded policy.

differs from the paper in:
  * the loss is the mean over all response tokens of the global batch: long responses weigh more than short ones, and how rows fall on
    processes and micro-batches changes nothing;
  * every assistant turn of a conversation is trained, up to and including its end-of-turn token; nothing else is (no packing, no dropout);
  * no mix of pre-training data and no choice of a checkpoint by a reward model.

dimensions: B rows of a micro-batch, S tokens.

data: rows with --msg-key (a list of {role, content}: an optional system message, then user and assistant turns), else rows with
--input-key (text or messages) and --output-key.

    python recipes/sft.py                                                              the embedded policy on embedded demonstrations
    accelerate launch --use_deepspeed --num_processes 2 recipes/sft.py
    accelerate launch --config_file recipes/configs/zero3.yaml recipes/sft.py --pretrain Qwen/Qwen2.5-1.5B --prompt-data my.jsonl --bf16
"""

import math
import time
from dataclasses import asdict, dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oat_lib import cli, data, learner, logprobs, saving, tiny, tracking


@dataclass
class Args:
    # Model
    pretrain: str = tiny.POLICY  # model to start from: a directory or a hub name
    from_scratch: bool = False  # take only the config and the tokenizer of --pretrain; the weights are drawn from --seed
    flash_attn: bool = False  # FlashAttention 2 where it is installed, else PyTorch's SDPA
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    # Data
    prompt_data: str = tiny.DEMONSTRATIONS  # hub name, config@name, folder with train.jsonl and test.jsonl, or a jsonl/csv/parquet file
    eval_data: str | None = None  # the same for held-out rows; default: --prompt-data
    train_split: str = "train"  # split to train on
    eval_split: str | None = "test"  # split to evaluate on; None: no evaluation
    msg_key: str = "messages"  # column of conversations; where the data lacks it, --input-key and --output-key are read
    input_key: str = "prompt"  # column of prompts, text or messages
    output_key: str = "response"  # column of responses
    apply_chat_template: bool | None = None  # default: if the tokenizer has one; without it a row is prompt + response + EOS
    system_prompt: str | None = None  # put before (or in place of) the system message of every conversation
    max_train: int = -1  # first rows of the train split; -1: all
    max_eval: int = 1000  # first rows of the eval split
    max_model_len: int = 512  # tokens; longer rows are dropped and counted
    # Training
    train_batch_size: int = 32  # rows an optimizer step, over all processes
    train_batch_size_per_device: int = 32  # rows a micro-batch: an upper bound
    max_epochs: float = 3.0  # passes over the data; a last batch that is not full is left out
    learning_rate: float = 5e-4  # peak; for a real model 1e-5 to 2e-5
    lr_scheduler: str = "cosine_with_min_lr"  # cosine_with_min_lr | linear | polynomial | constant
    lr_warmup_ratio: float = 0.03  # share of the steps with a rising rate
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
    seed: int = 0  # order of the data, and weights with --from-scratch
    use_wb: bool = False  # Weights & Biases
    wb_org: str | None = None  # its entity
    wb_group: str | None = None  # its group
    wb_project: str = "oat-recipes"  # its project
    wb_run_name: str = "sft"  # name of the run and start of the folder's name


# ---- Data ----
def conversations(rows, args: Args, tokenizer) -> list[list[dict] | tuple[str, str]]:
    """One conversation a row: messages, or (prompt, response) where no chat template applies."""
    if args.msg_key in rows.column_names:
        talks = [list(messages or []) for messages in data.column(rows, args.msg_key, "--msg-key")]
        data.wants_chat_template(tokenizer, talks[0], args.apply_chat_template)  # refuses what cannot be rendered
    else:
        prompts, responses = data.column(rows, args.input_key, "--input-key"), data.column(rows, args.output_key, "--output-key")
        if not data.wants_chat_template(tokenizer, prompts[0], args.apply_chat_template)[0]:
            if args.system_prompt:
                raise SystemExit("--system-prompt needs a chat template")
            return [(p or "", r or "") for p, r in zip(prompts, responses, strict=True)]
        heads = [[dict(role="user", content=p or "")] if not isinstance(p, list) else p for p in prompts]
        talks = [[*head, dict(role="assistant", content=r)] if r else head for head, r in zip(heads, responses, strict=True)]
    if args.system_prompt:
        talks = [[dict(role="system", content=args.system_prompt), *(m for m in talk if m["role"] != "system")] for talk in talks]
    return talks


def encode(tokenizer, talk: list[dict] | tuple[str, str]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and for each token 1 if it is trained.

    Trained: what the assistant writes, up to and including the token that ends its turn (not a line break that a template puts after it).
    The text is tokenised in the pieces in which it comes to be: prompt as the actor gets it, response, next prompt, next response.
    Raises ValueError where the template is not incremental: a conversation so far must be rendered as a prefix of the whole. (Templates
    that drop earlier thinking are not; training on them would teach what is never sampled.)
    """
    eos = tokenizer.eos_token_id
    if isinstance(talk, tuple):
        ids = data.render(tokenizer, talk[0], False)[1]
        response = tokenizer(talk[1], add_special_tokens=False)["input_ids"] + [eos]
        return ids + response, [0] * len(ids) + [1] * len(response)
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    ids, mask, text = [], [], ""
    for i, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        opened, opened_ids = data.render(tokenizer, talk[:i], True)
        closed = tokenizer.apply_chat_template(talk[: i + 1], tokenize=False)
        if not (opened.startswith(text) and closed.startswith(opened) and whole.startswith(closed)):
            raise ValueError(f"the chat template renders turn {i} of a conversation differently once more turns follow")
        piece = opened_ids if not ids else tokenizer(opened[len(text) :], add_special_tokens=False)["input_ids"]
        turn = tokenizer(closed[len(opened) :], add_special_tokens=False)["input_ids"]
        trained = len(turn) - turn[::-1].index(eos) if eos in turn else len(turn)
        ids += piece + turn
        mask += [0] * len(piece) + [1] * trained + [0] * (len(turn) - trained)
        text = closed
    return ids, mask  # what follows the last response is left out: nothing in it is trained


def load(args: Args, spec: str, split: str, limit: int, tokenizer, flag: str) -> tuple[list[tuple[list[int], list[int]]], dict]:
    """Encoded rows, and how many were read, kept and dropped."""
    rows = data.load_rows(spec, split, flag)
    rows = rows.select(range(min(limit, len(rows)))) if limit > 0 else rows
    kept, report = [], dict(rows=len(rows), kept=0, too_long=0, no_response=0)
    for index, talk in enumerate(conversations(rows, args, tokenizer)):
        try:
            ids, mask = encode(tokenizer, talk)
        except ValueError as e:
            raise SystemExit(f"{flag} {spec}, row {index} of split {split!r}: {e}") from e
        if not any(mask):
            report["no_response"] += 1
        elif len(ids) > args.max_model_len:
            report["too_long"] += 1
        else:
            kept.append((ids, mask))
    report["kept"] = len(kept)
    if not kept:
        raise SystemExit(f"{flag} {spec} (split {split!r}): no row is left of {report}; --max-model-len is {args.max_model_len}")
    return kept, report


def micro_batches(rows: list, size: int, dist: learner.Dist) -> list[list]:
    """This rank's share in micro-batches; the same number on every rank (ZeRO-3 would hang otherwise), so some may be short or empty.

    Rows of similar length go together, which saves padding and changes nothing else: the loss is a sum over the global batch.
    """
    count = math.ceil(math.ceil(len(rows) / dist.world_size) / size)
    mine = sorted(rows, key=lambda row: len(row[0]))[dist.rank :: dist.world_size]
    return [mine[k * size : (k + 1) * size] for k in range(count)]


def collate(rows: list[tuple[list[int], list[int]]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids_BS, attention_BS, mask_BS, padded on the right; no row at all becomes one row of which nothing is trained."""
    rows = rows or [([pad_id, pad_id], [0, 0])]
    ids_BS, attention_BS = data.pad([ids for ids, _ in rows], pad_id)
    mask_BS, _ = data.pad([mask for _, mask in rows], 0)
    return ids_BS.to(device), attention_BS.to(device), mask_BS.float().to(device)


# ---- Loss ----
def nll_sum(token_logps_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    """Minus the sum of the log-probs of the trained tokens, nats. Both (B, S-1): entry t is about token t + 1."""
    return -(token_logps_BS * mask_BS).sum()


# ---- Evaluate ----
@torch.no_grad()
def evaluate(engine, rows: list, args: Args, pad_id: int, dist: learner.Dist) -> dict[str, float]:
    """Mean loss (nats a token) and perplexity on held-out rows."""
    engine.eval()
    total, count = 0.0, 0.0
    for micro in micro_batches(rows, args.train_batch_size_per_device, dist):
        ids_BS, attention_BS, mask_BS = collate(micro, pad_id, dist.device)
        total += nll_sum(logprobs.token_logprobs(engine, ids_BS, attention_BS), mask_BS[:, 1:]).item()
        count += mask_BS[:, 1:].sum().item()
    engine.train()
    total, count = (sum(column) for column in zip(*learner.gather((total, count), dist), strict=True))
    return {"eval/loss": total / count, "eval/perplexity": math.exp(min(total / count, 80.0))}


def main(args: Args) -> None:
    # ---- Setup ----
    dist = learner.init(args.zero_stage, args.bf16, args.fp16)
    learner.seed_all(args.seed)

    # ---- Data ----
    tokenizer, context = learner.load_tokenizer(args.pretrain)
    if tokenizer.eos_token_id is None:
        raise SystemExit(f"--pretrain {args.pretrain}: its tokenizer has no EOS, so a response could not learn to end")
    args.max_model_len, pad_id = min(args.max_model_len, context), tokenizer.pad_token_id
    train, train_report = load(args, args.prompt_data, args.train_split, args.max_train, tokenizer, "--prompt-data")
    held_out, eval_report = [], None
    if args.eval_split is not None:
        held_out, eval_report = load(args, args.eval_data or args.prompt_data, args.eval_split, args.max_eval, tokenizer, "--eval-data")
    total_steps = int(len(train) * args.max_epochs) // args.train_batch_size
    if total_steps < 1:
        raise SystemExit(f"{len(train)} rows x {args.max_epochs:g} epochs do not fill one --train-batch-size of {args.train_batch_size}")

    # ---- Models ----
    if args.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.pretrain), dtype=dist.dtype)
    else:
        model = learner.load_model(AutoModelForCausalLM, args.pretrain, dist, args.flash_attn, args.gradient_checkpointing)
    optimizer = torch.optim.AdamW(
        learner.param_groups(model, args.l2), lr=args.learning_rate, betas=(args.adam_beta_1, args.adam_beta_2)
    )
    scheduler = learner.lr_schedule(optimizer, args.lr_scheduler, total_steps, args.lr_warmup_ratio)
    engine = learner.initialize(model, dist, optimizer, scheduler, max_norm=args.max_norm, adam_offload=args.adam_offload)

    # what must survive a restart, beside the engine and the random states; the place in the data follows from the step
    state = dict(step=0, tokens=0)
    resume_from = None
    if args.resume_dir:
        checkpoint = saving.latest_checkpoint(args.resume_dir)
        loaded = saving.load_checkpoint(engine, checkpoint, dist)
        state, resume_from = {key: loaded[key] for key in state}, checkpoint.parent.parent
    run = tracking.Run(
        args.save_path, args.wb_run_name, asdict(args) | dict(zero_stage=learner.zero_stage(engine)), dist, total_steps,
        panels=[["learner/loss", "eval/loss"], ["learner/grad_norm"], ["learner/lr"]], use_wb=args.use_wb, wb_project=args.wb_project,
        wb_group=args.wb_group, wb_org=args.wb_org, resume_from=resume_from, resume_step=state["step"],
    )  # fmt: skip
    run.print(f"train rows {train_report}, held-out rows {eval_report}, {total_steps} steps")
    ids, trained = train[0][0], [token for token, m in zip(*train[0], strict=True) if m]
    run.print(f"first row: {tokenizer.decode(ids)!r}\ntrained of it: {tokenizer.decode(trained)!r}")
    if held_out and state["step"] == 0:
        run.log(0, evaluate(engine, held_out, args, pad_id, dist), show=("eval/loss",))

    # ---- Loop ----
    while state["step"] < total_steps:
        started = time.time()
        # Collect
        batch = [row for _, row in data.take(state["step"] * args.train_batch_size, args.train_batch_size, train, args.seed)]
        trained_tokens = sum(sum(mask[1:]) for _, mask in batch)
        # Learn
        loss = 0.0
        for micro in micro_batches(batch, args.train_batch_size_per_device, dist):
            ids_BS, attention_BS, mask_BS = collate(micro, pad_id, dist.device)
            loss_sum = nll_sum(logprobs.token_logprobs(engine, ids_BS, attention_BS), mask_BS[:, 1:])
            learner.backward(engine, loss_sum, trained_tokens)
            loss += loss_sum.item() / trained_tokens
        lr = optimizer.param_groups[0]["lr"]
        engine.step()
        state["step"] += 1
        state["tokens"] += trained_tokens
        # Log
        metrics = {"learner/loss": sum(learner.gather(loss, dist)), "learner/lr": lr, "learner/grad_norm": learner.grad_norm(engine),
                   "misc/epoch": state["step"] * args.train_batch_size / len(train), "misc/tokens": state["tokens"],
                   "time/step": time.time() - started}  # fmt: skip
        # Evaluate
        last = state["step"] == total_steps
        if held_out and (last or (args.eval_steps > 0 and state["step"] % args.eval_steps == 0)):
            metrics |= evaluate(engine, held_out, args, pad_id, dist)
        run.log(state["step"], metrics, show=("learner/loss", "eval/loss"))
        if not math.isfinite(metrics["learner/loss"]):
            raise SystemExit(f"step {state['step']}: the loss is {metrics['learner/loss']}; lower --learning-rate")
        # Save
        if args.save_steps > 0 and state["step"] % args.save_steps == 0:
            saving.save_hf(engine, tokenizer, run.dir / "saved_models" / f"step_{state['step']:05d}", dist)
            if args.save_ckpt:
                saving.save_checkpoint(engine, state, run.dir / "checkpoints" / f"step_{state['step']:05d}", dist)

    # ---- Finish ----
    saving.save_hf(engine, tokenizer, run.dir / "model", dist)
    run.print(f"model: {run.dir}/model")
    run.finish()
    learner.close(dist)


if __name__ == "__main__":
    main(cli.parse(Args))
