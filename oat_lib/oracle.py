"""Feedback: the two-call protocol, how an oracle is found by name or file, and the exact count of its queries.

An oracle is any class with one of these methods, or both; `None` means "no label" and is never turned into a number:

    compare(prompts, a, b) -> list of P(a wins) in [0, 1] or None
    score(prompts, responses, references) -> list of finite values or None
"""

import importlib
import importlib.util
import inspect
import math
import sys
from pathlib import Path

import torch


def load_oracle(spec: str, device: torch.device, model: str | None = None):
    """The oracle that `--oracle` names: a file in oracles/ (`reward_model`), or `path/to/file.py:ClassName`.

    The class is called with `device` and, where the user gave --oracle-model, `model`, if its constructor takes them.
    Only what the user named is imported. Raises SystemExit when it is not there or has neither method.
    """
    file, _, name = spec.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise SystemExit(f"--oracle {spec}: no file {file}")
        module_spec = importlib.util.spec_from_file_location(f"oracle_file_{Path(file).stem}", file)
        module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)  # dataclasses look their module up there
        module_spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise SystemExit(f"--oracle {spec}: {file} defines no {name}; it has {[n for n in vars(module) if not n.startswith('_')]}")
        cls = getattr(module, name)
    else:
        import oracles

        known = sorted(p.stem for p in Path(oracles.__file__).parent.glob("*.py") if not p.stem.startswith("_"))
        if spec not in known:
            hint = " (a file is given as path/to/file.py:ClassName)" if spec.endswith(".py") else ""
            raise SystemExit(f"--oracle {spec}: no such oracle{hint}; there are {', '.join(known)}, and your own as file.py:ClassName")
        cls = importlib.import_module(f"oracles.{spec}").Oracle
    takes = inspect.signature(cls).parameters
    if model is not None and "model" not in takes:
        raise SystemExit(f"--oracle-model {model}: the oracle {spec} takes no model")
    oracle = cls(**{k: v for k, v in dict(device=device, model=model).items() if k in takes and v is not None})
    if not (hasattr(oracle, "compare") or hasattr(oracle, "score")):
        raise SystemExit(f"--oracle {spec}: it has neither compare(prompts, a, b) nor score(prompts, responses, references)")
    return oracle


class Feedback:
    """The one door to the oracle: checks what it answers, and counts what it is asked and what it leaves unlabelled.

    queries: comparisons or scores asked for training, on this rank. eval_queries: the same for evaluation.
    unlabelled: answers that were None or not finite, training and evaluation alike.
    """

    def __init__(self, oracle, name: str):
        self.oracle, self.name = oracle, name
        self.queries = self.eval_queries = self.unlabelled = 0

    def compare(
        self, prompts: list, a: list[str], b: list[str], references: list | None = None, evaluation: bool = False
    ) -> list[float | None]:
        """P(a wins) or None for each prompt. Raises ValueError for a wrong number of answers or a P outside [0, 1].

        An oracle that only scores is compared by its scores: 1, 0, or 0.5 when they are equal. It gets the references (None where the data
        has none).
        """
        if not prompts:
            return []
        self._count(len(prompts), evaluation)
        if hasattr(self.oracle, "compare"):
            answers = self._checked(self.oracle.compare(prompts, a, b), len(prompts))
            wrong = next((p for p in answers if p is not None and not 0 <= p <= 1), None)
            if wrong is not None:
                raise ValueError(f"oracle {self.name}: compare must return P(a wins) in [0, 1] or None, got {wrong}")
        else:
            references = references or [None] * len(prompts)
            scores = self._checked(self.oracle.score(prompts * 2, a + b, references * 2), 2 * len(prompts))
            pairs = zip(scores[: len(a)], scores[len(a) :], strict=True)
            answers = [None if x is None or y is None else 0.5 + 0.5 * ((x > y) - (x < y)) for x, y in pairs]
        self.unlabelled += answers.count(None)
        return answers

    def score(self, prompts: list, responses: list[str], references: list, evaluation: bool = False) -> list[float | None]:
        """A value or None for each response. Raises ValueError for a wrong number of answers."""
        if not prompts:
            return []
        self._count(len(prompts), evaluation)
        answers = self._checked(self.oracle.score(prompts, responses, references), len(prompts))
        self.unlabelled += answers.count(None)
        return answers

    def _count(self, n: int, evaluation: bool) -> None:
        if evaluation:
            self.eval_queries += n
        else:
            self.queries += n

    def _checked(self, answers, expected: int) -> list[float | None]:
        answers = [None if x is None or not math.isfinite(x) else float(x) for x in answers]
        if len(answers) != expected:
            raise ValueError(f"oracle {self.name}: {len(answers)} answers to {expected} questions")
        return answers
