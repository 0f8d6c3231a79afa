"""The status page in a real browser: what it shows, what it warns of, and what it must not do.

``KVTIERD_SCREENSHOTS=FOLDER`` keeps pictures for people to look at.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.testing.browser import Browser
from kvtierd.testing.daemon_rig import DaemonRig, chain, keys_of, layout_of, store
from kvtierd.testing.local_daemon import free_port

pytestmark = pytest.mark.slow
Make = Callable[..., DaemonRig]
EVIL = "<img src=x onerror=document.title='owned'>"
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        browser = Browser(tmp_path_factory.mktemp("profile"))
    except FileNotFoundError as error:
        pytest.skip(f"NO STATUS PAGE TESTED: {error}")
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, with nothing open and no past."""
    yield chromium
    chromium.open("about:blank")  # else the page goes on asking a daemon that is gone
    chromium.wait_for("location.href", lambda where: where == "about:blank")
    chromium.complaints.clear()
    chromium.requested.clear()


@pytest.fixture
def picture(browser: Browser) -> Callable[[str], None]:
    folder = os.environ.get("KVTIERD_SCREENSHOTS")
    return lambda name: None if folder is None else browser.picture(Path(folder) / f"{name}.png")


def serve(make: Make, **options: object) -> tuple[DaemonRig, str]:
    """Start a daemon with an admin port; return it and the page's address."""
    port = free_port()
    rig = make(changes={"admin": {"listen": f"127.0.0.1:{port}"}}, **options)
    return rig, f"http://127.0.0.1:{port}/"


def test_the_page_shows_the_daemon_wide_and_narrow_light_and_dark(
    make: Make, browser: Browser, picture: Callable[[str], None]
) -> None:
    """Nothing is cut off, nothing comes from elsewhere, nothing that an engine names runs as script."""
    rig, url = serve(make, slots=16, layout=layout_of(EVIL, 4096))
    session = rig.start().attach(engine_id=EVIL)
    for number in range(4):
        store(session, chain(8, str(number)))
    rig.settle()
    session.lookup(keys_of(chain(8, "0")))
    for name, width, dark in (
        ("wide-light", 1280, False),
        ("narrow-dark", 390, True),
        ("wide-dark", 1280, True),
    ):
        browser.look(width=width, height=900, dark=dark)
        browser.open(url)
        text = browser.wait_for(TEXT, lambda text: text and EVIL in text and "stored" in text)
        for shown in ("ready", "cpu", "disk", "All is well.", "default", "STORAGE", "scheduler", "/s"):
            if shown == "/s":
                browser.wait_for(TEXT, lambda text: "/s" in text)
            else:
                assert shown in text, shown
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), (
            f"{name}: wider than the window"
        )
        back = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 200) is dark, back
        picture(name)
    assert browser.ask("document.title") == "kvtierd"
    assert browser.ask("document.images.length") == 0
    assert browser.complaints == []
    elsewhere = [where for where in browser.requested if not where.startswith((url, "data:"))]
    assert elsewhere == []
    full = browser.ask("document.querySelector('#tiers .bar i').style.width")
    assert full == "100%"


def test_trouble_is_told_in_words_with_what_to_do(
    make: Make, browser: Browser, picture: Callable[[str], None]
) -> None:
    rig, url = serve(make, slots=16)
    (rig.folder / "disk").rmdir()
    (rig.folder / "disk").write_text("in the way")
    rig.start()
    browser.look(width=800, height=900, dark=False)
    browser.open(url)
    text = browser.wait_for(TEXT, lambda text: text and "degraded" in text)
    assert "Tier disk is degraded" in text
    assert "Repair its storage" in text
    assert "No engine is attached." in text
    picture("trouble")
    (rig.folder / "disk").unlink()
    assert rig.daemon.stop() == 0
    browser.wait_for(TEXT, lambda text: "no answer" in text)
    browser.complaints.clear()  # the browser tells of the refused connection
    rig.daemon.start()
    browser.wait_for(TEXT, lambda text: "no answer" not in text and "ready" in text)


def test_no_way_leads_from_the_page_to_a_change(make: Make) -> None:
    rig, url = serve(make)
    rig.start()
    port = int(url.rstrip("/").rpartition(":")[2])
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request(method, "/page.json", body=b"{}")
        assert connection.getresponse().status == 405
        connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/")
    headers = dict(connection.getresponse().getheaders())
    connection.close()
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
