"""Looks at the built site in a headless Chromium: ``python docs/check_in_browser.py [FOLDER]``.

Every page is opened at the width of a laptop, of a large screen and of a phone. The check fails on
messages of the console, on files that are missing or come from another host, where a page is wider
than its window, and where a heading, a formula, a table or code of at most 100 columns has to be
scrolled. On a phone what a program printed may scroll: its columns would be lost otherwise.
Then the queries of ``docs/searches.py`` are typed, each of which must find its page first, and the
way from the first page to a first update is clicked. Screenshots, light and dark, are left in
``docs/_build/screenshots``.

Needs ``requirements/docs-browser.txt`` and a Chromium: Debian's package ``chromium``, or the one
that ``playwright install chromium`` fetches. Without them it says so and exits with status 0,
since it is no part of ``.ci/run``.
"""

import functools
import http.server
import pathlib
import shutil
import sys
import threading

from searches import FIRST

HERE = pathlib.Path(__file__).parent
LAPTOP, LARGE = {"width": 1366, "height": 768}, {"width": 1920, "height": 1080}
PHONE = {"width": 390, "height": 844}
COLUMNS = 100  # code that is wider may scroll
SCROLLING = """
blocks => blocks.filter(block => block.scrollWidth > block.clientWidth + 1).map(block => [
  block.tagName == 'PRE' ? Math.max(...block.textContent.split('\\n').map(x => x.length)) : 0,
  block.textContent.trim().slice(0, 40).replaceAll('\\n', ' ')])
"""
SIZES = (LAPTOP, LARGE, PHONE)
SHOWN = (
    "index.html",
    "choose.html",
    "explain/pictures.html",
    "explain/theory.html",
    "gallery.html",
)
SHOWN += ("reference/optimizers.html", "start/quickstart.html", "explain/mesh.html")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, silently."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def serve(folder: pathlib.Path) -> http.server.ThreadingHTTPServer:
    """A server on a free port of this machine."""
    handler = functools.partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def listen(page, problems: list[str], site: str) -> None:
    """Notes what goes wrong while pages are open."""

    def console(message) -> None:
        if message.type in ("error", "warning"):
            problems.append(f"{page.url}: console: {message.text}")

    def response(answer) -> None:
        if answer.status >= 400:
            problems.append(f"{page.url}: {answer.url} has status {answer.status}")

    def request(asked) -> None:
        if not asked.url.startswith((site, "data:", "blob:")):
            problems.append(f"{page.url}: asks another host for {asked.url}")

    page.on("console", console)
    page.on("response", response)
    page.on("request", request)
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))


def overflow(page) -> int:
    """By how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def visit(page, site: str, pages: list[str], problems: list[str]) -> None:
    """Opens all pages on a laptop, a large screen and a phone, and counts what scrolls."""
    printed = ".output pre, .highlight-text pre"  # a table of columns, which scrolls on a phone
    blocks = "article .table-wrapper, article .math-block, article dt.sig, article :is(h1, h2, h3)"
    for width in (size["width"] for size in SIZES):
        page.set_viewport_size(next(size for size in SIZES if size["width"] == width))
        seen, wide, scrolling = 0, 0, []
        code = f"article pre:not({printed})" if width == PHONE["width"] else "article pre"
        for name in pages:
            page.goto(f"{site}/{name}", wait_until="load")
            if (wider := overflow(page)) > 0:
                problems.append(f"{name}: {wider} pixels wider than {width}")
            seen += page.locator(f"{code}, {blocks}").count()
            found = page.eval_on_selector_all(f"{code}, {blocks}", SCROLLING)
            wide += sum(columns > COLUMNS for columns, _ in found)
            scrolling += [f"{name} at {width}: scrolls: {x}" for n, x in found if n <= COLUMNS]
        print(f"width {width}: {seen} blocks, {len(scrolling)} scroll, and {wide} of wider code")
        problems += scrolling
    files = "links => links.map(link => link.textContent).filter(words => /\\.md$/.test(words))"
    broken = (
        "[...document.images].filter(i => !i.naturalWidth && i.loading != 'lazy').map(i => i.src)"
    )
    page.set_viewport_size(LAPTOP)
    for name in pages:
        page.goto(f"{site}/{name}", wait_until="load")
        problems += [f"{name}: picture {source} is broken" for source in page.evaluate(broken)]
        named = page.eval_on_selector_all("article a.internal", files)
        problems += [f"{name}: a link says {words}, and leads to a page" for words in named]


def search(page, site: str, problems: list[str]) -> None:
    """Types each query, and expects its page first."""
    from playwright.sync_api import TimeoutError

    wrong = []
    for query, expected in FIRST.items():
        page.goto(f"{site}/search.html?q={query.replace(' ', '+')}", wait_until="load")
        try:
            page.wait_for_selector("#search-results li a", timeout=5_000)
            found = page.locator("#search-results li a").first.get_attribute("href") or ""
        except TimeoutError:
            found = "nothing"
        if not found.startswith(f"{expected}.html"):
            wrong.append(f"search for {query!r}: first {found}, not {expected}")
    print(f"{len(FIRST)} queries, {len(FIRST) - len(wrong)} find their page first")
    problems += wrong


def click_through(page, site: str, problems: list[str]) -> None:
    """From the first page to an update, to layouts, and to the reference, by clicks alone."""
    page.goto(f"{site}/index.html", wait_until="load")
    for link, expected in (
        ("Use it", "Your first update"),
        ("write a rule", "Layouts, convolutions, experts, fused QKV"),
        ("Optimizers", "Optimizers"),
    ):
        card = f".sd-card:has-text('{link}') a"
        ways = (f"a:text-is('{link}')", f"a:has(:text-is('{link}'))", card)
        target = page.locator(", ".join(ways)).first
        with page.expect_navigation(wait_until="load"):  # the page before is loaded already
            target.evaluate("link => link.click()")
        title = page.locator("h1").first.text_content() or ""
        print(f"clicked {link!r}: {page.url.removeprefix(site)}")
        if expected not in title:
            problems.append(f"the link {link!r} leads to {title!r}")


def screenshots(browser, site: str, folder: pathlib.Path) -> None:
    """Whole pages in both modes, and the first ones on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for mode in ("light", "dark"):
        for kind, size in (("desktop", LAPTOP), ("phone", PHONE)):
            page = browser.new_page(color_scheme=mode, viewport=size)
            for name in SHOWN if kind == "desktop" else SHOWN[:3]:
                page.goto(f"{site}/{name}", wait_until="load")
                file = f"{name.removesuffix('.html').replace('/', '-')}-{kind}-{mode}.png"
                page.screenshot(path=str(folder / file))
            page.close()
    print(f"screenshots: {folder}")


def main(folder: pathlib.Path) -> int:
    """Checks a built site; the exit status."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("Not checked in a browser: pip install -r requirements/docs-browser.txt")
        return 0
    problems: list[str] = []
    pages = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*.html")
        if not str(path.relative_to(folder)).startswith(("_", "genindex", "py-modindex"))
    )
    server = serve(folder)
    site = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", "--disable-quic"]
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        except Exception as error:
            print(f"Not checked in a browser: {str(error).splitlines()[0]}")
            return 0
        page = browser.new_page()
        listen(page, problems, site)
        visit(page, site, pages, problems)
        search(page, site, problems)
        click_through(page, site, problems)
        screenshots(browser, site, HERE / "_build" / "screenshots")
        browser.close()
    server.shutdown()
    print(f"{len(pages)} pages, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    built = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "_build" / "html"
    sys.exit(main(built))
