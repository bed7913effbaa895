"""PairRM in the actor's process: a DeBERTa-v3 that reads the prompt and both responses together and says which one is better.

Jiang, Ren & Lin, "LLM-Blender" (2023, arXiv 2306.02561, section 3); weights: `llm-blender/PairRM-hf` (0.4 B parameters, MIT).
The published weights were not run here: what is tested is this code on tiny random models of the same architecture and key names.

    --oracle pairrm                                    downloads the published weights
    --oracle pairrm --oracle-model PATH_OR_HUB_NAME

Input: three segments, each with its own [CLS] and [SEP],
    [CLS] <|source|> prompt [SEP]  [CLS] <|candidate1|> a [SEP]  [CLS] <|candidate2|> b [SEP]
A response is scored by an MLP on (last hidden state at <|source|>, last hidden state at its own marker); the logit is score(a) - score(b).
A model that reads a before b is not symmetric in them, so both orders are asked and averaged.
"""

import math
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Model, DebertaV2PreTrainedModel

MARKERS = {"source_prefix_id": "<|source|>", "cand1_prefix_id": "<|candidate1|>", "cand2_prefix_id": "<|candidate2|>"}


class PairRM(DebertaV2PreTrainedModel):
    """Parameter names are those of the published checkpoint: `pretrained_model.*`, `head_layer.1.*`, `head_layer.4.*`."""

    def __init__(self, config):
        super().__init__(config)
        hidden = config.hidden_size
        self.pretrained_model = DebertaV2Model(config)
        # The dropouts do nothing at inference, but they number the layers.
        first, second = nn.Linear(2 * hidden, hidden), nn.Linear(hidden, config.n_tasks)
        self.head_layer = nn.Sequential(nn.Dropout(config.drop_out), first, nn.Tanh(), nn.Dropout(config.drop_out), second)
        self.post_init()
        self._keys_to_ignore_on_load_unexpected = None  # DeBERTa hides some; here every key of the checkpoint counts

    def features(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, positions_B3: torch.Tensor) -> torch.Tensor:
        """(B, 2, 2 x hidden): for each of the two responses, the last hidden state at <|source|> beside the one at its own marker."""
        hidden_BSH = self.pretrained_model(input_ids=ids_BS, attention_mask=mask_BS).last_hidden_state
        marked_B3H = hidden_BSH[torch.arange(len(ids_BS), device=ids_BS.device)[:, None], positions_B3]
        return torch.cat([marked_B3H[:, :1].expand(-1, 2, -1), marked_B3H[:, 1:]], dim=-1)

    def forward(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, positions_B3: torch.Tensor) -> torch.Tensor:
        """(B,) logits of "the first response is better"; several tasks (config.n_tasks) are averaged."""
        scores_B2T = self.head_layer(self.features(ids_BS, mask_BS, positions_B3)).float()
        return (scores_B2T[:, 0] - scores_B2T[:, 1]).mean(-1)


class Oracle:
    """`compare` by PairRM; it cannot score a single response, so there is no `score`.

    model: directory or hub name. device: where it runs. dtype: default float32 on CPU, bfloat16 elsewhere. batch_size: rows of a forward
    pass (a pair makes two). source_length, candidate_length: tokens of a segment with its [CLS], marker and [SEP]; what a prompt leaves
    of its length goes to the two responses in equal parts. What is longer loses its end, as in the published usage.
    counts, so far: prompts and responses truncated (once a pair), pairs without a finite logit, and markers taken out of texts.
    Raises SystemExit, in one line, for a model that is not a complete PairRM.
    """

    def __init__(self, model="llm-blender/PairRM-hf", device="cpu", dtype=None, batch_size=16, source_length=1224, candidate_length=412):
        if is_deepspeed_zero3_enabled():  # set by learner.load_model, and from then on every from_pretrained is partitioned
            raise RuntimeError("create the oracle before the models that ZeRO-3 partitions: it runs outside their engine")
        if (model[0] in "/." or model.count("/") > 1) and not Path(model).is_dir():
            raise SystemExit(f"PairRM: there is no folder {model}")
        self.device = torch.device(device)
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            lacks = [key for key in (*MARKERS, "n_tasks", "drop_out") if not hasattr(config, key)]
            if config.model_type != "deberta-v2" or lacks:
                raise ValueError(f"not a PairRM: model type {config.model_type}, missing in its config: {', '.join(lacks) or 'nothing'}")
            self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            strict = dict(output_loading_info=True, ignore_mismatched_sizes=True)  # ours to judge, below
            self.model, info = PairRM.from_pretrained(model, config=config, dtype=dtype, **strict)
        except (OSError, ValueError) as error:
            raise SystemExit(f"PairRM {model}: " + " ".join(str(error).split())[:300]) from error
        wrong = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
        if wrong:
            raise SystemExit(f"PairRM {model}: {len(wrong)} weights missing, unexpected or of another shape: {', '.join(wrong[:3])}")
        for key, marker in MARKERS.items():
            if self.tokenizer.convert_tokens_to_ids(marker) != getattr(config, key):
                raise SystemExit(f"PairRM {model}: the tokenizer's {marker} is not the config's {key}, {getattr(config, key)}")
        self.model.to(self.device).eval().requires_grad_(False)
        self.batch_size, self.source_length, self.candidate_length = batch_size, source_length, candidate_length
        self.counts = {"truncated_prompts": 0, "truncated_responses": 0, "nonfinite": 0, "markers_removed": 0}

    def segment(self, key: str, text: str, length: int) -> tuple[list[int], int, bool]:
        """Ids of one segment of at most `length` tokens, the marker's position in it, and whether its end was cut off."""
        ids = self.tokenizer(MARKERS[key] + text).input_ids
        cut = len(ids) > length
        ids = ids[: length - 1] + ids[-1:] if cut else ids
        return ids, ids.index(getattr(self.model.config, key)), cut

    def row(self, source: str, first: str, second: str) -> tuple[list[int], list[int], list[bool]]:
        """One input: ids, the positions of the three markers, and which of (source, first, second) were cut."""
        ids, position, cut = self.segment("source_prefix_id", source, self.source_length)
        positions, cuts = [position], [cut]
        length = (self.source_length + 2 * self.candidate_length - len(ids)) // 2
        for key, text in (("cand1_prefix_id", first), ("cand2_prefix_id", second)):
            part, position, cut = self.segment(key, text, length)
            positions.append(len(ids) + position)
            cuts.append(cut)
            ids = ids + part
        return ids, positions, cuts

    def plain(self, text: str) -> str:
        """The text without markers: one that a policy wrote would be read as the start of another response."""
        for marker in MARKERS.values():
            self.counts["markers_removed"] += text.count(marker)
            text = text.replace(marker, " ")
        return text

    @torch.inference_mode()
    def compare(self, prompts: list[str | list[dict]], a: list[str], b: list[str]) -> list[float | None]:
        """P(a wins) = (p(a, b) + 1 - p(b, a)) / 2, where p(x, y) is the model's probability that x, read first, is better than y.

        Swapping a and b gives 1 - P, up to float rounding. A prompt that is a list of messages becomes their contents joined by newlines.
        """
        rows = []
        for prompt, x, y in zip(prompts, a, b, strict=True):
            source = self.plain(prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt))
            x, y = self.plain(x), self.plain(y)
            rows += [self.row(source, x, y), self.row(source, y, x)]
            self.counts["truncated_prompts"] += rows[-1][2][0]
            self.counts["truncated_responses"] += sum(rows[-1][2][1:])
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        logits = torch.zeros(len(rows), dtype=torch.float64)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            ids_BS = torch.full((len(batch), len(rows[batch[-1]][0])), self.model.config.pad_token_id)
            mask_BS = torch.zeros_like(ids_BS)
            for row, i in enumerate(batch):
                ids_BS[row, : len(rows[i][0])], mask_BS[row, : len(rows[i][0])] = torch.tensor(rows[i][0]), 1
            positions_B3 = torch.tensor([rows[i][1] for i in batch])
            logits[batch] = self.model(ids_BS.to(self.device), mask_BS.to(self.device), positions_B3.to(self.device)).double().cpu()
        # sigmoid(-x) is 1 - sigmoid(x) without the rounding
        values = ((torch.sigmoid(logits[0::2]) + torch.sigmoid(-logits[1::2])) / 2).tolist()
        answers = [value if math.isfinite(value) else None for value in values]
        self.counts["nonfinite"] += answers.count(None)
        return answers
