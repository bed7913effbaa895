"""A run's folder: what is written, what is left out, and what happens when it cannot be written."""

import json

import pytest
import torch

from oat_lib import learner, tracking

DIST = learner.Dist(0, 1, 0, 1, torch.device("cpu"), torch.float32, 2)


def make(folder, **kwargs):
    return tracking.Run(str(folder), "name", dict(seed=1), DIST, 3, [["eval/win_rate"], ["learner/loss"]], **kwargs)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_wilson():
    assert tracking.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert tracking.wilson(0.9, 50) == pytest.approx((0.7864, 0.9565), abs=1e-4)
    for share in (0.0, 0.5, 1.0):
        low, high = tracking.wilson(share, 300)
        assert 0 <= low < high <= 1 and high - low > 0.01
    assert tracking.wilson(0.0, 0) == (0.0, 1.0)


def test_win_rate_counts_ties_as_halves_and_leaves_out_what_has_no_label():
    found = tracking.win_rate("eval/win_rate", [0.9, 0.5, 0.1, None, 0.51])
    assert found["eval/win_rate"] == pytest.approx(2.5 / 4)
    assert (found["eval/win_rate_low"], found["eval/win_rate_high"]) == tracking.wilson(2.5 / 4, 4)
    assert tracking.win_rate("x", [None]) == {}


def test_what_a_run_leaves(tmp_path, capsys):
    run = make(tmp_path)
    run.log(0, {"eval/win_rate": 0.5, "eval/win_rate_low": 0.4, "eval/win_rate_high": 0.6})
    run.samples([dict(step=1, text="é\n")])
    run.log(1, {"learner/loss": float("nan"), "learner/lr": 0.1}, show=("learner/loss",))
    run.config(zero_stage=3)
    run.warn("careful")
    run.finish()
    first, second = lines(run.dir / "metrics.jsonl")
    assert first["misc/step"] == 0 and "learner/loss" not in second and second["learner/lr"] == 0.1
    assert lines(run.dir / "samples.jsonl") == [dict(step=1, text="é\n")]
    config = json.loads((run.dir / "config.json").read_text())
    assert config["seed"] == 1 and config["zero_stage"] == 3 and config["versions"]["torch"]
    assert (run.dir / "curves.png").stat().st_size > 5000
    out = capsys.readouterr().out.splitlines()
    assert "WARNING: careful" in out and out[-1] == f"Run folder: {run.dir}"
    assert make(tmp_path).dir != run.dir


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="--save-path .*file: cannot write there"):
        make(tmp_path / "file")


def test_a_full_disk_is_one_line_and_keeps_what_was_logged(tmp_path):
    run = make(tmp_path)
    run.log(0, {"learner/loss": 1.0})
    run.files["metrics.jsonl"] = open("/dev/full", "w", buffering=1)
    with pytest.raises(SystemExit, match="cannot write .*metrics.jsonl: No space left on device"):
        run.log(1, {"learner/loss": 1.0})
    assert len(lines(run.dir / "metrics.jsonl")) == 1


def test_a_resumed_run_carries_over_what_its_checkpoint_had_seen(tmp_path):
    run = make(tmp_path)
    for step in range(4):
        run.log(step, {"learner/loss": 1.0})
        run.samples([dict(step=step)])
    run.finish()
    resumed = make(tmp_path, resume_from=run.dir, resume_step=2)
    assert [row["misc/step"] for row in lines(resumed.dir / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in lines(resumed.dir / "samples.jsonl")] == [0, 1, 2]


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make(tmp_path, use_wb=True)
    run.log(0, {"learner/loss": 1.0})
    run.finish()
    assert list((run.dir / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\rb\x0c", "\u2029"])
def test_any_text_survives_a_resume(tmp_path, text):
    run = make(tmp_path)
    run.log(1, {"learner/loss": 1.0})
    run.samples([dict(step=1, text=text), dict(step=2, text="later")])
    run.finish()
    resumed = make(tmp_path, resume_from=run.dir, resume_step=1)
    (line,) = (resumed.dir / "samples.jsonl").read_text().split("\n")[:-1]
    assert json.loads(line) == dict(step=1, text=text)


def test_a_line_that_was_cut_when_the_run_died_is_left_out(tmp_path):
    run = make(tmp_path)
    run.log(0, {"learner/loss": 1.0})
    run.finish()
    with open(run.dir / "metrics.jsonl", "a") as file:
        file.write('{"misc/step": 1, "learner/lo')
    resumed = make(tmp_path, resume_from=run.dir, resume_step=5)
    assert [row["misc/step"] for row in lines(resumed.dir / "metrics.jsonl")] == [0]
    resumed.log(6, {"learner/loss": 1.0})
    assert [row["misc/step"] for row in lines(resumed.dir / "metrics.jsonl")] == [0, 6]


def test_wilson_is_symmetric_and_narrows():
    for share, n in ((0.1, 10), (0.25, 40), (0.0, 7)):
        low, high = tracking.wilson(share, n)
        assert tracking.wilson(1 - share, n) == pytest.approx((1 - high, 1 - low)) and low <= share <= high
        wider = tracking.wilson(share, n // 2)
        assert wider[1] - wider[0] > high - low
    assert tracking.wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # z^2 / (n + z^2)
