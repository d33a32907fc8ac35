# SPDX-License-Identifier: Apache-2.0
"""The page at /: one HTML document without scripts or anything from elsewhere.

It is built as a tree, so that whatever a node or an error is called is escaped when it is written.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

from vllm.bidir.router.status.status import NodeStatus, PoolStatus, Status, Turns
from vllm.bidir.router.status.style import STYLE
from vllm.bidir.router.telemetry.last_errors import LastError

REFRESH_S = 10
_ROLES = {"prefill": "Prefill nodes (P)", "decode": "Decode nodes (D)"}


def headers() -> dict[str, str]:
    """What a browser may do with the page: show it, in the style that stands in it."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def page(status: Status) -> bytes:
    """The whole document, UTF-8."""
    head = _e(
        "head",
        _e("meta", charset="utf-8"),
        _e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _e("meta", http_equiv="refresh", content=str(REFRESH_S)),
        _e("title", f"{_in_a_word(status)[1]} · vllm-bidir router"),
        _e("style", STYLE),
    )
    body = _e(
        "body",
        _header(status),
        _e(
            "main",
            _cards(status),
            *(_pool(pool) for pool in status.pools),
            _misses(status),
            *([_alone(status)] if status.decode_alone else []),
            _errors(status.errors, status.now),
        ),
        _footer(),
    )
    document: bytes = tostring(_e("html", head, body, lang="en"), "utf-8", method="html")
    return b"<!doctype html>\n" + document


def _e(tag: str, *children: Element | str, **attributes: str) -> Element:
    """An element. `class_` is class, `http_equiv` http-equiv."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    made = Element(tag, names)
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def _in_a_word(status: Status) -> tuple[str, str]:
    """A colour and a sentence."""
    if status.draining:
        return "warn", "Ending: what is under way goes on to its end"
    if not status.pool("decode").usable:
        return "bad", "Not serving: no decode node is up"
    if not status.pool("prefill").usable:
        return "warn", "Serving, decode nodes alone: no prefill node is up"
    if any(node.state in ("down", "ejected") for pool in status.pools for node in pool.nodes):
        return "warn", "Serving; not all nodes are up"
    return "good", "Serving"


def _header(status: Status) -> Element:
    colour, sentence = _in_a_word(status)
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.now))
    return _e(
        "header",
        _e("h1", "vllm-bidir router ", _e("small", status.version, class_="quiet")),
        _e("p", sentence, class_=f"state {colour}"),
        _e("p", f"up {_span(status.uptime)} · {moment}", class_="quiet"),
    )


def _cards(status: Status) -> Element:
    lately, always = status.turns_last_minutes, status.turns
    waiting = ", ".join(f"{pool.waiting:,} for {pool.role[:1].upper()}" for pool in status.pools)
    running = sum(node.in_flight for node in status.pool("decode").nodes)
    return _e(
        "section",
        _card(f"Hit rate, {status.last_minutes} min", _rate(lately), f"of {_turns(lately)}"),
        _card("Hit rate overall", _rate(always), f"of {_turns(always)}"),
        _card("Turns under way", str(running), f"waiting: {waiting}"),
        _card("Conversations", f"{status.conversations:,}", f"leases renewed: {status.leases:,}"),
        class_="cards",
    )


def _card(title: str, number: str, more: str) -> Element:
    return _e(
        "div",
        _e("h2", title),
        _e("p", number, class_="number"),
        _e("p", more, class_="quiet"),
        class_="card",
    )


def _pool(pool: PoolStatus) -> Element:
    rows = [_node(node, pool.role) for node in pool.nodes]
    title = f"{_ROLES[pool.role]}: {pool.usable} of {len(pool.nodes)} usable"
    return _section(title, ("Node", "State", "In flight"), rows, "None is listed.")


def _node(node: NodeStatus, role: str) -> Element:
    limit = f" / {node.in_flight_limit}" if node.in_flight_limit else ""
    name = _e("td", _e("span", node.node, class_="name"))
    if role == "prefill" and node.state == "up" and not node.verifies:
        name.append(_e("span", "has not yet said that it verifies read-backs", class_="quiet"))
    state = _e("td", _e("span", node.state, class_=f"badge {node.state}"))
    if node.state == "up" and node.share < 1:
        state.append(_e("span", f"share {node.share:.0%}", class_="quiet n"))
    return _e("tr", name, state, _e("td", f"{node.in_flight:,}{limit}", class_="n"))


def _misses(status: Status) -> Element:
    lately, always = status.turns_last_minutes, status.turns
    total = sum(always.misses.values())
    rows = [
        _e(
            "tr",
            _e("td", _e("code", reason)),
            _e("td", f"{lately.misses.get(reason, 0):,}", class_="n"),
            _e("td", f"{number:,}", class_="n"),
            _e("td", _bar(number / total), class_="wide"),
        )
        for reason, number in _largest_first(always.misses)
    ]
    titles = ("Reason", f"{status.last_minutes} min", "Since start", "Share")
    return _section("Misses", titles, rows, "None yet.")


def _alone(status: Status) -> Element:
    rows = [
        _e("tr", _e("td", _e("code", reason)), _e("td", f"{number:,}", class_="n"))
        for reason, number in _largest_first(status.decode_alone)
    ]
    titles = ("Reason", "Since start")
    return _section("Served by D alone", titles, rows, "None.")


def _errors(errors: Iterable[LastError], now: float) -> Element:
    rows = [
        _e(
            "tr",
            _e(
                "td",
                _e("span", f"{error.what}: {error.why}"),
                _e("span", error.node, class_="name quiet"),
            ),
            _e("td", f"{error.count:,}", class_="n"),
            _e("td", _ago(now - error.last), class_="n"),
        )
        for error in errors
    ]
    titles = ("What, and where", "Times", "Last")
    return _section("Last errors", titles, rows, "None yet.")


def _section(title: str, titles: Iterable[str], rows: list[Element], empty: str) -> Element:
    heading = _e("h2", title)
    if not rows:
        return _e("section", heading, _e("p", empty, class_="quiet"))
    head = _e("tr", *(_e("th", one, scope="col") for one in titles))
    table = _e("table", _e("thead", head), _e("tbody", *rows))
    return _e("section", heading, table)


def _footer() -> Element:
    return _e(
        "footer",
        _e("a", "/metrics", href="metrics"),
        " for Prometheus, ",
        _e("a", "/status", href="status"),
        f" as JSON. This page comes anew every {REFRESH_S} s.",
        class_="quiet",
    )


def _bar(share: float) -> Element:
    """A picture of the number beside it."""
    bar = _e("rect", width=f"{100 * share:.1f}", height="8")
    return _e("svg", bar, viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true")


def _rate(turns: Turns) -> str:
    return "-" if turns.hit_rate is None else f"{turns.hit_rate:.0%}"


def _turns(turns: Turns) -> str:
    total = turns.hits + sum(turns.misses.values())
    return f"{total:,} turn{'' if total == 1 else 's'}"


def _largest_first(counted: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda one: (-one[1], one[0]))


def _span(seconds: float) -> str:
    """A time as people say it, such as 3 d 4 h."""
    whole = int(max(seconds, 0))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{whole} s"


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{_span(seconds)} ago"
