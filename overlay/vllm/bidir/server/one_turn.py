# SPDX-License-Identifier: Apache-2.0
"""Whether a request is one prompt with one answer: only such a one can be a turn that is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.hooks import nixl_configs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

_PARAMS = "kv_transfer_params"


def is_one_turn(request: Any) -> bool:
    """For requests of every API; `prompt` is a string, token ids, or a list of either."""
    if (getattr(request, "n", None) or 1) > 1 or getattr(request, "use_beam_search", False):
        return False
    return (
        _prompts(getattr(request, "prompt", None))
        + _prompts(getattr(request, "prompt_embeds", None))
        <= 1
    )


def drop_params(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Of a request that is about to become several, on whatever way it came here."""
    if (params.extra_args or {}).get(_PARAMS) and list(
        nixl_configs(vllm_config.kv_transfer_config)
    ):
        rest = {key: value for key, value in params.extra_args.items() if key != _PARAMS}
        params.extra_args = rest


def _prompts(prompt: Any) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
