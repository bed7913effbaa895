"""The actor: samples responses with vLLM, takes new weights from the learner, and proves that it runs them.

One placement so far: in process, one engine per rank on the learner's device (it sleeps while the learner works on CUDA).
"""

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from oat_lib import learner, logprobs

PROBE_TOKENS, PROBE_TEMPERATURE = 16, 0.7  # a temperature other than 1 shows raw log-probs where processed ones are due
# |difference| of a sampled token's log-prob between engine and learner: (warn, fatal). In fp32 they agree to about 1e-6; two bf16
# computations of the same number differ by up to 0.25 (measured on a 135M model), a stale cache or head by 0.4 to 1.3.
GAP_LEVELS = {torch.float32: (3e-4, 3e-3), torch.float16: (0.1, 0.3), torch.bfloat16: (0.5, 1.0)}


@dataclass
class Sample:
    """One response as it was sampled. Its token ids go to the loss as they are; nothing is re-tokenised, stripped or added."""

    prompt_ids: list[int]
    response_ids: list[int]  # with the EOS or stop token where one was sampled
    logprobs: list[float]  # of the sampled tokens, after temperature and top-p/top-k (vLLM's processed log-probs), natural log
    finish_reason: str  # "stop", or "length" when truncated
    text: str  # the engine's decoding, special tokens removed: for the oracle
    version: int  # of the weights that made it

    def record(self) -> dict:
        """What samples.jsonl holds of it, beside its prompt."""
        return dict(text=self.text, ids=self.response_ids, logprobs=self.logprobs, finish_reason=self.finish_reason)


@dataclass
class Sampling:
    """How to sample; the seed comes with each request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False


def sample_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """The seed of one sample. Derived from what it is, not from the rank or the batch that makes it, so that resumed runs and other
    numbers of processes repeat it, and hashed, since vLLM's own `n > 1` seeds (seed + i) make neighbours share samples."""
    return int(np.random.SeedSequence((run_seed, epoch, index, sample)).generate_state(1, np.uint64)[0] >> 1)


class _MissingWeights(logging.Filter):
    """vLLM only logs the layers that a reload did not reach and keeps their old weights; here they are collected, and end the run."""

    LOGGERS = ("vllm.model_executor.model_loader.reload.inplace", "vllm.model_executor.model_loader.reload.layerwise")

    def __init__(self):
        super().__init__()
        self.messages: list[str] = []
        for name in self.LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno >= logging.WARNING and "Rotary" not in message:  # rotary embeddings hold no weights, only computed tables
            self.messages.append(message)
        return False


class Actor:
    """A vLLM engine in this process, on this rank's device.

    model: path or hub name. max_model_len: tokens of prompt and response together. gpu_ratio: share of the GPU's memory for the engine.
    Creating it is a collective when there is more than one rank, and resets the global random state: seed afterwards.
    Raises SystemExit when the model's context is shorter than `max_model_len`.
    """

    def __init__(self, model: str, dist: learner.Dist, max_model_len: int, gpu_ratio: float = 0.25, seed: int = 0):
        if dist.world_size == dist.local_world_size:
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # else vLLM opens a socket to find out its address
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        if dist.device.type == "cpu":
            torch._dynamo.config.disable = True  # parts of vLLM's sampler are compiled in eager mode too, which needs g++ on a CPU
        from vllm import LLM

        self.dist, self.version, self.asleep, self.cuda = dist, 0, False, dist.device.type == "cuda"
        self.block = 16 if self.cuda else 128  # tokens of a prefix-cache block
        max_model_len = max(max_model_len, self.block + 8 + PROBE_TOKENS)
        # vLLM rewinds a request's generator when it splits its prompt, which a CPU generator cannot do: no chunked prefill there.
        whole = {} if self.cuda else dict(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, max_model_len))
        try:
            self.llm = LLM(
                model=model,
                dtype=str(dist.dtype).removeprefix("torch."),
                max_model_len=max_model_len,
                seed=seed,
                gpu_memory_utilization=gpu_ratio,
                enforce_eager=not self.cuda,  # compiling on CPU would need g++
                enable_sleep_mode=self.cuda,
                enable_prefix_caching=True,
                block_size=self.block,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # the model's own top-k and penalties would apply in silence
                distributed_executor_backend="external_launcher" if dist.world_size > 1 else None,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **whole,
            )
        except ValueError as e:
            raise SystemExit(f"vLLM cannot start {model!r} with a context of {max_model_len} tokens: {e}") from e
        vocabulary = self.llm.get_tokenizer().vocab_size
        self.probe_ids = np.random.default_rng(0).integers(0, vocabulary, self.block + 8).tolist()
        self.missing = _MissingWeights()

    def generate(self, prompts: list[list[int]], seeds: list[list[int]], sampling: Sampling) -> list[list[Sample]]:
        """Samples len(seeds[i]) responses to prompt i (token ids), one request per seed. No prompts give no samples."""
        self.wake()
        flat = [(ids, seed) for ids, row in zip(prompts, seeds, strict=True) for seed in row]
        outputs = self._generate([ids for ids, _ in flat], [seed for _, seed in flat], sampling)
        samples = iter([self._sample(o) for o in outputs])
        return [[next(samples) for _ in row] for row in seeds]

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces the engine's weights; call `probe` next. Every rank must call it and the iterator is exhausted.

        A tied head must come under both of its names (`learner.named_weights` does that): on CPU vLLM keeps its own copy of it.
        Raises RuntimeError on failure; the engine is then unusable and the run must end.
        """
        if self.asleep:
            self.llm.wake_up(["weights"])
        self.missing.messages.clear()
        weights = iter(weights)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights, is_checkpoint_format=True))
        left = sum(1 for _ in weights)
        if left or self.missing.messages:
            raise RuntimeError(f"weight sync: {left} tensors not consumed; {' '.join(self.missing.messages)}")
        if self.asleep:
            self.llm.wake_up(["kv_cache"])
            self.asleep = False
        self._reset_cache()
        self.version = version

    def probe(self, engine, warn: float | None = None, fatal: float | None = None) -> float:
        """The proof of a sync: max |log-prob by vLLM - by the learner's `engine`| of a few sampled tokens, over all ranks.

        All ranks call it.
        vLLM generates twice after a fixed prefix, the second time through its prefix cache, at a temperature other than 1; then the learner
        scores the same tokens. Prompt log-probs would prove nothing: vLLM skips the cache for them and ignores the temperature.
        warn, fatal: levels, by default those of the dtype (`GAP_LEVELS`). Raises SystemExit at `fatal`, on every rank.
        """
        sampling = Sampling(temperature=PROBE_TEMPERATURE, max_tokens=PROBE_TOKENS)
        gap = 0.0
        for turn in range(2):
            (output,) = self._generate([self.probe_ids], [1], sampling)
            if turn == 1 and not output.num_cached_tokens:
                raise RuntimeError("the probe did not go through the prefix cache, so it cannot prove that the cache is fresh")
            sample = self._sample(output)
            ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=self.dist.device)
            with torch.no_grad():
                scored = logprobs.token_logprobs(engine, ids, torch.ones_like(ids), PROBE_TEMPERATURE)[0, len(sample.prompt_ids) - 1 :]
            gap = max(gap, *(abs(a - b) for a, b in zip(sample.logprobs, scored.tolist(), strict=True)))
        gap = max(learner.gather(gap, self.dist))
        level_warn, level_fatal = GAP_LEVELS[self.dist.dtype]
        warn, fatal = warn if warn is not None else level_warn, fatal if fatal is not None else level_fatal
        if not gap < fatal:
            raise SystemExit(
                f"the actor does not run the learner's weights: their log-probs of the same tokens differ by {gap:.3g} after the sync to "
                f"version {self.version} (fatal at --sync-gap-fatal {fatal:g})"
            )
        if gap >= warn and self.dist.main:
            print(f"WARNING: actor/sync_gap {gap:.3g} is above --sync-gap-warn {warn:g}", flush=True)
        return gap

    def sleep(self) -> None:
        """Frees the GPU's memory for the learner (weights go to the CPU, the cache is dropped). Nothing to do on CPU."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
            self._reset_cache()

    def close(self) -> None:
        """Ends the engine. All ranks call it: one that left early would take the process group away from the others."""
        learner.barrier(self.dist)
        self.llm.llm_engine.engine_core.shutdown()

    def _reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so it would answer from keys and values of old weights")

    def _generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list:
        from vllm import SamplingParams

        if not prompts:
            return []
        common = dict(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k if sampling.top_k > 0 else 0, logprobs=0,
            max_tokens=sampling.max_tokens, stop=sampling.stop or None, include_stop_str_in_output=sampling.include_stop_str_in_output,
        )
        params = [SamplingParams(seed=seed, **common) for seed in seeds]
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def _sample(self, output) -> Sample:
        (done,) = output.outputs
        ids = list(done.token_ids)
        logprobs = [step[token].logprob for step, token in zip(done.logprobs, ids, strict=True)]
        return Sample(list(output.prompt_token_ids), ids, logprobs, done.finish_reason, done.text, self.version)
