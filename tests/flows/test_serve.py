"""infoflow-lens serve: who may ask, one question after the other, and nothing typed is lost."""

import http.client
import io
import logging
import os
import re
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager
from functools import cache
from html.parser import HTMLParser
from urllib.parse import urlencode, urlsplit

import pytest
from markupsafe import escape
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, ask, load_any
from infoflow_lens.cli import app
from infoflow_lens.flows import serve
from infoflow_lens.flows.ask import cut_lines
from infoflow_lens.flows.serve import HOST, AnswerServer, read_place
from infoflow_lens.foundation.display import brief
from infoflow_lens.report.answer import Form
from tests.processes import started
from tests.reference import zoo

pytest.importorskip("tornado", reason="the extra serve is not installed")

NAMES = ("text", "answer", "against", "instead", "at")
FIRST = Form("w7 w34 w29 w47 w30 w5", "w9", "w23", "w7 w34 w36 w47 w30 w5")
SECOND = Form("w8 w34 w29 w47", "w11", "w23", "w8 w34 w36 w47")
BLANK = Form(FIRST.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = zoo.save("llama", tmp_path_factory.mktemp("llama"))
    zoo.tokenizer(begins=False).save_pretrained(folder)
    return load_any(folder)


@pytest.fixture(scope="module")
def measure(model):
    """Answers, each measured once."""

    @cache
    def measure(form):
        return ask(
            model, form.text, form.answer or None, form.against or None, form.instead or None,
            at=read_place(form.at), quick=True, progress=False,
        )  # fmt: skip

    return measure


@pytest.fixture(scope="module")
def said(measure):
    """What answers say on a page, of a model that only one thread may measure at a time."""
    return {form: escape(measure(form).summary()) for form in (FIRST, SECOND, BLANK)}


@contextmanager
def serving(measure=None, server=None):
    server, ready, ended = server or AnswerServer(measure), threading.Event(), []

    def run():
        server.run(FIRST, ready.set)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(120)
        yield server
    finally:
        server.stop()
        thread.join(120)
    assert ended  # without an error


@pytest.fixture(scope="module")
def server(measure, said):
    with serving(measure) as server:
        yield server


def request(server, method="GET", path=None, form=None, headers=(), body=None):
    """Status, headers and text of what is answered to exactly these headers."""
    place = urlsplit(server.address)
    usual = {"Host": place.netloc}
    if form is not None:
        body = urlencode({name: getattr(form, name) for name in NAMES})
        usual["Content-Type"] = "application/x-www-form-urlencoded"
    usual |= dict(headers)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    connection.putrequest(method, path or place.path, skip_host=True)
    for name, value in usual.items():
        if value is not None:
            connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(None if body is None else body.encode())
    try:
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def post(server, form, path=None):
    """The path of the page of a question."""
    status, headers, _ = request(server, "POST", path, form)
    assert status == 303
    folder, _, _ = urlsplit(server.address).path.rpartition("/")
    return f"{folder}/{headers['Location']}"


def waits(text):
    return '<meta http-equiv="refresh"' in text


def answered(server, path):
    deadline = time.monotonic() + 120
    while waits(text := request(server, path=path)[2]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


class Typed(HTMLParser):
    """What stands in the fields of a form, read as a browser reads it."""

    def __init__(self, page):
        super().__init__()
        self.fields, self.tags, self._inside = {}, [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if tag == "input" and given.get("type") != "checkbox":
            self.fields[given["name"]] = given["value"]
        elif tag == "textarea":
            self._inside = given["name"]
            self.fields[self._inside] = ""

    def handle_data(self, data):
        if self._inside:
            self.fields[self._inside] += data

    def handle_endtag(self, tag):
        if tag == "textarea":
            self.fields[self._inside] = self.fields[self._inside].removeprefix("\n")
            self._inside = None


def fields(form):
    return {name: getattr(form, name) for name in NAMES}


def test_what_is_typed_is_answered_on_a_page_of_its_own(server, said):
    status, headers, first = request(server)
    assert status == 200
    assert said[FIRST] in first
    assert Typed(first).fields == fields(FIRST)
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    path = post(server, SECOND)
    second = answered(server, path)
    assert said[SECOND] in second
    assert Typed(second).fields == fields(SECOND)
    assert said[FIRST] in request(server)[2]  # the first page is as it was
    blank = answered(server, post(server, BLANK, path))
    assert said[BLANK] in blank
    assert Typed(blank).fields == fields(BLANK)


def test_the_page_runs_nothing_and_sends_only_to_its_server(server):
    policy = re.search(r'Security-Policy" content="([^"]*)"', request(server)[2])[1]
    assert "default-src 'none'" in policy
    assert "form-action 'self'" in policy
    assert "unsafe" not in policy


def test_only_who_has_the_address_may_ask(server):
    """No token, another one, another host (DNS rebinding), another origin, too much."""
    place = urlsplit(server.address)
    token = place.path.split("/")[1]
    assert len(token) >= 32
    pages = len(server._pages)
    for method, form in (("GET", None), ("POST", SECOND)):
        for path in ("/", "/0", "//0", f"/{token[:-1]}/0", f"/{token}x/0", "/%C3%A9/0"):
            status, _, text = request(server, method, path, form)
            assert (status, "token is missing" in text) == (403, True), path
            assert token not in text
        for host in ("evil.example", f"evil.example:{place.port}", HOST, f"{place.netloc}.x"):
            status, _, text = request(server, method, None, form, {"Host": host})
            assert (status, "another host" in text) == (403, True), host
            assert token not in text
        origins = ("https://evil.example", "null", f"http://localhost:{place.port}",
                   f"https://{place.netloc}", "http://127.0.0.1:1")  # fmt: skip
        for origin in origins:
            status, _, text = request(server, method, None, form, {"Origin": origin})
            assert (status, "another origin" in text) == (403, True), origin
            assert token not in text
    assert request(server, headers={"Host": None})[0] in (400, 403)
    for number in ("99", "-1", "x", "", "1" * 5000, "%00"):
        assert request(server, path=f"/{token}/{number}")[0] in (400, 404), number
    assert request(server, "PUT", body="x")[0] == 405
    with socket.create_connection((HOST, place.port)) as plain:  # which has sent no body yet
        head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: "
        plain.sendall(f"{head}{serve.LARGEST + 1}\r\n\r\n".encode())
        assert plain.recv(100).startswith(b"HTTP/1.1 4")
    assert len(server._pages) == pages
    local = f"localhost:{place.port}"
    assert request(server, headers={"Host": local, "Origin": f"http://{local}"})[0] == 200


def test_it_is_reached_from_this_machine_alone(server):
    assert server._socket.getsockname()[0] == "127.0.0.1"


def test_two_tabs_are_measured_one_after_the_other(measure, said):
    gate, inside, most = threading.Semaphore(1), [], []

    def slow(form):
        inside.append(form)
        most.append(len(inside))
        gate.acquire()
        try:
            return measure(form)
        finally:
            inside.remove(form)

    with serving(slow) as server:
        one, two = post(server, SECOND), post(server, FIRST)
        for path, note in ((one, "being measured. Below"), (two, "being measured after 1 other.")):
            page = request(server, path=path)[2]
            assert waits(page)
            assert note in page
            assert "<fieldset disabled>" in page
            assert said[FIRST] in page
        gate.release(2)
        for path, form in ((one, SECOND), (two, FIRST)):
            assert said[form] in answered(server, path)
    assert most == [1, 1, 1]


def test_more_than_a_few_questions_do_not_wait(measure, monkeypatch):
    monkeypatch.setattr(serve, "MOST_WAITING", 1)
    monkeypatch.setattr(serve, "MOST_PAGES", 2)
    gate = threading.Semaphore(1)

    def slow(form):
        gate.acquire()
        return measure(form)

    with serving(slow) as server:
        one, two = post(server, SECOND), post(server, SECOND)
        page = request(server, path=two)[2]
        assert not waits(page)
        assert "1 questions wait already" in page
        assert Typed(page).fields == fields(SECOND)
        paths = [post(server, SECOND) for _ in range(3)]
        gate.release()
        answered(server, one)  # which waited, and so was kept
        post(server, SECOND)
        gate.release()
        assert [request(server, path=path)[0] for path in (one, paths[-1])] == [404, 200]
        assert request(server)[0] == 200


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"answer": "w9 w10", "against": "w9"}, "do not differ in any token"),
        ({"instead": "w5 w6"}, "have 6 and 2 tokens"),
        ({"instead": FIRST.text}, "the two texts have the same tokens"),
        ({"text": "", "instead": ""}, "text"),
        ({"text": "w5 " * 99}, "answered: text has 99 tokens, the model takes at most"),
        ({"instead": "w5 " * 99}, "answered: instead has 99 tokens, the model takes at most"),
    ],
)
def test_an_error_is_a_sentence_and_nothing_typed_is_lost(server, said, change, why):
    wrong = Form(**{**fields(FIRST), **change})
    page = answered(server, post(server, wrong))
    assert "This cannot be answered: " in page
    assert why in page
    assert "Instead: another text" in page  # by which errors call it
    assert Typed(page).fields == fields(wrong)
    assert said[FIRST] in page  # the answer before
    assert said[SECOND] in answered(server, post(server, SECOND))


def test_long_texts_reach_the_server(server):
    """A form of more than 64 kB was cut off without a word: the browser showed an empty page."""
    words = " ".join(["привет"] * 6000)  # a letter is six bytes of a form
    page = answered(server, post(server, Form(words, at="9" * 5000)))
    assert Typed(page).fields["text"] == words
    note = re.search('<p class="note" role="status">(.*?)</p>', page, re.S)[1]
    assert "expected a whole number" in note or "This cannot be answered" in note
    assert len(note) < 1000


def test_a_press_on_a_token_asks_why_it_stands_there(server, measure):
    """And one on what the model says asks what comes behind it."""
    page = request(server)[2]
    words = FIRST.text.split()
    for place, word in enumerate(words):
        button = f'name="press" value="{place}" title="why this token?">{word}</button>'
        assert (button in page) == (place > 0)

    def press(name, value):
        body = urlencode({**fields(FIRST), name: value})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        _, headers, _ = request(server, "POST", None, None, kind, body)
        folder, _, _ = urlsplit(server.address).path.rpartition("/")
        return answered(server, f"{folder}/{headers['Location']}")

    pressed = press("press", "3")
    assert escape(measure(Form(FIRST.text, at="3")).summary()) in pressed
    assert f"Why &#39;{words[3]}&#39; against" in pressed
    assert Typed(pressed).fields == fields(Form(FIRST.text, at="3"))
    longer = f"{FIRST.text} w9"
    assert escape(measure(Form(longer)).summary()) in press("further", " w9")
    assert "expected a whole number, or nothing" in press("press", "x")


def test_what_follows_a_pair_stands_behind_its_second_text(measure):
    with serving(measure) as server:
        body = urlencode({"text": "w5 w6", "second": "w7", "further": " w9"})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        assert request(server, "POST", None, None, kind, body)[0] == 303
        form, _ = server._pages[1]
        assert (form.text, form.second) == ("w5 w6", "w7 w9")


def test_lines_are_cut_at_once_on_a_page_of_their_own(model, measure):
    """As the function measures it; other lines are refused, and nothing waits for ever."""
    found = measure(BLANK)
    assert len(found.bundles()) >= 2
    server = AnswerServer(measure, cut=lambda answer, lines: cut_lines(model, answer, lines))
    with serving(server=server):
        path = post(server, BLANK)
        page = answered(server, path)
        assert [f'name="cut" value="{n}"' in page for n in (0, 1, 2)] == [False, True, True]
        assert [f'id="line-{n}"' in page and f'href="#line-{n}"' in page for n in (1, 2)]

        def cut(*lines):
            body = urlencode([("do", "cut"), *(("cut", line) for line in lines)])
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            _, headers, _ = request(server, "POST", path, None, kind, body)
            folder, _, _ = urlsplit(server.address).path.rpartition("/")
            return answered(server, f"{folder}/{headers['Location']}")

        effect = cut_lines(model, found, [1, 2])
        said = cut("2", "1", "x")
        assert f"Lines 1, 2 cut at once: {effect:+.2f}" in said
        assert f"{-effect / found.gap:.0%} of the difference" in said
        assert escape(found.summary()) in said
        assert Typed(said).fields == fields(BLANK)
        for wrong in ((), ("99",)):
            assert "lines are [" in cut(*wrong)


def test_errors_of_ours_and_of_memory_end_no_server(measure, said, capsys):
    trouble = {"w5": ZeroDivisionError("x"), "w6": MemoryError()}

    def spoiled(form):
        if form.text in trouble:
            raise trouble[form.text]
        return measure(form)

    with serving(spoiled) as server:
        assert "(ZeroDivisionError)" in answered(server, post(server, Form("w5")))
        assert "Memory ran out" in answered(server, post(server, Form("w6")))
        assert said[SECOND] in answered(server, post(server, SECOND))
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", "text=%ff"),
        ("application/x-www-form-urlencoded", "&" * 5000),
        ("multipart/form-data", "x"),
        ("multipart/form-data; boundary=x", "x"),
    ],
)
def test_a_bad_request_is_refused_and_says_nothing_on_the_terminal(server, capfd, kind, body):
    """Nor the address, which holds the token."""
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    try:
        assert request(server, "POST", headers={"Content-Type": kind}, body=body)[0] == 400
    finally:
        logging.getLogger().removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    assert logged.getvalue() == ""


def test_texts_are_no_markup(server):
    evil = (
        '\n\n</textarea></form>"><script>alert(1)</script><img src=x onerror=alert(1)> {{ 7 * 7 }}'
    )
    form = Form(evil, evil.strip(), ' " autofocus onfocus=alert(1) ', "a\r\nb\tc")
    page = answered(server, post(server, form))
    found = Typed(page)
    assert found.fields == {**fields(form), "instead": "a\nb\tc"}
    assert not {"script", "img"} & set(found.tags)
    assert "49" not in found.fields["text"]


def test_the_first_question_is_refused_as_by_ask(measure):
    refused = pytest.raises(InfoFlowError, match="have 6 and 2 tokens")
    with closing(AnswerServer(measure)) as server, refused:
        server.run(Form(FIRST.text, instead="w5 w6"))
    with socket.create_server(("127.0.0.1", server._port)):  # which is free again
        pass


def test_a_port_that_is_taken_is_named(tmp_path):
    folder = str(zoo.save("llama", tmp_path / "llama"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", folder, FIRST.text, "--port", port])
    assert done.exit_code == 2
    assert f"port {port} cannot be taken" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_it_in_the_middle_of_a_question(tmp_path):
    folder = zoo.save("llama", tmp_path / "llama")
    line = ["-m", "infoflow_lens.cli", "serve", folder, FIRST.text, "--quick", "--quiet"]
    with started(*line, folder=tmp_path) as program:
        program.wait_until(lambda: "Ctrl-C" in program.stdout)
        place = urlsplit(re.search(r"open (\S+)", program.stdout)[1])
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
        text = " ".join(f"w{i}" for i in range(4, 34))
        body = urlencode({"text": text})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", place.path, body, kind)
        assert connection.getresponse().status == 303
        program.send_signal(signal.SIGINT)
        assert program.wait(120) == 0
        assert program.stderr == f"stopped: 1 not answered: {brief(text)}\n"
        connection.close()
        with pytest.raises(ConnectionError):
            socket.create_connection((place.hostname, place.port))


def test_a_browser_asks_again(browser, said, server):
    context = browser.new_context()
    try:
        page = context.new_page()
        page.set_default_timeout(60_000)
        trouble = []
        page.on("console", lambda said: trouble.append(said.text))
        page.goto(server.address)
        page.fill("[name=text]", SECOND.text)
        page.fill("[name=instead]", SECOND.instead)
        page.fill("[name=answer]", SECOND.answer)
        page.click("form button")
        page.wait_for_function(
            "said => document.querySelector('.headline').textContent === said",
            arg=said[SECOND].unescape(),
        )
        assert page.input_value("[name=against]") == "w23"
        page.fill("[name=instead]", "w5")
        page.click("form button")
        page.wait_for_selector("text=This cannot be answered")
        assert page.input_value("[name=instead]") == "w5"
        assert page.input_value("[name=text]") == SECOND.text
        assert trouble == []
    finally:
        context.close()
