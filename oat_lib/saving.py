"""What a run keeps: models as Hugging Face directories, and checkpoints that hold all that a restart needs."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import numpy as np
import safetensors
import torch

from oat_lib import learner


def saved_weights(path: str | Path, engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as `named_weights`, from a directory that `save_hf` wrote: older weights for the actor."""
    module = getattr(engine, "module", engine)
    saved_as = {id(p): name for name, p in module.named_parameters()}  # a tied weight is saved once
    files = [safetensors.safe_open(f, framework="pt") for f in sorted(Path(path).glob("*.safetensors"))]
    holder = {name: f for f in files for name in f.keys()}  # noqa: SIM118 (safe_open has no iterator)
    for name, param in module.named_parameters(remove_duplicate=False):
        yield name, holder[saved_as[id(param)]].get_tensor(saved_as[id(param)])


def save_hf(engine, tokenizer, path: str | Path, dist: learner.Dist) -> None:
    """Writes a Hugging Face directory that `from_pretrained` and vLLM load; complete or absent. All ranks call it."""
    module, path = getattr(engine, "module", engine), Path(path)
    weights = {}
    for name, param in module.named_parameters():  # a tied weight once: from_pretrained ties it again
        with deepspeed.zero.GatheredParameters([param], enabled=dist.zero_stage == 3):
            if dist.main:
                weights[name] = param.detach().cpu().clone()
    if dist.main:
        persistent = set(module.state_dict().keys()) - set(dict(module.named_parameters(remove_duplicate=False)))
        weights.update({n: b.detach().cpu().clone() for n, b in module.named_buffers() if n in persistent})
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            module.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
        except (OSError, safetensors.SafetensorError) as e:
            shutil.rmtree(partial, ignore_errors=True)
            raise SystemExit(f"cannot write {path}: {e}") from e
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    learner.barrier(dist)


def save_checkpoint(engine, state: dict, path: str | Path, dist: learner.Dist, folders: dict[str, Path] | None = None) -> None:
    """Writes all that a run needs to go on: the engine (policy, optimizer, schedule), `state`, and each rank's random state.

    `state` is the recipe's one dictionary (JSON values: counters, positions); `folders` are copied in by name. The directory appears under
    its name only once it is complete, so a run that is killed while saving leaves the last good one. All ranks call it.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    if dist.main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    learner.barrier(dist)
    engine.save_checkpoint(str(partial), tag="engine", save_latest=False)
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if dist.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state()
    torch.save(rng, partial / f"random_state_{dist.rank}.pt")
    for name, folder in (folders or {}).items():
        copy_folder(folder, partial / name, dist)
    if dist.main:
        (partial / "state.json").write_text(json.dumps({**state, "world_size": dist.world_size, "zero_stage": dist.zero_stage}, indent=1))
    learner.barrier(dist)
    if dist.main:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    learner.barrier(dist)


def copy_folder(source: Path, target: Path, dist: learner.Dist) -> None:
    """Rank 0 copies a folder, all wait for it."""
    if dist.main:
        shutil.copytree(source, target, dirs_exist_ok=True)
    learner.barrier(dist)


def keep_newest(folder: Path, count: int, dist: learner.Dist) -> None:
    """Deletes all but the newest `count` of this run's step_* directories (names sort by step); nothing else is touched."""
    if dist.main:
        for old in sorted(p for p in folder.glob("step_*") if p.is_dir() and p.suffix != ".partial")[: -count if count > 0 else None]:
            shutil.rmtree(old)


def latest_checkpoint(resume_dir: str, resume_tag: str | None = None) -> Path:
    """The newest complete checkpoint under `resume_dir` (a run's folder, its checkpoints/ or one checkpoint).

    Raises SystemExit with what was found when there is none, or none called `resume_tag`.
    """
    root = Path(resume_dir)
    if (root / "state.json").is_file() and root.suffix != ".partial":
        return root
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    found = sorted(p.parent for p in root.glob("step_*/state.json") if not p.parent.name.endswith(".partial"))
    if resume_tag is not None:
        found = [p for p in found if p.name == resume_tag]
    if not found:
        wanted = f"checkpoint called {resume_tag}" if resume_tag else "checkpoint (step_*/state.json)"
        there = sorted(p.name for p in root.iterdir()) if root.is_dir() else "the folder does not exist"
        raise SystemExit(f"--resume-dir {resume_dir}: no {wanted} in {root} (found: {there}); --save-steps N --save-ckpt saves some")
    return found[-1]


def read_state(path: Path, dist: learner.Dist) -> dict:
    """The `state` of a checkpoint. Raises SystemExit when the processes or the ZeRO stage differ: optimizer shards would not fit."""
    state = json.loads((path / "state.json").read_text())
    for key in ("world_size", "zero_stage"):
        if state[key] != getattr(dist, key):
            raise SystemExit(f"--resume-dir: {path} has {key} {state[key]}, this run has {getattr(dist, key)}: launch it in the same way")
    return state


def load_checkpoint(engine, path: str | Path, dist: learner.Dist) -> dict:
    """Restores the engine and this rank's random state from what `save_checkpoint` wrote, and returns its `state`. All ranks call it."""
    path = Path(path)
    engine.load_checkpoint(str(path), tag="engine")
    rng = torch.load(path / f"random_state_{dist.rank}.pt", weights_only=False)  # written by this program
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return read_state(path, dist)
