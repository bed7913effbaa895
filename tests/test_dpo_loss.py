"""The pure functions of recipes/dpo_online.py against numbers worked out by hand."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

spec = importlib.util.spec_from_file_location("dpo_online", Path(__file__).resolve().parent.parent / "recipes" / "dpo_online.py")
dpo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dpo)

W, L, REF_W, REF_L, LEN_W, LEN_L = -5.0, -7.0, -6.0, -6.5, 4.0, 2.0  # h = (-5 + 6) - (-7 + 6.5) = 1.5
H, BETA = 1.5, 0.2


def loss(algo, w=W, **options):
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (w, L, REF_W, REF_L, LEN_W, LEN_L)]
    return dpo.preference_loss(*tensors, algo, options.pop("beta", BETA), **options).item()


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


@pytest.mark.parametrize(
    "algo, options, expected",
    [
        ("DPO", {}, -log_sigmoid(0.2 * 1.5)),
        ("LR_DPO", {}, -log_sigmoid(0.2 * 1.5)),
        ("DPO", dict(label_smoothing=0.1), -0.9 * log_sigmoid(0.3) - 0.1 * log_sigmoid(-0.3)),
        ("DPO", dict(len_reg_alpha=0.05), -log_sigmoid(0.3 + 0.05 * (4 - 2))),
        ("DPO", dict(sft_weight=0.5), -log_sigmoid(0.3) + 0.5 * 5 / 4),
        ("LR_DPO", dict(sft_weight=0.5), -log_sigmoid(0.3) + 0.5 * 5),  # averaged already
        ("IPO", {}, (1.5 - 1 / 0.4) ** 2),
        ("IPO_avg", {}, (1.5 - 1 / 0.4) ** 2),
        ("IPO", dict(sft_weight=1.0), 1.0 + 5 / 4),
        ("SLiC", dict(slic_delta=3.0), 3.0 - 2.0),
        ("SLiC", dict(slic_delta=1.0), 0.0),
        ("SLiC", dict(slic_delta=3.0, sft_weight=2.0), 1.0 + 2 * 5 / 4),
        ("SLiC_hinge", {}, 1 - 0.3),
        ("SLiC_hinge", dict(beta=1.0), 0.0),
    ],
)
def test_losses(algo, options, expected):
    assert loss(algo, **options) == pytest.approx(expected, abs=1e-12)


def test_dpo_positive_punishes_a_chosen_response_below_the_reference():
    assert loss("DPO", dpo_positive_lambda=3.0) == loss("DPO")  # -5 is above -6
    h = (-8 + 6) - (-7 + 6.5)
    assert loss("DPO", w=-8.0, dpo_positive_lambda=3.0) == pytest.approx(-log_sigmoid(0.2 * (h - 3 * 2)), abs=1e-12)


def test_dpo_is_ln_2_with_a_gradient_where_policy_and_reference_agree():
    w, ref = torch.tensor([-5.0], requires_grad=True), torch.tensor([-5.0])
    value = dpo.preference_loss(w, ref, ref, ref, ref, ref, "DPO", 0.1)
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2)) and w.grad.item() == pytest.approx(-0.1 / 2)


@pytest.mark.parametrize("algo", list(dpo.NEEDS_REF))
def test_gradients_against_finite_differences(algo):
    options = dict(slic_delta=3.0, sft_weight=0.3) | (dict(label_smoothing=0.1, len_reg_alpha=0.1) if algo in ("DPO", "LR_DPO") else {})
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (W, L, REF_W, REF_L, LEN_W, LEN_L)]
    tensors[0].requires_grad_(True)
    dpo.preference_loss(*tensors, algo, BETA, **options).sum().backward()
    numeric = (loss(algo, w=W + 1e-6, **options) - loss(algo, w=W - 1e-6, **options)) / 2e-6
    assert tensors[0].grad.item() == pytest.approx(numeric, abs=1e-6)


def test_sequence_logprobs():
    token_logps = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert dpo.sequence_logprobs(token_logps, mask, average=False).tolist() == [-5.0, 0.0]
    assert dpo.sequence_logprobs(token_logps, mask, average=True).tolist() == [-2.5, 0.0]  # an empty response is 0, not NaN


def label(p, seed=0, bt=False, flip=0.0):
    return dpo.make_label(p, bt, flip, np.random.default_rng(seed))


def test_labels():
    assert label(0.6) == (True, False) and label(0.4) == (False, False)
    assert label(None) == (None, False) and label(0.5) == (None, False)  # no label, and a tie, teach nothing
    assert label(0.9, flip=1.0) == (False, True) and label(None, flip=1.0) == (None, False)
    drawn = [label(0.8, seed, bt=True)[0] for seed in range(2000)]
    assert np.mean(drawn) == pytest.approx(0.8, abs=0.03)
    assert np.mean([label(0.5, seed, bt=True)[0] for seed in range(2000)]) == pytest.approx(0.5, abs=0.04)
    assert np.mean([label(0.9, seed, flip=0.25)[1] for seed in range(2000)]) == pytest.approx(0.25, abs=0.03)


class ByNumber:
    """Prefers the larger number; counts what it is asked."""

    def __init__(self):
        self.asked = []

    def compare(self, prompts, a, b, references):
        self.asked += zip(a, b, strict=True)
        return [None if "x" in (x, y) else 1.0 if float(x) > float(y) else 0.0 for x, y in zip(a, b, strict=True)]


def test_two_candidates_are_one_question_and_equal_ones_none():
    oracle = ByNumber()
    picks = dpo.compare_candidates(oracle, ["p", "q", "r"], [None] * 3, [["1", "2"], ["3", "3"], ["x", "1"]])
    assert picks == [(0, 1, 0.0), (0, 1, None), (0, 1, None)] and oracle.asked == [("1", "2"), ("x", "1")]
    assert dpo.compare_candidates(oracle, [], [], []) == []


def test_best_and_worst_of_n_by_2n_minus_3_questions():
    for order in (["3", "1", "5", "2", "4"], ["5", "4", "3", "2", "1"], ["1", "2", "3", "4", "5"]):
        oracle = ByNumber()
        ((best, worst, p),) = dpo.compare_candidates(oracle, ["p"], [None], [order])
        assert (order[best], order[worst], p) == ("5", "1", 1.0) and len(oracle.asked) == 2 * 5 - 3


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(dap_algo="IPO", label_smoothing=0.1), "--label-smoothing 0.1 has no effect with --dap-algo IPO"),
        (dict(dap_algo="SLiC", beta=0.5), "--beta 0.5 has no effect"),
        (dict(dap_algo="SLiC", ref_pretrain="x"), "--ref-pretrain x has no effect"),
        (dict(slic_delta=2.0), "--slic-delta 2.0 has no effect"),
        (dict(dap_algo="IPO_avg", len_reg_alpha=0.1), "--len-reg-alpha"),
        (dict(dap_algo="SLiC_hinge", dpo_positive_lambda=0.1), "--dpo-positive-lambda"),
        (dict(dap_algo="PPO"), "does not exist"),
        (dict(num_samples=1), "at least 2"),
        (dict(num_samples=4, bt_sample=True), "--bt-sample needs --num-samples 2"),
        (dict(save_ckpt=True), "--save-ckpt needs --save-steps"),
        (dict(pi_buffer_maxlen_per_device=7), "leave it out"),
    ],
)
def test_what_would_have_no_effect_is_refused(change, said):
    with pytest.raises(SystemExit, match=said):
        dpo.check(dpo.Args(**change), 1)


def test_the_defaults_divide_for_1_2_4_8_processes():
    for world_size in (1, 2, 4, 8):
        dpo.check(dpo.Args(pi_buffer_maxlen_per_device=128 // world_size), world_size)


def test_gradients_of_the_rejected_response_against_finite_differences():
    for algo in dpo.NEEDS_REF:
        options = dict(slic_delta=3.0) | (dict(label_smoothing=0.1, len_reg_alpha=0.1, dpo_positive_lambda=2.0) if "DPO" in algo else {})

        def value(rejected, algo=algo, options=options):
            others = [torch.tensor([x], dtype=torch.float64) for x in (REF_W - 2, REF_W, REF_L, LEN_W, LEN_L)]  # below its reference
            return dpo.preference_loss(others[0], rejected, *others[1:], algo, BETA, **options).sum()

        rejected = torch.tensor([L], dtype=torch.float64, requires_grad=True)
        value(rejected).backward()
        numeric = (value(rejected.detach() + 1e-6) - value(rejected.detach() - 1e-6)) / 2e-6
        assert rejected.grad.item() == pytest.approx(numeric.item(), abs=1e-6) and rejected.grad.item() != 0


def test_pairs_of_a_batch_do_not_mix_and_an_empty_response_is_finite():
    w, low, zero, lengths = torch.tensor([W, 0.0]), torch.tensor([L, -1.0]), torch.zeros(2), torch.tensor([4.0, 0.0])
    for algo in dpo.NEEDS_REF:
        both = dpo.preference_loss(w, low, zero, zero, lengths, lengths, algo, BETA, sft_weight=0.5)
        for i in (0, 1):
            alone = dpo.preference_loss(*(x[i : i + 1] for x in (w, low, zero, zero, lengths, lengths)), algo, BETA, sft_weight=0.5)
            assert both[i].isfinite() and both[i].item() == pytest.approx(alone.item(), abs=1e-6)


@pytest.mark.parametrize("first", [None, 0.5, 0.1, 0.9])
def test_the_noise_of_a_label_does_not_depend_on_the_pair_before(first):
    for bt in (False, True):
        shared, fresh = np.random.default_rng(7), np.random.default_rng(7)
        dpo.make_label(first, bt, 0.5, shared)
        fresh.random(2)
        assert [dpo.make_label(0.7, bt, 0.5, shared) for _ in range(20)] == [dpo.make_label(0.7, bt, 0.5, fresh) for _ in range(20)]


def test_many_prompts_with_equal_texts_and_unlabelled_ones():
    oracle = ByNumber()
    texts = [["3", "1", "5", "2", "4"], ["2", "2", "1", "9", "5"], ["7"] * 5, ["x"] * 4 + ["y"]]
    picks = dpo.compare_candidates(oracle, list("pqr"), [None] * 3, texts[:3])
    found = [(t[b], t[w], p) for t, (b, w, p) in zip(texts, picks, strict=False)]
    assert found[:2] == [("5", "1", 1.0), ("9", "1", 1.0)] and found[2] == ("7", "7", None)
    assert len(oracle.asked) == 7 + 6 and all(a != b for a, b in oracle.asked)  # only the pair (2, 2) of the second prompt is spared
    assert dpo.compare_candidates(ByNumber(), ["s"], [None], texts[3:])[0][2] is None


def test_every_option_is_refused_by_every_algorithm_without_it():
    dpo_like, with_ref = {"DPO", "LR_DPO"}, set(dpo.NEEDS_REF) - {"SLiC"}
    options = dict(label_smoothing=0.1, len_reg_alpha=0.1, dpo_positive_lambda=0.1, slic_delta=2.0, beta=0.5, ref_pretrain="x")
    owners = dict(label_smoothing=dpo_like, len_reg_alpha=dpo_like, dpo_positive_lambda=dpo_like, slic_delta={"SLiC"})
    for name, value in options.items():
        for algo in dpo.NEEDS_REF:
            args = dpo.Args(dap_algo=algo, **{name: value})
            if algo in owners.get(name, with_ref):
                dpo.check(args, 1)
            else:
                with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} {value} has no effect with --dap-algo {algo}"):
                    dpo.check(args, 1)


def test_values_out_of_range_are_refused(tmp_path):
    (tmp_path / "one.jsonl").write_text("{}")
    for change, said in (
        (dict(label_smoothing=0.5), "below 0.5"), (dict(preference_flip_prob=1.5), "is a probability"), (dict(beta=0.0), "--beta 0.0 must"),
        (dict(temperature=0.0), "--temperature 0.0"), (dict(eval_temperature=-1.0), "--eval-temperature"),
        (dict(sync_params_every=0), "--sync-params-every 0"), (dict(prompt_data=str(tmp_path / "one.jsonl")), "--eval-data"),
        (dict(train_batch_size=60), "--train-batch-size 60"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            dpo.check(dpo.Args(**change), 1)


@pytest.mark.parametrize("known", [{}, {("2", "0"): 0.0}, {("0", "1"): 0.5}])
def test_best_of_n_makes_no_label_from_ties_or_silence(known):
    """All tied; only "2 loses to 0" is known, so that nothing is known of 1; one tie and silence."""

    class Some:
        def compare(self, prompts, a, b, references):
            return [known.get(pair, None if known else 0.5) for pair in zip(a, b, strict=True)]

    ((_, _, p),) = dpo.compare_candidates(Some(), ["p"], [None], [["0", "1", "2"]])
    assert p is None
