"""Log-probabilities of tokens under a causal language model, in fp32 whatever the model's dtype."""

import torch
import torch.nn.functional as F


def token_logprobs(model, ids_BS: torch.Tensor, attention_BS: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p(ids[:, t+1] | ids[:, :t+1]) with logits divided by `temperature`; shape (B, S-1), fp32, natural log.

    Positions count real tokens only, so that left padding, right padding and more padding give the same values. Entries
    whose target is padding are meaningless: mask them. Differentiable unless called under `torch.no_grad()`.

    The cast to fp32 comes before the division and the log-softmax: bf16 keeps 8 significant bits, which turns -12.34 into
    -12.3125 and a summed -200 into steps of 1.0. Use the temperature that the actor sampled with whenever the result meets
    the actor's own (processed) log-probs.

    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to define log-probabilities, got {temperature}")
    here = next(model.parameters()).device  # an offloaded reference computes where it is
    inputs = dict(input_ids=ids_BS, attention_mask=attention_BS, position_ids=(attention_BS.cumsum(-1) - 1).clamp(min=0))
    logits_BSV = model(**{k: v.to(here) for k, v in inputs.items()}, use_cache=False).logits
    logits_BSV = logits_BSV[:, :-1].to(ids_BS.device).float() / temperature
    return -F.cross_entropy(logits_BSV.transpose(1, 2), ids_BS[:, 1:], reduction="none")


def response_mask(attention_BS: torch.Tensor, prompt_lengths_B: torch.Tensor) -> torch.Tensor:
    """Mask of `token_logprobs` entries that score a response token; shape (B, S-1), fp32 of 0 and 1.

    A token is part of the response when it is real and `prompt_lengths_B` real tokens or more come before it. The mask is
    by count, never by token id, so that an EOS that is also the padding token stays in the loss.
    """
    index_BS = attention_BS.cumsum(-1) - 1  # index of each token among the real tokens of its row
    return ((index_BS >= prompt_lengths_B[:, None]) & (attention_BS > 0))[:, 1:].float()
