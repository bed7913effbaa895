"""Prompts from every kind of file, and the order in which a run sees them."""

import datasets
import pytest
from transformers import AutoTokenizer

from oat_lib import data, tiny

ROWS = [dict(prompt=f"Prompt number {i}.", reference=f"Answer {i}.") for i in range(9)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.POLICY)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "folder", "saved", "saved_dict"])
def test_every_form(tmp_path, form):
    rows, spec = datasets.Dataset.from_list(ROWS), tmp_path / f"rows.{form}"
    if form in ("jsonl", "json"):
        rows.to_json(spec)
    elif form in ("csv", "parquet"):
        getattr(rows, f"to_{form}")(spec)
    elif form == "folder":
        spec.mkdir()
        rows.to_json(spec / "train.jsonl")
    else:
        (datasets.DatasetDict(train=rows) if form == "saved_dict" else rows).save_to_disk(spec)
    assert data.load_rows(str(spec), "train")["prompt"][:] == [row["prompt"] for row in ROWS]


def test_what_is_wrong_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "a.txt").write_text("x")
    rows = data.load_rows(str(tmp_path / "a.jsonl"), "train")
    with pytest.raises(SystemExit, match="--input-key prompt: no such column; the data has question, answer"):
        data.column(rows, "prompt", "--input-key")
    for name, said in (("empty.jsonl", "empty"), ("a.txt", "unknown file type"), ("none.jsonl", "no such file"), ("", "no train.jsonl")):
        with pytest.raises(SystemExit, match=said):
            data.load_rows(str(tmp_path / name), "train")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(SystemExit, match="no split 'test'; it has train"):
        data.load_rows(str(tmp_path / "saved"), "test")


def load(tmp_path, tokenizer, rows, max_length=40, **kwargs):
    datasets.Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    return data.load_prompts(str(tmp_path / "rows.jsonl"), "train", tokenizer, "prompt", "reference", -1, max_length, **kwargs)


def test_long_and_empty_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [*ROWS, dict(prompt="word " * 200, reference="x"), dict(prompt="", reference="x")]
    prompts, report = load(tmp_path, tokenizer, rows)
    assert [p.index for p in prompts] == list(range(9))
    assert (report["rows"], report["kept"], report["too_long"], report["no_prompt"]) == (11, 9, 1, 1)
    assert "1 dropped as too long, 1 as empty" in data.describe("x", report)
    with pytest.raises(SystemExit, match="9 are longer than --prompt-max-length 2 tokens"):
        load(tmp_path, tokenizer, ROWS, max_length=2)


def test_references_are_needed_or_not(tmp_path, tokenizer):
    rows = [dict(prompt="a")]
    assert load(tmp_path, tokenizer, rows, need_references=False)[0][0].reference is None
    with pytest.raises(SystemExit, match="--output-key reference: no such column; the data has prompt"):
        load(tmp_path, tokenizer, rows)


def test_messages_and_system_prompts(tmp_path, tokenizer):
    talk = [dict(role="user", content="Hi."), dict(role="assistant", content="Yes?"), dict(role="user", content="A lamp.")]
    (prompt,), report = load(tmp_path, tokenizer, [dict(prompt=talk, reference="x")], system_prompt="Be kind.")
    assert report["template"] and prompt.raw == talk
    assert prompt.text.index("Be kind.") < prompt.text.index("Hi.") < prompt.text.index("Yes?") < prompt.text.index("A lamp.")
    with pytest.raises(SystemExit, match="lists of messages"):
        load(tmp_path, tokenizer, [dict(prompt=talk, reference="x")], apply_chat_template=False)
    with pytest.raises(SystemExit, match="--system-prompt needs a chat template"):
        load(tmp_path, tokenizer, ROWS, apply_chat_template=False, system_prompt="Be kind.")


def test_when_the_template_is_used(tokenizer):
    assert data.wants_chat_template(tokenizer, "Hi.", None)[0] is True
    assert data.wants_chat_template(tokenizer, "Hi.", False)[0] is False
    text = data.render(tokenizer, "Hi.", True)[0]
    assert data.wants_chat_template(tokenizer, text, None)[0] is False  # it went through a template already
    plain = AutoTokenizer.from_pretrained(tiny.POLICY)
    plain.chat_template = None
    assert data.wants_chat_template(plain, "Hi.", None)[0] is False
    with pytest.raises(SystemExit, match="no chat template"):
        data.wants_chat_template(plain, "Hi.", True)


def test_exactly_one_bos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny.POLICY)
    bos = tokenizer.convert_ids_to_tokens(tokenizer.pad_token_id)
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    for raw, template in (("Hi.", True), ("Hi.", False), (bos + "Hi.", False)):
        assert data.render(tokenizer, raw, template)[1].count(tokenizer.bos_token_id) == 1


def test_every_prompt_once_an_epoch():
    prompts = [data.Prompt(i, "", "", [], None) for i in range(9)]
    batches = [data.take(at, 6, prompts, seed=3) for at in (0, 6, 12)]
    seen = [(epoch, p.index) for batch in batches for epoch, p in batch]
    assert sorted(seen) == sorted((epoch, i) for epoch in (0, 1) for i in range(9))
    assert seen == [(e, p.index) for e, p in data.take(0, 18, prompts, seed=3)]  # whatever the batches, and from any position
    assert [i for e, i in seen if e == 0] != [i for e, i in seen if e == 1]
    assert seen != [(e, p.index) for e, p in data.take(0, 18, prompts, seed=4)]


def test_shares_lose_nothing():
    for n in range(10):
        for world in (1, 2, 3, 4):
            shares = [data.share(list(range(n)), rank, world) for rank in range(world)]
            assert sum(shares, []) == list(range(n)) and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_pad_and_budget():
    ids, attention = data.pad([[1, 2], [3]], 0, "left")
    assert ids.tolist() == [[1, 2], [0, 3]] and attention.tolist() == [[1, 1], [0, 1]]
    assert data.prompt_budget(512, 128, None) == 384 and data.prompt_budget(8192, 128, None) == 1024
    with pytest.raises(SystemExit, match="exceed the model's context of 512"):
        data.prompt_budget(512, 128, 400)


def test_prompts_that_are_not_text_are_refused(tmp_path, tokenizer):
    with pytest.raises(SystemExit, match="column 'prompt' holds int, not text or lists of messages"):
        load(tmp_path, tokenizer, [dict(prompt=1, reference="x")])
    with pytest.raises(SystemExit, match="column 'prompt' has no prompt in it"):
        load(tmp_path, tokenizer, [dict(prompt="", reference="x")])


def test_only_the_first_rows_are_read_and_a_reference_of_another_type_is_json(tmp_path, tokenizer):
    datasets.Dataset.from_list([dict(prompt=f"{i}?", reference=[i]) for i in range(5)]).to_json(tmp_path / "rows.jsonl")
    prompts, report = data.load_prompts(str(tmp_path / "rows.jsonl"), "train", tokenizer, "prompt", "reference", 3, 40)
    assert [p.reference for p in prompts] == ["[0]", "[1]", "[2]"] and report["rows"] == 3


def test_the_stream_goes_on_from_any_position_in_batches_of_any_size():
    prompts = [data.Prompt(i, "", "", [], None) for i in range(9)]
    whole = [(e, p.index) for e, p in data.take(0, 40, prompts, seed=3)]
    for start, size in ((5, 1), (8, 7), (13, 4)):
        later = [(e, p.index) for at in range(start, 40, size) for e, p in data.take(at, min(size, 40 - at), prompts, seed=3)]
        assert later == whole[start:]
    assert [data.share([0], r, 4) for r in range(4)] == [[], [], [], [0]]
    assert [data.share([0, 1, 2], r, 4) for r in range(4)] == [[], [0], [1], [2]]


def test_budget_at_its_edges():
    assert data.prompt_budget(512, 128, 384) == 384
    for context, new, flag in ((128, 128, None), (512, 128, 385), (100, 128, None)):
        with pytest.raises(SystemExit, match=f"exceed the model's context of {context}"):
            data.prompt_budget(context, new, flag)
    ids, attention = data.pad([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]] and attention.tolist() == [[1, 1, 1], [1, 0, 0]]
