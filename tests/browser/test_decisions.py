"""What people do with a link, in the browser they do it with."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, expect

from lambdas.domain.incident import IncidentStatus
from tests.browser.conftest import PHONE
from tests.browser.site import Site

Open = Callable[..., Page]
Keep = Callable[..., None]


def test_approving_ends_the_wait_and_leaves_a_page_that_can_be_loaded_again(
    site: Site, open_page: Open, keep: Keep
) -> None:
    link, execution = site.ask(site.incident("approve"))
    page = open_page(link)
    page.get_by_label("Comment for the record (optional)").fill("seen by two people")
    page.get_by_role("button", name="Approve: replace").click()
    expect(page.get_by_text("Approved at")).to_contain_text("seen by two people")
    assert page.get_by_role("button").count() == 0
    assert site.outcome(execution)["outcome"] == "approved"
    keep(page, "approved")
    assert page.reload() is not None
    expect(page.get_by_text("Approved at")).to_be_visible()
    assert page.get_by_text("Not recorded").count() == 0


def test_the_page_follows_the_recovery_to_its_end_and_then_stops(site: Site, open_page: Open) -> None:
    incident = site.incident("follow")
    link, execution = site.ask(incident)
    page = open_page(link)
    page.get_by_role("button", name="Approve: replace").click()
    assert site.outcome(execution)["outcome"] == "approved"
    expect(page.locator("[aria-current=step]")).to_contain_text("Replacement requested")
    assert parse_qs(urlsplit(page.url).query)["follow"] == ["yes"]
    stored = site.store.load(incident.incident_id)
    ended = stored.evolve(status=IncidentStatus.CLOSED, closed_at=stored.opened_at)
    with page.expect_navigation(timeout=15_000) as loaded:
        site.store.save(ended)
    expect(page.get_by_text("Closed at")).to_be_visible()
    assert "refresh" not in loaded.value.headers


def test_rejecting_asks_for_a_reason_and_records_it(site: Site, open_page: Open) -> None:
    incident = site.incident("reject")
    link, execution = site.ask(incident)
    page = open_page(link)
    page.get_by_role("button", name="Reject: release").click()
    assert site.waits(execution), "the browser sent a rejection without a reason"
    page.get_by_label("Reason for the record").fill("maintenance of the rack")
    page.get_by_role("button", name="Reject: release").click()
    expect(page.get_by_text("Rejected at")).to_contain_text("maintenance of the rack")
    assert site.outcome(execution)["outcome"] == "rejected"
    assert "maintenance of the rack" in site.outcome(execution)["reason"]


def test_asking_again_later_decides_nothing_and_says_when(site: Site, open_page: Open) -> None:
    incident = site.incident("later")
    link, execution = site.ask(incident)
    page = open_page(link)
    page.get_by_role("button", name="Ask me again in an hour").click()
    expect(page.get_by_text("You are asked again after")).to_be_visible()
    expect(page.get_by_role("button", name="Approve: replace")).to_be_visible()
    assert site.waits(execution)


def test_a_second_click_on_a_page_that_was_left_open_is_refused_and_says_who_was_first(
    site: Site, open_page: Open
) -> None:
    link, execution = site.ask(site.incident("twice"))
    first, second = open_page(link), open_page(link)
    first.get_by_role("button", name="Approve: replace").click()
    expect(first.get_by_text("Approved at")).to_be_visible()
    second.get_by_label("Reason for the record").fill("too late")
    second.get_by_role("button", name="Reject: release").click()
    expect(second.get_by_role("status")).to_contain_text("already approved")
    assert site.outcome(execution)["outcome"] == "approved"


def test_an_expired_and_a_tampered_link_show_no_incident(site: Site, open_page: Open) -> None:
    incident = site.incident("links")
    link, execution = site.ask(incident)
    page = open_page(site.expired_link(incident))
    expect(page.get_by_role("heading")).to_have_text("This link does not work")
    expect(page.locator("main")).to_contain_text("has expired")
    forged = link.replace("expires=", "expires=9")
    page = open_page(forged)
    expect(page.locator("main")).to_contain_text("not valid")
    assert "hyperpod-i-" not in page.content()
    assert site.waits(execution)


def test_without_javascript_on_a_phone_a_decision_is_made_by_touch(site: Site, open_page: Open, keep: Keep) -> None:
    link, execution = site.ask(site.incident("phone"))
    page = open_page(link, viewport=PHONE, java_script_enabled=False, has_touch=True, is_mobile=True)
    button = page.get_by_role("button", name="Approve: replace")
    box = button.bounding_box()
    assert box is not None
    assert box["height"] >= 44
    assert box["width"] > 300
    keep(page, "phone")
    keep(page, "phone-first-screen", full=False)
    button.tap()
    expect(page.get_by_text("Approved at")).to_be_visible()
    assert site.outcome(execution)["outcome"] == "approved"


def test_with_the_keyboard_alone_the_decision_is_reached_in_reading_order(site: Site, open_page: Open) -> None:
    link, execution = site.ask(site.incident("keyboard"))
    page = open_page(link)
    focus = "document.activeElement.name + ' ' + (document.activeElement.value || '')"
    visited = []
    for _ in range(5):
        page.keyboard.press("Tab")
        visited.append(page.evaluate(focus).strip())
    assert visited == ["comment", "decision approve", "comment", "decision reject", "decision later"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Rejected at")).to_contain_text("by keyboard")
    assert site.outcome(execution)["outcome"] == "rejected"
