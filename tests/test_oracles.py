"""oracles/reward_model.py and oracles/pairrm.py on tiny random models of the real architectures; and the examples in oracles/README.md."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2Tokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from oat_lib.oracle import load_oracle
from oracles import pairrm, reward_model

CPU = torch.device("cpu")
WORDS = ["\n", "name", "a", "colour", "red", "green", "blue", "one", "two", "bad"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '> ' + m.content }} {% endfor %}{{ eos_token }}"
ROLES = ["<user>", "<assistant>", "<system>"]
# Rows of different lengths, so that a batch of them needs padding.
PROMPTS = ["name a colour", "name", "a colour", "name a a a a a colour", "one"]
RESPONSES = ["red", "green green green blue", "two one", "blue", "red red red red red red red red"]


def word_tokenizer(specials: list[str], **named) -> PreTrainedTokenizerFast:
    """Ids: the special tokens first, in order, then WORDS. Words are split at blanks; a newline is a word."""
    tokens = specials + WORDS
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=specials[0]))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=specials[0], **named)


def bert_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer(["[UNK]", "[PAD]", "[CLS]", "[SEP]"], pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=marks)
    return tokenizer


def chat_tokenizer(pad: str = "<pad>", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Adds a BOS to plain text, and its chat template writes one too: the case in which a BOS gets doubled."""
    tokenizer = word_tokenizer(["<unk>", "<pad>", "<s>", "</s>", *ROLES], bos_token="<s>", eos_token="</s>", pad_token=pad)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.chat_template = template
    return tokenizer


def build(kind: str, folder: Path) -> Path:
    """A random classifier with one logit. The large initial weights make the scores of different rows differ visibly."""
    torch.manual_seed(0)
    if kind == "bert":
        tokenizer = bert_tokenizer()
        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=48)
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=1, num_labels=1, initializer_range=0.5, **sizes)
        model = BertForSequenceClassification(config)
    elif kind == "gpt2":  # absolute positions: a shifted row gets another score
        tokenizer = chat_tokenizer()
        sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=48)
        config = GPT2Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=1, initializer_range=0.5, **sizes)
        model = GPT2ForSequenceClassification(config)
    else:
        tokenizer = chat_tokenizer(pad="</s>" if kind == "llama, pad is eos" else "<pad>")
        pad_id = {"llama": 1, "llama, pad is eos": 3, "llama, no pad": None, "llama, another pad": 0}[kind]
        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=48)
        config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=pad_id, initializer_range=0.5, **sizes)
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


KINDS = ["bert", "gpt2", "llama", "llama, pad is eos", "llama, no pad", "llama, another pad"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {kind: build(kind, tmp_path_factory.mktemp("rm")) for kind in KINDS}


def ids_of(tokenizer, words: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids([word.replace("NL", "\n") for word in words.split(" ")])


# ---- How a pair becomes ids ----


def test_template_gives_one_bos():
    tokenizer = chat_tokenizer()
    ids = reward_model.render(tokenizer, "name a colour", "red red")
    assert ids == ids_of(tokenizer, "<s> <user> name a colour <assistant> red red </s>")
    assert ids.count(tokenizer.bos_token_id) == 1


def test_template_that_leaves_the_bos_to_the_tokenizer():
    tokenizer = chat_tokenizer(template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert reward_model.render(tokenizer, "name", "red") == ids_of(tokenizer, "<s> <user> name <assistant> red </s>")


def test_messages_go_through_the_template():
    tokenizer = chat_tokenizer()
    messages = [{"role": "system", "content": "bad"}, {"role": "user", "content": "name"}]
    assert reward_model.render(tokenizer, messages, "red") == ids_of(tokenizer, "<s> <system> bad <user> name <assistant> red </s>")
    assert len(messages) == 2  # the caller's list is left alone
    assert reward_model.render(tokenizer, messages[1:], "red") == reward_model.render(tokenizer, "name", "red")


def test_without_a_template():
    plain, pair = chat_tokenizer(template=None), bert_tokenizer()
    messages = [{"role": "user", "content": "name"}, {"role": "user", "content": "a"}]
    assert reward_model.render(plain, "name a", "red") == ids_of(plain, "<s> name a NL red")
    assert reward_model.render(plain, messages, "red") == ids_of(plain, "<s> name NL a NL red")
    ids = reward_model.render(pair, "name a", "red")
    assert ids == ids_of(pair, "[CLS] name a [SEP] red [SEP]")
    assert reward_model.segments(pair, ids) == [0, 0, 0, 0, 1, 1] == pair("name a", "red", return_token_type_ids=True).token_type_ids
    assert reward_model.render(pair, messages, "red") == ids_of(pair, "[CLS] name NL a [SEP] red [SEP]")


# ---- Scores ----


def score_alone(kind: str, folder: Path, prompt: str, response: str) -> float:
    """The score by hand: one unpadded row through the bare model, read where that model reads it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        if kind == "bert":
            row = tokenizer(prompt, response, return_tensors="pt", return_token_type_ids=True)
            assert row.token_type_ids.sum() > 0
            return model(**row).logits.item()
        ids = ids_of(tokenizer, f"<s> <user> {prompt} <assistant> {response} </s>")
        hidden = (model.transformer if kind == "gpt2" else model.model)(torch.tensor([ids])).last_hidden_state[0]
        read_at = -2 if kind == "llama, pad is eos" else -1  # the last token that is not the pad token
        return model.score(hidden[read_at]).item()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_single_rows(folders, kind):
    """Any batch size, any order, any padding side of the tokenizer: each row has the score that it has alone."""
    expected = [score_alone(kind, folders[kind], *row) for row in zip(PROMPTS, RESPONSES, strict=True)]
    assert max(expected) - min(expected) > 0.05  # or the comparisons below would show nothing
    for batch_size in (1, 2, 32):
        for side in ("left", "right"):
            oracle = reward_model.Oracle(model=str(folders[kind]), device=CPU, batch_size=batch_size)
            oracle.tokenizer.padding_side = side
            scores = oracle.score(PROMPTS, RESPONSES, ["unused"] * 5)
            assert scores == pytest.approx(expected, abs=1e-5)
            assert oracle.score(PROMPTS[::-1], RESPONSES[::-1], [""] * 5)[::-1] == pytest.approx(expected, abs=1e-5)
            assert oracle.counts == {"truncated": 0, "nonfinite": 0}
    assert oracle.score([], [], []) == []
    assert next(oracle.model.parameters()).dtype == torch.float32 and not oracle.model.training


def test_compare_is_bradley_terry(folders):
    oracle = reward_model.Oracle(model=str(folders["llama"]), device=CPU)
    x, y = oracle.score(PROMPTS, RESPONSES), oracle.score(PROMPTS, RESPONSES[::-1])
    expected = [1 / (1 + math.exp(v - u)) for u, v in zip(x, y, strict=True)]
    assert oracle.compare(PROMPTS, RESPONSES, RESPONSES[::-1]) == pytest.approx(expected, abs=1e-6)
    assert max(expected) > 0.51
    swapped = oracle.compare(PROMPTS, RESPONSES[::-1], RESPONSES)
    assert [p + q for p, q in zip(expected, swapped, strict=True)] == pytest.approx([1] * 5, abs=1e-6)
    assert oracle.compare(["name"], ["red"], ["red"]) == [0.5]
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert oracle.compare(messages, RESPONSES, RESPONSES[::-1]) == pytest.approx(expected, abs=1e-6)


def test_score_that_is_not_finite_is_no_label(folders, tmp_path):
    tokenizer, model = (auto.from_pretrained(folders["llama"]) for auto in (AutoTokenizer, AutoModelForSequenceClassification))
    model.model.embed_tokens.weight.data[tokenizer.convert_tokens_to_ids("bad")] = float("nan")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    oracle = reward_model.Oracle(model=str(tmp_path), device=CPU)
    whole = reward_model.Oracle(model=str(folders["llama"]), device=CPU)
    scores, (red, two) = oracle.score(["name"] * 3, ["red", "bad", "two one"]), whole.score(["name"] * 2, ["red", "two one"])
    assert scores[1] is None and [scores[0], scores[2]] == pytest.approx([red, two], abs=1e-5)
    assert oracle.counts["nonfinite"] == 1
    answers = oracle.compare(["name"] * 3, ["red", "bad", "two"], ["blue", "red", "bad"])
    assert answers[1:] == [None, None] and 0 < answers[0] < 1
    assert oracle.counts["nonfinite"] == 3


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_truncation_cuts_the_prompt_and_is_counted(folders, kind):
    oracle = reward_model.Oracle(model=str(folders[kind]), device=CPU, max_length=8)
    scores = oracle.score(["name green a colour colour", "name"], ["red green", "red"])
    assert oracle.counts["truncated"] == 1
    kept = {"bert": "[CLS] a colour colour [SEP] red green [SEP]", "llama": "<s> a colour colour <assistant> red green </s>"}[kind]
    ids = ids_of(oracle.tokenizer, kept)
    assert len(ids) == 8
    types = {"token_type_ids": torch.tensor([[0] * 5 + [1] * 3])} if kind == "bert" else {}
    with torch.inference_mode():
        assert scores[0] == pytest.approx(oracle.model(input_ids=torch.tensor([ids]), **types).logits.item(), abs=1e-5)
    assert reward_model.Oracle(model=str(folders[kind]), device=CPU).max_length == 48  # the model's own limit
    oracle.score(["name"], ["red " * 20])  # a response that does not fit alone is cut as well, and counted
    assert oracle.counts["truncated"] == 2


def one_line(error) -> str:
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


def test_models_that_cannot_give_one_score_are_refused(folders, tmp_path):
    with pytest.raises(SystemExit) as error:
        reward_model.Oracle(model=str(tmp_path / "nowhere"))
    assert "there is no folder" in one_line(error)
    with pytest.raises(SystemExit) as error:
        reward_model.Oracle(model=str(tmp_path))  # a folder without a model
    assert str(tmp_path) in one_line(error)

    two = BertConfig(vocab_size=14, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2)
    BertForSequenceClassification(two).save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as error:
        reward_model.Oracle(model=str(tmp_path))
    assert "2 logits" in one_line(error)

    one = BertConfig(vocab_size=14, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1)
    BertModel(one).save_pretrained(tmp_path)  # no head: it would be drawn at random
    with pytest.raises(SystemExit) as error:
        reward_model.Oracle(model=str(tmp_path))
    assert "classifier.weight" in one_line(error)

    copy_with(folders["bert"], tmp_path, lambda weights: weights.update({"classifier.weight": torch.zeros(1, 8)}))
    with pytest.raises(SystemExit) as error:
        reward_model.Oracle(model=str(tmp_path))
    assert "classifier.weight" in one_line(error)


def test_found_by_name_and_from_the_command_line(folders, capsys):
    oracle = load_oracle("reward_model", CPU, str(folders["gpt2"]))
    (score,) = oracle.score(["name"], ["red"], [""])
    reward_model.main(str(folders["gpt2"]), prompt="name", responses=["red", "blue"])
    assert capsys.readouterr().out.splitlines()[0] == f"{score:+.4f}  'red'"


# ---- PairRM ----


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory) -> Path:
    """PairRM with DeBERTa-v3's settings (relative positions, no absolute ones, no segments), 2 layers of 32."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pairrm")
    vocab = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)] + [("▁" + word, -1.0) for word in WORDS[1:]]
    tokenizer = DebertaV2Tokenizer(vocab=vocab, unk_id=3)
    tokenizer.add_tokens(["<|source|>", "<|candidate|>", "<|candidate1|>", "<|candidate2|>"])
    tokenizer.save_pretrained(folder)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64)
    relative = dict(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm")
    names = ["<|source|>", "<|candidate|>", "<|candidate1|>", "<|candidate2|>"]
    marks = dict(zip(["source", "cand", "cand1", "cand2"], tokenizer.convert_tokens_to_ids(names), strict=True))
    marks = {f"{name}_prefix_id": i for name, i in marks.items()}
    config = DebertaV2Config(vocab_size=len(tokenizer), initializer_range=0.5, pad_token_id=0, position_biased_input=False,
                             type_vocab_size=0, n_tasks=1, drop_out=0.05, **sizes, **relative, **marks)
    pairrm.PairRM(config).save_pretrained(folder)
    return folder


def pair_ids(oracle, tokens: str) -> list[int]:
    return oracle.tokenizer.convert_tokens_to_ids(["▁" + token if token in WORDS else token for token in tokens.split()])


def test_pairrm_key_names_are_the_published_ones(pair_folder):
    keys = set(load_file(pair_folder / "model.safetensors"))
    head = {"head_layer.1.weight", "head_layer.1.bias", "head_layer.4.weight", "head_layer.4.bias"}
    assert {key for key in keys if not key.startswith("pretrained_model.")} == head
    assert {"pretrained_model.embeddings.word_embeddings.weight", "pretrained_model.encoder.rel_embeddings.weight"} <= keys
    assert "pretrained_model.encoder.layer.1.attention.self.query_proj.weight" in keys


def test_pairrm_rows_and_marker_positions(pair_folder):
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU)
    ids, positions, cuts = oracle.row("name a colour", "red", "green blue")
    segments = ["[CLS] <|source|> name a colour [SEP]", "[CLS] <|candidate1|> red [SEP]", "[CLS] <|candidate2|> green blue [SEP]"]
    assert ids == pair_ids(oracle, " ".join(segments))
    assert positions == [1, 7, 11] and cuts == [False, False, False]


def test_pairrm_by_hand(pair_folder):
    """Features gathered at the markers, the head and the average over both orders, each written out."""
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU)
    weights = load_file(pair_folder / "model.safetensors")
    sigmoids = []
    for first, second in (("red", "green blue"), ("green blue", "red")):
        ids, positions, _ = oracle.row("name a colour", first, second)
        with torch.inference_mode():
            row = torch.tensor([ids])
            hidden = oracle.model.pretrained_model(row).last_hidden_state[0]
            source, one, two = (hidden[ids.index(mark)] for mark in pair_ids(oracle, "<|source|> <|candidate1|> <|candidate2|>"))
            features = oracle.model.features(row, torch.ones_like(row), torch.tensor([positions]))[0]
        by_hand = torch.stack([torch.cat([source, one]), torch.cat([source, two])])
        torch.testing.assert_close(features, by_hand)
        inner = torch.tanh(by_hand @ weights["head_layer.1.weight"].T + weights["head_layer.1.bias"])
        left, right = (inner @ weights["head_layer.4.weight"].T + weights["head_layer.4.bias"])[:, 0]
        sigmoids.append(torch.sigmoid(left - right).item())
    assert abs(sigmoids[0] + sigmoids[1] - 1) > 1e-3  # one order alone is not symmetric
    (answer,) = oracle.compare(["name a colour"], ["red"], ["green blue"])
    assert answer == pytest.approx((sigmoids[0] + 1 - sigmoids[1]) / 2, abs=1e-5)


def test_pairrm_swap_batch_and_order(pair_folder):
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU)
    a, b = RESPONSES, RESPONSES[2:] + RESPONSES[:2]
    answers = oracle.compare(PROMPTS, a, b)
    assert max(abs(p - 0.5) for p in answers) > 0.05
    assert oracle.compare(PROMPTS, b, a) == pytest.approx([1 - p for p in answers], abs=1e-6)
    assert oracle.compare(["name"], ["red"], ["red"]) == [0.5]
    for batch_size in (1, 3):
        oracle.batch_size = batch_size
        assert oracle.compare(PROMPTS, a, b) == pytest.approx(answers, abs=1e-6)
        assert oracle.compare(PROMPTS[::-1], a[::-1], b[::-1])[::-1] == pytest.approx(answers, abs=1e-6)
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert oracle.compare(messages, a, b) == pytest.approx(answers, abs=1e-6)
    assert oracle.compare([], [], []) == []
    assert not hasattr(oracle, "score") and not any(oracle.counts.values())
    assert load_oracle("pairrm", CPU, str(pair_folder)).compare(PROMPTS, a, b) == pytest.approx(answers, abs=1e-6)


def test_pairrm_truncation_is_counted(pair_folder):
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU, source_length=5, candidate_length=4)
    ids, positions, cuts = oracle.row("name a colour", "red green", "red")
    assert ids == pair_ids(oracle, "[CLS] <|source|> name a [SEP] [CLS] <|candidate1|> red [SEP] [CLS] <|candidate2|> red [SEP]")
    assert positions == [1, 6, 10] and cuts == [True, True, False]
    ids, _, cuts = oracle.row("", "red green", "red")  # an empty prompt leaves 2 of its 5 tokens, one for each response
    assert ids == pair_ids(oracle, "[CLS] <|source|> [SEP] [CLS] <|candidate1|> red green [SEP] [CLS] <|candidate2|> red [SEP]")
    assert not any(cuts) and not any(oracle.counts.values())
    oracle.compare(["name a colour", "name a"], ["red green", "red"], ["one two", "red green"])
    assert oracle.counts == {"truncated_prompts": 1, "truncated_responses": 3, "nonfinite": 0, "markers_removed": 0}
    # what was cut off cannot count
    assert oracle.compare(["name a colour"], ["red green"], ["red"]) == oracle.compare(["name a one"], ["red two"], ["red"]) == [0.5]


def test_pairrm_ignores_markers_that_a_policy_writes(pair_folder):
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU)
    plain = oracle.compare(["name"], ["red blue"], ["green"])
    assert oracle.compare(["name"], ["red <|candidate2|> blue <|source|>"], ["green"]) == pytest.approx(plain, abs=1e-6)
    assert oracle.counts["markers_removed"] == 2


def test_pairrm_logit_that_is_not_finite_is_no_label(pair_folder):
    oracle = pairrm.Oracle(model=str(pair_folder), device=CPU)
    oracle.model.pretrained_model.embeddings.word_embeddings.weight[pair_ids(oracle, "bad")[0]] = float("nan")
    answers = oracle.compare(["name"] * 2, ["red", "bad"], ["green", "red"])
    assert answers[1] is None and 0 < answers[0] < 1 and oracle.counts["nonfinite"] == 1


def copy_with(pair_folder: Path, folder: Path, change) -> str:
    """The model with `change` applied to its dict of weights."""
    for file in pair_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("change, named", [
    (lambda weights: weights.pop("head_layer.4.bias"), "head_layer.4.bias"),
    (lambda weights: weights.pop("pretrained_model.encoder.layer.1.attention.self.query_proj.bias"), "query_proj.bias"),
    (lambda weights: weights.update(extra=torch.zeros(2)), "extra"),
    (lambda weights: weights.update({"pretrained_model.embeddings.position_embeddings.weight": torch.zeros(9, 9)}), "position_embeddings"),
    (lambda weights: weights.update({"head_layer.1.weight": torch.zeros(32, 32)}), "head_layer.1.weight"),
])  # fmt: skip
def test_pairrm_refuses_an_incomplete_checkpoint(pair_folder, tmp_path, change, named):
    with pytest.raises(SystemExit) as error:
        pairrm.Oracle(model=copy_with(pair_folder, tmp_path, change))
    assert named in one_line(error)


def test_pairrm_takes_the_position_ids_of_old_releases(pair_folder, tmp_path):
    old = copy_with(pair_folder, tmp_path, lambda w: w.update({"pretrained_model.embeddings.position_ids": torch.arange(64)[None]}))
    expected = pairrm.Oracle(model=str(pair_folder)).compare(PROMPTS, RESPONSES, RESPONSES[::-1])
    assert pairrm.Oracle(model=old).compare(PROMPTS, RESPONSES, RESPONSES[::-1]) == pytest.approx(expected, abs=1e-6)


def test_pairrm_refuses_other_models(folders, pair_folder, tmp_path):
    with pytest.raises(SystemExit) as error:
        pairrm.Oracle(model=str(tmp_path / "nowhere"))
    assert "there is no folder" in one_line(error)
    with pytest.raises(SystemExit) as error:
        pairrm.Oracle(model=str(folders["bert"]))
    assert "not a PairRM" in one_line(error)
    other = Path(copy_with(pair_folder, tmp_path, lambda weights: None))
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(re.sub(r'"source_prefix_id": \d+', '"source_prefix_id": 5', text))
    with pytest.raises(SystemExit) as error:
        pairrm.Oracle(model=str(other))
    assert "<|source|>" in one_line(error)


def test_refused_after_zero3_began(folders, pair_folder):
    """ZeRO-3 partitions whatever is loaded while its config lives; an oracle's weights would be empty outside an engine."""
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    try:
        for oracle, folder in ((reward_model.Oracle, folders["llama"]), (pairrm.Oracle, pair_folder)):
            with pytest.raises(RuntimeError, match="before the models"):
                oracle(model=str(folder))
    finally:
        unset_hf_deepspeed_config()
        del config
    assert reward_model.Oracle(model=str(folders["llama"])).score(["name"], ["red"])[0] is not None


# ---- The examples in the README ----


def test_the_readme_examples_run(folders, tmp_path):
    text = (Path(reward_model.__file__).parent / "README.md").read_text()
    code, shorter = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "my_task.py"
    file.write_text(code)
    oracle = load_oracle(f"{file}:MyOracle", CPU)
    responses = ['{"name": "Ada", "age": 36}', '{"name": "Ada"}', "Ada, 36", '{"name": "Ada"}']
    assert oracle.score(["Who?"] * 4, responses, ["name, age", "name, age", "name, age", ""]) == [1.0, 0.5, 0.0, None]
    assert oracle.counts == {"not_json": 1}
    file.write_text(shorter)
    oracle = load_oracle(f"{file}:Shorter", CPU, str(folders["llama"]))
    assert (oracle.batch_size, oracle.max_length) == (8, 1024)
    assert oracle.score(["name"], ["red"]) == reward_model.Oracle(model=str(folders["llama"])).score(["name"], ["red"])
