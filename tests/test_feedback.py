"""The door to the oracle: what it checks, what it counts, and how an oracle is found."""

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
