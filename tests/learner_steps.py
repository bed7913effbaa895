"""Two optimizer steps of a tiny model on unevenly split rows, then two more after a restart; run by test_learner.py on 1 or 2 processes.

    python tests/learner_steps.py FOLDER STAGE [bf16]      writes FOLDER/whole, FOLDER/resumed (Hugging Face) and FOLDER/facts.json
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oat_lib import data, learner, logprobs, saving, tiny

folder, stage, bf16 = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["bf16"]
dist = learner.init(zero_stage=stage, bf16=bf16)
tokenizer = AutoTokenizer.from_pretrained(tiny.POLICY)
ROWS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20], [21, 22, 23, 24, 25]]  # 3 rows here, 2 rows there


def start():
    learner.seed_all(0)
    model = learner.load_model(AutoModelForCausalLM, tiny.POLICY, dist)
    optimizer = torch.optim.AdamW(learner.param_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
    return learner.initialize(model, dist, optimizer, learner.lr_schedule(optimizer, "linear", 4, 0.25), max_norm=0.5)


def steps(engine, count, size):
    losses, norms = [], []
    for _ in range(count):
        tokens = sum(len(row) - 1 for row in ROWS)  # the global count: a mean over tokens, not of means
        mine, total = data.share(ROWS, dist.rank, dist.world_size), 0.0
        most = -(-len(ROWS) // dist.world_size)
        for m in range(-(-most // size)):  # as many micro-batches on every rank, the last ones empty and of weight zero
            micro = mine[m * size : (m + 1) * size]
            ids, attention = data.pad(micro or [ROWS[0]], tokenizer.pad_token_id)
            token_loss = -logprobs.token_logprobs(engine, ids, attention) * attention[:, 1:] * bool(micro)
            learner.backward(engine, token_loss.sum(), tokens)
            total += token_loss.sum().item() / tokens
        engine.step()
        losses.append(sum(learner.gather(total, dist)))
        norms.append(learner.grad_norm(engine))
    return losses, norms


engine = start()
losses, norms = steps(engine, 2, size=2)
saving.save_checkpoint(engine, dict(step=2), folder / "checkpoints" / "step_00002", dist)
drawn = torch.rand(1).item()
more, _ = steps(engine, 2, size=1)
saving.save_hf(engine, tokenizer, folder / "whole", dist)
names = [name for name, weight in learner.named_weights(engine, dist) if weight.numel()]

engine = start()
state = saving.load_checkpoint(engine, saving.latest_checkpoint(str(folder)), dist)
redrawn = torch.rand(1).item()
resumed, _ = steps(engine, 2, size=3)
saving.save_hf(engine, tokenizer, folder / "resumed", dist)
if dist.main:
    facts = dict(losses=losses + more, norms=norms, resumed=resumed, names=names, state=state, drawn=[drawn, redrawn])
    facts["stage"] = learner.zero_stage(engine)
    (folder / "facts.json").write_text(json.dumps(facts))
learner.agree(ValueError("one rank is enough") if dist.rank == dist.world_size - 1 else None, dist)
