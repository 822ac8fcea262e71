"""AnswerServer: the page of an answer on this machine, with a form by which one asks again."""

import asyncio
import hmac
import queue
import re
import secrets
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from infoflow_lens.flows.ask import Answer
from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError, is_out_of_memory, panics_as_errors
from infoflow_lens.foundation.packages import import_optional
from infoflow_lens.report.answer import Form, render_answer

HOST = "127.0.0.1"  # nobody else reaches it
LARGEST = 2**20  # bytes of a request: two texts of some 100 000 words, as a form writes them
MOST_WAITING = 8  # questions
MOST_PAGES = 100  # that are kept, beside the first
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the policy of the page itself
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # the token is in the address
    "X-Content-Type-Options": "nosniff",
}


def read_place(at: str) -> int | None:
    """Read the place in the text that a form asks about; None for its end.

    Raises:
        InfoFlowError: for anything but a whole number or nothing.
    """
    try:
        return int(at) if at.strip() else None
    except ValueError:
        raise InfoFlowError(f"at is {brief(at)}: expected a whole number, or nothing") from None


class AnswerServer:
    """Serves answers to a browser on this machine, and measures what is asked there.

    The address holds a token, drawn anew for each server. Requests without it, for another host or
    from the pages of another origin are refused, so that no other page or user can ask. Each
    question has its page, which says that it waits, why it cannot be answered, or the answer.

    Args:
        measure: answers a question; called in the thread of :meth:`run` alone.
        port: of the loopback interface; 0 takes a free one.
        cut: measures what lines of an answer do when they are cut at once, by their numbers; called
            in the same thread. None where that is not offered.

    Attributes:
        address: of the first page.

    Raises:
        InfoFlowError: without the package tornado, and for a port that cannot be taken.
    """

    def __init__(
        self,
        measure: Callable[[Form], Answer],
        port: int = 0,
        cut: Callable[[Answer, tuple[int, ...]], float] | None = None,
    ) -> None:
        self._web, self._httpserver = (
            import_optional(f"tornado.{name}", "serve", "infoflow-lens serve")
            for name in ("web", "httpserver")
        )
        self._measure, self._cut, self._says_next = measure, cut, True
        # whoever does not know it cannot ask, also on this machine
        self._token = secrets.token_urlsafe(24)
        self._pages: dict[int, tuple[Form, Answer]] = {}
        self._n_pages = 0
        self._questions: queue.Queue[int | None] = queue.Queue()
        try:
            # the port is taken at once, so that the address is known before the server runs
            self._socket = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            raise InfoFlowError(
                f"port {port} cannot be taken ({error}): expected one that is free; 0 takes any"
            ) from error
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self.address = f"http://{HOST}:{self._port}/{self._token}/0"

    def run(
        self,
        first: Form,
        ready: Callable[[], None] = lambda: None,
        idle: float | None = None,
        *,
        says_next: bool = True,
    ) -> list[Form]:
        """Measure the first question, then serve and measure, one after the other, until Ctrl-C.

        Args:
            first: the question of the first page.
            ready: called when the address can be opened.
            idle: seconds without a question after which it ends; None for never.
            says_next: whether the model says tokens one behind the other, so that pages can ask why
                one stands in the text, and what comes behind the model's guess.

        Returns:
            The questions that Ctrl-C left without an answer.

        Raises:
            InfoFlowError: where the first question cannot be answered.
        """
        self._says_next = says_next
        self._add(first, self._measure(first))
        loop, ended = asyncio.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            handlers = [(".*", self._handler())]
            pages = self._web.Application(handlers, log_function=lambda _: None)
            server = self._httpserver.HTTPServer(
                pages, max_body_size=LARGEST, max_buffer_size=2 * LARGEST, max_header_size=LARGEST
            )
            server.add_socket(self._socket)
            await ended.wait()
            server.stop()
            await server.close_all_connections()

        # the model runs in the thread of the caller, where Ctrl-C ends a pass
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        try:
            with suppress(KeyboardInterrupt, queue.Empty):
                ready()
                while (number := self._questions.get(timeout=idle)) is not None:
                    self._pages[number] = self._answer_form(*self._pages[number])
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()
        return [form for form, _ in self._pages.values() if form.waits]

    def stop(self) -> None:
        """End :meth:`run`, from another thread, behind the questions that wait."""
        self._questions.put(None)

    def close(self) -> None:
        """Leave the port to others, where :meth:`run` has not ended."""
        self._socket.close()

    def _answer_form(self, form: Form, before: Answer) -> tuple[Form, Answer]:
        """Measure; where that cannot be, say why above the answer that there was before."""
        try:
            with panics_as_errors("this text"):
                if form.cut:
                    return (
                        replace(form, note=self._cut_lines(form, before), waits=False, cut=()),
                        before,
                    )
                return replace(form, note="", waits=False), self._measure(form)
        except Exception as error:
            if isinstance(error, InfoFlowError):
                note = f"This cannot be answered: {error}."
            elif is_out_of_memory(error):
                note = "Memory ran out: expected room for the two texts; ask of a shorter one."
            # an error of ours: the page goes on, and the terminal has all of it
            else:
                traceback.print_exc()
                note = f"An error of ours ended it ({type(error).__name__}): see the terminal."
        note = f"{note} Below is the earlier answer."
        return replace(form, note=note, waits=False, cut=()), before

    def _cut_lines(self, form: Form, answer: Answer) -> str:
        assert self._cut is not None
        effect = self._cut(answer, form.cut)
        alone = [float(answer.path_effect[group].sum()) for _, group in answer.bundles()]
        each = ", ".join(f"{alone[line - 1]:+.2f}" for line in form.cut)
        return (
            f"Lines {', '.join(map(str, form.cut))} cut at once: {effect:+.2f}, which is "
            f"{-effect / answer.gap:.0%} of the difference; one by one {each}."
        )

    def _add(self, form: Form, answer: Answer) -> int:
        number = self._n_pages
        self._pages[number] = form, answer
        self._n_pages += 1
        if form.waits:
            self._questions.put(number)
        # the first page stays, and so does one whose question is not answered yet
        for old in list(self._pages)[1:-MOST_PAGES]:
            if not self._pages[old][0].waits:
                del self._pages[old]
        return number

    def _ask(self, form: Form, before: Answer) -> int:
        """Put a question behind those that wait, on a page of its own."""
        if sum(form.waits for form, _ in self._pages.values()) < MOST_WAITING:
            return self._add(replace(form, waits=True), before)
        note = f"{MOST_WAITING} questions wait already: send it again when they are answered."
        return self._add(replace(form, note=note), before)

    def _page(self, number: int) -> str:
        form, answer = self._pages[number]
        if form.waits:
            ahead = sum(f.waits for other, (f, _) in self._pages.items() if other < number)
            then = f" after {ahead} other{'s' * (ahead > 1)}" if ahead else ""
            form = replace(form, note=f"It is being measured{then}. Below is the earlier answer.")
        can_cut = self._cut is not None
        return render_answer(answer, form, can_cut=can_cut, can_press=self._says_next)

    def _refusal(self, path: str, headers: Any) -> tuple[int, str] | None:
        """Say why a request is refused, with its status; None where it is not."""
        token, _, number = path[1:].partition("/")
        hosts = [f"{name}:{self._port}" for name in (HOST, "localhost")]
        # takes the same time for any guess, so that none is told to be nearer
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            return 403, "the token is missing: open the address that the command printed"
        if headers.get("Host") not in hosts:
            return 403, f"the request names another host: expected {hosts[0]}"
        if headers.get("Origin", f"http://{headers['Host']}") != f"http://{headers['Host']}":
            return (
                403,
                "the request comes from a page of another origin: expected one of ours",
            )
        if not re.fullmatch("[0-9]{1,9}", number) or int(number) not in self._pages:
            return 404, f"this page does not exist, or no longer: begin again at {self.address}"
        return None

    def _handler(self) -> type:
        """Make the class of what handles a request."""
        server = self

        class Handler(self._web.RequestHandler):
            def set_default_headers(self) -> None:
                for name, value in _HEADERS.items():
                    self.set_header(name, value)
                # of the server's software nobody need know
                self.clear_header("Server")

            def prepare(self) -> None:
                if refused := server._refusal(self.request.path, self.request.headers):
                    self.set_header("Content-Type", "text/plain; charset=utf-8")
                    self.set_status(refused[0])
                    self.finish(refused[1])

            def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
                if not isinstance(value, server._web.HTTPError):  # a bad request is no news
                    super().log_exception(kind, value, trace)

            def _number(self) -> int:
                return int(self.request.path.rpartition("/")[2])

            def get(self) -> None:
                self.finish(server._page(self._number()))

            def post(self) -> None:
                # a browser writes line ends as on Windows
                fields = ("text", "answer", "against", "instead", "at", "second", "instead_second")
                given = [self.get_body_argument(name, "", strip=False) for name in fields]
                form = Form(*(text.replace("\r\n", "\n") for text in given))
                if place := self.get_body_argument("press", ""):  # on a token
                    form = Form(form.text, at=place, second=form.second)
                elif guess := self.get_body_argument("further", "", strip=False):
                    # said behind the whole pair, where there are two texts
                    behind = "second" if form.second else "text"
                    form = Form(form.text, second=form.second)
                    form = replace(form, **{behind: getattr(form, behind) + guess})
                # the page from which the form comes, whose answer may be cut or gone on from
                before, answer = server._pages[self._number()]
                if self.get_body_argument("do", "") == "cut" and server._cut is not None:
                    given = self.get_body_arguments("cut")
                    lines = sorted({int(n) for n in given if re.fullmatch("[0-9]{1,6}", n)})
                    form = replace(before, cut=tuple(lines) or (0,))
                number = server._ask(form, answer)
                self.redirect(str(number), status=303)

        return Handler
