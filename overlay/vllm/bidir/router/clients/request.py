# SPDX-License-Identifier: Apache-2.0
"""Parse a generation request no further than routing needs, and make the two legs' bodies.

Top-level fields stay the bytes that the client sent (`msgspec.Raw`): a history of a megabyte is
scanned once and never rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.client_params import refuse_params
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.parts import MOST_FIELDS, Fields, TooManyError, split_object

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

_ENCODER = msgspec.json.Encoder()
# What is expected only: anything else may be megabytes of it.
_TEXT = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)
# What engines take for one that is not set, as far as it matters: in doubt D serves it alone.
_OFF = (b"null", b"false", b"0")
_BYPASSES = frozenset(("n", "use_beam_search", "prompt_logprobs", "echo", "prompt"))
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')

Value = TypeVar("Value")


class TurnRequest(msgspec.Struct, frozen=True):
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

    def prefill_body(self, params: msgspec.Raw) -> bytes:
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
        return split_object(body)
    except msgspec.ValidationError as error:
        raise ClientError(400, "The body must be a JSON object.") from error
    except TooManyError as error:
        raise ClientError(400, f"The body has more than {MOST_FIELDS} fields.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"The body is not valid JSON: {error}") from error


def parse_request(path: str, body: bytes) -> TurnRequest:
    """Check what routing depends on; the rest is the engine's to judge.

    `conversation_id` is not forwarded. Raises ClientError 400 naming the field.
    """
    fields = parse_fields(body)
    model = _value(fields, "model", _TEXT, "a string")
    # Of Responses it is optional.
    if model is None and path != "/v1/responses":
        raise ClientError(400, "`model` must be a string.", "model")
    stream = _value(fields, "stream", _FLAG, "true or false")
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
    if fields.keys().isdisjoint(_BYPASSES):
        return None
    if not _is_one_of(fields.get("n"), b"null", b"1"):
        return Reason.BYPASS_N
    if not _is_one_of(fields.get("use_beam_search"), *_OFF):
        return Reason.BYPASS_N
    if not _is_one_of(fields.get("prompt_logprobs"), b"null"):
        return Reason.BYPASS_LOGPROBS
    if not _is_one_of(fields.get("echo"), *_OFF):
        return Reason.BYPASS_LOGPROBS
    prompt = fields.get("prompt")
    if prompt is not None and _is_list_of_prompts(prompt):
        return Reason.BYPASS_LIST
    return None


def _is_list_of_prompts(prompt: msgspec.Raw) -> bool:
    """A list of strings or of token id lists, as opposed to one string or one token id list."""
    return _LIST_OF_PROMPTS.match(memoryview(prompt)) is not None


def _is_one_of(raw: msgspec.Raw | None, *words: bytes) -> bool:
    """Whether a field is left out or stands there as one of these words."""
    return raw is None or memoryview(raw) in words


def _conversation(fields: Fields) -> str | None:
    """Our own field, else `session_id`, which vLLM has as well, if it is of use."""
    wanted = f"a string of 1 to {MAX_ID} characters"
    value = _value(fields, "conversation_id", _TEXT, wanted)
    fields.pop("conversation_id", None)
    if value is None:
        return _session(fields)
    if not 0 < len(value) <= MAX_ID:
        raise ClientError(400, f"`conversation_id` must be {wanted}.", "conversation_id")
    return value


def _session(fields: Fields) -> str | None:
    try:
        session = _value(fields, "session_id", _TEXT, "a string")
    except ClientError:
        return None  # the engine's to judge
    return session if session is not None and 0 < len(session) <= MAX_ID else None


def _value(
    fields: Fields, key: str, decoder: msgspec.json.Decoder[Value | None], wanted: str
) -> Value | None:
    """A field's value, None if it has none; ClientError 400 for anything but what is wanted."""
    raw = fields.get(key)
    try:
        return None if raw is None else decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ClientError(400, f"`{key}` must be {wanted}.", key) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"`{key}` is not valid JSON: {error}", key) from error
