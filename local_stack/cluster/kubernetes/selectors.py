"""Label and field selectors as the API's query strings write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from local_stack.cluster.kubernetes.errors import bad_request
from local_stack.cluster.kubernetes.resources import Resource

Predicate = Callable[[Mapping[str, Any]], bool]

_SET_TERM = re.compile(r"^\s*(?P<key>[^\s!=,()]+)\s+(?P<operator>in|notin)\s*\((?P<values>[^)]*)\)\s*$")
_EQUALITY_TERM = re.compile(r"^\s*(?P<key>[^\s!=,()]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^\s=,()]*)\s*$")
_EXISTENCE_TERM = re.compile(r"^\s*(?P<negated>!?)\s*(?P<key>[^\s!=,()]+)\s*$")


def _split_terms(selector: str) -> list[str]:
    terms, depth, current = [], 0, ""
    for character in selector:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            terms.append(current)
            current = ""
        else:
            current += character
    return [*terms, current]


def _label_term(term: str) -> Predicate:
    if match := _SET_TERM.match(term):
        key = match["key"]
        values = {value.strip() for value in match["values"].split(",")}
        if match["operator"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUALITY_TERM.match(term):
        key, value = match["key"], match["value"]
        if match["operator"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _EXISTENCE_TERM.match(term):
        key, negated = match["key"], bool(match["negated"])
        return lambda labels: (key in labels) != negated
    raise bad_request(f"unable to parse requirement: {term!r}; write key=value, key!=value, key in (a,b), key or !key")


def parse_label_selector(selector: str) -> Predicate:
    """A predicate over an object's labels. Raises 400 for a selector that cannot be read."""
    if not selector.strip():
        return lambda _labels: True
    terms = [_label_term(term) for term in _split_terms(selector)]
    return lambda labels: all(term(labels) for term in terms)


def field_value(body: Mapping[str, Any], path: str) -> str:
    """The value at a dotted path as a selector compares it: absent is empty, booleans are lower case."""
    value: Any = body
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if path == "spec.unschedulable":
        return "true" if value else "false"
    return "" if value is None else str(value)


def parse_field_selector(resource: Resource, selector: str) -> Predicate:
    """A predicate over a whole object. Raises 400 for a field that the resource cannot be selected by."""
    if not selector.strip():
        return lambda _body: True
    allowed = {"metadata.name", "metadata.namespace", *resource.selectable_fields}
    requirements = []
    for term in selector.split(","):
        match = _EQUALITY_TERM.match(term)
        if match is None:
            raise bad_request(f"invalid field selector {term!r}; write field=value or field!=value")
        if match["key"] not in allowed:
            raise bad_request(f"field label not supported: {match['key']}")
        requirements.append((match["key"], match["value"], match["operator"] != "!="))
    return lambda body: all((field_value(body, key) == value) == wanted for key, value, wanted in requirements)


def object_selector(resource: Resource, label_selector: str, field_selector: str) -> Predicate:
    """Both selectors as one predicate over a whole object."""
    labels_match = parse_label_selector(label_selector)
    fields_match = parse_field_selector(resource, field_selector)
    return lambda body: labels_match(body["metadata"].get("labels") or {}) and fields_match(body)
