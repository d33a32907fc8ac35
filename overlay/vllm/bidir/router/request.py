# SPDX-License-Identifier: Apache-2.0
"""Parse a generation request no further than routing needs, and make the two legs' bodies.

Top-level fields stay the bytes that the client sent (`msgspec.Raw`): a history of a megabyte is
scanned once and never rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.client_params import refuse_params
from vllm.bidir.router.errors import ClientError

END_HEADER = "X-Conversation-End"
PARAMS = "kv_transfer_params"
MAX_ID = 512

# P answers one token that nobody reads: what shapes the answer only would cost work or be refused
# with max_tokens=1.
_ANSWER_ONLY = (
    "stream_options",
    "min_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "include",
    "background",
)


@dataclass(frozen=True)
class Api:
    """What differs between the APIs of a turn.

    `history`: the field with the messages, a list or of Responses one text; None if there is none.
    `prefill`: what P's body says instead of the client's.
    """

    history: str | None
    prefill: Mapping[str, Any]


APIS = {
    "/v1/chat/completions": Api("messages", {"max_tokens": 1}),
    "/v1/completions": Api(None, {"max_tokens": 1}),
    "/v1/responses": Api("input", {"max_output_tokens": 1, "store": False}),
    "/v1/messages": Api("messages", {"max_tokens": 1}),
}

Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(Fields)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class TurnRequest:
    """One request of a client. `path` is the API's path, such as /v1/chat/completions.

    `conversation` is the one that the body names. `continues`: its history begins with that of the
    response that it named.
    """

    path: str
    fields: Fields
    stream: bool
    conversation: str | None
    bypass: Reason | None
    continues: bool = False

    @property
    def history(self) -> bytes | None:
        """The messages as the client sent them, a list; None where the API has none."""
        raw = self.fields.get(APIS[self.path].history or "")
        if raw is None:
            return None
        if self.path == "/v1/responses":
            items = items_of(raw)
            return None if items is None else b"[" + items + b"]"
        return bytes(raw)

    def prefill_body(self, params: dict[str, Any]) -> bytes:
        """P's body: the same prompt, one token, not streamed."""
        fields: dict[str, Any] = {
            key: value for key, value in self.fields.items() if key not in _ANSWER_ONLY
        }
        fields |= {"stream": False, **APIS[self.path].prefill, PARAMS: params}
        return _ENCODER.encode(fields)

    def decode_body(self, params: msgspec.Raw | None) -> bytes:
        """D's body: the client's own request, with P's params if there are any."""
        fields: dict[str, Any] = dict(self.fields)
        if params is not None:
            fields[PARAMS] = params
        return _ENCODER.encode(fields)


def parse_fields(body: bytes) -> Fields:
    """Top-level fields of a JSON object, undecoded; ClientError 400 for anything else."""
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise ClientError(400, "The body must be a JSON object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"The body is not valid JSON: {error}") from error


def parse_request(path: str, body: bytes) -> TurnRequest:
    """Check what routing depends on; the rest is the engine's to judge.

    `conversation_id` is not forwarded. Raises ClientError 400 naming the field.
    """
    fields = parse_fields(body)
    model = _value(fields, "model")
    # Of Responses it is optional.
    if not isinstance(model, str) and (model is not None or path != "/v1/responses"):
        raise ClientError(400, "`model` must be a string.", "model")
    stream = _value(fields, "stream")
    if stream is not None and not isinstance(stream, bool):
        raise ClientError(400, "`stream` must be true or false.", "stream")
    refuse_params(body)
    fields.pop(PARAMS, None)
    conversation = _conversation(fields)
    return TurnRequest(path, fields, bool(stream), conversation, bypass_reason(fields))


def items_of(raw: msgspec.Raw | None) -> bytes | None:
    """A list's items as they stand, or a text as the message that it is; None for anything else."""
    text = b"" if raw is None else bytes(raw)
    if text[:1] == b"[":
        return text[1:-1].strip()
    if text[:1] == b'"':
        return b'{"role":"user","content":' + text + b"}"
    return None


def ends_conversation(header: str | None) -> bool:
    """Whether X-Conversation-End says that no turn follows; ClientError 400 for another word."""
    word = "false" if header is None else header.strip().lower()
    if word not in ("true", "false"):
        raise ClientError(400, f"`{END_HEADER}` must be true or false.", END_HEADER)
    return word == "true"


def bypass_reason(fields: Fields) -> Reason | None:
    """Why P and D together would not answer this right, so that D serves it alone."""
    if _value(fields, "n") not in (None, 1) or _value(fields, "use_beam_search"):
        return Reason.BYPASS_N
    if _value(fields, "prompt_logprobs") is not None or _value(fields, "echo"):
        return Reason.BYPASS_LOGPROBS
    prompt = fields.get("prompt")
    if prompt is not None and _is_list_of_prompts(prompt):
        return Reason.BYPASS_LIST
    return None


def _is_list_of_prompts(prompt: msgspec.Raw) -> bool:
    """A list of strings or of token id lists, as opposed to one string or one token id list."""
    text = bytes(prompt)
    return text[:1] == b"[" and text[1:].lstrip()[:1] in (b"[", b'"')


def _conversation(fields: Fields) -> str | None:
    """Our own field, else `session_id`, which vLLM has as well, if it is of use."""
    value = _value(fields, "conversation_id")
    fields.pop("conversation_id", None)
    if value is None:
        session = _value(fields, "session_id")
        return session if isinstance(session, str) and 0 < len(session) <= MAX_ID else None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID:
        message = f"`conversation_id` must be a string of 1 to {MAX_ID} characters."
        raise ClientError(400, message, "conversation_id")
    return value


def _value(fields: Fields, key: str) -> Any:
    raw = fields.get(key)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"`{key}` is not valid JSON: {error}", key) from error
