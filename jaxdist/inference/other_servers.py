"""What the options of vLLM and SGLang are called here, for those who come from there."""

import re
from collections.abc import Callable

# Their names: what to do here; our own options are in braces.
_HERE = {
    "tensor_parallel_size tp tp_size": "give {mesh} 1x1xN",
    "pipeline_parallel_size pp pp_size": "give {mesh} 1xNx1",
    "data_parallel_size dp dp_size": "give {mesh} Nx1x1",
    "gpu_memory_utilization mem_fraction_static": "give {memory_fraction}, of the free memory",
    "kv_cache_dtype": "give {kv_dtype}",
    "num_gpu_blocks_override": "give {num_blocks}",
    "context_length": "give {max_model_len}",
    "max_running_requests": "give {max_num_seqs}",
    "chunked_prefill_size": "give {max_num_batched_tokens}",
    "speculative_config": "give {num_speculative_tokens}",
    "scheduling_policy schedule_policy": "give {policy}; priorities always count",
    "random_seed": "give {seed}",
    "model_path": "give {model}",
    "allowed_origins": "give {cors_origin}",
    "enable_prompt_tokens_details enable_cache_report": "give {prompt_details}",
    "no_enable_prefix_caching disable_radix_cache": "give {no_prefix_caching}",
    "enable_prefix_caching": "prompts are cached unless {no_prefix_caching} is given; leave it out",
    "enable_chunked_prefill": "long prompts always come in chunks; leave it out",
    "enable_auto_tool_choice": "tools need no option; leave it out",
    "enforce_eager": "there is nothing but compiled programs; leave it out",
    "trust_remote_code": "no code of a model is ever run; leave it out",
    "disable_log_requests disable_log_stats": "texts are logged with {log_text} only; leave it out",
}
_OPTIONS = {name: fix for names, fix in _HERE.items() for name in names.split()}


def here(name: str, spelled: Callable[[str], str]) -> str | None:
    """What to do instead of giving the option `name`; None where nobody has it.

    spelled: How the door at hand writes an option of ours.
    """
    fix = _OPTIONS.get(name)
    return fix and re.sub(r"\{(\w+)\}", lambda own: spelled(own[1]), fix)
