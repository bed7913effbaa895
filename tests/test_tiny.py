"""The embedded default is what the recipes rely on, and the two recipes that made it do what they say. No vLLM here."""

import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from oat_lib import tiny
from oat_lib.tiny import make_data

ROOT = Path(__file__).resolve().parents[1]


@cache
def recipe(name: str):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def policy():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(tiny.POLICY, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(tiny.POLICY)


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def draw(prompts: list[str], greedy: bool = False) -> list[str]:
    torch.manual_seed(1)
    return [policy()[1].decode(ids, skip_special_tokens=True) for ids in make_data.sample(*policy(), prompts, greedy=greedy)]


# ---- Files ----


def test_everything_fits_in_5_MB_and_the_models_are_small():
    size = sum(path.stat().st_size for path in Path(tiny.HERE).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert size < 5e6
    assert 0.5e6 < sum(p.numel() for p in policy()[0].parameters()) < 1.5e6
    for path in (tiny.POLICY, tiny.REWARD_MODEL, tiny.JUDGE):
        assert json.loads((Path(path) / "config.json").read_text())["dtype"] == "bfloat16"


def test_columns_counts_and_disjoint_splits():
    train, test = rows(f"{tiny.PREFERENCE}/train.jsonl"), rows(f"{tiny.PREFERENCE}/test.jsonl")
    assert len(train) >= 4000 and len(test) >= 300
    assert all(set(row) == {"prompt", "reference"} for row in train + test)
    situations = [{make_data.read_prompt(row["prompt"]) for row in part} for part in (train, test)]
    assert len(situations[1]) == len(test) and not situations[0] & situations[1]
    train, test = rows(f"{tiny.ARITHMETIC}/train.jsonl"), rows(f"{tiny.ARITHMETIC}/test.jsonl")
    assert len(train) >= 2560 and len(test) >= 250
    assert all(set(row) == {"prompt", "answer"} and isinstance(row["answer"], str) for row in train + test)
    numbers = [{frozenset(re.findall(r"\d+", row["prompt"])) for row in part} for part in (train, test)]
    assert not numbers[0] & numbers[1]  # 12 + 34 is held out with 34 + 12
    parts = make_data.split()
    held = set(parts["test"]) | set(parts["pairs_test"])
    assert not held & set(parts["rest"]) and not set(parts["reward_model"]) & set(parts["judge"])


def test_recipe_data_holds_no_held_out_prompt():
    import pyarrow.parquet

    held = {row["prompt"] for row in rows(f"{tiny.PREFERENCE}/test.jsonl")}
    for folder, key in ((tiny.PAIRS, "prompt"), (tiny.DEMONSTRATIONS, "messages")):
        for split in ("train", "test"):
            for value in pyarrow.parquet.read_table(f"{folder}/{split}.parquet").column(key).to_pylist():
                texts = [value] if isinstance(value, str) else [message["content"] for message in value]
                assert not held & set(texts)


def test_references_end_within_64_tokens_and_are_as_good_as_the_policy():
    tokenizer = policy()[1]
    test = rows(f"{tiny.PREFERENCE}/test.jsonl")
    lengths = [len(tokenizer(row["reference"]).input_ids) + 1 for row in rows(f"{tiny.PREFERENCE}/train.jsonl") + test]
    assert max(lengths) < 64 and 25 <= np.mean(lengths) <= 40
    prompts = [row["prompt"] for row in test]
    drawn = [make_data.rule(p, r) for p, r in zip(prompts, draw(prompts), strict=True)]
    reference = [make_data.rule(row["prompt"], row["reference"]) for row in test]
    wins = np.mean([(a > b) + 0.5 * (a == b) for a, b in zip(drawn, reference, strict=True)])
    assert abs(wins - 0.5) < 0.1  # four standard errors


def test_tokenizer_template_and_model_agree():
    tokenizer = policy()[1]
    talk = [dict(role="system", content="S"), dict(role="user", content="Add 12 and 3."), dict(role="assistant", content="15")]
    text = "<|system|>S<|end|><|user|>Add 12 and 3.<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(talk[:2], tokenize=False, add_generation_prompt=True) == text
    assert tokenizer.apply_chat_template(talk, tokenize=False) == text + "15<|end|>"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and tokenizer.bos_token is None
    odd = "Zürich 1234, ¿qué? 😀\n\tend "
    ids = tokenizer(odd).input_ids
    assert tokenizer.decode(ids) == odd and all(tokenizer.convert_tokens_to_ids(d) in ids for d in "1234")
    assert len(tokenizer) == policy()[0].config.vocab_size and policy()[0].config.max_position_embeddings == 512


# ---- What the policy can and cannot do ----


def test_arithmetic_is_right_on_20_to_50_percent_and_within_reach():
    test = rows(f"{tiny.ARITHMETIC}/test.jsonl")[:256]
    prompts = [row["prompt"] for row in test]

    def right(told: list[str]) -> np.ndarray:
        return np.array([text.split()[-1:] == [row["answer"]] for text, row in zip(told, test, strict=True)])

    assert 0.2 <= right(draw(prompts, greedy=True)).mean() <= 0.5
    drawn = draw([p for p in prompts for _ in range(8)])
    eight = np.array([right(drawn[k::8]) for k in range(8)])
    assert 0.2 <= eight.mean() <= 0.5 and eight.any(0).mean() > 0.85


def test_rewards_are_graded_and_20_samples_spread_widely():
    prompts = [row["prompt"] for row in rows(f"{tiny.PREFERENCE}/test.jsonl")[:40]]
    asked = [p for p in prompts for _ in range(20)]
    told = draw(asked)
    reward = np.array([make_data.rule(p, r) for p, r in zip(asked, told, strict=True)])
    assert (reward == -1).mean() < 0.08  # not in the frame
    assert len(set(told)) > 0.9 * len(told) and len(set(reward.round(2))) > 100
    by_prompt = reward.reshape(len(prompts), 20)
    best_gap = (by_prompt.max(1) - by_prompt.mean(1)).mean()
    pair_gap = np.abs(by_prompt[:, 0::2] - by_prompt[:, 1::2]).mean()
    assert best_gap > 1.5 * pair_gap and by_prompt.max(1).mean() < 6.5  # what can be reached is 8.4
    length = np.array([len(policy()[1](r).input_ids) for r in told])
    assert abs(np.corrcoef(length, reward)[0, 1]) < 0.25
    for word in {word for text in told for word in text.split()}:  # no single word tells the reward
        has = np.array([word in text.split() for text in told])
        assert min(has.sum(), (~has).sum()) < 20 or abs(np.corrcoef(has, reward)[0, 1]) < 0.45, word


@pytest.mark.parametrize("path", [tiny.REWARD_MODEL, tiny.JUDGE])
def test_reward_models_order_fresh_pairs_as_the_rule_does(path):
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.num_labels == 1
    pairs = make_data.make_pairs(make_data.split()["pairs_test"], 600, seed=12345)
    texts = [
        tokenizer.apply_chat_template([dict(role="user", content=row["prompt"]), dict(role="assistant", content=row[key])], tokenize=False)
        for key in ("chosen", "rejected")
        for row in pairs
    ]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        score = model(**batch).logits[:, 0].numpy()
    rule = np.array([make_data.rule(row["prompt"], row[key]) for key in ("chosen", "rejected") for row in pairs])
    gap, score_gap = rule[:600] - rule[600:], score[:600] - score[600:]
    clear = np.abs(gap) > 1e-6
    assert ((gap > 0) == (score_gap > 0))[clear].mean() > 0.8
    good = rule > 5.5  # better than the policy is at first: where training goes
    assert np.corrcoef(rule, score)[0, 1] > 0.85 and np.corrcoef(rule[good], score[good])[0, 1] > 0.5


def test_reward_model_and_judge_are_different_models():
    a, b = (AutoModelForSequenceClassification.from_pretrained(path) for path in (tiny.REWARD_MODEL, tiny.JUDGE))
    assert not torch.equal(a.score.weight, b.score.weight)


def test_rule_by_hand():
    prompt = "This is Nora. I am angry. The lamp arrived broken."
    best = ("Dear Nora, I am very sorry that your lamp arrived broken. We will send a new one by this Friday. You return nothing to us. "
            "With our deep apologies.")  # fmt: skip
    assert make_data.rule(prompt, best) == pytest.approx(8.4)
    assert make_data.rule(prompt, best.replace("Nora", "Omar")) == pytest.approx(7.4)
    # half a fit, and the next sentence does not follow from it
    assert make_data.rule(prompt, best.replace("send a new one", "repair it for free")) == pytest.approx(8.4 - 0.7 - 1.0)
    assert make_data.rule(prompt, best.replace("You return nothing to us", "I am so very sorry")) == pytest.approx(8.4 - 1.5)
    assert make_data.rule(prompt, best + " Dear Nora") == -1.0


# ---- recipes/sft.py ----


def test_sft_mask_covers_assistant_turns_and_their_end_only():
    sft, tokenizer = recipe("sft"), policy()[1]
    talk = [dict(role="system", content="Be kind."), dict(role="user", content="Add 1 and 2."), dict(role="assistant", content="1 + 2 = 3"),
            dict(role="user", content="And?"), dict(role="assistant", content=""), dict(role="user", content="left out")]  # fmt: skip
    ids, mask = sft.encode(tokenizer, talk)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk[:5], tokenize=False)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "1 + 2 = 3<|end|><|end|>"
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m]) == (
        "<|system|>Be kind.<|end|><|user|>Add 1 and 2.<|end|><|assistant|><|user|>And?<|end|><|assistant|>"
    )
    ids, mask = sft.encode(tokenizer, ("Say", " hi"))  # without a template
    assert tokenizer.decode(ids) == "Say hi<|end|>" and sum(mask) == len(tokenizer(" hi").input_ids) + 1
    assert not any(sft.encode(tokenizer, talk[:2])[1])


def test_sft_trains_no_line_break_after_the_turn_and_refuses_templates_that_rewrite_history():
    sft, tokenizer = recipe("sft"), AutoTokenizer.from_pretrained(tiny.POLICY)
    talk = [dict(role=role, content=text) for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    ids, mask = sft.encode(tokenizer, talk)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "b<|end|>d<|end|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else '' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ValueError, match="chat template"):
        sft.encode(tokenizer, talk)


def test_sft_loss_is_a_mean_over_tokens_however_rows_fall():
    sft = recipe("sft")
    logps = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -1.0, -9.0], [-5.0, -9.0, -9.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 0, 0]])
    whole = sft.nll_sum(logps, mask) / 5
    assert whole == pytest.approx(1.8) and (sft.nll_sum(logps[:2], mask[:2]) + sft.nll_sum(logps[2:], mask[2:])) / 5 == whole
    every = [([0] * n, [1] * n) for n in (5, 3, 9, 4, 7)]
    for world in (1, 2, 3, 8):
        shares = [sft.micro_batches(every, 2, type("D", (), dict(rank=r, world_size=world))) for r in range(world)]
        assert len({len(share) for share in shares}) == 1  # as many micro-batches on every rank
        assert sorted(len(ids) for share in shares for micro in share for ids, _ in micro) == [3, 4, 5, 7, 9]
    ids, attention, mask = sft.collate([], 0, "cpu")
    assert ids.shape == (1, 2) and attention.sum() == 2 and mask.sum() == 0


# ---- recipes/reward_model.py ----


def test_bradley_terry_loss_by_hand():
    loss = recipe("reward_model").bt_loss_sum
    chosen, rejected = torch.tensor([2.0, 0.0, 5.0]), torch.tensor([1.0, 0.0, 9.0])
    by_hand = [math.log1p(math.exp(-1)), math.log(2), math.log1p(math.exp(4))]
    assert loss(chosen, rejected, torch.ones(3)).item() == pytest.approx(sum(by_hand), abs=1e-5)
    assert loss(chosen, rejected, torch.tensor([1.0, 0, 0])).item() == pytest.approx(math.log1p(math.exp(-1)), abs=1e-6)


def run(command: list[str]) -> str:
    """Runs a recipe with this interpreter; returns its run folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("Run folder: ")).removeprefix("Run folder: ")


def losses(folder: str) -> list[float]:
    return [row["learner/loss"] for row in rows(f"{folder}/metrics.jsonl") if "learner/loss" in row]


ONE = [sys.executable]
TWO = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port", "0"]


@pytest.mark.parametrize("name", ["sft", "reward_model"])
def test_recipe_learns_and_two_processes_do_the_same(name, tmp_path):
    size = ["--train-batch-size", "24", "--max-train", "24", "--max-eval", "32", "--max-epochs", "6", "--eval-steps", "-1",
            "--save-path", str(tmp_path)]  # fmt: skip
    one = run([*ONE, f"recipes/{name}.py", *size])
    two = run([*TWO, f"recipes/{name}.py", *size, "--train-batch-size-per-device", "5", "--zero-stage", "2"])
    assert len(losses(one)) == 6 and losses(one)[-1] < losses(one)[0] - 0.02  # six times the same rows
    np.testing.assert_allclose(losses(one), losses(two), atol=2e-5)
    assert len([row for row in rows(f"{one}/metrics.jsonl") if "eval/loss" in row]) == 2
    auto = AutoModelForCausalLM if name == "sft" else AutoModelForSequenceClassification
    trained = [auto.from_pretrained(f"{folder}/model", dtype=torch.float32) for folder in (one, two)]
    worst = max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in trained), strict=True))
    assert worst < 0.1 * 5e-4 * 6
    assert AutoTokenizer.from_pretrained(f"{one}/model").chat_template
    assert json.loads(Path(one, "config.json").read_text())["zero_stage"] == 2
    start = auto.from_pretrained(tiny.POLICY, dtype=torch.float32, **({} if name == "sft" else dict(num_labels=1)))
    assert (start.model.embed_tokens.weight - trained[0].model.embed_tokens.weight).abs().max() > 1e-4


def test_head_only_identical_pairs_and_resume(tmp_path):
    rng, part = random.Random(0), make_data.split()["rest"]
    pairs = make_data.make_pairs(part, 40, seed=3)
    for row in rng.sample(pairs, 10):
        row["rejected"] = row["chosen"]
    make_data.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    size = ["--preference-data", str(tmp_path / "pairs.jsonl"), "--eval-split", "None", "--train-batch-size", "10", "--max-epochs", "1",
            "--freeze-body", "--save-path", str(tmp_path)]  # fmt: skip
    whole = run([*ONE, "recipes/reward_model.py", *size, "--save-steps", "2", "--save-ckpt"])
    log = rows(f"{whole}/metrics.jsonl")
    assert sum(row["learner/masked_pairs"] for row in log) == 10 and log[-1]["misc/pairs"] == 30
    body, trained = policy()[0].model, AutoModelForSequenceClassification.from_pretrained(f"{whole}/model", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(body.parameters(), trained.model.parameters(), strict=True))
    again = run([*ONE, "recipes/reward_model.py", *size, "--resume-dir", f"{whole}/checkpoints/step_00002"])
    assert losses(again) == losses(whole)
    other = AutoModelForSequenceClassification.from_pretrained(f"{again}/model", dtype=torch.float32)
    assert torch.equal(other.score.weight, trained.score.weight)


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("sft", ["--prompt-data", tiny.PREFERENCE], "no such column; the data has prompt, reference"),
        ("sft", ["--max-model-len", "3"], "no row is left"),
        ("sft", ["--max-train", "3"], "do not fill one --train-batch-size"),
        ("reward_model", ["--chosen-key", "better"], "--chosen-key better: no such column; the data has prompt, chosen, rejected"),
        ("reward_model", ["--pretrain", "./nowhere"], "./nowhere"),
    ],
)
def test_errors_are_one_clear_line(name, flags, says, tmp_path, monkeypatch):
    module = recipe(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=says.replace("(", r"\(")):
        module.main(module.cli.parse(module.Args, [*flags, "--save-path", str(tmp_path)]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
