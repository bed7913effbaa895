"""The command line of every recipe: tyro on the recipe's `Args`, and one-line answers to flags that Oat had and we do not."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TypeVar

import tyro

A = TypeVar("A")

RENAMED = {"--preference-oracle": "--oracle", "--algo": "--dap-algo"}
# Oat's flags without a counterpart: what to do instead. "launch" moves into `accelerate launch`; all others are left out.
DROPPED = {
    "--gpus": "the launcher starts the processes",
    "--remote-rm-url": "a remote oracle is not written yet: --oracle reward_model --oracle-model NAME runs it in process",
    "--collocate": "the default here: each process has its own engine",
    "--launch-type": "the launcher does it",
    "--group-rank": "use accelerate's --machine_rank",
    "--num-groups": "use accelerate's --num_machines",
    "--master-addr": "use accelerate's --main_process_ip",
    "--master-port": "use accelerate's --main_process_port",
    "--shm-size-mb": "there is no object store",
    "--disable-trace-cache": "it did nothing",
    "--whiten-rewards": "it did nothing",
    "--dump-all-buffer": "samples.jsonl always holds every sample",
    "--dump-replay-every": "samples.jsonl always holds every sample",
    "--zpg": "not here",
    "--model-data-strategy": "it had one value",
    "--local-rank": "the launcher sets it",
    "--sft-sum-loss": "the loss is a mean over tokens",
    "--online-evaluation": "samples.jsonl and eval/win_rate tell it",
    "--vllm-sleep": "the default here on CUDA",
    "--debug": "leave it out",
}
SWITCHES = set("--collocate --disable-trace-cache --whiten-rewards --dump-all-buffer --sft-sum-loss".split()) | set(
    "--online-evaluation --vllm-sleep --debug".split()
)
SPECIAL = (  # flag and value, what takes their place, why
    ("--oracle", "remote", ["--oracle", "reward_model"], "--oracle remote is not written yet"),
    ("--dap-algo", "SimPO", [], "--dap-algo SimPO has a recipe of its own, recipes/simpo_online.py (not written yet)"),
)
ELSEWHERE = {  # flags that belong to another recipe
    "--learn-rm": "sea_online.py",
    "--exp-method": "sea_online.py",
    "--model-rollout": "sea_online.py",
    "--learn-rm-only": "sea_online.py",
    "--apl-pref-certainty-only": "apl_online.py",
    "--xpo-alpha": "xpo_online.py",
    "--gamma-beta-ratio": "simpo_online.py",
    "--critic-type": "grpo_math.py",
    "--num-ppo-epochs": "grpo_math.py",
    "--prompt-template": "grpo_math.py",
}


def normalise(argv: list[str]) -> list[str]:
    """Flags with hyphens, `--key=value` split in two, Oat's old names replaced; values untouched."""
    words = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word.partition("=")
            key = key.replace("_", "-")
            words += [RENAMED.get(key, key)] + ([value] if equals else [])
        else:
            words.append(word)
    return words


def spell_out(argv: list[str], optional: set[str]) -> list[str]:
    """`--bf16` and `--no-bf16` for flags of type `bool | None`, which tyro wants as `--bf16 True` and `--bf16 False`."""
    words = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word in optional:
            words += [word] if following in ("True", "False", "None") else [word, "True"]
        elif word.startswith("--no-") and "--" + word[5:] in optional:
            words += ["--" + word[5:], "False"]
        else:
            words.append(word)
    return words


def answer_to_dropped(argv: list[str], recipe: str, own: set[str]) -> str | None:
    """One line for a command with flags that are gone: why, and the whole command to write instead. None when it has none.

    own: the flags that this recipe has.
    """
    reasons, kept, launch, target, dropped = [], [], "accelerate launch", recipe, DROPPED
    if "--gpus" in argv:  # the number of processes changes, and with it what Oat's users worked out by hand
        own, dropped = own - {"--pi-buffer-maxlen-per-device"}, DROPPED | {"--pi-buffer-maxlen-per-device": "it is derived"}
    words = iter(argv)
    for word in words:
        if word in dropped and word not in own:
            reasons.append(f"{word}: {dropped[word]}")
            value = None if word in SWITCHES else next(words, None)
            if word == "--gpus":
                launch += f" --use_deepspeed --num_processes {value}"
        elif word in ELSEWHERE and word not in own:
            target = f"recipes/{ELSEWHERE[word]}"
            reasons.append(f"{word} belongs to {target}" + ("" if Path(target).is_file() else " (not written yet)"))
            kept.append(word)
        else:
            kept.append(word)
    for flag, value, instead, reason in SPECIAL:
        at = next((i for i, word in enumerate(kept[:-1]) if word == flag and kept[i + 1] == value), None)
        if at is not None and (reasons or reason):
            reasons += [reason] if reason else []
            kept[at : at + 2] = instead
            target = "recipes/simpo_online.py" if value == "SimPO" else target
    if not reasons:
        return None
    return f"{'; '.join(reasons)}. Write instead: {launch} {target} {shlex.join(kept)}".rstrip()


def parse(args_class: type[A], argv: list[str] | None = None) -> A:
    """An instance of the recipe's `Args` from the command line. Unknown flags and bad values exit with code 2 and say which.

    Hyphens and underscores are the same. Oat's old names still work; flags that are gone are answered with the command to write.
    """
    argv = normalise(sys.argv[1:] if argv is None else argv)
    own = {"--" + name.replace("_", "-") for name in args_class.__dataclass_fields__}
    answer = answer_to_dropped(argv, sys.argv[0], own)
    if answer:
        print(answer, file=sys.stderr)
        raise SystemExit(2)
    argv = spell_out(argv, {"--" + f.name.replace("_", "-") for f in dataclasses.fields(args_class) if f.type == bool | None})
    return tyro.cli(args_class, args=argv, description=(sys.modules[args_class.__module__].__doc__ or "").strip())
