"""The thin library under the recipes: where and how fast things run, never what is learned.

What other libraries read from the environment when they are imported is set here, unless the user has set it.
"""

import os

import torch

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the recipe's process: weights go over by reference
    "VLLM_NO_USAGE_STATS": "1",  # nothing phones home
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # else datasets reports each load of a local file
    "VLLM_LOGGING_LEVEL": "ERROR",  # its start prints a screen of warnings otherwise; set INFO to see them
}
if not torch.cuda.is_available():
    DEFAULTS |= {
        "DS_ACCELERATOR": "cpu",  # said aloud, DeepSpeed does not warn that it found nothing else
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
