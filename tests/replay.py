"""Runs a recipe with an actor that plays back samples.jsonl instead of sampling: the same samples for any number of processes.

    python tests/replay.py FOLDER recipes/dpo_online.py FLAGS      FOLDER is a run's folder; accelerate launch works in front of it

What the loss saw goes to the file that OAT_TRACE names: one line for each sequence that the policy scored, with its ids and the ids under
the mask.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import oat_lib.actor
from oat_lib import logprobs
from oat_lib.actor import Sample, sample_seed


class ReplayActor:
    """The interface of `Actor`; a seed that was not recorded (an evaluation's) gets the first sample of all."""

    def __init__(self, model, dist, max_model_len, gpu_ratio=0.25, seed=0):
        self.version, self.recorded = 0, {}
        for line in (Path(os.environ["OAT_REPLAY"]) / "samples.jsonl").read_text().splitlines():
            row = json.loads(line)
            for i, r in enumerate(row["responses"]):
                sample = Sample(row["prompt_ids"], r["ids"], r["logprobs"], r["finish_reason"], r["text"], row["version"])
                self.recorded[sample_seed(seed, row["epoch"], row["index"], i)] = sample

    def generate(self, prompts, seeds, sampling):
        first = next(iter(self.recorded.values()))
        for ids, row in zip(prompts, seeds, strict=True):
            assert all(seed not in self.recorded or self.recorded[seed].prompt_ids == ids for seed in row), "recorded for another prompt"
        return [[self.recorded.get(seed, first) for seed in row] for row in seeds]

    def sync(self, weights, version):
        assert all(weight.numel() for _, weight in weights)
        self.version = version

    def probe(self, engine, warn=None, fatal=None):
        return 0.0

    def sleep(self):
        pass

    def close(self):
        pass


def trace(file: str) -> None:
    masks, original_mask, original = [], logprobs.response_mask, logprobs.token_logprobs

    def response_mask(attention, prompt_lengths):
        masks.append(original_mask(attention, prompt_lengths))
        return masks[-1]

    def token_logprobs(model, ids, attention, temperature=1.0):
        if getattr(model, "module", model).training:  # the policy; a reference is in eval mode
            with open(file, "a") as f:
                for row, real, mask in zip(ids, attention, masks[-1], strict=True):
                    f.write(json.dumps(dict(ids=row[real > 0].tolist(), trained=row[1:][mask > 0].tolist())) + "\n")
        return original(model, ids, attention, temperature)

    logprobs.response_mask, logprobs.token_logprobs = response_mask, token_logprobs


if __name__ == "__main__":
    os.environ["OAT_REPLAY"] = sys.argv[1]
    oat_lib.actor.Actor = ReplayActor
    if os.environ.get("OAT_TRACE"):
        trace(os.environ["OAT_TRACE"])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
