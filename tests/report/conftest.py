"""Pages that must need nothing from outside."""

import pytest


@pytest.fixture
def show(browser, tmp_path):
    """Opens HTML; at the end nothing was fetched, and nothing was said on the console."""
    contexts, trouble, urls = [], [], {}

    def opened(html, width=1200, height=900, scheme="light", fragment="", **settings):
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **settings
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda said: trouble.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on(
            "request",
            lambda asked: (
                asked.url.partition("#")[0] in (path.as_uri(), "about:blank")
                or asked.url.startswith(("data:", "blob:"))
                or trouble.append(f"request: {asked.url}")
            ),
        )
        page.goto(path.as_uri() + fragment)
        urls[page] = path.as_uri()
        return page

    opened.url = urls.__getitem__
    yield opened
    for context in contexts:
        context.close()
    assert trouble == []
