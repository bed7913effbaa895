"""The command line: Oat's documented commands parse, or are answered in one line with a command that does."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from oat_lib import cli

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("dpo_online_cli", ROOT / "recipes" / "dpo_online.py")
dpo = sys.modules["dpo_online_cli"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dpo)

SIMPO = (
    "--gpus 2 --collocate --dap-algo SimPO --beta 2 --preference-oracle pairrm --pretrain trl-lib/pythia-1b-deduped-tldr-sft "
    "--prompt-data lkevinzc/tldr-with-sft-reference --output_key pythia-1b-reference --sync-params-every 1 "
    "--rollout-batch-size-per-device 64 "
    "--pi-buffer-maxlen-per-device 64 --train-batch-size-per-device 8 --use-wb --wb-run-name 1b_pairrm_simpo_online"
)
BASE = (
    "--flash-attn --gradient-checkpointing --rnd-seed --gpus 8 --dap-algo DPO --beta 0.1 --preference-oracle remote "
    "--remote-rm-url http://0.0.0.0:8000 --pretrain trl-lib/pythia-1b-deduped-tldr-sft --prompt-data lkevinzc/tldr-with-sft-reference "
    "--input-key prompt --output-key pythia-1b-reference --sync-params-every 1 --max-train 50000 --generate-max-length 53 "
    "--train-batch-size 128 --rollout-batch-size 128 --rollout-batch-size-per-device 32 --pi-buffer-maxlen-per-device 32 "
    "--train-batch-size-per-device 8 --eval-steps 20 --use-wb --wb-run-name 1b_skywork_dpo_online"
)
GPT = BASE.replace("--remote-rm-url http://0.0.0.0:8000 ", "").replace("remote", "gpt-4o-mini-2024-07-18") + " --collocate"
SEA = "--num-prompt-epoch 2 --max-step-adjustment 0.75 --lr-warmup-ratio 0.02 --eval-query-interval 2560 --num-samples 20"
OAT = {
    "direct": "--dap-algo IPO --beta 0.1",
    "simpo": SIMPO,
    "offline behaviour": SIMPO.replace("--sync-params-every 1", "--sync-params-every 9999"),
    "base": BASE,
    "6.9b": f"{BASE} --remote-rm-url http://remote-rm --pretrain trl-lib/pythia-6.9b-deduped-tldr-sft --output-key pythia-6.9b-reference",
    "gpt": GPT,
    "sea": f"{BASE} {SEA} --learn-rm --exp-method EnnBAITS --model-rollout --max-model-data-ratio 0.3",
    "ee4llm": f"{BASE} --num-samples 20 --learn-rm --learn_rm_only --exp-method EnnEETS --exp_rnd_sample --online_evaluation "
    "--best_of_n_eval --num_bon 10",
    "apl": f"{BASE} --num_prompt_epoch 4 --max_train 100000 --max_step_adjustment 0.125 --num_samples 8 --apl_pref_certainty_only",
    "xpo": BASE,
}


def answer(flags: str, capsys) -> tuple[object, str]:
    try:
        return cli.parse(dpo.Args, shlex.split(flags)), ""
    except SystemExit as stop:
        assert stop.code == 2
        return None, capsys.readouterr().err


@pytest.mark.parametrize("name", OAT)
def test_oats_commands(name, capsys):
    args, said = answer(OAT[name], capsys)
    if args is None:
        assert said.count("\n") == 1 and "Write instead: accelerate launch" in said
        launch, _, flags = said.strip().partition("Write instead: ")[2].partition(".py")
        assert ("--num_processes" in launch) == ("--gpus" in OAT[name])
        if launch.endswith("recipes/dpo_online") or "recipes/" not in launch:  # what is written instead parses, and says no more
            args, said = answer(flags, capsys)
            assert args is not None, said
    else:
        assert args.dap_algo == "IPO"


def test_answers_name_the_recipe(capsys):
    for name, recipe in (("simpo", "simpo_online"), ("sea", "sea_online"), ("apl", "apl_online")):
        assert f"recipes/{recipe}.py" in answer(OAT[name], capsys)[1].partition("Write instead: ")[2]


def test_spelling():
    args = cli.parse(dpo.Args, "--preference_oracle pairrm --train_batch_size=32 --bf16 --no-apply_chat_template --use_wb".split())
    assert (args.oracle, args.train_batch_size, args.bf16, args.apply_chat_template, args.use_wb) == ("pairrm", 32, True, False, True)
    args = cli.parse(dpo.Args, "--no-bf16 --fp16 True --no-save-ckpt".split())
    assert (args.bf16, args.fp16, args.save_ckpt) == (False, True, False)
    assert cli.parse(dpo.Args, []) == dpo.Args()


def test_an_unknown_flag_is_named(capsys):
    args, said = answer("--learning-rat 1", capsys)
    assert args is None and "--learning-rat" in said


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "recipes").glob("*.py")))
def test_recipes_stay_readable(recipe):
    text = (ROOT / "recipes" / f"{recipe}.py").read_text()
    assert len(text.splitlines()) <= 550
    assert text.startswith("# docs: ") and "differs from the paper in:" in text and "def main(" in text


def test_the_library_stays_thin():
    sizes = {p: len(p.read_text().splitlines()) for p in (ROOT / "oat_lib").rglob("*.py")}
    assert max(sizes.values()) <= 400 and sum(sizes.values()) <= 2500, sizes


def test_the_base_command_is_answered_with_one_line_that_means_the_same(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipes/dpo_online.py"])
    args, said = answer(OAT["base"], capsys)
    assert args is None and said.count("\n") == 1
    words = shlex.split(said.partition("Write instead: ")[2])
    assert words[:6] == ["accelerate", "launch", "--use_deepspeed", "--num_processes", "8", "recipes/dpo_online.py"]
    for flag in ("--gpus", "--remote-rm-url", "--pi-buffer-maxlen-per-device", "http://0.0.0.0:8000"):
        assert flag not in words
    args = cli.parse(dpo.Args, words[6:])
    assert (args.oracle, args.dap_algo, args.beta, args.generate_max_length, args.eval_steps) == ("reward_model", "DPO", 0.1, 53, 20)
    assert (args.flash_attn, args.gradient_checkpointing, args.rnd_seed, args.use_wb) == (True, True, True, True)
    assert args.wb_run_name == "1b_skywork_dpo_online"  # a value keeps its underscores
    dpo.check(args, 8)


def test_values_are_quoted_and_may_be_negative(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipes/dpo_online.py"])
    _, said = answer("--gpus=4 --system_prompt 'Be kind; it is $5.' --save_steps -1 --top-k -1 --num_samples=2", capsys)
    launch, _, flags = said.partition("Write instead: ")[2].partition("recipes/dpo_online.py ")
    args = cli.parse(dpo.Args, shlex.split(flags))
    assert launch == "accelerate launch --use_deepspeed --num_processes 4 "
    assert (args.system_prompt, args.save_steps, args.top_k, args.num_samples) == ("Be kind; it is $5.", -1, -1, 2)


def test_each_of_the_two_precision_flags_in_each_spelling():
    for flags, bf16, fp16 in (("--bf16", True, None), ("--no-bf16", False, None), ("--bf16 False", False, None), ("--fp16", None, True),
                              ("--bf16 --seed 1", True, None), ("--no_bf16 --no_fp16", False, False)):  # fmt: skip
        args = cli.parse(dpo.Args, flags.split())
        assert (args.bf16, args.fp16) == (bf16, fp16)


def test_bad_values_exit_with_2_and_name_the_flag(capsys):
    for flags, named in (("--beta much", "--beta"), ("--seed 1.5", "--seed"), ("--use-wb maybe", "maybe")):
        args, said = answer(flags, capsys)
        assert args is None and named in said
