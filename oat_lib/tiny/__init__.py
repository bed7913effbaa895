"""Paths of the embedded default. What each is, and the commands that rebuild it, is in README.md beside this file."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
POLICY = str(HERE / "policy")  # a Llama of 0.9 M parameters with a chat template
REWARD_MODEL = str(HERE / "reward_model")  # one logit; the default oracle
JUDGE = str(HERE / "judge")  # another, from other pairs and another seed: the independent check
PREFERENCE = str(HERE / "preference")  # prompt, reference
ARITHMETIC = str(HERE / "arithmetic")  # prompt, answer
DEMONSTRATIONS = str(HERE / "demonstrations")  # messages: what recipes/sft.py trains on by default
PAIRS = str(HERE / "pairs")  # prompt, chosen, rejected: what recipes/reward_model.py trains on by default
