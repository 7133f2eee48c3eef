"""What people see in a browser: plain HTML and CSS, no script, nothing loaded from anywhere else."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lambdas.domain.incident import Incident
from lambdas.domain.policy import Policy
from lambdas.pages.console import ConsoleFacts, console_view
from lambdas.pages.view import view_of
from truestep.contract.words import as_sentence, plainly

_HERE: Final = Path(__file__).parent


@functools.cache
def _environment() -> Environment:
    # Everything is escaped, whatever the file's name: all of it may come from an event that anyone in the account sent.
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"as_sentence": as_sentence, "plainly": plainly}
    environment.globals["css"] = Markup(_css())  # noqa: S704 - our own file
    return environment


@functools.cache
def _css() -> str:
    return (_HERE / "page.css").read_text()


def render_incident(
    incident: Incident,
    *,
    policy: Policy,
    query: Mapping[str, str],
    root: str,
    now: datetime,
    holder: str,
    quarantined: Collection[str] = (),
    follow: bool = False,
    notice: str = "",
) -> str:
    """The incident's page.

    `query` is the link's, which forms, charts and links of the page send along. `root` leads from the page to the
    folder of all incidents, relatively: the API may lie below a prefix that only the client knows. `holder`: id of the
    incident that holds the job, empty where none does. `quarantined`: the cluster's nodes in quarantine. `follow`: the
    page is being loaded again by itself. `notice` is shown on top.
    """
    view = view_of(incident, policy=policy, now=now, holder=holder, quarantined=quarantined, follow=follow)
    template = _environment().get_template("incident.html")
    return template.render(view=view, query=dict(query), root=root, notice=notice)


def render_console(facts: ConsoleFacts, *, now: datetime, until: datetime) -> str:
    """The console. until: when its link ends."""
    view = console_view(facts, now=now, until=until)
    return _environment().get_template("console.html").render(view=view)


def render_notice(title: str, text: str) -> str:
    """A page that says one thing."""
    return _environment().get_template("notice.html").render(title=title, text=as_sentence(text))


@functools.cache
def security_headers() -> Mapping[str, str]:
    """Headers of every page. The style is allowed by its hash; the signed URL is kept out of caches and referrers."""
    style = base64.b64encode(hashlib.sha256(_css().encode()).digest()).decode()
    policy = [
        "default-src 'none'",
        f"style-src 'sha256-{style}'",
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Strict-Transport-Security": "max-age=31536000",
    }
