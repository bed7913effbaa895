"""Makes every file of the embedded default: words, rule, tokenizer, configs, data. Nothing is taken from elsewhere.

    python oat_lib/tiny/make_data.py first --work DIR    tokenizer, configs, supervision and pairs in DIR; the recipes' default data here
    python oat_lib/tiny/make_data.py ship --work DIR     the trained models, rounded to bf16, from DIR/runs to here
    python oat_lib/tiny/make_data.py prompts             prompts with references from the shipped policy, and the arithmetic set

Between the first and the second, `recipes/sft.py` and `recipes/reward_model.py` train on what DIR holds (README.md has the commands).

Preference task. A customer writes (name, item, problem, mood); a shop answers in one fixed frame of nine slots. `rule` gives each slot
a graded value, most of which depend on what the customer wrote, and one on another slot of the same reply. All options of a slot have
about the same number of tokens, so length says little. The policy is supervised twice: on good replies and right sums, from which it
learns what fits what and how to add, then briefly on a clerk's replies, which pick the best option of a slot rarely (`CLERK`). Single
replies are mediocre then, good ones are within reach, and there is much to learn and to explore.

Arithmetic task. Sums of two two-digit numbers. The second supervision gets a carry wrong more often than not and errs a little
elsewhere, hence the policy is right on some of the problems only, while the right answer is always within its support.
"""

import argparse
import json
import math
import random
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent

NAMES = "Ada Anna Ben Carl Dan Eva Finn Hugo Ida Ivy Jane Karl Lena Leo Liam Max Mia Noah Nora Omar Paul Rosa Sam Zoe".split()
ITEMS = (
    "bag bed bike boat book bowl camera chair clock coat desk drum fan guitar hat kettle lamp mirror phone pillow radio rug table tent"
).split()
PROBLEMS = [
    "arrived broken", "never arrived", "is too small", "looks wrong", "came twice", "costs too much", "stopped working", "lacks parts",
]  # fmt: skip
MOODS = ["I am angry.", "I am worried.", "I am in a hurry.", "There is no rush."]
FRAMES = [
    "{name} here. My {item} {problem}. {mood}", "My {item} {problem}. {mood} Yours, {name}",
    "{mood} My {item} {problem}. This is {name}.", "This is {name}. {mood} The {item} {problem}.",
]  # fmt: skip

GREETINGS = {"Dear": (1.0, 1.0, 0.0, 0.3), "Hello": (0.5, 0.5, 0.5, 0.5), "Hi": (0.0, 0.3, 1.0, 1.0)}  # value for each mood
OPENINGS = {
    "I am very sorry that": (1.0, 0.5, 0.2, 0.2),
    "please do not fear that": (0.0, 1.0, 0.0, 0.3),
    "I act now because": (0.4, 0.2, 1.0, 0.0),
    "thanks for writing that": (0.1, 0.2, 0.0, 1.0),
    "it is odd that": (0.0, 0.0, 0.1, 0.4),
}
WHENS = {
    "before tonight": (0.5, 0.6, 1.0, 0.0), "by this Friday": (1.0, 1.0, 0.3, 0.4),
    "in two weeks": (0.0, 0.2, 0.0, 1.0), "at some point": (0.0, 0.0, 0.0, 0.3),
}  # fmt: skip
CLOSINGS = {
    "With our deep apologies": (1.0, 0.3, 0.2, 0.0),
    "You are in good hands": (0.2, 1.0, 0.1, 0.4),
    "Talk to you very soon": (0.2, 0.4, 1.0, 0.0),
    "Have a really lovely day": (0.0, 0.2, 0.3, 1.0),
    "That is all for now": (0.0, 0.0, 0.1, 0.2),
}
REMEDIES = {  # the problem it fits, the problem it half fits, and what the next sentence should then say
    "send a new one": (0, 1, "send"),
    "trace the lost parcel": (1, 7, "send"),
    "swap the size": (2, 3, "fetch"),
    "swap the model": (3, 2, "fetch"),
    "collect the spare one": (4, 3, "fetch"),
    "refund the difference": (5, 4, "pay"),
    "repair it for free": (6, 0, "fetch"),
    "post the missing parts": (7, 6, "send"),
}
EXTRAS = {
    "You return nothing to us": "send", "A driver will fetch it": "fetch", "Your bank gets the money": "pay",
    "That is our usual rule": "any", "I am so very sorry": "again",
}  # fmt: skip
WEIGHTS = dict(greeting=0.4, name=1.0, opening=0.9, item=1.0, problem=1.0, remedy=1.4, when=0.8, extra=1.0, closing=0.9)
CLERK = 0.15  # how often a supervised reply takes the best option of a slot; else it is drawn from the others
REPLY = re.compile(
    rf"({'|'.join(GREETINGS)}) (\w+), ({'|'.join(OPENINGS)}) (?:your|the) (\w+) ({'|'.join(PROBLEMS)}|has an issue)\. "
    rf"(?:We|I) will ({'|'.join(REMEDIES)}) ({'|'.join(WHENS)})\. ({'|'.join(EXTRAS)})\. ({'|'.join(CLOSINGS)})[.!]"
)


# ---- Preference task ----
def situations() -> list[tuple]:
    """All (name, item, problem, mood) in one fixed random order; `split` cuts it."""
    every = [(n, i, p, m) for n in NAMES for i in ITEMS for p in range(len(PROBLEMS)) for m in range(len(MOODS))]
    random.Random(0).shuffle(every)
    return every


def split() -> dict[str, list[tuple]]:
    """Disjoint parts: held-out prompts, held-out pairs, the rest (it starts with the training prompts; a half for each reward model)."""
    every = situations()
    rest = every[800:]
    return dict(test=every[:400], pairs_test=every[400:800], train=rest[:5120], rest=rest, reward_model=rest[0::2], judge=rest[1::2])


def write_prompt(situation: tuple, rng: random.Random) -> str:
    name, item, problem, mood = situation
    return rng.choice(FRAMES).format(name=name, item=item, problem=PROBLEMS[problem], mood=MOODS[mood])


def read_prompt(prompt: str) -> tuple:
    """The situation that a prompt tells."""
    words = set(re.findall(r"\w+", prompt))
    return (next(n for n in NAMES if n in words), next(i for i in ITEMS if i in words),
            next(k for k, p in enumerate(PROBLEMS) if p in prompt), next(k for k, m in enumerate(MOODS) if m in prompt))  # fmt: skip


def slot_values(situation: tuple, slots: tuple) -> dict[str, float]:
    """Value in [-0.5, 1] of each slot of a reply; `slots` are the groups of REPLY."""
    name, item, problem, mood = situation
    greeting, who, opening, thing, trouble, remedy, when, extra, closing = slots
    fits, half, then = REMEDIES[remedy]
    return dict(
        greeting=GREETINGS[greeting][mood],
        name=1.0 if who == name else 0.5 if who == "customer" else 0.0,
        opening=OPENINGS[opening][mood],
        item=1.0 if thing == item else 0.5 if thing == "order" else 0.0,
        problem=1.0 if trouble == PROBLEMS[problem] else 0.5 if trouble == "has an issue" else 0.0,
        remedy=1.0 if fits == problem else 0.5 if half == problem else 0.0,
        when=WHENS[when][mood],
        # what comes next must follow from the remedy said; a second apology after "sorry" is a repetition
        extra={then: 1.0, "any": 0.4, "again": -0.5 if "sorry" in opening else 0.0}.get(EXTRAS[extra], 0.0),
        closing=CLOSINGS[closing][mood],
    )


def rule(prompt: str, reply: str) -> float:
    """The latent reward of a reply: the weighted sum of its slots' values (0 to 8.4); -1 where the reply is not in the frame."""
    match = REPLY.fullmatch(reply.strip())
    if match is None:
        return -1.0
    values = slot_values(read_prompt(prompt), match.groups())
    return sum(WEIGHTS[key] * value for key, value in values.items())


def draw_slots(situation: tuple, skill: float, rng: random.Random) -> dict[str, str]:
    """The best option of each slot with probability `skill`, else one of the others."""
    name, item, problem, mood = situation

    def pick(best, options):
        return best if rng.random() < skill else rng.choice([option for option in options if option != best])

    def by_mood(table):
        return pick(max(table, key=lambda option: table[option][mood]), list(table))

    remedy = pick(next(r for r, (fits, _, _) in REMEDIES.items() if fits == problem), list(REMEDIES))
    return dict(
        greeting=by_mood(GREETINGS),
        name=pick(name, [*rng.sample(NAMES, 2), "customer"]),
        opening=by_mood(OPENINGS),
        the=rng.choice(["your", "the"]),  # worth nothing, as `who` and `stop`: among the best replies there is still a choice
        item=pick(item, [*rng.sample(ITEMS, 2), "order"]),
        problem=pick(PROBLEMS[problem], [*rng.sample(PROBLEMS, 2), "has an issue"]),
        who=rng.choice(["We", "I"]),
        remedy=remedy,
        when=by_mood(WHENS),
        extra=pick(next(e for e, kind in EXTRAS.items() if kind == REMEDIES[remedy][2]), list(EXTRAS)),
        closing=by_mood(CLOSINGS),
        stop=rng.choice(".!"),
    )


def say(slots: dict[str, str]) -> str:
    return "{greeting} {name}, {opening} {the} {item} {problem}. {who} will {remedy} {when}. {extra}. {closing}{stop}".format(**slots)


def write_reply(situation: tuple, skill: float, rng: random.Random) -> str:
    return say(draw_slots(situation, skill, rng))


def make_pairs(part: list[tuple], num: int, seed: int) -> list[dict]:
    """Pairs of replies to one prompt, labelled by the rule with Bradley-Terry noise: P(a chosen) = sigma(3 (rule(a) - rule(b))).

    Skills run from nothing to perfect, so that a reward model stays right while the policy gets better. A third of the pairs have two
    skills, a third one skill, and in a third the second reply is the first with a few slots drawn again, which shows what each is worth.
    """
    rng, rows = random.Random(seed), []
    while len(rows) < num:
        situation, kind = rng.choice(part), rng.choice(["two skills", "one skill", "few slots"])
        prompt = write_prompt(situation, rng)
        skill = rng.choice([CLERK, rng.random()])
        a, b = draw_slots(situation, skill, rng), draw_slots(situation, rng.random() if kind == "two skills" else skill, rng)
        if kind == "few slots":
            b = a | {slot: b[slot] for slot in rng.sample(list(WEIGHTS), rng.randint(1, 4))}
        a, b = say(a), say(b)
        if a == b:
            continue
        a_wins = rng.random() < 1 / (1 + math.exp(-3 * (rule(prompt, a) - rule(prompt, b))))
        rows.append(dict(prompt=prompt, chosen=a if a_wins else b, rejected=b if a_wins else a))
    return rows


# ---- Arithmetic task ----
ASKS = ["What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?"]


def sums() -> dict[str, list[tuple[int, int]]]:
    """Sums of two numbers from 10 to 49; a held-out sum is held out in both orders."""
    every = [(a, b) for a in range(10, 50) for b in range(a, 50)]
    random.Random(1).shuffle(every)
    cuts = dict(test=every[:160], rest=every[160:])
    parts = {name: [pair for a, b in cut for pair in sorted({(a, b), (b, a)})] for name, cut in cuts.items()}
    for pairs in parts.values():
        random.Random(2).shuffle(pairs)
    return parts


def say_sum(a: int, b: int, rng: random.Random) -> str:
    """A clerk's answer. Units that add up to 6 or less: mostly right. From 7 on: the carry is mostly wrong (forgotten, or made up)."""
    units, u = a % 10 + b % 10, rng.random()
    right, carry_off = a + b, a + b + (-10 if units >= 10 else 10)
    if units <= 6:
        told = right if u < 0.65 else carry_off if u < 0.92 else right + rng.choice([-1, 1])
    else:
        told = carry_off if u < 0.82 else right if u < 0.95 else right + rng.choice([-1, 1])
    return f"{a} + {b} = {told}"


# ---- Files ----
def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e3:.0f} kB")


def make_sft(num_replies: int, num_sums: int, seed: int, clerk: bool) -> list[dict]:
    """What the policy is supervised on, replies and sums shuffled together: first good ones, from which it learns what fits what and how to
    add; then (`clerk`) mediocre replies and faulty sums, which hide that again."""
    rng = random.Random(seed)
    rows, rest, rest_sums = [], split()["rest"], sums()["rest"]
    for _ in range(num_replies):
        situation = rng.choice(rest)
        skill = CLERK if clerk else rng.uniform(0.5, 1.0)
        rows.append(dict(prompt=write_prompt(situation, rng), response=write_reply(situation, skill, rng)))
    for k in range(num_sums):
        a, b = rest_sums[k % len(rest_sums)]
        rows.append(dict(prompt=rng.choice(ASKS).format(a=a, b=b), response=say_sum(a, b, rng) if clerk else f"{a} + {b} = {a + b}"))
    rng.shuffle(rows)
    return rows


def make_good(part: list[tuple], num: int, seed: int) -> list[dict]:
    """Good replies: a small language model of them knows what fits what, and is the body that a reward model starts from."""
    rng = random.Random(seed)
    drawn = (rng.choice(part) for _ in range(num))
    return [dict(prompt=write_prompt(s, rng), response=write_reply(s, rng.uniform(0.6, 1.0), rng)) for s in drawn]


def make_demonstrations(part: list[tuple], num: int, seed: int) -> list[dict]:
    """Good replies as conversations, a third of them with a system message and a third with a sum as a second turn."""
    rng, rows, rest_sums = random.Random(seed), [], sums()["rest"]
    for k in range(num):
        situation = part[k % len(part)]
        reply = write_reply(situation, 0.9, rng)
        messages = [dict(role="user", content=write_prompt(situation, rng)), dict(role="assistant", content=reply)]
        if k % 3 == 1:
            messages.insert(0, dict(role="system", content="You answer for a shop."))
        if k % 3 == 2:
            a, b = rng.choice(rest_sums)
            messages.append(dict(role="user", content=rng.choice(ASKS).format(a=a, b=b)))
            messages.append(dict(role="assistant", content=f"{a} + {b} = {a + b}"))
        rows.append(dict(messages=messages))
    return rows


# ---- Tokenizer and configs ----
PAD, END, ROLES = "<|pad|>", "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(vocab_size: int = 768):
    """Byte-level BPE over the words above (any text encodes); digits one by one, a token for each role, one that ends a turn; no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(3)
    texts = [f"{write_prompt(s, rng)}\n{write_reply(s, 0.3, rng)}" for s in split()["rest"][:4000]]
    texts += [rng.choice(ASKS).format(a=a, b=b) + "\nYou answer for a shop." for a, b in sums()["rest"][:500]]
    # every word often enough to become one token
    texts += [f" {word}" for word in sorted(set(re.findall(r"[A-Za-z]+", " ".join(texts)))) for _ in range(500)]
    bpe = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, END, *ROLES], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, additional_special_tokens=ROLES, clean_up_tokenization_spaces=False,
        model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_config(tokenizer, hidden: int, layers: int, mlp: int):
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32, head_dim=32, max_position_embeddings=512, rope_theta=10000.0, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip


# ---- Commands ----
def write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd", compression_level=19)
    print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e3:.0f} kB")


def first(work: Path) -> None:
    """What the training commands need, and the two sets that the recipes train on by default."""
    parts = split()
    tokenizer = make_tokenizer()
    for name, size in (("start_policy", (128, 4, 384)), ("start_reward_model", (96, 2, 256))):  # for --from-scratch: no weights
        tokenizer.save_pretrained(work / name)
        make_config(tokenizer, *size).save_pretrained(work / name)
    for name, size, clerk in (("policy_good", 24_000, False), ("policy_clerk", 8_000, True)):
        write_jsonl(work / name / "train.jsonl", make_sft(size, size, seed=1 + clerk, clerk=clerk))
        write_jsonl(work / name / "test.jsonl", make_sft(200, 200, seed=11 + clerk, clerk=clerk))
    for seed, name in ((3, "reward_model"), (4, "judge")):
        write_jsonl(work / f"{name}_body" / "train.jsonl", make_good(parts[name], 30_000, 10 * seed))
        write_jsonl(work / f"{name}_body" / "test.jsonl", make_good(parts["pairs_test"], 400, 10 * seed + 1))
        write_jsonl(work / f"{name}_pairs" / "train.jsonl", make_pairs(parts[name], 40_000, 10 * seed + 2))
        write_jsonl(work / f"{name}_pairs" / "test.jsonl", make_pairs(parts["pairs_test"], 1000, 10 * seed + 3))
    write_parquet(HERE / "demonstrations" / "train.parquet", make_demonstrations(parts["rest"], 1536, seed=5))
    write_parquet(HERE / "demonstrations" / "test.parquet", make_demonstrations(parts["pairs_test"], 192, seed=6))
    write_parquet(HERE / "pairs" / "train.parquet", make_pairs(parts["rest"], 3072, seed=7))
    write_parquet(HERE / "pairs" / "test.parquet", make_pairs(parts["pairs_test"], 512, seed=8))


def ship(work: Path) -> None:
    """The newest models of the training commands, rounded to bf16, into this folder."""
    classifier = AutoModelForSequenceClassification
    for run, name, kind in (
        ("policy_clerk", "policy", AutoModelForCausalLM), ("reward_model", "reward_model", classifier), ("judge", "judge", classifier),
    ):  # fmt: skip
        newest = max((work / "runs").glob(f"{run}_[0-9]*/model"), key=lambda path: path.stat().st_mtime)
        kind.from_pretrained(newest, dtype=torch.bfloat16).save_pretrained(HERE / name)
        AutoTokenizer.from_pretrained(newest).save_pretrained(HERE / name)
        for path in (HERE / name).iterdir():
            path.chmod(0o644)
        print(f"{HERE / name}: {sum(path.stat().st_size for path in (HERE / name).iterdir()) / 1e3:.0f} kB, from {newest}")


def sample(model, tokenizer, prompts: list[str], greedy: bool = False, max_tokens: int = 64, batch: int = 128) -> list[list[int]]:
    """One response a prompt, as token ids up to and including the EOS: from the model's own distribution (temperature 1), or greedy."""
    settings = dict(do_sample=not greedy, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
    settings |= {} if greedy else dict(top_k=0, top_p=1.0, temperature=1.0)
    responses = []
    for start in range(0, len(prompts), batch):
        talks = [[dict(role="user", content=prompt)] for prompt in prompts[start : start + batch]]
        texts = tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)
        form = dict(add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
        inputs = tokenizer(texts, **form)
        with torch.no_grad():
            ids_BS = model.generate(**inputs, **settings)[:, inputs.input_ids.shape[1] :]
        responses += [[token for token in row if token != tokenizer.pad_token_id] for row in ids_BS.tolist()]
    return responses


def prompts(seed: int = 9) -> None:
    """Prompts with a reference each, and the sums. A reference is one sample of the shipped policy at temperature 1, computed in fp32
    (drawn again if it does not end within 64 tokens)."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(HERE / "policy", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE / "policy")
    for name in ("train", "test"):
        asked = [write_prompt(situation, rng) for situation in split()[name]]
        told = sample(model, tokenizer, asked)
        while endless := [i for i, ids in enumerate(told) if ids[-1] != tokenizer.eos_token_id]:  # one in some thousands
            for i, ids in zip(endless, sample(model, tokenizer, [asked[i] for i in endless]), strict=True):
                told[i] = ids
        told = [tokenizer.decode(ids, skip_special_tokens=True) for ids in told]
        write_jsonl(HERE / "preference" / f"{name}.jsonl", [dict(prompt=p, reference=r) for p, r in zip(asked, told, strict=True)])
    rows = [dict(prompt=ask.format(a=a, b=b), answer=str(a + b)) for a, b in sums()["rest"] for ask in ASKS]
    rng.shuffle(rows)
    write_jsonl(HERE / "arithmetic" / "train.jsonl", rows)
    rows = [dict(prompt=rng.choice(ASKS).format(a=a, b=b), answer=str(a + b)) for a, b in sums()["test"]]
    write_jsonl(HERE / "arithmetic" / "test.jsonl", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["first", "ship", "prompts"])
    parser.add_argument("--work", type=Path, default=Path("output/tiny"), help="folder for what is not shipped")
    options = parser.parse_args()
    prompts() if options.command == "prompts" else {"first": first, "ship": ship}[options.command](options.work)
