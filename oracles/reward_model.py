"""A reward model in the actor's process: any sequence classifier with one logit, with its own tokenizer and chat template.

score = the logit; compare = sigmoid(score_a - score_b), the model of Bradley & Terry (1952) that Ouyang et al. (2022, eq. 1) fit.

    --oracle reward_model                                  the embedded reward model
    --oracle reward_model --oracle-model PATH_OR_HUB_NAME
    python oracles/reward_model.py --model PATH_OR_HUB_NAME --prompt "Name a fruit." --responses "An apple." "No."

How a prompt and a response become token ids is `render` below. A reward model is only right on the text that it was trained on, so
recipes/reward_model.py trains on exactly this form.
"""

import math
from pathlib import Path

import torch
import tyro
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

from oat_lib import tiny


def render(tokenizer, prompt: str | list[dict], response: str) -> list[int]:
    """Token ids of one (prompt, response), in the form that the reward model's own tokenizer asks for. `prompt` is raw text or messages.

    1. With a chat template: messages + {"role": "assistant", "content": response} (a str prompt is one user message), no generation prompt,
       tokenised *without* special tokens: the template writes BOS and EOS, so that none is doubled. Where it leaves out a BOS that the
       tokenizer puts before plain text, the BOS is put before it.
    2. No template, but [CLS] and [SEP] (BERT and its kin): the pair (prompt, response), [CLS] prompt [SEP] response [SEP].
    3. Neither: prompt + "\n" + response, with the special tokens that the tokenizer adds by itself (a BOS, or nothing); no EOS is appended.
    Without a template, messages become their contents joined by newlines.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], tokenize=False)
        ids, bos = tokenizer(text, add_special_tokens=False).input_ids, tokenizer.bos_token_id
        return [bos] + ids if bos is not None and tokenizer("").input_ids[:1] == [bos] != ids[:1] else ids
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        return tokenizer(text, response).input_ids
    return tokenizer(text + "\n" + response).input_ids


def segments(tokenizer, ids: list[int]) -> list[int]:
    """Segment (token type) ids of a rendered pair: 0 up to and including the first [SEP], 1 after it. For models that embed segments."""
    first = ids.index(tokenizer.sep_token_id) + 1 if tokenizer.sep_token_id in ids else len(ids)
    return [0] * first + [1] * (len(ids) - first)


class Oracle:
    """`score` and `compare` by a reward model.

    model: directory or hub name. device: where it runs. dtype: default float32 on CPU, bfloat16 elsewhere; scores are float32 at the end.
    batch_size: rows of a forward pass (rows are sorted by length first). max_length: tokens a row may have, default the model's own limit;
    a longer row loses tokens from its left, so from the prompt, after a leading BOS or [CLS], and keeps the end of the response.
    counts: rows truncated and rows without a finite score so far. Raises SystemExit, in one line, for a model that cannot give one score.
    """

    def __init__(self, model="", device="cpu", dtype: torch.dtype | None = None, batch_size: int = 32, max_length: int | None = None):
        if is_deepspeed_zero3_enabled():  # set by learner.load_model, and from then on every from_pretrained is partitioned
            raise RuntimeError("create the oracle before the models that ZeRO-3 partitions: it runs outside their engine")
        model = str(model) or tiny.REWARD_MODEL
        # A missing folder must not be looked up on the hub: that would be a network call and an answer about something else.
        if (model[0] in "/." or model.count("/") > 1) and not Path(model).is_dir():
            raise SystemExit(f"reward model: there is no folder {model}")
        self.device = torch.device(device)
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            if config.num_labels != 1:
                raise ValueError(f"it has {config.num_labels} logits, and a reward model has one (num_labels=1)")
            self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            load = AutoModelForSequenceClassification.from_pretrained
            strict = dict(trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True)  # judged below
            self.model, info = load(model, config=config, dtype=dtype, **strict)
        except (OSError, ValueError) as error:
            raise SystemExit(f"reward model {model}: " + " ".join(str(error).split())[:300]) from error
        random = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
        if random:
            raise SystemExit(f"reward model {model}: no weights in the checkpoint for {', '.join(random[:3])}; its scores would be random")
        self.model.to(self.device).eval().requires_grad_(False)
        self.text_config = self.model.config.get_text_config()
        self.segments = getattr(self.text_config, "type_vocab_size", 0) > 1 and not self.tokenizer.chat_template
        limits = (self.tokenizer.model_max_length, getattr(self.text_config, "max_position_embeddings", None) or math.inf)
        self.max_length, self.batch_size = max_length or min(limits), batch_size
        # Decoder classifiers read the score at the last token that is not config.pad_token_id: rows are padded with that id and no other.
        # With pad == eos it is the token before the final EOS, in every batch, as in training; a config without one reads the last token.
        self.pad_id = self.text_config.pad_token_id
        self.pad_id = None if self.pad_id is None or self.pad_id < 0 else self.pad_id
        self.counts = {"truncated": 0, "nonfinite": 0}

    @torch.inference_mode()
    def score(self, prompts: list[str | list[dict]], responses: list[str], references: list[str] | None = None) -> list[float | None]:
        """One logit per (prompt, response), in order; None where it is not finite. The references are not used."""
        rows = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = render(self.tokenizer, prompt, response)
            types = segments(self.tokenizer, ids) if self.segments else [0] * len(ids)
            if (excess := len(ids) - self.max_length) > 0:
                keep = 1 if ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else 0
                ids, types = ids[:keep] + ids[keep + excess :], types[:keep] + types[keep + excess :]
                self.counts["truncated"] += 1
            rows.append((ids, types))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        scores: list[float | None] = [None] * len(rows)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            pad_id = self.pad_id
            if pad_id is None:  # an id that ends no row here, so that the last token that is not padding is the last token
                last = {rows[i][0][-1] for i in batch}
                pad_id = self.text_config.pad_token_id = next(token for token in range(len(batch) + 1) if token not in last)
            # Always padded on the right, whatever the tokenizer's side: left padding would shift absolute positions, and the score.
            ids_BS = torch.full((len(batch), len(rows[batch[-1]][0])), pad_id)
            mask_BS, types_BS = torch.zeros_like(ids_BS), torch.zeros_like(ids_BS)
            for row, i in enumerate(batch):
                ids, types = rows[i]
                ids_BS[row, : len(ids)], mask_BS[row, : len(ids)], types_BS[row, : len(ids)] = torch.tensor(ids), 1, torch.tensor(types)
            inputs = {"input_ids": ids_BS, "attention_mask": mask_BS} | ({"token_type_ids": types_BS} if self.segments else {})
            logits_B = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).logits[:, 0].float()
            for i, value in zip(batch, logits_B.tolist(), strict=True):
                scores[i] = value if math.isfinite(value) else None
        self.counts["nonfinite"] += scores.count(None)
        return scores

    def compare(self, prompts: list[str | list[dict]], a: list[str], b: list[str]) -> list[float | None]:
        """P(a wins) = sigmoid(score_a - score_b), one per prompt; None where either score is None."""
        scores = self.score([*prompts, *prompts], [*a, *b])
        pairs = zip(scores[: len(a)], scores[len(a) :], strict=True)
        return [None if x is None or y is None else torch.sigmoid(torch.tensor(x - y, dtype=torch.float64)).item() for x, y in pairs]


def main(model: str = "", *, prompt: str, responses: list[str]) -> None:
    """Prints the score of each response.

    Args:
        model: directory or hub name of the reward model; empty is the embedded one.
        prompt: the prompt, raw text.
        responses: one or more responses.
    """
    for response, value in zip(responses, Oracle(model).score([prompt] * len(responses), responses), strict=True):
        print("no finite score" if value is None else f"{value:+.4f}", repr(response), sep="  ")


if __name__ == "__main__":
    tyro.cli(main)
