"""The learner: the same numbers for every ZeRO stage, number of processes and micro-batch size; checkpoints; what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from oat_lib import learner, saving, tiny

SCRIPT = str(Path(__file__).with_name("learner_steps.py"))
SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
ENV = {k: v for k, v in os.environ.items() if k not in SET_BY_LAUNCHERS}


def run(folder, stage, processes, *more):
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--use_deepspeed", "--zero_stage", str(stage)]
    start = [sys.executable] if processes == 1 else [*launch, "--num_processes", str(processes)]
    done = subprocess.run([*start, SCRIPT, str(folder), str(stage), *more], env=ENV, capture_output=True, text=True, timeout=300)
    assert (folder / "facts.json").is_file(), done.stdout[-2000:] + done.stderr[-4000:]
    assert done.returncode != 0 and "ValueError: one rank is enough" in done.stderr  # the script ends with an error of its last rank
    return json.loads((folder / "facts.json").read_text())


def weights(folder, name):
    return safetensors.torch.load_file(folder / name / "model.safetensors")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, run(folder, 2, 1)


@pytest.mark.parametrize("stage, processes", [(0, 1), (2, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_every_stage_and_split_learns_the_same(tmp_path, single, stage, processes):
    folder, facts = single if (stage, processes) == (2, 1) else (tmp_path, run(tmp_path, stage, processes))
    expected = single[1]
    assert facts["stage"] == stage and facts["state"] == dict(step=2, world_size=processes, zero_stage=stage)
    assert facts["losses"] == pytest.approx(expected["losses"], abs=1e-5) and facts["losses"][3] < facts["losses"][0]
    assert facts["norms"] == pytest.approx(expected["norms"], rel=1e-4)  # known at every stage, and before clipping
    assert facts["norms"][0] > 0.5
    assert facts["resumed"] == pytest.approx(facts["losses"][2:], rel=1e-6) and facts["drawn"][0] == facts["drawn"][1]
    whole, resumed, other = weights(folder, "whole"), weights(folder, "resumed"), weights(single[0], "whole")
    for name in whole:
        assert (whole[name] - resumed[name]).abs().max() < 1e-6
        assert (whole[name] - other[name]).abs().max() < 1e-5  # two orders below the four steps of 1e-3
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(facts["names"]) and "lm_head.weight" not in whole
    assert AutoModelForCausalLM.from_pretrained(folder / "whole").config.tie_word_embeddings


@pytest.mark.parametrize("stage, processes", [(1, 1), (2, 2), (3, 2)])
def test_bf16(tmp_path, single, stage, processes):
    facts = run(tmp_path, stage, processes, "bf16")
    assert facts["losses"] == pytest.approx(single[1]["losses"], rel=0.02) and all(norm > 0 for norm in facts["norms"])
    assert weights(tmp_path, "whole")["model.norm.weight"].dtype == torch.bfloat16


def test_what_launcher_and_flags_say(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert learner.precision(None, None, cuda=True) == torch.bfloat16 and learner.precision(None, None, cuda=False) == torch.float32
    assert learner.precision(False, None, cuda=True) == torch.float32 and learner.precision(None, True, cuda=True) == torch.float16
    assert learner.resolve_zero_stage(None) == 2 and learner.resolve_zero_stage(3) == 3
    for call, said in (
        (lambda: learner.precision(True, True, True), "exclude each other"),
        (lambda: learner.precision(None, True, False), "fp16 needs CUDA"),
        (lambda: learner.resolve_zero_stage(4), "--zero-stage 4"),
        (lambda: learner.init(zero_stage=0, bf16=True), "use --zero-stage 1"),
    ):
        with pytest.raises(SystemExit, match=said):
            call()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert learner.precision(None, None, cuda=False) == torch.bfloat16 and learner.resolve_zero_stage(None) == 3
    with pytest.raises(SystemExit, match="mixed_precision=bf16"):
        learner.precision(False, None, cuda=True)
    with pytest.raises(SystemExit, match="--zero-stage 2 but accelerate was told zero_stage 3"):
        learner.resolve_zero_stage(2)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "x.json")
    with pytest.raises(SystemExit, match="set zero_stage in accelerate's config"):
        learner.resolve_zero_stage(None)


def test_batch_sizes_name_the_product_and_what_works():
    learner.check_batch_sizes(2, 16, 4, 32, 16)
    for sizes, said in (
        ((2, 12, 4, 24), r"--train-batch-size 12 is not a multiple of processes \(2\) x .* = 8; the nearest that work: 8 and 16"),
        ((2, 8, 4, 12), r"--rollout-batch-size 12 is not a multiple of --train-batch-size \(8\) = 8; the nearest that work: 8 and 16"),
        ((4, 4, 1, 6), r"--rollout-batch-size 6 is not a multiple of processes \(4\) = 4"),
        ((1, 0, 1, 1), "--train-batch-size 0"),
    ):
        with pytest.raises(SystemExit, match=said):
            learner.check_batch_sizes(*sizes)


def test_schedules():
    def rates(kind, steps, warmup):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, found = learner.lr_schedule(optimizer, kind, steps, warmup), []
        for _ in range(steps + 2):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    assert rates("constant", 3, 0.5) == [1.0] * 5
    assert rates("linear", 4, 0.25) == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0, 0.0])  # the first step is not wasted
    cosine = rates("cosine_with_min_lr", 10, 0.0)
    assert cosine[0] == 1.0 and cosine[5] == pytest.approx(0.55) and cosine[10:] == pytest.approx([0.1, 0.1])
    with pytest.raises(SystemExit, match="--lr-scheduler step"):
        rates("step", 3, 0.0)


def test_only_complete_checkpoints_are_found_and_only_own_ones_deleted(tmp_path):
    dist = learner.Dist(0, 1, 0, 1, torch.device("cpu"), torch.float32, 2)
    for name in ("step_00002", "step_00004", "step_00006.partial", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step_00002", "step_00004", "step_00006.partial"):
        (tmp_path / "checkpoints" / name / "state.json").write_text('{"world_size": 2, "zero_stage": 2}')
    newest = saving.latest_checkpoint(str(tmp_path))
    assert newest.name == "step_00004" and saving.latest_checkpoint(str(tmp_path), "step_00002").name == "step_00002"
    with pytest.raises(SystemExit, match="has world_size 2, this run has 1"):
        saving.read_state(newest, dist)
    with pytest.raises(SystemExit, match="no checkpoint called step_9"):
        saving.latest_checkpoint(str(tmp_path), "step_9")
    (tmp_path / "checkpoints" / "step_00006.partial").rename(tmp_path / "checkpoints" / "step_00006")
    saving.keep_newest(tmp_path / "checkpoints", 1, dist)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["notes", "step_00006"]


def test_dropout_is_off_and_norms_do_not_decay(tmp_path):
    dist = learner.Dist(0, 1, 0, 1, torch.device("cpu"), torch.float32, 2)
    model = AutoModelForCausalLM.from_pretrained(tiny.POLICY)
    model.config.attention_dropout = 0.3
    model.save_pretrained(tmp_path)
    assert learner.load_model(AutoModelForCausalLM, str(tmp_path), dist).config.attention_dropout == 0.0
    decayed, plain = learner.param_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0 and all(p.ndim == 1 for p in plain["params"])
    assert all(p.ndim == 2 for p in decayed["params"])
    with pytest.raises(SystemExit, match="cannot load a model"):
        learner.load_model(AutoModelForCausalLM, str(tmp_path / "none"), dist)


AGREE = """
import sys, torch, torch.distributed
from oat_lib import learner
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist = learner.Dist(rank, 2, 0, 2, torch.device("cpu"), torch.float32, 2)
learner.agree(None, dist)
assert learner.gather(dist.rank, dist) == [0, 1]
learner.agree(ValueError("no label") if dist.rank == 1 else None, dist)
print("went on")
"""


def test_an_error_of_one_rank_ends_both_with_its_line(tmp_path):
    start = dict(cwd=Path(SCRIPT).parent.parent, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen([sys.executable, "-c", AGREE, str(r), str(tmp_path / "meet")], **start) for r in range(2)]
    ended = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    for out, err, code in ended:
        assert code == 1 and "ValueError: no label (rank 1)" in err and "went on" not in out, ended


def test_the_token_mean_does_not_depend_on_where_tokens_fall():
    class Engine:
        """Averages over ranks as DeepSpeed does; keeps what `backward` gave it."""

        def __init__(self, world_size):
            self.world_size, self.total = world_size, 0.0

        def backward(self, loss, scale_wrt_gas):
            self.total += loss.item() / self.world_size

    for world_size in (1, 2):  # token losses [1, 1, 1, 1] and [5], and a micro-batch of weight zero
        engine = Engine(world_size)
        for loss_sum in (4.0, 5.0, 0.0):
            learner.backward(engine, torch.tensor(loss_sum), 5)
        assert engine.total == pytest.approx(1.8)
    learner.backward(engine, torch.tensor(0.0), 0)  # nothing counts: zero, not NaN
    assert engine.total == pytest.approx(1.8)


def test_warm_up_rises_in_equal_steps_and_polynomial_is_linear():
    def rates(kind):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = learner.lr_schedule(optimizer, kind, 10, 0.25)
        return [2.0 * schedule.lr_lambdas[0](step) for step in range(12)]

    assert rates("polynomial") == rates("linear")
    for kind, end in (("linear", 0.0), ("cosine_with_min_lr", 0.2)):
        found = rates(kind)  # ceil(2.5) = 3 steps of warm-up
        assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0]) and found[3:] == sorted(found[3:], reverse=True)
        assert found[10:] == pytest.approx([end, end])


def test_an_incomplete_checkpoint_is_never_found_nor_counted(tmp_path):
    dist = learner.Dist(0, 1, 0, 1, torch.device("cpu"), torch.float32, 2)
    for name in ("step_00002", "step_00004", "step_00006.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step_00001").write_text("a file of the user")
    saving.keep_newest(tmp_path, 1, dist)  # the partial one does not take the place of a good one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00001", "step_00004", "step_00006.partial"]
    assert saving.latest_checkpoint(str(tmp_path)).name == "step_00004"
    assert saving.latest_checkpoint(str(tmp_path / "step_00004")).name == "step_00004"
    for where, tag in ((tmp_path / "step_00006.partial", None), (tmp_path, "step_00006.partial"), (tmp_path / "none", None)):
        with pytest.raises(SystemExit, match="no checkpoint"):
            saving.latest_checkpoint(str(where), tag)
    saving.keep_newest(tmp_path, 0, dist)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00001", "step_00006.partial"]
