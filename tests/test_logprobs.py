"""Token log-probs and response masks, by hand and under every kind of padding."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oat_lib import data, logprobs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


class Fixed(torch.nn.Module):
    """A model that always answers with the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids, **_):
        return type("Output", (), dict(logits=self.logits.expand(*input_ids.shape, -1)))


def test_temperature_divides_the_logits():
    ids = torch.tensor([[0, 0, 3]])
    cold = logprobs.token_logprobs(Fixed([2.0, 1.0, 0.0, -1.0]), ids, torch.ones_like(ids), temperature=0.5)[0]
    total = sum(math.exp(2 * x) for x in (2, 1, 0, -1))
    assert cold.tolist() == pytest.approx([math.log(math.exp(4) / total), math.log(math.exp(-2) / total)], abs=1e-6)
    warm = logprobs.token_logprobs(Fixed([2.0, 1.0, 0.0, -1.0]), ids, torch.ones_like(ids))[0]
    assert (warm - cold).exp().tolist() == pytest.approx([0.744, 14.95], rel=1e-3)  # what forgetting it would cost
    with pytest.raises(ValueError):
        logprobs.token_logprobs(Fixed([0.0]), ids, torch.ones_like(ids), temperature=0)


def test_a_bf16_model_gives_fp32_values():
    ids = torch.tensor([[0, 1]])
    values = logprobs.token_logprobs(Fixed([12.0, -0.34]).to(torch.bfloat16), ids, torch.ones_like(ids))
    logits = torch.tensor([12.0, -0.34]).bfloat16().double()
    assert values.dtype == torch.float32
    assert values.item() == pytest.approx((logits[1] - logits.logsumexp(0)).item(), abs=1e-5)  # -12.34..., not bf16's -12.3125


def test_padding_and_batches_change_nothing(model):
    rows = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18]]
    with torch.no_grad():
        alone = [logprobs.token_logprobs(model, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))[0] for row in rows]
        for side in ("left", "right"):
            for extra in (0, 4):
                ids, attention = data.pad([*rows, [1] * (7 + extra)], 0, side)
                together = logprobs.token_logprobs(model, ids, attention)
                for row, values, expected in zip(rows, together, alone, strict=False):
                    at = slice(ids.shape[1] - len(row), None) if side == "left" else slice(0, len(row) - 1)
                    assert torch.allclose(values[at], expected, atol=1e-5)


def test_the_mask_counts_tokens_and_does_not_read_them():
    eos = pad = 9
    rows, prompts = [[1, 2, 3, 4, eos], [1, 5, 6], [1, 2]], torch.tensor([2, 1, 2])  # ended, cut, empty
    for side in ("right", "left"):
        ids, attention = data.pad(rows, pad, side)
        mask = logprobs.response_mask(attention, prompts)
        kept = [row[1:][m > 0].tolist() for row, m in zip(ids, mask, strict=True)]
        assert kept == [[3, 4, eos], [5, 6], []]
    ids, attention = data.pad([[7, 1, 2, 3], [7, 1, 2, 3, 4, 5]], pad)
    assert logprobs.response_mask(attention, torch.tensor([1, 1]))[0].tolist() == [1, 1, 1, 0, 0]


def test_a_bf16_llama_equals_its_own_logits_by_hand(model):
    half = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        values, logits = logprobs.token_logprobs(half, ids, torch.ones_like(ids), 0.5), half(ids).logits
    assert values.dtype == torch.float32 and logits.dtype == torch.bfloat16
    by_hand = (logits.double() / 0.5).log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(values[0].double(), by_hand, atol=1e-5)


def test_gradients_do_not_depend_on_padding_or_batch_split(model):
    rows, prompts = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18]], [2, 1, 6]  # the last has an empty response

    def gradient(split, side, extra):
        model.zero_grad()
        for part in split:
            ids, attention = data.pad([rows[i] for i in part] + [[1] * (6 + extra)], 0, side)
            mask = logprobs.response_mask(attention, torch.tensor([prompts[i] for i in part] + [6 + extra]))
            (logprobs.token_logprobs(model, ids, attention) * mask).sum().backward()
        return model.lm_head.weight.grad.clone()

    expected = gradient([[0, 1, 2]], "right", 0)
    assert expected.isfinite().all() and expected.abs().max() > 0
    for split, side, extra in (([[0], [1], [2]], "right", 3), ([[2, 1], [0]], "left", 5)):
        assert torch.allclose(gradient(split, side, extra), expected, atol=1e-5)
