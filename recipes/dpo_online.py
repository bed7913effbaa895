# docs: recipes/README.md#dpo_online
"""Online DPO: the policy learns from preferences between two of its own fresh responses to each prompt.

Rafailov et al., "Direct Preference Optimization" (2023), arXiv 2305.18290, eq. 7; online as in Guo et al., "Direct Language Model Alignment
from Online AI Feedback" (2024), arXiv 2402.04792. Also IPO (2310.12036, eq. 17), SLiC-HF (2305.10425, eq. 3), and as options R-DPO's length
term (2403.19159), DPO-Positive (2402.13228) and cDPO's label smoothing.

differs from the paper in:
  * the oracle may be any model or program, and may leave a pair unlabelled: such pairs, and identical responses, are masked and counted;
  * the loss is a mean over the pairs that count in the global batch, whatever the processes and micro-batches;
  * SLiC regularises towards the chosen response (--sft-weight), not towards a separate target;
  * IPO_avg (length-averaged log-ratios), LR_DPO (DPO of length-averaged log-ratios) and SLiC_hinge (hinge of DPO's margin) are variants of
    the Oat project, kept under names of their own.

dimensions: B pairs of a micro-batch, R = 2B rows (chosen first), S tokens.

    python recipes/dpo_online.py                                                        embedded policy, prompts and reward model
    accelerate launch --use_deepspeed --num_processes 2 recipes/dpo_online.py
    accelerate launch --config_file recipes/configs/zero3.yaml recipes/dpo_online.py --pretrain PATH --prompt-data prompts.jsonl
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from oat_lib import cli, data, learner, logprobs, saving, tiny, tracking
from oat_lib import oracle as oracle_lib
from oat_lib.actor import Actor, Sampling, sample_seed


@dataclass
class Args:
    # Model
    pretrain: str = tiny.POLICY  # policy to start from: a Hugging Face directory or a hub name
    ref_pretrain: str | None = None  # reference policy; default: --pretrain
    flash_attn: bool = False  # FlashAttention 2 where it is installed, else PyTorch's SDPA
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    # Loss
    dap_algo: str = "DPO"  # DPO | IPO | SLiC | LR_DPO | IPO_avg | SLiC_hinge
    beta: float = 0.1  # strength of the pull to the reference (DPO, LR_DPO, IPO, IPO_avg, SLiC_hinge)
    label_smoothing: float = 0.0  # cDPO: probability that a label is wrong (DPO, LR_DPO)
    len_reg_alpha: float = 0.0  # R-DPO: margin per token of length difference (DPO, LR_DPO)
    dpo_positive_lambda: float = 0.0  # DPO-Positive: penalty for a chosen response below the reference (DPO, LR_DPO)
    slic_delta: float = 1.0  # SLiC: margin of summed log-probs
    sft_weight: float = 0.0  # weight of the chosen response's negative log-likelihood per token
    mask_truncated: bool = False  # leave pairs with a truncated response out of the loss (they are counted either way)
    # Oracle
    oracle: str = "reward_model"  # a file in oracles/, or your own as path/to/file.py:ClassName
    oracle_model: str | None = None  # the oracle's model: a directory or a hub name; default: the oracle's own default
    judge_model: str | None = None  # a second model for the same oracle, asked at evaluation only: eval/judge_win_rate
    bt_sample: bool = False  # draw each label from the oracle's P(first wins) instead of taking the likelier one
    preference_flip_prob: float = 0.0  # flip each label with this probability
    max_queries: int = -1  # comparisons that training may ask for in all; -1: as many as --max-train
    # Data
    prompt_data: str = tiny.PREFERENCE  # hub name, config@name, folder with train.jsonl and test.jsonl, or a json/jsonl/csv/parquet file
    input_key: str = "prompt"  # column of prompts: text or lists of messages
    output_key: str = "reference"  # column of reference responses (the evaluation compares with them)
    train_split: str = "train"  # split to train on
    eval_data: str | None = None  # prompts to evaluate on; default: --prompt-data
    eval_split: str = "test"  # split to evaluate on
    max_train: int = 50000  # first rows of the train split
    max_eval: int = 1000  # first rows of the eval split
    prompt_max_length: int | None = None  # tokens; longer prompts are dropped and counted; default: 1024, or what the context leaves
    apply_chat_template: bool | None = None  # default: if the tokenizer has one and the prompts are not templated already
    system_prompt: str | None = None  # put before every prompt (needs a chat template)
    num_prompt_epoch: int = 1  # passes over the prompts
    # Actor
    num_samples: int = 2  # responses to each prompt; above 2: the best and the worst by 2n - 3 comparisons
    temperature: float = 1.0  # of sampling; the loss is at temperature 1
    top_p: float = 1.0  # nucleus sampling
    top_k: int = -1  # -1: off
    generate_max_length: int = 128  # tokens of a response
    sync_params_every: int = 1  # rounds between weight syncs: 1 online, k iterative, huge: the behaviour policy stays the initial one
    vllm_gpu_ratio: float = 0.25  # CUDA: share of the device's memory for the engine
    sync_gap_warn: float | None = None  # actor/sync_gap to warn at; default by dtype
    sync_gap_fatal: float | None = None  # actor/sync_gap to end the run at; default by dtype
    # Learner
    train_batch_size: int = 64  # pairs an optimizer step, over all processes
    train_batch_size_per_device: int = 8  # pairs a micro-batch
    rollout_batch_size: int = 128  # prompts a round, over all processes
    rollout_batch_size_per_device: int = 128  # prompts a call of the actor: an upper bound
    pi_buffer_maxlen_per_device: int | None = None  # derived; accepted if it equals --rollout-batch-size / processes
    max_epochs: int = 1  # passes over a round's pairs
    learning_rate: float | None = None  # peak; default: 5e-7, and 5e-4 for the embedded policy
    lr_scheduler: str = "cosine_with_min_lr"  # cosine_with_min_lr | linear | polynomial | constant
    lr_warmup_ratio: float = 0.03  # share of the optimizer steps with a rising rate
    max_step_adjustment: float = 1.0  # stretches the schedule, not the run
    adam_beta_1: float = 0.9  # Adam, first moment
    adam_beta_2: float = 0.95  # Adam, second moment
    l2: float = 0.0  # weight decay of matrices
    max_norm: float = 1.0  # gradient clipping
    zero_stage: int | None = None  # ZeRO 0-3; default: what the launcher says, else 2
    bf16: bool | None = None  # default: what the launcher says, else on with CUDA
    fp16: bool | None = None  # CUDA only
    adam_offload: bool = False  # optimizer states on the CPU
    ref_offload: bool = False  # reference policy on the CPU
    # Evaluation
    eval_steps: int = 5  # rounds between evaluations; <= 0: only at the start and the end
    eval_query_interval: int = -1  # an evaluation that is due waits until this many queries were spent since the last
    eval_temperature: float = 1.0  # 0: greedy. The embedded references are samples at temperature 1
    eval_top_p: float = 1.0  # nucleus sampling at evaluation
    eval_generate_max_length: int | None = None  # default: --generate-max-length
    # Run
    save_path: str = "oat-output"  # the run's folder is made in it; the final policy is in its model/
    save_steps: int = -1  # rounds between saved policies; -1: only the final one
    save_ckpt: bool = False  # also save all that is needed to resume
    max_save_num: int = 5  # saved policies, and checkpoints, to keep of this run
    resume_dir: str | None = None  # run folder (or checkpoint) to go on from
    resume_tag: str | None = None  # checkpoint in it; default: the newest
    seed: int = 42  # of prompts, samples and labels
    rnd_seed: bool = False  # take the seed from the clock instead (it is in config.json)
    use_wb: bool = False  # log to Weights & Biases
    wb_org: str | None = None  # its entity
    wb_group: str | None = None  # its group
    wb_project: str = "oat-recipes"  # its project
    wb_run_name: str = "dpo_online"  # name of the run and start of the folder's name


NEEDS_REF = {"DPO": True, "LR_DPO": True, "IPO": True, "IPO_avg": True, "SLiC_hinge": True, "SLiC": False}
AVERAGED = {"LR_DPO", "IPO_avg"}  # length-averaged log-probs; the others are sums
EVALUATION = 2**31  # in place of the epoch in a sample's seed: every evaluation draws with the same seeds
PANELS = [
    ["eval/win_rate", "eval/judge_win_rate"], ["learner/loss"], ["learner/chosen_reward", "learner/rejected_reward"],
    ["actor/response_length", "eval/response_length"], ["actor/sync_gap"],
    ["time/generate", "time/oracle", "time/learn", "time/sync", "time/eval"],
]  # fmt: skip


def check(args: Args, world_size: int) -> None:
    """Ends the run, before anything is loaded, where flags contradict each other or would have no effect."""
    algo = args.dap_algo
    if algo not in NEEDS_REF:
        raise SystemExit(f"--dap-algo {algo} does not exist: use {', '.join(NEEDS_REF)}")
    for flag, value, off, algos in (
        ("--label-smoothing", args.label_smoothing, 0.0, ("DPO", "LR_DPO")),
        ("--len-reg-alpha", args.len_reg_alpha, 0.0, ("DPO", "LR_DPO")),
        ("--dpo-positive-lambda", args.dpo_positive_lambda, 0.0, ("DPO", "LR_DPO")),
        ("--slic-delta", args.slic_delta, 1.0, ("SLiC",)),
        ("--beta", args.beta, 0.1, [a for a in NEEDS_REF if a != "SLiC"]),
        ("--ref-pretrain", args.ref_pretrain, None, [a for a in NEEDS_REF if NEEDS_REF[a]]),
    ):
        if value != off and algo not in algos:
            raise SystemExit(f"{flag} {value} has no effect with --dap-algo {algo}: it belongs to {', '.join(algos)}")
    for bad, message in (
        (args.num_samples < 2, f"--num-samples {args.num_samples}: a preference needs at least 2"),
        (args.num_samples > 2 and args.bt_sample, "--bt-sample needs --num-samples 2: with more, the pair is the oracle's best and worst"),
        (not 0 <= args.label_smoothing < 0.5, f"--label-smoothing {args.label_smoothing} must be at least 0 and below 0.5"),
        (not 0 <= args.preference_flip_prob <= 1, f"--preference-flip-prob {args.preference_flip_prob} is a probability"),
        (args.beta <= 0, f"--beta {args.beta} must be positive"),
        (args.temperature <= 0, f"--temperature {args.temperature} must be positive: greedy samples are all the same"),
        (args.eval_temperature < 0, f"--eval-temperature {args.eval_temperature} must be 0 (greedy) or more"),
        (args.save_ckpt and args.save_steps <= 0, "--save-ckpt needs --save-steps N: it says when"),
        (args.eval_data is None and Path(args.prompt_data).is_file(), "--prompt-data is one file: give held-out prompts by --eval-data"),
        (args.sync_params_every < 1, f"--sync-params-every {args.sync_params_every} must be 1 or more (a huge number: never)"),
    ):
        if bad:
            raise SystemExit(message)
    sizes = (args.train_batch_size, args.train_batch_size_per_device, args.rollout_batch_size, args.pi_buffer_maxlen_per_device)
    learner.check_batch_sizes(world_size, *sizes)


# ---- Algorithm: tensors in, tensors out ----


def sequence_logprobs(token_logps_RS: torch.Tensor, mask_RS: torch.Tensor, average: bool) -> torch.Tensor:
    """log pi(y|x) of each row, (R,): the sum over response tokens, or their mean. An empty response has 0."""
    sums_R = (token_logps_RS * mask_RS).sum(-1)
    return sums_R / mask_RS.sum(-1).clamp(min=1) if average else sums_R


def preference_loss(
    chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, chosen_length_B, rejected_length_B, algo: str, beta: float,
    label_smoothing: float = 0.0, len_reg_alpha: float = 0.0, dpo_positive_lambda: float = 0.0, slic_delta: float = 1.0,
    sft_weight: float = 0.0,
):  # fmt: skip
    """Loss of each pair (B,) from sequence log-probs (sums, or means for LR_DPO and IPO_avg) and response lengths in tokens.

    h = (log pi(y_w) - log ref(y_w)) - (log pi(y_l) - log ref(y_l))
    DPO, LR_DPO   z = h + (alpha / beta) (|y_w| - |y_l|) - lambda max(0, log ref(y_w) - log pi(y_w))
                  -(1 - eps) log sigmoid(beta z) - eps log sigmoid(-beta z)
    IPO, IPO_avg  (h - 1 / (2 beta))^2
    SLiC          max(0, delta - (log pi(y_w) - log pi(y_l)))
    SLiC_hinge    max(0, 1 - beta h)
    all           + sft_weight (-log pi(y_w) / |y_w|)
    """
    h_B = (chosen_B - ref_chosen_B) - (rejected_B - ref_rejected_B)
    if algo in ("DPO", "LR_DPO"):
        z_B = h_B + (len_reg_alpha / beta) * (chosen_length_B - rejected_length_B)
        z_B = z_B - dpo_positive_lambda * F.relu(ref_chosen_B - chosen_B)
        loss_B = -(1 - label_smoothing) * F.logsigmoid(beta * z_B) - label_smoothing * F.logsigmoid(-beta * z_B)
    elif algo in ("IPO", "IPO_avg"):
        loss_B = (h_B - 1 / (2 * beta)) ** 2
    elif algo == "SLiC":
        loss_B = F.relu(slic_delta - (chosen_B - rejected_B))
    else:  # SLiC_hinge
        loss_B = F.relu(1 - beta * h_B)
    if sft_weight:
        per_token_B = chosen_B if algo in AVERAGED else chosen_B / chosen_length_B.clamp(min=1)
        loss_B = loss_B - sft_weight * per_token_B
    return loss_B


def make_label(p_first: float | None, bt_sample: bool, flip_prob: float, rng: np.random.Generator) -> tuple[bool | None, bool]:
    """(whether the first response is the chosen one, whether noise flipped it). No label, and an exact tie, give None.

    The likelier response wins, or a Bernoulli draw from P(first wins) with bt_sample (then a tie is a coin toss, as Bradley-Terry says).
    """
    draw, flip = rng.random(2)  # always two numbers, so that one pair's answer does not shift the noise of the next
    if p_first is None or (p_first == 0.5 and not bt_sample):
        return None, False
    first = bool(draw < p_first) if bt_sample else p_first > 0.5
    return (not first, True) if flip < flip_prob else (first, False)


# ---- Feedback and evaluation ----


def compare_candidates(feedback, prompts: list, references: list, texts: list[list[str]]) -> list[tuple[int, int, float | None]]:
    """(first, second, P(first wins) or None) for each prompt: its two candidates, or the best and the worst of n by 2n - 3 comparisons.

    Two equal texts are not sent to the oracle: it would be paid for nothing, and the pair is masked.
    """
    best, worst = [0] * len(texts), [1] * len(texts)

    def ask(a: list[int], b: list[int]) -> list[float | None]:
        todo = [i for i, t in enumerate(texts) if t[a[i]] != t[b[i]]]
        pairs = [(prompts[i], texts[i][a[i]], texts[i][b[i]], references[i]) for i in todo]
        answers = feedback.compare(*map(list, zip(*pairs, strict=True))) if pairs else []
        found = dict(zip(todo, answers, strict=True))
        return [found.get(i) for i in range(len(texts))]

    p_best_wins = ask(best, worst)
    n = len(texts[0]) if texts else 2
    if n == 2:
        return list(zip(best, worst, p_best_wins, strict=True))
    won, lost = [False] * len(texts), [False] * len(texts)  # a label needs a best that beat something and a worst that lost to something
    for i, p in enumerate(p_best_wins):
        won[i] = lost[i] = p is not None and p != 0.5
        if won[i] and p < 0.5:
            best[i], worst[i] = worst[i], best[i]
    for c in range(2, n):
        challenger = [c] * len(texts)
        for i, (up, down) in enumerate(zip(ask(challenger, best), ask(challenger, worst), strict=True)):
            won[i], lost[i] = won[i] or up not in (None, 0.5), lost[i] or down not in (None, 0.5)
            if up is not None and up > 0.5:
                best[i] = c
            elif down is not None and down < 0.5:
                worst[i] = c
    return [(b, w, 1.0 if up and down else None) for b, w, up, down in zip(best, worst, won, lost, strict=True)]


def evaluate(actor, feedback, judge, prompts, sampling: Sampling, seed: int, dist) -> tuple[dict, list[dict]]:
    """Win rate of the actor's policy against the reference responses: the share with P > 0.5, a tie is one half. Sharded over ranks.

    Returns metrics and one record a prompt. A prompt without a label counts in neither numerator nor denominator, and is counted.
    """
    mine, error, records = data.share(prompts, dist.rank, dist.world_size), None, []
    try:
        seeds = [[sample_seed(seed, EVALUATION, p.index, 0)] for p in mine]
        samples = [s for (s,) in actor.generate([p.ids for p in mine], seeds, sampling)]
        raws, texts, references = [p.raw for p in mine], [s.text for s in samples], [p.reference for p in mine]
        wins = feedback.compare(raws, texts, references, references, evaluation=True)
        judged = judge.compare(raws, texts, references, references, evaluation=True) if judge else [None] * len(mine)
        records = [
            dict(prompt=p.raw, reference=p.reference, p_win=w, p_win_judge=j, **s.record())
            for p, s, w, j in zip(mine, samples, wins, judged, strict=True)
        ]
    except Exception as e:  # whatever the oracle raised: all ranks must hear of it before the next collective
        error = e
    learner.agree(error, dist)
    records = [r for rows in learner.gather(records, dist) for r in rows]
    metrics = {
        "eval/prompts": len(records),
        "eval/unlabelled": sum(r["p_win"] is None for r in records),
        "eval/response_length": sum(len(r["ids"]) for r in records) / len(records),
        "eval/truncated": sum(r["finish_reason"] == "length" for r in records) / len(records),
        "eval/distinct": len({r["text"] for r in records}) / len(records),
    }
    for name, key in (("eval/win_rate", "p_win"), ("eval/judge_win_rate", "p_win_judge")):
        metrics |= tracking.win_rate(name, [r[key] for r in records])
    return metrics, records


def main(args: Args) -> None:
    # ---- Setup ----
    dist = learner.init(args.zero_stage, args.bf16, args.fp16)
    check(args, dist.world_size)
    args.seed = learner.gather(time.time_ns() % 2**31 if args.rnd_seed else args.seed, dist)[0]
    lr = args.learning_rate if args.learning_rate is not None else 5e-4 if args.pretrain == tiny.POLICY else 5e-7
    if args.judge_model is None and args.oracle == "reward_model" and args.oracle_model is None:
        args.judge_model = tiny.JUDGE
    max_queries = args.max_queries if args.max_queries >= 0 else args.max_train
    # All that must survive a restart. Prompts, samples and label noise depend on the seed and these numbers alone.
    state = dict(step=0, position=0, queries=0, eval_queries=0, version=0, unlabelled_rounds=0, last_eval_queries=-1, eval_due=False)
    state["seed"] = args.seed
    checkpoint = saving.latest_checkpoint(args.resume_dir, args.resume_tag) if args.resume_dir else None
    if checkpoint:
        state |= {k: v for k, v in saving.read_state(checkpoint, dist).items() if k in state}
        args.seed = state["seed"]

    # ---- Data ----
    tokenizer, context = learner.load_tokenizer(args.pretrain)
    new_tokens = max(args.generate_max_length, args.eval_generate_max_length or 0)
    prompt_length = data.prompt_budget(context, new_tokens, args.prompt_max_length)
    common = dict(apply_chat_template=args.apply_chat_template, system_prompt=args.system_prompt, max_length=prompt_length)
    keys, eval_data = (tokenizer, args.input_key, args.output_key), args.eval_data or args.prompt_data
    prompts, report = data.load_prompts(args.prompt_data, args.train_split, *keys, args.max_train, need_references=False, **common)
    eval_prompts, eval_report = data.load_prompts(eval_data, args.eval_split, *keys, args.max_eval, flag="--eval-data", **common)
    queries_per_prompt = 1 if args.num_samples == 2 else 2 * args.num_samples - 3
    total_prompts = min(len(prompts) * args.num_prompt_epoch, max_queries // queries_per_prompt)
    total_steps = math.ceil(total_prompts / args.rollout_batch_size)  # rounds; a few more when a budget is left over by identical pairs
    updates_per_step = args.max_epochs * (args.rollout_batch_size // args.train_batch_size)

    oracle = oracle_lib.Feedback(oracle_lib.load_oracle(args.oracle, dist.device, args.oracle_model), args.oracle)
    judge = oracle_lib.Feedback(oracle_lib.load_oracle(args.oracle, dist.device, args.judge_model), "judge") if args.judge_model else None
    config = asdict(args) | dict(learning_rate=lr, max_queries=max_queries, prompt_max_length=prompt_length, total_steps=total_steps,
                                 prompts=report, eval_prompts=eval_report)  # fmt: skip
    run = tracking.Run(
        args.save_path, args.wb_run_name, config, dist, total_steps, PANELS, "misc/queries", args.use_wb, args.wb_project, args.wb_group,
        args.wb_org, resume_from=checkpoint and checkpoint.parent.parent, resume_step=state["step"],
    )  # fmt: skip
    run.print(data.describe(args.prompt_data, report) + "\n" + data.describe(eval_data, eval_report))

    # ---- Actor ----
    actor = Actor(args.pretrain, dist, prompt_length + new_tokens, gpu_ratio=args.vllm_gpu_ratio, seed=args.seed)
    actor.sleep()
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.generate_max_length)
    eval_sampling = Sampling(args.eval_temperature, args.eval_top_p, max_tokens=args.eval_generate_max_length or args.generate_max_length)

    # ---- Models ----
    learner.seed_all(args.seed)
    policy = learner.load_model(AutoModelForCausalLM, args.pretrain, dist, args.flash_attn, args.gradient_checkpointing)
    optimizer = torch.optim.AdamW(learner.param_groups(policy, args.l2), lr=lr, betas=(args.adam_beta_1, args.adam_beta_2))
    schedule_steps = max(1, round(total_steps * updates_per_step * args.max_step_adjustment))
    scheduler = learner.lr_schedule(optimizer, args.lr_scheduler, schedule_steps, args.lr_warmup_ratio)
    engine = learner.initialize(policy, dist, optimizer, scheduler, args.max_norm, adam_offload=args.adam_offload)

    # ---- Reference model ----
    ref = None
    if NEEDS_REF[args.dap_algo]:
        ref = learner.load_model(AutoModelForCausalLM, args.ref_pretrain or args.pretrain, dist, args.flash_attn)
        ref = learner.initialize(ref, dist, offload=args.ref_offload)

    # ---- Loop ----
    if checkpoint:
        saving.load_checkpoint(engine, checkpoint, dist)
    run.config(zero_stage=learner.zero_stage(engine))
    place = f"{dist.world_size} x {dist.device.type} ({dist.dtype}, ZeRO-{learner.zero_stage(engine)})"
    run.print(f"{total_steps} rounds of {args.rollout_batch_size} prompts on {place}, at most {max_queries} queries, learning rate {lr:g}")
    behaviour = run.dir / "behaviour"  # the actor's weights, while they are not the learner's (--sync-params-every above 1)

    def sync(version: int) -> float:
        actor.sync(learner.named_weights(engine, dist), version)
        return actor.probe(engine, args.sync_gap_warn, args.sync_gap_fatal)

    def run_evaluation(step: int, metrics: dict) -> None:
        """Evaluates the learner's policy, also where the actor samples from an older one; then the actor gets that one back."""
        started, behind = time.time(), actor.version != step
        if behind:
            version = actor.version
            metrics["actor/sync_gap"] = sync(step)
        found, records = evaluate(actor, oracle, judge, eval_prompts, eval_sampling, args.seed, dist)
        if behind:
            actor.sync(saving.saved_weights(behaviour, engine), version)
        if "eval/win_rate" not in found:
            run.warn(f"evaluation at step {step}: the oracle labelled none of {len(records)} responses")
        metrics |= found | {"time/eval": time.time() - started}
        state.update(last_eval_queries=state["queries"], eval_due=False, eval_queries=state["eval_queries"] + len(records))
        run.records(f"eval/step_{step:05d}.jsonl", records)

    if checkpoint and (checkpoint / "behaviour").is_dir():
        saving.copy_folder(checkpoint / "behaviour", behaviour, dist)
        actor.sync(saving.saved_weights(behaviour, engine), state["version"])
        gap = float("nan")
    else:
        # Also at step 0: it proves that both sides loaded the same model, and fills the cache that the next sync must empty.
        gap = sync(state["step"])
        if args.sync_params_every > 1:
            saving.save_hf(engine, tokenizer, behaviour, dist)
    text, ids = prompts[0].text, prompts[0].ids
    run.print(f"First prompt (the loss covers the response only, {len(ids)} prompt tokens are masked):\n{text!r}\n{ids}")
    if not checkpoint:
        metrics = {"misc/queries": 0, "actor/sync_gap": gap}
        run_evaluation(0, metrics)
        run.log(0, metrics, show=("eval/win_rate",))

    while state["position"] < len(prompts) * args.num_prompt_epoch and max_queries - state["queries"] >= queries_per_prompt:
        step, clock = state["step"] + 1, time.time()
        metrics = {}

        # ---- Collect ----
        affordable = (max_queries - state["queries"]) // queries_per_prompt
        count = min(args.rollout_batch_size, len(prompts) * args.num_prompt_epoch - state["position"], affordable)
        batch = data.share(data.take(state["position"], count, prompts, args.seed), dist.rank, dist.world_size)
        places = data.share(list(range(state["position"], state["position"] + count)), dist.rank, dist.world_size)
        rows, error, generate_time, before = [], None, 0.0, (oracle.queries, oracle.unlabelled)
        try:
            for at in range(0, len(batch), args.rollout_batch_size_per_device):
                part = batch[at : at + args.rollout_batch_size_per_device]
                began = time.time()
                seeds = [[sample_seed(args.seed, epoch, p.index, i) for i in range(args.num_samples)] for epoch, p in part]
                samples = actor.generate([p.ids for _, p in part], seeds, sampling)
                generate_time += time.time() - began
                texts = [[s.text for s in candidates] for candidates in samples]
                picks = compare_candidates(oracle, [p.raw for _, p in part], [p.reference for _, p in part], texts)
                for (epoch, p), candidates, (i, j, p_first), place in zip(part, samples, picks, places[at:], strict=False):
                    rng = np.random.default_rng((args.seed, 1, place))
                    first_wins, flipped = make_label(p_first, args.bt_sample, args.preference_flip_prob, rng)
                    chosen, rejected = (i, j) if first_wins in (True, None) else (j, i)
                    a, b = candidates[chosen], candidates[rejected]
                    identical = a.response_ids == b.response_ids or a.text == b.text
                    truncated = args.mask_truncated and "length" in (a.finish_reason, b.finish_reason)
                    rows.append(dict(
                        step=step, version=actor.version, epoch=epoch, index=p.index, prompt=p.raw, prompt_ids=p.ids,
                        responses=[s.record() for s in candidates],
                        feedback=dict(first=i, second=j, p_first=p_first, chosen=chosen, rejected=rejected, flipped=flipped),
                        identical=identical, labelled=first_wins is not None,
                        mask=int(first_wins is not None and not identical and not truncated),
                    ))  # fmt: skip
        except Exception as e:  # whatever the oracle raised: all ranks must hear of it before the next collective
            error = e
        learner.agree(error, dist)
        asked, unlabelled, counts = oracle.queries - before[0], oracle.unlabelled - before[1], dict(getattr(oracle.oracle, "counts", {}))
        shares = learner.gather(dict(rows=rows, queries=asked, unlabelled=unlabelled, counts=counts), dist)
        rows = [row for share in shares for row in share["rows"]]  # the whole round on every rank, in the order of the prompts
        run.samples(rows)
        asked = sum(share["queries"] for share in shares)
        state["queries"] += asked
        state["position"] += count
        labelled, responses = sum(r["labelled"] for r in rows), [s for r in rows for s in r["responses"]]
        state["unlabelled_rounds"] = state["unlabelled_rounds"] + 1 if asked and not labelled else 0
        metrics |= {
            "actor/response_length": sum(len(s["ids"]) for s in responses) / len(responses),
            "actor/truncated": sum(s["finish_reason"] == "length" for s in responses) / len(responses),
            "actor/identical_pairs": sum(r["identical"] for r in rows) / len(rows),
            "actor/chosen_length": sum(len(r["responses"][r["feedback"]["chosen"]]["ids"]) for r in rows) / len(rows),
            "actor/rejected_length": sum(len(r["responses"][r["feedback"]["rejected"]]["ids"]) for r in rows) / len(rows),
            "oracle/unlabelled": sum(share["unlabelled"] for share in shares),
            "oracle/ties": sum(r["feedback"]["p_first"] == 0.5 for r in rows),
            "oracle/flipped": sum(r["feedback"]["flipped"] for r in rows),
            "oracle/certainty": float(np.mean([abs(r["feedback"]["p_first"] - 0.5) * 2 for r in rows if r["labelled"]] or [float("nan")])),
        } | {f"oracle/{name}": sum(share["counts"][name] for share in shares) for name in counts}
        if asked and not labelled:
            run.warn(f"step {step}: none of {asked} questions to the oracle got a label (round {state['unlabelled_rounds']} of 3 in a row)")
            if state["unlabelled_rounds"] == 3:
                raise SystemExit(f"the oracle {args.oracle} labelled no pair in three rounds in a row: nothing to learn from")
        elif not any(r["mask"] for r in rows):
            run.warn(f"step {step}: all {len(rows)} pairs are masked (identical or truncated): nothing to learn from")
        if metrics["actor/truncated"] == 1:
            run.warn(f"step {step}: all {len(responses)} responses were cut at --generate-max-length {args.generate_max_length}")
        metrics |= {"time/generate": generate_time, "time/oracle": time.time() - clock - generate_time}

        # ---- Learn ----
        actor.sleep()
        clock, sums, updates = time.time(), np.zeros(5), 0
        for epoch in range(args.max_epochs):
            order = np.random.default_rng((args.seed, 2, step, epoch)).permutation(len(rows))
            for at in range(0, len(rows), args.train_batch_size):
                train_batch = [rows[i] for i in order[at : at + args.train_batch_size]]
                total = sum(r["mask"] for r in train_batch)  # pairs that count, over all ranks
                if total == 0:
                    continue
                mine = data.share(train_batch, dist.rank, dist.world_size)
                size = args.train_batch_size_per_device
                for m in range(math.ceil(len(train_batch) / (dist.world_size * size))):  # as many on every rank, or ZeRO-3 hangs
                    micro = mine[m * size : (m + 1) * size] or [train_batch[0] | dict(mask=0)]
                    sides = [(r, r["responses"][r["feedback"][side]]) for side in ("chosen", "rejected") for r in micro]
                    ids_RS, attention_RS = data.pad([r["prompt_ids"] + s["ids"] for r, s in sides], tokenizer.pad_token_id)
                    ids_RS, attention_RS = ids_RS.to(dist.device), attention_RS.to(dist.device)
                    prompt_lengths_R = torch.tensor([len(r["prompt_ids"]) for r, _ in sides], device=dist.device)
                    mask_B = torch.tensor([r["mask"] for r in micro], device=dist.device, dtype=torch.float32)
                    mask_RS = logprobs.response_mask(attention_RS, prompt_lengths_R)
                    average = args.dap_algo in AVERAGED
                    logps_R = sequence_logprobs(logprobs.token_logprobs(engine, ids_RS, attention_RS), mask_RS, average)
                    ref_logps_R = torch.zeros_like(logps_R)
                    if ref is not None:
                        with torch.no_grad():
                            ref_logps_R = sequence_logprobs(logprobs.token_logprobs(ref, ids_RS, attention_RS), mask_RS, average)
                    (chosen_B, rejected_B), (ref_chosen_B, ref_rejected_B) = logps_R.chunk(2), ref_logps_R.chunk(2)
                    loss_B = preference_loss(
                        chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, *mask_RS.sum(-1).chunk(2), args.dap_algo, args.beta,
                        args.label_smoothing, args.len_reg_alpha, args.dpo_positive_lambda, args.slic_delta, args.sft_weight,
                    )  # fmt: skip
                    learner.backward(engine, (loss_B * mask_B).sum(), total)
                    with torch.no_grad():
                        scale = args.beta if ref is not None else 1.0
                        reward_w_B, reward_l_B = scale * (chosen_B - ref_chosen_B), scale * (rejected_B - ref_rejected_B)
                        seen = torch.stack([loss_B, reward_w_B, reward_l_B, (reward_w_B > reward_l_B).float(), torch.ones_like(loss_B)])
                        sums += (seen * mask_B).sum(-1).double().cpu().numpy()
                engine.step()
                updates += 1
        sums = np.sum(learner.gather(sums, dist), axis=0)
        if sums[4]:
            loss, reward_w, reward_l, accuracy = (sums[:4] / sums[4]).tolist()
            metrics |= {"learner/loss": loss, "learner/accuracy": accuracy, "learner/grad_norm": learner.grad_norm(engine)}
            metrics |= {"learner/chosen_reward": reward_w, "learner/rejected_reward": reward_l, "learner/margin": reward_w - reward_l}
            if metrics["learner/grad_norm"] == 0:
                run.warn(f"step {step}: the gradient is zero, nothing was learned from {int(sums[4])} pairs")
        learn_time, lr_now = time.time() - clock, engine.get_lr()[0]
        metrics |= {"learner/pairs": int(sums[4]), "learner/updates": updates, "learner/lr": lr_now, "time/learn": learn_time}
        state["step"] = step

        # ---- Sync weights ----
        clock = time.time()
        if step % args.sync_params_every == 0:
            metrics["actor/sync_gap"] = sync(step)
            if args.sync_params_every > 1:
                saving.save_hf(engine, tokenizer, behaviour, dist)
        state["version"] = actor.version
        metrics["time/sync"] = time.time() - clock

        # ---- Evaluate ----
        state["eval_due"] = state["eval_due"] or (args.eval_steps > 0 and step % args.eval_steps == 0)
        last = state["position"] >= len(prompts) * args.num_prompt_epoch or max_queries - state["queries"] < queries_per_prompt
        if last or (state["eval_due"] and state["queries"] - state["last_eval_queries"] >= args.eval_query_interval):
            run_evaluation(step, metrics)

        # ---- Log ----
        metrics |= {"misc/queries": state["queries"], "misc/eval_queries": state["eval_queries"], "misc/version": actor.version}
        metrics |= {"misc/prompts": state["position"], "misc/epoch": state["position"] / len(prompts)}
        run.log(step, metrics, show=("eval/win_rate", "learner/loss"))
        if "time/eval" in metrics:
            run.curves()

        # ---- Save ----
        if args.save_steps > 0 and (step % args.save_steps == 0 or last):
            saving.save_hf(engine, tokenizer, run.dir / "saved_models" / f"step_{step:05d}", dist)
            saving.keep_newest(run.dir / "saved_models", args.max_save_num, dist)
            if args.save_ckpt:
                extra = {"behaviour": behaviour} if actor.version != step else {}
                saving.save_checkpoint(engine, state, run.dir / "checkpoints" / f"step_{step:05d}", dist, extra)
                saving.keep_newest(run.dir / "checkpoints", args.max_save_num, dist)

    # ---- Finish ----
    saving.save_hf(engine, tokenizer, run.dir / "model", dist)
    run.finish()
    actor.close()
    learner.close(dist)


if __name__ == "__main__":
    main(cli.parse(Args))
