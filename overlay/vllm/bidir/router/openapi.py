# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP API, described for tools (OpenAPI 3.1): what it takes, answers and refuses.

What only engines judge is left open: bodies may have any further fields, and 4XX and 5XX stand for
an engine's own answer, passed on with its status and body.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.bidir.router.clients.access import TENANT_HEADER
from vllm.bidir.router.clients.client_params import REFUSED
from vllm.bidir.router.clients.headers import REQUEST_ID
from vllm.bidir.router.clients.request import END_HEADER, MAX_ID
from vllm.bidir.router.clients.reuse import HEADER as REUSE_HEADER
from vllm.bidir.router.status.status import Status

Json = dict[str, Any]

PATH = "/openapi.json"
_JSON, _STREAM, _TEXT = "application/json", "text/event-stream", "text/plain"

_REFUSALS = {
    "400": "Malformed HTTP or JSON, or a field that the router may not take.",
    "401": "None of the clients' keys.",
    "404": "Nothing is known under this name.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or not said to be.",
    "429": "The queue is full; Retry-After says when to try again.",
    "500": "The router has failed; its log says why.",
    "503": "No node can serve it, or the router is ending; Retry-After says when to try again.",
}
_ENGINES_OWN = {"4XX": "The engine's own refusal.", "5XX": "The engine's own failure."}


def describe(version: str) -> Json:
    """The whole description, of a router of this release."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vllm-bidir-router",
            "version": version,
            "summary": "Conversations over vLLM prefill and decode nodes.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "paths": {
            "/v1/chat/completions": {"post": _turn("chat", "messages")},
            "/v1/completions": {"post": _turn("completion", "prompt")},
            "/v1/responses": {"post": _turn("response", "input", model=["string", "null"])},
            "/v1/messages": {"post": _turn("message", "messages", error="AnthropicError")},
            "/v1/messages/count_tokens": {
                "post": _call("the tokens of messages", error="AnthropicError")
            },
            "/tokenize": {"post": _call("a text as tokens")},
            "/detokenize": {"post": _call("tokens as a text")},
            "/v1/models": {"get": _models()},
            "/conversations/{id}": {
                "parameters": [_ID],
                "get": _show_conversation(),
                "delete": _end_conversation(),
            },
            "/": {"get": _open("what it is doing, as a page", "text/html", _STRING)},
            "/status": {"get": _open("what it is doing", _JSON, _STATUS)},
            "/health": {"get": _open("whether the router lives", _TEXT, _STRING)},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _open("metrics, for Prometheus", _TEXT, _STRING)},
            "/version": {"get": _open("the release", _JSON, _object(version=_STRING))},
            PATH: {"get": _open("this description", _JSON, {"type": "object"})},
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, **_OF_STATUS},
        },
    }


def _object(**properties: Json) -> Json:
    """An object that has all of these, and perhaps more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _content(kind: str, schema: Json) -> Json:
    return {kind: {"schema": schema}}


def _header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


_STRING = {"type": "string"}
(_STATUS,), _OF_STATUS = msgspec.json.schema_components(
    [Status], ref_template="#/components/schemas/{name}"
)
_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_ID}
_FLAG = {"type": "string", "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])$"}
_REQUEST_ID = {REQUEST_ID: {"schema": _STRING, "required": True}}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_ERROR = _object(
    error=_object(
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": "integer"},
    )
)
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING))
_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": _NAME,
    "description": "As the client has named the conversation.",
}
_LINE = {
    "oneOf": [
        _object(kept={"const": False}, reason=_STRING),
        _object(
            kept={"const": True},
            node=_STRING,
            leased={"type": "boolean"},
            seconds_left={"type": ["number", "null"]},
        ),
    ]
}
_TENANT = _header(
    TENANT_HEADER, {"type": "string"}, "With --tenant-header: whose conversations these are."
)
_OF_REQUESTS = [_header(REQUEST_ID, _STRING, "In the answer and on the nodes; else made up.")]
_OF_TURNS = [
    *_OF_REQUESTS,
    _TENANT,
    _header("X-Session-ID", _STRING, "One of the headers that name a conversation."),
    _header(END_HEADER, _FLAG, "Whether no turn follows this one: true or false."),
]


def _refusals(*statuses: int, error: str = "Error") -> Json:
    """Answers of the router itself."""
    return {
        str(status): {
            "description": _REFUSALS[str(status)],
            "content": _content(_JSON, {"$ref": f"#/components/schemas/{error}"}),
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in statuses
    }


def _engines_own() -> Json:
    return {status: {"description": text} for status, text in _ENGINES_OWN.items()}


def _body(properties: Json, required: list[str]) -> Json:
    """A JSON object that says nothing of where nodes read memory."""
    schema = {
        "type": "object",
        "properties": {**properties, **{name: {"type": "null"} for name in REFUSED}},
        "required": required,
    }
    return {"required": True, "content": _content(_JSON, schema)}


def _turn(what: str, prompt: str, model: Any = "string", error: str = "Error") -> Json:
    properties = {
        "model": {"type": model},
        "stream": {"type": ["boolean", "null"]},
        "conversation_id": {**_NAME, "type": ["string", "null"]},
        prompt: {"description": "The engine judges it."},
    }
    return {
        "summary": f"A {what}: a prefill leg on a P, a decode leg on a D.",
        "parameters": _OF_TURNS,
        "requestBody": _body(properties, [] if "null" in model else ["model"]),
        "responses": {
            "200": {
                "description": "D's answer.",
                "headers": {
                    **_REQUEST_ID,
                    REUSE_HEADER: {
                        "description": "What was read back: `hit; tokens=1203`, or why nothing.",
                        "schema": {
                            "type": "string",
                            "pattern": "^(hit|miss)(; [a-z]+=[a-z0-9_]+)*$",
                        },
                        "required": True,
                    },
                },
                "content": {
                    **_content(_JSON, {"type": "object"}),
                    # Of each event.
                    **_content(_STREAM, _object(data=_STRING)),
                },
            },
            **_refusals(400, 401, 413, 415, 429, 500, 503, error=error),
            **_engines_own(),
        },
    }


def _call(what: str, error: str = "Error") -> Json:
    return {
        "summary": f"Asks a D: {what}.",
        "parameters": _OF_REQUESTS,
        "requestBody": _body({}, []),
        "responses": {
            "200": {
                "description": "D's answer.",
                "headers": _REQUEST_ID,
                "content": _content(_JSON, {"type": "object"}),
            },
            **_refusals(400, 401, 413, 415, 500, 503, error=error),
            **_engines_own(),
        },
    }


def _models() -> Json:
    asked = _call("the models")
    del asked["requestBody"]
    for status in ("413", "415"):
        del asked["responses"][status]
    return asked


def _show_conversation() -> Json:
    lines = {"type": "array", "items": _LINE, "minItems": 1}
    return {
        "summary": "What is kept of each line of a conversation.",
        "parameters": [_TENANT],
        "responses": {
            "200": {
                "description": "Nothing of what was said.",
                "content": _content(_JSON, _object(object={"const": "conversation"}, lines=lines)),
            },
            **_refusals(400, 401, 404, 500),
        },
    }


def _end_conversation() -> Json:
    return {
        "summary": "Forget a conversation, all its lines, and give back what D keeps of it.",
        "parameters": [_TENANT],
        "responses": {"204": {"description": "Forgotten."}, **_refusals(400, 401, 404, 500)},
    }


def _ready() -> Json:
    asked = _open("whether a turn can be served", _TEXT, _STRING)
    asked["responses"] |= _refusals(503)
    return asked


def _open(what: str, kind: str, schema: Json) -> Json:
    """For probes, scrapers and tools, which carry no key."""
    return {
        "summary": f"Says {what}.",
        "security": [],
        "responses": {
            "200": {"description": "It is so.", "content": _content(kind, schema)},
            **_refusals(500),
        },
    }
