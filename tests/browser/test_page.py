"""What the page shows, to whom it is readable, and what it costs to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Response, expect

from tests.browser.conftest import DESK, PHONE
from tests.browser.site import FINDING, NO_DATA, Site
from tests.browser.states import AMBIGUOUS, NUMERICS, STATES
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import Verdict, VerdictKind

Open = Callable[..., Page]
Keep = Callable[..., None]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)><b id=evil>&lt;"
BUDGET_BYTES = 200_000


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']]}" for one in found]


def load_all_pictures(page: Page) -> None:
    for picture in page.locator("img").all():
        picture.scroll_into_view_if_needed()
        expect(picture).to_have_js_property("complete", True)
        assert picture.evaluate("image => image.naturalWidth") > 0


def look(page: Page, keep: Keep, name: str, *, schemes: tuple[str, ...] = ("light", "dark")) -> None:
    """In light and in dark: keep a picture, and nothing to complain of."""
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        keep(page, f"{name}-{scheme}")
        assert violations(page) == [], scheme


@pytest.mark.parametrize(("screen", "viewport"), [("desk", DESK), ("phone", PHONE)])
def test_the_question_is_accessible_in_every_light_and_size(
    site: Site, open_page: Open, keep: Keep, screen: str, viewport: dict[str, int]
) -> None:
    link, _ = site.ask(site.incident(f"axe-{screen}"))
    page = open_page(link, viewport=viewport)
    load_all_pictures(page)
    look(page, keep, f"question-{screen}")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "the page scrolls sideways"


def test_every_other_state_is_accessible(site: Site, open_page: Open, keep: Keep) -> None:
    asked, two = site.incident("states"), site.incident("two", **AMBIGUOUS)
    link, _ = site.ask(asked)
    pages = {"ambiguous": site.ask(two)[0], "numerics": site.link(site.incident("nan", **NUMERICS))}
    asked = site.store.load(asked.incident_id)
    page = open_page(pages["ambiguous"])
    for name, url in (*pages.items(), *((name, link) for name in STATES), ("expired", site.expired_link(asked))):
        if name in STATES:
            stored = site.store.load(asked.incident_id)
            site.store.save(STATES[name](asked).evolve(version=stored.version))
        page.goto(url)
        for screen, viewport, scheme in (("desk", DESK, "dark"), ("phone", PHONE, "light")):
            page.set_viewport_size(viewport)  # type: ignore[arg-type]
            load_all_pictures(page)
            look(page, keep, f"{name}-{screen}", schemes=(scheme,))
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], f"{name}: sideways"


def test_the_first_screen_of_a_phone_says_what_and_why_and_how_long(site: Site, open_page: Open) -> None:
    link, _ = site.ask(site.incident("first-screen"))
    page = open_page(link, viewport=PHONE)
    for text in ("Silent data corruption on", "Rank 2's gradient differs", "Waiting for your decision", "GPU-00000002"):
        box = page.get_by_text(text).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < PHONE["height"], f"{text!r} is below the first screen"


def test_the_page_shows_what_is_known_and_says_where_there_is_no_data(site: Site, open_page: Open) -> None:
    link, _ = site.ask(site.incident("shows"))
    page = open_page(link)
    main = page.locator("main")
    for text in (
        "the instance, its root and secondary volumes",
        "passed, which clears nobody",
        "resume from trusted step 99; compute 21 steps again",
        "conclusive verdict",
        "inc-00000000000000aa",
        FINDING,
        NO_DATA,
    ):
        expect(main).to_contain_text(text)
    load_all_pictures(page)
    assert page.locator("figure img").count() == 3
    assert page.locator("figure .nodata").count() == 1


def test_pictures_mark_the_alarm_and_say_no_data_themselves(site: Site, open_page: Open) -> None:
    link, _ = site.ask(site.incident("pictures"))
    page = open_page(link)
    sources = [picture.evaluate("image => image.src") for picture in page.locator("img").all()]
    answers = [page.request.get(source) for source in sources]
    assert {answer.headers["content-type"] for answer in answers} == {"image/svg+xml"}
    temperature, power, errors = (answer.text() for answer in answers)
    assert "alarm" in temperature
    assert "median of the node's others" in temperature
    assert "no data" in power
    assert "none moved" in errors
    assert "<script" not in temperature + power + errors
    # By itself, since a page that is shown from a string has no policy that forbids the picture its own style.
    assert page.context.browser is not None
    alone = page.context.browser.new_page(viewport=PHONE)  # type: ignore[arg-type]
    alone.set_content(temperature)
    rights = "[...document.querySelectorAll('text')].map(text => text.getBoundingClientRect().right)"
    edge = alone.evaluate("document.querySelector('svg').getBoundingClientRect().right")
    assert max(alone.evaluate(rights)) <= edge, "a legend is cut"
    alone.close()
    tampered = page.request.get(sources[0].replace("expires=", "expires=9"))
    assert tampered.status == 403


def test_what_an_event_says_is_text_and_never_markup(site: Site, open_page: Open, keep: Keep) -> None:
    alarm = an_alarm()
    row = dataclasses.replace(alarm.suspects[0], gpu_uuid=HOSTILE, pod_name=HOSTILE)
    verdict = Verdict(kind=VerdictKind.CONCLUSIVE, reason=HOSTILE, suspects=alarm.suspect_ranks)
    link, _ = site.ask(site.incident("injection", verdict=verdict, suspects=(row,)))
    page = open_page(link)
    expect(page.locator("p.verdict")).to_have_text(f"{HOSTILE}.")
    assert page.locator("script, #evil, main img[src=x]").count() == 0
    keep(page, "injection")


def test_the_page_is_small_asks_nobody_else_and_allows_no_script(site: Site, open_page: Open) -> None:
    link, _ = site.ask(site.incident("budget"))
    page = open_page(link)
    answers: list[Response] = []
    page.on("response", lambda answer: answers.append(answer))
    first = page.reload()
    assert first is not None
    load_all_pictures(page)
    assert len(answers) == 4
    assert sum(len(answer.body()) for answer in answers) < BUDGET_BYTES
    policy = first.headers["content-security-policy"]
    assert "unsafe-inline" not in policy
    assert "script-src" not in policy
    assert policy.startswith("default-src 'none'")
