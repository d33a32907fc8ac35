"""The demo from the model to the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster import ClusterOptions, Engine, cluster, make_model
from tools.cluster.process import ManagedProcess
from tools.cluster.router import router
from tools.demo.client import Answer, stream_chat
from tools.demo.conversation import ANSWER_TOKENS, Message, history, longest_prompt, warm_up
from tools.demo.errors import DemoError
from tools.demo.interrupts import Interrupts
from tools.demo.measure import Meter, Turn
from tools.demo.screen import Screen, one_line
from tools.demo.table import milliseconds, series, table, tokens

_SHOWN = 60
_ENDING_S = 1.0
# Ten times what it takes on two idle cores; this machine may be busy with something else.
_START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class DemoOptions:
    """turns: of the conversation. logs: folder, made if missing; the rest as in ClusterOptions."""

    turns: int
    logs: Path
    model: Path | None
    python: Path


@dataclass(frozen=True)
class Service:
    """What is running: the processes, and where to ask and to measure."""

    model: str
    url: str
    meter: Meter
    processes: tuple[ManagedProcess, ...]

    def check_alive(self) -> None:
        """After a failed request: raise ProcessFailedError, with its log, if a process has ended.

        A process that is being ended closes its connections before it is gone, hence the wait.
        """
        end = time.monotonic() + _ENDING_S
        while time.monotonic() < end:
            for process in self.processes:
                process.check_alive()
            time.sleep(0.05)


def demo(options: DemoOptions, screen: Screen, interrupts: Interrupts) -> bool:
    """Run it; True if reuse happened and changed nothing. Raises DemoError and ClusterError."""
    screen.line("One conversation through a prefill engine P, a decode engine D and the router,")
    screen.line("first with P computing every prompt, then with P reading D's KV cache back.")
    screen.line("No GPU is used. It takes about two minutes on two cores; Ctrl-C stops it all.")
    screen.line(f"logs: {options.logs}")
    with ExitStack() as stack:
        service = stack.enter_context(_service(options, screen))
        # On the way out engines are ended, which a signal must not cut short.
        stack.callback(interrupts.hold)
        conversation = _Conversation(service, options.turns, screen, interrupts)
        screen.line()
        screen.line("Warming up, so that first-use costs, such as NIXL's handshake, do not count.")
        conversation.warm_up()
        screen.line("The model has random weights: its answers are gibberish, and always the same.")
        off = conversation.run("off", None)
        on = conversation.run("on", "demo")
        _show(off, on, screen)
        screen.live("stopping the engines")
    return _same(off, on) and not _not_read_back(on)


@contextmanager
def _service(options: DemoOptions, screen: Screen) -> Iterator[Service]:
    screen.line()
    logs = options.logs
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    model = options.model
    if model is None:
        screen.live("making the model")
        model = make_model(logs / "tiny-model")
        screen.line(f"  {model.name}: made, random weights, float32")
    report = screen.start_report
    settings = ClusterOptions(
        model=model, forked=True, python=options.python, start_timeout_s=_START_TIMEOUT_S
    )
    with (
        cluster(prefill=1, decode=1, options=settings, log_folder=logs, report=report) as engines,
        router(
            prefill=engines.prefill,
            decode=engines.decode,
            log_folder=engines.log_folder,
            python=options.python,
            report=report,
        ) as front,
    ):
        prefill: Engine = engines.prefill[0]
        yield Service(
            model=prefill.model,
            url=front.url,
            meter=Meter(prefill.url, front.url),
            processes=(front.process, *(engine.process for engine in engines.engines)),
        )
    screen.clear()


class _Conversation:
    """Asks the service one thing at a time, for ``measure`` to tell whose figures are whose."""

    def __init__(
        self, service: Service, turns: int, screen: Screen, interrupts: Interrupts
    ) -> None:
        self._service = service
        self._turns = turns
        self._screen = screen
        self._interrupts = interrupts

    def warm_up(self) -> None:
        """Two turns of another conversation, read-back included, as long as this one's last."""
        first, more = warm_up(longest_prompt(self._turns))
        answer = self._ask(first, "warm-up", "warm-up", lambda _: None)
        reply = {"role": "assistant", "content": answer.text}
        self._ask([*first, reply, *more], "warm-up", "warm-up", lambda _: None)

    def run(self, name: str, conversation: str | None) -> list[Turn]:
        """All turns; each history holds the answers of this very run."""
        self._screen.line()
        self._screen.line(f"feature {name}")
        turns: list[Turn] = []
        for number in range(1, self._turns + 1):
            messages = history([turn.text for turn in turns])
            turn = self._turn(number, messages, conversation, name)
            turns.append(turn)
            self._screen.line(
                f"  turn {number}: {tokens(turn.prompt_tokens):>5} tokens, "
                f"TTFT {milliseconds(turn.ttft_s):>9}  {one_line(turn.text, _SHOWN - 10)}"
            )
        return turns

    def _turn(
        self, number: int, messages: list[Message], conversation: str | None, salt: str
    ) -> Turn:
        def live(answer: Answer) -> None:
            prompt = tokens(answer.prompt_tokens)
            text = one_line(answer.text, _SHOWN)
            self._screen.live(
                f"  turn {number}: {prompt:>5} tokens, answer {answer.completion_tokens:>2}  {text}"
            )

        self._screen.live(f"  turn {number}: waiting for the first token")
        return self._service.meter.measure(lambda: self._ask(messages, conversation, salt, live))

    def _ask(
        self,
        messages: list[Message],
        conversation: str | None,
        salt: str,
        progress: Callable[[Answer], None],
    ) -> Answer:
        def on_event(answer: Answer) -> None:
            self._interrupts.check()
            progress(answer)

        body: dict[str, Any] = {
            "model": self._service.model,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            # Both runs send the same prompts; without it D's own prefix cache would let the
            # second run profit from the first.
            "cache_salt": salt,
        }
        headers = {}
        if conversation is not None:
            body["conversation_id"] = conversation
        else:
            # The router would link the turns by their messages.
            headers["X-Conversation-End"] = "true"
        try:
            return stream_chat(self._service.url, body, on_event, headers)
        except DemoError:
            self._service.check_alive()
            raise


def _show(off: list[Turn], on: list[Turn], screen: Screen) -> None:
    screen.line()
    screen.line("Result with the feature on:")
    for line in table(on, screen.nothing):
        screen.line(line)
    screen.line()
    screen.line(f"feature off: prefill {series([turn.prefill_s for turn in off])}")
    screen.line(f"             TTFT    {series([turn.ttft_s for turn in off])}")
    screen.line(f"same text in both runs: {'yes' if _same(off, on) else 'NO'}")
    for number, (without, with_) in enumerate(zip(off, on, strict=True), 1):
        if without.text != with_.text:
            screen.line(f"  turn {number} off: {one_line(without.text, _SHOWN)}")
            screen.line(f"  turn {number} on:  {one_line(with_.text, _SHOWN)}")
    for number in _not_read_back(on):
        screen.line(f"turn {number} should have been read back from D but was not: see the logs")
    screen.line()
    screen.line("Columns: read back and transfer as P and NIXL counted them, prefill as the router")
    screen.line(
        "timed it (transfer included), TTFT as the client saw it. One run of a tiny model on"
    )
    screen.line("this machine's cores: it shows the mechanism, not the gain to expect on a GPU.")


def _same(off: list[Turn], on: list[Turn]) -> bool:
    return [turn.text for turn in off] == [turn.text for turn in on]


def _not_read_back(on: list[Turn]) -> list[int]:
    """Numbers of the turns after the first in which P read nothing."""
    return [number for number, turn in enumerate(on, 1) if number > 1 and not turn.read_back_tokens]
