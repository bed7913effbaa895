"""Whole runs of recipes/dpo_online.py, as processes: real vLLM, real DeepSpeed, the embedded models, 32 prompts a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oat_lib import tiny

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "dpo_online.py")
SMALL = "--max-train 32 --rollout-batch-size 8 --train-batch-size 8 --train-batch-size-per-device 4 --max-eval 8 --eval-steps 2".split()
CONFIGS = {name: ["--config_file", str(ROOT / f"recipes/configs/{name}.yaml")] for name in ("zero2", "zero3")}
LR = 3e-4


def start(folder, flags=(), launcher=None, script=(RECIPE,), timeout=600, **env):
    """Runs the recipe in `folder` and returns (exit code, its run's folder or None, output)."""
    python = [sys.executable] if launcher is None else [str(Path(sys.executable).parent / "accelerate"), "launch", *launcher]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")}
    command = [*python, *script, "--save-path", str(folder), *SMALL, *map(str, flags)]
    done = subprocess.run(command, cwd=folder, env=clean | env, capture_output=True, text=True, timeout=timeout)
    runs = [line.removeprefix("Run folder: ") for line in done.stdout.splitlines() if line.startswith("Run folder: ")]
    return done.returncode, Path(runs[-1]) if runs else None, done.stdout + done.stderr


def finish(*args, **kwargs) -> Path:
    code, run, output = start(*args, **kwargs)
    assert code == 0, output[-6000:]
    return run


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def model(run: Path, name="model") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / name / "model.safetensors")


def difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[k].float() - b[k].float()).abs().max().item() for k in a)


def losses(run: Path) -> dict[int, float]:
    return {m["misc/step"]: m["learner/loss"] for m in metrics(run) if "learner/loss" in m}


AUDIT = """
import os, sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        where = args[1] if event == "socket.connect" else args[0]
        if isinstance(where, tuple): where = where[0]
        here = ("127.0.0.1", "::1", "localhost", "0.0.0.0")
        if isinstance(where, (str, bytes)) and str(where) not in here and not str(where).startswith("/"):
            with open(os.environ["AUDIT"], "a") as f: f.write(f"{event} {where}\\n")
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """4 steps by plain python, saved at 2 and 4, with every attempt to reach another host written down."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "sitecustomize.py").write_text(AUDIT)
    run = finish(folder, ["--save-steps", 2, "--save-ckpt"], PYTHONPATH=str(folder), AUDIT=str(folder / "audit"))
    return run


def test_a_run_leaves_what_it_promises(whole):
    log = metrics(whole)
    assert [m["misc/step"] for m in log] == [0, 1, 2, 3, 4]
    assert all(m["actor/sync_gap"] <= 1e-4 for m in log)
    assert [m["misc/step"] for m in log if "eval/win_rate" in m] == [0, 2, 4]
    for m in log:
        if "eval/win_rate" in m:
            assert m["eval/win_rate_low"] < m["eval/win_rate"] < m["eval/win_rate_high"] or m["eval/win_rate"] in (0, 1)
            assert "eval/judge_win_rate" in m and "eval/distinct" in m
    sent = sum(row["responses"][0]["text"] != row["responses"][1]["text"] for row in samples(whole))
    assert log[-1]["misc/queries"] == sent and log[-1]["misc/prompts"] == 32
    config = json.loads((whole / "config.json").read_text())
    assert config["zero_stage"] == 2 and config["world_size"] == 1 and config["dtype"] == "torch.float32"
    assert (whole / "curves.png").stat().st_size > 20_000
    assert len((whole / "eval" / "step_00004.jsonl").read_text().splitlines()) == 8


def test_samples_are_what_was_sampled(whole):
    rows = samples(whole)
    assert len(rows) == 32 and len({row["index"] for row in rows}) == 32  # every prompt once
    assert [row["version"] for row in rows] == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8
    tokenizer = AutoTokenizer.from_pretrained(tiny.POLICY)
    for row in rows:
        for r in row["responses"]:
            assert r["text"] == tokenizer.decode(r["ids"], skip_special_tokens=True)
            assert len(r["logprobs"]) == len(r["ids"])
        p, chosen = row["feedback"]["p_first"], row["feedback"]["chosen"]
        assert row["mask"] == (not row["identical"] and row["labelled"])
        assert p is None or chosen == (0 if p > 0.5 else 1)


def test_the_saved_model_is_the_policy(whole):
    reloaded = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert AutoTokenizer.from_pretrained(whole / "model").chat_template
    assert 0 < difference(model(whole), safetensors.torch.load_file(Path(tiny.POLICY) / "model.safetensors"))
    assert difference(model(whole), model(whole, "saved_models/step_00004")) == 0
    assert reloaded.config.tie_word_embeddings


def test_no_call_leaves_the_machine(whole):
    assert not (whole.parent / "audit").exists(), (whole.parent / "audit").read_text()
    assert not (whole / "wandb").exists()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(whole, tmp_path):
    again = finish(tmp_path, ["--save-steps", 2, "--save-ckpt"])  # the same flags: nothing but the folder differs
    assert (again / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert difference(model(again), model(whole)) == 0
    other = finish(tmp_path, ["--seed", 43, "--max-train", 8, "--eval-steps", -1])
    first = [row["responses"][0]["ids"] for row in samples(whole)][:8]
    assert [row["responses"][0]["ids"] for row in samples(other)] != first


def test_resume_equals_no_interruption(whole, tmp_path):
    resumed = finish(tmp_path, ["--resume-dir", whole, "--resume-tag", "step_00002"])
    assert (resumed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert losses(resumed) == losses(whole)
    assert difference(model(resumed), model(whole)) == 0
    last, was = metrics(resumed)[-1], metrics(whole)[-1]
    for key in ("misc/queries", "misc/eval_queries", "misc/prompts", "eval/win_rate", "learner/lr"):
        assert last[key] == was[key], key


@pytest.mark.parametrize("launcher", [None, *CONFIGS])
def test_replayed_samples_give_the_same_losses_and_weights(whole, tmp_path, launcher):
    script = [str(ROOT / "tests" / "replay.py"), str(whole), RECIPE]
    trace = tmp_path / "trace.jsonl"
    run = finish(tmp_path, ["--train-batch-size-per-device", 2], launcher and CONFIGS[launcher], script, OAT_TRACE=str(trace))
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert difference(model(run), model(whole)) < 0.1 * LR * 4
    config = json.loads((run / "config.json").read_text())
    assert (config["zero_stage"], config["world_size"]) == {None: (2, 1), "zero2": (2, 2), "zero3": (3, 2)}[launcher]
    # What the loss saw is what was sampled: prompt and response ids as they came, the mask over the response, nothing else.
    seen = sorted((t["ids"], t["trained"]) for t in map(json.loads, trace.read_text().splitlines()))
    expected = sorted((row["prompt_ids"] + r["ids"], r["ids"]) for row in samples(whole) for r in row["responses"])
    assert seen == expected


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> str:
    """The embedded policy with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny.POLICY)
    policy = AutoModelForCausalLM.from_pretrained(tiny.POLICY)
    config.tie_word_embeddings = False
    free = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = policy.state_dict()
    free.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()})
    free.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.POLICY).save_pretrained(folder)
    return str(folder)


def test_two_processes_resume_too(untied, tmp_path):
    """ZeRO-2, two processes, two engines, an untied model; 4 steps against 2 + 2."""
    flags = ["--pretrain", untied, "--learning-rate", LR]
    run = finish(tmp_path, [*flags, "--save-steps", 2, "--save-ckpt"], CONFIGS["zero2"])
    assert all(m["actor/sync_gap"] <= 1e-4 for m in metrics(run))
    resumed = finish(tmp_path, [*flags, "--resume-dir", run, "--resume-tag", "step_00002"], CONFIGS["zero2"])
    assert (resumed / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()
    assert losses(resumed) == pytest.approx(losses(run), abs=1e-6)
    assert difference(model(resumed), model(run)) < 1e-6


def test_zero3_with_real_engines(tmp_path):
    run = finish(tmp_path, ["--eval-steps", -1, "--max-train", 16], ["--config_file", str(ROOT / "recipes/configs/zero3.yaml")])
    assert all(m["actor/sync_gap"] <= 1e-4 for m in metrics(run) if "actor/sync_gap" in m)
    assert json.loads((run / "config.json").read_text())["zero_stage"] == 3


def test_an_iterative_behaviour_policy(whole, tmp_path):
    """Syncs every 3 rounds, evaluates every 2: evaluation sees the learner's policy, sampling the old one, also after a resume."""
    flags = ["--sync-params-every", 3]
    run = finish(tmp_path, [*flags, "--save-steps", 2, "--save-ckpt"])
    rows = samples(run)
    assert [row["version"] for row in rows] == [0] * 24 + [3] * 8
    assert [row["responses"][0]["ids"] for row in rows[:8]] == [row["responses"][0]["ids"] for row in samples(whole)[:8]]
    at_2 = next(m for m in metrics(run) if m["misc/step"] == 2)
    assert at_2["actor/sync_gap"] <= 1e-4 and at_2["misc/version"] == 0
    resumed = finish(tmp_path, [*flags, "--resume-dir", run, "--resume-tag", "step_00002"])
    assert (resumed / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()
    assert difference(model(resumed), model(run)) == 0


ORACLES = '''
class Raises:
    calls = 0
    def compare(self, prompts, a, b):
        Raises.calls += 1
        if Raises.calls == 3:
            raise ConnectionError("the reward model is gone")
        return [0.9] * len(prompts)

class Silent:
    def compare(self, prompts, a, b):
        return [None] * len(prompts)
'''


@pytest.mark.parametrize("launcher", [None, "zero2"])
def test_an_oracle_that_raises_ends_the_run_with_one_line(tmp_path, launcher):
    (tmp_path / "task.py").write_text(ORACLES)
    code, run, output = start(tmp_path, ["--oracle", "task.py:Raises"], launcher and CONFIGS[launcher])
    assert code != 0 and run is None
    assert "ConnectionError: the reward model is gone" in output and "task.py:7" in output
    if launcher is None:
        assert "Traceback" not in output, output[-3000:]
        (folder,) = tmp_path.glob("dpo_online_*")
        assert len(metrics(folder)) == 2 and len(samples(folder)) == 8  # step 0 and 1 stay


def test_an_oracle_without_labels_warns_and_ends_after_three_rounds(tmp_path):
    (tmp_path / "task.py").write_text(ORACLES)
    code, run, output = start(tmp_path, ["--oracle", "task.py:Silent"])
    assert code != 0 and run is None
    assert "labelled no pair in three rounds in a row" in output and "Traceback" not in output
    assert output.count("got a label") == 3 and "the oracle labelled none of 8 responses" in output
    (folder,) = tmp_path.glob("dpo_online_*")
    assert len(samples(folder)) == 24 and [m["oracle/unlabelled"] for m in metrics(folder)[1:]] == [8, 8]


def test_more_samples_find_best_and_worst_within_the_budget(tmp_path):
    """5 samples, 7 comparisons a prompt; a budget of 60 is cut to 8 prompts, and a tail of 4 queries is left."""
    run = finish(tmp_path, ["--num-samples", 5, "--max-queries", 60, "--eval-steps", -1, "--wb-run-name", "best_of_5"])
    assert run.name.startswith("best_of_5_")
    rows, last = samples(run), metrics(run)[-1]
    assert all(len(row["responses"]) == 5 for row in rows)
    assert last["misc/queries"] <= 60 and 60 - last["misc/queries"] < 7
    from oracles.reward_model import Oracle

    oracle = Oracle()
    for row in rows:
        scores = oracle.score([row["prompt"]] * 5, [r["text"] for r in row["responses"]], [None] * 5)
        assert scores[row["feedback"]["chosen"]] == pytest.approx(max(scores), abs=1e-4)
        assert scores[row["feedback"]["rejected"]] == pytest.approx(min(scores), abs=1e-4)


def bad(tmp_path: Path) -> list[tuple[list, str]]:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "That."}\n')
    (tmp_path / "file").write_text("")
    return [
        (["--learning-rat", "1"], "learning-rat"),
        (["--input-key", "question"], "--input-key question: no such column; the data has prompt, reference"),
        (["--prompt-data", "rows.jsonl", "--eval-data", "rows.jsonl"], "--input-key prompt: no such column; the data has question, answer"),
        (["--prompt-data", "empty.jsonl", "--eval-data", "empty.jsonl"], "empty"),
        (["--prompt-data", "nothing.jsonl", "--eval-data", "nothing.jsonl"], "--prompt-data nothing.jsonl: no such file"),
        (["--prompt-data", "rows.jsonl"], "give held-out prompts by --eval-data"),
        (["--prompt-max-length", "3"], "--prompt-max-length 3"),
        (["--train-batch-size", "6"], "the nearest that work: 4 and 8"),
        (["--rollout-batch-size", "12"], "the nearest that work: 8 and 16"),
        (["--pretrain", "./no/such/model"], "--pretrain ./no/such/model: no such model"),
        (["--oracle", "nobody"], "--oracle nobody: no such oracle"),
        (["--oracle-model", "./no/such/model"], "no/such/model"),
        (["--save-path", "file"], "--save-path file: cannot write there"),
        (["--resume-dir", "."], "--save-steps N --save-ckpt"),
        (["--dap-algo", "SimPO"], "recipes/simpo_online.py"),
        (["--zero-stage", "4"], "--zero-stage 4"),
        (["--fp16"], "fp16 needs CUDA"),
        (["--gpus", "2"], "--num_processes 2"),
    ]


CASES = """
import json, os, runpy, sys
recipe, cases = sys.argv[1], json.loads(sys.argv[2])
import oat_lib.actor
def no_engine(*a, **k): raise AssertionError("an engine was started")
oat_lib.actor.Actor = no_engine
for flags in cases:
    sys.argv = [recipe, *flags]
    child = os.fork()  # nothing but imports was done so far
    if child == 0:
        runpy.run_path(recipe, run_name="__main__")
        os._exit(0)
    print(f"EXIT {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", file=sys.stderr, flush=True)
"""


def test_mistakes_end_before_a_model_loads_with_one_line(tmp_path):
    """One process imports everything once and forks for each case: an import takes longer than any of the cases."""
    cases = bad(tmp_path)
    flags = [[*SMALL, "--save-path", str(tmp_path / "out"), *case] for case, _ in cases]
    done = subprocess.run(
        [sys.executable, "-c", CASES, RECIPE, json.dumps(flags)], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    answers = done.stderr.split("EXIT ")
    assert len(answers) == len(cases) + 1, done.stderr[-4000:]
    for (case, expected), said, rest in zip(cases, answers, answers[1:], strict=False):
        said = said.split("\n", 1)[1] if said[:1].isdigit() else said
        assert rest.split("\n")[0] not in ("0",), case
        assert expected in said, (case, said)
        assert "Traceback" not in said, (case, said)


def test_a_mistake_as_a_user_makes_it(tmp_path):
    code, run, output = start(tmp_path, ["--train-batch-size", 6])
    assert code == 1 and run is None
    last = output.strip().splitlines()[-1]
    assert last.startswith("--train-batch-size 6 is not a multiple of processes (1) x --train-batch-size-per-device (4) = 4"), last


def test_a_full_disk_is_one_line(tmp_path):
    """A file system of 200 KiB that the samples overflow."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:  # no right to mount: a device that is always full stands in for metrics.jsonl
        code, output = full_device(tmp_path)
    else:
        try:
            code, _, output = start(tmp_path, ["--save-path", disk])
            (folder,) = disk.glob("dpo_online_*")
            assert metrics(folder)[0]["misc/step"] == 0  # what was logged before stays
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert code != 0
    assert any("No space left on device" in line and "cannot write" in line for line in output.splitlines()), output[-3000:]


FULL = """
import runpy, sys
from oat_lib import tracking
original = tracking.Run.__init__
def init(self, *a, **k):
    original(self, *a, **k)
    self.files["samples.jsonl"] = open("/dev/full", "w", buffering=1)
tracking.Run.__init__ = init
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def full_device(tmp_path):
    (tmp_path / "full.py").write_text(FULL)
    code, _, output = start(tmp_path, script=[str(tmp_path / "full.py"), RECIPE])
    return code, output
