"""The door to the oracle: what it checks, what it counts, and how an oracle is found."""

import sys

import pytest
import torch

from oat_lib.oracle import Feedback, load_oracle

CPU = torch.device("cpu")


class Says:
    def __init__(self, *answers):
        self.answers = list(answers)

    def compare(self, prompts, a, b):
        return self.answers


class Scores:
    def score(self, prompts, responses, references):
        pairs = zip(responses, references, strict=True)
        return [None if r == "?" else len(r) + (0.0 if ref is None else 100.0 * (r == ref)) for r, ref in pairs]


def test_no_label_is_counted_and_never_a_number():
    feedback = Feedback(Says(0.7, None, float("nan"), float("inf")), "says")
    assert feedback.compare(["p"] * 4, ["a"] * 4, ["b"] * 4) == [0.7, None, None, None]
    assert (feedback.queries, feedback.eval_queries, feedback.unlabelled) == (4, 0, 3)
    feedback.compare(["p"] * 4, ["a"] * 4, ["b"] * 4, evaluation=True)
    assert (feedback.queries, feedback.eval_queries, feedback.unlabelled) == (4, 4, 6)
    assert feedback.compare([], [], []) == [] and feedback.queries == 4


@pytest.mark.parametrize("answers, said", [((0.5,), "1 answers to 2 questions"), ((0.5, 1.2), "got 1.2"), ((0.5, -0.1), "got -0.1")])
def test_wrong_answers_end_the_run(answers, said):
    with pytest.raises(ValueError, match=said):
        Feedback(Says(*answers), "says").compare(["p"] * 2, ["a"] * 2, ["b"] * 2)


def test_an_oracle_that_scores_is_compared_by_its_scores():
    feedback = Feedback(Scores(), "scores")
    assert feedback.compare(["p"] * 4, ["aa", "a", "a", "?"], ["b", "bb", "b", "b"]) == [1.0, 0.0, 0.5, None]
    assert feedback.compare(["p"], ["a"], ["bbb"], references=["a"]) == [1.0]
    assert feedback.score(["p"], ["aa"], ["x"]) == [2.0] and feedback.queries == 6 and feedback.unlabelled == 1


def test_oracles_by_name_and_by_file(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(
        "class Mine:\n    def __init__(self, device):\n        self.device = device\n"
        "    def compare(self, p, a, b):\n        return [1.0]\nclass Neither:\n    pass\n"
    )
    assert load_oracle(f"{task}:Mine", CPU).device == CPU
    for spec, model, said in (
        ("nobody", None, "no such oracle; there are .*reward_model"),
        ("gpt-4o-mini-2024-07-18", None, "no such oracle"),
        (f"{task}:Yours", None, "defines no Yours; it has .*Mine"),
        (f"{tmp_path}/none.py:Mine", None, "no file"),
        (f"{task}:Neither", None, "neither compare"),
        (f"{task}:Mine", "x", "takes no model"),
        (str(task), None, "path/to/file.py:ClassName"),
    ):
        with pytest.raises(SystemExit, match=said):
            load_oracle(spec, CPU, model)


def test_the_embedded_reward_model_is_found_by_name():
    feedback = Feedback(load_oracle("reward_model", CPU), "reward_model")
    letter = "I am angry. My lamp arrived broken. This is Noah."
    good = "Dear Noah, I am very sorry that your lamp arrived broken. We will send a new one by this Friday. "
    good += "You return nothing to us. With our deep apologies."
    bad = "Hi Ada, it is odd that your drum came twice. We will swap the size at some point. That is our usual rule. "
    bad += "That is all for now."
    (p,) = feedback.compare([letter], [good], [bad])
    assert p > 0.9 and feedback.compare([letter], [bad], [good])[0] == pytest.approx(1 - p, abs=1e-5)


def test_a_wrong_number_of_scores_and_an_empty_batch():
    class Short:
        def score(self, prompts, responses, references):
            return [1.0]

    feedback = Feedback(Short(), "short")
    assert feedback.score([], [], []) == [] and feedback.compare([], [], [], evaluation=True) == []
    assert (feedback.queries, feedback.eval_queries, feedback.unlabelled) == (0, 0, 0)
    with pytest.raises(ValueError, match="oracle short: 1 answers to 2 questions"):
        feedback.score(["p", "p"], ["a", "b"], [None, None])
    with pytest.raises(ValueError, match="oracle short: 1 answers to 2 questions"):  # a comparison is two scores
        feedback.compare(["p"], ["a"], ["b"])


def test_scores_that_are_not_finite_are_no_label():
    class Broken:
        def score(self, prompts, responses, references):
            return [float("nan") if r == "nan" else float("inf") if r == "inf" else len(r) for r in responses]

    feedback = Feedback(Broken(), "broken")
    assert feedback.compare(["p"] * 3, ["nan", "a", "aa"], ["a", "inf", "a"]) == [None, None, 1.0] and feedback.unlabelled == 2
    assert feedback.score(["p"] * 2, ["nan", "aa"], [None] * 2, evaluation=True) == [None, 2.0]
    assert (feedback.queries, feedback.eval_queries, feedback.unlabelled) == (3, 2, 3)
    assert feedback.compare(["p"] * 2, ["a", "aa"], ["aa", "a"]) == [0.0, 1.0]


def test_answers_of_other_number_types_become_floats():
    answers = Feedback(Says(torch.tensor(0.25), 1, True), "says").compare(["p"] * 3, ["a"] * 3, ["b"] * 3)
    assert answers == [0.25, 1.0, 1.0] and all(type(p) is float for p in answers)


def test_a_file_may_hold_a_dataclass_and_have_the_name_of_a_module(tmp_path):
    for name in ("task_of_mine.py", "json.py"):
        (tmp_path / name).write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Mine:\n    margin: float = 0.0\n"
            "    def compare(self, prompts, a, b):\n        return [1.0] * len(prompts)\n"
        )
        assert Feedback(load_oracle(f"{tmp_path / name}:Mine", CPU), "mine").compare(["p"], ["a"], ["b"]) == [1.0]
    assert hasattr(sys.modules.get("json"), "dumps")
