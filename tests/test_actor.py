"""The actor on a real vLLM engine (one for the whole file): sampling, processed log-probs, weight sync, and the probe that proves it."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oat_lib import learner, logprobs, tiny
from oat_lib.actor import Actor, Sampling, sample_seed

PROMPT = "I am angry. My lamp never arrived. This is Noah."


@pytest.fixture(scope="module")
def dist():
    before = dict(os.environ)
    yield learner.init(zero_stage=0, bf16=False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)  # a RANK left behind would reach the processes that other tests start


@pytest.fixture(scope="module")
def actor(dist):
    actor = Actor(tiny.POLICY, dist, max_model_len=256)
    yield actor
    actor.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def policy(actor, dist):
    """A learner whose weights are not those that the engine loaded, so that a sync has something to do."""
    model = learner.load_model(AutoModelForCausalLM, tiny.POLICY, dist).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.POLICY)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer):
    text = tokenizer.apply_chat_template([dict(role="user", content=PROMPT)], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def score(model, sample, temperature):
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        return logprobs.token_logprobs(model, ids, torch.ones_like(ids), temperature)[0, len(sample.prompt_ids) - 1 :]


def weights(model, dist, drop=()):
    return ((name, w) for name, w in learner.named_weights(model, dist) if name not in drop)


def test_a_seed_gives_one_sample_whatever_the_batch(actor, prompt_ids, tokenizer):
    seeds = [sample_seed(42, 0, 7, i) for i in range(4)]
    other = tokenizer("What is 12 + 30?")["input_ids"]
    (four,) = actor.generate([prompt_ids], [seeds], Sampling(max_tokens=24))
    mixed = actor.generate([other, prompt_ids], [[1, 2], seeds[::-1]], Sampling(max_tokens=24))
    assert [s.response_ids for s in mixed[1]] == [s.response_ids for s in four[::-1]]
    assert len({tuple(s.response_ids) for s in four}) > 1
    assert [len(row) for row in mixed] == [2, 4]
    assert actor.generate([], [], Sampling()) == []


def test_seeds_of_neighbours_do_not_meet():
    seeds = {sample_seed(s, e, p, i) for s in range(3) for e in range(2) for p in range(50) for i in range(8)}
    assert len(seeds) == 3 * 2 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.3])
def test_logprobs_are_those_after_temperature(actor, policy, prompt_ids, dist, temperature):
    actor.sync(weights(policy, dist), 1)
    (samples,) = actor.generate([prompt_ids], [list(range(8))], Sampling(temperature=temperature, max_tokens=24))
    for sample in samples:
        assert torch.allclose(torch.tensor(sample.logprobs), score(policy, sample, temperature), atol=1e-4)
    if temperature == 0.5:  # raw log-probs would be far off
        raw = torch.cat([(torch.tensor(s.logprobs) - score(policy, s, 1.0)).abs() for s in samples])
        assert raw.max() > 0.05


def test_logprobs_are_renormalised_under_top_k(actor, policy, prompt_ids, dist):
    actor.sync(weights(policy, dist), 1)
    (samples,) = actor.generate([prompt_ids], [list(range(4))], Sampling(top_k=2, max_tokens=12))
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        kept = logits.topk(2).values
        expected = logits.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0] - kept.logsumexp(-1)
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


def test_what_was_sampled_is_kept(actor, prompt_ids, tokenizer):
    (samples,) = actor.generate([prompt_ids], [list(range(8))], Sampling(max_tokens=64))
    for sample in samples:
        assert sample.prompt_ids == prompt_ids
        assert sample.finish_reason == "stop" and sample.response_ids[-1] == tokenizer.eos_token_id
        assert len(sample.logprobs) == len(sample.response_ids)
        assert sample.text == tokenizer.decode(sample.response_ids, skip_special_tokens=True)  # white space included
    (cut,) = actor.generate([prompt_ids], [list(range(8))], Sampling(max_tokens=3))
    for sample, whole in zip(cut, samples, strict=True):
        assert sample.finish_reason == "length" and sample.response_ids == whole.response_ids[:3]  # no EOS that was not sampled


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(actor, prompt_ids, tokenizer, include):
    sampling = Sampling(max_tokens=64, stop=["."], include_stop_str_in_output=include)
    (samples,) = actor.generate([prompt_ids], [list(range(4))], sampling)
    for sample in samples:
        assert sample.finish_reason == "stop" and sample.text.endswith(".") == include
        assert "." in tokenizer.decode(sample.response_ids)  # the ids keep what was sampled, whatever the text shows


def test_a_sync_is_proved(actor, policy, dist):
    actor.sync(weights(policy, dist), 5)
    assert actor.version == 5
    assert actor.probe(policy) <= 1e-4
    (samples,) = actor.generate([[5, 6, 7]], [[1]], Sampling(max_tokens=2))
    assert samples[0].version == 5


def test_a_forgotten_update_is_caught(actor, policy, dist):
    actor.sync(weights(policy, dist), 1)
    actor.probe(policy)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    with pytest.raises(SystemExit, match="does not run the learner's weights"):
        actor.probe(policy)


def test_a_cache_of_old_weights_is_caught(actor, policy, dist, monkeypatch):
    actor.sync(weights(learner.load_model(AutoModelForCausalLM, tiny.POLICY, dist), dist), 1)
    actor.probe(learner.load_model(AutoModelForCausalLM, tiny.POLICY, dist))  # fills the cache with keys and values of these weights
    with monkeypatch.context() as patch:
        patch.setattr(actor, "_reset_cache", lambda: None)
        actor.sync(weights(policy, dist), 2)
        with pytest.raises(SystemExit, match="does not run the learner's weights"):
            actor.probe(policy)
    actor.sync(weights(policy, dist), 3)
    assert actor.probe(policy) <= 1e-4


def test_a_tied_head_left_out_is_caught(actor, policy, dist, monkeypatch):
    assert policy.config.tie_word_embeddings
    actor.sync(weights(learner.load_model(AutoModelForCausalLM, tiny.POLICY, dist), dist), 1)
    with pytest.raises(RuntimeError, match="LMHead"):
        actor.sync(weights(policy, dist, drop=["lm_head.weight"]), 2)
    monkeypatch.setattr(actor.missing, "filter", lambda record: False)  # and the probe alone sees it as well
    actor.sync(weights(policy, dist, drop=["lm_head.weight"]), 2)
    with pytest.raises(SystemExit, match="does not run the learner's weights"):
        actor.probe(policy)


def test_levels_of_the_gap(actor, policy, dist, capsys):
    actor.sync(weights(policy, dist), 1)
    with torch.no_grad():
        policy.model.norm.weight.mul_(1.002)
    gap = actor.probe(policy, warn=1e-6, fatal=10.0)
    assert 1e-4 < gap < 10 and "sync-gap-warn" in capsys.readouterr().out
    assert actor.probe(policy, warn=10.0, fatal=10.0) == pytest.approx(gap)
    assert "WARNING" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        actor.probe(policy, fatal=gap / 2)


def test_a_layer_left_out_ends_the_sync(actor, policy, dist):  # last: the engine is not to be used after it
    with pytest.raises(RuntimeError, match="weight sync"):
        actor.sync(weights(policy, dist, drop=["model.layers.0.mlp.down_proj.weight"]), 9)
