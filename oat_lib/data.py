"""Prompts: from a file, a saved dataset or the hub, to token ids; and the order in which a run sees them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class Prompt:
    index: int  # row in its split: the seed of its samples depends on it, not on the rank that gets it
    raw: str | list[dict]  # as in the data: what the oracle sees
    text: str  # as rendered for the policy
    ids: list[int]
    reference: str | None


def load_rows(spec: str, split: str, flag: str = "--prompt-data"):
    """The split's rows as a `datasets.Dataset`.

    spec: a json, jsonl, csv or parquet file (one split: `split` is ignored); a folder with SPLIT.jsonl and the like; a dataset
    saved with `save_to_disk`; or a hub name, `config@name` for a configuration. Raises SystemExit saying what was looked for.
    """
    import datasets

    datasets.disable_progress_bars()
    path = Path(spec)
    try:
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise SystemExit(f"{flag} {spec}: unknown file type {path.suffix!r}; use {', '.join(SUFFIXES)}")
            if path.stat().st_size == 0:
                raise SystemExit(f"{flag} {spec}: the dataset is empty")
            rows = datasets.load_dataset(SUFFIXES[path.suffix], data_files=str(path), split="train")
        elif path.is_dir():
            files = [path / (split + suffix) for suffix in SUFFIXES if (path / (split + suffix)).is_file()]
            if files:
                rows = datasets.load_dataset(SUFFIXES[files[0].suffix], data_files=str(files[0]), split="train")
            elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
                loaded = datasets.load_from_disk(str(path))
                if isinstance(loaded, datasets.DatasetDict) and split not in loaded:
                    raise SystemExit(f"{flag} {spec}: no split {split!r}; it has {', '.join(loaded)}")
                rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                names = sorted(p.name for p in path.iterdir())
                raise SystemExit(f"{flag} {spec}: no {split}.jsonl (or .json, .csv, .parquet) and no saved dataset in it; found {names}")
        elif path.suffix in SUFFIXES or spec.startswith((".", "/")) or spec.count("/") > 1:
            raise SystemExit(f"{flag} {spec}: no such file or folder")
        else:
            config, _, name = spec.rpartition("@")
            rows = datasets.load_dataset(name, config or None, split=split)
    except SystemExit:
        raise
    except Exception as e:  # many kinds, from pyarrow's to the hub's: each is about the user's data, none is ours to hide
        raise SystemExit(f"{flag} {spec} (split {split!r}): {type(e).__name__}: {(str(e).strip().splitlines() or ['no rows'])[0]}") from e
    if len(rows) == 0:
        raise SystemExit(f"{flag} {spec} (split {split!r}): the dataset is empty")
    return rows


def column(rows, key: str, flag: str) -> list:
    """One column as a list. Raises SystemExit that lists the columns that exist."""
    if key not in rows.column_names:
        raise SystemExit(f"{flag} {key}: no such column; the data has {', '.join(rows.column_names)}")
    return rows[key][:]


def wants_chat_template(tokenizer, raw: str | list[dict], flag: bool | None) -> tuple[bool, str]:
    """Whether prompts go through the chat template, and why, in words for the log. `flag` (--apply-chat-template) wins.

    Silent default: lists of messages do; plain text does when the tokenizer has a template and the text holds none of its
    special tokens (then it went through a template already). Raises SystemExit for a template that does not exist.
    """
    has = bool(tokenizer.chat_template)
    if isinstance(raw, list):
        if flag is False or not has:
            raise SystemExit("the prompts are lists of messages, which only a chat template renders: " +
                             ("drop --no-apply-chat-template" if has else "this tokenizer has none"))
        return True, "the prompts are lists of messages"
    if flag is not None:
        if flag and not has:
            raise SystemExit("--apply-chat-template: this tokenizer has no chat template; drop the flag or set one in its folder")
        return flag, "by the flag"
    marks = [t for t in tokenizer.all_special_tokens if t and t in raw]
    if marks:
        return False, f"the prompts hold {marks[0]} already"
    return has, "the tokenizer has one" if has else "the tokenizer has none"


def render(tokenizer, raw: str | list[dict], apply_chat_template: bool, system_prompt: str | None = None) -> tuple[str, list[int]]:
    """Text and ids of a prompt as the policy gets it: exactly one BOS where the tokenizer uses one, no EOS.

    Templated text holds its own special tokens (the template decides), so it is tokenised without adding them again.
    Raises SystemExit for a system prompt without a template.
    """
    if apply_chat_template:
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else list(raw)
        if system_prompt:
            messages = [{"role": "system", "content": system_prompt}] + [m for m in messages if m["role"] != "system"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]
    if system_prompt:
        raise SystemExit("--system-prompt needs a chat template: use --apply-chat-template, or put it into the prompts")
    templated = bool(tokenizer.bos_token) and raw.startswith(tokenizer.bos_token)
    ids = tokenizer(raw, add_special_tokens=not templated)["input_ids"]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not raw.endswith(tokenizer.eos_token):
        ids = ids[:-1]  # some tokenizers close a text with an EOS; a prompt is not closed
    return raw, list(ids)


def load_prompts(spec: str, split: str, tokenizer, input_key: str, output_key: str, max_rows: int, max_length: int,
                 apply_chat_template: bool | None = None, system_prompt: str | None = None, flag: str = "--prompt-data",
                 need_references: bool = True) -> tuple[list[Prompt], dict]:
    """The first `max_rows` rows as prompts of at most `max_length` tokens, and a report of what was done and dropped.

    need_references: whether every prompt must have one in column `output_key`; else they are taken where there are any.
    Report: rows (read), kept, too_long, no_prompt (empty or missing), template (bool), why (words). Raises SystemExit when a column is
    missing, nothing is left, or a reference is missing.
    """
    rows = load_rows(spec, split, flag)
    rows = rows.select(range(min(max_rows, len(rows)))) if max_rows > 0 else rows
    raws = column(rows, input_key, "--input-key")
    absent = not need_references and output_key not in rows.column_names
    references = [None] * len(raws) if absent else column(rows, output_key, "--output-key")
    first = next((r for r in raws if r), None)
    if first is None:
        raise SystemExit(f"{flag} {spec}: column {input_key!r} has no prompt in it")
    if not isinstance(first, str | list):
        raise SystemExit(f"{flag} {spec}: column {input_key!r} holds {type(first).__name__}, not text or lists of messages")
    template, why = wants_chat_template(tokenizer, first, apply_chat_template)
    prompts, report = [], dict(rows=len(raws), kept=0, too_long=0, no_prompt=0, template=template, why=why)
    longest = 0
    for index, (raw, reference) in enumerate(zip(raws, references, strict=True)):
        if not raw:
            report["no_prompt"] += 1
            continue
        text, ids = render(tokenizer, raw, template, system_prompt)
        longest = max(longest, len(ids))
        if len(ids) > max_length:
            report["too_long"] += 1
            continue
        if need_references and reference is None:
            raise SystemExit(f"{flag} {spec}: row {index} of split {split!r} has no {output_key!r}")
        reference = reference if reference is None or isinstance(reference, str) else json.dumps(reference)
        prompts.append(Prompt(index, raw, text, ids, reference))
    report["kept"] = len(prompts)
    if not prompts:
        raise SystemExit(f"{flag} {spec} (split {split!r}): none of {len(raws)} prompts is left: {report['too_long']} are longer than "
                         f"--prompt-max-length {max_length} tokens (the longest has {longest}), {report['no_prompt']} are empty")
    return prompts, report


def prompt_budget(context: int, new_tokens: int, prompt_max_length: int | None) -> int:
    """Tokens that a prompt may have: the flag, else 1024 or what the context leaves. Raises SystemExit when both do not fit the context."""
    length = prompt_max_length or min(1024, context - new_tokens)
    if length <= 0 or length + new_tokens > context:
        raise SystemExit(f"--prompt-max-length {length} + --generate-max-length {new_tokens} exceed the model's context of {context}")
    return length


def describe(spec: str, report: dict) -> str:
    """What `load_prompts` did, in a line for the log."""
    dropped = f" ({report['too_long']} dropped as too long, {report['no_prompt']} as empty)" if report["kept"] < report["rows"] else ""
    template = f"chat template: {'yes' if report['template'] else 'no'}, {report['why']}"
    return f"{spec}: {report['kept']} of {report['rows']} prompts{dropped}; {template}"


def take(position: int, count: int, prompts: list[Prompt], seed: int) -> list[tuple[int, Prompt]]:
    """`count` (epoch, prompt) from a position of the endless stream of shuffled epochs: every prompt once an epoch, none dropped.

    The stream depends on the seed alone, so a resumed run and any number of processes see the same one.
    """
    taken, orders = [], {}
    for at in range(position, position + count):
        epoch, place = divmod(at, len(prompts))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(len(prompts))
        taken.append((epoch, prompts[orders[epoch][place]]))
    return taken


def share(items: list, rank: int, world_size: int) -> list:
    """This rank's contiguous share; shares differ by one at most, and together they are all of the items, in order."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def pad(rows: list[list[int]], pad_id: int, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """ids_BS and attention_BS (1 = real token), both int64, padded to the longest row."""
    width = max(map(len, rows))
    ids, attention = torch.full((len(rows), width), pad_id), torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], attention[i, at] = torch.tensor(row, dtype=torch.long), 1
    return ids, attention
